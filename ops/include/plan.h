// What the sums of a step decide: from norms to the numbers that the next pass over a tensor uses, and what is
// reported of it. Once for all devices, in float64.
#pragma once

#include <cfloat>
#include <cstdint>

#include "step.h"

namespace ms_optim {

struct Decision {
  float factor;  // from the gradient as it came to the gradient that enters the rule
  float lambda;
  double learning_rate, trust_ratio;
  float coefficient[kMaxDirections];
};

MS_OPTIM_FN int64_t LayoutOf(const Step &step, int i, Layout column) {
  return step.layout[int64_t{i} * step.layout_columns + column];
}

// Whether gradients are finite once they are unscaled, from their sum of squares: their norm is one in float32. A NaN
// is not less than anything.
MS_OPTIM_FN bool AreFinite(const Step &step, double sum) { return step.constants[kUnscale] * sqrt(sum) <= FLT_MAX; }

// From all gradients' sum of squares to what scales them down to the bound on their norm.
MS_OPTIM_FN double ClipFactor(const Step &step, double total) {
  const double norm = step.constants[kUnscale] * sqrt(total), bound = step.constants[kClipNorm];
  return bound > 0.0 && norm > bound ? bound / norm : 1.0;
}

// What no sum enters: steps of the learning rate along one direction.
MS_OPTIM_FN void DecideRates(const Step &step, int i, Decision *decision) {
  const int64_t decay = LayoutOf(step, i, kDecayIndex);
  decision->factor = static_cast<float>(step.constants[kUnscale]);
  decision->lambda = decay < 0 ? 0.0f : step.rates[decay];
  decision->learning_rate = step.rates[LayoutOf(step, i, kRateIndex)];
  decision->trust_ratio = 1.0;
  decision->coefficient[0] = static_cast<float>(decision->learning_rate);
  for (int k = 1; k < kMaxDirections; ++k) decision->coefficient[k] = 0.0f;
}

template <class Rule>
MS_OPTIM_FN void Decide(const Rule &rule, const Step &step, int i, const double *sums, double clip,
                        Decision *decision) {
  DecideRates(step, i, decision);
  double factor = step.constants[kUnscale] * clip;
  // A norm below the smallest float32 gives a gradient of less than norm 1, but of numbers.
  if (Rule::kNormalizesGradient) {
    factor = sums[kGradientSum] == 0.0 ? 0.0 : Min(1.0 / sqrt(sums[kGradientSum]), 3e38);
  }
  decision->factor = static_cast<float>(factor);
  const double norms[kMaxDirections] = {sqrt(sums[kDirectionSum]), sqrt(sums[kDirection2Sum])};
  double coefficient[kMaxDirections] = {};
  decision->trust_ratio =
      rule.Coefficients(decision->learning_rate, decision->lambda, sqrt(sums[kWeightSum]), norms, coefficient);
  for (int k = 0; k < kMaxDirections; ++k) decision->coefficient[k] = static_cast<float>(coefficient[k]);
}

MS_OPTIM_FN void Report(const Step &step, int i, const Decision &decision, const double *sums, bool applied) {
  const double c0 = decision.coefficient[0], c1 = decision.coefficient[1];
  const double update =
      c0 * c0 * sums[kDirectionSum] + c1 * c1 * sums[kDirection2Sum] + 2.0 * c0 * c1 * sums[kDirectionsDot];
  float *statistics = step.statistics + LayoutOf(step, i, kRow) * kStatistics;
  statistics[kGradientNorm] = static_cast<float>(step.constants[kUnscale] * sqrt(sums[kGradientSum]));
  statistics[kWeightNorm] = static_cast<float>(sqrt(sums[kWeightSum]));
  statistics[kUpdateNorm] = applied ? static_cast<float>(sqrt(Max(0.0, update))) : 0.0f;
  statistics[kTrustRatio] = applied ? static_cast<float>(decision.trust_ratio) : 0.0f;
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
