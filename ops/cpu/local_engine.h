// Local steps between exchanges, on the CPU: what a worker sends of its differences, and the outer step.
//
// Sending changes nothing, since the exchange may fail: the launch that applies what all sent computes the differences
// once more, with the same bits.
#pragma once

#include <cmath>
#include <memory>
#include <new>
#include <vector>

#include "denormals.h"
#include "local_wire.h"

namespace ms_optim {
namespace {

constexpr int kDenseChunk = 8192;  // elements; what is stored past the caches is ordered once for each chunk
// Elements of a chunk that are received and moved before the next ones: no more than a processor fetches ahead, so that
// memory does not wait while values are read.
constexpr int kMovedAtOnce = 256;
constexpr int kFetchedOften = 4;  // received elements for which 16 of the next chunk are read
constexpr int kLineBytes = 64;

// A part of a tensor that one thread works on at a time.
struct LocalChunk {
  const LocalTensor *tensor;
  int64_t begin;
  int n;
  int64_t place;  // byte in a wire

  float *Of(float *array) const { return array == nullptr ? nullptr : array + begin; }
  LocalChunk Part(int first, int count) const { return {tensor, begin + first, count, place}; }
};

// Reads what is kept of elements into a cache, a little at a time, before their turn comes.
class Ahead {
 public:
  // Of so many elements, from one on that is counted from the chunk's first; of no more than the tensor has.
  Ahead(const LocalChunk &chunk, int first, int count) : next_(chunk.begin + first), end_(next_ + count) {
    const LocalTensor &tensor = *chunk.tensor;
    end_ = std::min(end_, tensor.t.size);
    Add(tensor.t.weight, tensor.t.weight_type == DType::kFloat32 ? 4 : 2);
    Add(tensor.start, sizeof(float));
    Add(tensor.velocity, sizeof(float));
    Add(tensor.residual, sizeof(float));
  }

  // Reads the next 16 elements into the second cache, or into the first one.
  MS_OPTIM_FN void Fetch() { FetchInto<2>(); }
  MS_OPTIM_FN void FetchClose() { FetchInto<3>(); }

 private:
  struct Array {
    const char *first;
    int bytes;  // of an element
  };

  void Add(const void *array, int bytes) {
    if (array != nullptr) arrays_[count_++] = {static_cast<const char *>(array), bytes};
  }

  template <int kLocality>
  MS_OPTIM_FN void FetchInto() {
    if (next_ >= end_) return;
    for (int a = 0; a < count_; ++a) __builtin_prefetch(arrays_[a].first + next_ * arrays_[a].bytes, 0, kLocality);
    next_ += kLanes;
  }

  int64_t next_, end_;
  Array arrays_[4];
  int count_ = 0;
};

// Room for a chunk. Between two chunks, no element is marked as received, or as this worker's own.
struct Workbench {
  float values[kChunkRoom], own_values[kChunkRoom], sums[kChunkRoom];
  int32_t places[kChunkRoom], own_places[kChunkRoom], received[kChunkRoom];
  bool is_received[kChunkRoom] = {};
  uint16_t is_own[kChunkRoom / kLanes] = {};  // a bit for each element
  LargestElements largest;
};

// What a chunk adds to the norms of a report, to the sum of squares of what all workers sent, and to the checksum of
// the weights that they started from.
struct Found {
  double difference, residual, total, each;
  uint32_t checksum;
};

// What the outer step adds to it: squares of what all sent, and of this worker's differences.
struct MoveSums {
  SumOfSquares total, difference;

  void Report(bool has_differences, Found *found) const {
    found->total = total.Total();
    if (has_differences) found->difference = difference.Total();
  }
};

class LocalEngine {
 public:
  explicit LocalEngine(const LocalStep &step) : step_(step), outer_(step.numbers) {}

  // Begins: the weights are what all start from.
  Status Begin() {
    return ForEachChunk([](const LocalChunk &chunk, Workbench *, Found *) {
      float *start = chunk.Of(chunk.tensor->start);
      WithWeight(chunk.tensor->t, [&](const auto &weight) {
        for (int i = 0; i < chunk.n; ++i) start[i] = weight.Read(chunk.begin + i);
      });
    });
  }

  Status Send() {
    const Status status = ForEachChunk([this](const LocalChunk &chunk, Workbench *bench, Found *found) {
      step_.IsDense() ? SendAll(chunk, found) : SendCoded(chunk, bench, found);
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
        MoveSums moved;
        Move<true>(chunk, static_cast<const float *>(step_.wires) + chunk.tensor->before + chunk.begin, &moved);
        moved.Report(true, found);
      } else if (!CodeOf(chunk).HasPlaces()) {
        ApplyToAll(chunk, bench, found);
      } else if (chunk.tensor->velocity == nullptr) {
        ApplyToFew(chunk, bench, found);
      } else {
        ApplyAtPlaces(chunk, bench, found);
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
      if (bench == nullptr) {
#pragma omp atomic write
        has_memory = false;
      }
      // No thread changes anything before all have room.
#pragma omp barrier
#pragma omp for schedule(static)
      for (size_t k = 0; k < chunks.size(); ++k) {
        if (has_memory) work(chunks[k], bench.get(), &found_[k]);
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

  // Calls with the differences of the weights from where they started, what was not sent before added, and with where
  // they started: with vectors, and with the numbers of the rest.
  template <class Use>
  MS_OPTIM_FN void ForEachDifference(const LocalChunk &chunk, Found *found, const Use &use) const {
    const float *start = chunk.Of(chunk.tensor->start), *residual = chunk.Of(chunk.tensor->residual);
    const auto decay = static_cast<float>(step_.numbers[kResidualDecay]);
    SumOfSquares squares;
    WithWeight(chunk.tensor->t, [&](const auto &weight) {
      int i = 0;
      for (; i + SumOfSquares::kStep <= chunk.n; i += SumOfSquares::kStep) {
        for (int at = i; at < i + SumOfSquares::kStep; at += kLanes) {
          const LanesOf<float> from = LoadLanes(start + at);
          LanesOf<float> x = WrittenLanes(weight, from) - ReadLanes(weight, chunk.begin + at);
          squares.Add(at, x);
          if (residual != nullptr) x = decay * LoadLanes(residual + at) + x;
          use(weight, at, x, from);
        }
      }
      for (; i < chunk.n; ++i) {
        float x = weight.Written(start[i]) - weight.Read(chunk.begin + i);
        squares.Add(i, x);
        if (residual != nullptr) x = decay * residual[i] + x;
        use(weight, i, x, start[i]);
      }
    });
    found->difference = squares.Total();
  }

  // ---- Sending ------------------------------------------------------------------------------------------------------

  // The place of a chunk's first element among those of all tensors.
  static uint32_t FirstPlace(const LocalChunk &chunk) {
    return static_cast<uint32_t>(chunk.tensor->before + chunk.begin);
  }

  void SendAll(const LocalChunk &chunk, Found *found) const {
    float *wire = static_cast<float *>(step_.wire) + chunk.tensor->before + chunk.begin;
    Checksum checksum(FirstPlace(chunk));
    ForEachDifference(chunk, found, [&](const auto &, int i, auto x, auto start) {
      StoreOnce(x, wire + i);
      checksum.Add(start);
    });
    OrderStores();
    found->checksum = checksum.Total();
  }

  void SendCoded(const LocalChunk &chunk, Workbench *bench, Found *found) const {
    const ChunkCode code = CodeOf(chunk);
    uint8_t *wire = static_cast<uint8_t *>(step_.wire) + chunk.place;
    memset(wire, 0, static_cast<size_t>(code.bytes));
    Checksum checksum(FirstPlace(chunk));
    if (code.HasPlaces()) {
      Candidates candidates = bench->largest.None();
      ForEachDifference(chunk, found, [&](const auto &, int i, auto x, auto start) {
        candidates.Add(i, x);
        checksum.Add(start);
      });
      const auto fill = [&](float *to) {
        Found again;
        ForEachDifference(chunk, &again, [&](const auto &, int i, auto x, auto) { StoreAt(x, to + i); });
      };
      bench->largest.Find(candidates, chunk.n, code.sent, fill, bench->values, bench->places);
      PutPlaces(code, bench->places, wire);
    } else {
      ForEachDifference(chunk, found, [&](const auto &, int i, auto x, auto start) {
        StoreAt(x, bench->values + i);
        checksum.Add(start);
      });
    }
    found->checksum = checksum.Total();
    std::fill_n(bench->values + code.sent, kLanes, 0.0f);
    PutValues(code, bench->values, wire);
  }

  // ---- Applying what all sent ---------------------------------------------------------------------------------------

  const uint8_t *WireOf(const LocalChunk &chunk, int worker) const {
    return static_cast<const uint8_t *>(step_.wires) + 4 * worker * step_.wire_words + chunk.place;
  }
  bool IsOwn(int worker) const { return worker == static_cast<int>(step_.numbers[kLocalRank]); }

  // What is left of an element that was sent as a value; infinity and NaN leave nothing behind.
  static float Left(float x, float value) {
    const float left = x - value;
    return left == left ? left : 0.0f;
  }

  // Every worker sent all elements. Sums are in the workers' order.
  void ApplyToAll(const LocalChunk &chunk, Workbench *bench, Found *found) const {
    const ChunkCode code = CodeOf(chunk);
    Ahead ahead(chunk, kMovedAtOnce, chunk.n);
    float *residual = chunk.Of(chunk.tensor->residual);
    if (residual != nullptr) KeepDifferences(chunk, found);
    SumOfSquares squares;
    MoveSums moved;
    for (int begin = 0; begin < chunk.n; begin += kMovedAtOnce) {
      const int end = std::min(begin + kMovedAtOnce, chunk.n);
      for (int worker = 0; worker < step_.Workers(); ++worker) {
        const bool leaves = residual != nullptr && IsOwn(worker);
        ReadValues(code, WireOf(chunk, worker), begin, end, [&](int j, LanesOf<float> values) {
          if (worker == 0) ahead.FetchClose();
          squares.Add(j, values);
          const LanesOf<float> before = worker == 0 ? LanesOf<float>{} : LoadLanes(bench->sums + j);
          StoreLanes(before + values, bench->sums + j);
          if (!leaves) return;
          for (int k = 0; k < std::min(kLanes, end - j); ++k) residual[j + k] = Left(residual[j + k], values[k]);
        });
      }
      const LocalChunk part = chunk.Part(begin, end - begin);
      residual == nullptr ? Move<true>(part, bench->sums + begin, &moved)
                          : Move<false>(part, bench->sums + begin, &moved);
    }
    found->each = squares.Total();
    moved.Report(residual == nullptr, found);
    if (residual != nullptr) found->residual = SumOfSquares::Of(residual, chunk.n);
  }

  // Few elements were sent, and there is no velocity: all weights go back to where they started, and only those that
  // any worker sent move from there. The next chunk is read meanwhile, since what was received takes a while to unpack.
  void ApplyToFew(const LocalChunk &chunk, Workbench *bench, Found *found) const {
    const ChunkCode code = CodeOf(chunk);
    Ahead ahead(chunk, chunk.n, chunk.n);
    const int received = Receive(chunk, code, bench, &ahead, found);
    float *residual = chunk.Of(chunk.tensor->residual);
    SumOfSquares squares;
    ForEachDifference(chunk, found, [&](const auto &weight, int i, auto x, auto start) {
      if (i % SumOfSquares::kStep == 0) ahead.Fetch();
      if (residual != nullptr) {
        squares.Add(i, WithoutLanes(x, bench->is_own[i / kLanes] >> i % kLanes));
        StoreAt(x, residual + i);
      }
      WriteAt(weight, chunk.begin + i, start);
    });
    for (int j = 0; j < code.sent; ++j) {
      const int i = bench->own_places[j];
      bench->is_own[i / kLanes] = 0;
      if (residual == nullptr) continue;
      residual[i] = Left(residual[i], bench->own_values[j]);
      bench->own_values[j] = residual[i];
    }
    if (residual != nullptr) found->residual = squares.Total() + SumOfSquares::Of(bench->own_values, code.sent);
    MoveReceived(chunk, received, bench, &ahead, found);
  }

  // Adds up what all workers sent of few elements, and returns how many elements these are.
  int Receive(const LocalChunk &chunk, const ChunkCode &code, Workbench *bench, Ahead *ahead, Found *found) const {
    int received = 0;
    for (int worker = 0; worker < step_.Workers(); ++worker) {
      float *values = IsOwn(worker) ? bench->own_values : bench->values;
      int32_t *places = IsOwn(worker) ? bench->own_places : bench->places;
      const uint8_t *wire = WireOf(chunk, worker);
      for (int next = 0; next < code.bytes; next += kLineBytes) __builtin_prefetch(wire + code.bytes + next);
      found->each += ReadChunk(code, wire, values, places);
      for (int j = 0; j < code.sent; ++j) {
        const int i = places[j];
        const bool again = bench->is_received[i];
        bench->is_received[i] = true;
        bench->received[received] = i;
        received += !again;
        bench->sums[i] = (again ? bench->sums[i] : 0.0f) + values[j];
        if (j % kFetchedOften == 0) ahead->Fetch();
      }
    }
    for (int j = 0; j < code.sent; ++j) {
      const int i = bench->own_places[j];
      bench->is_own[i / kLanes] = static_cast<uint16_t>(bench->is_own[i / kLanes] | 1u << i % kLanes);
    }
    return received;
  }

  // Moves the weights that any worker sent, a vector of their sums at a time.
  void MoveReceived(const LocalChunk &chunk, int count, Workbench *bench, Ahead *ahead, Found *found) const {
    const auto workers = static_cast<float>(step_.Workers());
    float *start = chunk.Of(chunk.tensor->start), *moves = bench->values;
    const int32_t *places = bench->received;
    for (int j = 0; j < count; ++j) {
      moves[j] = bench->sums[places[j]];
      bench->is_received[places[j]] = false;
      if (j % kFetchedOften == 0) ahead->Fetch();
    }
    std::fill_n(moves + count, kLanes, 0.0f);
    SumOfSquares total;
    for (int j = 0; j < count; j += kLanes) {
      const LanesOf<float> sums = LoadLanes(moves + j);
      total.Add(j, sums);
      StoreLanes(outer_.rate * (sums / workers), moves + j);
    }
    WithWeight(chunk.tensor->t, [&](const auto &weight) {
      for (int j = 0; j < count; ++j) {
        const int i = places[j];
        start[i] -= moves[j];
        weight.Write(chunk.begin + i, start[i]);
      }
    });
    found->total = total.Total();
  }

  // Few elements were sent, but all move along their velocities.
  void ApplyAtPlaces(const LocalChunk &chunk, Workbench *bench, Found *found) const {
    const ChunkCode code = CodeOf(chunk);
    float *residual = chunk.Of(chunk.tensor->residual);
    if (residual != nullptr) KeepDifferences(chunk, found);
    std::fill_n(bench->sums, chunk.n, 0.0f);
    for (int worker = 0; worker < step_.Workers(); ++worker) {
      found->each += ReadChunk(code, WireOf(chunk, worker), bench->values, bench->places);
      const bool leaves = residual != nullptr && IsOwn(worker);
      for (int j = 0; j < code.sent; ++j) {
        const int i = bench->places[j];
        bench->sums[i] += bench->values[j];
        if (leaves) residual[i] = Left(residual[i], bench->values[j]);
      }
    }
    MoveSums moved;
    residual == nullptr ? Move<true>(chunk, bench->sums, &moved) : Move<false>(chunk, bench->sums, &moved);
    moved.Report(residual == nullptr, found);
    if (residual != nullptr) found->residual = SumOfSquares::Of(residual, chunk.n);
  }

  // Adds the differences to the residual.
  void KeepDifferences(const LocalChunk &chunk, Found *found) const {
    float *residual = chunk.Of(chunk.tensor->residual);
    ForEachDifference(chunk, found, [&](const auto &, int i, auto x, auto) { StoreAt(x, residual + i); });
  }

  // Reads what a worker sent of a chunk, and returns its sum of squares.
  static double ReadChunk(const ChunkCode &code, const uint8_t *wire, float *values, int32_t *places) {
    SumOfSquares squares;
    ReadValues(code, wire, 0, code.sent, [&](int j, LanesOf<float> lanes) {
      squares.Add(j, lanes);
      StoreLanes(lanes, values + j);
    });
    ReadPlaces(code, wire, places);
    return squares.Total();
  }

  // The outer step, from the sum of what all workers sent. kReports: the difference of this worker's weights is yet to
  // be reported.
  template <bool kReports>
  void Move(const LocalChunk &chunk, const float *sum, MoveSums *found) const {
    const int count = step_.Workers();
    // A power of two divides as exactly, and faster, by its inverse.
    const auto workers = static_cast<float>(count);
    const float inverse = 1.0f / workers;
    // A worker that is alone goes on from where it is, to the last bit, which a difference may have lost.
    const bool stays = step_.IsDense() && count == 1 && outer_.rate == 1.0f && chunk.tensor->velocity == nullptr;
    const auto move = [&](const auto &mean) {
      WithWeight(chunk.tensor->t, [&](const auto &weight) {
        if (chunk.tensor->velocity == nullptr) {
          MoveAlong<kReports, false>(chunk, weight, sum, stays, found, mean);
        } else {
          MoveAlong<kReports, true>(chunk, weight, sum, false, found, mean);
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
  void MoveAlong(const LocalChunk &chunk, const Weight &weight, const float *sum, bool stays, MoveSums *found,
                 const Mean &mean) const {
    const OuterStep outer = outer_;
    float *start = chunk.Of(chunk.tensor->start), *velocity = chunk.Of(chunk.tensor->velocity);
    SumOfSquares total = found->total, difference = found->difference;
    int i = 0;
    for (; i + SumOfSquares::kStep <= chunk.n; i += SumOfSquares::kStep) {
      for (int at = i; at < i + SumOfSquares::kStep; at += kLanes) {
        const LanesOf<float> received = LoadLanes(sum + at), from = LoadLanes(start + at);
        LanesOf<float> along = mean(received), moved = from;
        total.Add(at, received);
        if (kReports) {
          moved = ReadLanes(weight, chunk.begin + at);
          difference.Add(at, WrittenLanes(weight, from) - moved);
        }
        if (kHasVelocity) {
          const LanesOf<float> v = outer.Velocity(along, LoadLanes(velocity + at));
          StoreLanes(v, velocity + at);
          along = outer.Direction(along, v);
        }
        if (!stays) moved = from - outer.rate * along;
        StoreLanes(moved, start + at);
        WriteAt(weight, chunk.begin + at, moved);
      }
    }
    for (; i < chunk.n; ++i) {
      total.Add(i, sum[i]);
      const float held = weight.Read(chunk.begin + i);
      if (kReports) difference.Add(i, weight.Written(start[i]) - held);
      float along = mean(sum[i]);
      if (kHasVelocity) {
        velocity[i] = outer.Velocity(along, velocity[i]);
        along = outer.Direction(along, velocity[i]);
      }
      start[i] = stays ? held : start[i] - outer.rate * along;
      weight.Write(chunk.begin + i, start[i]);
    }
    *found = {total, difference};
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
