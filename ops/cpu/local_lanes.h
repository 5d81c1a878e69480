// Local steps: vectors of a chunk, and the numbers of its rest, under the same names.
#pragma once

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "lanes.h"
#include "local_steps.h"

namespace ms_optim {
namespace {

template <class T>
LanesOf<T> LoadLanes(const T *from) {
  LanesOf<T> lanes;
  memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}

template <class Vector, class T>
void StoreLanes(const Vector &lanes, T *to) {
  static_assert(sizeof(lanes) == kLanes * sizeof(T), "one element a lane");
  memcpy(to, &lanes, sizeof(lanes));
}

inline void StoreAt(LanesOf<float> lanes, float *to) { StoreLanes(lanes, to); }
inline void StoreAt(float x, float *to) { *to = x; }

// Stores numbers that this processor does not read again, past the caches if possible: otherwise it would first read
// the line that they overwrite.
inline void StoreOnce(LanesOf<float> lanes, float *to) {
#if defined(__SSE2__)
  if (reinterpret_cast<uintptr_t>(to) % sizeof(__m128) == 0) {
    __m128 quarter[4];
    memcpy(quarter, &lanes, sizeof(lanes));
    for (int k = 0; k < 4; ++k) _mm_stream_ps(to + 4 * k, quarter[k]);
    return;
  }
#endif
  StoreLanes(lanes, to);
}
inline void StoreOnce(float x, float *to) { *to = x; }

// Orders stores: other threads see those past the caches before those that follow.
inline void OrderStores() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Returns a vector with 0 in the lanes that are left out, a bit each.
inline LanesOf<float> WithoutLanes(LanesOf<float> x, uint32_t left_out) {
#if defined(__AVX512F__)
  return reinterpret_cast<LanesOf<float>>(
      _mm512_maskz_mov_ps(static_cast<__mmask16>(~left_out), reinterpret_cast<__m512>(x)));
#else
  LanesOf<int32_t> bits;
  for (int k = 0; k < kLanes; ++k) bits[k] = 1 << k;
  const LanesOf<int32_t> stays = (bits & static_cast<int32_t>(left_out)) == 0;
  return reinterpret_cast<LanesOf<float>>(reinterpret_cast<LanesOf<int32_t>>(x) & stays);
#endif
}
inline float WithoutLanes(float x, uint32_t left_out) { return left_out % 2 != 0 ? 0.0f : x; }

// Sums of squares in 32 lanes, element i of a chunk in lane i mod 32, which are added in order: two vectors, so that no
// addition waits for the one before. They are float32: a chunk is short, and only a report reads the sum.
class SumOfSquares {
 public:
  static constexpr int kStep = 2 * kLanes;

  void Add(int i, LanesOf<float> x) { part_[i / kLanes % 2] += x * x; }
  void Add(int, float x) { part_[0][0] += x * x; }
  double Total() const {
    double sum = 0.0;
    for (int i = 0; i < kStep; ++i) sum += double{part_[i / kLanes][i % kLanes]};
    return sum;
  }

  static double Of(const float *x, int n) {
    SumOfSquares sum;
    int i = 0;
    for (; i + kStep <= n; i += kStep) {
      for (int at = i; at < i + kStep; at += kLanes) sum.Add(at, LoadLanes(x + at));
    }
    for (; i < n; ++i) sum.Add(i, x[i]);
    return sum.Total();
  }

 private:
  LanesOf<float> part_[2] = {};
};

// The sum of the checksums of adjacent weights, from an index on: of vectors first, and then of the rest.
class Checksum {
 public:
  explicit Checksum(uint32_t first) : index_(first) {
    for (int k = 0; k < kLanes; ++k) indices_[k] = (first + static_cast<uint32_t>(k)) * kIndexFactor;
  }

  void Add(LanesOf<float> weights) {
    LanesOf<uint32_t> mixed;
    memcpy(&mixed, &weights, sizeof(mixed));
    mixed = (mixed ^ indices_) * kChecksumFactor;
    lanes_ += mixed ^ (mixed >> 15);
    indices_ += kLanes * kIndexFactor;
    index_ += kLanes;
  }
  void Add(float weight) { rest_ += ChecksumOf(weight, index_++); }
  uint32_t Total() const {
    uint32_t sum = rest_;
    for (int k = 0; k < kLanes; ++k) sum += lanes_[k];
    return sum;
  }

 private:
  LanesOf<uint32_t> lanes_ = {}, indices_ = {};  // indices times their factor
  uint32_t rest_ = 0, index_;
};

// Read a vector of weights, return the numbers that it holds once it is written, and write it.
template <class Weight>
LanesOf<float> ReadLanes(const Weight &weight, int64_t i) {
  float numbers[kLanes];
  for (int k = 0; k < kLanes; ++k) numbers[k] = weight.Read(i + k);
  return LoadLanes(numbers);
}
inline LanesOf<float> ReadLanes(const PlainWeight &weight, int64_t i) { return LoadLanes(weight.weight + i); }

template <class Weight>
LanesOf<float> WrittenLanes(const Weight &weight, LanesOf<float> lanes) {
  float numbers[kLanes];
  StoreLanes(lanes, numbers);
  for (int k = 0; k < kLanes; ++k) numbers[k] = weight.Written(numbers[k]);
  return LoadLanes(numbers);
}
inline LanesOf<float> WrittenLanes(const PlainWeight &, LanesOf<float> lanes) { return lanes; }

template <class Weight>
void WriteAt(const Weight &weight, int64_t i, LanesOf<float> lanes) {
  float numbers[kLanes];
  StoreLanes(lanes, numbers);
  for (int k = 0; k < kLanes; ++k) weight.Write(i + k, numbers[k]);
}
inline void WriteAt(const PlainWeight &weight, int64_t i, LanesOf<float> lanes) {
  StoreLanes(lanes, weight.weight + i);
}
template <class Weight>
void WriteAt(const Weight &weight, int64_t i, float x) {
  weight.Write(i, x);
}

}  // namespace
}  // namespace ms_optim
