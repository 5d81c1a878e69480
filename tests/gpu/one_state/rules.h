// Rules of one state, in place of those of ops/include/rules.h: momentum SGD, and LARS, which moves along the same
// direction by norms of the whole tensor.
#pragma once

#include "rule.h"

namespace ms_optim {

template <class Base>
struct HeavyBall : Base {
  static constexpr int kStates = 1;
  static constexpr int kConstants = 1;  // the momentum
  enum Flags : unsigned { kMaximize = 1 };

  float momentum, sign;

  MS_OPTIM_FN HeavyBall(const double *constants, int64_t, unsigned flags)
      : momentum(static_cast<float>(constants[0])), sign((flags & kMaximize) != 0 ? -1.0f : 1.0f) {}

  MS_OPTIM_FN float Gradient(float, float g, float) const { return sign * g; }

  MS_OPTIM_FN void Moments(float g, float *s) const { s[0] = momentum * s[0] + g; }

  MS_OPTIM_FN void Directions(float, float, const float *s, float *d) const { d[0] = s[0]; }
};

struct Sgd : HeavyBall<ElementwiseRule> {
  using HeavyBall::HeavyBall;
};

struct Lars : HeavyBall<LayerwiseRule> {
  using HeavyBall::HeavyBall;

  MS_OPTIM_FN double Coefficients(double lr, double, double weight_norm, const double *direction_norm,
                                  double *coefficient) const {
    const double ratio = TrustRatio(weight_norm, direction_norm[0]);
    coefficient[0] = lr * ratio;
    return ratio;
  }
};

}  // namespace ms_optim

#define MS_OPTIM_RULES(RULE) \
  RULE(sgd, Sgd)             \
  RULE(lars, Lars)

#define MS_OPTIM_HOST_RULES(RULE)
#define MS_OPTIM_GPU_RULES(RULE)

#define MS_OPTIM_RULE_FLAGS(FLAG) FLAG(Sgd, kMaximize)
