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
  int64_t place;                       // byte of its first chunk in a wire
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
};

// Columns of a report: norms of this worker's difference, of its residual and of the mean of what all sent, and the
// mean cosine between what two workers sent, weighted by the product of their norms.
enum LocalReport { kDifferenceNorm, kResidualNorm, kMeanNorm, kAgreement, kLocalReports };

// ---- How a chunk travels --------------------------------------------------------------------------------------------
//
// First the scales of its values, if they have any, then the values, in the order of their places; then the places, in
// the code of Elias and Fano: of each the low bits, and one bit for each place and each step of the high bits. This
// takes 2 bits a place more than the low ones, whatever the places are. Where all elements are sent there are none.
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
  MS_OPTIM_FN bool HasPlaces() const { return sent < elements; }
};

MS_OPTIM_FN int64_t WireBytes(int64_t size, const double *numbers) {
  const auto chunk = static_cast<int64_t>(numbers[kChunkElements]);
  const auto bits = static_cast<int>(numbers[kValueBits]);
  const int64_t whole = size / chunk, rest = size % chunk;
  const int64_t last = rest > 0 ? ChunkCode(static_cast<int>(rest), numbers[kDensity], bits).bytes : 0;
  return whole * ChunkCode(static_cast<int>(chunk), numbers[kDensity], bits).bytes + last;
}

MS_OPTIM_FN void PutBits(uint8_t *bytes, int64_t at, int count, uint32_t value) {
  for (int b = 0; b < count; ++b) {
    if ((value >> b & 1u) != 0) bytes[(at + b) / 8] = static_cast<uint8_t>(bytes[(at + b) / 8] | 1u << (at + b) % 8);
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

  MS_OPTIM_FN float Velocity(float mean, float velocity) const { return momentum * velocity + mean; }
  MS_OPTIM_FN float Direction(float mean, float velocity) const {
    return nesterov ? mean + momentum * velocity : velocity;
  }
};

// Returns what a parameter holds once a weight was written to it. Local steps begin there, and not at the weight, of
// which small steps would otherwise be taken back.
MS_OPTIM_FN float Written(const Tensor &t, float weight) {
  if (t.remainder_type == DType::kInt8) return FromBits(Remainder<int8_t>::Kept(BitsOf(weight), 0x80u));
  if (t.remainder_type == DType::kInt16 || t.master != nullptr || t.weight_type == DType::kFloat32) return weight;
  if (t.weight_type == DType::kFloat16) {
    float16 rounded;
    Store(weight, &rounded);
    return ToFloat(rounded);
  }
  bfloat16 rounded;
  Store(weight, &rounded);
  return ToFloat(rounded);
}

template <class T>
MS_OPTIM_FN void WriteAs(const Tensor &t, int64_t i, float weight) {
  if (t.master != nullptr) t.master[i] = weight;
  Store(weight, static_cast<T *>(t.weight) + i);
}

template <class R>
MS_OPTIM_FN void WriteSplit(const Tensor &t, int64_t i, float weight) {
  Split(weight, 0x80u, static_cast<bfloat16 *>(t.weight) + i, static_cast<R *>(t.remainder) + i);
}

MS_OPTIM_FN void Write(const Tensor &t, int64_t i, float weight) {
  if (t.weight_type == DType::kFloat32) {
    static_cast<float *>(t.weight)[i] = weight;
  } else if (t.weight_type == DType::kFloat16) {
    WriteAs<float16>(t, i, weight);
  } else if (t.remainder_type == DType::kInt16) {
    WriteSplit<int16_t>(t, i, weight);
  } else if (t.remainder_type == DType::kInt8) {
    WriteSplit<int8_t>(t, i, weight);
  } else {
    WriteAs<bfloat16>(t, i, weight);
  }
}

MS_OPTIM_FN uint32_t ChecksumOf(float weight, uint32_t place) {
  const uint32_t mixed = (BitsOf(weight) ^ place * 0x9e3779b1u) * 0x85ebca77u;
  return mixed ^ mixed >> 15;
}

}  // namespace ms_optim
