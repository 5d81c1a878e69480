// Local steps between exchanges, on the CPU: what a worker sends of its differences, and the outer step.
//
// Sending changes nothing, since the exchange may fail: the launch that applies what all sent computes the differences
// once more, with the same bits.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

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

// Room for a chunk.
struct Workbench {
  float theta[kLargestChunk], start[kLargestChunk], x[kLargestChunk], mean[kLargestChunk];
  int32_t keys[kLargestChunk], places[kLargestChunk + 1];
};

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
    return ForEachChunk([this](const LocalChunk &chunk, Workbench *bench, Found *) {
      ReadWeights(chunk, bench->theta);
      memcpy(chunk.tensor->start + chunk.begin, bench->theta, sizeof(float) * static_cast<size_t>(chunk.n));
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
      for (int i = 0; i < chunk.n; ++i) checksum += ChecksumOf(bench->start[i], first + static_cast<uint32_t>(i));
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
      if (step_.IsDense()) {
        const float *sum = static_cast<const float *>(step_.wires) + chunk.tensor->before + chunk.begin;
        memcpy(bench->mean, sum, sizeof(float) * static_cast<size_t>(chunk.n));
      } else {
        Receive(chunk, bench, found);
      }
      Move(chunk, bench, found);
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

  static void ReadWeights(const LocalChunk &chunk, float *theta) {
    const Tensor &t = chunk.tensor->t;
    if (t.weight_type == DType::kFloat32) {
      memcpy(theta, static_cast<const float *>(t.weight) + chunk.begin, sizeof(float) * static_cast<size_t>(chunk.n));
    } else if (t.weight_type == DType::kFloat16) {
      for (int i = 0; i < chunk.n; ++i) theta[i] = WeightAs<float16>(t, chunk.begin + i);
    } else if (t.remainder_type == DType::kInt16) {
      for (int i = 0; i < chunk.n; ++i) theta[i] = SplitWeightAt<int16_t>(t, chunk.begin + i);
    } else if (t.remainder_type == DType::kInt8) {
      for (int i = 0; i < chunk.n; ++i) theta[i] = SplitWeightAt<int8_t>(t, chunk.begin + i);
    } else {
      for (int i = 0; i < chunk.n; ++i) theta[i] = WeightAs<bfloat16>(t, chunk.begin + i);
    }
  }

  static double SumOfSquares(const float *x, int n) {
    double sums[8] = {};
    int i = 0;
    for (; i + 8 <= n; i += 8) {
      for (int k = 0; k < 8; ++k) sums[k] += double{x[i + k]} * double{x[i + k]};
    }
    for (; i < n; ++i) sums[0] += double{x[i]} * double{x[i]};
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
  }

  // Reads the weights, where they started, and the difference, with what was not sent before.
  void ReadDifference(const LocalChunk &chunk, Workbench *bench, Found *found) const {
    const LocalTensor &tensor = *chunk.tensor;
    ReadWeights(chunk, bench->theta);
    memcpy(bench->start, tensor.start + chunk.begin, sizeof(float) * static_cast<size_t>(chunk.n));
    const Tensor t = tensor.t;
    for (int i = 0; i < chunk.n; ++i) bench->x[i] = Written(t, bench->start[i]) - bench->theta[i];
    found->difference = SumOfSquares(bench->x, chunk.n);
    if (tensor.residual == nullptr) return;
    const auto decay = static_cast<float>(step_.numbers[kResidualDecay]);
    const float *residual = tensor.residual + chunk.begin;
    for (int i = 0; i < chunk.n; ++i) bench->x[i] = decay * residual[i] + bench->x[i];
  }

  // Finds the places of the elements that are largest in magnitude, NaN before all; of equal ones the first.
  static void Select(const ChunkCode &code, Workbench *bench) {
    const int n = code.elements, k = code.sent;
    int32_t *keys = bench->keys, low = 0, high = 0;
    for (int i = 0; i < n; ++i) {
      keys[i] = static_cast<int32_t>(BitsOf(bench->x[i]) & 0x7fffffffu);
      high = std::max(high, keys[i]);
    }
    ++high;  // of infinity and NaN no int32 is beyond
    // At least k reach `low`, and fewer reach `high`.
    int equal = n;
    while (high - low > 1) {
      const int32_t middle = low + (high - low) / 2;
      int reach = 0;
      for (int i = 0; i < n; ++i) reach += keys[i] >= middle;
      (reach >= k ? low : high) = middle;
      if (reach == k) break;
    }
    int above = 0;
    for (int i = 0; i < n; ++i) above += keys[i] > low;
    equal = k - above;
    for (int i = 0, found = 0; found < k; ++i) {
      const bool ties = keys[i] == low && equal > 0;
      bench->places[found] = i;
      found += keys[i] > low || ties;
      equal -= ties;
    }
  }

  void Encode(const ChunkCode &code, Workbench *bench, uint8_t *wire) const {
    memset(wire, 0, static_cast<size_t>(code.bytes));
    float *chosen = bench->mean;  // which is not needed yet
    if (code.HasPlaces()) {
      Select(code, bench);
      for (int j = 0; j < code.sent; ++j) {
        const int place = bench->places[j];
        chosen[j] = bench->x[place];
        PutBits(wire + code.low, int64_t{j} * code.low_bits, code.low_bits, static_cast<uint32_t>(place));
        PutBits(wire + code.high, j + (place >> code.low_bits), 1, 1u);
      }
    } else {
      chosen = bench->x;
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

  static float ValueAt(const ChunkCode &code, const uint8_t *wire, int j) {
    const uint8_t *values = wire + code.values;
    float value = 0.0f;
    if (code.value_bits == 32) {
      memcpy(&value, values + 4 * int64_t{j}, sizeof(value));
    } else if (code.value_bits == 16) {
      value = ToFloat(reinterpret_cast<const float16 *>(values)[j]);
    } else if (code.value_bits == 2) {
      float16 two[2];
      memcpy(two, wire, sizeof(two));
      const unsigned bits = static_cast<unsigned>(values[j / 4]) >> 2 * (j % 4);
      value = ToFloat(two[bits & 1u]) * ((bits & 2u) != 0 ? -1.0f : 1.0f);
    } else {
      float scale;
      memcpy(&scale, wire, sizeof(scale));
      const int stored = code.value_bits == 8 ? values[j] : values[j / 2] >> 4 * (j % 2) & 15;
      value = scale * static_cast<float>(stored - (1 << (code.value_bits - 1)));
    }
    return value;
  }

  // Calls for each element of a chunk that a worker sent, by place.
  template <class Take>
  static void Decode(const ChunkCode &code, const uint8_t *wire, const Take &take) {
    if (!code.HasPlaces()) {
      for (int j = 0; j < code.elements; ++j) take(j, ValueAt(code, wire, j));
      return;
    }
    const int bits = code.sent + ((code.elements - 1) >> code.low_bits);
    for (int bit = 0, j = 0; bit < bits && j < code.sent; ++bit) {
      if ((wire[code.high + bit / 8] >> bit % 8 & 1) == 0) continue;
      const uint32_t low = BitsAt(wire + code.low, int64_t{j} * code.low_bits, code.low_bits);
      const auto place = static_cast<int>(static_cast<uint32_t>(bit - j) << code.low_bits | low);
      if (place < code.elements) take(place, ValueAt(code, wire, j));
      ++j;
    }
  }

  // Adds up what all workers sent, in the workers' order, and keeps what this one has not sent.
  void Receive(const LocalChunk &chunk, Workbench *bench, Found *found) const {
    const ChunkCode code = CodeOf(chunk);
    const auto *wires = static_cast<const uint8_t *>(step_.wires) + chunk.place;
    const auto rank = static_cast<int>(step_.numbers[kLocalRank]);
    float *residual = chunk.tensor->residual;
    std::fill_n(bench->mean, chunk.n, 0.0f);
    double each = 0.0;
    for (int worker = 0; worker < step_.Workers(); ++worker) {
      Decode(code, wires + 4 * worker * step_.wire_words, [&](int place, float value) {
        bench->mean[place] += value;
        each += double{value} * double{value};
        if (worker != rank) return;
        const float left = bench->x[place] - value;
        bench->x[place] = left == left ? left : 0.0f;  // infinity and NaN leave nothing behind
      });
    }
    found->each = each;
    if (residual == nullptr) return;
    memcpy(residual + chunk.begin, bench->x, sizeof(float) * static_cast<size_t>(chunk.n));
    found->residual = SumOfSquares(bench->x, chunk.n);
  }

  // The outer step, from the sum of what all workers sent.
  void Move(const LocalChunk &chunk, Workbench *bench, Found *found) const {
    const LocalTensor &tensor = *chunk.tensor;
    found->total = SumOfSquares(bench->mean, chunk.n);
    const auto workers = static_cast<float>(step_.Workers());
    const OuterStep outer = outer_;
    float *start = bench->start, *mean = bench->mean;
    for (int i = 0; i < chunk.n; ++i) mean[i] /= workers;
    if (tensor.velocity != nullptr) {
      float *velocity = tensor.velocity + chunk.begin;
      for (int i = 0; i < chunk.n; ++i) {
        velocity[i] = outer.Velocity(mean[i], velocity[i]);
        mean[i] = outer.Direction(mean[i], velocity[i]);
      }
    }
    for (int i = 0; i < chunk.n; ++i) start[i] -= outer.rate * mean[i];
    // A worker that is alone goes on from where it is, to the last bit, which a difference may have lost.
    if (step_.IsDense() && step_.Workers() == 1 && outer.rate == 1.0f && tensor.velocity == nullptr) {
      memcpy(start, bench->theta, sizeof(float) * static_cast<size_t>(chunk.n));
    }
    memcpy(tensor.start + chunk.begin, start, sizeof(float) * static_cast<size_t>(chunk.n));
    const Tensor t = tensor.t;
    for (int i = 0; i < chunk.n; ++i) Write(t, chunk.begin + i, start[i]);
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
