// States in fewer bits: bfloat16, and codes of 8 or 4 bits with one float32 scale for each block of 256.
//
// In a step, a moving average changes by less than the distance of two numbers of so few bits: rounding to nearest
// would leave it unchanged. So rounding is stochastic, with noise from a hash of seed, step, tensor and element. It is
// unbiased, and the same for any number of threads and in a run that resumes.
//
// A code holds the upper bits of the float32 number z = |x| / scale + delta, minus those of delta. From delta up, codes
// are small floating-point numbers, with 3 bits of mantissa in codes of 8 bits and 1 in codes of 4; below delta they
// are evenly spaced; 0 has the code 0. Encoding is an addition and a shift, and so is decoding.
//
// A code is a struct that states, for one element of a state:
//
//   Type, kWidth, kInWord          the word in memory, the bits of a code, and how many codes a word holds
//   Unpacked(word, index)          a code of a word, in the lowest bits of 32
//   Packed(codes)                  the word of kInWord codes
//   kIsConverted                   whether the state differs from float32 numbers at all
//   kHasScales                     whether each block of kCodeBlock elements has a scale, its largest magnitude
//   Largest()                      the number that the largest magnitude of a block is mapped to
//   Decode(code, unit)             the element; unit is UnitOf the block's scale
//   Encode(x, factor, noise)       the code; factor is FactorOf the scale, noise the element's 32 random bits
//
// A code without scales does not read unit and factor.
#pragma once

#include <type_traits>

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
  // Mixes two hashes: that of the element's index in its group of 1,024, which a table may hold, and that of the group.
  MS_OPTIM_FN uint32_t At(int64_t element) const { return InGroup(element) ^ Above(element); }
  MS_OPTIM_FN static uint32_t InGroup(int64_t element) { return Hash(static_cast<uint32_t>(element) & (kNoises - 1u)); }
  MS_OPTIM_FN uint32_t Above(int64_t element) const { return Hash(key + static_cast<uint32_t>(element / kNoises)); }
};

// Noise::InGroup of each element of a group.
struct NoiseTable {
  alignas(64) uint32_t bits[kNoises];
  constexpr NoiseTable() : bits() {
    for (uint32_t i = 0; i < kNoises; ++i) bits[i] = Hash(i);
  }
};

enum NoiseUse { kFirstState, kSecondState, kThirdState, kWeight };

MS_OPTIM_FN uint32_t NoiseFor(NoiseUse use, uint32_t bits) {
  if (use == kFirstState) return bits & 0xffffu;
  if (use == kSecondState) return bits >> 16;
  return (bits * (use == kThirdState ? 0x9e3779b1u : 0x85ebca6bu)) >> 16;
}

// Returns as many bits of noise as encoding cuts off a float32 number. Only the third state, which few rules have,
// costs a multiplication.
template <int kCutOff>
MS_OPTIM_FN uint32_t CodeNoiseFor(NoiseUse use, uint32_t bits) {
  if (use == kFirstState) return bits & ((1u << kCutOff) - 1u);
  return (use == kSecondState ? bits : bits * 0x9e3779b1u) >> (32 - kCutOff);
}

// A code without sign: of its bits, those above the mantissa count octaves.
template <int kBits, int kMantissa>
struct SmallFloat {
  static constexpr int kShift = 23 - kMantissa;
  static constexpr int kOctaves = (1 << (kBits - kMantissa)) - 1;
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

// The layout of codes in memory. Each code of 8 bits is a word; a word of 16 bits holds four codes of 4 bits, the first
// in its lowest bits. So the dtype of a state alone says its format.
template <int kBits>
struct Stored;

template <>
struct Stored<8> {
  static constexpr int kMantissa = 3, kInWord = 1;
  typedef int8_t Signed;
  typedef uint8_t Unsigned;
};

template <>
struct Stored<4> {
  static constexpr int kMantissa = 1, kInWord = 4;
  typedef int16_t Signed;
  typedef uint16_t Unsigned;
};

// Packs codes, which are the lowest bits of numbers of 32 bits, into words, and unpacks them.
template <int kBits, class Word>
struct CodeWords {
  typedef Word Type;
  static constexpr int kWidth = kBits, kInWord = Stored<kBits>::kInWord;
  static constexpr bool kIsConverted = true, kHasScales = true;

  MS_OPTIM_FN static int32_t Unpacked(Word word, int index) {
    const uint32_t highest = static_cast<uint32_t>(word) << (32 - kBits * (index + 1));
    return std::is_signed<Word>::value ? static_cast<int32_t>(highest) >> (32 - kBits)
                                       : static_cast<int32_t>(highest >> (32 - kBits));
  }
  MS_OPTIM_FN static Word Packed(const int32_t *code) {
    uint32_t word = 0;
    for (int k = 0; k < kInWord; ++k) word |= (static_cast<uint32_t>(code[k]) & ((1u << kBits) - 1u)) << (kBits * k);
    return static_cast<Word>(word);
  }
};

// Signed codes, for moments of gradients. Those of 8 bits reach down to 2^-15 of the block's largest number, and run
// from -120 to 120; those of 4 bits to 2^-3, from -6 to 6.
template <int kBits, NoiseUse kState>
struct SignedCode : CodeWords<kBits, typename Stored<kBits>::Signed> {
  typedef SmallFloat<kBits - 1, Stored<kBits>::kMantissa> Magnitude;
  MS_OPTIM_FN static float Largest() { return Magnitude::Largest(); }
  MS_OPTIM_FN static float Decode(int32_t code, float unit) {
    const float x = Magnitude::Decode(static_cast<uint32_t>(code < 0 ? -code : code));
    return (code < 0 ? -x : x) * unit;
  }
  MS_OPTIM_FN static int32_t Encode(float x, float factor, uint32_t noise) {
    x *= factor;
    noise = CodeNoiseFor<Magnitude::kShift>(kState, noise);
    const uint32_t magnitude = Magnitude::Encode(FromBits(BitsOf(x) & 0x7fffffffu), noise);
    return static_cast<int32_t>(static_cast<int32_t>(BitsOf(x)) < 0 ? 0u - magnitude : magnitude);
  }
};

// Unsigned codes, for second moments. Those of 8 bits reach down to 2^-31, so that the moments' roots span what signed
// codes span, and run from 0 to 248; those of 4 bits to 2^-7, from 0 to 14. Code 0 stands for 0 alone: a second moment
// that was rounded to 0, next to a first moment that was not, would make the step explode.
template <int kBits, NoiseUse kState>
struct UnsignedCode : CodeWords<kBits, typename Stored<kBits>::Unsigned> {
  typedef SmallFloat<kBits, Stored<kBits>::kMantissa> Magnitude;
  MS_OPTIM_FN static float Largest() { return Magnitude::Largest(); }
  MS_OPTIM_FN static float Decode(int32_t code, float unit) {
    return Magnitude::Decode(static_cast<uint32_t>(code)) * unit;
  }
  // The product may underflow to 0: x itself says whether the code may be 0.
  MS_OPTIM_FN static int32_t Encode(float x, float factor, uint32_t noise) {
    noise = CodeNoiseFor<Magnitude::kShift>(kState, noise);
    return static_cast<int32_t>(Max(Magnitude::Encode(x * factor, noise), Min(BitsOf(x), 1u)));
  }
};

// Return the factors of decoding and of encoding for the scale of a block.
template <class Code>
MS_OPTIM_FN float UnitOf(float scale) {
  return scale / Code::Largest();
}
template <class Code>
MS_OPTIM_FN float FactorOf(float scale) {
  return scale > 1e-37f ? Code::Largest() / scale : 0.0f;
}

// Rounds to bfloat16 stochastically, with 16 bits of noise; returns its bits. A NaN must be quiet, as that of every
// operation is: then it has a bit that is kept.
MS_OPTIM_FN uint32_t BFloat16WithNoise(float x, uint32_t noise) { return (BitsOf(x) + (x == x ? noise : 0u)) >> 16; }

template <NoiseUse kUse>
struct BFloat16Code {
  typedef uint16_t Type;
  static constexpr int kWidth = 16, kInWord = 1;
  static constexpr bool kIsConverted = true, kHasScales = false;

  MS_OPTIM_FN static int32_t Unpacked(uint16_t word, int) { return word; }
  MS_OPTIM_FN static uint16_t Packed(const int32_t *code) { return static_cast<uint16_t>(*code); }
  MS_OPTIM_FN static float Decode(int32_t code, float) { return FromBits(static_cast<uint32_t>(code) << 16); }
  MS_OPTIM_FN static int32_t Encode(float x, float, uint32_t noise) {
    return static_cast<int32_t>(BFloat16WithNoise(x, NoiseFor(kUse, noise)));
  }
};

struct Float32Code {
  typedef float Type;
  static constexpr int kWidth = 32, kInWord = 1;
  static constexpr bool kIsConverted = false, kHasScales = false;
};

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
