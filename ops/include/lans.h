// LANS: Zheng et al., "Accelerated Large Batch Optimization of BERT Pretraining in 54 minutes" (2020), Algorithm 2.
#pragma once

#include "rule.h"

namespace ms_optim {

struct Lans : LayerwiseRule {
  static constexpr int kStates = 2;
  static constexpr int kConstants = 6;  // beta1, beta2, eps, the bound of the gradient's elements, the bounds of phi
  static constexpr int kDirections = 2;
  static constexpr int kDecayed = 2;
  static constexpr bool kNormalizesGradient = true;

  AdamMoments moments;
  float eps, gradient_bound;
  double beta1, phi_low, phi_high;

  MS_OPTIM_FN Lans(const double *constants, int64_t t, unsigned)
      : moments(constants[0], constants[1], t, true),
        eps(static_cast<float>(constants[2])),
        gradient_bound(static_cast<float>(constants[3])),
        beta1(constants[0]),
        phi_low(constants[4]),
        phi_high(constants[5]) {}

  MS_OPTIM_FN float Gradient(float, float g, float) const { return Clamp(g, -gradient_bound, gradient_bound); }

  MS_OPTIM_FN void Moments(float g, float *s) const { moments.Update(g, s); }

  // The directions of the moment and of the gradient, the paper's r_t and c_t.
  MS_OPTIM_FN void Directions(float, float g, const float *s, float *d) const {
    const float denominator = moments.Denominator(s[1]) + eps;
    d[0] = moments.Corrected(s[0]) / denominator;
    d[1] = g / denominator;
  }

  // The weight from before the step scales both directions, as in the paper.
  MS_OPTIM_FN double Coefficients(double lr, double, double weight_norm, const double *direction_norm,
                                  double *coefficient) const {
    const double phi = Bounded(weight_norm, phi_low, phi_high);
    const double ratio_c = TrustRatio(phi, direction_norm[0]);
    const double ratio_s = TrustRatio(phi, direction_norm[1]);
    coefficient[0] = lr * beta1 * ratio_c;
    coefficient[1] = lr * (1.0 - beta1) * ratio_s;
    return beta1 * ratio_c + (1.0 - beta1) * ratio_s;
  }
};

}  // namespace ms_optim
