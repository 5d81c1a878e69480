// Reads and writes one weight: through its float32 master, or rounded to its storage dtype, on request stochastically.
//
// A master may be split: the weight has its upper 16 bits, rounded, and a remainder says by how much the master's bits
// are more or less. 16 bits of remainder restore the master to the bit (Gonzalez Ortiz et al., "FlashOptim", 2026). 8
// bits restore its upper 24, to which it was rounded stochastically: to nearest, small steps would be lost.
#pragma once

#include "codes.h"
#include "step.h"

namespace ms_optim {

// Returns the master only if it rounds to the weight. Otherwise the weight was loaded or set since, and comes first.
template <class T>
MS_OPTIM_FN float MasterOrWeight(T weight, float master) {
  T rounded;
  Store(master, &rounded);
  return rounded.bits == weight.bits ? master : ToFloat(weight);
}

// Returns the master of a weight from their bits' difference. One that would lead across 0, or from infinity to NaN,
// belongs to a weight that was set since, and is left out. All arithmetic has 32 bits, so that compilers vectorize.
MS_OPTIM_FN float Restored(int32_t weight, int32_t difference) {
  const uint32_t bits = static_cast<uint32_t>(weight) << 16, magnitude = bits & 0x7fffffffu;
  const int32_t below = magnitude == 0u ? 0 : difference, above = magnitude < 0x7f800000u ? difference : 0;
  return FromBits(bits + static_cast<uint32_t>(difference < 0 ? below : above));
}

// Rounds bits to those of a bfloat16 number, ties away from 0, so that the difference is 32767 at most.
MS_OPTIM_FN int32_t UpperHalf(uint32_t bits) {
  const uint32_t rounded = (bits + 0x8000u) >> 16, quiet_nan = (bits >> 16) | 0x40u;
  return static_cast<int32_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}

// The difference between master and weight in memory. A remainder of 8 bits makes a master of 24, which is rounded with
// 8 bits of noise.
template <class R>
struct Remainder;

template <>
struct Remainder<int16_t> {
  MS_OPTIM_FN static int32_t Difference(int32_t remainder) { return remainder; }
  MS_OPTIM_FN static uint32_t Rounded(uint32_t bits, uint32_t) { return bits; }
  MS_OPTIM_FN static int32_t Of(uint32_t rounded, int32_t upper) {
    const auto remainder = static_cast<int32_t>(rounded - (static_cast<uint32_t>(upper) << 16));
    return (rounded & 0x7fffffffu) > 0x7f800000u ? 0 : remainder;
  }
};

template <>
struct Remainder<int8_t> {
  MS_OPTIM_FN static int32_t Difference(int32_t remainder) { return remainder * 256; }
  MS_OPTIM_FN static uint32_t Rounded(uint32_t bits, uint32_t noise) {
    const uint32_t sum = (bits + (noise & 0xffu)) & ~0xffu;
    return (bits & 0x7fffffffu) < 0x7f800000u ? sum : bits;
  }
  MS_OPTIM_FN static int32_t Of(uint32_t rounded, int32_t upper) {
    return Remainder<int16_t>::Of(rounded, upper) >> 8;  // the bits that are cut off are 0
  }
};

template <class R>
MS_OPTIM_FN float MasterOf(bfloat16 weight, R remainder) {
  return Restored(weight.bits, Remainder<R>::Difference(remainder));
}

template <class R>
MS_OPTIM_FN void Split(float master, uint32_t noise, bfloat16 *weight, R *remainder) {
  const uint32_t rounded = Remainder<R>::Rounded(BitsOf(master), noise);
  const int32_t upper = UpperHalf(rounded);
  weight->bits = static_cast<uint16_t>(upper);
  *remainder = static_cast<R>(Remainder<R>::Of(rounded, upper));
}

// Tells whether noise enters the weights.
MS_OPTIM_FN bool NeedsNoise(const Tensor &t, unsigned flags) {
  return (flags & kStochasticRounding) != 0 || t.remainder_type == DType::kInt8;
}

template <class T>
MS_OPTIM_FN float WeightAs(const Tensor &t, int64_t i) {
  const T weight = static_cast<const T *>(t.weight)[i];
  return t.master != nullptr ? MasterOrWeight(weight, t.master[i]) : ToFloat(weight);
}

template <class R>
MS_OPTIM_FN float SplitWeightAt(const Tensor &t, int64_t i) {
  return MasterOf(static_cast<const bfloat16 *>(t.weight)[i], static_cast<const R *>(t.remainder)[i]);
}

MS_OPTIM_FN float WeightAt(const Tensor &t, int64_t i) {
  if (t.weight_type == DType::kFloat16) return WeightAs<float16>(t, i);
  if (t.remainder_type == DType::kInt16) return SplitWeightAt<int16_t>(t, i);
  if (t.remainder_type == DType::kInt8) return SplitWeightAt<int8_t>(t, i);
  if (t.weight_type == DType::kBFloat16) return WeightAs<bfloat16>(t, i);
  return static_cast<const float *>(t.weight)[i];
}

// Moves a weight. One without a master is rounded stochastically if there is noise.
template <class T>
MS_OPTIM_FN void MoveAs(const Tensor &t, const Noise *noise, int64_t i, float by) {
  T *stored = static_cast<T *>(t.weight) + i;
  const float weight = WeightAs<T>(t, i) - by;
  if (t.master != nullptr) t.master[i] = weight;
  if (noise != nullptr && t.master == nullptr) {
    StoreWithNoise(weight, NoiseFor(kWeight, noise->At(i)), stored);
  } else {
    Store(weight, stored);
  }
}

template <class R>
MS_OPTIM_FN void MoveSplit(const Tensor &t, const Noise *noise, int64_t i, float by) {
  const uint32_t random = noise != nullptr ? NoiseFor(kWeight, noise->At(i)) : 0u;
  Split(SplitWeightAt<R>(t, i) - by, random, static_cast<bfloat16 *>(t.weight) + i, static_cast<R *>(t.remainder) + i);
}

MS_OPTIM_FN void Move(const Tensor &t, const Noise *noise, int64_t i, float by) {
  if (t.weight_type == DType::kFloat32) static_cast<float *>(t.weight)[i] -= by;
  if (t.weight_type == DType::kFloat16) MoveAs<float16>(t, noise, i, by);
  if (t.remainder_type == DType::kInt16) return MoveSplit<int16_t>(t, noise, i, by);
  if (t.remainder_type == DType::kInt8) return MoveSplit<int8_t>(t, noise, i, by);
  if (t.weight_type == DType::kBFloat16) MoveAs<bfloat16>(t, noise, i, by);
}

}  // namespace ms_optim
