// The parts of a rule, and the pieces that several rules share.
//
// A rule is a struct built once a step from its constants, the step count t (from 1) and its flags.
// It states how many states and constants it has, kStates and kConstants, and for one element, in this order:
//
//   Gradient(w, g, lambda)   the gradient that enters the moments
//   Moments(g, s)            the new states s, in place
//   Directions(w, g, s, d)   the directions d that the weight moves along, which see the new states
//
// or, with kDirectsFirst, Directions before Moments: they see the states from before the step. The decay is then added
// to the first kDecayed directions, and Follow(decision, w, d, s) moves states that follow the weight. And, for one
// tensor, Coefficients(lr, lambda, ||w||, ||d||, c): the weight becomes w - sum_k c[k] * d[k]. g arrives unscaled,
// centralized and clipped. The device does everything else: loading, storing, norms, threads, launches.
//
// Most rules state no other constant: ElementwiseRule has the values of a rule of one direction.
#pragma once

#include "numbers.h"

namespace ms_optim {

constexpr int kMaxStates = 3;
constexpr int kMaxDirections = 2;

// The decisions for a tensor before a pass over it.
struct Decision {
  float factor;        // the factor of the gradient before it enters the rule
  float lambda;        // the weight decay
  uint32_t cautious;   // the sign bit if the decay is cautious, else 0
  float average_rate;  // the part of the new weights in their average
  bool starts;         // no step was applied yet
  double learning_rate, trust_ratio;
  // For a rule that weighs steps: the largest rate so far and the sum of the weights, and how far the weight moves
  // along its direction and towards its first state.
  double step_weights[2];
  float along_direction, along_state;
  float coefficient[kMaxDirections];
  float radius;  // the norm at which the weight is held
};

// A rule that updates each element without the others.
struct ElementwiseRule {
  static constexpr int kDirections = 1;
  static constexpr bool kLayerwise = false;           // needs norms of the whole tensor before it moves
  static constexpr bool kNormalizesGradient = false;  // divides the gradient by its norm
  static constexpr bool kExchanges = false;           // sends and receives parts of gradients
  static constexpr bool kDirectsFirst = false;        // its directions see the states from before the step
  static constexpr int kDecayed = 1;  // the number of its directions that are decayed; 0: it decays in another way
  static constexpr bool kMayBeCautious = true;     // its decay may be cautious
  static constexpr bool kStartsAtWeights = false;  // its first state starts as the weights
  static constexpr bool kWeighsSteps = false;      // has Weigh in place of Coefficients
  static constexpr bool kHasMatrices = false;      // it sees tensors that are matrices as a whole
  static constexpr unsigned kRowStateFlag = 0;     // the flag with which matrices have a second state, one number a row
  static constexpr bool kReturnsDirections = false;  // its direction is an output, and the weight does not move
  static constexpr bool kTakesDirections = false;    // directions come in place of gradients
  static constexpr bool kBalances = false;           // divides the rows and columns of matrices by their norms

  // Returns -1 if the rule climbs, else 1. The factor of the gradient includes it.
  MS_OPTIM_FN double Sign() const { return 1.0; }

  MS_OPTIM_FN float Gradient(float, float g, float) const { return g; }

  MS_OPTIM_FN void Follow(const Decision &, float, float *, float *) const {}

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

// Whether the norms of weights can be held that a rule moves. The weight itself takes the place of a second direction.
template <class Rule>
constexpr bool MayHoldNorms() {
  if constexpr (Rule::kExchanges) {
    return false;
  } else {
    return Rule::kDirections == 1 && !Rule::kLayerwise && !Rule::kWeighsSteps && !Rule::kReturnsDirections &&
           !Rule::kTakesDirections;
  }
}

// A rule whose decay is known not to be cautious: a loop that asks this of every element takes up to a tenth longer.
template <class Rule>
struct NeverCautious : Rule {
  static constexpr bool kMayBeCautious = false;
  using Rule::Rule;
  MS_OPTIM_FN explicit NeverCautious(const Rule &rule) : Rule(rule) {}
};

MS_OPTIM_FN double Bounded(double x, double low, double high) { return x < low ? low : (x > high ? high : x); }

// Returns numerator / norm; 1 if either is 0 or the quotient is not a number.
MS_OPTIM_FN double TrustRatio(double numerator, double norm) {
  const double ratio = numerator / norm;
  return numerator > 0.0 && norm > 0.0 && ratio > 0.0 ? ratio : 1.0;
}

// Adds the decay to a direction u. Cautious decay (Chen et al., "Cautious Weight Decay", 2025) spares a weight that
// moves away from zero: one whose sign is not u's. If either is 0, the weight is decayed.
template <bool kMayBeCautious>
MS_OPTIM_FN float Decayed(float u, float w, const Decision &decision) {
  const bool opposed = kMayBeCautious && ((BitsOf(u) ^ BitsOf(w)) & decision.cautious) != 0u && u != 0.0f;
  return u + (opposed ? 0.0f : decision.lambda) * w;
}

// Takes one element through the rule: makes new states (kNewStates) and directions. g is the gradient as it came.
template <class Rule, bool kNewStates>
MS_OPTIM_FN void Advance(const Rule &rule, const Decision &decision, float w, float g, float *s, float *d) {
  static_assert(!Rule::kDirectsFirst || !Rule::kLayerwise, "a layer-wise rule needs its directions once more");
  const float gradient = rule.Gradient(w, decision.factor * g, decision.lambda);
  if (kNewStates && !Rule::kDirectsFirst) rule.Moments(gradient, s);
  rule.Directions(w, gradient, s, d);
  for (int k = 0; k < Rule::kDecayed; ++k) d[k] = Decayed<Rule::kMayBeCautious>(d[k], w, decision);
  if (kNewStates && Rule::kDirectsFirst) rule.Moments(gradient, s);
  if (kNewStates) rule.Follow(decision, w, d, s);
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
