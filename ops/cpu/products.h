// Products of matrices. They are compiled once for each instruction set, apart from the kernels, since here products
// are contracted into fused multiply-adds.
#pragma once

#include <cstdint>

#include "numbers.h"

namespace ms_optim {

// result = scale * left * right + added_scale * added, of dense matrices in row-major order. T is float or bfloat16,
// for which depth is even. Sums are float32 for both, each over depth in order: its bits depend on no other element and
// on no thread.
template <class T>
struct Product {
  const T *left;   // [rows, depth]
  const T *right;  // [depth, columns], or [columns, depth] if it is transposed
  const T *added;  // [rows, columns]; null: nothing is added
  T *result;       // [rows, columns]
  int64_t rows, columns, depth;
  bool transposed;  // right is given transposed
  bool symmetric;   // the result is symmetric: its lower half is computed, and copied to the upper one
  float scale, added_scale;
};

// The most rows and columns of a part of a result that one thread computes, and the depth that it takes at a time.
constexpr int64_t kTileRows = 384, kTileColumns = 96, kTileDepth = 256;

struct alignas(64) ProductBuffers {
  float panel[kTileDepth * kTileColumns];
  float sums[kTileRows * kTileColumns];
};

struct Products {
  void (*of_float32)(const Product<float> &, int64_t row, int64_t column, ProductBuffers &);
  void (*of_bfloat16)(const Product<bfloat16> &, int64_t row, int64_t column, ProductBuffers &);

  void Compute(const Product<float> &p, int64_t row, int64_t column, ProductBuffers &b) const {
    of_float32(p, row, column, b);
  }
  void Compute(const Product<bfloat16> &p, int64_t row, int64_t column, ProductBuffers &b) const {
    of_bfloat16(p, row, column, b);
  }
};

namespace amx {
extern const Products products;
}
namespace avx512bf16 {
extern const Products products;
}
namespace avx512 {
extern const Products products;
}
namespace avx2 {
extern const Products products;
}
namespace baseline {
extern const Products products;
}

// Returns the products of the chosen kernels.
const Products &ChosenProducts();

}  // namespace ms_optim
