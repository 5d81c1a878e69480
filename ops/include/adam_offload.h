// Adam with L2 decay: Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2015), in the form of section 2 that
// folds the bias corrections into the rate. Nesterov's momentum is that of Dozat (2016).
#pragma once

#include "rule.h"

namespace ms_optim {

struct AdamOffload : ElementwiseRule {
  static constexpr int kStates = 2;
  static constexpr int kConstants = 3;  // beta1, beta2, eps
  static constexpr int kDecayed = 0;
  enum Flags : unsigned { kNesterov = 1 };

  AdamMoments moments;
  float eps;
  double rate_correction;
  float of_moment, of_gradient;  // of the direction: m, or with Nesterov beta1 * m + (1 - beta1) * g

  MS_OPTIM_FN AdamOffload(const double *constants, int64_t t, unsigned flags)
      : moments(constants[0], constants[1], t, false),
        eps(static_cast<float>(constants[2])),
        rate_correction(sqrt(1.0 - pow(constants[1], static_cast<double>(t))) /
                        (1.0 - pow(constants[0], static_cast<double>(t)))),
        of_moment((flags & kNesterov) != 0 ? moments.beta1 : 1.0f),
        of_gradient((flags & kNesterov) != 0 ? moments.one_minus_beta1 : 0.0f) {}

  MS_OPTIM_FN float Gradient(float w, float g, float lambda) const { return g + lambda * w; }

  MS_OPTIM_FN void Moments(float g, float *s) const { moments.Update(g, s); }

  MS_OPTIM_FN void Directions(float, float g, const float *s, float *d) const {
    d[0] = (of_moment * s[0] + of_gradient * g) / (Sqrt(s[1]) + eps);
  }

  MS_OPTIM_FN double Coefficients(double lr, double, double, const double *, double *coefficient) const {
    coefficient[0] = lr * rate_correction;
    return 1.0;
  }
};

}  // namespace ms_optim
