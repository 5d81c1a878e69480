// DGCMomentum: Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training"
// (2018), sections 3.1 to 3.3: what happens to one element, how elements rank, and how they travel.
#pragma once

#include "step.h"

namespace ms_optim {

struct DgcMomentum {
  static constexpr int kStates = 2;  // the velocity u, and r, what has not been sent yet
  enum Flags : unsigned { kNesterov = 1, kL1 = 2, kHalfValues = 4 };

  float momentum;
  double workers;
  bool nesterov, l1, half_values;

  // constants: momentum, number of workers.
  MS_OPTIM_FN DgcMomentum(const double *constants, unsigned flags)
      : momentum(static_cast<float>(constants[0])),
        workers(constants[1]),
        nesterov((flags & kNesterov) != 0),
        l1((flags & kL1) != 0),
        half_values((flags & kHalfValues) != 0) {}

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

  // A value as it arrives. What rounding takes from it stays behind in r: it is sent another time.
  MS_OPTIM_FN float Travelled(float value) const {
    constexpr float kLargestHalf = 65504.0f;
    if (!half_values) return value;
    const bool finite = (BitsOf(value) & 0x7fffffffu) < 0x7f800000u;
    float16 half;
    Store(finite ? Max(-kLargestHalf, Min(value, kLargestHalf)) : value, &half);
    return ToFloat(half);
  }
  MS_OPTIM_FN static float Behind(float value, float travelled) {
    const float left = value - travelled;
    return left == left ? left : 0.0f;  // of infinity and NaN nothing
  }

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

// What a worker sends, byte after byte and in this order: the float32 gradients of uncompressed tensors, tensor after
// tensor; the values of compressed tensors, float32 or float16; their places, each in the fewest bytes that hold the
// last place of its tensor, the lowest byte first. Places ascend within a tensor.
struct WirePlace {
  int64_t values, places;  // byte of the first of them
  int place_bytes;
};

constexpr int64_t kMostElements = int64_t{1} << 31;

inline int PlaceBytes(int64_t size) {
  int bytes = 1;
  while (size > int64_t{1} << 8 * bytes) ++bytes;
  return bytes;
}

// Fills in where each tensor is, and returns how many 4-byte words there are.
inline int64_t LayWire(const Step &step, WirePlace *wire) {
  const int64_t value_bytes = (step.rule_flags & DgcMomentum::kHalfValues) != 0 ? 2 : 4;
  const auto sent = [&step](int i) { return int64_t{step.layout[int64_t{i} * step.layout_columns + kSent]}; };
  int64_t bytes = 0;
  for (int i = 0; i < step.count; ++i) {
    if (sent(i) > 0) continue;
    wire[i] = WirePlace{bytes, 0, 0};
    bytes += 4 * step.tensors[i].size;
  }
  for (int i = 0; i < step.count; ++i) {
    if (sent(i) == 0) continue;
    wire[i] = WirePlace{bytes, 0, PlaceBytes(step.tensors[i].size)};
    bytes += value_bytes * sent(i);
  }
  for (int i = 0; i < step.count; ++i) {
    wire[i].places = bytes;
    bytes += wire[i].place_bytes * sent(i);
  }
  return (bytes + 3) / 4;
}

}  // namespace ms_optim
