// Local steps between exchanges. DiLoCo (Douillard et al., 2023) sends the difference of weights since the last
// exchange, SparseLoCo (Sarfi et al., 2025) the largest elements of what has accumulated of it, in few bits.
//
// This file has the arithmetic of one element, and the layout of a chunk in a wire.
#pragma once

#include <cmath>

#include "weights.h"

namespace ms_optim {

// The numbers of a launch of local steps.
enum LocalNumber {
  kLocalWorkers,
  kLocalRank,
  kOuterRate,
  kOuterMomentum,
  kOuterNesterov,
  kResidualDecay,  // below 0: there are no residuals
  kValueBits,      // 0: all differences are added up in float32
  kChunkElements,
  kDensity,
  kLocalNumbers
};

// The numbers that workers compare before an exchange: each has 32 bits and must be the same on all of them.
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

// Columns of a report: the norms of this worker's difference, of its residual and of the mean of all workers'
// differences, and the mean cosine between the differences of two workers, weighted by the product of their norms.
enum LocalReport { kDifferenceNorm, kResidualNorm, kMeanNorm, kAgreement, kLocalReports };

// ---- The layout of a chunk ------------------------------------------------------------------------------------------
//
// The scales of the values come first, if there are any, then the values, in the order of their indices, and then the
// indices. These are in the code of Elias and Fano: the low bits of each, and one bit for each index and for each step
// of the high bits. This takes 2 bits more for each index than the low bits, whatever the indices are. A chunk of which
// all elements are sent has no indices.
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

  // Numbers is a number or a vector.
  template <class Numbers>
  MS_OPTIM_FN Numbers Velocity(Numbers mean, Numbers velocity) const {
    return momentum * velocity + mean;
  }
  template <class Numbers>
  MS_OPTIM_FN Numbers Direction(Numbers mean, Numbers velocity) const {
    return nesterov ? mean + momentum * velocity : velocity;
  }
};

// The kinds of weights: how each is read and written. `Written` is the number that a parameter holds once a weight is
// written to it. Local steps begin there: if they began at the weight itself, small steps would be taken back.
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

// Calls work(weight) with the weight of a tensor.
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
