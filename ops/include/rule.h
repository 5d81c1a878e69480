// What a rule states, and the pieces that several rules share.
//
// A rule is a struct built once a step from its constants, the step count t (from 1) and its flags.
// It states how many states and constants it has, kStates and kConstants, and for one element, in this order:
//
//   Gradient(w, g, lambda)              the gradient that enters the moments
//   Moments(g, s)                       the new states s, in place
//   Directions(w, g, lambda, s, d)      the directions d that the weight moves along
//
// and, for one tensor, Coefficients(lr, lambda, ||w||, ||d||, c): the weight becomes w - sum_k c[k] * d[k].
// g arrives unscaled, centralized and clipped. Everything else (loading, storing, norms, threads,
// launches) belongs to the device.
#pragma once

#include "numbers.h"

namespace ms_optim {

constexpr int kMaxStates = 3;
constexpr int kMaxDirections = 2;

// A rule whose update of one element needs nothing of the others.
struct ElementwiseRule {
  static constexpr int kDirections = 1;
  static constexpr bool kLayerwise = false;           // needs norms of the whole tensor before it moves
  static constexpr bool kNormalizesGradient = false;  // divides the gradient by its norm
  static constexpr bool kExchanges = false;           // sends and receives parts of gradients

  MS_OPTIM_FN float Gradient(float, float g, float) const { return g; }

  // Returns the trust ratio that the statistics report.
  MS_OPTIM_FN double Coefficients(double lr, double, double, const double *, double *coefficient) const {
    coefficient[0] = lr;
    return 1.0;
  }
};

// A rule that scales its directions by norms of the whole tensor.
struct LayerwiseRule : ElementwiseRule {
  static constexpr bool kLayerwise = true;
};

MS_OPTIM_FN double Bounded(double x, double low, double high) { return x < low ? low : (x > high ? high : x); }

// Numerator over norm; 1 where either is 0 or the quotient is not a number.
MS_OPTIM_FN double TrustRatio(double numerator, double norm) {
  const double ratio = numerator / norm;
  return numerator > 0.0 && norm > 0.0 && ratio > 0.0 ? ratio : 1.0;
}

// The exponential moving averages of Adam: Kingma and Ba, "Adam: A Method for Stochastic
// Optimization" (2015), Algorithm 1. 1 - beta and 1 - beta^t are formed in float64: in float32,
// 1 - 0.999 alone is off by 1e-5.
struct AdamMoments {
  float beta1, one_minus_beta1, beta2, one_minus_beta2;
  float correction1, correction2;  // 1 / (1 - beta1^t) and 1 / sqrt(1 - beta2^t)

  MS_OPTIM_FN AdamMoments(double b1, double b2, int64_t t, bool bias_correction)
      : beta1(static_cast<float>(b1)),
        one_minus_beta1(static_cast<float>(1.0 - b1)),
        beta2(static_cast<float>(b2)),
        one_minus_beta2(static_cast<float>(1.0 - b2)),
        correction1(bias_correction ? static_cast<float>(1.0 / (1.0 - pow(b1, static_cast<double>(t)))) : 1.0f),
        correction2(bias_correction ? static_cast<float>(1.0 / sqrt(1.0 - pow(b2, static_cast<double>(t)))) : 1.0f) {}

  MS_OPTIM_FN void Update(float g, float *s) const {
    s[0] = beta1 * s[0] + one_minus_beta1 * g;
    s[1] = beta2 * s[1] + one_minus_beta2 * g * g;
  }

  MS_OPTIM_FN float Corrected(float m) const { return m * correction1; }          // m_hat
  MS_OPTIM_FN float Denominator(float v) const { return Sqrt(v) * correction2; }  // sqrt(v_hat)
};

}  // namespace ms_optim
