// Runs a rule over all tensors of a step on a GPU: a few kernels on one stream, none of which the host waits for.
//
// A kernel of one block decides, between the passes, the numbers that the host cannot know without waiting: the step
// count, the rates, whether the step is skipped.
#pragma once

#include "step_engine.cuh"

namespace ms_optim {
namespace {

constexpr int kBlocksAtOnce = 3;  // on a multiprocessor: enough loads are under way to keep the memory busy

// One block: decides from all gradients whether the step is applied, and how they are clipped.
template <class Rule>
__global__ void __launch_bounds__(kThreads) TakeSurvey(const Step step, const Workspace work, bool takes_total) {
  const double total = takes_total ? TotalGradientSum(step) : 0.0;
  if (threadIdx.x != 0) return;
  static_cast<Survey &>(*work.survey) = SurveyOf(step, total);
  new (work.survey->rule) Rule(step.constants + kRuleConstants, int64_t{*step.global_step} + 1, step.rule_flags);
}

// Decides from the sums so far the numbers that the next pass uses.
template <class Rule>
__global__ void __launch_bounds__(kThreads) DecideAll(const Step step, const Workspace work) {
  const int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (i >= step.count || !work.survey->applied) return;
  Decide(RuleOf<Rule>(work), step, i, step.sums + int64_t{i} * kSums, work.survey->clip, &work.tasks[i]);
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

// Moves the weights, after the pass that made new states.
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

template <class Rule>
Status RunRule(const Step &step, const WorkspaceLayout &layout, const Workspace &work, Launcher &launch) {
  const bool gradients = (step.stages & kGradientStage) != 0, moments = (step.stages & kMomentsStage) != 0;
  const bool apply = (step.stages & kApplyStage) != 0, finish = (step.stages & ~unsigned{kGradientStage}) != 0;
  const Prologue prologue(step, (step.flags & kClips) != 0);  // the bound itself is on the device
  const int64_t n = step.count;
  launch(PrepareAll, 1, step, work);
  if (gradients) {
    launch.Zero(step.sums, n * int64_t{kSums} * int64_t{sizeof(double)});  // a skipped step reports no other sums
  } else {
    launch(CopySums, n, step, false);
  }
  if ((step.flags & kCentralizes) != 0) launch(MeanRows, Blocks(layout.rows * kWarp), step, work);
  if (prologue.sums_gradients || (gradients && Rule::kNormalizesGradient)) {
    launch(SumGradients, layout.chunks, step, work);
    launch(AddSums, n, step, work, unsigned{kGradientsOnly}, false);
  }
  if (!finish) return launch.Result();
  launch(TakeSurvey<Rule>, 1, step, work, prologue.takes_total);
  launch(DecideAll<Rule>, Blocks(n), step, work);
  if (moments) {
    const bool move = apply && !Rule::kLayerwise;
    launch(move ? Update<Rule, !Rule::kLayerwise> : Update<Rule, false>, layout.chunks, step, work);
    // If directions come in place of gradients, the sums of the gradients are there already.
    launch(AddSums, n, step, work, Rule::kTakesDirections ? unsigned{kAll} & ~kGradientsOnly : unsigned{kAll}, true);
  }
  if (apply && (Rule::kLayerwise || !moments)) {
    launch(DecideAll<Rule>, Blocks(n), step, work);
    launch(MoveWeights<Rule>, layout.chunks, step, work);
  }
  // A launch that only commits reports, too: if tensors are in parts, it alone has the sums of all parts.
  launch(Finish, 1, step, work, apply || !moments, true);
  return launch.Result();
}

}  // namespace
}  // namespace ms_optim
