// Sums of products of bfloat16 numbers in the processor's tiles (AMX): 16 by 16 sums, to each of which 32 products are
// added at once.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "products.h"

namespace ms_optim::MS_OPTIM_ISA {
namespace {

constexpr int64_t kSide = 16, kStep = 32;  // rows and columns of a tile of sums; depth of a tile of left

// Gives tiles their shape on this thread, 16 rows of 64 bytes each, and frees them.
class Tiles {
 public:
  Tiles() {
    struct alignas(64) {
      uint8_t palette, first_row, reserved[14];
      uint16_t bytes[16];
      uint8_t rows[16];
    } shapes = {};
    shapes.palette = 1;
    for (int i = 0; i < 8; ++i) {
      shapes.bytes[i] = 64;
      shapes.rows[i] = 16;
    }
    _tile_loadconfig(&shapes);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles &) = delete;
  Tiles &operator=(const Tiles &) = delete;
};

// 16 rows of left.
struct LeftRows {
  const bfloat16 *numbers;
  int64_t bytes;  // from one row to the next
};

// Returns rows of left where they are, or a copy in `room`, filled up with zeros.
LeftRows RowsOf(const Product<bfloat16> &p, int64_t row, int64_t k, bfloat16 *room) {
  const bfloat16 *from = p.left + row * p.depth + k;
  const int64_t rows = p.rows - row < kSide ? p.rows - row : kSide;
  const int64_t depth = p.depth - k < kStep ? p.depth - k : kStep;
  if (rows == kSide && depth == kStep) return {from, p.depth * 2};
  memset(room, 0, kSide * kStep * 2);
  for (int64_t r = 0; r < rows; ++r) memcpy(room + r * kStep, from + r * p.depth, static_cast<size_t>(depth) * 2);
  return {room, kStep * 2};
}

// Adds the products of the depth from k on to 16 or 32 rows of 16 or 32 columns. `panels` points to each 16 columns, in
// pairs whose rows are `width` apart.
template <bool kTwoRows, bool kTwoColumns>
void AddTiles(const Product<bfloat16> &p, int64_t row, int64_t k, int64_t depth, const float *const *panels, int width,
              float *sums) {
  constexpr int kStride = kTileColumns * 4;
  const float *first = panels[0], *second = panels[1];
  float *below = sums + kSide * kTileColumns;
  alignas(64) bfloat16 room[kSide * kStep];
  _tile_loadd(0, sums, kStride);
  if constexpr (kTwoColumns) _tile_loadd(1, sums + kSide, kStride);
  if constexpr (kTwoRows) _tile_loadd(2, below, kStride);
  if constexpr (kTwoRows && kTwoColumns) _tile_loadd(3, below + kSide, kStride);
  for (int64_t i = 0; i < depth; i += kStep) {
    const LeftRows upper = RowsOf(p, row, k + i, room);
    _tile_loadd(4, upper.numbers, upper.bytes);
    _tile_loadd(6, first, width * 4);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kTwoColumns) {
      _tile_loadd(7, second, width * 4);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kTwoRows) {
      const LeftRows lower = RowsOf(p, row + kSide, k + i, room);
      _tile_loadd(5, lower.numbers, lower.bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kTwoColumns) _tile_dpbf16ps(3, 5, 7);
    }
    first += kStep / 2 * width;
    second += kStep / 2 * width;
  }
  _tile_stored(0, sums, kStride);
  if constexpr (kTwoColumns) _tile_stored(1, sums + kSide, kStride);
  if constexpr (kTwoRows) _tile_stored(2, below, kStride);
  if constexpr (kTwoRows && kTwoColumns) _tile_stored(3, below + kSide, kStride);
}

// Does the same for as many of 32 rows and columns as there are.
void AddTiles(const Product<bfloat16> &p, int64_t row, int64_t k, int64_t depth, bool two_rows, bool two_columns,
              const float *const *panels, int width, float *sums) {
  if (two_rows && two_columns) {
    AddTiles<true, true>(p, row, k, depth, panels, width, sums);
  } else if (two_rows) {
    AddTiles<true, false>(p, row, k, depth, panels, width, sums);
  } else if (two_columns) {
    AddTiles<false, true>(p, row, k, depth, panels, width, sums);
  } else {
    AddTiles<false, false>(p, row, k, depth, panels, width, sums);
  }
}

}  // namespace
}  // namespace ms_optim::MS_OPTIM_ISA
