// Tensors in memory: weights, gradients and states, from storage to float32 and back, a tile at a time.
//
// A tile stays in the first-level cache. It is float32. If the tensor is float32, too, the tile is the tensor's own
// memory; otherwise it is a converted copy.
#pragma once

#include <cstring>
#include <type_traits>

#include "lanes.h"
#include "step.h"
#include "weights.h"

namespace ms_optim {
namespace {

constexpr int kTile = 1024;
static_assert(kTile % kCodeBlock == 0 && kTile % kLanes == 0, "a tile holds whole blocks and lanes");

// Calls body(element, lane) for n elements: a constant number of lanes at a time, which fills whole vectors, and then
// the rest. Before each whole number of lanes it calls fetch(element).
template <class Fetch, class Body>
MS_OPTIM_FN void ForLanes(int n, Fetch fetch, Body body) {
  const int whole = n / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes) {
    fetch(i);
    MS_OPTIM_IVDEP
    for (int lane = 0; lane < kLanes; ++lane) body(i + lane, lane);
  }
  for (int i = whole; i < n; ++i) body(i, i - whole);
}

template <class Body>
MS_OPTIM_FN void ForLanes(int n, Body body) {
  ForLanes(n, [](int) {}, body);
}

MS_OPTIM_FN float LargestOf(const uint32_t *bits) {
  uint32_t largest = 0;
  for (int i = 0; i < kLanes; ++i) largest = Max(largest, bits[i]);
  return FromBits(largest);
}

template <class T>
void Convert(const void *from, int64_t begin, int n, float *to) {
  const T *source = static_cast<const T *>(from) + begin;
  MS_OPTIM_IVDEP
  for (int i = 0; i < n; ++i) to[i] = ToFloat(source[i]);
}

// ---- Codes: 16 lanes at a time ---------------------------------------------------------------------------------

template <class Code>
MS_OPTIM_FN void WidenCodes(const typename Code::Type *from, int32_t (&to)[kLanes]) {
  typedef std::conditional_t<std::is_signed<typename Code::Type>::value, int8_t, uint8_t> Byte;
  if constexpr (Code::kWidth == 4) {
    WidenNibbles<Byte>(from, to);
  } else if constexpr (Code::kWidth == 16) {
    WidenShorts(from, to);
  } else {
    Widen<Byte>(from, to);
  }
}

template <class Code>
MS_OPTIM_FN void NarrowCodes(const int32_t (&from)[kLanes], typename Code::Type *to) {
  if constexpr (Code::kWidth == 4) {
    NarrowNibbles(from, to);
  } else if constexpr (Code::kWidth == 16) {
    NarrowToShorts(from, to);
  } else {
    Narrow(from, to);
  }
}

// Calls body(i, code) for each of n codes. The code and the number that body makes have 32 bits: compilers do not
// vectorize a loop over numbers of different widths. The loop has 32 iterations: GCC would unroll one of 16 before it
// vectorizes, and then convert number by number.
template <class Code, class Body>
MS_OPTIM_FN void ForCodes(const typename Code::Type *from, int n, Body body) {
  constexpr int kAtOnce = 2 * kLanes;
  const int whole = n / kAtOnce * kAtOnce;
  for (int i = 0; i < whole; i += kAtOnce) {
    int32_t code[kAtOnce];
    for (int half = 0; half < kAtOnce; half += kLanes) {
      WidenCodes<Code>(from + (i + half) / Code::kInWord, reinterpret_cast<int32_t (&)[kLanes]>(code[half]));
    }
    MS_OPTIM_IVDEP
    for (int lane = 0; lane < kAtOnce; ++lane) body(i + lane, code[lane]);
  }
  for (int i = whole; i < n; ++i) body(i, Code::Unpacked(from[i / Code::kInWord], i % Code::kInWord));
}

// Stores the n codes that make(i) returns.
template <class Code, class Make>
MS_OPTIM_FN void StoreCodes(int n, typename Code::Type *to, Make make) {
  const int whole = n / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes) {
    int32_t code[kLanes];
    MS_OPTIM_IVDEP
    for (int lane = 0; lane < kLanes; ++lane) code[lane] = make(i + lane);
    NarrowCodes<Code>(code, to + i / Code::kInWord);
  }
  for (int i = whole; i < n; i += Code::kInWord) {
    int32_t code[Code::kInWord] = {};
    for (int e = 0; e < Min(int{Code::kInWord}, n - i); ++e) code[e] = make(i + e);
    to[i / Code::kInWord] = Code::Packed(code);
  }
}

// A bfloat16 weight or gradient.
typedef BFloat16Code<kWeight> WeightCode;

template <>
void Convert<bfloat16>(const void *from, int64_t begin, int n, float *to) {
  ForCodes<WeightCode>(static_cast<const uint16_t *>(from) + begin, n,
                       [&](int i, int32_t code)
                           __attribute__((always_inline)) { to[i] = WeightCode::Decode(code, 1.0f); });
}

const float *LoadTile(const void *from, DType type, int64_t begin, int n, float *buffer) {
  if (type == DType::kFloat32) return static_cast<const float *>(from) + begin;
  if (type == DType::kFloat16) Convert<float16>(from, begin, n, buffer);
  if (type == DType::kBFloat16) Convert<bfloat16>(from, begin, n, buffer);
  return buffer;
}

template <class T>
void StoreAs(const float *tile, int64_t begin, int n, void *to) {
  T *target = static_cast<T *>(to) + begin;
  MS_OPTIM_IVDEP
  for (int i = 0; i < n; ++i) Store(tile[i], &target[i]);
}

template <>
void StoreAs<bfloat16>(const float *tile, int64_t begin, int n, void *to) {
  StoreCodes<WeightCode>(n, static_cast<uint16_t *>(to) + begin, [&](int i) __attribute__((always_inline)) {
    return static_cast<int32_t>(BFloat16Bits(tile[i]));
  });
}

void StoreTile(const float *tile, DType type, int64_t begin, int n, void *to) {
  if (type == DType::kFloat16) StoreAs<float16>(tile, begin, n, to);
  if (type == DType::kBFloat16) StoreAs<bfloat16>(tile, begin, n, to);
}

template <class T>
void MasterTile(const Tensor &t, int64_t begin, int n, float *tile) {
  const T *weight = static_cast<const T *>(t.weight) + begin;
  const float *master = t.master + begin;
  MS_OPTIM_IVDEP
  for (int i = 0; i < n; ++i) tile[i] = MasterOrWeight(weight[i], master[i]);
}

template <>
void MasterTile<bfloat16>(const Tensor &t, int64_t begin, int n, float *tile) {
  const float *master = t.master + begin;
  ForCodes<WeightCode>(static_cast<const uint16_t *>(t.weight) + begin, n,
                       [&](int i, int32_t code) __attribute__((always_inline)) {
                         const bool is_rounded = BFloat16Bits(master[i]) == static_cast<uint32_t>(code);
                         tile[i] = is_rounded ? master[i] : WeightCode::Decode(code, 1.0f);
                       });
}

MS_OPTIM_FN void WidenRemainders(const int16_t *from, int32_t (&to)[kLanes]) { WidenShorts(from, to); }
MS_OPTIM_FN void WidenRemainders(const int8_t *from, int32_t (&to)[kLanes]) { Widen(from, to); }
MS_OPTIM_FN void NarrowRemainders(const int32_t (&from)[kLanes], int16_t *to) { NarrowToShorts(from, to); }
MS_OPTIM_FN void NarrowRemainders(const int32_t (&from)[kLanes], int8_t *to) { Narrow(from, to); }

template <class R>
void RestoreTile(const Tensor &t, int64_t begin, int n, float *tile) {
  const bfloat16 *weight = static_cast<const bfloat16 *>(t.weight) + begin;
  const R *remainder = static_cast<const R *>(t.remainder) + begin;
  const int whole = n / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes) {
    int32_t upper[kLanes], rest[kLanes];
    WidenShorts(&weight[i].bits, upper);
    WidenRemainders(remainder + i, rest);
    MS_OPTIM_IVDEP
    for (int lane = 0; lane < kLanes; ++lane) {
      tile[i + lane] = Restored(upper[lane], Remainder<R>::Difference(rest[lane]));
    }
  }
  for (int i = whole; i < n; ++i) tile[i] = MasterOf(weight[i], remainder[i]);
}

// Noise is read if the remainder has 8 bits.
template <class R>
void SplitTile(const Tensor &t, int64_t begin, int n, const float *tile, const uint32_t *noise) {
  constexpr bool kNoisy = sizeof(R) == 1;
  bfloat16 *weight = static_cast<bfloat16 *>(t.weight) + begin;
  R *remainder = static_cast<R *>(t.remainder) + begin;
  const int whole = n / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes) {
    int32_t upper[kLanes], rest[kLanes];
    MS_OPTIM_IVDEP
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint32_t random = kNoisy ? NoiseFor(kWeight, noise[i + lane]) : 0u;
      const uint32_t rounded = Remainder<R>::Rounded(BitsOf(tile[i + lane]), random);
      upper[lane] = UpperHalf(rounded);
      rest[lane] = Remainder<R>::Of(rounded, upper[lane]);
    }
    NarrowToShorts(upper, &weight[i].bits);
    NarrowRemainders(rest, remainder + i);
  }
  for (int i = whole; i < n; ++i) {
    Split(tile[i], kNoisy ? NoiseFor(kWeight, noise[i]) : 0u, &weight[i], &remainder[i]);
  }
}

// The compiler computes the table: code that runs when the library is loaded could use instructions that the processor
// lacks.
constexpr NoiseTable noise_table;

// Computes Noise::At for the elements of a tile.
void FillNoise(Noise noise, int64_t begin, int n, uint32_t *bits) {
  for (int first = 0; first < n;) {
    const int index = static_cast<int>((begin + first) % kNoises), count = Min(n - first, int{kNoises} - index);
    const uint32_t above = noise.Above(begin + first);
    // The loop uses pointers: if an index is a sum, GCC emits a store that scatters, which takes longer than all the
    // rest.
    const uint32_t *table = noise_table.bits + index;
    uint32_t *out = bits + first;
    MS_OPTIM_IVDEP
    for (int i = 0; i < count; ++i) out[i] = table[i] ^ above;
    first += count;
  }
}

template <class T>
void StoreWithNoise(const float *tile, int64_t begin, int n, const uint32_t *noise, void *to) {
  T *target = static_cast<T *>(to) + begin;
  MS_OPTIM_IVDEP
  for (int i = 0; i < n; ++i) StoreWithNoise(tile[i], NoiseFor(kWeight, noise[i]), &target[i]);
}

template <>
void StoreWithNoise<bfloat16>(const float *tile, int64_t begin, int n, const uint32_t *noise, void *to) {
  StoreCodes<WeightCode>(n, static_cast<uint16_t *>(to) + begin, [&](int i) __attribute__((always_inline)) {
    return WeightCode::Encode(tile[i], 1.0f, noise[i]);
  });
}

float *LoadWeight(const Tensor &t, int64_t begin, int n, float *buffer) {
  if (t.weight_type == DType::kFloat32) return static_cast<float *>(t.weight) + begin;
  if (t.remainder_type == DType::kInt16) {
    RestoreTile<int16_t>(t, begin, n, buffer);
  } else if (t.remainder_type == DType::kInt8) {
    RestoreTile<int8_t>(t, begin, n, buffer);
  } else if (t.master == nullptr) {
    LoadTile(t.weight, t.weight_type, begin, n, buffer);
  } else if (t.returned) {
    memcpy(buffer, t.master + begin, static_cast<size_t>(n) * sizeof(float));
  } else if (t.weight_type == DType::kFloat16) {
    MasterTile<float16>(t, begin, n, buffer);
  } else {
    MasterTile<bfloat16>(t, begin, n, buffer);
  }
  return buffer;
}

// Noise is null if weights are rounded to nearest.
void StoreWeight(const Tensor &t, int64_t begin, int n, const float *tile, const uint32_t *noise) {
  if (t.remainder_type == DType::kInt16) return SplitTile<int16_t>(t, begin, n, tile, noise);
  if (t.remainder_type == DType::kInt8) return SplitTile<int8_t>(t, begin, n, tile, noise);
  if (t.master != nullptr) memcpy(t.master + begin, tile, static_cast<size_t>(n) * sizeof(float));
  if (noise == nullptr || t.master != nullptr) {
    StoreTile(tile, t.weight_type, begin, n, t.weight);
  } else if (t.weight_type == DType::kBFloat16) {
    StoreWithNoise<bfloat16>(tile, begin, n, noise, t.weight);
  } else if (t.weight_type == DType::kFloat16) {
    StoreWithNoise<float16>(tile, begin, n, noise, t.weight);
  }
}

// ---- States ----------------------------------------------------------------------------------------------------

// Calls body(first, count) for each block of a tile whose elements share a scale. For whole blocks count is a constant,
// which lets the compiler unroll the loops.
template <class Body>
MS_OPTIM_FN void ForBlocks(int n, Body body) {
  const int block = static_cast<int>(kCodeBlock), whole = n / block * block;
  for (int first = 0; first < whole; first += block) body(first, block);
  if (whole < n) body(whole, n - whole);
}

// Returns the codes of a state, from an element on that begins a word.
template <class Code>
MS_OPTIM_FN typename Code::Type *CodesOf(const Tensor &t, int k, int64_t begin) {
  return static_cast<typename Code::Type *>(t.state[k]) + begin / Code::kInWord;
}

template <class Code>
void DecodeTile(const Tensor &t, int k, int64_t begin, int n, float *tile) {
  const auto *codes = CodesOf<Code>(t, k, begin);
  const auto decode = [&](int first, int count, float unit) __attribute__((always_inline)) {
    float *to = tile + first;
    ForCodes<Code>(codes + first / Code::kInWord, count,
                   [&](int i, int32_t code) __attribute__((always_inline)) { to[i] = Code::Decode(code, unit); });
  };
  if constexpr (Code::kHasScales) {
    ForBlocks(n, [&](int first, int count) __attribute__((always_inline)) {
      decode(first, count, UnitOf<Code>(t.scale[k][(begin + first) / kCodeBlock]));
    });
  } else {
    decode(0, n, 1.0f);
  }
}

template <class Code>
void EncodeTile(const Tensor &t, int k, int64_t begin, int n, const float *tile, const uint32_t *noise) {
  auto *codes = CodesOf<Code>(t, k, begin);
  const auto encode = [&](int first, int count, float factor) __attribute__((always_inline)) {
    const float *from = tile + first;
    const uint32_t *random = noise + first;
    StoreCodes<Code>(count, codes + first / Code::kInWord,
                     [&](int i) __attribute__((always_inline)) { return Code::Encode(from[i], factor, random[i]); });
  };
  if constexpr (Code::kHasScales) {
    ForBlocks(n, [&](int first, int count) __attribute__((always_inline)) {
      uint32_t most[kLanes] = {};  // compared as bits, so that a NaN is the largest and is not lost
      ForLanes(count, [&](int i, int lane) __attribute__((always_inline)) {
        most[lane] = Max(most[lane], BitsOf(tile[first + i]) & 0x7fffffffu);
      });
      const float scale = t.scale[k][(begin + first) / kCodeBlock] = LargestOf(most);
      encode(first, count, FactorOf<Code>(scale));
    });
  } else {
    encode(0, n, 1.0f);
  }
}

// Returns a tile of a state: the state's own memory, or the buffer.
float *LoadState(const Tensor &t, int k, int64_t begin, int n, float *buffer) {
  float *tile = buffer;
  WithCode(t.state_type[k], k, [&](auto code) {
    if constexpr (code.kIsConverted) {
      DecodeTile<decltype(code)>(t, k, begin, n, buffer);
    } else {
      tile = static_cast<float *>(t.state[k]) + begin;
    }
  });
  return tile;
}

void StoreState(const Tensor &t, int k, int64_t begin, int n, const float *tile, const uint32_t *noise) {
  WithCode(t.state_type[k], k, [&](auto code) {
    if constexpr (code.kIsConverted) EncodeTile<decltype(code)>(t, k, begin, n, tile, noise);
  });
}

}  // namespace
}  // namespace ms_optim
