// In place of the vendor's header of this name, which declares its model of the instructions: those that the kernels of
// ops/ascendc use, declared by the pointers that they take. The numbers after them are, in this order, the repeats, the
// strides between blocks and the strides between repeats, of what is written and then of each operand.
//
// What else the vendor's headers name is in others.h. tools/ascend_vendor.py writes it, from what the compiler misses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "stub_def.h"

// ---- Names of registers, units and modes ------------------------------------------------------------------------

enum pipe_t { PIPE_S, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_ALL, PIPE_FIX };
enum event_t { EVENT_ID0, EVENT_ID1, EVENT_ID2, EVENT_ID3, EVENT_ID4, EVENT_ID5, EVENT_ID6, EVENT_ID7 };
enum QuantMode_t { NoQuant, DEQF16, F322BF16, F322F16, QF322B8_PRE, REQ8, VDEQF16, VQF322B8_PRE, VREQ8 };
enum class cache_line_t : uint64_t { SINGLE_CACHE_LINE, ENTIRE_DATA_CACHE };
enum class dcci_dst_t : uint64_t { CACHELINE_ALL, CACHELINE_UB, CACHELINE_OUT, CACHELINE_ATOMIC };
enum class Order_t { VALUE_INDEX, INDEX_VALUE, ONLY_VALUE, ONLY_INDEX };
enum class mem_t {};
enum class mem_dsb_t {};
enum pad_t { PAD_NONE };
enum class addr_cal_mode_t {};
enum class atomic_type_t {};
enum class atomic_op_t {};
enum ub_addr8_t { VA0, VA1, VA2, VA3, VA4, VA5, VA6, VA7 };
enum vtype_t { L128, H128 };

namespace model {

// Ends the launch: an instruction that has no model was executed.
[[noreturn]] void NotModelled(const char *name);

// The numbers of an instruction of vectors.
struct Shape {
  int repeats, blocks[3], strides[3];
};

template <size_t kOperands, class... N>
inline Shape ShapeOf(N... numbers) {
  const int n[] = {static_cast<int>(numbers)...};
  Shape shape{n[0], {}, {}};
  for (size_t i = 0; i < kOperands; ++i) {
    shape.blocks[i] = n[1 + i];
    shape.strides[i] = n[1 + kOperands + i];
  }
  return shape;
}

enum class Binary { kAdd, kSub, kMul, kDiv, kMax };
enum class Scalar { kAdd, kMul, kMin, kMax };
enum class Comparison { kEqual, kAtLeast, kAtMost };

void Compute(Binary operation, float *z, const float *x, const float *y, const Shape &shape);
void Compute(Scalar operation, float *z, const float *x, float b, const Shape &shape);
void Compare(Comparison relation, uint8_t *bits, const float *x, const float *y, const Shape &shape);
void Select(float *z, const float *x, const float *y, const Shape &shape, int mode);
void Root(float *z, const float *x, const Shape &shape);
void Fill(float *z, float value, const Shape &shape);
void Convert(float *z, const half *x, const Shape &shape);
void Convert(float *z, const bfloat16_t *x, const Shape &shape);
void Convert(half *z, const float *x, const Shape &shape);
void Convert(bfloat16_t *z, const float *x, const Shape &shape);
void SetComparisonMask(const void *place);

// Pieces of so many bytes; gaps are in bytes in global memory, and in blocks in the unified buffer.
void CopyIn(void *to, const void *from, int pieces, size_t bytes, size_t left, size_t right, size_t from_gap,
            size_t to_gap);
void CopyOut(void *to, const void *from, int pieces, size_t bytes, size_t from_gap, size_t to_gap);

void SetFlag(pipe_t from, pipe_t to, int event);
void WaitFlag(pipe_t from, pipe_t to, int event);
void Barrier(pipe_t pipe);
void SetMask(uint64_t high, uint64_t low);
void CountElements(bool counts);

}  // namespace model

// ---- Instructions -----------------------------------------------------------------------------------------------

#define MODEL_BINARY(name, operation)                                                 \
  template <class... N>                                                               \
  inline void name(float *z, float *x, float *y, N... numbers) {                      \
    model::Compute(model::Binary::operation, z, x, y, model::ShapeOf<3>(numbers...)); \
  }
#define MODEL_SCALAR(name, operation)                                                 \
  template <class... N>                                                               \
  inline void name(float *z, float *x, float b, N... numbers) {                       \
    model::Compute(model::Scalar::operation, z, x, b, model::ShapeOf<2>(numbers...)); \
  }
#define MODEL_COMPARISON(name, relation)                                                    \
  template <class... N>                                                                     \
  inline void name(uint8_t *bits, float *x, float *y, N... numbers) {                       \
    model::Compare(model::Comparison::relation, bits, x, y, model::ShapeOf<3>(numbers...)); \
  }
#define MODEL_CONVERSION(name, To, From)                 \
  template <class... N>                                  \
  inline void name(To *z, From *x, N... numbers) {       \
    model::Convert(z, x, model::ShapeOf<2>(numbers...)); \
  }
// Copies whose gaps in global memory are in bytes.
#define MODEL_COPIES(suffix)                                                                                           \
  template <class T, class... N>                                                                                       \
  inline void copy_gm_to_ubuf_align_##suffix(T *to, T *from, int, int pieces, size_t bytes, size_t left, size_t right, \
                                             size_t from_gap, size_t to_gap) {                                         \
    model::CopyIn(to, from, pieces, bytes, left * sizeof(T), right * sizeof(T), from_gap, to_gap);                     \
  }                                                                                                                    \
  template <class T, class... N>                                                                                       \
  inline void copy_ubuf_to_gm_align_##suffix(T *to, T *from, int, int pieces, size_t bytes, size_t, size_t,            \
                                             size_t from_gap, size_t to_gap) {                                         \
    model::CopyOut(to, from, pieces, bytes, from_gap, to_gap);                                                         \
  }

MODEL_BINARY(vadd, kAdd)
MODEL_BINARY(vsub, kSub)
MODEL_BINARY(vmul, kMul)
MODEL_BINARY(vdiv, kDiv)
MODEL_BINARY(vmax, kMax)
MODEL_SCALAR(vadds, kAdd)
MODEL_SCALAR(vmuls, kMul)
MODEL_SCALAR(vmins, kMin)
MODEL_SCALAR(vmaxs, kMax)
MODEL_COMPARISON(vcmpv_eq, kEqual)
MODEL_COMPARISON(vcmpv_ge, kAtLeast)
MODEL_COMPARISON(vcmpv_le, kAtMost)
MODEL_CONVERSION(vconv_f162f32, float, half)
MODEL_CONVERSION(vconv_bf162f32, float, bfloat16_t)
MODEL_CONVERSION(vconv_f322f16r, half, float)
MODEL_CONVERSION(vconv_f322bf16r, bfloat16_t, float)
MODEL_COPIES(b8)
MODEL_COPIES(b16)
MODEL_COPIES(b32)

template <class... N>
inline void vsqrt(float *z, float *x, N... numbers) {
  model::Root(z, x, model::ShapeOf<2>(numbers...));
}
template <class... N>
inline void vector_dup(float *z, float value, N... numbers) {
  model::Fill(z, value, model::ShapeOf<2>(numbers...));
}
// The mode comes last. Without it, the bits are in a register, which has no model.
template <class... N>
inline void vsel(float *z, float *x, float *y, N... numbers) {
  if constexpr (sizeof...(N) == 8) {
    const int n[] = {static_cast<int>(numbers)...};
    model::Select(z, x, y, model::ShapeOf<3>(numbers...), n[7]);
  } else {
    model::NotModelled("vsel");
  }
}
template <class T>
inline void set_cmpmask(T *place) {
  model::SetComparisonMask(place);
}
// Blocks of 32 bytes, and gaps in blocks.
inline void copy_ubuf_to_gm(void *to, void *from, int, int pieces, size_t blocks, size_t from_gap, size_t to_gap) {
  model::CopyOut(to, from, pieces, blocks * 32, from_gap, to_gap * 32);
}

inline void set_flag(pipe_t from, pipe_t to, int event) { model::SetFlag(from, to, event); }
inline void wait_flag(pipe_t from, pipe_t to, int event) { model::WaitFlag(from, to, event); }
inline void pipe_barrier(pipe_t pipe) { model::Barrier(pipe); }
inline void set_vector_mask(uint64_t high, uint64_t low) { model::SetMask(high, low); }
inline void set_mask_count() { model::CountElements(true); }
inline void set_mask_norm() { model::CountElements(false); }
inline void set_atomic_none() {}
inline void set_ffts_base_addr(uint64_t) {}

inline int64_t sbitset0(int64_t x, int64_t bit) { return x & ~(int64_t{1} << bit); }
inline int64_t sbitset1(int64_t x, int64_t bit) { return x | int64_t{1} << bit; }
// The first bit that is 0, or -1.
inline int64_t sff0(uint64_t x) { return ~x == 0 ? -1 : __builtin_ctzll(~x); }
inline int64_t get_block_idx() { return block_idx; }
inline int64_t get_block_num() { return block_num; }

// ---- What the framework tells of its queues and of a launch -----------------------------------------------------

void AscendCBufInit(uint8_t position, uint8_t is_work, uint8_t count, uint64_t address, uint64_t bytes);
void AscendCBufAlloc(uint8_t memory, uint8_t position, uint64_t address, uint64_t bytes);
void AscendCBufEnque(uint8_t from, uint8_t to, uint8_t position, uint64_t address);
void AscendCBufDeque(uint8_t from, uint8_t to, uint8_t position, uint64_t address);
void AscendCBufFree(uint8_t memory, uint8_t position, uint64_t address, uint64_t bytes);
// One process for each core: all are cores of vectors.
int get_process_num();
void set_block_dim(int core);
void set_core_type(int core);

inline void AscendCBufAbsAddr(uint8_t, uint64_t, uint64_t) {}
inline void AscendCBufGet(uint8_t, uint8_t, uint64_t, uint64_t) {}
inline void AscendCQueCreate(uint8_t, uint8_t, int) {}
inline void AscendCKernelBegin(const char *, size_t, uint64_t *) {}
inline void AscendCKernelEnd(const char *, size_t, uint64_t *) {}
inline void AscendCBlockBegin(int, const char *, size_t, uint64_t *) {}
void AscendCBlockEnd(int core, const char *, size_t, uint64_t *);

#include "others.h"
