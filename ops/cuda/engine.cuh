// Runs a rule over all tensors of a step on a GPU: a few kernels on one stream, none of which the host waits for.
//
// A kernel of one block decides, between the passes, the numbers that the host cannot know without waiting: the step
// count, the rates, whether the step is skipped.
#pragma once

#include <algorithm>

#include "step_engine.cuh"

namespace ms_optim {
namespace {

// Blocks at once on a multiprocessor, so that enough loads are under way to keep the memory busy. Measured on an H100:
// two, with more registers each, take 3 % less time than three where memory is waited for, and three take 6 % less
// where codes are computed.
template <class Format>
constexpr int kBlocksAtOnce = FirstCode<Format>::kHasScales ? 3 : 2;

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

// The passes over tensors whose states are of one format, or all float32 (if it takes those): the others are left to
// another launch.
template <class Rule, bool kMove, class Format>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce<Format>)
    Update(const Step step, const Workspace work, bool takes_floats) {
  if (!work.survey->applied) return;
  const Chunk chunk(step, work);
  const Tensor &t = step.tensors[chunk.tensor];
  if (!Takes<Format>(t, takes_floats)) return;
  const Task task = work.tasks[chunk.tensor];
  const Rule rule = RuleOf<Rule>(work);
  const RowMean *means = work.means + work.first_row[chunk.tensor];
  double sum[kSums] = {};
  const auto update = [&](const auto &rule, const Tensor &t, const Task &task, bool noisy, const Tile &tile,
                          const auto &fetched) {
    UpdateTile<kMove, Format>(rule, t, task, means, noisy, tile, fetched, sum);
  };
  ForTilesOf<Format>(chunk, rule, t, task, step.flags, update);
  StorePartial<Rule::kDirections>(work, sum);
}

// Moves the weights, after the pass that made new states.
template <class Rule, class Format>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce<Format>)
    MoveWeights(const Step step, const Workspace work, bool takes_floats) {
  if (!work.survey->applied) return;
  const Chunk chunk(step, work);
  const Tensor &t = step.tensors[chunk.tensor];
  if (!Takes<Format>(t, takes_floats)) return;
  const Task task = work.tasks[chunk.tensor];
  const Rule rule = RuleOf<Rule>(work);
  const RowMean *means = work.means + work.first_row[chunk.tensor];
  const auto move = [&](const auto &rule, const Tensor &t, const Task &task, bool noisy, const Tile &tile,
                        const auto &fetched) { MoveTile<Format>(rule, t, task, means, noisy, tile, fetched); };
  ForTilesOf<Format>(chunk, rule, t, task, step.flags, move);
}

// Calls launch(format, takes_floats) for each format that states of a step have: one, unless groups of parameters have
// different ones.
template <class Rule, class LaunchPass>
void ForFormats(const std::vector<Tensor> &tensors, const LaunchPass &launch) {
  bool takes_floats = true;
  const auto has = [&](auto format) {
    return std::any_of(tensors.begin(), tensors.end(), HasStatesOf<decltype(format)>);
  };
#define MS_OPTIM_ROW(Format)                                            \
  if constexpr (Rule::kStates > 0 && FirstCode<Format>::kIsConverted) { \
    if (has(Format())) {                                                \
      launch(Format(), takes_floats);                                   \
      takes_floats = false;                                             \
    }                                                                   \
  }
  MS_OPTIM_FORMATS(MS_OPTIM_ROW)
#undef MS_OPTIM_ROW
  if (takes_floats) launch(Float32Format(), true);
}

// Sums the gradients, or copies the sums of an earlier launch, and decides about the step and each tensor. Returns
// whether there is more to do.
template <class Rule>
bool Open(const Step &step, const WorkspaceLayout &layout, const Workspace &work, Launcher &launch) {
  const bool gradients = (step.stages & kGradientStage) != 0;
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
  if (step.stages == kGradientStage) return false;
  launch(TakeSurvey<Rule>, 1, step, work, prologue.takes_total);
  launch(DecideAll<Rule>, Blocks(n), step, work);
  return true;
}

template <class Rule>
Status RunRule(const Step &step, const std::vector<Tensor> &tensors, const WorkspaceLayout &layout,
               const Workspace &work, Launcher &launch) {
  const bool moments = (step.stages & kMomentsStage) != 0, apply = (step.stages & kApplyStage) != 0;
  const int64_t n = step.count;
  if (!Open<Rule>(step, layout, work, launch)) return launch.Result();
  if (moments) {
    const bool move = apply && !Rule::kLayerwise;
    ForFormats<Rule>(tensors, [&](auto format, bool takes_floats) {
      typedef decltype(format) Format;
      const auto update = move ? Update<Rule, !Rule::kLayerwise, Format> : Update<Rule, false, Format>;
      launch(update, layout.chunks, step, work, takes_floats);
    });
    // If directions come in place of gradients, the sums of the gradients are there already.
    launch(AddSums, n, step, work, Rule::kTakesDirections ? unsigned{kAll} & ~kGradientsOnly : unsigned{kAll}, true);
  }
  if (apply && (Rule::kLayerwise || !moments)) {
    launch(DecideAll<Rule>, Blocks(n), step, work);
    ForFormats<Rule>(tensors, [&](auto format, bool takes_floats) {
      launch(MoveWeights<Rule, decltype(format)>, layout.chunks, step, work, takes_floats);
    });
  }
  // A launch that only commits reports, too: if tensors are in parts, it alone has the sums of all parts.
  launch(Finish, 1, step, work, apply || !moments, true);
  return launch.Result();
}

}  // namespace
}  // namespace ms_optim
