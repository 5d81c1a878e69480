// AdEMAMix: see ops/include/ademamix.h.
#pragma once

#include "adam.h"

namespace ms_optim {

// Pagliardini et al. (2024), Algorithm 1; u = (m1_hat + alpha * m2) / (sqrt(nu_hat) + eps) + lambda * w. The states are
// m1, nu and m2; alpha and beta3 are those of the step.
struct AdEMAMix : AdamMoments {
  enum Scalar { kAlpha = kRuleScalars + AdamMoments::kScalars, kBeta3, kOneMinusBeta3 };
  static constexpr uint32_t kStates = 3, kScalars = AdamMoments::kScalars + 3;

  float alpha, beta3, one_minus_beta3;

  __aicore__ inline void Init(const Numbers &constants, const Numbers &scalars) {
    AdamMoments::Init(constants, scalars);
    alpha = scalars.GetValue(kAlpha);
    beta3 = scalars.GetValue(kBeta3);
    one_minus_beta3 = scalars.GetValue(kOneMinusBeta3);
  }

  // m1 and nu as Adam's; m2 = beta3 * m2 + (1 - beta3) * g.
  __aicore__ inline void Moments(const Tile &t) const {
    AdamMoments::Moments(t);
    Mix(t.s[2], beta3, t.before[2], one_minus_beta3, t.g, t.scratch, t.count);
  }

  __aicore__ inline void Directions(const Tile &t) const {
    const LocalTensor<float> d = t.d[0];
    Corrected(d, t);
    AscendC::Muls(t.scratch, t.s[2], alpha, t.count);
    AscendC::Add(d, d, t.scratch, t.count);
    Denominator(t.scratch, t.s[1], t);
    AscendC::Div(d, d, t.scratch, t.count);
  }
};

}  // namespace ms_optim
