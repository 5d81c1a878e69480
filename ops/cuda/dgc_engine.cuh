// DGCMomentum on a GPU: local accumulation, sending, and applying what all workers sent.
//
// A launch that does not apply the step leaves the states as they are, since the exchange may fail: each of its passes
// computes r again. The launch that applies the step computes it once more, with the same bits, and stores it.
#pragma once

#include "dgc_select.cuh"
#include "engine.cuh"

namespace ms_optim {
namespace {

// One block: decides whether the step is applied, and where each tensor is in the wires.
__global__ void __launch_bounds__(kThreads)
    TakeCompressedSurvey(const Step step, const Workspace work, bool takes_total) {
  const double total = takes_total ? TotalGradientSum(step) : 0.0;
  if (threadIdx.x != 0) return;
  work.survey->applied = AreFinite(step, total) && step.skipping[0] == 0.0f && *step.global_step >= 0;
  const auto &rule = *new (work.survey->rule) DgcMomentum(step.constants + kRuleConstants, step.rule_flags);
  LayWire(step, work.wire);
  // Only a trap tells the host that the states belong to another worker, or that some worker left out a step that
  // others took.
  if (!HoldsItsOwn(step, rule)) __trap();
  if ((step.stages & kMomentsStage) != 0) return;
  if (!HasAllWires(step, rule)) __trap();
  for (int64_t worker = 0; worker < step.wire_count; ++worker) {
    if (!IsOfThisStep(step, rule, worker)) __trap();
  }
}

// One thread. Writes the mark to a wire of zeros.
__global__ void MarkWire(const Step step, const Workspace work) {
  if (threadIdx.x == 0) PutMark(step, RuleOf<DgcMomentum>(work), step.wire);
}

__global__ void __launch_bounds__(kThreads) DecideCompressed(const Step step, const Workspace work) {
  const int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (i >= step.count) return;
  DecideRates(step, i, &work.tasks[i]);
  work.searches[i].remaining = SentOf(step, i);
  const bool sends = (step.stages & kMomentsStage) != 0;
  work.searches[i].clip = sends ? 1.0f : static_cast<float>(step.sums[int64_t{i} * kSums + kClipFactor]);
}

// ---- The local gradient, its clipping and accumulation ----------------------------------------------------------

struct Local {
  float w[kEach], g[kEach];  // g: as it came, but centralized

  __device__ Local(const Step &step, const Workspace &work, const Chunk &chunk, const Tile &tile) {
    const Tensor &t = step.tensors[chunk.tensor];
    LoadWeight(t, tile, w);
    LoadGradient(t, work.tasks[chunk.tensor], work, chunk.tensor, tile, g);
  }
  __device__ float Gradient(const DgcMomentum &rule, const Task &task, float clip, int e) const {
    return clip * rule.Gradient(w[e], task.factor * g[e], task.lambda);
  }
};

__global__ void __launch_bounds__(kThreads) SumLocal(const Step step, const Workspace work) {
  if (!work.survey->applied) return;
  const Chunk chunk(step, work);
  if (SentOf(step, chunk.tensor) == 0) return;
  const DgcMomentum rule = RuleOf<DgcMomentum>(work);
  const Task task = work.tasks[chunk.tensor];
  double sum[kSums] = {};
  ForTiles(chunk, step.tensors[chunk.tensor], [&](const Tile &tile) {
    const Local local(step, work, chunk, tile);
    MS_OPTIM_UNROLL
    for (int e = 0; e < kEach; ++e) {
      if (tile.Has(e)) AddSquare(&sum[kGradientSum], local.Gradient(rule, task, 1.0f, e));
    }
  });
  StorePartial<1>(work, sum);
}

__global__ void __launch_bounds__(kThreads) ClipLocally(const Step step, const Workspace work) {
  const int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (i >= step.count || !work.survey->applied || SentOf(step, i) == 0) return;
  const double norm = sqrt(step.sums[int64_t{i} * kSums + kGradientSum]);
  work.searches[i].clip = RuleOf<DgcMomentum>(work).Clip(norm, step.constants[kClipNorm]);
}

// Stores the new states of a tile.
__device__ inline void KeepStates(const Step &step, const DgcMomentum &rule, const Tensor &t, const Task &task,
                                  float clip, const Tile &tile, const Local &local) {
  // Elements that are not sent do not touch their master, so the first step writes all masters.
  if (t.master != nullptr && *step.global_step == 0) StoreFloats(t.master, tile, local.w);
  float u[kEach], r[kEach];
  Load<float>(U(t), tile, u);
  Load<float>(R(t), tile, r);
  MS_OPTIM_UNROLL
  for (int e = 0; e < kEach; ++e) {
    const NewState state(rule, local.Gradient(rule, task, clip, e), u[e], r[e]);
    u[e] = state.u;
    r[e] = state.r;
  }
  StoreFloats(U(t), tile, u);
  StoreFloats(R(t), tile, r);
}

// Momentum SGD with the mean gradient; g becomes the direction.
__device__ inline void Momentum(const DgcMomentum &rule, const Step &step, const Tensor &t, const Task &task,
                                const Tile &tile, float (&w)[kEach], float (&g)[kEach], double *sum) {
  float u[kEach];
  Load<float>(U(t), tile, u);
  MS_OPTIM_UNROLL
  for (int e = 0; e < kEach; ++e) {
    u[e] = rule.Velocity(g[e], u[e]);
    g[e] = rule.Direction(g[e], u[e]);
    w[e] -= task.coefficient[0] * g[e];
    if (tile.Has(e)) AddSquare(sum, g[e]);
  }
  StoreFloats(U(t), tile, u);
  const bool noisy = NeedsNoise(t, step.flags);
  TileNoise noise;
  if (noisy) noise.From(task.noise, tile);
  StoreWeight(t, tile, w, noisy, noise);
}

__global__ void __launch_bounds__(kThreads) Accumulate(const Step step, const Workspace work) {
  if (!work.survey->applied) return;
  const Chunk chunk(step, work);
  const Tensor &t = step.tensors[chunk.tensor];
  const Task task = work.tasks[chunk.tensor];
  const DgcMomentum rule = RuleOf<DgcMomentum>(work);
  const bool compressed = SentOf(step, chunk.tensor) > 0, apply = (step.stages & kApplyStage) != 0;
  const float clip = compressed ? work.searches[chunk.tensor].clip : 1.0f;
  double sum[kSums] = {};
  ForTiles(chunk, t, [&](const Tile &tile) {
    Local local(step, work, chunk, tile);
    MS_OPTIM_UNROLL
    for (int e = 0; e < kEach; ++e) {
      if (!tile.Has(e)) continue;
      AddSquare(&sum[kGradientSum], local.g[e]);
      AddSquare(&sum[kWeightSum], local.w[e]);
    }
    if (compressed) {
      if (apply) KeepStates(step, rule, t, task, clip, tile, local);
      return;
    }
    MS_OPTIM_UNROLL
    for (int e = 0; e < kEach; ++e) local.g[e] = local.Gradient(rule, task, 1.0f, e);
    if (apply) {
      Momentum(rule, step, t, task, tile, local.w, local.g, &sum[kDirectionSum]);
    } else {
      // Tensors are not aligned in a wire.
      uint8_t *values = static_cast<uint8_t *>(step.wire) + work.wire[chunk.tensor].values;
      StoreFloats(values, Tile(tile.begin, tile.end, false), local.g);
    }
  });
  StorePartial<1>(work, sum);
}

// ---- What is sent -----------------------------------------------------------------------------------------------

// Masks the momentum of an element that is sent: momentum factor masking, section 3.3.
__device__ inline void StartAnew(const Tensor &t, int64_t i, float sent) {
  U(t)[i] = 0.0f;
  R(t)[i] = DgcMomentum::Behind(R(t)[i], sent);
}

// Moves a weight by plain SGD: r holds velocities, which a second momentum would count twice.
__device__ inline void MoveByMean(const DgcMomentum &rule, const Step &step, const Tensor &t, const Task &task,
                                  int64_t i, float total, double *sum) {
  const float mean = rule.Mean(total);
  Move(t, NeedsNoise(t, step.flags) ? &task.noise : nullptr, i, task.coefficient[0] * mean);
  AddSquare(sum, mean);
}

// Sends the elements of a chunk above the k-th magnitude, and the first of those that equal it.
__global__ void __launch_bounds__(kThreads) Send(const Step step, const Workspace work) {
  if (!work.survey->applied) return;
  const Chunk chunk(step, work);
  if (SentOf(step, chunk.tensor) == 0) return;
  const Tensor &t = step.tensors[chunk.tensor];
  const Task task = work.tasks[chunk.tensor];
  const DgcMomentum rule = RuleOf<DgcMomentum>(work);
  const WireOffsets wire = work.wire[chunk.tensor];
  const int32_t magnitude = work.searches[chunk.tensor].prefix;
  uint8_t *bytes = static_cast<uint8_t *>(step.wire);
  int64_t ties = work.sendings[blockIdx.x].ties, before = work.sendings[blockIdx.x].before;
  double sum = 0.0;
  for (int64_t first = chunk.begin; first < chunk.end; first += kThreads) {
    const int64_t i = first + threadIdx.x;
    const float accumulated = i < chunk.end ? NewR(step, work, chunk.tensor, i) : 0.0f;
    const int32_t key = i < chunk.end ? MagnitudeKey(accumulated) : -1;
    if (__syncthreads_count(key >= magnitude) == 0) continue;
    int equal = 0, sent = 0;
    const int ties_before = SumBefore(static_cast<int>(key == magnitude), &equal);
    const bool sends = key > magnitude || (key == magnitude && ties_before < ties);
    const int64_t k = before + SumBefore(static_cast<int>(sends), &sent);
    ties -= equal;
    before += sent;
    if (!sends) continue;
    const float value = rule.Travelled(accumulated);
    if ((step.stages & kApplyStage) != 0) {
      StartAnew(t, i, value);
      MoveByMean(rule, step, t, task, i, value, &sum);
    } else {
      PutValue(rule, bytes + wire.values, k, value);
      PutIndex(bytes + wire.indices, wire.index_bytes, k, i);
    }
  }
  sum = SumOfBlock(sum);
  if (threadIdx.x == 0) work.partial[static_cast<int64_t>(blockIdx.x) * kSums + kDirectionSum] = sum;
}

// ---- What is received -------------------------------------------------------------------------------------------

__device__ inline const uint8_t *WireOf(const Step &step, int64_t worker) {
  return static_cast<const uint8_t *>(step.wires) + 4 * worker * step.wire_words;
}

// Calls body(index, value) for the elements that a worker sent of a chunk.
template <class Body>
__device__ void ForSentBy(const Step &step, const Workspace &work, int64_t worker, const Chunk &chunk, Body body) {
  const DgcMomentum rule = RuleOf<DgcMomentum>(work);
  const WireOffsets wire = work.wire[chunk.tensor];
  const int64_t sent = SentOf(step, chunk.tensor);
  const uint8_t *values = WireOf(step, worker) + wire.values, *indices = WireOf(step, worker) + wire.indices;
  for (int64_t k = FirstIndex(indices, wire.index_bytes, sent, chunk.begin) + threadIdx.x; k < sent; k += kThreads) {
    const int64_t i = IndexAt(indices, wire.index_bytes, k);
    // The indices of a worker of this step ascend.
    if (i < chunk.begin || i >= chunk.end) break;
    body(i, ValueAt(rule, values, k));
  }
}

// Stores the states that the sending launch computed, without the elements that it sent, and adds up the elements of a
// chunk that the workers sent, in the workers' order.
__device__ inline void ReceiveCompressed(const Step &step, const Workspace &work, const Chunk &chunk, float *total,
                                         double *sum) {
  const Tensor &t = step.tensors[chunk.tensor];
  const Task task = work.tasks[chunk.tensor];
  const DgcMomentum rule = RuleOf<DgcMomentum>(work);
  const float clip = work.searches[chunk.tensor].clip;
  ForTiles(chunk, t,
           [&](const Tile &tile) { KeepStates(step, rule, t, task, clip, tile, Local(step, work, chunk, tile)); });
  for (int i = static_cast<int>(threadIdx.x); i < kExchangedChunk; i += kThreads) total[i] = 0.0f;
  __syncthreads();
  ForSentBy(step, work, rule.rank, chunk, [&](int64_t i, float value) { StartAnew(t, i, value); });
  for (int64_t worker = 0; worker < step.wire_count; ++worker) {
    __syncthreads();
    ForSentBy(step, work, worker, chunk, [&](int64_t i, float value) { total[i - chunk.begin] += value; });
  }
  __syncthreads();
  for (int64_t i = chunk.begin + threadIdx.x; i < chunk.end; i += kThreads) {
    if (total[i - chunk.begin] != 0.0f) MoveByMean(rule, step, t, task, i, total[i - chunk.begin], sum);
  }
}

__global__ void __launch_bounds__(kThreads) Receive(const Step step, const Workspace work) {
  __shared__ float total[kExchangedChunk];
  if (!work.survey->applied) return;
  const Chunk chunk(step, work);
  double sum = 0.0;
  if (SentOf(step, chunk.tensor) > 0) {
    ReceiveCompressed(step, work, chunk, total, &sum);
  } else {
    const Tensor &t = step.tensors[chunk.tensor];
    const DgcMomentum rule = RuleOf<DgcMomentum>(work);
    ForTiles(chunk, t, [&](const Tile &tile) {
      const Tile of_wire(tile.begin, tile.end, false);
      float w[kEach], mean[kEach], more[kEach];
      LoadWeight(t, tile, w);
      Load<float>(WireOf(step, 0) + work.wire[chunk.tensor].values, of_wire, mean);
      for (int64_t worker = 1; worker < step.wire_count; ++worker) {
        Load<float>(WireOf(step, worker) + work.wire[chunk.tensor].values, of_wire, more);
        MS_OPTIM_UNROLL
        for (int e = 0; e < kEach; ++e) mean[e] += more[e];
      }
      MS_OPTIM_UNROLL
      for (int e = 0; e < kEach; ++e) mean[e] = rule.Mean(mean[e]);
      Momentum(rule, step, t, work.tasks[chunk.tensor], tile, w, mean, &sum);
    });
  }
  sum = SumOfBlock(sum);
  if (threadIdx.x == 0) work.partial[static_cast<int64_t>(blockIdx.x) * kSums + kDirectionSum] = sum;
}

template <>
inline Status RunRule<DgcMomentum>(const Step &step, const std::vector<Tensor> &, const WorkspaceLayout &layout,
                                   const Workspace &work, Launcher &launch) {
  const bool moments = (step.stages & kMomentsStage) != 0, apply = (step.stages & kApplyStage) != 0;
  const bool sums_gradients = Prologue(step, false).sums_gradients;  // a worker clips its own gradient
  const int64_t n = step.count;
  launch(PrepareAll, 1, step, work);
  if ((step.flags & kCentralizes) != 0) launch(MeanRows, Blocks(layout.rows * kWarp), step, work);
  if (sums_gradients) {
    launch(SumGradients, layout.chunks, step, work);
    launch(AddSums, n, step, work, unsigned{kGradientsOnly}, false);
  }
  if (!moments && !apply) return launch.Result();
  if (!moments) launch(CopySums, n, step, false);
  launch(TakeCompressedSurvey, 1, step, work, sums_gradients);
  if (step.wire != nullptr) {
    launch.Zero(step.wire, 4 * step.wire_words);
    launch(MarkWire, 1, step, work);
  }
  launch.Zero(work.searches, n * int64_t{sizeof(Search)});
  launch(DecideCompressed, Blocks(n), step, work);
  const bool averages = apply && (step.flags & kAverages) != 0;
  if (averages) launch(Averages, layout.chunks, step, work, true);
  if (moments) {
    if ((step.flags & kClips) != 0) {
      launch(SumLocal, layout.chunks, step, work);
      launch(AddSums, n, step, work, unsigned{kGradientsOnly}, true);
      launch(ClipLocally, Blocks(n), step, work);
    }
    launch(Accumulate, layout.chunks, step, work);
    launch(AddSums, n, step, work, unsigned{kAll}, true);
    for (const Digit &digit : kDigits) {
      launch(CountDigit, layout.chunks, step, work, digit);
      launch(EndDigit, n, step, work, digit);
    }
    launch(CountSent, layout.chunks, step, work);
    launch(DecideSent, n, step, work);
    launch(Send, layout.chunks, step, work);
    // The launch of the apply stage reads the sums of this one if the step is skipped.
    launch(CopySums, n, step, true);
  } else {
    launch(Receive, layout.chunks, step, work);
  }
  launch(AddSums, n, step, work, unsigned{kUpdates}, true);
  if (averages) launch(Averages, layout.chunks, step, work, false);
  launch(Finish, 1, step, work, apply, apply);
  return launch.Result();
}

}  // namespace
}  // namespace ms_optim
