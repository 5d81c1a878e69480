// Adds to a weight the update that the host's Adam returned: see kReturned in ops/include/step.h. The sum of squares is
// that of the old weight.
#pragma once

#include "weight.h"

namespace ms_optim {

template <class T>
class DeltaKernel {
 public:
  __aicore__ inline void Run(GM_ADDR weight, GM_ADDR delta, GM_ADDR sums, int64_t size) {
    uint32_t in = 0, out = 0;
    weight_.Init(weight, weight, size);
    delta_.Init(delta, size);
    weight_.ReserveIn(&in);
    delta_.ReserveIn(&in);
    weight_.ReserveOut(&out);
    sums_.Init(sums, 1, size);
    sums_.ReserveOut(&out);
    core_.Init(in, out, 2 * kTileBytes);
    core_.ForEachTile(size, this);
  }

  __aicore__ inline void Fetch(const LocalTensor<uint8_t> &in, int64_t begin, uint32_t count) {
    weight_.Fetch(in, begin, count);
    delta_.Fetch(in, begin, count);
  }

  __aicore__ inline void Compute(const LocalTensor<uint8_t> &in, const LocalTensor<uint8_t> &out, uint32_t count) {
    const LocalTensor<uint8_t> work = core_.Work();
    const LocalTensor<float> w = weight_.Place(out, Part<float>(work, 0)), scratch = Part<float>(work, kTileBytes);
    weight_.Open(in, w, scratch, work, 0, count);
    sums_.AddSquares(out, 0, w, scratch, count);
    AscendC::Muls(scratch, delta_.In(in), -1.0f, count);
    weight_.Move(out, w, scratch, count);
  }

  __aicore__ inline void Store(const LocalTensor<uint8_t> &out, int64_t tile, int64_t begin, uint32_t count) {
    sums_.Store(out, tile);
    weight_.Store(out, begin, count);
  }

 private:
  Core core_;
  Weight<T, T> weight_;
  Column<float> delta_;
  TileSums sums_;
};

}  // namespace ms_optim
