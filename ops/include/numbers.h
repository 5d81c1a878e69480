// Storage types and the few scalar helpers that the rules need on a CPU and on a GPU alike.
//
// Arithmetic is float32 throughout; float16 and bfloat16 are how a tensor may be stored. The
// conversions select between results instead of branching, so that compilers vectorize them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// glibc 2.29 has these again, under their old names. The first ones give the same bits, and are in every
// glibc that MindSpore runs on.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__CUDACC__)
__asm__(".symver exp, exp@GLIBC_2.2.5");
__asm__(".symver log, log@GLIBC_2.2.5");
__asm__(".symver pow, pow@GLIBC_2.2.5");
#endif

// Rules and helpers are inlined into every kernel. The same header is compiled once per instruction set, and the linker
// would keep one copy, for all sets, of a function that has a symbol.
#if defined(__CUDACC__)
#define MS_OPTIM_FN __host__ __device__ __forceinline__
#else
#define MS_OPTIM_FN __attribute__((always_inline)) inline
#endif

// A function that calls a function it is given. For a GPU, that runs on the device alone.
#if defined(__CUDACC__)
#define MS_OPTIM_CALLER __device__ __forceinline__
#else
#define MS_OPTIM_CALLER MS_OPTIM_FN
#endif

namespace ms_optim {

struct float16 {
  uint16_t bits;
};
struct bfloat16 {
  uint16_t bits;
};

MS_OPTIM_FN uint32_t BitsOf(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}

MS_OPTIM_FN float FromBits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

MS_OPTIM_FN float ToFloat(float x) { return x; }

MS_OPTIM_FN float ToFloat(bfloat16 x) { return FromBits(static_cast<uint32_t>(x.bits) << 16); }

MS_OPTIM_FN float ToFloat(float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  const uint32_t exponent = magnitude & 0x0f800000u;
  const uint32_t normal = magnitude + ((127u - 15u) << 23);
  const uint32_t special = normal + ((128u - 16u) << 23);  // infinity and NaN
  // A subnormal float16 is mantissa * 2^-24: subtracting the implicit one renormalizes it.
  const uint32_t subnormal = BitsOf(FromBits(normal + (1u << 23)) - FromBits(113u << 23));
  const uint32_t bits = exponent == 0x0f800000u ? special : (exponent == 0u ? subnormal : normal);
  return FromBits(sign | bits);
}

// Round to nearest, ties to even.
MS_OPTIM_FN void Store(float x, float *out) { *out = x; }

MS_OPTIM_FN uint32_t BFloat16Bits(float x) {
  const uint32_t bits = BitsOf(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  return (bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded;
}

MS_OPTIM_FN void Store(float x, bfloat16 *out) { out->bits = static_cast<uint16_t>(BFloat16Bits(x)); }

MS_OPTIM_FN void Store(float x, float16 *out) {
  const uint32_t sign = BitsOf(x) & 0x80000000u;
  const uint32_t magnitude = BitsOf(x) ^ sign;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  // Adding 0.5 lets the floating-point unit do the rounding of a subnormal result.
  const uint32_t subnormal = BitsOf(FromBits(magnitude) + 0.5f) - BitsOf(0.5f);
  const uint32_t odd = (magnitude >> 13) & 1u;
  const uint32_t normal = (magnitude - ((127u - 15u) << 23) + 0xfffu + odd) >> 13;
  const uint32_t bits = magnitude >= 0x47800000u ? special : (magnitude < 0x38800000u ? subnormal : normal);
  out->bits = static_cast<uint16_t>(bits | (sign >> 16));
}

MS_OPTIM_FN float Sqrt(float x) { return sqrtf(x); }

// Comparisons written out, so that a NaN in x survives and the compiler may use vector selects.
MS_OPTIM_FN float Clamp(float x, float low, float high) {
  const float raised = x < low ? low : x;
  return raised > high ? high : raised;
}

// Tells whether a sum of squares in float32 has lost nothing: there, squares overflow from 1.8e19 on and vanish below
// 1e-23.
MS_OPTIM_FN bool IsExact(double sum_squares) { return sum_squares > 1e-30 && sum_squares < 1e38; }

template <class A, class B>
MS_OPTIM_FN auto Min(A a, B b) -> decltype(a + b) {
  return a < b ? a : b;
}

template <class A, class B>
MS_OPTIM_FN auto Max(A a, B b) -> decltype(a + b) {
  return a > b ? a : b;
}

}  // namespace ms_optim
