// States in fewer bits: bfloat16, and 8-bit codes with one float32 scale for each block of 256.
//
// A moving average changes by less in a step than numbers of so few bits are apart: rounding to nearest would keep it
// where it is. So rounding is stochastic, with noise from a hash of seed, step, tensor and element. It is unbiased, and
// the same for any number of threads and in a run that resumes.
//
// A code holds the upper bits of the float32 number z = |x| / scale + delta, minus those of delta. From delta up, codes
// are small floating-point numbers with 3 bits of mantissa; below delta they are evenly spaced; 0 has the code 0.
// Encoding is an addition and a shift, and so is decoding.
#pragma once

#include "numbers.h"

namespace ms_optim {

constexpr int64_t kCodeBlock = 256;  // codes that share one scale

// A hash whose every output bit depends on every input bit (Wellons' lowbias32).
MS_OPTIM_FN constexpr uint32_t Hash(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

constexpr uint32_t kNoises = 1024;

// The noise of one tensor in one step: for each element 32 random bits, from which each array takes 16.
struct Noise {
  uint32_t key = 0;

  Noise() = default;
  MS_OPTIM_FN Noise(int64_t seed, int64_t step, int64_t row)
      : key(Hash(Hash(Hash(static_cast<uint32_t>(seed)) + static_cast<uint32_t>(step)) + static_cast<uint32_t>(row))) {}
  // Mixes two hashes: that of the element's place in its group of 1,024, which a table may hold, and that of the group.
  MS_OPTIM_FN uint32_t At(int64_t element) const {
    return Hash(static_cast<uint32_t>(element) & (kNoises - 1u)) ^ Above(element);
  }
  MS_OPTIM_FN uint32_t Above(int64_t element) const { return Hash(key + static_cast<uint32_t>(element / kNoises)); }
};

enum NoiseUse { kFirstState, kSecondState, kThirdState, kWeight };

MS_OPTIM_FN uint32_t NoiseFor(NoiseUse use, uint32_t bits) {
  if (use == kFirstState) return bits & 0xffffu;
  if (use == kSecondState) return bits >> 16;
  return (bits * (use == kThirdState ? 0x9e3779b1u : 0x85ebca6bu)) >> 16;
}

// Returns 20 bits of noise, as many as encoding cuts off a float32 number. Only the third state, which few rules have,
// costs a multiplication.
MS_OPTIM_FN uint32_t CodeNoiseFor(NoiseUse use, uint32_t bits) {
  if (use == kFirstState) return bits & 0xfffffu;
  return (use == kSecondState ? bits : bits * 0x9e3779b1u) >> 12;
}

template <int kOctaves>
struct SmallFloat {
  static constexpr int kShift = 20;  // 23 - 3 bits of mantissa
  static constexpr uint32_t kDeltaBits = static_cast<uint32_t>(127 - kOctaves) << 23;

  // The largest number of a block is mapped to this, so that its z is 1 and its code exact.
  MS_OPTIM_FN static float Largest() { return 1.0f - FromBits(kDeltaBits); }
  MS_OPTIM_FN static uint32_t Encode(float magnitude, uint32_t noise) {
    return (BitsOf(magnitude + FromBits(kDeltaBits)) - kDeltaBits + noise) >> kShift;
  }
  MS_OPTIM_FN static float Decode(uint32_t code) {
    return FromBits((code << kShift) + kDeltaBits) - FromBits(kDeltaBits);
  }
};

// Signed codes, for moments of gradients. They reach down to 2^-15 of the block's largest number, and run from -120 to
// 120.
template <NoiseUse kState>
struct SignedCode : SmallFloat<15> {
  typedef int8_t Type;
  static constexpr NoiseUse kUse = kState;
  MS_OPTIM_FN static float Decode(int32_t code) {
    const float x = SmallFloat<15>::Decode(static_cast<uint32_t>(code < 0 ? -code : code));
    return code < 0 ? -x : x;
  }
  MS_OPTIM_FN static int32_t Encode(float x, float factor, uint32_t noise) {
    x *= factor;
    const uint32_t magnitude = SmallFloat<15>::Encode(FromBits(BitsOf(x) & 0x7fffffffu), noise);
    return static_cast<int32_t>(static_cast<int32_t>(BitsOf(x)) < 0 ? 0u - magnitude : magnitude);
  }
};

// Unsigned codes, for second moments. They reach down to 2^-31, so that the moments' roots span what signed codes span,
// and run from 0 to 248. Code 0 stands for 0 alone: a second moment that was rounded to 0, next to a first moment that
// was not, would make the step explode.
template <NoiseUse kState>
struct UnsignedCode : SmallFloat<31> {
  typedef uint8_t Type;
  static constexpr NoiseUse kUse = kState;
  // The product may underflow to 0: x itself says whether the code may be 0.
  MS_OPTIM_FN static int32_t Encode(float x, float factor, uint32_t noise) {
    return static_cast<int32_t>(Max(SmallFloat<31>::Encode(x * factor, noise), Min(BitsOf(x), 1u)));
  }
};

// Rounds to bfloat16 stochastically, with 16 bits of noise; returns its bits.
MS_OPTIM_FN uint32_t BFloat16WithNoise(float x, uint32_t noise) {
  const uint32_t bits = BitsOf(x);
  const uint32_t rounded = (bits + noise) >> 16;
  const uint32_t special = (bits >> 16) | ((bits & 0x7fffffffu) > 0x7f800000u ? 0x40u : 0u);
  return (bits & 0x7fffffffu) >= 0x7f800000u ? special : rounded;
}

MS_OPTIM_FN void StoreWithNoise(float x, uint32_t noise, bfloat16 *out) {
  out->bits = static_cast<uint16_t>(BFloat16WithNoise(x, noise));
}

MS_OPTIM_FN void StoreWithNoise(float x, uint32_t noise, float16 *out) {
  const uint32_t sign = BitsOf(x) & 0x80000000u;
  const uint32_t magnitude = BitsOf(x) ^ sign;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t normal = (magnitude - ((127u - 15u) << 23) + (noise >> 3)) >> 13;
  // Below 2^-14, float16 numbers are 2^-24 apart: noise is added in this unit, and the sum is truncated.
  const float units = FromBits(magnitude < 0x38800000u ? magnitude : 0u) * 16777216.0f;
  const auto subnormal = static_cast<uint32_t>(static_cast<int32_t>(units + static_cast<float>(noise >> 3) * 0x1p-13f));
  const uint32_t bits = magnitude >= 0x47800000u ? special : (magnitude < 0x38800000u ? subnormal : normal);
  out->bits = static_cast<uint16_t>(bits | (sign >> 16));
}

}  // namespace ms_optim
