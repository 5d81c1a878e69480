// The parts of all kernels: tensors whose tiles pass through one queue in and one queue out, and sums over them.
#pragma once

#include "kernel_operator.h"

#define MS_OPTIM_DEVICE __aicore__
#include "tiling.h"

namespace ms_optim {

using AscendC::GlobalTensor;
using AscendC::LocalTensor;

// Buffers of a queue: one is computed on while another is copied.
constexpr uint32_t kBuffers = 2;
constexpr uint32_t kTileBytes = kTile * sizeof(float);

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

template <class T>
__aicore__ inline LocalTensor<T> Part(const LocalTensor<uint8_t> &buffer, uint32_t offset) {
  return buffer[offset].template ReinterpretCast<T>();
}

// A tensor in global memory, and where in the queues' buffers its tiles are. All tensors share the buffers: events are
// too few for a queue each.
template <class T>
class Column {
 public:
  __aicore__ inline void Init(GM_ADDR address, int64_t size) {
    global_.SetGlobalBuffer(reinterpret_cast<__gm__ T *>(address), size);
  }
  __aicore__ inline void ReserveIn(uint32_t *bytes) { in_ = Reserve(bytes); }
  __aicore__ inline void ReserveOut(uint32_t *bytes) { out_ = Reserve(bytes); }

  __aicore__ inline LocalTensor<T> In(const LocalTensor<uint8_t> &buffer) const { return Part<T>(buffer, in_); }
  __aicore__ inline LocalTensor<T> Out(const LocalTensor<uint8_t> &buffer) const { return Part<T>(buffer, out_); }

  // Copies with padding move exactly so many bytes, whatever the length.
  __aicore__ inline void Fetch(const LocalTensor<uint8_t> &buffer, int64_t begin, uint32_t count) {
    AscendC::DataCopyPad(In(buffer), global_[begin], Bytes(count), AscendC::DataCopyPadExtParams<T>());
  }
  __aicore__ inline void Store(const LocalTensor<uint8_t> &buffer, int64_t begin, uint32_t count) {
    AscendC::DataCopyPad(global_[begin], Out(buffer), Bytes(count));
  }

 private:
  __aicore__ inline static uint32_t Reserve(uint32_t *bytes) {
    const uint32_t place = *bytes;
    *bytes += kTile * sizeof(T);
    return place;
  }
  __aicore__ inline static AscendC::DataCopyExtParams Bytes(uint32_t count) {
    return AscendC::DataCopyExtParams(1, count * sizeof(T), 0, 0, 0);
  }

  GlobalTensor<T> global_;
  uint32_t in_ = 0, out_ = 0;
};

// The queues of one core and the buffer that it computes in.
class Core {
 public:
  __aicore__ inline void Init(uint32_t in_bytes, uint32_t out_bytes, uint32_t work_bytes) {
    pipe_.InitBuffer(in_, kBuffers, in_bytes);
    pipe_.InitBuffer(out_, kBuffers, out_bytes);
    if (work_bytes > 0) pipe_.InitBuffer(work_, work_bytes);
  }
  __aicore__ inline LocalTensor<uint8_t> Work() { return work_.Get<uint8_t>(); }

  // Calls kernel.Fetch, Compute and Store for each tile that falls to this core.
  template <class Kernel>
  __aicore__ inline void ForEachTile(int64_t size, Kernel *kernel) {
    const TileRange share = ShareOf(TilesOf(size), AscendC::GetBlockIdx(), AscendC::GetBlockNum());
    for (int64_t tile = share.begin; tile < share.end; ++tile) {
      const int64_t begin = tile * kTile;
      const uint32_t count = size - begin < kTile ? static_cast<uint32_t>(size - begin) : kTile;
      const LocalTensor<uint8_t> empty = in_.AllocTensor<uint8_t>();
      kernel->Fetch(empty, begin, count);
      in_.EnQue(empty);
      LocalTensor<uint8_t> in = in_.DeQue<uint8_t>();
      const LocalTensor<uint8_t> made = out_.AllocTensor<uint8_t>();
      kernel->Compute(in, made, count);
      in_.FreeTensor(in);
      out_.EnQue(made);
      LocalTensor<uint8_t> out = out_.DeQue<uint8_t>();
      kernel->Store(out, tile, begin, count);
      out_.FreeTensor(out);
    }
  }

 private:
  AscendC::TPipe pipe_;
  AscendC::TQue<AscendC::TPosition::VECIN, 1> in_;
  AscendC::TQue<AscendC::TPosition::VECOUT, 1> out_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> work_;
};

// Leaves x[0] + x[kLanes] + ..., x[1] + x[kLanes + 1] + ... of a whole tile in its first lanes, in an order that no
// length and no core changes.
__aicore__ inline void Fold(const LocalTensor<float> &x) {
  for (uint32_t n = kTile / 2; n >= kLanes; n /= 2) AscendC::Add(x, x, x[n], n);
}

// Sums of squares that each tile leaves, kLanes numbers of each: float32 [kinds, tiles * kLanes].
class TileSums {
 public:
  __aicore__ inline void Init(GM_ADDR address, uint32_t kinds, int64_t size) {
    kinds_ = kinds;
    tiles_ = TilesOf(size);
    global_.SetGlobalBuffer(reinterpret_cast<__gm__ float *>(address), kinds * tiles_ * kLanes);
  }
  __aicore__ inline void ReserveOut(uint32_t *bytes) {
    out_ = *bytes;
    *bytes += kinds_ * kLanes * sizeof(float);
  }
  __aicore__ inline void AddSquares(const LocalTensor<uint8_t> &out, uint32_t kind, const LocalTensor<float> &x,
                                    const LocalTensor<float> &scratch, uint32_t count) {
    if (count < kTile) AscendC::Duplicate(scratch, 0.0f, kTile);
    AscendC::Mul(scratch, x, x, count);
    Fold(scratch);
    AscendC::Muls(Part<float>(out, out_)[kind * kLanes], scratch, 1.0f, kLanes);
  }
  __aicore__ inline void Store(const LocalTensor<uint8_t> &out, int64_t tile) {
    for (uint32_t kind = 0; kind < kinds_; ++kind) {
      AscendC::DataCopy(global_[(kind * tiles_ + tile) * kLanes], Part<float>(out, out_)[kind * kLanes], kLanes);
    }
  }

 private:
  GlobalTensor<float> global_;
  int64_t tiles_ = 0;
  uint32_t kinds_ = 0, out_ = 0;
};

}  // namespace ms_optim
