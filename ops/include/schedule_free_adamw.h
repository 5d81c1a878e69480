// Schedule-Free AdamW: Defazio et al., "The Road Less Scheduled" (2024), Algorithm 1.
#pragma once

#include "rule.h"

namespace ms_optim {

// The weight holds y. Its direction is first n, along which z moves, too, and then the whole move of y.
struct ScheduleFreeAdamW : ElementwiseRule {
  static constexpr int kStates = 2;  // z and v
  static constexpr int kConstants =
      6;  // beta1, beta2, eps, the steps of the warm-up (0: none), r, the power of the rate
  static constexpr bool kStartsAtWeights = true;
  static constexpr bool kWeighsSteps = true;

  AdamMoments moments;
  float eps;
  double beta1, step, warmup, r, power;

  MS_OPTIM_FN ScheduleFreeAdamW(const double *constants, int64_t t, unsigned)
      : moments(constants[0], constants[1], t, true),
        eps(static_cast<float>(constants[2])),
        beta1(constants[0]),
        step(static_cast<double>(t)),
        warmup(constants[3]),
        r(constants[4]),
        power(constants[5]) {}

  MS_OPTIM_FN void Moments(float g, float *s) const { s[1] = moments.beta2 * s[1] + moments.one_minus_beta2 * g * g; }

  MS_OPTIM_FN void Directions(float, float g, const float *s, float *d) const {
    d[0] = g / (moments.Denominator(s[1]) + eps);
  }

  MS_OPTIM_FN void Follow(const Decision &decision, float w, float *d, float *s) const {
    const float n = d[0], z = s[0];
    s[0] = z - static_cast<float>(decision.learning_rate) * n;
    d[0] = decision.along_direction * n + decision.along_state * (w - z);
  }

  // Decides the rate gamma of this step, and from the weights of all steps so far the part c of z in the new weight.
  MS_OPTIM_FN void Weigh(const double *before, Decision *decision) const {
    if (warmup > step) decision->learning_rate *= step / warmup;
    const double largest = Max(before[0], decision->learning_rate);
    const double weight = pow(step, r) * pow(largest, power), sum = before[1] + weight;
    const double c = sum > 0.0 ? weight / sum : 0.0;
    decision->step_weights[0] = largest;
    decision->step_weights[1] = sum;
    decision->along_direction = static_cast<float>(decision->learning_rate * (1.0 - beta1 * (1.0 - c)));
    decision->along_state = static_cast<float>(c);
    decision->coefficient[0] = 1.0f;
  }
};

}  // namespace ms_optim
