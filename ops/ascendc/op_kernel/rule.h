// The operators of all rules, around the arithmetic of one: see RuleKernel.
#pragma once

#include "weight.h"

namespace ms_optim {

// A rule whose weight moves by norms of whole tensors runs its two stages in two launches.
enum Stage { kMomentsStage = 1, kApplyStage = 2 };

// The numbers that change from step to step: those of each tensor, then of all, then of the rule.
enum Scalar {
  kGradientScale,  // unscaling, clipping or normalizing, and the sign
  kLambda,
  kCoefficient,                 // c[0] and c[1] of w - sum_k c[k] * d[k]
  kApplied = kCoefficient + 2,  // 0: nothing is written but sums
  kRuleScalars,
};

constexpr uint32_t kMaxStates = 3, kMaxDirections = 2;

using Numbers = GlobalTensor<float>;

struct RuleArguments {
  GM_ADDR weight;
  GM_ADDR master;
  GM_ADDR states[kMaxStates];
  GM_ADDR gradient;
  GM_ADDR constants;
  GM_ADDR scalars;
  GM_ADDR sums;
};

// A tile as a rule sees it.
struct Tile {
  uint32_t count;
  LocalTensor<float> g;                   // the gradient that enters the rule
  LocalTensor<float> before[kMaxStates];  // the states from before the step
  LocalTensor<float> s[kMaxStates];       // the new ones
  LocalTensor<float> d[kMaxDirections];   // the directions; where moments advance, all of the first tile is written
  LocalTensor<float> scratch;
  LocalTensor<uint8_t> mask;  // a bit for each element
};

// z = a * x + b * y; z may be x.
__aicore__ inline void Mix(const LocalTensor<float> &z, float a, const LocalTensor<float> &x, float b,
                           const LocalTensor<float> &y, const LocalTensor<float> &scratch, uint32_t count) {
  AscendC::Muls(scratch, y, b, count);
  AscendC::Muls(z, x, a, count);
  AscendC::Add(z, z, scratch, count);
}

// A rule states how many states, directions, constants and scalars of its own it has, and in vector instructions, with
// the operations of its header in ops/include in the same order:
//
//   Init(constants, scalars)   reads its numbers
//   Gradient(g, count)         the gradient that enters the moments, in place
//   Moments(t)                 t.s from t.before and t.g
//   Directions(t)              t.d from any of these; the decay is added afterwards
//
// Both may use t.scratch and t.mask.
struct ElementwiseRule {
  static constexpr uint32_t kDirections = 1;

  __aicore__ inline void Gradient(const LocalTensor<float> &, uint32_t) const {}
};

template <class Rule, int kStages, class T, class M, class G>
class RuleKernel {
 public:
  __aicore__ inline void Run(const RuleArguments &a, int64_t size) {
    Numbers constants;
    constants.SetGlobalBuffer(reinterpret_cast<__gm__ float *>(a.constants), Rule::kConstants);
    scalars_.SetGlobalBuffer(reinterpret_cast<__gm__ float *>(a.scalars), kRuleScalars + Rule::kScalars);
    rule_.Init(constants, scalars_);
    uint32_t in = 0, out = 0;
    weight_.Init(a.weight, a.master, size);
    weight_.ReserveIn(&in);
    if constexpr (kMoves) weight_.ReserveOut(&out);
    for (uint32_t k = 0; k < Rule::kStates; ++k) {
      states_[k].Init(a.states[k], size);
      states_[k].ReserveIn(&in);
      if constexpr (kMoments) states_[k].ReserveOut(&out);
    }
    if constexpr (kGradient) {
      gradient_.Init(a.gradient, size);
      gradient_.ReserveIn(&in);
    }
    sums_.Init(a.sums, kKinds, size);
    sums_.ReserveOut(&out);
    core_.Init(in, out, kMaskPlace + kTile / 8);
    core_.ForEachTile(size, this);
  }

  __aicore__ inline void Fetch(const LocalTensor<uint8_t> &in, int64_t begin, uint32_t count) {
    weight_.Fetch(in, begin, count);
    for (uint32_t k = 0; k < Rule::kStates; ++k) states_[k].Fetch(in, begin, count);
    if constexpr (kGradient) gradient_.Fetch(in, begin, count);
  }

  __aicore__ inline void Compute(const LocalTensor<uint8_t> &in, const LocalTensor<uint8_t> &out, uint32_t count) {
    const LocalTensor<uint8_t> work = core_.Work();
    const LocalTensor<float> scratch = Part<float>(work, 0);
    const LocalTensor<float> w = kMovesInPlace ? weight_.Place(out, scratch) : Part<float>(work, kTileBytes);
    weight_.Open(in, w, scratch, work, kWeightPlace, count);

    Tile t;
    t.count = count;
    t.scratch = scratch;
    t.mask = work[kMaskPlace];
    for (uint32_t k = 0; k < Rule::kDirections; ++k) t.d[k] = Part<float>(work, kDirectionsPlace + k * kTileBytes);
    for (uint32_t k = 0; k < Rule::kStates; ++k) {
      t.before[k] = states_[k].In(in);
      t.s[k] = kMoments ? states_[k].Out(out) : t.before[k];
    }
    if constexpr (kGradient) t.g = Gradient(in, work, count);
    if constexpr (kMoments) {
      sums_.AddSquares(out, 0, w, t.d[0], count);
      rule_.Moments(t);
    }
    rule_.Directions(t);
    AscendC::Muls(scratch, w, scalars_.GetValue(kLambda), count);
    for (uint32_t k = 0; k < Rule::kDirections; ++k) AscendC::Add(t.d[k], t.d[k], scratch, count);

    if constexpr (!kMoves) {
      for (uint32_t k = 0; k < Rule::kDirections; ++k) sums_.AddSquares(out, 1 + k, t.d[k], scratch, count);
    } else {
      const LocalTensor<float> update = t.d[0];
      AscendC::Muls(update, update, scalars_.GetValue(kCoefficient), count);
      for (uint32_t k = 1; k < Rule::kDirections; ++k) {
        AscendC::Muls(t.d[k], t.d[k], scalars_.GetValue(kCoefficient + k), count);
        AscendC::Add(update, update, t.d[k], count);
      }
      sums_.AddSquares(out, kKinds - 1, update, scratch, count);
      weight_.Move(out, w, update, count);
    }
  }

  __aicore__ inline void Store(const LocalTensor<uint8_t> &out, int64_t tile, int64_t begin, uint32_t count) {
    sums_.Store(out, tile);
    if (scalars_.GetValue(kApplied) == 0.0f) return;
    if constexpr (kMoves) weight_.Store(out, begin, count);
    if constexpr (kMoments) {
      for (uint32_t k = 0; k < Rule::kStates; ++k) states_[k].Store(out, begin, count);
    }
  }

 private:
  static constexpr bool kMoments = (kStages & kMomentsStage) != 0, kMoves = (kStages & kApplyStage) != 0;
  static constexpr bool kGradient = kMoments || Rule::kDirections == 2;
  static constexpr bool kCastsGradient = kGradient && !kSame<G, float>;
  // The number of sums of squares: of weight and update, of weight and directions, or of the update.
  static constexpr uint32_t kKinds = kMoments && !kMoves ? 1 + Rule::kDirections : kMoments + kMoves;
  // Whether w is computed where it is copied out from: a tile less in the buffer. The queues and the buffer may have
  // 184 KiB, since Select needs the unified buffer's last 8.
  static constexpr bool kMovesInPlace = kMoves && Weight<T, M>::kExact;
  // The buffer to compute in: scratch and, unless it moves in place, w; then the directions; then the gradient in
  // float32; then the work of the weight; then the mask.
  static constexpr uint32_t kDirectionsPlace = (kMovesInPlace ? 1 : 2) * kTileBytes;
  static constexpr uint32_t kGradientPlace = kDirectionsPlace + Rule::kDirections * kTileBytes;
  static constexpr uint32_t kWeightPlace = kGradientPlace + kCastsGradient * kTileBytes;
  static constexpr uint32_t kMaskPlace = kWeightPlace + Weight<T, M>::kWorkBytes;

  // The gradient in float32, scaled.
  __aicore__ inline LocalTensor<float> Gradient(const LocalTensor<uint8_t> &in, const LocalTensor<uint8_t> &work,
                                                uint32_t count) {
    LocalTensor<float> g;
    if constexpr (kCastsGradient) {
      g = Part<float>(work, kGradientPlace);
      AscendC::Cast(g, gradient_.In(in), AscendC::RoundMode::CAST_NONE, count);
    } else {
      g = gradient_.In(in);
    }
    AscendC::Muls(g, g, scalars_.GetValue(kGradientScale), count);
    rule_.Gradient(g, count);
    return g;
  }

  Core core_;
  Rule rule_;
  Weight<T, M> weight_;
  Column<float> states_[Rule::kStates > 0 ? Rule::kStates : 1];  // there are no arrays of nothing
  Column<G> gradient_;
  TileSums sums_;
  Numbers scalars_;
};

}  // namespace ms_optim
