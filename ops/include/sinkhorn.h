// Sinkhorn: DeepSeek-AI, "DeepSeek-V4.1-Flash" (2026), Section 2.5, Algorithm 1, after SinkGD (2025).
//
// Rows and columns of a matrix G are divided by their norms in turn, K times, rows first and last. The result is
// diag(r) G diag(c): a step keeps the factors r and c, and no matrix. A division of rows needs the sums a_i = sum_j
// (G_ij c_j)^2, for the norm of row i is r_i sqrt(a_i); one of columns b_j = sum_i (r_i G_ij)^2.
//
// G is made of the momentum M and the gradient. Between the first pass and the last, the memory of a float32 state may
// hold G in place of M, which halves what the passes read; the last one makes M of it again.
#pragma once

#include "rule.h"

namespace ms_optim {

struct Sinkhorn : ElementwiseRule {
  static constexpr int kStates = 1;     // M
  static constexpr int kConstants = 5;  // beta, K, tau, eps, the scale of an update
  static constexpr int kDecayed = 0;    // the decay is added to the balanced matrix

  // The least beta by which M may be made of G again: its rounding grows by 1 / beta.
  static constexpr float kLeastDivisor = 0.5f;

  float beta, one_minus_beta, one_over_beta;
  int pairs;  // of divisions, of rows and of columns; then rows are divided once more
  double tau, eps, scale;

  MS_OPTIM_FN Sinkhorn(const double *constants, int64_t, unsigned)
      : beta(static_cast<float>(constants[0])),
        one_minus_beta(static_cast<float>(1.0 - constants[0])),
        one_over_beta(constants[0] > 0.0 ? static_cast<float>(1.0 / constants[0]) : 0.0f),
        pairs(static_cast<int>(constants[1]) / 2),
        tau(constants[2]),
        eps(constants[3]),
        scale(constants[4]) {}

  MS_OPTIM_FN void Moments(float g, float *s) const { s[0] = beta * s[0] + one_minus_beta * g; }

  // An element of G.
  MS_OPTIM_FN void Directions(float, float g, const float *s, float *d) const {
    d[0] = beta * s[0] + one_minus_beta * g;
  }

  // Returns an element of M from one of G.
  MS_OPTIM_FN float MomentumOf(float element, float g) const { return (element - one_minus_beta * g) * one_over_beta; }

  // Returns the factor of a row in the first division, from its norm and the mean norm; 0 if the row becomes 0.
  MS_OPTIM_FN double FirstFactor(double norm, double mean) const {
    return norm <= tau * mean ? 0.0 : Divided(1.0, norm);
  }

  // Returns the factor of a row or column after a division, from its factor before and the sum a or b.
  MS_OPTIM_FN double NextFactor(double factor, double sum) const { return Divided(factor, factor * sqrt(sum)); }

  // Returns the factor of a row in the update of the weights.
  MS_OPTIM_FN float LastFactor(double factor, int64_t columns) const {
    return Rounded(scale * sqrt(static_cast<double>(columns)) * factor);
  }

  // Returns a factor in float32; that of a row or column of tiny elements may be too large for it. A NaN stays.
  MS_OPTIM_FN static float Rounded(double factor) { return static_cast<float>(factor > 3e38 ? 3e38 : factor); }

 private:
  // A row or column of zeros keeps its factor: divided by eps, it would grow without bound.
  MS_OPTIM_FN double Divided(double factor, double norm) const { return norm == 0.0 ? factor : factor / (norm + eps); }
};

}  // namespace ms_optim
