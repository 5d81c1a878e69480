// Holds the norms of weights: Wen et al., "Hyperball" (2026), and the hooks of NVIDIA's Emerging-Optimizers (2026).
//
// With a weight W, a direction U and two numbers of the tensor, the weight becomes W - c U - k W. Both follow from the
// norms of W and U and their product before the weight moves, so no norm of the new weight is taken.
#pragma once

#include "step.h"

namespace ms_optim {

MS_OPTIM_FN bool IsHeld(const Step &step, int i) {
  return (step.flags & kHoldsNorms) != 0 && LayoutOf(step, i, kIsHeld) != 0;
}

// Returns the norm at which a weight is held: what it was before the first step, at which the one that is kept is 0.
MS_OPTIM_FN float RadiusOf(const Step &step, int i, const double *sums) {
  const float radius = step.radii != nullptr ? step.radii[LayoutOf(step, i, kRow)] : 0.0f;
  return radius > 0.0f ? radius : static_cast<float>(sqrt(sums[kWeightSum]));
}

// Turns a rule's coefficient of U, the learning rate times a scale of U, into c and k, and returns the trust ratio. A
// NaN stays one, as nothing is 0 then.
MS_OPTIM_FN double HoldNorm(const Step &step, int i, double learning_rate, const double *sums, double *coefficient) {
  const double weight = sqrt(sums[kWeightSum]), direction = sqrt(sums[kDirectionSum]), radius = RadiusOf(step, i, sums);
  const double kind = step.constants[kHeldBy];
  const bool nothing = weight == 0.0 || direction == 0.0;
  double ratio = 1.0, along = coefficient[0], lost = 0.0;
  if (kind != kRadialBrake) {
    const double scale = learning_rate == 0.0 ? 1.0 : coefficient[0] / learning_rate;
    ratio = nothing ? 0.0 : (kind == kHyperball ? radius : weight) / (scale * direction);
    along *= ratio;
  }
  // The square of the new norm is that of the old one plus this.
  const double grown = along * (along * sums[kDirectionSum] - 2.0 * sums[kDirectionsDot]);
  const double square = sums[kWeightSum] + grown, norm = sqrt(square < 0.0 ? 0.0 : square);
  if (kind == kHyperball && !nothing) lost = 1.0 - radius / (norm == 0.0 ? 1.0 : norm);
  if (kind == kRadialBrake && norm != 0.0) {
    const double share = step.constants[grown > 0.0 ? kOutwardKept : kInwardKept];
    lost = (1.0 - share) * grown / (norm * (norm + weight));  // the difference of the norms, without cancellation
  }
  coefficient[0] = along * (1.0 - lost);
  coefficient[1] = lost;
  return ratio * (1.0 - lost);
}

}  // namespace ms_optim
