// This file is compiled once for each instruction set, whose name is MS_OPTIM_ISA.
#include "products.h"

#include <cstring>
#include <type_traits>

#if defined(__AVX512BF16__)
#include "pairs.h"
#endif
#if defined(__AMX_BF16__)
#include "tiles.h"
#endif

namespace ms_optim::MS_OPTIM_ISA {
namespace {

// The sums fill the registers that the factors leave free.
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kPanelRows = 8;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32, kPanelRows = 4;
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16, kPanelRows = 8;
#else
constexpr int kVectorBytes = 16, kPanelRows = 4;
#endif
constexpr int kWidth = kVectorBytes / static_cast<int>(sizeof(float)), kVectors = 3, kPanel = kWidth * kVectors;
typedef float Vector __attribute__((vector_size(kVectorBytes)));
// A vector at any address. Where memcpy copies one, GCC may copy its halves and wait until they are whole.
typedef float VectorInMemory __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
static_assert(kTileColumns % kPanel == 0 && kTileDepth % 2 == 0, "a tile holds whole panels, of whole pairs");

int64_t Least(int64_t a, int64_t b) { return a < b ? a : b; }

// The multiplication of a type: each Unit of numbers of a row of left is multiplied by the columns of a panel of as
// many rows of right, which Pack has put side by side. A type without one is widened to float.
template <class T>
struct Kind {
  typedef float Factor;
  typedef float Unit;
  static constexpr int kDepth = 1;
  static Vector MultiplyAdd(Vector sum, float left, Vector right) { return sum + left * right; }
};

#if defined(__AVX512BF16__)
template <>
struct Kind<bfloat16> {
  typedef bfloat16 Factor;
  typedef uint32_t Unit;
  static constexpr int kDepth = 2;
  static Vector MultiplyAdd(Vector sum, uint32_t left, Vector right) {
    const __m512i pairs = _mm512_set1_epi32(static_cast<int>(left));
    return reinterpret_cast<Vector>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(pairs),
                                                     reinterpret_cast<__m512bh>(right)));
  }
};
#endif

// Adds the products of a part of the depth to the sums of some rows and a panel of columns.
template <class T, int kRows>
void AddPanel(int64_t depth, const T *left, int64_t stride, const float *__restrict panel, float *__restrict sums) {
  typedef typename Kind<T>::Unit Unit;
  const auto at = [](const float *numbers, int v) {
    return reinterpret_cast<const VectorInMemory *>(numbers + v * kWidth);
  };
  Vector sum[kRows][kVectors];
  const T *row[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[r][v] = *at(sums + r * kTileColumns, v);
    row[r] = left + r * stride;
  }
  for (int64_t k = 0; k < depth; k += Kind<T>::kDepth, panel += kPanel) {
    Vector right[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) right[v] = *at(panel, v);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      Unit unit;
      memcpy(&unit, row[r] + k, sizeof(unit));
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[r][v] = Kind<T>::MultiplyAdd(sum[r][v], unit, right[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) memcpy(sums + r * kTileColumns + v * kWidth, &sum[r][v], sizeof(Vector));
  }
}

template <class T, int kRows = kPanelRows>
void AddRows(int64_t rows, int64_t depth, const T *left, int64_t stride, const float *panel, float *sums) {
  if (rows >= kRows) return AddPanel<T, kRows>(depth, left, stride, panel, sums);
  if constexpr (kRows > 1) AddRows<T, kRows - 1>(rows, depth, left, stride, panel, sums);
}

// Packs the columns of a tile into panels, one after the other, of `units` units each, filled up with zeros.
template <class T>
void Pack(const Product<T> &p, int64_t first_row, int64_t rows, int64_t first_column, int64_t columns, int64_t units,
          float *panel) {
  for (int64_t first = 0; first < columns; first += kPanel, panel += units * kPanel) {
    const int64_t count = Least(kPanel, columns - first);
    if (count < kPanel) memset(panel, 0, static_cast<size_t>(units * kPanel) * 4);
    if (p.transposed) {
      for (int64_t j = 0; j < count; ++j) {
        const T *from = p.right + (first_column + first + j) * p.depth + first_row;
        for (int64_t i = 0; i < rows; ++i) panel[i * kPanel + j] = ToFloat(from[i]);
      }
    } else {
      for (int64_t i = 0; i < rows; ++i) {
        const T *from = p.right + (first_row + i) * p.columns + first_column + first;
        for (int64_t j = 0; j < count; ++j) panel[i * kPanel + j] = ToFloat(from[j]);
      }
    }
  }
}

#if defined(__AVX512BF16__)
template <>
void Pack(const Product<bfloat16> &p, int64_t first_row, int64_t rows, int64_t first_column, int64_t columns,
          int64_t units, float *panel) {
  for (int64_t first = 0; first < columns; first += kWidth) {
    const int64_t count = columns - first, column = first_column + first;
    float *to = panel + first / kPanel * units * kPanel + first % kPanel;
    if (p.transposed) {
      PackColumns(p.right + column * p.depth + first_row, p.depth, count, rows / 2, units, kPanel, to);
    } else {
      PackRows(p.right + first_row * p.columns + column, p.columns, count, rows / 2, units, kPanel, to);
    }
  }
}
#endif

// Writes some rows of a tile; if the result is symmetric, also their mirror image in its upper half.
template <class T>
void FinishRows(const Product<T> &p, int64_t row, int64_t column, int64_t rows, int64_t columns, const float *sums) {
  for (int64_t r = row; r < row + rows; ++r, sums += kTileColumns) {
    T *result = p.result + r * p.columns + column;
    if (p.added == nullptr) {
      for (int64_t c = 0; c < columns; ++c) Store(p.scale * sums[c], &result[c]);
    } else {
      const T *added = p.added + r * p.columns + column;
      for (int64_t c = 0; c < columns; ++c) Store(p.scale * sums[c] + p.added_scale * ToFloat(added[c]), &result[c]);
    }
  }
  if (!p.symmetric) return;
  for (int64_t c = column; c < Least(column + columns, row + rows); ++c) {
    // The loop goes column by column, so that writes are adjacent.
    for (int64_t r = row > c ? row : c + 1; r < row + rows; ++r) {
      p.result[c * p.columns + r] = p.result[r * p.columns + c];
    }
  }
}

template <class T>
void Finish(const Product<T> &p, int64_t row, int64_t column, int64_t rows, int64_t columns, const float *sums) {
  constexpr int64_t kAtOnce = 32;  // the first-level cache holds these
  for (int64_t r = 0; r < rows; r += kAtOnce) {
    FinishRows(p, row + r, column, Least(kAtOnce, rows - r), columns, sums + r * kTileColumns);
  }
}

template <class T>
void Compute(const Product<T> &p, int64_t row, int64_t column, ProductBuffers &buffers) {
  const int64_t rows = Least(kTileRows, p.rows - row), columns = Least(kTileColumns, p.columns - column);
  memset(buffers.sums, 0, static_cast<size_t>(rows * kTileColumns) * sizeof(float));
  for (int64_t k = 0; k < p.depth; k += kTileDepth) {
    const int64_t depth = Least(kTileDepth, p.depth - k), units = depth / Kind<T>::kDepth;
    Pack(p, k, depth, column, columns, units, buffers.panel);
    for (int64_t r = 0; r < rows; r += kPanelRows) {
      const int64_t count = Least(kPanelRows, rows - r);
      const T *left = p.left + (row + r) * p.depth + k;
      const auto add = [&](const auto *numbers, int64_t stride) {
        for (int64_t c = 0; c < columns; c += kPanel) {
          AddRows(count, depth, numbers, stride, buffers.panel + c * units, buffers.sums + r * kTileColumns + c);
        }
      };
      if constexpr (std::is_same<typename Kind<T>::Factor, T>::value) {
        add(left, p.depth);
      } else {
        float widened[kPanelRows * kTileDepth];
        for (int64_t i = 0; i < count; ++i) {
          for (int64_t j = 0; j < depth; ++j) widened[i * kTileDepth + j] = ToFloat(left[i * p.depth + j]);
        }
        add(widened, kTileDepth);
      }
    }
  }
  Finish(p, row, column, rows, columns, buffers.sums);
}

#if defined(__AMX_BF16__)
void ComputeInTiles(const Product<bfloat16> &p, int64_t row, int64_t column, ProductBuffers &buffers) {
  static_assert(kTileRows % (2 * kSide) == 0 && kWidth == kSide, "sums have room for whole tiles");
  constexpr int64_t kDepth = 2 * kTileDepth;  // of half as many bytes each
  const Tiles tiles;
  const int64_t rows = Least(kTileRows, p.rows - row), columns = Least(kTileColumns, p.columns - column);
  memset(buffers.sums, 0, static_cast<size_t>((rows + kSide - 1) / kSide * kSide * kTileColumns) * sizeof(float));
  for (int64_t k = 0; k < p.depth; k += kDepth) {
    const int64_t depth = Least(kDepth, p.depth - k), units = (depth + kStep - 1) / kStep * (kStep / 2);
    Pack(p, k, depth, column, columns, units, buffers.panel);
    const auto panel = [&](int64_t c) { return buffers.panel + c / kPanel * units * kPanel + c % kPanel; };
    for (int64_t r = 0; r < rows; r += 2 * kSide) {
      for (int64_t c = 0; c < columns; c += 2 * kSide) {
        const bool two_columns = c + kSide < columns;
        const float *const panels[] = {panel(c), panel(two_columns ? c + kSide : c)};
        AddTiles(p, row + r, k, depth, r + kSide < rows, two_columns, panels, kPanel,
                 buffers.sums + r * kTileColumns + c);
      }
    }
  }
  Finish(p, row, column, rows, columns, buffers.sums);
}
#endif

}  // namespace

#if defined(__AMX_BF16__)
const Products products = {Compute<float>, ComputeInTiles};
#else
const Products products = {Compute<float>, Compute<bfloat16>};
#endif

}  // namespace ms_optim::MS_OPTIM_ISA
