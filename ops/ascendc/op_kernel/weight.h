// The weight in float32, whatever its dtype in memory.
#pragma once

#include "tiles.h"

namespace ms_optim {

// A weight stored as T, updated from numbers of type M: float32 from itself (T and M float), float16 and bfloat16 from
// a float32 master (M float) or from itself (M is T). A tensor that is absent is not touched.
template <class T, class M>
class Weight {
 public:
  static constexpr bool kLow = !kSame<T, float>;
  static constexpr bool kExact = kSame<M, float>;  // the weight or its master is float32
  // The bytes that Open computes in besides the result.
  static constexpr uint32_t kWorkBytes = kLow && kExact ? kTile * sizeof(T) + kTile / 8 : 0;
  static_assert(kExact || kSame<M, T>, "a master is of float32");

  __aicore__ inline void Init(GM_ADDR stored, GM_ADDR master, int64_t size) {
    if constexpr (kLow) stored_.Init(stored, size);
    if constexpr (kExact) exact_.Init(master, size);
  }
  __aicore__ inline void ReserveIn(uint32_t *bytes) {
    if constexpr (kLow) stored_.ReserveIn(bytes);
    if constexpr (kExact) exact_.ReserveIn(bytes);
  }
  __aicore__ inline void ReserveOut(uint32_t *bytes) {
    if constexpr (kLow) stored_.ReserveOut(bytes);
    if constexpr (kExact) exact_.ReserveOut(bytes);
  }
  __aicore__ inline void Fetch(const LocalTensor<uint8_t> &in, int64_t begin, uint32_t count) {
    if constexpr (kLow) stored_.Fetch(in, begin, count);
    if constexpr (kExact) exact_.Fetch(in, begin, count);
  }

  // Computes w, with a scratch tile and kWorkBytes at a place in a buffer. A weight that is not its rounded master was
  // loaded or set since, and comes first.
  __aicore__ inline void Open(const LocalTensor<uint8_t> &in, const LocalTensor<float> &w,
                              const LocalTensor<float> &scratch, const LocalTensor<uint8_t> &work, uint32_t place,
                              uint32_t count) {
    if constexpr (!kLow) {
      AscendC::Muls(w, exact_.In(in), 1.0f, count);
    } else if constexpr (!kExact) {
      AscendC::Cast(w, stored_.In(in), AscendC::RoundMode::CAST_NONE, count);
    } else {
      const LocalTensor<T> rounded = Part<T>(work, place);
      const LocalTensor<uint8_t> same = work[place + kTile * sizeof(T)];
      if (count < kTile) {  // comparisons are of whole tiles
        AscendC::Duplicate(scratch, 0.0f, kTile);
        AscendC::Duplicate(w, 0.0f, kTile);
      }
      AscendC::Cast(rounded, exact_.In(in), AscendC::RoundMode::CAST_RINT, count);
      AscendC::Cast(scratch, rounded, AscendC::RoundMode::CAST_NONE, count);
      AscendC::Cast(w, stored_.In(in), AscendC::RoundMode::CAST_NONE, count);
      AscendC::Compare(same, scratch, w, AscendC::CMPMODE::EQ, kTile);
      AscendC::Select(w, same, exact_.In(in), w, AscendC::SELMODE::VSEL_TENSOR_TENSOR_MODE, count);
    }
  }

  // Where w is computed: where the float32 weight is copied out from, if it is stored; else elsewhere.
  __aicore__ inline LocalTensor<float> Place(const LocalTensor<uint8_t> &out,
                                             const LocalTensor<float> &elsewhere) const {
    if constexpr (kExact) return exact_.Out(out);
    return elsewhere;
  }

  // Subtracts the update from w, which is at its place, and computes from it what else is stored.
  __aicore__ inline void Move(const LocalTensor<uint8_t> &out, const LocalTensor<float> &w,
                              const LocalTensor<float> &update, uint32_t count) {
    AscendC::Sub(w, w, update, count);
    if constexpr (kLow) AscendC::Cast(stored_.Out(out), w, AscendC::RoundMode::CAST_RINT, count);
  }
  __aicore__ inline void Store(const LocalTensor<uint8_t> &out, int64_t begin, uint32_t count) {
    if constexpr (kLow) stored_.Store(out, begin, count);
    if constexpr (kExact) exact_.Store(out, begin, count);
  }

 private:
  Column<T> stored_;
  Column<float> exact_;
};

}  // namespace ms_optim
