// DGCMomentum on the CPU: local accumulation, sending, and applying what all workers sent.
//
// A launch that does not apply the step leaves the states as they are, since the exchange may fail: it computes r and
// does not store it. The launch that applies the step computes it once more, with the same bits, and stores it.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstring>
#include <new>

#include "dgc_select.h"

namespace ms_optim {
namespace {

// The elements that are accumulated before the threads wait for each other and select. They are many, since waiting
// takes long, and not all, since the maxima take memory.
constexpr int64_t kSelectedElements = int64_t{1} << 26;

class DgcEngine : DgcSelect {
 public:
  explicit DgcEngine(const Step &step) : DgcSelect(step) {}

  Status Run() {
    const bool moments = Has(kMomentsStage), apply = Has(kApplyStage), skips = step_.skipping[0] != 0.0f;
    if (const Status status = Check(); status != kOk) return status;
    if (!OwnsStates()) return kNotItsOwn;
    const bool reads_sums = (apply && !moments) || skips;
    if (const Status status = Begin(reads_sums); status != kOk) return status;
    if (!Prepare()) return kNoMemory;
    // A worker clips its own gradient, tensor by tensor.
    if (Prologue(step_, false).sums_gradients) {
      SumGradients(0, step_.count);
      if (!moments) return Commit(true);
      if (!AreFinite(step_, TotalGradientSum())) return Skip();
    }
    const int64_t words = LayWire(step_, wire_.get());
    if (moments != apply && step_.wire_words != words) return kWrongSize;
    if (!moments && !HasAllWires(step_, rule_)) return kWrongSize;
    if (!moments && !InStep()) return kOutOfStep;
    if (!moments || skips) CopySums();
    if (skips && step_.wire != nullptr) memset(step_.wire, 0, static_cast<size_t>(words) * sizeof(float));
    if (step_.wire != nullptr) PutMark(step_, rule_, step_.wire);
    if (skips) return apply ? Skip() : kOk;
    for (int i = 0; i < step_.count && !moments; ++i) clip_[i] = static_cast<float>(SumsOf(i)[kClipFactor]);
    for (int i = 0; i < step_.count; ++i) DecideRates(step_, i, &tasks_[i]);
    if (apply) Averages(true);
    for (int first = 0, last = 0; first < step_.count; first = last) {
      last = LastOfRun(first, kSelectedElements);
      if (moments) {
        if (step_.constants[kClipNorm] > 0.0) ClipLocally(first, last);
        ForChunks(first, last, false, [this](Chunk &chunk, const Tensor &t, const Task &task, Buffers &b) {
          Sent(chunk.tensor) > 0 ? Accumulate(t, task, chunk, b) : Dense(t, task, chunk, b);
        });
        AddSums(first, last);
        for (int i = first; i < last && !apply; ++i) SumsOf(i)[kClipFactor] = clip_[i];
        Select(first, last);
      } else {
        ForChunks(first, last, false, [this](Chunk &chunk, const Tensor &t, const Task &task, Buffers &b) {
          Sent(chunk.tensor) > 0 ? Receive(t, task, chunk, b) : ReceiveDense(t, task, chunk, b);
        });
        AddUpdates(first, last);
      }
    }
    if (apply) {
      Averages(false);
      for (int i = 0; i < step_.count; ++i) Report(i, true);
    }
    return Commit(true);
  }

 private:
  Status Check() const {
    if (step_.count == 0) return kWrongCount;
    for (int i = 0; i < step_.count; ++i) {
      const Tensor &t = step_.tensors[i];
      if (Sent(i) < 0 || Sent(i) > t.size || t.size > kMostElements) return kWrongSize;
      for (int k = 0; k < DgcMomentum::kStates; ++k) {
        if (t.state_type[k] != DType::kFloat32) return kWrongDType;
      }
    }
    return kOk;
  }

  bool Prepare() {
    const size_t n = static_cast<size_t>(step_.count), chunks = static_cast<size_t>(tasks_[n - 1].last_chunk);
    clip_.reset(new (std::nothrow) float[n]);
    wire_.reset(new (std::nothrow) WireOffsets[n]);
    bound_.reset(new (std::nothrow) int32_t[n]);
    magnitude_.reset(new (std::nothrow) int32_t[n]);
    selections_.reset(new (std::nothrow) Selection[chunks]);
    if (!clip_ || !wire_ || !bound_ || !magnitude_ || !selections_) return false;
    notes_.resize(static_cast<size_t>(omp_get_max_threads()));
    int64_t most = 0;
    for (int first = 0, last = 0; first < step_.count; first = last) {
      last = LastOfRun(first, kSelectedElements);
      int64_t groups = 0;
      for (int i = first; i < last; ++i) {
        clip_[i] = 1.0f;
        for (int k = tasks_[i].first_chunk; Sent(i) > 0 && k < tasks_[i].last_chunk; ++k) {
          selections_[k].first_group = groups;
          groups += GroupsOf(chunks_[k]);
        }
      }
      most = Max(most, groups);
    }
    maxima_.reset(new (std::nothrow) int32_t[static_cast<size_t>(most)]);
    return maxima_ != nullptr;
  }

  // The framework shows a failure as a number, so the words go to the log.
  bool InStep() const {
    for (int64_t worker = 0; worker < step_.wire_count; ++worker) {
      if (IsOfThisStep(step_, rule_, worker)) continue;
      fprintf(
          stderr,
          "ms_optim: DGCMomentum at step %d received what belongs to another step or to other settings: some worker "
          "has left out a step that others took, or was built with other arguments. Nothing was changed.\n",
          static_cast<int>(*step_.global_step));
      return false;
    }
    return true;
  }

  bool OwnsStates() const {
    if (HoldsItsOwn(step_, rule_)) return true;
    int64_t whose = 0;
    while (whose + 1 < step_.worker_count && step_.worker[whose] == 0) ++whose;
    fprintf(
        stderr,
        "ms_optim: DGCMomentum of worker %d holds the residuals of worker %d, from a checkpoint of that worker. Load "
        "this worker's own, by load_state_dict(), or what fold_residuals() makes. Nothing was changed.\n",
        static_cast<int>(rule_.rank), static_cast<int>(whose));
    return false;
  }

  // ---- The local gradient, its clipping and accumulation ----------------------------------------------------------

  void ClipLocally(int first, int last) {
    ForChunks(first, last, false, [this](Chunk &chunk, const Tensor &t, const Task &task, Buffers &b) {
      if (Sent(chunk.tensor) == 0) return;
      double sum = 0.0;
      ForTiles(t, task, chunk, b, [&](int64_t begin, int n, const float *g) {
        GradientTile(task, 1.0f, n, LoadWeight(t, begin, n, b.weight), g, b.direction[0]);
        sum += SumSquares(b.direction[0], n);
      });
      chunk.sum[kGradientSum] = sum;
    });
    AddSums(first, last);
    for (int i = first; i < last; ++i) {
      if (Sent(i) == 0) continue;
      clip_[i] = rule_.Clip(std::sqrt(SumsOf(i)[kGradientSum]), step_.constants[kClipNorm]);
    }
  }
  // Elements that are not sent do not touch their master, so the first step writes all masters.
  void BeginMaster(const Tensor &t, int64_t begin, int n, const float *w) const {
    if (t.master == nullptr || *step_.global_step != 0) return;
    memcpy(t.master + begin, w, static_cast<size_t>(n) * sizeof(float));
  }

  void Accumulate(const Tensor &t, const Task &task, Chunk &chunk, Buffers &b) {
    const bool apply = Has(kApplyStage);
    int32_t *group = MaximaOf(chunk);
    double sum[kSums] = {};
    ForTiles(t, task, chunk, b, [&](int64_t begin, int n, const float *__restrict g) {
      const float *w = LoadWeight(t, begin, n, b.weight);
      if (apply) BeginMaster(t, begin, n, w);
      float *u = apply ? U(t) + begin : b.state[0], *r = apply ? R(t) + begin : b.state[1];
      sum[kGradientSum] += SumSquares(g, n);
      sum[kWeightSum] += SumSquares(w, n);
      NewStates(t, task, clip_[chunk.tensor], begin, n, w, g, u, r);
      for (int i = 0; i < n; i += kGroup) *group++ = LargestKey(r + i, Min(kGroup, n - i));
    });
    memcpy(chunk.sum, sum, sizeof(sum));
  }

  static int32_t LargestKey(const float *r, int n) {
    int32_t largest = 0;
    MS_OPTIM_IVDEP
    for (int i = 0; i < n; ++i) largest = Max(largest, MagnitudeKey(r[i]));
    return largest;
  }

  void Dense(const Tensor &t, const Task &task, Chunk &chunk, Buffers &b) {
    double sum[kSums] = {};
    ForTiles(t, task, chunk, b, [&](int64_t begin, int n, const float *g) {
      float *w = LoadWeight(t, begin, n, b.weight);
      sum[kGradientSum] += SumSquares(g, n);
      sum[kWeightSum] += SumSquares(w, n);
      GradientTile(task, 1.0f, n, w, g, b.direction[0]);
      if (Has(kApplyStage)) {
        sum[kDirectionSum] += Momentum(t, task, begin, n, w, b);
      } else {
        auto *values = reinterpret_cast<float *>(static_cast<uint8_t *>(step_.wire) + wire_[chunk.tensor].values);
        memcpy(values + begin, b.direction[0], static_cast<size_t>(n) * sizeof(float));
      }
    });
    memcpy(chunk.sum, sum, sizeof(sum));
  }

  // Momentum SGD with the mean gradient in direction[0]; returns the sum of squares of the direction.
  double Momentum(const Tensor &t, const Task &task, int64_t begin, int n, float *__restrict w, Buffers &b) {
    const DgcMomentum rule = rule_;
    const float rate = task.coefficient[0];
    float *__restrict u = U(t) + begin, *__restrict d = b.direction[0];
    MS_OPTIM_IVDEP
    for (int i = 0; i < n; ++i) {
      u[i] = rule.Velocity(d[i], u[i]);
      d[i] = rule.Direction(d[i], u[i]);
      w[i] -= rate * d[i];
    }
    if (task.noisy_weight) FillNoise(task.noise, begin, n, b.noise);
    StoreWeight(t, begin, n, w, task.noisy_weight ? b.noise : nullptr);
    return SumSquares(d, n);
  }

  void Select(int first, int last) {
    bool any = false;
    for (int i = first; i < last; ++i) any |= Sent(i) > 0;
    if (!any) return;
    for (auto &notes : notes_) notes.clear();
#pragma omp parallel for schedule(dynamic)
    for (int i = first; i < last; ++i) {
      if (Sent(i) > 0) bound_[i] = BoundOf(i);
    }
    ForChunks(first, last, false, [this](Chunk &chunk, const Tensor &, const Task &, Buffers &) {
      if (Sent(chunk.tensor) > 0) Note(chunk);
    });
#pragma omp parallel for schedule(dynamic)
    for (int i = first; i < last; ++i) {
      if (Sent(i) > 0) Rank(i);
    }
    ForChunks(first, last, false, [this](Chunk &chunk, const Tensor &t, const Task &task, Buffers &) {
      if (Sent(chunk.tensor) > 0) Send(t, task, chunk);
    });
    AddUpdates(first, last);
  }

  // ---- What is sent -----------------------------------------------------------------------------------------------

  // Sends the elements of a chunk above the k-th magnitude, and the first of those that equal it.
  //
  // Elements that are applied lie far apart, each in its own page, so those of a chunk are all prefetched before any is
  // used.
  void Send(const Tensor &t, const Task &task, Chunk &chunk) {
    const int32_t magnitude = magnitude_[chunk.tensor];
    const WireOffsets &wire = wire_[chunk.tensor];
    auto *bytes = static_cast<uint8_t *>(step_.wire);
    const bool apply = Has(kApplyStage);
    int64_t k = SelectionOf(chunk).sent_before, ties = SelectionOf(chunk).ties;
    double sum = 0.0;
    if (apply && SelectionOf(chunk).count >= 0) {
      ForCandidates(chunk, magnitude, [&](int64_t i, float) {
        __builtin_prefetch(R(t) + i, 1);
        __builtin_prefetch(U(t) + i, 1);
        if (t.weight_type == DType::kFloat32) __builtin_prefetch(static_cast<float *>(t.weight) + i, 1);
      });
    }
    ForCandidates(chunk, magnitude, [&](int64_t i, float accumulated) {
      if (MagnitudeKey(accumulated) == magnitude && ties-- <= 0) return;
      const float value = rule_.Travelled(accumulated);
      if (apply) {
        StartAnew(t, i, value);
        sum += MoveByMean(t, task, i, value);
        return;
      }
      PutValue(rule_, bytes + wire.values, k, value);
      PutIndex(bytes + wire.indices, wire.index_bytes, k++, i);
    });
    chunk.sum[kDirectionSum] = sum;
  }

  // Masks the momentum of an element that is sent: momentum factor masking, section 3.3.
  static void StartAnew(const Tensor &t, int64_t i, float sent) {
    U(t)[i] = 0.0f;
    R(t)[i] = DgcMomentum::Behind(R(t)[i], sent);
  }

  // Moves a weight by plain SGD: r holds velocities, which a second momentum would count twice. Returns the square of
  // the mean.
  double MoveByMean(const Tensor &t, const Task &task, int64_t i, float total) const {
    const float mean = rule_.Mean(total);
    Move(t, task.noisy_weight ? &task.noise : nullptr, i, task.coefficient[0] * mean);
    return static_cast<double>(mean) * static_cast<double>(mean);
  }

  // ---- What is received -------------------------------------------------------------------------------------------

  const uint8_t *Wire(int64_t worker) const {
    return static_cast<const uint8_t *>(step_.wires) + 4 * worker * step_.wire_words;
  }
  const float *DenseOf(int64_t worker, int tensor) const {
    return reinterpret_cast<const float *>(Wire(worker) + wire_[tensor].values);
  }

  // Stores the states that the sending launch computed, without the elements that it sent.
  void KeepStates(const Tensor &t, const Task &task, int tensor, int64_t begin, int n, const float *g, Buffers &b) {
    const float *w = LoadWeight(t, begin, n, b.weight);
    BeginMaster(t, begin, n, w);
    NewStates(t, task, clip_[tensor], begin, n, w, g, U(t) + begin, R(t) + begin);
    ForSentBy(rule_.rank, tensor, begin, begin + n, [&t](int64_t i, float value) { StartAnew(t, i, value); });
  }

  // Adds up the elements that the workers sent, in the workers' order, tile by tile.
  void Receive(const Tensor &t, const Task &task, Chunk &chunk, Buffers &b) {
    float *total = b.direction[0];
    double sum = 0.0;
    ForTiles(t, task, chunk, b, [&](int64_t begin, int n, const float *g) {
      KeepStates(t, task, chunk.tensor, begin, n, g, b);
      const int64_t end = begin + n;
      bool any = false;
      ForReceived(chunk.tensor, begin, end, [&](int64_t i, float value) {
        if (!any) memset(total, 0, kTile * sizeof(float));
        any = true;
        total[i - begin] += value;
      });
      if (!any) return;
      ForReceived(chunk.tensor, begin, end, [&](int64_t i, float) {
        sum += MoveByMean(t, task, i, total[i - begin]);
        // The weight moves by 0 if another worker sent it, too.
        total[i - begin] = 0.0f;
      });
    });
    chunk.sum[kDirectionSum] = sum;
  }

  // Calls body(index, value) for the elements from begin to end that each worker sent.
  template <class Body>
  MS_OPTIM_FN void ForReceived(int tensor, int64_t begin, int64_t end, Body body) const {
    for (int64_t worker = 0; worker < step_.wire_count; ++worker) ForSentBy(worker, tensor, begin, end, body);
  }

  // Does the same for one worker.
  template <class Body>
  MS_OPTIM_FN void ForSentBy(int64_t worker, int tensor, int64_t begin, int64_t end, Body body) const {
    const WireOffsets &wire = wire_[tensor];
    const int64_t sent = Sent(tensor);
    const uint8_t *values = Wire(worker) + wire.values, *indices = Wire(worker) + wire.indices;
    for (int64_t k = FirstIndex(indices, wire.index_bytes, sent, begin); k < sent; ++k) {
      const int64_t i = IndexAt(indices, wire.index_bytes, k);
      // The indices of a worker of this step ascend.
      if (i < begin || i >= end) break;
      body(i, ValueAt(rule_, values, k));
    }
  }

  void ReceiveDense(const Tensor &t, const Task &task, Chunk &chunk, Buffers &b) {
    const DgcMomentum rule = rule_;
    double sum = 0.0;
    for (int64_t begin = chunk.begin; begin < chunk.end; begin += kTile) {
      const int n = static_cast<int>(Min(kTile, chunk.end - begin));
      float *__restrict mean = b.direction[0];
      memcpy(mean, DenseOf(0, chunk.tensor) + begin, static_cast<size_t>(n) * sizeof(float));
      for (int64_t worker = 1; worker < step_.wire_count; ++worker) {
        const float *__restrict more = DenseOf(worker, chunk.tensor) + begin;
        MS_OPTIM_IVDEP
        for (int i = 0; i < n; ++i) mean[i] += more[i];
      }
      MS_OPTIM_IVDEP
      for (int i = 0; i < n; ++i) mean[i] = rule.Mean(mean[i]);
      sum += Momentum(t, task, begin, n, LoadWeight(t, begin, n, b.weight), b);
    }
    chunk.sum[kDirectionSum] = sum;
  }

  // Adds up the sums of squares of the updates. The other sums are those of the sending launch.
  void AddUpdates(int first, int last) {
    for (int i = first; i < last; ++i) {
      double &sum = SumsOf(i)[kDirectionSum];
      sum = 0.0;
      for (int k = tasks_[i].first_chunk; k < tasks_[i].last_chunk; ++k) sum += chunks_[k].sum[kDirectionSum];
    }
  }
};

template <>
inline Status Run<DgcMomentum>(const Step &step) {
  return DgcEngine(step).Run();
}

}  // namespace
}  // namespace ms_optim
