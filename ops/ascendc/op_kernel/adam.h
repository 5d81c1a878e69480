// AdamW, LAMB and LANS: see ops/include/{rule,adamw,lamb,lans}.h.
#pragma once

#include "rule.h"

namespace ms_optim {

// The moving averages of Kingma and Ba (2015), Algorithm 1, in the first two states.
struct AdamMoments : ElementwiseRule {
  enum Constant { kBeta1, kOneMinusBeta1, kBeta2, kOneMinusBeta2, kEps, kConstants };
  enum Scalar { kComplement1 = kRuleScalars, kRootComplement2 };  // 1 - beta1^t, sqrt(1 - beta2^t)
  static constexpr uint32_t kScalars = 2;

  float beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
  float correction1, correction2;  // 1 / (1 - beta1^t) and 1 / sqrt(1 - beta2^t)

  __aicore__ inline void Init(const Numbers &constants, const Numbers &scalars) {
    beta1 = constants.GetValue(kBeta1);
    one_minus_beta1 = constants.GetValue(kOneMinusBeta1);
    beta2 = constants.GetValue(kBeta2);
    one_minus_beta2 = constants.GetValue(kOneMinusBeta2);
    eps = constants.GetValue(kEps);
    correction1 = 1.0f / scalars.GetValue(kComplement1);
    correction2 = 1.0f / scalars.GetValue(kRootComplement2);
  }

  // m = beta1 * m + (1 - beta1) * g, v = beta2 * v + (1 - beta2) * g^2.
  __aicore__ inline void Moments(const Tile &t) const {
    const LocalTensor<float> v = t.s[1];
    Mix(t.s[0], beta1, t.before[0], one_minus_beta1, t.g, t.scratch, t.count);
    AscendC::Muls(t.scratch, t.g, one_minus_beta2, t.count);
    AscendC::Mul(t.scratch, t.scratch, t.g, t.count);
    AscendC::Muls(v, t.before[1], beta2, t.count);
    AscendC::Add(v, v, t.scratch, t.count);
  }

  // m_hat
  __aicore__ inline void Corrected(const LocalTensor<float> &m_hat, const Tile &t) const {
    AscendC::Muls(m_hat, t.s[0], correction1, t.count);
  }

  // sqrt(v_hat) + eps
  __aicore__ inline void Denominator(const LocalTensor<float> &root, const LocalTensor<float> &v, const Tile &t) const {
    AscendC::Sqrt(root, v, t.count);
    AscendC::Muls(root, root, correction2, t.count);
    AscendC::Adds(root, root, eps, t.count);
  }
};

// Loshchilov and Hutter (2019), Algorithm 2; u = m_hat / (sqrt(v_hat) + eps) + lambda * w.
struct AdamW : AdamMoments {
  static constexpr uint32_t kStates = 2;

  __aicore__ inline void Directions(const Tile &t) const { Along(t, t.s[1]); }

  __aicore__ inline void Along(const Tile &t, const LocalTensor<float> &v) const {
    Denominator(t.scratch, v, t);
    Corrected(t.d[0], t);
    AscendC::Div(t.d[0], t.d[0], t.scratch, t.count);
  }
};

// AdamW with the maximum of v in a third state.
struct AdamWAmsgrad : AdamW {
  static constexpr uint32_t kStates = 3;

  __aicore__ inline void Moments(const Tile &t) const {
    AdamMoments::Moments(t);
    AscendC::Max(t.s[2], t.before[2], t.s[1], t.count);
  }
  __aicore__ inline void Directions(const Tile &t) const { Along(t, t.s[2]); }
};

// You et al. (2020), Algorithm 2; u as in AdamW.
struct Lamb : AdamW {};

// Zheng et al. (2020), Algorithm 2; c = m_hat / (sqrt(v_hat) + eps) + lambda * w,
// s = g / (sqrt(v_hat) + eps) + lambda * w.
struct Lans : AdamW {
  enum Constant { kGradientBound = AdamMoments::kConstants, kConstants };
  static constexpr uint32_t kDirections = 2;

  float bound;

  __aicore__ inline void Init(const Numbers &constants, const Numbers &scalars) {
    AdamMoments::Init(constants, scalars);
    bound = constants.GetValue(kGradientBound);
  }

  __aicore__ inline void Gradient(const LocalTensor<float> &g, uint32_t count) const {
    if (bound < 3e38f) {  // Maxs and Mins turn a NaN into a number: without a bound they are skipped
      AscendC::Maxs(g, g, -bound, count);
      AscendC::Mins(g, g, bound, count);
    }
  }

  __aicore__ inline void Directions(const Tile &t) const {
    AdamW::Directions(t);
    AscendC::Div(t.d[1], t.g, t.scratch, t.count);
  }
};

}  // namespace ms_optim
