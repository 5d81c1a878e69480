// Decides from the sums of a step the numbers that the next pass over a tensor uses, and makes the report: one code for
// all devices, in float64.
#pragma once

#include <cfloat>
#include <cstdint>

#include "step.h"
#include "weight_norms.h"

namespace ms_optim {

// Tells from a sum of squares of gradients whether they are finite: whether their norm, once they are unscaled, is a
// finite float32 number. For a NaN the comparison is false.
MS_OPTIM_FN bool AreFinite(const Step &step, double sum) { return step.constants[kUnscale] * sqrt(sum) <= FLT_MAX; }

// Returns the factor that bounds the norm of all gradients, from their sum of squares.
MS_OPTIM_FN double ClipFactor(const Step &step, double total) {
  const double norm = step.constants[kUnscale] * sqrt(total), bound = step.constants[kClipNorm];
  return bound > 0.0 && norm > bound ? bound / norm : 1.0;
}

// The gradients that a launch reads before anything moves. To bound the global norm, or to skip a whole step, it reads
// them all.
struct Prologue {
  bool sums_gradients;  // a pass of its own sums the gradients of all tensors
  bool takes_total;     // the sum over all tensors decides about the step

  MS_OPTIM_FN Prologue(const Step &step, bool clips) {
    const bool gradients = (step.stages & kGradientStage) != 0, moments = (step.stages & kMomentsStage) != 0;
    const bool global = clips || (step.flags & kSkipNonfinite) != 0;
    sums_gradients = gradients && (global || !moments);
    takes_total = global || !gradients;
  }
};

// The decisions that all gradients enter.
struct Survey {
  bool applied;  // it is not skipped
  double clip;   // the factor that bounds the norm
};

// A caller that knows of other gradients that are not finite passes NaN for the scale.
MS_OPTIM_FN Survey SurveyOf(const Step &step, double total) {
  const bool finite = (step.flags & kSkipNonfinite) == 0 || AreFinite(step, total);
  return {finite && *step.global_step >= 0, ClipFactor(step, total)};
}

// Returns the part of the new weights in their average: 1 minus its decay rate, which may rise at first.
MS_OPTIM_FN double AverageRate(const Step &step) {
  const double t = static_cast<double>(*step.global_step) + 1.0, decay = step.constants[kAverageDecay];
  return 1.0 - (step.constants[kAverageWarmup] != 0.0 ? Min(decay, (1.0 + t) / (10.0 + t)) : decay);
}

// Decides the numbers that depend on no sum, and lets the weight move along one direction by the learning rate.
MS_OPTIM_FN void DecideRates(const Step &step, int i, Decision *decision) {
  const int64_t decay = LayoutOf(step, i, kDecayIndex);
  decision->factor = static_cast<float>(step.constants[kUnscale]);
  decision->lambda = decay < 0 ? 0.0f : step.rates[decay];
  decision->cautious = step.constants[kCautious] != 0.0 ? 0x80000000u : 0u;
  decision->learning_rate = step.rates[LayoutOf(step, i, kRateIndex)];
  decision->trust_ratio = 1.0;
  decision->coefficient[0] = static_cast<float>(decision->learning_rate);
  for (int k = 1; k < kMaxDirections; ++k) decision->coefficient[k] = 0.0f;
  decision->starts = *step.global_step == 0;
  decision->average_rate = static_cast<float>(AverageRate(step));
}

template <class Rule>
MS_OPTIM_FN void Decide(const Rule &rule, const Step &step, int i, const double *sums, double clip,
                        Decision *decision) {
  DecideRates(step, i, decision);
  double factor = Rule::kTakesDirections ? 1.0 : step.constants[kUnscale] * clip;
  // The inverse of a tiny norm may be too large for float32: the factor is bounded, so that the gradient stays finite.
  // Its norm is then less than 1. A norm that is NaN stays NaN: Min then returns its second argument.
  if (Rule::kNormalizesGradient) {
    factor = sums[kGradientSum] == 0.0 ? 0.0 : Min(3e38, 1.0 / sqrt(sums[kGradientSum]));
  }
  decision->factor = static_cast<float>(rule.Sign() * factor);
  if constexpr (Rule::kWeighsSteps) {
    rule.Weigh(step.step_weights + LayoutOf(step, i, kRow) * 2, decision);
    return;
  }
  const double norms[kMaxDirections] = {sqrt(sums[kDirectionSum]), sqrt(sums[kDirection2Sum])};
  double coefficient[kMaxDirections] = {};
  decision->trust_ratio =
      rule.Coefficients(decision->learning_rate, decision->lambda, sqrt(sums[kWeightSum]), norms, coefficient);
  if (IsHeld(step, i)) decision->trust_ratio = HoldNorm(step, i, decision->learning_rate, sums, coefficient);
  for (int k = 0; k < kMaxDirections; ++k) decision->coefficient[k] = static_cast<float>(coefficient[k]);
  decision->radius = RadiusOf(step, i, sums);
}

MS_OPTIM_FN void Report(const Step &step, int i, const Decision &decision, const double *sums, bool applied) {
  const double c0 = decision.coefficient[0], c1 = decision.coefficient[1];
  const double second = sums[IsHeld(step, i) ? kWeightSum : kDirection2Sum];
  const double update = c0 * c0 * sums[kDirectionSum] + c1 * c1 * second + 2.0 * c0 * c1 * sums[kDirectionsDot];
  float *statistics = step.statistics + LayoutOf(step, i, kRow) * kStatistics;
  statistics[kGradientNorm] = static_cast<float>(step.constants[kUnscale] * sqrt(sums[kGradientSum]));
  statistics[kWeightNorm] = static_cast<float>(sqrt(sums[kWeightSum]));
  statistics[kUpdateNorm] = applied ? static_cast<float>(sqrt(Max(0.0, update))) : 0.0f;
  statistics[kTrustRatio] = applied ? static_cast<float>(decision.trust_ratio) : 0.0f;
  if (applied && step.step_weights != nullptr && (step.stages & kApplyStage) != 0) {
    for (int k = 0; k < 2; ++k) step.step_weights[LayoutOf(step, i, kRow) * 2 + k] = decision.step_weights[k];
  }
  if (applied && step.radii != nullptr) step.radii[LayoutOf(step, i, kRow)] = decision.radius;
  statistics[kFinite] = AreFinite(step, sums[kGradientSum]) ? 1.0f : 0.0f;
}

// Counts the step, or counts it as skipped. A count stays at the largest number that it can hold.
MS_OPTIM_FN void Commit(const Step &step, bool applied) {
  int32_t *count = applied ? step.global_step : step.skipped_steps;
  if (*count < INT32_MAX) ++*count;
  for (int k = 0; k < 2; ++k) {
    float *power = step.beta_power[k];
    if (power != nullptr) *power = static_cast<float>(pow(step.constants[kRuleConstants + k], *step.global_step));
  }
}

}  // namespace ms_optim
