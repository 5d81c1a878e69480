// Runs a rule over all tensors of a step on a GPU: a few kernels on one stream, none of which the host waits for.
//
// Tensors are cut into chunks, a block of threads for each. Partial sums belong to chunks and are added in an order
// that does not depend on when blocks run, so the result is the same from run to run. What the host cannot know without
// waiting (the step count, rates, whether the step is skipped) is decided by a kernel of one block between the passes.
#pragma once

#include "tiles.cuh"

namespace ms_optim {
namespace {

constexpr int kBlocksAtOnce = 3;  // on a multiprocessor: enough loads are under way to keep the memory busy

__device__ inline bool Aligned(const void *data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// Whether runs of four elements may be read and written as one.
__device__ inline bool Aligned(const Tensor &t) {
  bool aligned = Aligned(t.weight) && Aligned(t.gradient) && Aligned(t.master) && Aligned(t.remainder);
  aligned = aligned && Aligned(t.average) && Aligned(t.direction);
  for (int k = 0; k < kMaxStates; ++k) aligned = aligned && Aligned(t.state[k]);
  return aligned;
}

__device__ inline bool AllFloat32(const Tensor &t, int states) {
  bool all = t.weight_type == DType::kFloat32 && t.gradient_type == DType::kFloat32;
  for (int k = 0; k < states; ++k) all = all && t.state_type[k] == DType::kFloat32;
  return all;
}

template <class Rule>
__device__ const Rule &RuleOf(const Workspace &work) {
  static_assert(sizeof(Rule) <= sizeof(work.survey->rule), "the rule has room in the workspace");
  return *reinterpret_cast<const Rule *>(work.survey->rule);
}

// ---- Tables and sums --------------------------------------------------------------------------------------------

__global__ void PutWords(const __grid_constant__ Words words, uint32_t *to, int count) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) to[i] = words.word[i];
}

// A warp for each row.
__global__ void __launch_bounds__(kThreads) MeanRows(const Step step, const Workspace work) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + WarpOfThread();
  if (row >= work.first_row[step.count]) return;
  const int i = OwnerOf(work.first_row, step.count, row);
  if (LayoutOf(step, i, kCentralized) == 0) return;
  const Tensor &t = step.tensors[i];
  const int64_t length = t.size / t.rows, begin = (row - work.first_row[i]) * length;
  double sum = 0.0;
  for (int64_t k = begin + LaneOfThread(); k < begin + length; k += kWarp) {
    if (t.gradient_type == DType::kFloat32) sum += ToFloat(static_cast<const float *>(t.gradient)[k]);
    if (t.gradient_type == DType::kFloat16) sum += ToFloat(static_cast<const float16 *>(t.gradient)[k]);
    if (t.gradient_type == DType::kBFloat16) sum += ToFloat(static_cast<const bfloat16 *>(t.gradient)[k]);
  }
  const double mean = SumOfWarp(sum) / static_cast<double>(length);
  if (LaneOfThread() != 0) return;
  const float rounded = static_cast<float>(mean);
  work.means[row] = RowMean{rounded, static_cast<float>(mean - rounded)};
}

// The sums that a pass over chunks has computed; the others are those of an earlier pass.
enum Found : unsigned { kAll = (1u << kSums) - 1, kGradientsOnly = 1u << kGradientSum, kUpdates = 1u << kDirectionSum };

// A block for each tensor.
__global__ void __launch_bounds__(kThreads)
    AddSums(const Step step, const Workspace work, unsigned found, bool surveyed) {
  if (surveyed && !work.survey->applied) return;
  const int64_t i = blockIdx.x;
  for (int s = 0; s < kSums; ++s) {
    if ((found >> s & 1u) == 0) continue;
    double sum = 0.0;
    for (int64_t k = work.first_chunk[i] + threadIdx.x; k < work.first_chunk[i + 1]; k += kThreads) {
      sum += work.partial[k * kSums + s];
    }
    sum = SumOfBlock(sum);
    if (threadIdx.x == 0) step.sums[i * kSums + s] = sum;
  }
}

// Copies the sums of earlier launches.
__global__ void CopySums(const Step step, bool skipped_only) {
  if (skipped_only && (step.skipping[0] == 0.0f || step.sums_rows != step.rows)) return;
  const int i = static_cast<int>(blockIdx.x), s = static_cast<int>(threadIdx.x);
  if (s < kSums) step.sums[i * kSums + s] = step.sums_in[LayoutOf(step, i, kRow) * kSums + s];
}

__device__ inline double TotalGradientSum(const Step &step) {
  const bool here = (step.stages & kGradientStage) != 0;
  const double *sums = here ? step.sums : step.sums_in;
  double total = 0.0;
  for (int64_t i = threadIdx.x; i < (here ? step.count : step.rows); i += kThreads) {
    total += sums[i * kSums + kGradientSum];
  }
  return SumOfBlock(total);
}

// One block: decides how each tensor is read and stored.
__global__ void __launch_bounds__(kThreads) PrepareAll(const Step step, const Workspace work) {
  for (int i = static_cast<int>(threadIdx.x); i < step.count; i += kThreads) {
    const Tensor &t = step.tensors[i];
    Task &task = work.tasks[i];
    task.row = t.rows > 0 && LayoutOf(step, i, kCentralized) != 0 ? t.size / t.rows : 0;
    task.noise = Noise(static_cast<int64_t>(step.constants[kSeed]), *step.global_step, LayoutOf(step, i, kRow));
  }
}

// One block: decides from all gradients whether the step is applied, and how they are clipped.
template <class Rule>
__global__ void __launch_bounds__(kThreads) TakeSurvey(const Step step, const Workspace work, bool global) {
  const double total = global ? TotalGradientSum(step) : 0.0;
  if (threadIdx.x != 0) return;
  // A caller that knows of other gradients that are not finite passes NaN for the scale.
  const bool finite = (step.flags & kSkipNonfinite) == 0 || AreFinite(step, total);
  work.survey->applied = finite && *step.global_step >= 0;
  work.survey->clip = ClipFactor(step, total);
  new (work.survey->rule) Rule(step.constants + kRuleConstants, int64_t{*step.global_step} + 1, step.rule_flags);
}

// Decides from the sums known so far what the next pass uses.
template <class Rule>
__global__ void __launch_bounds__(kThreads) DecideAll(const Step step, const Workspace work) {
  const int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (i >= step.count || !work.survey->applied) return;
  Decide(RuleOf<Rule>(work), step, i, step.sums + int64_t{i} * kSums, work.survey->clip, &work.tasks[i]);
}

// One block.
__global__ void __launch_bounds__(kThreads)
    Finish(const Step step, const Workspace work, bool reports, bool reports_skipped) {
  const bool applied = work.survey->applied, any = applied ? reports : reports_skipped;
  for (int i = static_cast<int>(threadIdx.x); any && i < step.count; i += kThreads) {
    Report(step, i, work.tasks[i], step.sums + int64_t{i} * kSums, applied);
  }
  if (threadIdx.x == 0 && (step.stages & kCommitStage) != 0) Commit(step, applied);
}

// ---- Passes over chunks -----------------------------------------------------------------------------------------

__device__ inline void LoadGradient(const Tensor &t, const Task &task, const Workspace &work, int tensor,
                                    const Tile &tile, float (&g)[kEach]) {
  LoadAs(t.gradient_type, t.gradient, tile, g);
  if (task.row != 0) Centralize(work.means + work.first_row[tensor], task.row, tile, g);
}

// Calls body for each tile that a warp has of a chunk.
template <class Body>
__device__ void ForTiles(const Chunk &chunk, const Tensor &t, Body body) {
  const bool aligned = Aligned(t);
  for (int64_t begin = chunk.begin + WarpOfThread() * kTile; begin < chunk.end; begin += kThreads / kWarp * kTile) {
    body(Tile(begin, t.size, aligned));
  }
}

__device__ inline void AddSquare(double *sum, float x) { *sum += static_cast<double>(x) * static_cast<double>(x); }

__global__ void __launch_bounds__(kThreads) SumGradients(const Step step, const Workspace work) {
  const Chunk chunk(step, work);
  const Tensor &t = step.tensors[chunk.tensor];
  const Task task = work.tasks[chunk.tensor];
  double sum[kSums] = {};
  ForTiles(chunk, t, [&](const Tile &tile) {
    float g[kEach];
    LoadGradient(t, task, work, chunk.tensor, tile, g);
    MS_OPTIM_UNROLL
    for (int e = 0; e < kEach; ++e) AddSquare(&sum[kGradientSum], g[e]);
  });
  StorePartial(work, sum);
}

// The elements of a tile that a thread has. kFloats: weight, gradient and states are float32, and all loads are issued
// before any is waited for.
template <class Rule>
struct Elements {
  static constexpr int kRoom = Rule::kStates > 0 ? Rule::kStates : 1;  // there are no arrays of nothing
  float w[kEach], g[kEach], s[kRoom][kEach], d[kMaxDirections][kEach];

  template <bool kFloats>
  __device__ void Take(const Tensor &t, const Task &task, const RowMean *means, const Tile &tile) {
    if (kFloats) {
      if (!Rule::kReturnsDirections) Load<float>(t.weight, tile, w);
      Load<float>(t.gradient, tile, g);
      MS_OPTIM_UNROLL
      for (int k = 0; k < Rule::kStates; ++k) Load<float>(t.state[k], tile, s[k]);
    } else {
      if (!Rule::kReturnsDirections) LoadWeight(t, tile, w);
      LoadAs(t.gradient_type, t.gradient, tile, g);
      MS_OPTIM_UNROLL
      for (int k = 0; k < Rule::kStates; ++k) LoadState(t, k, tile, s[k]);
    }
    if (task.row != 0) Centralize(means, task.row, tile, g);
    MS_OPTIM_UNROLL
    for (int e = 0; Rule::kReturnsDirections && e < kEach; ++e) w[e] = 0.0f;
  }

  // A tensor's first step: what starts as the weights.
  __device__ void Start(const Tensor &t, const Task &task, const Tile &tile) {
    if (!task.starts) return;
    if (t.average != nullptr) StoreFloats(t.average, tile, w);
    MS_OPTIM_UNROLL
    for (int e = 0; Rule::kStartsAtWeights && e < kEach; ++e) s[0][e] = w[e];
  }

  template <bool kNewStates>
  __device__ void Apply(const Rule &rule, const Task &task) {
    MS_OPTIM_UNROLL
    for (int e = 0; e < kEach; ++e) {
      float state[kRoom], direction[kMaxDirections] = {};
      MS_OPTIM_UNROLL
      for (int k = 0; k < Rule::kStates; ++k) state[k] = s[k][e];
      Advance<Rule, kNewStates>(rule, task, w[e], g[e], state, direction);
      MS_OPTIM_UNROLL
      for (int k = 0; k < Rule::kStates; ++k) s[k][e] = state[k];
      MS_OPTIM_UNROLL
      for (int k = 0; k < Rule::kDirections; ++k) d[k][e] = direction[k];
    }
  }

  __device__ void Sum(const Tile &tile, double (&sum)[kSums]) const {
    MS_OPTIM_UNROLL
    for (int e = 0; e < kEach; ++e) {
      if (!tile.Has(e)) continue;
      AddSquare(&sum[kGradientSum], g[e]);
      AddSquare(&sum[kWeightSum], w[e]);
      AddSquare(&sum[kDirectionSum], d[0][e]);
      if (Rule::kDirections < 2) continue;
      AddSquare(&sum[kDirection2Sum], d[1][e]);
      sum[kDirectionsDot] += static_cast<double>(d[0][e]) * static_cast<double>(d[1][e]);
    }
  }

  __device__ void Move(const Task &task) {
    MS_OPTIM_UNROLL
    for (int e = 0; e < kEach; ++e) {
      w[e] -= Rule::kDirections == 1 ? task.coefficient[0] * d[0][e]
                                     : task.coefficient[0] * d[0][e] + task.coefficient[1] * d[1][e];
    }
  }
};

// Moves the average towards the weights as they were stored; see ops/cpu/engine.h.
__device__ inline void Average(const Tensor &t, const Task &task, const Tile &tile, float (&w)[kEach]) {
  if (t.average == nullptr) return;
  if (t.master == nullptr && t.weight_type != DType::kFloat32) LoadWeight(t, tile, w);
  float a[kEach];
  Load<float>(t.average, tile, a);
  MS_OPTIM_UNROLL
  for (int e = 0; e < kEach; ++e) a[e] += task.average_rate * (w[e] - a[e]);
  StoreFloats(t.average, tile, a);
}

// For a rule whose pass does not reach all weights: the averages start, or move towards the weights.
__global__ void __launch_bounds__(kThreads) Averages(const Step step, const Workspace work, bool start) {
  if (!work.survey->applied) return;
  const Chunk chunk(step, work);
  const Tensor &t = step.tensors[chunk.tensor];
  const Task task = work.tasks[chunk.tensor];
  if (t.average == nullptr || (start && !task.starts)) return;
  ForTiles(chunk, t, [&](const Tile &tile) {
    float w[kEach];
    LoadWeight(t, tile, w);
    if (start) {
      StoreFloats(t.average, tile, w);
    } else {
      Average(t, task, tile, w);
    }
  });
}

// Computes new states, and the sums of weights and directions. If nothing waits for these sums, the weights move too
// (kMove).
template <class Rule, bool kMove, bool kFloats>
__device__ void UpdateTile(const Rule &rule, const Tensor &t, const Task &task, const RowMean *means, bool noisy,
                           const Tile &tile, double (&sum)[kSums]) {
  Elements<Rule> x;
  x.template Take<kFloats>(t, task, means, tile);
  x.Start(t, task, tile);
  x.template Apply<true>(rule, task);
  MS_OPTIM_UNROLL
  for (int k = 0; k < Rule::kStates; ++k) {
    if (kFloats) {
      StoreFloats(t.state[k], tile, x.s[k]);
      continue;
    }
    StoreState(t, k, tile, task.noise, x.s[k]);
    // A layer-wise rule must move along the directions whose norms it took.
    if (Rule::kLayerwise) LoadState(t, k, tile, x.s[k]);
  }
  if (Rule::kLayerwise && !kFloats) x.template Apply<false>(rule, task);
  if (Rule::kReturnsDirections) StoreFloats(t.direction, tile, x.d[0]);
  x.Sum(tile, sum);
  if (!kMove) return;
  x.Move(task);
  if (kFloats) {
    StoreFloats(t.weight, tile, x.w);
  } else {
    StoreWeight(t, tile, x.w, noisy ? &task.noise : nullptr);
  }
  Average(t, task, tile, x.w);
}

template <class Rule, bool kMove>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce) Update(const Step step, const Workspace work) {
  if (!work.survey->applied) return;
  const Chunk chunk(step, work);
  const Tensor &t = step.tensors[chunk.tensor];
  const Task task = work.tasks[chunk.tensor];
  const Rule rule = RuleOf<Rule>(work);
  const RowMean *means = work.means + work.first_row[chunk.tensor];
  const bool noisy = NeedsNoise(t, step.flags);
  double sum[kSums] = {};
  if (AllFloat32(t, Rule::kStates)) {
    ForTiles(chunk, t,
             [&](const Tile &tile) { UpdateTile<Rule, kMove, true>(rule, t, task, means, noisy, tile, sum); });
  } else {
    ForTiles(chunk, t,
             [&](const Tile &tile) { UpdateTile<Rule, kMove, false>(rule, t, task, means, noisy, tile, sum); });
  }
  StorePartial(work, sum);
}

// New weights, after the pass that made new states.
template <class Rule>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce) MoveWeights(const Step step, const Workspace work) {
  if (!work.survey->applied) return;
  const Chunk chunk(step, work);
  const Tensor &t = step.tensors[chunk.tensor];
  const Task task = work.tasks[chunk.tensor];
  const Rule rule = RuleOf<Rule>(work);
  const RowMean *means = work.means + work.first_row[chunk.tensor];
  const bool floats = AllFloat32(t, Rule::kStates), noisy = NeedsNoise(t, step.flags);
  ForTiles(chunk, t, [&](const Tile &tile) {
    Elements<Rule> x;
    if (floats) {
      x.template Take<true>(t, task, means, tile);
    } else {
      x.template Take<false>(t, task, means, tile);
    }
    x.Start(t, task, tile);
    x.template Apply<false>(rule, task);
    x.Move(task);
    StoreWeight(t, tile, x.w, noisy ? &task.noise : nullptr);
    Average(t, task, tile, x.w);
  });
}

// ---- The step ---------------------------------------------------------------------------------------------------

inline int64_t Blocks(int64_t threads) { return (threads + kThreads - 1) / kThreads; }

// Fills in the workspace's tables.
inline void PutTables(const std::vector<Tensor> &tensors, bool centralizes, const WorkspaceLayout &layout,
                      const Workspace &work, Launcher *launch) {
  std::vector<uint32_t> words(static_cast<size_t>(layout.tables / 4));
  const auto at = [&](const void *place) {
    return reinterpret_cast<unsigned char *>(words.data()) +
           (static_cast<const char *>(place) - reinterpret_cast<const char *>(work.tensors));
  };
  memcpy(at(work.tensors), tensors.data(), tensors.size() * sizeof(Tensor));
  int64_t chunk = 0, row = 0;
  for (size_t i = 0; i <= tensors.size(); ++i) {
    memcpy(at(work.first_chunk + i), &chunk, sizeof(chunk));
    memcpy(at(work.first_row + i), &row, sizeof(row));
    if (i == tensors.size()) break;
    chunk += (tensors[i].size + kChunk - 1) / kChunk;
    row += centralizes ? tensors[i].rows : 0;
  }
  auto *to = reinterpret_cast<uint32_t *>(work.tensors);
  for (size_t first = 0; first < words.size(); first += kMostWords) {
    Words part;
    const size_t count = Min(words.size() - first, size_t{kMostWords});
    memcpy(part.word, &words[first], count * sizeof(uint32_t));
    (*launch)(PutWords, 1, part, to + first, static_cast<int>(count));
  }
}

template <class Rule>
Status RunRule(const Step &step, const WorkspaceLayout &layout, const Workspace &work, Launcher &launch) {
  const bool gradients = (step.stages & kGradientStage) != 0, moments = (step.stages & kMomentsStage) != 0;
  const bool apply = (step.stages & kApplyStage) != 0, finish = (step.stages & ~unsigned{kGradientStage}) != 0;
  // To bound the global norm, or to skip a whole step, all gradients must be read before anything moves.
  const bool global = (step.flags & (kClips | kSkipNonfinite)) != 0;
  const int64_t n = step.count;
  launch(PrepareAll, 1, step, work);
  if (gradients) {
    launch.Zero(step.sums, n * int64_t{kSums} * int64_t{sizeof(double)});  // a skipped step reports no other sums
  } else {
    launch(CopySums, n, step, false);
  }
  if ((step.flags & kCentralizes) != 0) launch(MeanRows, Blocks(layout.rows * kWarp), step, work);
  if (gradients && (global || !moments || Rule::kNormalizesGradient)) {
    launch(SumGradients, layout.chunks, step, work);
    launch(AddSums, n, step, work, unsigned{kGradientsOnly}, false);
  }
  if (!finish) return launch.Result();
  launch(TakeSurvey<Rule>, 1, step, work, global || !gradients);
  launch(DecideAll<Rule>, Blocks(n), step, work);
  if (moments) {
    const bool move = apply && !Rule::kLayerwise;
    launch(move ? Update<Rule, !Rule::kLayerwise> : Update<Rule, false>, layout.chunks, step, work);
    // Of directions in place of gradients, the gradients' sums are known.
    launch(AddSums, n, step, work, Rule::kTakesDirections ? unsigned{kAll} & ~kGradientsOnly : unsigned{kAll}, true);
  }
  if (apply && (Rule::kLayerwise || !moments)) {
    launch(DecideAll<Rule>, Blocks(n), step, work);
    launch(MoveWeights<Rule>, layout.chunks, step, work);
  }
  // A launch that only commits reports too: of tensors in parts, it alone has the sums of all parts.
  launch(Finish, 1, step, work, apply || !moments, true);
  return launch.Result();
}

}  // namespace
}  // namespace ms_optim
