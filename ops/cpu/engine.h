// Runs a rule over all tensors of a step on the CPU.
#pragma once

#include "held_norms.h"
#include "step_engine.h"

namespace ms_optim {
namespace {

template <class Rule>
class Engine : StepEngine {
 public:
  explicit Engine(const Step &step)
      : StepEngine(step), rule_(step.constants + kRuleConstants, int64_t{*step.global_step} + 1, step.rule_flags) {}

  Status Run() {
    const bool gradients = Has(kGradientStage), moments = Has(kMomentsStage), apply = Has(kApplyStage);
    if (const Status status = Begin(!gradients); status != kOk) return status;
    const Prologue prologue(step_, step_.constants[kClipNorm] > 0.0);
    Open(prologue);
    if (step_.stages == kGradientStage) return kOk;
    if (!Applies(prologue)) return Skip();
    const bool waits = Rule::kLayerwise || Holds();  // for sums over whole tensors, before weights move
    for (int first = 0, last = 0; first < step_.count; first = last) {
      last = waits ? LastOfRun(first, kCachedElements) : step_.count;
      if (Rule::kNormalizesGradient && gradients && !prologue.sums_gradients) SumGradients(first, last);
      DecideAll(rule_, first, last);
      if (moments) {
        Pass(first, last, prologue.sums_gradients && !waits, MomentsPass(apply));
        AddSums(first, last);
      }
      if (apply && (waits || !moments)) {
        DecideAll(rule_, first, last);
        Pass(first, last, true, ApplyPass());
      }
    }
    // A launch that only commits reports, too: if tensors are in parts, it alone has the sums of all parts.
    if (apply || !moments) {
      for (int i = 0; i < step_.count; ++i) Report(i, true);
    }
    return Commit(true);
  }

 private:
  typedef void (*ChunkPass)(const Rule &, const Tensor &, const Task &, Chunk &, Buffers &);

  ChunkPass MomentsPass(bool apply) const {
    if constexpr (MayHoldNorms<Rule>()) {
      if (Holds()) return HoldChunk<Rule, false>;
    }
    return apply ? UpdateChunk<Rule, !Rule::kLayerwise> : UpdateChunk<Rule, false>;
  }

  ChunkPass ApplyPass() const {
    if constexpr (MayHoldNorms<Rule>()) {
      if (Holds()) return HoldChunk<Rule, true>;
    }
    return MoveChunk<Rule>;
  }

  template <class Body>
  void Pass(int first, int last, bool backwards, Body body) {
    ForChunks(first, last, backwards, [this, body](Chunk &chunk, const Tensor &t, const Task &task, Buffers &b) {
      body(rule_, t, task, chunk, b);
    });
  }

  const Rule rule_;
};

template <class Rule>
Status Run(const Step &step) {
  if constexpr (Rule::kDecayed > 0) {
    if (step.constants[kCautious] == 0.0) return Engine<NeverCautious<Rule>>(step).Run();
  }
  return Engine<Rule>(step).Run();
}

}  // namespace
}  // namespace ms_optim
