// Adam with L2 decay: Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2015), in the form of section 2 that
// folds the bias corrections into the rate. Nesterov's momentum is that of Dozat (2016), the maximum of v that of Reddi
// et al., "On the Convergence of Adam and Beyond" (2018).
#pragma once

#include "rule.h"

namespace ms_optim {

template <bool kKeepsLargest>
struct Adam : ElementwiseRule {
  static constexpr int kStates = kKeepsLargest ? 3 : 2;  // m, v and, for AMSGrad, the maximum of v
  static constexpr int kConstants = 3;                   // beta1, beta2, eps
  static constexpr int kDecayed = 0;
  enum Flags : unsigned { kNesterov = 1, kCorrectsEps = 2 };

  AdamMoments moments;
  double root_correction2;  // sqrt(1 - beta2^t)
  float eps;                // as it is added to sqrt(v)
  double rate_correction;
  float of_moment, of_gradient;  // of the direction: m, or with Nesterov beta1 * m + (1 - beta1) * g

  MS_OPTIM_FN Adam(const double *constants, int64_t t, unsigned flags)
      : moments(constants[0], constants[1], t, false),
        root_correction2(sqrt(1.0 - pow(constants[1], static_cast<double>(t)))),
        eps(static_cast<float>(constants[2] * ((flags & kCorrectsEps) != 0 ? root_correction2 : 1.0))),
        rate_correction(root_correction2 / (1.0 - pow(constants[0], static_cast<double>(t)))),
        of_moment((flags & kNesterov) != 0 ? moments.beta1 : 1.0f),
        of_gradient((flags & kNesterov) != 0 ? moments.one_minus_beta1 : 0.0f) {}

  MS_OPTIM_FN float Gradient(float w, float g, float lambda) const { return g + lambda * w; }

  MS_OPTIM_FN void Moments(float g, float *s) const {
    moments.Update(g, s);
    if (kKeepsLargest) s[kStates - 1] = s[kStates - 1] > s[1] ? s[kStates - 1] : s[1];
  }

  MS_OPTIM_FN void Directions(float, float g, const float *s, float *d) const {
    d[0] = (of_moment * s[0] + of_gradient * g) / (Sqrt(s[kStates - 1]) + eps);
  }

  MS_OPTIM_FN double Coefficients(double lr, double, double, const double *, double *coefficient) const {
    coefficient[0] = lr * rate_correction;
    return 1.0;
  }
};

}  // namespace ms_optim
