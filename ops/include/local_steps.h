// Local steps between exchanges. DiLoCo (Douillard et al., 2023) sends the difference of weights since the last
// exchange, SparseLoCo (Sarfi et al., 2025) the largest elements of what has accumulated of it, in few bits.
//
// Here is what happens to one element, and how a chunk of a tensor travels.
#pragma once

#include <cmath>

#include "weights.h"

namespace ms_optim {

// What a launch of local steps is told besides tensors.
enum LocalNumber {
  kLocalWorkers,
  kLocalRank,
  kOuterRate,
  kOuterMomentum,
  kOuterNesterov,
  kResidualDecay,  // below 0: nothing of what is not sent is kept
  kValueBits,      // 0: all differences are added up in float32
  kChunkElements,
  kDensity,
  kLocalNumbers
};

// What workers compare before an exchange: numbers that must be the same on all of them, each of 32 bits.
enum LocalMark {
  kMarkEvery,
  kMarkFragments,
  kMarkRate,  // float32, like the others that are no whole numbers
  kMarkMomentum,
  kMarkNesterov,
  kMarkBits,
  kMarkChunk,
  kMarkDensity,
  kMarkDecay,
  kMarkOptimizer,  // a checksum of the rule, like that of the tensors' names and shapes
  kMarkTensors,
  kMarkStep,
  kMarkStart,  // a checksum of the weights at the last exchange
  kLocalMarks
};

struct LocalTensor {
  Tensor t;
  float *start, *velocity, *residual;  // null: there is none
  int64_t before;                      // elements of the tensors before
  int64_t wire_offset;                 // byte of its first chunk in a wire
};

struct LocalStep {
  const double *numbers;
  const LocalTensor *tensors;
  int count;
  const void *wires;
  int64_t wire_words;  // of one worker
  int64_t elements;
  void *wire;     // what this worker sends
  int32_t *mark;  // kLocalMarks numbers of this worker
  float *report;

  MS_OPTIM_FN bool IsDense() const { return numbers[kValueBits] == 0.0; }
  MS_OPTIM_FN int Workers() const { return static_cast<int>(numbers[kLocalWorkers]); }
  MS_OPTIM_FN int64_t BytesSentOf(int64_t size) const;
};

// Columns of a report: norms of this worker's difference, of its residual and of the mean of what all sent, and the
// mean cosine between what two workers sent, weighted by the product of their norms.
enum LocalReport { kDifferenceNorm, kResidualNorm, kMeanNorm, kAgreement, kLocalReports };

// ---- How a chunk travels --------------------------------------------------------------------------------------------
//
// First the scales of its values, if they have any, then the values, in the order of their indices; then the indices,
// in the code of Elias and Fano: of each the low bits, and one bit for each index and each step of the high bits. This
// takes 2 bits an index more than the low ones, whatever the indices are. Where all elements are sent there are none.
struct ChunkCode {
  int elements, sent, value_bits, low_bits;
  int values, low, high, bytes;  // where each part begins, in bytes

  MS_OPTIM_FN ChunkCode(int n, double density, int bits) : elements(n), value_bits(bits), low_bits(0) {
    const auto chosen = static_cast<int>(nearbyint(density * n));
    sent = chosen < 1 ? 1 : chosen;
    while (sent < n && int64_t{sent} << (low_bits + 1) <= n) ++low_bits;
    values = bits < 16 ? 4 : 0;
    low = values + (sent * bits + 7) / 8;
    high = low + (sent < n ? (sent * low_bits + 7) / 8 : 0);
    const int end = high + (sent < n ? (sent + ((n - 1) >> low_bits) + 7) / 8 : 0);
    bytes = (end + 3) / 4 * 4;
  }
  MS_OPTIM_FN bool HasIndices() const { return sent < elements; }
};

MS_OPTIM_FN int64_t WireBytes(int64_t size, int64_t chunk, double density, int bits) {
  const int64_t whole = size / chunk, rest = size % chunk;
  const int64_t last = rest > 0 ? ChunkCode(static_cast<int>(rest), density, bits).bytes : 0;
  return whole * ChunkCode(static_cast<int>(chunk), density, bits).bytes + last;
}

MS_OPTIM_FN int64_t LocalStep::BytesSentOf(int64_t size) const {
  const auto chunk = static_cast<int64_t>(numbers[kChunkElements]);
  return WireBytes(size, chunk, numbers[kDensity], static_cast<int>(numbers[kValueBits]));
}

MS_OPTIM_FN void PutBits(uint8_t *bytes, int64_t at, int count, uint32_t value) {
  for (int put = 0; put < count;) {
    const int skip = static_cast<int>((at + put) % 8), taken = count - put < 8 - skip ? count - put : 8 - skip;
    const uint32_t part = (value >> put & ((1u << taken) - 1u)) << skip;
    bytes[(at + put) / 8] = static_cast<uint8_t>(bytes[(at + put) / 8] | part);
    put += taken;
  }
}

MS_OPTIM_FN uint32_t BitsAt(const uint8_t *bytes, int64_t at, int count) {
  uint32_t value = 0;
  for (int got = 0; got < count;) {
    const int skip = static_cast<int>((at + got) % 8), taken = count - got < 8 - skip ? count - got : 8 - skip;
    value |= (uint32_t{bytes[(at + got) / 8]} >> skip & ((1u << taken) - 1u)) << got;
    got += taken;
  }
  return value;
}

MS_OPTIM_FN float HalfOf(float value, float16 *half) {
  constexpr float kLargestHalf = 65504.0f;
  const bool finite = (BitsOf(value) & 0x7fffffffu) < 0x7f800000u;
  Store(finite ? Clamp(value, -kLargestHalf, kLargestHalf) : value, half);
  return ToFloat(*half);
}

// ---- One element ----------------------------------------------------------------------------------------------------

// The outer step: SGD with momentum along the mean difference.
struct OuterStep {
  float rate, momentum;
  bool nesterov;

  MS_OPTIM_FN explicit OuterStep(const double *numbers)
      : rate(static_cast<float>(numbers[kOuterRate])),
        momentum(static_cast<float>(numbers[kOuterMomentum])),
        nesterov(numbers[kOuterNesterov] != 0.0) {}

  // Of one number, or of several in a vector.
  template <class Numbers>
  MS_OPTIM_FN Numbers Velocity(Numbers mean, Numbers velocity) const {
    return momentum * velocity + mean;
  }
  template <class Numbers>
  MS_OPTIM_FN Numbers Direction(Numbers mean, Numbers velocity) const {
    return nesterov ? mean + momentum * velocity : velocity;
  }
};

// How a weight of each kind is read and written. `Written` is what a parameter holds once a weight was written to it:
// local steps begin there, and not at the weight, of which small steps would otherwise be taken back.
struct PlainWeight {
  float *weight;
  MS_OPTIM_FN explicit PlainWeight(const Tensor &t) : weight(static_cast<float *>(t.weight)) {}
  MS_OPTIM_FN float Read(int64_t i) const { return weight[i]; }
  MS_OPTIM_FN static float Written(float value) { return value; }
  MS_OPTIM_FN void Write(int64_t i, float value) const { weight[i] = value; }
};

template <class T>
struct RoundedWeight {
  T *weight;
  MS_OPTIM_FN explicit RoundedWeight(const Tensor &t) : weight(static_cast<T *>(t.weight)) {}
  MS_OPTIM_FN float Read(int64_t i) const { return ToFloat(weight[i]); }
  MS_OPTIM_FN static float Written(float value) {
    T rounded;
    Store(value, &rounded);
    return ToFloat(rounded);
  }
  MS_OPTIM_FN void Write(int64_t i, float value) const { Store(value, weight + i); }
};

template <class T>
struct WeightWithMaster {
  T *weight;
  float *master;
  MS_OPTIM_FN explicit WeightWithMaster(const Tensor &t) : weight(static_cast<T *>(t.weight)), master(t.master) {}
  MS_OPTIM_FN float Read(int64_t i) const { return MasterOrWeight(weight[i], master[i]); }
  MS_OPTIM_FN static float Written(float value) { return value; }
  MS_OPTIM_FN void Write(int64_t i, float value) const {
    master[i] = value;
    Store(value, weight + i);
  }
};

// Noise that rounds 24 bits to nearest.
constexpr uint32_t kHalf = 0x80u;

template <class R>
struct SplitWeight {
  bfloat16 *weight;
  R *remainder;
  MS_OPTIM_FN explicit SplitWeight(const Tensor &t)
      : weight(static_cast<bfloat16 *>(t.weight)), remainder(static_cast<R *>(t.remainder)) {}
  MS_OPTIM_FN float Read(int64_t i) const { return MasterOf(weight[i], remainder[i]); }
  MS_OPTIM_FN static float Written(float value) { return FromBits(Remainder<R>::Rounded(BitsOf(value), kHalf)); }
  MS_OPTIM_FN void Write(int64_t i, float value) const { Split(value, kHalf, weight + i, remainder + i); }
};

// Calls with a tensor's kind of weight.
template <class Work>
MS_OPTIM_FN void WithWeight(const Tensor &t, const Work &work) {
  const bool half = t.weight_type == DType::kFloat16;
  if (t.weight_type == DType::kFloat32) return work(PlainWeight(t));
  if (t.remainder_type == DType::kInt16) return work(SplitWeight<int16_t>(t));
  if (t.remainder_type == DType::kInt8) return work(SplitWeight<int8_t>(t));
  if (t.master != nullptr && half) return work(WeightWithMaster<float16>(t));
  if (t.master != nullptr) return work(WeightWithMaster<bfloat16>(t));
  if (half) return work(RoundedWeight<float16>(t));
  work(RoundedWeight<bfloat16>(t));
}

constexpr uint32_t kIndexFactor = 0x9e3779b1u, kChecksumFactor = 0x85ebca77u;

MS_OPTIM_FN uint32_t ChecksumOf(float weight, uint32_t index) {
  const uint32_t mixed = (BitsOf(weight) ^ index * kIndexFactor) * kChecksumFactor;
  return mixed ^ mixed >> 15;
}

}  // namespace ms_optim
