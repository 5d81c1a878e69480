// SGD with momentum and L2 decay: Sutskever et al., "On the importance of initialization and momentum in deep learning"
// (2013), with velocities that the rate does not enter, as frameworks have them.
#pragma once

#include "rule.h"

namespace ms_optim {

struct Momentum : ElementwiseRule {
  static constexpr int kStates = 1;     // v
  static constexpr int kConstants = 2;  // momentum, dampening
  static constexpr int kDecayed = 0;
  enum Flags : unsigned { kNesterov = 1 };

  float momentum, entering;      // of v, and of the gradient that is added to it: the first one is not dampened
  float of_moment, of_gradient;  // of the direction: v, or with Nesterov g + momentum * v

  MS_OPTIM_FN Momentum(const double *constants, int64_t t, unsigned flags)
      : momentum(static_cast<float>(constants[0])),
        entering(t == 1 ? 1.0f : static_cast<float>(1.0 - constants[1])),
        of_moment((flags & kNesterov) != 0 ? momentum : 1.0f),
        of_gradient((flags & kNesterov) != 0 ? 1.0f : 0.0f) {}

  MS_OPTIM_FN float Gradient(float w, float g, float lambda) const { return g + lambda * w; }

  MS_OPTIM_FN void Moments(float g, float *s) const { s[0] = momentum * s[0] + entering * g; }

  MS_OPTIM_FN void Directions(float, float g, const float *s, float *d) const {
    d[0] = of_moment * s[0] + of_gradient * g;
  }
};

}  // namespace ms_optim
