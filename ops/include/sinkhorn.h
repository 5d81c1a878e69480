// Sinkhorn: DeepSeek-AI, "DeepSeek-V4.1-Flash" (2026), Section 2.5, Algorithm 1, after SinkGD (2025).
//
// Rows and columns of a matrix G are divided by their norms in turn, K times, rows first and last. The result is
// diag(r) G diag(c): a step keeps the factors r and c, and no matrix. A division of rows needs the sums a_i = sum_j
// (G_ij c_j)^2, for the norm of row i is r_i sqrt(a_i); one of columns b_j = sum_i (r_i G_ij)^2.
//
// G is made of the momentum M and the gradient. Between the first pass and the last, the memory of a float32 state may
// hold G in place of M, which halves what the passes read; the last one makes M of it again.
//
// All devices add up in one order, so that the bits are the same: rows in RowOrder, the elements of a row as here. A
// row is cut into segments. In each, element j belongs to lane j mod 16; lanes are added in float32, or in float64 if
// squares may have been lost, and then in pairs, those half as many apart as there are.
#pragma once

#include "codes.h"
#include "rule.h"

namespace ms_optim {

struct Sinkhorn : ElementwiseRule {
  static constexpr int kStates = 1;     // M
  static constexpr int kConstants = 4;  // beta, tau, eps, the scale of an update
  static constexpr int kDecayed = 0;    // the decay is added to the balanced matrix

  static constexpr bool kBalances = true;

  // The least beta by which M may be made of G again: its rounding grows by 1 / beta.
  static constexpr float kLeastDivisor = 0.5f;

  static constexpr int kLanes = 16, kSegment = 1024;

  // The factor of what is squared for columns, lest small squares vanish in float32. Large ones stay finite: the
  // elements of a divided row are at most about the root of the number of rows.
  static constexpr float kLift = 0x1p50f;
  static constexpr double kLowered = 0x1p-100;

  float beta, one_minus_beta, one_over_beta;
  // Of divisions, of rows and of columns; then rows are divided once more. The rule's flags are this number, as a GPU's
  // host, which launches so many passes, cannot read constants.
  int pairs;
  double tau, eps, scale;

  MS_OPTIM_FN Sinkhorn(const double *constants, int64_t, unsigned flags)
      : beta(static_cast<float>(constants[0])),
        one_minus_beta(static_cast<float>(1.0 - constants[0])),
        one_over_beta(constants[0] > 0.0 ? static_cast<float>(1.0 / constants[0]) : 0.0f),
        pairs(static_cast<int>(flags)),
        tau(constants[1]),
        eps(constants[2]),
        scale(constants[3]) {}

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

  // Returns the factor of a row in the sums of columns, from its factor.
  MS_OPTIM_FN static float Lifted(double factor) { return Rounded(factor * kLift); }

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

// Rows that enter the sums of columns one after the other: the sums of a band take less than 1 % of its memory.
constexpr int64_t kRowsInBand = 512;
static_assert(kRowsInBand % kCodeBlock == 0, "bands begin with a block of codes");

// The order of a band's rows: in turn one of each of four places, as memory is read faster in four places than in one;
// one after the other where a block of codes may have parts of two rows. Those that became 0 are left out. Four that
// follow each other enter the sums of columns together.
struct RowOrder {
  int64_t rows, places;

  // The state of `in_place` holds G, and thus float32.
  MS_OPTIM_FN RowOrder(int64_t count, int64_t columns, bool in_place)
      : rows(count), places(in_place || columns % kCodeBlock == 0 ? 4 : 1) {}

  // Returns where a place begins. If places have not the same length, the first ones have a row more.
  MS_OPTIM_FN int64_t Begin(int64_t place) const { return place * (rows / places) + Min(place, rows % places); }

  // Returns which row is the k-th.
  MS_OPTIM_FN int64_t Row(int64_t k) const { return Begin(k % places) + k / places; }
};

}  // namespace ms_optim
