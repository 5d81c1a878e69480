// Lion: Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), Algorithm 2.
#pragma once

#include "rule.h"

namespace ms_optim {

struct Lion : ElementwiseRule {
  static constexpr int kStates = 1;     // m
  static constexpr int kConstants = 2;  // beta1, beta2
  static constexpr bool kDirectsFirst = true;

  float beta1, one_minus_beta1, beta2, one_minus_beta2;

  MS_OPTIM_FN Lion(const double *constants, int64_t, unsigned)
      : beta1(static_cast<float>(constants[0])),
        one_minus_beta1(static_cast<float>(1.0 - constants[0])),
        beta2(static_cast<float>(constants[1])),
        one_minus_beta2(static_cast<float>(1.0 - constants[1])) {}

  MS_OPTIM_FN void Moments(float g, float *s) const { s[0] = beta2 * s[0] + one_minus_beta2 * g; }

  // The sign of 0 is 0; NaN stays NaN. With one comparison, compilers emit no branch, which the processor would
  // mispredict for every other element.
  MS_OPTIM_FN void Directions(float, float g, const float *s, float *d) const {
    const float c = beta1 * s[0] + one_minus_beta1 * g;
    const float sign = FromBits((BitsOf(c) & 0x80000000u) | BitsOf(1.0f));
    d[0] = FromBits(BitsOf(c) & 0x7fffffffu) > 0.0f ? sign : c;
  }
};

}  // namespace ms_optim
