// Local steps between exchanges, on the CPU: what a worker sends of its differences, and the outer step.
//
// Sending changes nothing, since the exchange may fail: the launch that applies what all sent computes the differences
// once more, with the same bits.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "denormals.h"
#include "engine.h"
#include "local_steps.h"

namespace ms_optim {
namespace {

constexpr int kDenseChunk = 1024;  // all that is read and written of a chunk stays in the first cache
constexpr int kLargestChunk = 1 << 16;

// A part of a tensor that one thread works on at a time.
struct LocalChunk {
  const LocalTensor *tensor;
  int64_t begin;
  int n;
  int64_t place;  // byte in a wire
};

// Room for a chunk. The arrays begin at places of a page of their own: processors confuse loads and stores that are
// whole pages apart.
constexpr int kApart = kLargestChunk + 208;
struct Workbench {
  float x[kApart], mean[kApart], values[kApart];
  int32_t keys[kApart], candidates[kApart], places[kApart];
};

constexpr int kOfGroup = 16;

// Sums of squares in 32 lanes, element i of a chunk in lane i mod 32, which are added in order: two vectors, so that no
// addition waits for the one before. In float32: a chunk is short, and this is for a report alone.
struct SumOfSquares {
  LanesOf<float> part[2] = {};

  static constexpr int kStep = 2 * kLanes;

  void Add(int half, LanesOf<float> x) { part[half] += x * x; }
  void AddRest(float x) { part[0][0] += x * x; }
  double Total() const {
    double sum = 0.0;
    for (int i = 0; i < kStep; ++i) sum += double{part[i / kLanes][i % kLanes]};
    return sum;
  }

  static double Of(const float *x, int n) {
    SumOfSquares sum;
    int i = 0;
    for (; i + kStep <= n; i += kStep) {
      for (int half = 0; half < 2; ++half) sum.Add(half, Load(x + i + half * kLanes));
    }
    for (; i < n; ++i) sum.AddRest(x[i]);
    return sum.Total();
  }

  static LanesOf<float> Load(const float *x) {
    LanesOf<float> lanes;
    memcpy(&lanes, x, sizeof(lanes));
    return lanes;
  }
};

// Stores lanes that this processor does not read again, past the caches where it can: else it would first read what is
// there.
inline void StoreOnce(LanesOf<float> lanes, float *to) {
#if defined(__SSE2__)
  if (reinterpret_cast<uintptr_t>(to) % sizeof(__m128) == 0) {
    __m128 quarter[4];
    memcpy(quarter, &lanes, sizeof(lanes));
    for (int k = 0; k < 4; ++k) _mm_stream_ps(to + 4 * k, quarter[k]);
    return;
  }
#endif
  memcpy(to, &lanes, sizeof(lanes));
}

// Other threads see what was stored past the caches before what is stored from here on.
inline void OrderStores() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// What lanes of a weight hold, what they hold once they are written, and how they are.
template <class Weight>
LanesOf<float> ReadLanes(const Weight &weight, int64_t i) {
  float numbers[kLanes];
  for (int k = 0; k < kLanes; ++k) numbers[k] = weight.Read(i + k);
  return SumOfSquares::Load(numbers);
}
inline LanesOf<float> ReadLanes(const PlainWeight &weight, int64_t i) { return SumOfSquares::Load(weight.weight + i); }

template <class Weight>
LanesOf<float> WrittenLanes(const Weight &weight, LanesOf<float> lanes) {
  float numbers[kLanes];
  memcpy(numbers, &lanes, sizeof(lanes));
  for (int k = 0; k < kLanes; ++k) numbers[k] = weight.Written(numbers[k]);
  return SumOfSquares::Load(numbers);
}
inline LanesOf<float> WrittenLanes(const PlainWeight &, LanesOf<float> lanes) { return lanes; }

template <class Weight>
void WriteLanes(const Weight &weight, int64_t i, LanesOf<float> lanes) {
  float numbers[kLanes];
  memcpy(numbers, &lanes, sizeof(lanes));
  for (int k = 0; k < kLanes; ++k) weight.Write(i + k, numbers[k]);
}
inline void WriteLanes(const PlainWeight &weight, int64_t i, LanesOf<float> lanes) {
  memcpy(weight.weight + i, &lanes, sizeof(lanes));
}

// What a chunk adds to the norms of a report, to the sum of squares of what all workers sent, and to the checksum of
// the weights that they started from.
struct Found {
  double difference, residual, total, each;
  uint32_t checksum;
};

class LocalEngine {
 public:
  explicit LocalEngine(const LocalStep &step) : step_(step), outer_(step.numbers) {}

  // Begins: the weights are what all start from.
  Status Begin() {
    return ForEachChunk([](const LocalChunk &chunk, Workbench *, Found *) {
      float *start = chunk.tensor->start + chunk.begin;
      WithWeight(chunk.tensor->t, [&](const auto &weight) {
        for (int i = 0; i < chunk.n; ++i) start[i] = weight.Read(chunk.begin + i);
      });
    });
  }

  Status Send() {
    const Status status = ForEachChunk([this](const LocalChunk &chunk, Workbench *bench, Found *found) {
      if (step_.IsDense()) {
        float *sent = static_cast<float *>(step_.wire) + chunk.tensor->before + chunk.begin;
        found->checksum = ReadDifference<true>(chunk, sent, found);
        OrderStores();
      } else {
        found->checksum = ReadDifference<true>(chunk, bench->x, found);
        Encode(CodeOf(chunk), bench, static_cast<uint8_t *>(step_.wire) + chunk.place);
      }
    });
    if (status != kOk) return status;
    const Found all = Total();
    if (step_.IsDense()) static_cast<float *>(step_.wire)[step_.elements] = static_cast<float>(all.difference);
    step_.mark[kMarkStart] = static_cast<int32_t>(all.checksum);
    return kOk;
  }

  Status Apply() {
    const Status status = ForEachChunk([this](const LocalChunk &chunk, Workbench *bench, Found *found) {
      if (step_.IsDense()) {
        Move<true>(chunk, static_cast<const float *>(step_.wires) + chunk.tensor->before + chunk.begin, found);
      } else {
        ReadDifference<false>(chunk, bench->x, found);
        Receive(chunk, bench, found);
        Move<false>(chunk, bench->mean, found);
      }
    });
    if (status != kOk) return status;
    Found all = Total();
    if (step_.IsDense()) all.each = static_cast<const float *>(step_.wires)[step_.elements];
    const double n = step_.numbers[kLocalWorkers];
    step_.report[kDifferenceNorm] = static_cast<float>(sqrt(all.difference));
    step_.report[kResidualNorm] = static_cast<float>(sqrt(all.residual));
    step_.report[kMeanNorm] = static_cast<float>(sqrt(all.total) / n);
    const double others = (n - 1.0) * all.each;
    step_.report[kAgreement] = static_cast<float>(others > 0.0 ? (all.total - all.each) / others : 1.0);
    return kOk;
  }

 private:
  template <class Work>
  Status ForEachChunk(const Work &work) {
    const auto most = step_.IsDense() ? int64_t{kDenseChunk} : static_cast<int64_t>(step_.numbers[kChunkElements]);
    std::vector<LocalChunk> chunks;
    for (int k = 0; k < step_.count; ++k) {
      const LocalTensor &tensor = step_.tensors[k];
      int64_t place = tensor.place;
      for (int64_t begin = 0; begin < tensor.t.size; begin += most) {
        chunks.push_back({&tensor, begin, static_cast<int>(std::min(most, tensor.t.size - begin)), place});
        if (!step_.IsDense()) place += CodeOf(chunks.back()).bytes;
      }
    }
    found_.assign(chunks.size(), Found{});
    bool has_memory = true;
#pragma omp parallel
    {
      const DenormalsAreZero in_this_thread;
      const std::unique_ptr<Workbench> bench(new (std::nothrow) Workbench);
#pragma omp for schedule(static)
      for (size_t k = 0; k < chunks.size(); ++k) {
        if (bench != nullptr) work(chunks[k], bench.get(), &found_[k]);
      }
      if (bench == nullptr) {
#pragma omp atomic write
        has_memory = false;
      }
    }
    return has_memory ? kOk : kNoMemory;
  }

  // The order of the chunks is that of the sum, whatever thread had which.
  Found Total() const {
    Found all{};
    for (const Found &one : found_) {
      all.difference += one.difference;
      all.residual += one.residual;
      all.total += one.total;
      all.each += one.each;
      all.checksum += one.checksum;
    }
    return all;
  }

  ChunkCode CodeOf(const LocalChunk &chunk) const {
    return ChunkCode(chunk.n, step_.numbers[kDensity], static_cast<int>(step_.numbers[kValueBits]));
  }

  // Reads the difference of the weights from where they started, with what was not sent before; where it is sent as it
  // is, to the wire. Returns the checksum of the start if it is asked for.
  template <bool kSends>
  uint32_t ReadDifference(const LocalChunk &chunk, float *x, Found *found) const {
    const LocalTensor &tensor = *chunk.tensor;
    const float *start = tensor.start + chunk.begin;
    const float *residual = tensor.residual == nullptr ? nullptr : tensor.residual + chunk.begin;
    const auto decay = static_cast<float>(step_.numbers[kResidualDecay]);
    const auto first = static_cast<uint32_t>(chunk.tensor->before + chunk.begin);
    const bool once = kSends && step_.IsDense();
    SumOfSquares sum;
    LanesOf<uint32_t> checksums = {};
    uint32_t checksum = 0;
    WithWeight(tensor.t, [&](const auto &weight) {
      int i = 0;
      for (; i + SumOfSquares::kStep <= chunk.n; i += SumOfSquares::kStep) {
        for (int half = 0; half < 2; ++half) {
          const int at = i + half * kLanes;
          const LanesOf<float> from = SumOfSquares::Load(start + at);
          LanesOf<float> lanes = WrittenLanes(weight, from) - ReadLanes(weight, chunk.begin + at);
          sum.Add(half, lanes);
          if (residual != nullptr) lanes = decay * SumOfSquares::Load(residual + at) + lanes;
          if (once) {
            StoreOnce(lanes, x + at);
          } else {
            memcpy(x + at, &lanes, sizeof(lanes));
          }
          if (kSends) checksums += ChecksumsOf(from, first + static_cast<uint32_t>(at));
        }
      }
      for (; i < chunk.n; ++i) {
        x[i] = weight.Written(start[i]) - weight.Read(chunk.begin + i);
        sum.AddRest(x[i]);
        if (residual != nullptr) x[i] = decay * residual[i] + x[i];
        if (kSends) checksum += ChecksumOf(start[i], first + static_cast<uint32_t>(i));
      }
    });
    found->difference = sum.Total();
    for (int k = 0; k < kLanes; ++k) checksum += checksums[k];
    return checksum;
  }

  // The same as ChecksumOf, of elements that follow each other.
  static LanesOf<uint32_t> ChecksumsOf(LanesOf<float> weights, uint32_t place) {
    LanesOf<uint32_t> mixed;
    memcpy(&mixed, &weights, sizeof(mixed));
    LanesOf<uint32_t> places = {};
    for (int k = 0; k < kLanes; ++k) places[k] = static_cast<uint32_t>(k);
    mixed = (mixed ^ ((places + place) * kPlaceFactor)) * kChecksumFactor;
    return mixed ^ (mixed >> 15);
  }

  static int32_t KeyOf(float x) { return static_cast<int32_t>(BitsOf(x) & 0x7fffffffu); }

  // Finds the places of the elements that are largest in magnitude, NaN before all; of equal ones the first.
  static void Select(const ChunkCode &code, Workbench *bench) {
    const int n = code.elements, k = code.sent, groups = n / kOfGroup;
    if (k > groups / 2) {
      for (int i = 0; i < n; ++i) bench->keys[i] = KeyOf(bench->x[i]);
      const auto [low, ties] = Threshold(bench->keys, n, k);
      for (int i = 0, found = 0, left = ties; found < k; ++i)
        Choose(bench->keys[i], i, low, bench->places, &found, &left);
      return;
    }
    // At least k elements reach the k-th largest of the maxima of groups, and few besides. An element is in the group
    // of those that are as far into each row of the chunk.
    const float *x = bench->x;
    int32_t *maxima = bench->keys, *candidates = bench->candidates;
    for (int g = 0; g < groups; ++g) maxima[g] = KeyOf(x[g]);
    for (int row = 1; row < kOfGroup; ++row) {
      const float *of_row = x + row * groups;
      for (int g = 0; g < groups; ++g) maxima[g] = std::max(maxima[g], KeyOf(of_row[g]));
    }
    const int32_t bound = Threshold(maxima, groups, k).first;
    const int count = Reaching(x, n, bound, candidates);
    int32_t *keys = bench->keys;
    for (int j = 0; j < count; ++j) keys[j] = KeyOf(x[candidates[j]]);
    const auto [low, ties] = Threshold(keys, count, k);
    for (int j = 0, found = 0, left = ties; found < k; ++j)
      Choose(keys[j], candidates[j], low, bench->places, &found, &left);
  }

  // Finds the places of the elements whose keys reach a bound, and returns how many these are.
  static int Reaching(const float *x, int n, int32_t bound, int32_t *places) {
    int count = 0, i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      LanesOf<int32_t> keys;
      memcpy(&keys, x + i, sizeof(keys));
      keys &= 0x7fffffff;
#if defined(__AVX512F__)
      unsigned mask = _mm512_cmpge_epi32_mask(reinterpret_cast<__m512i>(keys), _mm512_set1_epi32(bound));
#else
      const auto reach = keys >= bound;
      int32_t any = 0;
      for (int k = 0; k < kLanes; ++k) any |= reach[k];
      if (any == 0) continue;
      unsigned mask = 0;
      for (int k = 0; k < kLanes; ++k) mask |= reach[k] != 0 ? 1u << k : 0u;
#endif
      for (; mask != 0; mask &= mask - 1) places[count++] = i + __builtin_ctz(mask);
    }
    for (; i < n; ++i) {
      if (KeyOf(x[i]) >= bound) places[count++] = i;
    }
    return count;
  }

  static void Choose(int32_t key, int place, int32_t low, int32_t *places, int *found, int *ties) {
    const bool equals = key == low && *ties > 0;
    places[*found] = place;
    *found += key > low || equals;
    *ties -= equals;
  }

  // Returns a key that at least k of some keys reach, and how many that equal it are among the k largest.
  static std::pair<int32_t, int> Threshold(const int32_t *keys, int n, int k) {
    int32_t low = 0, high = 0;
    for (int i = 0; i < n; ++i) high = std::max(high, keys[i]);
    ++high;  // fewer than k reach it
    while (high - low > 1) {
      const int32_t middle = low + (high - low) / 2;
      int reach = 0;
      for (int i = 0; i < n; ++i) reach += keys[i] >= middle;
      (reach >= k ? low : high) = middle;
      if (reach == k) break;
    }
    int above = 0;
    for (int i = 0; i < n; ++i) above += keys[i] > low;
    return {low, k - above};
  }

  void Encode(const ChunkCode &code, Workbench *bench, uint8_t *wire) const {
    memset(wire, 0, static_cast<size_t>(code.bytes));
    const float *chosen = bench->x;
    if (code.HasPlaces()) {
      Select(code, bench);
      for (int j = 0; j < code.sent; ++j) {
        const int place = bench->places[j];
        bench->values[j] = bench->x[place];
        PutBits(wire + code.low, int64_t{j} * code.low_bits, code.low_bits, static_cast<uint32_t>(place));
        PutBits(wire + code.high, j + (place >> code.low_bits), 1, 1u);
      }
      chosen = bench->values;
    }
    PutValues(code, chosen, wire);
  }

  static void PutValues(const ChunkCode &code, const float *chosen, uint8_t *wire) {
    uint8_t *values = wire + code.values;
    const int k = code.sent;
    if (code.value_bits == 32) memcpy(values, chosen, sizeof(float) * static_cast<size_t>(k));
    if (code.value_bits == 16) {
      for (int j = 0; j < k; ++j) HalfOf(chosen[j], reinterpret_cast<float16 *>(values) + j);
    }
    if (code.value_bits == 8 || code.value_bits == 4) PutLevels(code, chosen, wire);
    if (code.value_bits == 2) PutTwoMagnitudes(code, chosen, wire);
  }

  // Values are multiples of a scale, which the largest magnitude is so many times as there are levels.
  static void PutLevels(const ChunkCode &code, const float *chosen, uint8_t *wire) {
    const int levels = (1 << (code.value_bits - 1)) - 1;
    uint32_t largest = 0;
    for (int j = 0; j < code.sent; ++j) largest = std::max(largest, BitsOf(chosen[j]) & 0x7fffffffu);
    const float scale = FromBits(largest) / static_cast<float>(levels);
    memcpy(wire, &scale, sizeof(scale));
    const bool usable = scale > 0.0f && largest < 0x7f800000u;
    uint8_t *values = wire + code.values;
    for (int j = 0; j < code.sent; ++j) {
      const float level = usable ? nearbyintf(chosen[j] / scale) : 0.0f;
      const auto stored = static_cast<uint8_t>(static_cast<int>(level) + levels + 1);
      if (code.value_bits == 8) {
        values[j] = stored;
      } else {
        values[j / 2] = static_cast<uint8_t>(values[j / 2] | stored << 4 * (j % 2));
      }
    }
  }

  // A value is its sign and one of two magnitudes: the mean of those up to the mean of all, and the mean of the rest.
  static void PutTwoMagnitudes(const ChunkCode &code, const float *chosen, uint8_t *wire) {
    const int k = code.sent;
    double sum = 0.0, below = 0.0;
    for (int j = 0; j < k; ++j) sum += fabs(double{chosen[j]});
    const auto mean = static_cast<float>(sum / k);
    int small = 0;
    for (int j = 0; j < k; ++j) {
      const float magnitude = fabsf(chosen[j]);
      below += magnitude > mean ? 0.0 : double{magnitude};
      small += !(magnitude > mean);
    }
    float16 two[2];
    HalfOf(static_cast<float>(below / std::max(small, 1)), &two[0]);
    HalfOf(static_cast<float>((sum - below) / std::max(k - small, 1)), &two[1]);
    memcpy(wire, two, sizeof(two));
    uint8_t *values = wire + code.values;
    for (int j = 0; j < k; ++j) {
      const unsigned bits = (BitsOf(chosen[j]) >> 31) << 1 | (fabsf(chosen[j]) > mean ? 1u : 0u);
      values[j / 4] = static_cast<uint8_t>(values[j / 4] | bits << 2 * (j % 4));
    }
  }

  // Reads the values that a worker sent of a chunk.
  static void ReadValues(const ChunkCode &code, const uint8_t *wire, float *out) {
    const uint8_t *values = wire + code.values;
    const int k = code.sent;
    if (code.value_bits == 32) {
      memcpy(out, values, sizeof(float) * static_cast<size_t>(k));
    } else if (code.value_bits == 16) {
      const auto *halves = reinterpret_cast<const float16 *>(values);
      for (int j = 0; j < k; ++j) out[j] = ToFloat(halves[j]);
    } else if (code.value_bits == 2) {
      float16 two[2];
      memcpy(two, wire, sizeof(two));
      const float small = ToFloat(two[0]), large = ToFloat(two[1]), of[] = {small, large, -small, -large};
      for (int j = 0; j < k; ++j) out[j] = of[values[j / 4] >> 2 * (j % 4) & 3];
    } else {
      float scale;
      memcpy(&scale, wire, sizeof(scale));
      if (code.value_bits == 8) {
        for (int j = 0; j < k; ++j) out[j] = scale * static_cast<float>(int{values[j]} - 128);
      } else {
        for (int j = 0; j < k; ++j) out[j] = scale * static_cast<float>((values[j / 2] >> 4 * (j % 2) & 15) - 8);
      }
    }
  }

  // Reads their places; what is no place of the chunk is 0.
  static void ReadPlaces(const ChunkCode &code, const uint8_t *wire, int32_t *places) {
    const int bits = code.sent + ((code.elements - 1) >> code.low_bits);
    int j = 0;
    for (int byte = 0; byte < (bits + 7) / 8; ++byte) {
      for (unsigned flags = wire[code.high + byte]; flags != 0 && j < code.sent; flags &= flags - 1) {
        const int high = 8 * byte + __builtin_ctz(flags) - j;
        const uint32_t low = BitsAt(wire + code.low, int64_t{j} * code.low_bits, code.low_bits);
        const auto place = static_cast<int32_t>(static_cast<uint32_t>(high) << code.low_bits | low);
        places[j++] = place < code.elements ? place : 0;
      }
    }
    for (; j < code.sent; ++j) places[j] = 0;
  }

  // Adds up what all workers sent, in the workers' order, and keeps what this one has not sent.
  void Receive(const LocalChunk &chunk, Workbench *bench, Found *found) const {
    const ChunkCode code = CodeOf(chunk);
    const auto *wires = static_cast<const uint8_t *>(step_.wires) + chunk.place;
    const auto rank = static_cast<int>(step_.numbers[kLocalRank]);
    const int k = code.sent;
    float *values = bench->values, *mean = bench->mean, *x = bench->x;
    int32_t *places = bench->places;
    std::fill_n(mean, chunk.n, 0.0f);
    for (int worker = 0; worker < step_.Workers(); ++worker) {
      const uint8_t *wire = wires + 4 * worker * step_.wire_words;
      ReadValues(code, wire, values);
      found->each += SumOfSquares::Of(values, k);
      if (code.HasPlaces()) {
        ReadPlaces(code, wire, places);
        for (int j = 0; j < k; ++j) mean[places[j]] += values[j];
      } else {
        for (int j = 0; j < k; ++j) mean[j] += values[j];
      }
      if (worker != rank || chunk.tensor->residual == nullptr) continue;
      for (int j = 0; j < k; ++j) {
        float *own = x + (code.HasPlaces() ? places[j] : j);
        const float left = *own - values[j];
        *own = left == left ? left : 0.0f;  // infinity and NaN leave nothing behind
      }
    }
    if (chunk.tensor->residual == nullptr) return;
    memcpy(chunk.tensor->residual + chunk.begin, x, sizeof(float) * static_cast<size_t>(chunk.n));
    found->residual = SumOfSquares::Of(x, chunk.n);
  }

  // The outer step, from the sum of what all workers sent. kDense: that is in float32, and the difference of this
  // worker's weights is yet to be reported.
  template <bool kDense>
  void Move(const LocalChunk &chunk, const float *sum, Found *found) const {
    const int count = step_.Workers();
    // A power of two divides as exactly, and faster, by its inverse.
    const auto workers = static_cast<float>(count);
    const float inverse = 1.0f / workers;
    // A worker that is alone goes on from where it is, to the last bit, which a difference may have lost.
    const bool stays = kDense && count == 1 && outer_.rate == 1.0f && chunk.tensor->velocity == nullptr;
    const auto move = [&](const auto &mean) {
      WithWeight(chunk.tensor->t, [&](const auto &weight) {
        if (chunk.tensor->velocity == nullptr) {
          MoveAlong<kDense, false>(chunk, weight, sum, stays, found, mean);
        } else {
          MoveAlong<kDense, true>(chunk, weight, sum, false, found, mean);
        }
      });
    };
    if ((count & (count - 1)) == 0) {
      move([=](auto x) { return x * inverse; });
    } else {
      move([=](auto x) { return x / workers; });
    }
  }

  template <bool kDense, bool kHasVelocity, class Weight, class Mean>
  void MoveAlong(const LocalChunk &chunk, const Weight &weight, const float *sum, bool stays, Found *found,
                 const Mean &mean) const {
    const LocalTensor &tensor = *chunk.tensor;
    const OuterStep outer = outer_;
    float *start = tensor.start + chunk.begin;
    float *velocity = kHasVelocity ? tensor.velocity + chunk.begin : nullptr;
    SumOfSquares total, difference;
    int i = 0;
    for (; i + SumOfSquares::kStep <= chunk.n; i += SumOfSquares::kStep) {
      for (int half = 0; half < 2; ++half) {
        const int at = i + half * kLanes;
        const LanesOf<float> received = SumOfSquares::Load(sum + at), from = SumOfSquares::Load(start + at);
        LanesOf<float> along = mean(received), moved = from;
        total.Add(half, received);
        if (kDense) {
          moved = ReadLanes(weight, chunk.begin + at);
          difference.Add(half, WrittenLanes(weight, from) - moved);
        }
        if (kHasVelocity) {
          const LanesOf<float> v = outer.Velocity(along, SumOfSquares::Load(velocity + at));
          memcpy(velocity + at, &v, sizeof(v));
          along = outer.Direction(along, v);
        }
        if (!stays) moved = from - outer.rate * along;
        memcpy(start + at, &moved, sizeof(moved));
        WriteLanes(weight, chunk.begin + at, moved);
      }
    }
    for (; i < chunk.n; ++i) {
      total.AddRest(sum[i]);
      const float held = weight.Read(chunk.begin + i);
      if (kDense) difference.AddRest(weight.Written(start[i]) - held);
      float along = mean(sum[i]);
      if (kHasVelocity) {
        velocity[i] = outer.Velocity(along, velocity[i]);
        along = outer.Direction(along, velocity[i]);
      }
      start[i] = stays ? held : start[i] - outer.rate * along;
      weight.Write(chunk.begin + i, start[i]);
    }
    found->total = total.Total();
    if (kDense) found->difference = difference.Total();
  }

  const LocalStep step_;
  const OuterStep outer_;
  std::vector<Found> found_;
};

Status BeginLocal(const LocalStep &step) { return LocalEngine(step).Begin(); }
Status SendLocal(const LocalStep &step) { return LocalEngine(step).Send(); }
Status ApplyLocal(const LocalStep &step) { return LocalEngine(step).Apply(); }

}  // namespace
}  // namespace ms_optim
