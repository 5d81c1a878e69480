// AdamW, LAMB and LANS in vector instructions: the rules of ops/include/{rule,adamw,lamb,lans}.h, operation by
// operation in the same order.
#pragma once

#include "weight.h"

namespace ms_optim {

// A rule whose weight moves by norms of whole tensors runs its two stages in two launches.
enum Stage { kMomentsStage = 1, kApplyStage = 2 };

// Loshchilov and Hutter (2019), Algorithm 2; u = m_hat / (sqrt(v_hat) + eps) + lambda * w.
struct AdamW {
  static constexpr bool kAmsgrad = false;     // keeps the maximum of v in a third state
  static constexpr uint32_t kDirections = 1;  // u
  static constexpr bool kBoundsGradient = false;
};

struct AdamWAmsgrad : AdamW {
  static constexpr bool kAmsgrad = true;
};

// You et al. (2020), Algorithm 2; u as in AdamW.
struct Lamb : AdamW {};

// Zheng et al. (2020), Algorithm 2; c = m_hat / (sqrt(v_hat) + eps) + lambda * w,
// s = g / (sqrt(v_hat) + eps) + lambda * w.
struct Lans : AdamW {
  static constexpr uint32_t kDirections = 2;
  static constexpr bool kBoundsGradient = true;
};

// What does not change from step to step.
enum Constant { kBeta1, kOneMinusBeta1, kBeta2, kOneMinusBeta2, kEps, kGradientBound, kConstants };
// What does.
enum Scalar {
  kCorrection1,    // 1 / (1 - beta1^t)
  kCorrection2,    // 1 / sqrt(1 - beta2^t)
  kGradientScale,  // unscaling, clipping or normalizing, and the sign
  kLambda,
  kCoefficient,                 // c[0] and c[1] of w - sum_k c[k] * d[k]
  kApplied = kCoefficient + 2,  // 0: nothing is written but sums
  kScalars,
};

struct AdamArguments {
  GM_ADDR weight;
  GM_ADDR master;
  GM_ADDR m;
  GM_ADDR v;
  GM_ADDR vhat;
  GM_ADDR gradient;
  GM_ADDR constants;
  GM_ADDR scalars;
  GM_ADDR sums;
};

template <class Rule, int kStages, class T, class M, class G>
class AdamKernel {
 public:
  __aicore__ inline void Run(const AdamArguments &a, int64_t size) {
    constants_.SetGlobalBuffer(reinterpret_cast<__gm__ float *>(a.constants), kConstants);
    scalars_.SetGlobalBuffer(reinterpret_cast<__gm__ float *>(a.scalars), kScalars);
    uint32_t in = 0, out = 0;
    weight_.Init(a.weight, a.master, size);
    m_.Init(a.m, size);
    v_.Init(a.v, size);
    weight_.ReserveIn(&in);
    m_.ReserveIn(&in);
    v_.ReserveIn(&in);
    if constexpr (kGradient) {
      gradient_.Init(a.gradient, size);
      gradient_.ReserveIn(&in);
    }
    if constexpr (Rule::kAmsgrad) {
      vhat_.Init(a.vhat, size);
      vhat_.ReserveIn(&in);
    }
    if constexpr (kMoves) weight_.ReserveOut(&out);
    if constexpr (kMoments) {
      m_.ReserveOut(&out);
      v_.ReserveOut(&out);
      if constexpr (Rule::kAmsgrad) vhat_.ReserveOut(&out);
    }
    sums_.Init(a.sums, kKinds, size);
    sums_.ReserveOut(&out);
    core_.Init(in, out, kWorkTiles * kTileBytes + Weight<T, M>::kWorkBytes);
    core_.ForEachTile(size, this);
  }

  __aicore__ inline void Fetch(const LocalTensor<uint8_t> &in, int64_t begin, uint32_t count) {
    weight_.Fetch(in, begin, count);
    m_.Fetch(in, begin, count);
    v_.Fetch(in, begin, count);
    if constexpr (kGradient) gradient_.Fetch(in, begin, count);
    if constexpr (Rule::kAmsgrad) vhat_.Fetch(in, begin, count);
  }

  __aicore__ inline void Compute(const LocalTensor<uint8_t> &in, const LocalTensor<uint8_t> &out, uint32_t count) {
    const LocalTensor<uint8_t> work = core_.Work();
    const LocalTensor<float> scratch = Part<float>(work, 0), w = Part<float>(work, kTileBytes);
    const LocalTensor<float> d = Part<float>(work, 2 * kTileBytes);
    weight_.Open(in, w, scratch, work, kWorkTiles * kTileBytes, count);

    LocalTensor<float> g = d, m = m_.In(in), v = v_.In(in);
    if constexpr (kGradient) g = Gradient(in, work, count);
    if constexpr (kMoments) {
      Moments(g, m_.Out(out), m, v_.Out(out), v, scratch, count);
      m = m_.Out(out);
      v = v_.Out(out);
      if constexpr (Rule::kAmsgrad) {
        AscendC::Max(vhat_.Out(out), vhat_.In(in), v, count);
        v = vhat_.Out(out);
      }
      sums_.AddSquares(out, 0, w, d, count);
    }

    // The denominator d = sqrt(v_hat) + eps, then the directions.
    const LocalTensor<float> second = Part<float>(work, kSecondPlace);
    AscendC::Sqrt(scratch, v, count);
    AscendC::Muls(scratch, scratch, scalars_.GetValue(kCorrection2), count);
    AscendC::Adds(scratch, scratch, constants_.GetValue(kEps), count);
    AscendC::Muls(d, m, scalars_.GetValue(kCorrection1), count);
    AscendC::Div(d, d, scratch, count);
    if constexpr (Rule::kDirections == 2) AscendC::Div(second, g, scratch, count);
    AscendC::Muls(scratch, w, scalars_.GetValue(kLambda), count);
    AscendC::Add(d, d, scratch, count);
    if constexpr (Rule::kDirections == 2) AscendC::Add(second, second, scratch, count);

    if constexpr (!kMoves) {
      sums_.AddSquares(out, 1, d, scratch, count);
      if constexpr (Rule::kDirections == 2) sums_.AddSquares(out, 2, second, scratch, count);
    } else {
      AscendC::Muls(d, d, scalars_.GetValue(kCoefficient), count);
      if constexpr (Rule::kDirections == 2) {
        AscendC::Muls(second, second, scalars_.GetValue(kCoefficient + 1), count);
        AscendC::Add(d, d, second, count);
      }
      sums_.AddSquares(out, kKinds - 1, d, scratch, count);
      weight_.Move(out, w, d, count);
    }
  }

  __aicore__ inline void Store(const LocalTensor<uint8_t> &out, int64_t tile, int64_t begin, uint32_t count) {
    sums_.Store(out, tile);
    if (scalars_.GetValue(kApplied) == 0.0f) return;
    if constexpr (kMoves) weight_.Store(out, begin, count);
    if constexpr (kMoments) {
      m_.Store(out, begin, count);
      v_.Store(out, begin, count);
      if constexpr (Rule::kAmsgrad) vhat_.Store(out, begin, count);
    }
  }

 private:
  static constexpr bool kMoments = (kStages & kMomentsStage) != 0, kMoves = (kStages & kApplyStage) != 0;
  static constexpr bool kGradient = kMoments || Rule::kDirections == 2;
  static constexpr bool kCastsGradient = kGradient && !kSame<G, float>;
  // How many sums of squares: of weight and update, of weight and directions, or of the update.
  static constexpr uint32_t kKinds = kMoments && !kMoves ? 1 + Rule::kDirections : kMoments + kMoves;
  // Tiles in the buffer to compute in: scratch, w, d; then the gradient in float32; then the second direction.
  static constexpr uint32_t kGradientPlace = 3 * kTileBytes;
  static constexpr uint32_t kSecondPlace = (3 + kCastsGradient) * kTileBytes;
  static constexpr uint32_t kWorkTiles = 3 + kCastsGradient + Rule::kDirections - 1;

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
    if constexpr (Rule::kBoundsGradient) {
      const float bound = constants_.GetValue(kGradientBound);
      if (bound < 3e38f) {  // Maxs and Mins turn a NaN into a number: without a bound they are skipped
        AscendC::Maxs(g, g, -bound, count);
        AscendC::Mins(g, g, bound, count);
      }
    }
    return g;
  }

  // Kingma and Ba (2015), Algorithm 1: m = beta1 * m + (1 - beta1) * g, v = beta2 * v + (1 - beta2) * g^2.
  __aicore__ inline void Moments(const LocalTensor<float> &g, const LocalTensor<float> &m,
                                 const LocalTensor<float> &old_m, const LocalTensor<float> &v,
                                 const LocalTensor<float> &old_v, const LocalTensor<float> &scratch, uint32_t count) {
    AscendC::Muls(scratch, g, constants_.GetValue(kOneMinusBeta1), count);
    AscendC::Muls(m, old_m, constants_.GetValue(kBeta1), count);
    AscendC::Add(m, m, scratch, count);
    AscendC::Muls(scratch, g, constants_.GetValue(kOneMinusBeta2), count);
    AscendC::Mul(scratch, scratch, g, count);
    AscendC::Muls(v, old_v, constants_.GetValue(kBeta2), count);
    AscendC::Add(v, v, scratch, count);
  }

  Core core_;
  Weight<T, M> weight_;
  Column<float> m_, v_, vhat_;
  Column<G> gradient_;
  TileSums sums_;
  GlobalTensor<float> constants_, scalars_;
};

}  // namespace ms_optim
