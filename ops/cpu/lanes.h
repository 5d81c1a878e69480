// Sums that come out bitwise the same whatever the instruction set.
//
// Every sum runs over 16 lanes, element i in lane i mod 16, and the lanes are added in order: AVX-512 holds
// them in one register, AVX2 in two, SSE and NEON in four. Products are not contracted into fused
// multiply-adds (the build says -ffp-contract=off), so each lane rounds alike everywhere.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "numbers.h"

// Stands before a loop and tells the compiler that no iteration reads a number that another one writes.
#if defined(__clang__)
#define MS_OPTIM_IVDEP _Pragma("clang loop vectorize(assume_safety)")
#else
#define MS_OPTIM_IVDEP _Pragma("GCC ivdep")
#endif

namespace ms_optim {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

constexpr int kLanes = 16;

template <class T>
MS_OPTIM_FN double SumOfLanes(const T *lane) {
  double total = 0.0;
  for (int i = 0; i < kLanes; ++i) total += static_cast<double>(lane[i]);
  return total;
}

struct Lanes {
  typedef float Vector __attribute__((vector_size(kVectorBytes)));
  static constexpr int kWidth = kVectorBytes / static_cast<int>(sizeof(float));
  static constexpr int kParts = kLanes / kWidth;
  Vector part[kParts] = {};

  MS_OPTIM_FN static Vector Load(const float *x) {
    Vector v;
    memcpy(&v, x, sizeof(v));
    return v;
  }
  MS_OPTIM_FN double Total() const {
    float lane[kLanes];
    memcpy(lane, part, sizeof(lane));
    return SumOfLanes(lane);
  }
};

// Converts bytes to numbers and back. Conversions of vectors are written out, since compilers do not vectorize so short
// a loop over types of such different widths. They have two steps, since compilers convert in a single step element by
// element.
template <class T>
using LanesOf [[gnu::vector_size(kLanes * sizeof(T))]] = T;

// AVX-512 has an instruction for each, and AVX2 has shorter ways, which compilers do not find. Bytes are the lowest
// bits of a number, whatever is above them; shorts must be able to hold it.
template <class T>
MS_OPTIM_FN void Widen(const T *from, int32_t (&to)[kLanes]) {
#if defined(__AVX512F__)
  const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
  const __m512i numbers = std::is_signed<T>::value ? _mm512_maskz_cvtepi8_epi32(0xffff, packed)
                                                   : _mm512_maskz_cvtepu8_epi32(0xffff, packed);
  memcpy(to, &numbers, sizeof(numbers));
#elif defined(__AVX2__)
  for (int half = 0; half < 2; ++half) {
    const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(from + 8 * half));
    const __m256i numbers = std::is_signed<T>::value ? _mm256_cvtepi8_epi32(packed) : _mm256_cvtepu8_epi32(packed);
    memcpy(to + 8 * half, &numbers, sizeof(numbers));
  }
#else
  LanesOf<T> bytes;
  memcpy(&bytes, from, sizeof(bytes));
  const auto wide = __builtin_convertvector(__builtin_convertvector(bytes, LanesOf<int16_t>), LanesOf<int32_t>);
  memcpy(to, &wide, sizeof(wide));
#endif
}

template <class T>
MS_OPTIM_FN void Narrow(const int32_t (&from)[kLanes], T *to) {
#if defined(__AVX512F__)
  __m512i wide;
  memcpy(&wide, from, sizeof(wide));
  const __m128i packed = _mm512_maskz_cvtepi32_epi8(0xffff, wide);
  memcpy(to, &packed, sizeof(packed));
#elif defined(__AVX2__)
  // Of each half, the lowest bytes move to the first or second four bytes of each 16, and then side by side.
  const __m256i lowest = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                          0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i second = _mm256_setr_epi8(-1, -1, -1, -1, 0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                          -1, -1, -1, -1, 0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1);
  __m256i half[2];
  memcpy(half, from, sizeof(half));
  const __m256i bytes = _mm256_or_si256(_mm256_shuffle_epi8(half[0], lowest), _mm256_shuffle_epi8(half[1], second));
  const __m256i ordered = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 0, 0, 0, 0));
  memcpy(to, &ordered, kLanes);
#else
  LanesOf<int32_t> wide;
  memcpy(&wide, from, sizeof(wide));
  const auto bytes = __builtin_convertvector(__builtin_convertvector(wide, LanesOf<int16_t>), LanesOf<T>);
  memcpy(to, &bytes, sizeof(bytes));
#endif
}

// Converts numbers of 4 bits, two in a byte, the first in its lower bits: first to bytes, and these as above. Vectors
// of shorts hold the pairs of bytes, since compilers know no shuffle of lanes for this.
typedef uint8_t PackedLanes __attribute__((vector_size(kLanes / 2)));
typedef uint16_t PairsOfLanes __attribute__((vector_size(kLanes)));

template <class T>
MS_OPTIM_FN void WidenNibbles(const void *from, int32_t (&to)[kLanes]) {
#if defined(__aarch64__)
  // GCC would widen 8 bytes one by one.
  PairsOfLanes pairs = vmovl_u8(vld1_u8(static_cast<const uint8_t *>(from)));
#else
  PackedLanes packed;
  memcpy(&packed, from, sizeof(packed));
  PairsOfLanes pairs = __builtin_convertvector(packed, PairsOfLanes);
#endif
  pairs = (pairs | (pairs << 4)) & 0x0f0f;
  LanesOf<T> bytes;
  memcpy(&bytes, &pairs, sizeof(bytes));
  if (std::is_signed<T>::value) bytes = (bytes ^ 8) - 8;
  T numbers[kLanes];
  memcpy(numbers, &bytes, sizeof(numbers));
  Widen(numbers, to);
}

MS_OPTIM_FN void NarrowNibbles(const int32_t (&from)[kLanes], void *to) {
  uint8_t numbers[kLanes];
  Narrow(from, numbers);
  PairsOfLanes pairs;
  memcpy(&pairs, numbers, sizeof(pairs));
  pairs &= 0x0f0f;
  const auto packed = __builtin_convertvector(pairs | (pairs >> 4), PackedLanes);
  memcpy(to, &packed, sizeof(packed));
}

template <class T>
MS_OPTIM_FN void WidenShorts(const T *from, int32_t (&to)[kLanes]) {
  static_assert(sizeof(T) == sizeof(int16_t), "shorts");
#if defined(__AVX2__) && !defined(__AVX512F__)
  for (int half = 0; half < 2; ++half) {
    const __m128i shorts = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from + 8 * half));
    const __m256i numbers = std::is_signed<T>::value ? _mm256_cvtepi16_epi32(shorts) : _mm256_cvtepu16_epi32(shorts);
    memcpy(to + 8 * half, &numbers, sizeof(numbers));
  }
#else
  LanesOf<std::conditional_t<std::is_signed<T>::value, int16_t, uint16_t> > shorts;
  memcpy(&shorts, from, sizeof(shorts));
  const auto wide = __builtin_convertvector(shorts, LanesOf<int32_t>);
  memcpy(to, &wide, sizeof(wide));
#endif
}

template <class T>
MS_OPTIM_FN void NarrowToShorts(const int32_t (&from)[kLanes], T *to) {
  static_assert(sizeof(T) == sizeof(int16_t), "shorts");
#if defined(__AVX2__) && !defined(__AVX512F__)
  __m256i half[2];
  memcpy(half, from, sizeof(half));
  const bool is_signed = std::is_signed<T>::value;
  const __m256i packed = is_signed ? _mm256_packs_epi32(half[0], half[1]) : _mm256_packus_epi32(half[0], half[1]);
  const __m256i ordered = _mm256_permute4x64_epi64(packed, 0xd8);
  memcpy(to, &ordered, sizeof(ordered));
#else
  LanesOf<int32_t> wide;
  memcpy(&wide, from, sizeof(wide));
  const auto shorts = __builtin_convertvector(wide, LanesOf<uint16_t>);
  memcpy(to, &shorts, sizeof(shorts));
#endif
}

// Returns a sum in float64: a mean is subtracted from numbers that may be close to it, and the difference would show
// its error.
MS_OPTIM_FN double Sum(const float *x, int n) {
  typedef double Vector __attribute__((vector_size(kVectorBytes)));
  constexpr int kWidth = kVectorBytes / static_cast<int>(sizeof(double)), kParts = kLanes / kWidth;
  // Fewer than four floats would be converted one by one.
  constexpr int kAtOnce = kWidth < 4 ? 4 : kWidth, kVectors = kAtOnce / kWidth;
  typedef float Floats __attribute__((vector_size(kAtOnce * sizeof(float))));
  typedef double Doubles __attribute__((vector_size(kAtOnce * sizeof(double))));
  Vector part[kParts] = {};
  const int whole = n / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes) {
    for (int k = 0; k < kParts; k += kVectors) {
      Floats v;
      memcpy(&v, x + i + k * kWidth, sizeof(v));
      const Doubles wide = __builtin_convertvector(v, Doubles);
      Vector vectors[kVectors];
      memcpy(vectors, &wide, sizeof(wide));
      for (int j = 0; j < kVectors; ++j) part[k + j] += vectors[j];
    }
  }
  double lane[kLanes];
  memcpy(lane, part, sizeof(lane));
  double total = SumOfLanes(lane);
  for (int i = whole; i < n; ++i) total += static_cast<double>(x[i]);
  return total;
}

// Returns a sum of squares in float64, in which the squares of float32 numbers always fit.
double ExactSumSquares(const float *x, int n) {
  uint32_t any = 0;
  for (int i = 0; i < n; ++i) any |= BitsOf(x[i]) << 1;
  if (any == 0) return 0.0;
  double lane[kLanes] = {};
  for (int i = 0; i < n; ++i) lane[i % kLanes] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return SumOfLanes(lane);
}

// Computes a sum again if it may have lost something. The result is finite if and only if all elements are.
MS_OPTIM_FN double ExactWhereLost(double sum_squares, const float *x, int n) {
  return IsExact(sum_squares) ? sum_squares : ExactSumSquares(x, n);
}

MS_OPTIM_FN double SumSquares(const float *x, int n) {
  Lanes sum;
  const int whole = n / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes) {
    for (int k = 0; k < Lanes::kParts; ++k) {
      const Lanes::Vector part = Lanes::Load(x + i + k * Lanes::kWidth);
      sum.part[k] += part * part;
    }
  }
  double total = sum.Total();
  for (int i = whole; i < n; ++i) total += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return ExactWhereLost(total, x, n);
}

}  // namespace
}  // namespace ms_optim
