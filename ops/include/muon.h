// Muon: Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024), with the scale of Liu et al., "Muon
// is Scalable for LLM Training" (2025). AdamW takes the tensors that are no matrices.
#pragma once

#include "adamw.h"

namespace ms_optim {

// The momentum M of a matrix, and the direction U that is then orthogonalized.
struct MuonMomentum : ElementwiseRule {
  static constexpr int kStates = 1;
  static constexpr int kDecayed = 0;  // the decay is added to the orthogonalized matrix

  float momentum;
  bool nesterov;

  MS_OPTIM_FN void Moments(float g, float *s) const { s[0] = momentum * s[0] + g; }

  MS_OPTIM_FN void Directions(float, float g, const float *s, float *d) const {
    d[0] = nesterov ? g + momentum * s[0] : s[0];
  }
};

// A rule whose direction is given in place of the gradient.
struct KnownDirection : ElementwiseRule {
  static constexpr int kStates = 1;

  MS_OPTIM_FN void Moments(float, float *) const {}

  MS_OPTIM_FN void Directions(float, float g, const float *, float *d) const { d[0] = g; }
};

// The second state of a matrix is NorMuon's V, one number a row; without kNormalizesRows a matrix has none.
struct Muon : ElementwiseRule {
  static constexpr int kStates = 2;
  // beta1, beta2, eps of AdamW; momentum, the scale of an update, beta of V, the most bytes of a batch.
  static constexpr int kConstants = 7;
  static constexpr bool kHasMatrices = true;
  enum Flags : unsigned { kNesterov = 1, kOriginalScale = 2, kNormalizesRows = 4, kBFloat16Products = 8 };
  static constexpr unsigned kRowStateFlag = kNormalizesRows;
  static constexpr double kRowEps = 1e-8;

  AdamW<false> others;
  MuonMomentum matrices;
  unsigned flags;
  double scale, row_beta;
  double batch_bytes;  // the most temporary memory of a batch of more than one tensor; 0: a number of elements counts

  Muon(const double *constants, int64_t t, unsigned rule_flags)
      : others(constants, t, AdamW<false>::kBiasCorrection),
        flags(rule_flags),
        scale(constants[4]),
        row_beta(constants[5]),
        batch_bytes(constants[6]) {
    matrices.momentum = static_cast<float>(constants[3]);
    matrices.nesterov = (flags & kNesterov) != 0;
  }

  // Returns the most that singular values may grow in a run of iterations on a Gram matrix, by the product of the
  // iterations' first coefficients. Rounding in the Gram matrix grows by the square of that.
  static double MostGrowth(bool is_bfloat16) { return is_bfloat16 ? 16.0 : 42.0; }

  // Returns the factor of an orthogonalized matrix.
  double ScaleOf(int64_t rows, int64_t columns) const {
    const auto m = static_cast<double>(rows), n = static_cast<double>(columns);
    if ((flags & kOriginalScale) != 0) return sqrt(Max(1.0, m / n));
    return scale * sqrt((flags & kNormalizesRows) != 0 ? m * n : Max(m, n));
  }
};

// Muon's first pass on a GPU, where the framework's operators orthogonalize: the momentum, and the direction U.
struct MuonBefore : MuonMomentum {
  static constexpr int kConstants = 1;
  static constexpr bool kReturnsDirections = true;

  MS_OPTIM_FN MuonBefore(const double *constants, int64_t, unsigned flags) {
    momentum = static_cast<float>(constants[0]);
    nesterov = (flags & Muon::kNesterov) != 0;
  }
};

// Its last pass: the weight moves along the orthogonalized direction. The caller passes the mean square of a tensor's
// singular values as the sum of the second direction.
struct MuonAfter : KnownDirection {
  static constexpr int kStates = 0, kConstants = 0;
  static constexpr bool kTakesDirections = true;

  MS_OPTIM_FN MuonAfter(const double *, int64_t, unsigned) {}

  MS_OPTIM_FN double Coefficients(double lr, double, double, const double *norms, double *coefficient) const {
    coefficient[0] = lr;
    return norms[1];
  }
};

}  // namespace ms_optim
