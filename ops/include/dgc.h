// DGCMomentum: Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training"
// (2018), sections 3.1 to 3.3: the arithmetic of one element, the order of elements, and their layout in a wire.
#pragma once

#include "step.h"

namespace ms_optim {

struct DgcMomentum {
  static constexpr int kStates = 2;  // the velocity u, and r, what has not been sent yet
  // The momentum, the number of workers, this worker's rank among them, and a number of 28 bits that is the same on
  // workers of the same settings.
  static constexpr int kConstants = 4;
  static constexpr bool kExchanges = true;
  static constexpr bool kWeighsSteps = false, kHasMatrices = false;
  static constexpr bool kReturnsDirections = false, kTakesDirections = false, kBalances = false;
  static constexpr unsigned kRowStateFlag = 0;
  enum Flags : unsigned { kNesterov = 1, kL1 = 2, kHalfValues = 4 };

  float momentum;
  double workers;
  int64_t rank, settings;
  bool nesterov, l1, half_values;

  MS_OPTIM_FN DgcMomentum(const double *constants, unsigned flags)
      : momentum(static_cast<float>(constants[0])),
        workers(constants[1]),
        rank(static_cast<int64_t>(constants[2])),
        settings(static_cast<int64_t>(constants[3])),
        nesterov((flags & kNesterov) != 0),
        l1((flags & kL1) != 0),
        half_values((flags & kHalfValues) != 0) {}

  // Decay enters the local gradient, before momentum and exchange. If it entered the mean after the exchange, it would
  // be as sparse as the mean, which costs 2 % of accuracy.
  MS_OPTIM_FN float Gradient(float w, float g, float lambda) const {
    const float sign = (w > 0.0f ? 1.0f : 0.0f) - (w < 0.0f ? 1.0f : 0.0f);
    return g + lambda * (l1 ? sign : w);
  }

  // Momentum correction, section 3.2: r accumulates velocities, not gradients.
  MS_OPTIM_FN float Velocity(float g, float u) const { return momentum * u + g; }

  // Momentum SGD moves a weight along this, and r accumulates it.
  MS_OPTIM_FN float Direction(float g, float u) const { return nesterov ? g + momentum * u : u; }

  // Returns a value as it arrives. Its rounding error stays behind in r, and is sent in a later step.
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
    return left == left ? left : 0.0f;  // infinity and NaN leave nothing behind
  }

  // The mean is formed after the exchange: divided before, small numbers would lose bits in low precision.
  MS_OPTIM_FN float Mean(float sum) const { return sum / static_cast<float>(workers); }

  // Section 3.2: the norm of the mean keeps its bound if the norm of each worker keeps its share of it.
  MS_OPTIM_FN float Clip(double norm, double bound) const {
    const double local = bound / sqrt(workers);
    return static_cast<float>(norm > local ? local / norm : 1.0);
  }
};

// The launch that sends writes the factor that clips the gradient into this column of the sums, from which the launch
// that applies reads it. Rules of two directions use the column for the second.
constexpr int kClipFactor = kDirection2Sum;

// The key orders numbers by magnitude, with NaN above all others: a NaN is sent, and does not stay unseen in r.
constexpr int32_t kNanKey = 0x7f800001;

MS_OPTIM_FN int32_t MagnitudeKey(float x) {
  const int32_t bits = static_cast<int32_t>(BitsOf(x) & 0x7fffffffu);
  return bits < kNanKey ? bits : kNanKey;
}

// A magnitude has 31 bits, in digits of 11 or 10. The k-th largest is found digit by digit, by counting.
struct Digit {
  int shift, bins;
};
constexpr Digit kDigits[] = {{20, 1 << 11}, {10, 1 << 10}, {0, 1 << 10}};

// Returns the digit's bin of a magnitude that begins with the prefix, the digits before; of another magnitude, a number
// that no bin has.
MS_OPTIM_FN uint32_t BinOf(const Digit &digit, int32_t key, int32_t prefix) {
  return (static_cast<uint32_t>(key) - static_cast<uint32_t>(prefix)) >> digit.shift;
}

// The wire of a worker, byte after byte and in this order: the float32 gradients of uncompressed tensors, tensor after
// tensor; the values of compressed tensors, float32 or float16; their indices, each in the fewest bytes that hold the
// last index of its tensor, the lowest byte first. Indices ascend within a tensor. The last words are the worker's
// mark.
struct WireOffsets {
  int64_t values, indices;  // byte of the first of them
  int index_bytes;
};

constexpr int64_t kMostElements = int64_t{1} << 31;

// A mark says which step a worker is at, and with which settings: 60 bits in limbs of 6, each as two float32 numbers,
// the limb x and its square. If nothing is compressed, an AllReduce adds up the marks of all N processes; for up to
// 4,096 of them the sums are exact, since 4096 * 63^2 < 2^24. A process whose limb is y expects the sums N y and N y^2.
// If these come, the sum of (x - y)^2 is N y^2 - 2 y N y + N y^2 = 0, so every x is y: no mixture passes.
constexpr int kLimbBits = 6, kLimbs = 10, kMarkWords = 2 * kLimbs;

MS_OPTIM_FN int IndexBytes(int64_t size) {
  int bytes = 1;
  while (size > int64_t{1} << 8 * bytes) ++bytes;
  return bytes;
}

MS_OPTIM_FN void PutIndex(uint8_t *indices, int bytes, int64_t k, int64_t index) {
  for (int b = 0; b < bytes; ++b) indices[k * bytes + b] = static_cast<uint8_t>(static_cast<uint64_t>(index) >> 8 * b);
}

MS_OPTIM_FN int64_t IndexAt(const uint8_t *indices, int bytes, int64_t k) {
  uint64_t index = 0;
  for (int b = bytes - 1; b >= 0; --b) index = index << 8 | indices[k * bytes + b];
  return static_cast<int64_t>(index);
}

// Returns the index of the first of some ascending indices that is not below `begin`.
MS_OPTIM_FN int64_t FirstIndex(const uint8_t *indices, int bytes, int64_t count, int64_t begin) {
  int64_t first = 0;
  while (count > 0) {
    const int64_t middle = count / 2;
    const bool before = IndexAt(indices, bytes, first + middle) < begin;
    first = before ? first + middle + 1 : first;
    count = before ? count - middle - 1 : middle;
  }
  return first;
}

MS_OPTIM_FN void PutValue(const DgcMomentum &rule, uint8_t *values, int64_t k, float value) {
  if (rule.half_values) {
    Store(value, reinterpret_cast<float16 *>(values) + k);
  } else {
    reinterpret_cast<float *>(values)[k] = value;
  }
}

MS_OPTIM_FN float ValueAt(const DgcMomentum &rule, const uint8_t *values, int64_t k) {
  return rule.half_values ? ToFloat(reinterpret_cast<const float16 *>(values)[k])
                          : reinterpret_cast<const float *>(values)[k];
}

// Fills in where each tensor is in a wire, and returns the wire's length in 4-byte words.
MS_OPTIM_FN int64_t LayWire(const Step &step, WireOffsets *wire) {
  const int64_t value_bytes = (step.rule_flags & DgcMomentum::kHalfValues) != 0 ? 2 : 4;
  const auto sent = [&step](int i) { return int64_t{step.layout[int64_t{i} * step.layout_columns + kSent]}; };
  int64_t bytes = 0;
  for (int i = 0; i < step.count; ++i) {
    if (sent(i) > 0) continue;
    wire[i] = WireOffsets{bytes, 0, 0};
    bytes += 4 * step.tensors[i].size;
  }
  for (int i = 0; i < step.count; ++i) {
    if (sent(i) == 0) continue;
    wire[i] = WireOffsets{bytes, 0, IndexBytes(step.tensors[i].size)};
    bytes += value_bytes * sent(i);
  }
  for (int i = 0; i < step.count; ++i) {
    wire[i].indices = bytes;
    bytes += wire[i].index_bytes * sent(i);
  }
  return (bytes + 3) / 4 + kMarkWords;
}

MS_OPTIM_FN float MarkOf(const Step &step, const DgcMomentum &rule, int word) {
  const uint64_t mark = static_cast<uint64_t>(rule.settings) << 32 | static_cast<uint32_t>(*step.global_step);
  const auto limb = static_cast<float>(mark >> kLimbBits * (word / 2) & ((1u << kLimbBits) - 1u));
  return word % 2 == 0 ? limb : limb * limb;
}

MS_OPTIM_FN void PutMark(const Step &step, const DgcMomentum &rule, void *wire) {
  float *mark = static_cast<float *>(wire) + step.wire_words - kMarkWords;
  for (int word = 0; word < kMarkWords; ++word) mark[word] = MarkOf(step, rule, word);
}

// Tells whether there is a wire of each worker or, if nothing is compressed, the one sum of all.
MS_OPTIM_FN bool HasAllWires(const Step &step, const DgcMomentum &rule) {
  bool compressed = false;
  for (int i = 0; i < step.count; ++i) compressed |= step.layout[int64_t{i} * step.layout_columns + kSent] > 0;
  return static_cast<double>(step.wire_count) == (compressed ? rule.workers : 1.0);
}

// Tells whether the wire of a worker, or the sum of all wires, belongs to this step and these settings.
MS_OPTIM_FN bool IsOfThisStep(const Step &step, const DgcMomentum &rule, int64_t wire) {
  const float *mark = static_cast<const float *>(step.wires) + (wire + 1) * step.wire_words - kMarkWords;
  const float marks = step.wire_count == 1 ? static_cast<float>(rule.workers) : 1.0f;
  for (int word = 0; word < kMarkWords; ++word) {
    if (mark[word] != marks * MarkOf(step, rule, word)) return false;
  }
  return true;
}

// Tells whether the velocity and r are this worker's own: a checkpoint of another worker has others.
MS_OPTIM_FN bool HoldsItsOwn(const Step &step, const DgcMomentum &rule) {
  for (int64_t k = 0; k < step.worker_count; ++k) {
    if (step.worker[k] != (k == rule.rank)) return false;
  }
  return true;
}

}  // namespace ms_optim
