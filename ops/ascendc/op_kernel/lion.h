// Lion: see ops/include/lion.h.
#pragma once

#include "rule.h"

namespace ms_optim {

// Chen et al. (2023), Algorithm 2; u = sign(beta1 * m + (1 - beta1) * g) + lambda * w, with m from before the step.
struct Lion : ElementwiseRule {
  enum Constant { kBeta1, kOneMinusBeta1, kBeta2, kOneMinusBeta2, kConstants };
  static constexpr uint32_t kStates = 1, kScalars = 0;

  float beta1, one_minus_beta1, beta2, one_minus_beta2;

  __aicore__ inline void Init(const Numbers &constants, const Numbers &) {
    beta1 = constants.GetValue(kBeta1);
    one_minus_beta1 = constants.GetValue(kOneMinusBeta1);
    beta2 = constants.GetValue(kBeta2);
    one_minus_beta2 = constants.GetValue(kOneMinusBeta2);
  }

  // m = beta2 * m + (1 - beta2) * g.
  __aicore__ inline void Moments(const Tile &t) const {
    Mix(t.s[0], beta2, t.before[0], one_minus_beta2, t.g, t.scratch, t.count);
  }

  __aicore__ inline void Directions(const Tile &t) const {
    const LocalTensor<float> c = t.d[0];
    Mix(c, beta1, t.before[0], one_minus_beta1, t.g, t.scratch, t.count);
    // The sign of 0 is 0; NaN stays NaN. Denormal numbers stay, too, and move nothing: a processor that computes with
    // them never brings a moment without gradient to 0, and the weight would move on by whole steps.
    constexpr float kLeastNormal = 1.17549435e-38f;
    Replace(c, AscendC::CMPMODE::GE, kLeastNormal, 1.0f, t);
    Replace(c, AscendC::CMPMODE::LE, -kLeastNormal, -1.0f, t);
  }

 private:
  // Puts a value where x compares with a bound. Comparisons are of whole tiles.
  __aicore__ inline static void Replace(const LocalTensor<float> &x, AscendC::CMPMODE mode, float bound, float value,
                                        const Tile &t) {
    AscendC::Duplicate(t.scratch, bound, kTile);
    AscendC::Compare(t.mask, x, t.scratch, mode, kTile);
    AscendC::Duplicate(t.scratch, value, t.count);
    AscendC::Select(x, t.mask, t.scratch, x, AscendC::SELMODE::VSEL_TENSOR_TENSOR_MODE, t.count);
  }
};

}  // namespace ms_optim
