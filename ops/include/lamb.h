// LAMB: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes"
// (2020), Algorithm 2.
#pragma once

#include "rule.h"

namespace ms_optim {

struct Lamb : LayerwiseRule {
  static constexpr int kStates = 2;
  static constexpr int kConstants = 7;  // beta1, beta2, eps, the bounds of phi, the bounds of the trust ratio
  static constexpr int kDirections = 1;
  enum Flags : unsigned { kBiasCorrection = 1, kAlwaysAdapt = 2 };

  AdamMoments moments;
  float eps;
  double phi_low, phi_high, ratio_low, ratio_high;
  bool always_adapt;

  MS_OPTIM_FN Lamb(const double *constants, int64_t t, unsigned flags)
      : moments(constants[0], constants[1], t, (flags & kBiasCorrection) != 0),
        eps(static_cast<float>(constants[2])),
        phi_low(constants[3]),
        phi_high(constants[4]),
        ratio_low(constants[5]),
        ratio_high(constants[6]),
        always_adapt((flags & kAlwaysAdapt) != 0) {}

  MS_OPTIM_FN void Moments(float g, float *s) const { moments.Update(g, s); }

  // r = m_hat / (sqrt(v_hat) + eps); the decay is added to it and makes u.
  MS_OPTIM_FN void Directions(float, float, const float *s, float *d) const {
    d[0] = moments.Corrected(s[0]) / (moments.Denominator(s[1]) + eps);
  }

  // Returns the trust ratio phi(||w||) / ||u||, 1 where either norm is 0.
  MS_OPTIM_FN double Coefficients(double lr, double lambda, double weight_norm, const double *direction_norm,
                                  double *coefficient) const {
    double ratio = TrustRatio(Bounded(weight_norm, phi_low, phi_high), direction_norm[0]);
    ratio = Bounded(ratio, ratio_low, ratio_high);
    if (!always_adapt && lambda == 0.0) ratio = 1.0;
    coefficient[0] = lr * ratio;
    return ratio;
  }
};

}  // namespace ms_optim
