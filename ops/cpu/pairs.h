// Packs bfloat16 numbers in pairs, as the instructions that multiply them expect: two adjacent rows of right, the
// numbers of a column side by side.
#pragma once

#if !defined(__clang__)
// GCC 12 warns about _mm512_undefined_epi32 in its own header.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <cstdint>

#include "numbers.h"

namespace ms_optim::MS_OPTIM_ISA {
namespace {

// Transposes 16 by 16 numbers of 32 bits.
void Transpose(__m512i (&x)[16]) {
  __m512i y[16];
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
  // A quarter q of x[4 * i + j] has column 4 * q + j of the rows from 4 * i on.
  for (int j = 0; j < 4; ++j) {
    const __m512i even = _mm512_shuffle_i32x4(x[j], x[4 + j], 0x88), odd = _mm512_shuffle_i32x4(x[j], x[4 + j], 0xdd);
    const __m512i more_even = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0x88);
    const __m512i more_odd = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0xdd);
    y[j] = _mm512_shuffle_i32x4(even, more_even, 0x88);
    y[4 + j] = _mm512_shuffle_i32x4(odd, more_odd, 0x88);
    y[8 + j] = _mm512_shuffle_i32x4(even, more_even, 0xdd);
    y[12 + j] = _mm512_shuffle_i32x4(odd, more_odd, 0xdd);
  }
  for (int i = 0; i < 16; ++i) x[i] = y[i];
}

// Returns the mask of the first n of 16 lanes.
__mmask16 First(int64_t n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : static_cast<__mmask16>((1u << n) - 1); }

// Puts pairs of numbers of 16 columns into a panel whose rows are `width` pairs apart: `pairs` of them, and then zeros
// up to `filled`. If `columns` is less than 16, the other columns are zeros. The numbers of column j are adjacent, from
// `from + j * stride` on.
void PackColumns(const bfloat16 *from, int64_t stride, int64_t columns, int64_t pairs, int64_t filled, int64_t width,
                 float *panel) {
  for (int64_t i = 0; i < filled; i += 16) {
    const __mmask16 there = First(pairs - i);
    __m512i x[16];
    for (int64_t j = 0; j < 16; ++j) {
      x[j] = j < columns ? _mm512_maskz_loadu_epi32(there, from + j * stride + 2 * i) : _mm512_setzero_si512();
    }
    Transpose(x);
    for (int64_t j = 0; j < 16 && i + j < filled; ++j) _mm512_storeu_si512(panel + (i + j) * width, x[j]);
  }
}

// Does the same if the numbers of row i are adjacent, from `from + i * stride` on.
void PackRows(const bfloat16 *from, int64_t stride, int64_t columns, int64_t pairs, int64_t filled, int64_t width,
              float *panel) {
  const __mmask16 there = First(columns);
  for (int64_t i = 0; i < pairs; ++i) {
    const bfloat16 *row = from + 2 * i * stride;
    const __m512i first = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, row));
    const __m512i second = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, row + stride));
    _mm512_storeu_si512(panel + i * width, _mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
  }
  for (int64_t i = pairs; i < filled; ++i) _mm512_storeu_si512(panel + i * width, _mm512_setzero_si512());
}

}  // namespace
}  // namespace ms_optim::MS_OPTIM_ISA
