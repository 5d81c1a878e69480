// Reads and writes one weight: through its float32 master, or rounded to its storage dtype, on request stochastically.
#pragma once

#include "codes.h"
#include "step.h"

namespace ms_optim {

// A master is used only if it rounds to the weight: otherwise the weight was loaded or set since then, and comes first.
template <class T>
MS_OPTIM_FN float MasterOf(T weight, float master) {
  T rounded;
  Store(master, &rounded);
  return rounded.bits == weight.bits ? master : ToFloat(weight);
}

template <class T>
MS_OPTIM_FN float WeightAs(const Tensor &t, int64_t i) {
  const T weight = static_cast<const T *>(t.weight)[i];
  return t.master != nullptr ? MasterOf(weight, t.master[i]) : ToFloat(weight);
}

MS_OPTIM_FN float WeightAt(const Tensor &t, int64_t i) {
  if (t.weight_type == DType::kFloat16) return WeightAs<float16>(t, i);
  if (t.weight_type == DType::kBFloat16) return WeightAs<bfloat16>(t, i);
  return static_cast<const float *>(t.weight)[i];
}

// With noise, a weight without a master is rounded stochastically.
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

MS_OPTIM_FN void Move(const Tensor &t, const Noise *noise, int64_t i, float by) {
  if (t.weight_type == DType::kFloat32) static_cast<float *>(t.weight)[i] -= by;
  if (t.weight_type == DType::kFloat16) MoveAs<float16>(t, noise, i, by);
  if (t.weight_type == DType::kBFloat16) MoveAs<bfloat16>(t, noise, i, by);
}

}  // namespace ms_optim
