// Adds up the partial sums that the tiles of a tensor left, in a fixed order: from float32 [kinds, n] to [kinds,
// kLanes], whose rows the caller adds up. Each core takes one kind.
#pragma once

#include "tiles.h"

namespace ms_optim {

class SumsKernel {
 public:
  __aicore__ inline void Run(GM_ADDR partial, GM_ADDR sums, int64_t size) {
    const int64_t kind = AscendC::GetBlockIdx();
    partial_.Init(partial + kind * size * sizeof(float), size);
    sums_.SetGlobalBuffer(reinterpret_cast<__gm__ float *>(sums) + kind * kLanes, kLanes);
    pipe_.InitBuffer(in_, kBuffers, kTileBytes);
    pipe_.InitBuffer(out_, 1, kTileBytes);

    const LocalTensor<float> total = out_.AllocTensor<float>();
    AscendC::Duplicate(total, 0.0f, kTile);
    for (int64_t begin = 0; begin < size; begin += kTile) {
      const uint32_t count = size - begin < kTile ? static_cast<uint32_t>(size - begin) : kTile;
      const LocalTensor<uint8_t> empty = in_.AllocTensor<uint8_t>();
      partial_.Fetch(empty, begin, count);
      in_.EnQue(empty);
      LocalTensor<uint8_t> tile = in_.DeQue<uint8_t>();
      AscendC::Add(total, total, partial_.In(tile), count);
      in_.FreeTensor(tile);
    }
    Fold(total);
    out_.EnQue(total);
    LocalTensor<float> done = out_.DeQue<float>();
    AscendC::DataCopy(sums_, done, kLanes);
    out_.FreeTensor(done);
  }

 private:
  AscendC::TPipe pipe_;
  AscendC::TQue<AscendC::TPosition::VECIN, 1> in_;
  AscendC::TQue<AscendC::TPosition::VECOUT, 1> out_;
  Column<float> partial_;
  GlobalTensor<float> sums_;
};

}  // namespace ms_optim
