// DGCMomentum: Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training"
// (2018), sections 3.1 to 3.3: what happens to one element, how elements rank, and how they travel.
#pragma once

#include "step.h"

namespace ms_optim {

struct DgcMomentum {
  static constexpr int kStates = 2;  // the velocity u, and r, what has not been sent yet
  enum Flags : unsigned { kNesterov = 1, kL1 = 2 };

  float momentum;
  double workers;
  bool nesterov, l1;

  // constants: momentum, number of workers.
  MS_OPTIM_FN DgcMomentum(const double *constants, unsigned flags)
      : momentum(static_cast<float>(constants[0])),
        workers(constants[1]),
        nesterov((flags & kNesterov) != 0),
        l1((flags & kL1) != 0) {}

  // Decay enters the local gradient, before momentum and exchange: applied to the mean afterwards it would be sparse
  // too, and costs 2 % of accuracy.
  MS_OPTIM_FN float Gradient(float w, float g, float lambda) const {
    const float sign = (w > 0.0f ? 1.0f : 0.0f) - (w < 0.0f ? 1.0f : 0.0f);
    return g + lambda * (l1 ? sign : w);
  }

  // Momentum correction, section 3.2: r accumulates velocities, not gradients.
  MS_OPTIM_FN float Velocity(float g, float u) const { return momentum * u + g; }

  // What momentum SGD moves a weight along, and what r accumulates.
  MS_OPTIM_FN float Direction(float g, float u) const { return nesterov ? g + momentum * u : u; }

  // The mean is formed after the exchange: divided before, small numbers would lose bits in low precision.
  MS_OPTIM_FN float Mean(float sum) const { return sum / static_cast<float>(workers); }

  // Section 3.2: the bound on the norm of the mean holds if each worker keeps its share of it.
  MS_OPTIM_FN float Clip(double norm, double bound) const {
    const double local = bound / sqrt(workers);
    return static_cast<float>(norm > local ? local / norm : 1.0);
  }
};

// Orders numbers by magnitude, NaN last: where there is one, it is sent, and not kept from sight in r.
constexpr int32_t kNanKey = 0x7f800001;

MS_OPTIM_FN int32_t MagnitudeKey(float x) {
  const int32_t bits = static_cast<int32_t>(BitsOf(x) & 0x7fffffffu);
  return bits < kNanKey ? bits : kNanKey;
}

// What a worker sends, in 4-byte words and in this order: float32 values, the gradients of uncompressed tensors among
// them, tensor after tensor; the places of compressed tensors' values in 4 bytes, tensor after tensor; places that fit
// into 2 bytes, where a tensor has no more than 65,536 elements. Places ascend within a tensor.
struct WirePlace {
  int64_t values;  // word of the first value
  int64_t places;  // word of the first place, or half-word if narrow
  bool narrow;
};

constexpr int64_t kNarrow = int64_t{1} << 16, kWide = int64_t{1} << 31;

// Fills in where each tensor is, and returns how many words there are.
inline int64_t LayWire(const Step &step, WirePlace *wire) {
  const auto sent = [&step](int i) { return int64_t{step.layout[int64_t{i} * step.layout_columns + kSent]}; };
  int64_t words = 0;
  for (int i = 0; i < step.count; ++i) {
    wire[i] = WirePlace{words, 0, step.tensors[i].size <= kNarrow};
    words += sent(i) > 0 ? sent(i) : step.tensors[i].size;
  }
  for (int i = 0; i < step.count; ++i) {
    if (wire[i].narrow) continue;
    wire[i].places = words;
    words += sent(i);
  }
  int64_t halves = 2 * words;
  for (int i = 0; i < step.count; ++i) {
    if (!wire[i].narrow) continue;
    wire[i].places = halves;
    halves += sent(i);
  }
  return (halves + 1) / 2;
}

}  // namespace ms_optim
