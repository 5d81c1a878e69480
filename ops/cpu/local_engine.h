// Local steps between exchanges, on the CPU: sending the differences of a worker, and the outer step.
//
// Sending changes nothing, since the exchange may fail. The launch that applies computes the differences once more,
// with the same bits.
#pragma once

#include <cmath>
#include <memory>
#include <new>
#include <vector>

#include "denormals.h"
#include "local_wire.h"

namespace ms_optim {
namespace {

// The elements that a thread works on at a time. They are few, so that they stay in its second-level cache, and many,
// since memory waits where one loop ends and the next one begins.
constexpr int kStretch = 1 << 14;
constexpr int kChunksAtOnce = 4;
// The elements of a chunk that are received and moved before the next ones. They are no more than a processor
// prefetches, so that memory does not wait while values are read.
constexpr int kMovedAtOnce = 256;

// A part of a tensor that one thread works on at a time: chunks of one length that follow each other.
struct Stretch {
  const LocalTensor *tensor;
  int64_t begin;
  int n, of_chunk;      // the elements, and the elements of a chunk
  int64_t wire_offset;  // of the first chunk in a wire, in bytes

  float *Of(float *array) const { return array == nullptr ? nullptr : array + begin; }
  int Chunks() const { return n / of_chunk; }
  Stretch Part(int first, int count) const { return {tensor, begin + first, count, of_chunk, wire_offset}; }
  Stretch Chunk(int c, const ChunkCode &code) const {
    return {tensor, begin + c * of_chunk, of_chunk, of_chunk, wire_offset + c * code.bytes};
  }
};

// The buffers for a stretch. Between two stretches, no element is marked as received, or as this worker's own.
struct Workbench {
  float values[kChunkRoom], own_values[kChunkRoom], sums[kChunkRoom];
  int32_t indices[kChunkRoom], own_indices[kChunkRoom], received[kChunkRoom];
  bool is_received[kChunkRoom] = {};
  uint16_t is_own[kChunkRoom / kLanes] = {};  // a bit for each element
  LargestElements largest;
};

// The sums of squares of a stretch that a report needs: of the differences, of the residual, of the sum of the workers'
// differences, and of each worker's; and the checksum of the weights that they started from.
struct Totals {
  double difference, residual, total, each;
  uint32_t checksum;
};

// The squares that the outer step adds: of the sum of the workers' differences, and of this worker's.
struct MoveSums {
  SumOfSquares total, difference;

  void Report(bool has_differences, Totals *totals) const {
    totals->total += total.Total();
    if (has_differences) totals->difference += difference.Total();
  }
};

class LocalEngine {
 public:
  explicit LocalEngine(const LocalStep &step) : step_(step), outer_(step.numbers) {}

  // Begins a round: stores the weights that all workers start from.
  Status Begin() {
    return ForEachStretch([](const Stretch &stretch, Workbench *, Totals *) {
      float *start = stretch.Of(stretch.tensor->start);
      WithWeight(stretch.tensor->t, [&](const auto &weight) {
        for (int i = 0; i < stretch.n; ++i) start[i] = weight.Read(stretch.begin + i);
      });
    });
  }

  Status Send() {
    const Status status = ForEachStretch([this](const Stretch &stretch, Workbench *bench, Totals *totals) {
      if (step_.IsDense()) return SendAll(stretch, totals);
      CodeOf(stretch).HasIndices() ? SendFew(stretch, bench, totals) : SendCodesOfAll(stretch, bench, totals);
    });
    if (status != kOk) return status;
    const Totals all = Total();
    if (step_.IsDense()) static_cast<float *>(step_.wire)[step_.elements] = static_cast<float>(all.difference);
    step_.mark[kMarkStart] = static_cast<int32_t>(all.checksum);
    return kOk;
  }

  Status Apply() {
    const Status status = ForEachStretch([this](const Stretch &stretch, Workbench *bench, Totals *totals) {
      if (step_.IsDense()) {
        MoveSums move_sums;
        Move<true>(stretch, static_cast<const float *>(step_.wires) + stretch.tensor->before + stretch.begin,
                   &move_sums);
        move_sums.Report(true, totals);
      } else if (!CodeOf(stretch).HasIndices()) {
        ApplyToAll(stretch, bench, totals);
      } else if (stretch.tensor->velocity == nullptr) {
        ApplyToFew(stretch, bench, totals);
      } else {
        ApplyAtIndices(stretch, bench, totals);
      }
    });
    if (status != kOk) return status;
    Totals all = Total();
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
  Status ForEachStretch(const Work &work) {
    std::vector<Stretch> stretches;
    for (int k = 0; k < step_.count; ++k) AddStretches(step_.tensors[k], &stretches);
    totals_.assign(stretches.size(), Totals{});
    bool has_memory = true;
#pragma omp parallel
    {
      const DenormalsAreZero in_this_thread;
      const std::unique_ptr<Workbench> bench(new (std::nothrow) Workbench);
      if (bench == nullptr) {
#pragma omp atomic write
        has_memory = false;
      }
      // No thread changes anything before all have room.
#pragma omp barrier
#pragma omp for schedule(static)
      for (size_t k = 0; k < stretches.size(); ++k) {
        if (has_memory) work(stretches[k], bench.get(), &totals_[k]);
      }
    }
    return has_memory ? kOk : kNoMemory;
  }

  void AddStretches(const LocalTensor &tensor, std::vector<Stretch> *stretches) const {
    const int64_t chunk = step_.IsDense() ? kStretch : static_cast<int64_t>(step_.numbers[kChunkElements]);
    const int64_t most = std::clamp<int64_t>(kStretch / chunk, 1, kChunksAtOnce) * chunk;
    int64_t wire_offset = tensor.wire_offset, n = 0;
    for (int64_t begin = 0; begin < tensor.t.size; begin += n) {
      // The tensor's last chunk, which may be shorter than the others, is a stretch of its own.
      const int64_t left = tensor.t.size - begin, of_chunk = std::min(chunk, left);
      n = std::min(most, left / of_chunk * of_chunk);
      const Stretch stretch{&tensor, begin, static_cast<int>(n), static_cast<int>(of_chunk), wire_offset};
      if (!step_.IsDense()) wire_offset += int64_t{stretch.Chunks()} * CodeOf(stretch).bytes;
      stretches->push_back(stretch);
    }
  }

  // The sum is in the order of the stretches, whichever thread had which.
  Totals Total() const {
    Totals all{};
    for (const Totals &own : totals_) {
      all.difference += own.difference;
      all.residual += own.residual;
      all.total += own.total;
      all.each += own.each;
      all.checksum += own.checksum;
    }
    return all;
  }

  ChunkCode CodeOf(const Stretch &stretch) const {
    return ChunkCode(stretch.of_chunk, step_.numbers[kDensity], static_cast<int>(step_.numbers[kValueBits]));
  }

  // Calls use(weight, i, x, start) for all elements: x is the difference of the weight from its start, with the
  // residual added. x and start are vectors, and numbers for the rest.
  template <class Use>
  MS_OPTIM_FN void ForEachDifference(const Stretch &stretch, Totals *totals, const Use &use) const {
    const float *start = stretch.Of(stretch.tensor->start), *residual = stretch.Of(stretch.tensor->residual);
    const auto decay = static_cast<float>(step_.numbers[kResidualDecay]);
    SumOfSquares squares;
    WithWeight(stretch.tensor->t, [&](const auto &weight) {
      int i = 0;
      for (; i + SumOfSquares::kStep <= stretch.n; i += SumOfSquares::kStep) {
        for (int at = i; at < i + SumOfSquares::kStep; at += kLanes) {
          const LanesOf<float> from = LoadLanes(start + at);
          LanesOf<float> x = WrittenLanes(weight, from) - ReadLanes(weight, stretch.begin + at);
          squares.Add(at, x);
          if (residual != nullptr) x = decay * LoadLanes(residual + at) + x;
          use(weight, at, x, from);
        }
      }
      for (; i < stretch.n; ++i) {
        float x = weight.Written(start[i]) - weight.Read(stretch.begin + i);
        squares.Add(i, x);
        if (residual != nullptr) x = decay * residual[i] + x;
        use(weight, i, x, start[i]);
      }
    });
    totals->difference += squares.Total();
  }

  // ---- Sending ------------------------------------------------------------------------------------------------------

  // Returns the index of a stretch's first element among those of all tensors.
  static uint32_t FirstIndex(const Stretch &stretch) {
    return static_cast<uint32_t>(stretch.tensor->before + stretch.begin);
  }

  void SendAll(const Stretch &stretch, Totals *totals) const {
    float *wire = static_cast<float *>(step_.wire) + stretch.tensor->before + stretch.begin;
    Checksum checksum(FirstIndex(stretch));
    ForEachDifference(stretch, totals, [&](const auto &, int i, auto x, auto start) {
      StoreOnce(x, wire + i);
      checksum.Add(start);
    });
    OrderStores();
    totals->checksum = checksum.Total();
  }

  // Reads the differences of several chunks before it codes any of them.
  void SendFew(const Stretch &stretch, Workbench *bench, Totals *totals) const {
    const ChunkCode code = CodeOf(stretch);
    Candidates candidates[kChunksAtOnce];
    int in_use = 0;
    for (int c = 0; c < stretch.Chunks(); ++c) {
      const Stretch chunk = stretch.Chunk(c, code);
      Candidates of_chunk = bench->largest.None(in_use);
      Checksum checksum(FirstIndex(chunk));
      ForEachDifference(chunk, totals, [&](const auto &, int i, auto x, auto start) {
        of_chunk.Add(i, x);
        checksum.Add(start);
      });
      candidates[c] = of_chunk;
      in_use += of_chunk.count;
      totals->checksum += checksum.Total();
    }
    for (int c = 0; c < stretch.Chunks(); ++c) {
      const Stretch chunk = stretch.Chunk(c, code);
      const auto fill = [&](float *to) {
        Totals again{};
        ForEachDifference(chunk, &again, [&](const auto &, int i, auto x, auto) { StoreAt(x, to + i); });
      };
      bench->largest.Find(candidates[c], chunk.n, code.sent, fill, bench->values, bench->indices);
      uint8_t *wire = EmptyWire(chunk, code);
      PutIndices(code, bench->indices, wire);
      Put(code, bench->values, wire);
    }
  }

  void SendCodesOfAll(const Stretch &stretch, Workbench *bench, Totals *totals) const {
    const ChunkCode code = CodeOf(stretch);
    for (int c = 0; c < stretch.Chunks(); ++c) {
      const Stretch chunk = stretch.Chunk(c, code);
      Checksum checksum(FirstIndex(chunk));
      ForEachDifference(chunk, totals, [&](const auto &, int i, auto x, auto start) {
        StoreAt(x, bench->values + i);
        checksum.Add(start);
      });
      totals->checksum += checksum.Total();
      Put(code, bench->values, EmptyWire(chunk, code));
    }
  }

  uint8_t *EmptyWire(const Stretch &chunk, const ChunkCode &code) const {
    void *wire = static_cast<uint8_t *>(step_.wire) + chunk.wire_offset;
    return static_cast<uint8_t *>(memset(wire, 0, static_cast<size_t>(code.bytes)));
  }

  static void Put(const ChunkCode &code, float *values, uint8_t *wire) {
    std::fill_n(values + code.sent, kLanes, 0.0f);
    PutValues(code, values, wire);
  }

  // ---- Applying what all sent ---------------------------------------------------------------------------------------

  const uint8_t *WireOf(const Stretch &chunk, int worker) const {
    return static_cast<const uint8_t *>(step_.wires) + 4 * worker * step_.wire_words + chunk.wire_offset;
  }
  bool IsOwn(int worker) const { return worker == static_cast<int>(step_.numbers[kLocalRank]); }

  // Returns the residual of an element that was sent as a value; infinity and NaN leave nothing behind.
  static float Left(float x, float value) {
    const float left = x - value;
    return left == left ? left : 0.0f;
  }

  // Applies chunks of which every worker sent all elements. Sums are in the workers' order.
  void ApplyToAll(const Stretch &stretch, Workbench *bench, Totals *totals) const {
    const ChunkCode code = CodeOf(stretch);
    MoveSums move_sums;
    for (int c = 0; c < stretch.Chunks(); ++c) ApplyToChunk(stretch.Chunk(c, code), code, bench, &move_sums, totals);
    move_sums.Report(stretch.tensor->residual == nullptr, totals);
  }

  void ApplyToChunk(const Stretch &chunk, const ChunkCode &code, Workbench *bench, MoveSums *move_sums,
                    Totals *totals) const {
    float *residual = chunk.Of(chunk.tensor->residual);
    if (residual != nullptr) KeepDifferences(chunk, totals);
    SumOfSquares squares;
    for (int begin = 0; begin < chunk.n; begin += kMovedAtOnce) {
      const Stretch part = chunk.Part(begin, std::min(kMovedAtOnce, chunk.n - begin));
      for (int worker = 0; worker < step_.Workers(); ++worker) {
        float *own = residual != nullptr && IsOwn(worker) ? bench->own_values : nullptr;
        const uint8_t *wire = WireOf(chunk, worker);
        worker == 0 ? AddValues<true>(code, wire, begin, part.n, own, bench->sums, &squares)
                    : AddValues<false>(code, wire, begin, part.n, own, bench->sums, &squares);
        if (own == nullptr) continue;
        for (int k = 0; k < part.n; ++k) residual[begin + k] = Left(residual[begin + k], own[k]);
      }
      residual == nullptr ? Move<true>(part, bench->sums, move_sums) : Move<false>(part, bench->sums, move_sums);
    }
    totals->each += squares.Total();
    if (residual != nullptr) totals->residual += SumOfSquares::Of(residual, chunk.n);
  }

  // Adds the values that a worker sent of a chunk to those of the workers before it, if it is not the first. Also
  // stores them in `own`, unless that is null.
  template <bool kIsFirst>
  static void AddValues(const ChunkCode &code, const uint8_t *wire, int begin, int n, float *own, float *sums,
                        SumOfSquares *squares) {
    SumOfSquares lanes = *squares;
    ReadValues(code, wire, begin, begin + n, [&](int j, LanesOf<float> values) {
      lanes.Add(j, values);
      if (own != nullptr) StoreLanes(values, own + j);
      StoreLanes((kIsFirst ? LanesOf<float>{} : LoadLanes(sums + j)) + values, sums + j);
    });
    *squares = lanes;
  }

  // Applies chunks of which few elements were sent, if there is no velocity: all weights go back to their start, and
  // only those that any worker sent move from there. Several chunks are received before any weight moves.
  void ApplyToFew(const Stretch &stretch, Workbench *bench, Totals *totals) const {
    const ChunkCode code = CodeOf(stretch);
    int received = 0;
    for (int c = 0; c < stretch.Chunks(); ++c) received = Receive(stretch, c, code, received, bench, totals);
    float *residual = stretch.Of(stretch.tensor->residual);
    SumOfSquares squares;
    ForEachDifference(stretch, totals, [&](const auto &weight, int i, auto x, auto start) {
      if (residual != nullptr) {
        squares.Add(i, WithoutLanes(x, bench->is_own[i / kLanes] >> i % kLanes));
        StoreAt(x, residual + i);
      }
      WriteAt(weight, stretch.begin + i, start);
    });
    const int own = stretch.Chunks() * code.sent;
    for (int j = 0; j < own; ++j) {
      const int i = bench->own_indices[j];
      bench->is_own[i / kLanes] = 0;
      if (residual == nullptr) continue;
      residual[i] = Left(residual[i], bench->own_values[j]);
      bench->own_values[j] = residual[i];
    }
    if (residual != nullptr) totals->residual = squares.Total() + SumOfSquares::Of(bench->own_values, own);
    MoveReceived(stretch, received, bench, totals);
  }

  // Adds up the elements that all workers sent of a chunk, and returns how many elements of the stretch were received
  // so far.
  int Receive(const Stretch &stretch, int c, const ChunkCode &code, int received, Workbench *bench,
              Totals *totals) const {
    const int first = c * stretch.of_chunk, own = c * code.sent;
    for (int worker = 0; worker < step_.Workers(); ++worker) {
      float *values = IsOwn(worker) ? bench->own_values + own : bench->values;
      int32_t *indices = IsOwn(worker) ? bench->own_indices + own : bench->indices;
      const uint8_t *wire = WireOf(stretch.Chunk(c, code), worker);
      totals->each += ReadChunk(code, wire, values, indices);
      for (int j = 0; j < code.sent; ++j) {
        const int i = first + indices[j];
        const bool again = bench->is_received[i];
        bench->is_received[i] = true;
        bench->received[received] = i;
        received += !again;
        bench->sums[i] = (again ? bench->sums[i] : 0.0f) + values[j];
      }
    }
    for (int j = own; j < own + code.sent; ++j) {
      const int i = bench->own_indices[j] += first;
      bench->is_own[i / kLanes] = static_cast<uint16_t>(bench->is_own[i / kLanes] | 1u << i % kLanes);
    }
    return received;
  }

  // Moves the weights that any worker sent, a vector of sums at a time.
  void MoveReceived(const Stretch &stretch, int count, Workbench *bench, Totals *totals) const {
    const auto workers = static_cast<float>(step_.Workers());
    float *start = stretch.Of(stretch.tensor->start), *moves = bench->values;
    const int32_t *indices = bench->received;
    for (int j = 0; j < count; ++j) {
      moves[j] = bench->sums[indices[j]];
      bench->is_received[indices[j]] = false;
    }
    std::fill_n(moves + count, kLanes, 0.0f);
    SumOfSquares total;
    for (int j = 0; j < count; j += kLanes) {
      const LanesOf<float> sums = LoadLanes(moves + j);
      total.Add(j, sums);
      StoreLanes(outer_.rate * (sums / workers), moves + j);
    }
    WithWeight(stretch.tensor->t, [&](const auto &weight) {
      for (int j = 0; j < count; ++j) {
        const int i = indices[j];
        start[i] -= moves[j];
        weight.Write(stretch.begin + i, start[i]);
      }
    });
    totals->total = total.Total();
  }

  // Applies chunks of which few elements were sent, if there is a velocity: all weights move along it.
  void ApplyAtIndices(const Stretch &stretch, Workbench *bench, Totals *totals) const {
    const ChunkCode code = CodeOf(stretch);
    float *residual = stretch.Of(stretch.tensor->residual);
    if (residual != nullptr) KeepDifferences(stretch, totals);
    std::fill_n(bench->sums, stretch.n, 0.0f);
    for (int c = 0; c < stretch.Chunks(); ++c) {
      for (int worker = 0; worker < step_.Workers(); ++worker) {
        totals->each += ReadChunk(code, WireOf(stretch.Chunk(c, code), worker), bench->values, bench->indices);
        const bool leaves = residual != nullptr && IsOwn(worker);
        for (int j = 0; j < code.sent; ++j) {
          const int i = c * stretch.of_chunk + bench->indices[j];
          bench->sums[i] += bench->values[j];
          if (leaves) residual[i] = Left(residual[i], bench->values[j]);
        }
      }
    }
    MoveSums move_sums;
    residual == nullptr ? Move<true>(stretch, bench->sums, &move_sums) : Move<false>(stretch, bench->sums, &move_sums);
    move_sums.Report(residual == nullptr, totals);
    if (residual != nullptr) totals->residual = SumOfSquares::Of(residual, stretch.n);
  }

  // Adds the differences to the residual.
  void KeepDifferences(const Stretch &stretch, Totals *totals) const {
    float *residual = stretch.Of(stretch.tensor->residual);
    ForEachDifference(stretch, totals, [&](const auto &, int i, auto x, auto) { StoreAt(x, residual + i); });
  }

  // Reads the elements that a worker sent of a chunk, and returns their sum of squares.
  static double ReadChunk(const ChunkCode &code, const uint8_t *wire, float *values, int32_t *indices) {
    SumOfSquares squares;
    ReadValues(code, wire, 0, code.sent, [&](int j, LanesOf<float> lanes) {
      squares.Add(j, lanes);
      StoreLanes(lanes, values + j);
    });
    ReadIndices(code, wire, indices);
    return squares.Total();
  }

  // Takes the outer step, from the sum of the workers' differences. kReports: it also adds up the squares of this
  // worker's differences.
  template <bool kReports>
  void Move(const Stretch &stretch, const float *sum, MoveSums *move_sums) const {
    const int count = step_.Workers();
    // A power of two divides as exactly, and faster, by its inverse.
    const auto workers = static_cast<float>(count);
    const float inverse = 1.0f / workers;
    // A worker that is alone keeps its weights to the last bit, which a difference may have lost.
    const bool stays = step_.IsDense() && count == 1 && outer_.rate == 1.0f && stretch.tensor->velocity == nullptr;
    const auto move = [&](const auto &mean) {
      WithWeight(stretch.tensor->t, [&](const auto &weight) {
        if (stretch.tensor->velocity == nullptr) {
          MoveAlong<kReports, false>(stretch, weight, sum, stays, move_sums, mean);
        } else {
          MoveAlong<kReports, true>(stretch, weight, sum, false, move_sums, mean);
        }
      });
    };
    if ((count & (count - 1)) == 0) {
      move([=](auto x) { return x * inverse; });
    } else {
      move([=](auto x) { return x / workers; });
    }
  }

  template <bool kReports, bool kHasVelocity, class Weight, class Mean>
  void MoveAlong(const Stretch &stretch, const Weight &weight, const float *sum, bool stays, MoveSums *move_sums,
                 const Mean &mean) const {
    const OuterStep outer = outer_;
    float *start = stretch.Of(stretch.tensor->start), *velocity = stretch.Of(stretch.tensor->velocity);
    SumOfSquares total = move_sums->total, difference = move_sums->difference;
    int i = 0;
    for (; i + SumOfSquares::kStep <= stretch.n; i += SumOfSquares::kStep) {
      for (int at = i; at < i + SumOfSquares::kStep; at += kLanes) {
        const LanesOf<float> received = LoadLanes(sum + at), from = LoadLanes(start + at);
        LanesOf<float> along = mean(received), weights = from;
        total.Add(at, received);
        if (kReports) {
          weights = ReadLanes(weight, stretch.begin + at);
          difference.Add(at, WrittenLanes(weight, from) - weights);
        }
        if (kHasVelocity) {
          const LanesOf<float> v = outer.Velocity(along, LoadLanes(velocity + at));
          StoreLanes(v, velocity + at);
          along = outer.Direction(along, v);
        }
        if (!stays) weights = from - outer.rate * along;
        StoreLanes(weights, start + at);
        WriteAt(weight, stretch.begin + at, weights);
      }
    }
    for (; i < stretch.n; ++i) {
      total.Add(i, sum[i]);
      const float old_weight = weight.Read(stretch.begin + i);
      if (kReports) difference.Add(i, weight.Written(start[i]) - old_weight);
      float along = mean(sum[i]);
      if (kHasVelocity) {
        velocity[i] = outer.Velocity(along, velocity[i]);
        along = outer.Direction(along, velocity[i]);
      }
      start[i] = stays ? old_weight : start[i] - outer.rate * along;
      weight.Write(stretch.begin + i, start[i]);
    }
    *move_sums = {total, difference};
  }

  const LocalStep step_;
  const OuterStep outer_;
  std::vector<Totals> totals_;
};

Status BeginLocal(const LocalStep &step) { return LocalEngine(step).Begin(); }
Status SendLocal(const LocalStep &step) { return LocalEngine(step).Send(); }
Status ApplyLocal(const LocalStep &step) { return LocalEngine(step).Apply(); }

}  // namespace
}  // namespace ms_optim
