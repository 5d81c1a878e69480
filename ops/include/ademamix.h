// AdEMAMix: Pagliardini et al., "The AdEMAMix Optimizer: Better, Faster, Older" (2024), Algorithm 1 and its schedulers.
#pragma once

#include "rule.h"

namespace ms_optim {

struct AdEMAMix : ElementwiseRule {
  static constexpr int kStates = 3;     // m1, nu, and m2, the slow moment
  static constexpr int kConstants = 6;  // beta1, beta2, eps, beta3, alpha, the steps of the warm-up (0: none)

  AdamMoments moments;
  float beta3, one_minus_beta3, alpha, eps;

  MS_OPTIM_FN AdEMAMix(const double *constants, int64_t t, unsigned)
      : moments(constants[0], constants[1], t, true), eps(static_cast<float>(constants[2])) {
    const double part = constants[5] > 0.0 ? static_cast<double>(t) / constants[5] : 1.0;
    const double slow = part < 1.0 ? Slow(constants[0], constants[3], part) : constants[3];
    beta3 = static_cast<float>(slow);
    one_minus_beta3 = static_cast<float>(1.0 - slow);
    alpha = static_cast<float>(part < 1.0 ? part * constants[4] : constants[4]);
  }

  // Between beta1 and beta3, where the half-life of the moment grows by the same number of steps in each step.
  MS_OPTIM_FN static double Slow(double beta1, double beta3, double part) {
    const double from = log(beta1), to = log(beta3);
    return Min(exp(from * to / ((1.0 - part) * to + part * from)), beta3);
  }

  MS_OPTIM_FN void Moments(float g, float *s) const {
    moments.Update(g, s);
    s[2] = beta3 * s[2] + one_minus_beta3 * g;
  }

  MS_OPTIM_FN void Directions(float, float, const float *s, float *d) const {
    d[0] = (moments.Corrected(s[0]) + alpha * s[2]) / (moments.Denominator(s[1]) + eps);
  }
};

}  // namespace ms_optim
