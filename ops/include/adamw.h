// AdamW: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), Algorithm 2.
#pragma once

#include "rule.h"

namespace ms_optim {

template <bool kKeepsLargest>
struct AdamW : ElementwiseRule {
  static constexpr int kStates = kKeepsLargest ? 3 : 2;  // m, v and, for AMSGrad, the maximum of v
  static constexpr int kConstants = 3;                   // beta1, beta2, eps
  enum Flags : unsigned { kAmsgrad = 1, kMaximize = 2, kBiasCorrection = 4 };

  AdamMoments moments;
  float eps;
  double sign;

  MS_OPTIM_FN AdamW(const double *constants, int64_t t, unsigned flags)
      : moments(constants[0], constants[1], t, (flags & kBiasCorrection) != 0),
        eps(static_cast<float>(constants[2])),
        sign((flags & kMaximize) != 0 ? -1.0 : 1.0) {}

  MS_OPTIM_FN double Sign() const { return sign; }

  MS_OPTIM_FN void Moments(float g, float *s) const {
    moments.Update(g, s);  // lines 7 and 8
    if (kKeepsLargest) s[kStates - 1] = s[kStates - 1] > s[1] ? s[kStates - 1] : s[1];
  }

  // Line 12 is one difference, w - lr * (m_hat / (sqrt(v_hat) + eps) + lambda * w): the paper's
  // w * (1 - lr * lambda) would round a small lr * lambda away.
  MS_OPTIM_FN void Directions(float, float, const float *s, float *d) const {
    d[0] = moments.Corrected(s[0]) / (moments.Denominator(s[kStates - 1]) + eps);
  }
};

}  // namespace ms_optim
