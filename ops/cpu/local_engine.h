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

#include "denormals.h"
#include "engine.h"
#include "local_steps.h"

namespace ms_optim {
namespace {

constexpr int kDenseChunk = 4096;
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
      ReadDifference(chunk, bench, found);
      if (step_.IsDense()) {
        float *sent = static_cast<float *>(step_.wire) + chunk.tensor->before + chunk.begin;
        memcpy(sent, bench->x, sizeof(float) * static_cast<size_t>(chunk.n));
      } else {
        Encode(CodeOf(chunk), bench, static_cast<uint8_t *>(step_.wire) + chunk.place);
      }
      uint32_t checksum = 0;
      const auto first = static_cast<uint32_t>(chunk.tensor->before + chunk.begin);
      const float *start = chunk.tensor->start + chunk.begin;
      for (int i = 0; i < chunk.n; ++i) checksum += ChecksumOf(start[i], first + static_cast<uint32_t>(i));
      found->checksum = checksum;
    });
    if (status != kOk) return status;
    const Found all = Total();
    if (step_.IsDense()) static_cast<float *>(step_.wire)[step_.elements] = static_cast<float>(all.difference);
    step_.mark[kMarkStart] = static_cast<int32_t>(all.checksum);
    return kOk;
  }

  Status Apply() {
    const Status status = ForEachChunk([this](const LocalChunk &chunk, Workbench *bench, Found *found) {
      ReadDifference(chunk, bench, found);
      const float *sum = bench->mean;
      if (step_.IsDense()) {
        sum = static_cast<const float *>(step_.wires) + chunk.tensor->before + chunk.begin;
      } else {
        Receive(chunk, bench, found);
      }
      Move(chunk, sum, bench, found);
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

  // In float32: a chunk is short, and this is for a report alone. As many sums as any processor has lanes, so that all
  // have the same bits.
  static double SumOfSquares(const float *x, int n) {
    constexpr int kLanes = 32;
    float sums[kLanes] = {};
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) {
#pragma omp simd
      for (int k = 0; k < kLanes; ++k) sums[k] += x[i + k] * x[i + k];
    }
    for (; i < n; ++i) sums[0] += x[i] * x[i];
    double sum = 0.0;
    for (const float one : sums) sum += double{one};
    return sum;
  }

  // Reads the difference of the weights from where they started, with what was not sent before.
  void ReadDifference(const LocalChunk &chunk, Workbench *bench, Found *found) const {
    const LocalTensor &tensor = *chunk.tensor;
    const float *start = tensor.start + chunk.begin;
    float *x = bench->x;
    WithWeight(tensor.t, [&](const auto &weight) {
      for (int i = 0; i < chunk.n; ++i) x[i] = weight.Written(start[i]) - weight.Read(chunk.begin + i);
    });
    found->difference = SumOfSquares(x, chunk.n);
    if (tensor.residual == nullptr) return;
    const auto decay = static_cast<float>(step_.numbers[kResidualDecay]);
    const float *residual = tensor.residual + chunk.begin;
    for (int i = 0; i < chunk.n; ++i) x[i] = decay * residual[i] + x[i];
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
    int count = 0;
    for (int g = 0; g < groups; ++g) {
      if (maxima[g] < bound) continue;
      for (int i = g; i < kOfGroup * groups; i += groups) {
        if (KeyOf(x[i]) >= bound) candidates[count++] = i;
      }
    }
    std::sort(candidates, candidates + count);
    for (int i = kOfGroup * groups; i < n; ++i) {
      if (KeyOf(x[i]) >= bound) candidates[count++] = i;
    }
    int32_t *keys = bench->keys;
    for (int j = 0; j < count; ++j) keys[j] = KeyOf(x[candidates[j]]);
    const auto [low, ties] = Threshold(keys, count, k);
    for (int j = 0, found = 0, left = ties; found < k; ++j)
      Choose(keys[j], candidates[j], low, bench->places, &found, &left);
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
      found->each += SumOfSquares(values, k);
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
    found->residual = SumOfSquares(x, chunk.n);
  }

  // The outer step, from the sum of what all workers sent.
  void Move(const LocalChunk &chunk, const float *sum, Workbench *bench, Found *found) const {
    const LocalTensor &tensor = *chunk.tensor;
    found->total = SumOfSquares(sum, chunk.n);
    const int count = step_.Workers();
    const auto workers = static_cast<float>(count);
    // A power of two divides as exactly, and faster, by its inverse.
    const bool is_power = (count & (count - 1)) == 0;
    const float inverse = 1.0f / workers;
    const OuterStep outer = outer_;
    float *start = tensor.start + chunk.begin, *along = bench->mean;
    if (is_power) {
      for (int i = 0; i < chunk.n; ++i) along[i] = sum[i] * inverse;
    } else {
      for (int i = 0; i < chunk.n; ++i) along[i] = sum[i] / workers;
    }
    if (tensor.velocity != nullptr) {
      float *velocity = tensor.velocity + chunk.begin;
      for (int i = 0; i < chunk.n; ++i) {
        velocity[i] = outer.Velocity(along[i], velocity[i]);
        along[i] = outer.Direction(along[i], velocity[i]);
      }
    }
    // A worker that is alone goes on from where it is, to the last bit, which a difference may have lost.
    const bool stays = step_.IsDense() && step_.Workers() == 1 && outer.rate == 1.0f && tensor.velocity == nullptr;
    WithWeight(tensor.t, [&](const auto &weight) {
      if (stays) {
        for (int i = 0; i < chunk.n; ++i) start[i] = weight.Read(chunk.begin + i);
      } else {
        for (int i = 0; i < chunk.n; ++i) start[i] -= outer.rate * along[i];
      }
      for (int i = 0; i < chunk.n; ++i) weight.Write(chunk.begin + i, start[i]);
    });
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
