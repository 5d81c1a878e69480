// Muon's passes before and after the products of matrices, which the framework's operators compute: see
// ops/include/muon.h.
#pragma once

#include "rule.h"

namespace ms_optim {

// The momentum, m = mu * m + g, and the direction: m, or g + mu * m with Nesterov momentum.
class MuonMomentumKernel {
 public:
  enum Constant { kMomentum, kNesterov, kConstants };
  enum Scalar { kScale, kMuonApplied, kScalars };

  __aicore__ inline void Run(GM_ADDR m, GM_ADDR gradient, GM_ADDR constants, GM_ADDR scalars, GM_ADDR direction,
                             int64_t size) {
    Numbers numbers;
    numbers.SetGlobalBuffer(reinterpret_cast<__gm__ float *>(constants), kConstants);
    momentum_ = numbers.GetValue(kMomentum);
    is_nesterov_ = numbers.GetValue(kNesterov) != 0.0f;
    scalars_.SetGlobalBuffer(reinterpret_cast<__gm__ float *>(scalars), kScalars);
    uint32_t in = 0, out = 0;
    m_.Init(m, size);
    gradient_.Init(gradient, size);
    direction_.Init(direction, size);
    m_.ReserveIn(&in);
    gradient_.ReserveIn(&in);
    m_.ReserveOut(&out);
    direction_.ReserveOut(&out);
    core_.Init(in, out, 0);
    core_.ForEachTile(size, this);
  }

  __aicore__ inline void Fetch(const LocalTensor<uint8_t> &in, int64_t begin, uint32_t count) {
    m_.Fetch(in, begin, count);
    gradient_.Fetch(in, begin, count);
  }

  __aicore__ inline void Compute(const LocalTensor<uint8_t> &in, const LocalTensor<uint8_t> &out, uint32_t count) {
    const LocalTensor<float> g = gradient_.In(in), m = m_.Out(out), u = direction_.Out(out);
    AscendC::Muls(g, g, scalars_.GetValue(kScale), count);
    AscendC::Muls(m, m_.In(in), momentum_, count);
    AscendC::Add(m, m, g, count);
    AscendC::Muls(u, m, is_nesterov_ ? momentum_ : 1.0f, count);
    if (is_nesterov_) AscendC::Add(u, u, g, count);
  }

  __aicore__ inline void Store(const LocalTensor<uint8_t> &out, int64_t, int64_t begin, uint32_t count) {
    direction_.Store(out, begin, count);
    if (scalars_.GetValue(kMuonApplied) != 0.0f) m_.Store(out, begin, count);
  }

 private:
  Core core_;
  Column<float> m_, gradient_, direction_;
  Numbers scalars_;
  float momentum_ = 0.0f;
  bool is_nesterov_ = false;
};

// The weight moves along a direction that comes in the place of the gradient.
struct KnownDirection : ElementwiseRule {
  static constexpr uint32_t kStates = 0, kScalars = 0;
  enum Constant { kConstants };

  __aicore__ inline void Init(const Numbers &, const Numbers &) {}
  __aicore__ inline void Moments(const Tile &) const {}
  __aicore__ inline void Directions(const Tile &t) const { AscendC::Muls(t.d[0], t.g, 1.0f, t.count); }
};

}  // namespace ms_optim
