// Tensors in memory: weights, gradients and states, from storage to float32 and back, a tile at a time.
//
// A tile stays in the first-level cache. It is float32: where the tensor is too, it is the tensor's own memory, else a
// converted copy.
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

// Calls body(element, lane) for n elements: a constant number of lanes at a time, which is whole vectors, then the
// rest.
template <class Body>
MS_OPTIM_FN void ForLanes(int n, Body body) {
  const int whole = n / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes) {
    MS_OPTIM_IVDEP
    for (int lane = 0; lane < kLanes; ++lane) body(i + lane, lane);
  }
  for (int i = whole; i < n; ++i) body(i, i - whole);
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

// Calls body(i, bits), which makes of the bits of bfloat16 numbers those of float32 numbers or what it likes, and
// lane by lane keeps to 32 bits: compilers do not vectorize a loop over numbers of different widths.
template <class Body>
MS_OPTIM_FN void ForBFloat16(const bfloat16 *from, int n, Body body) {
  const int whole = n / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes) {
    int32_t bits[kLanes];
    WidenShorts(&from[i].bits, bits);
    MS_OPTIM_IVDEP
    for (int lane = 0; lane < kLanes; ++lane) body(i + lane, static_cast<uint32_t>(bits[lane]));
  }
  for (int i = whole; i < n; ++i) body(i, from[i].bits);
}

// Stores the bits of bfloat16 numbers that make(i) returns.
template <class Make>
MS_OPTIM_FN void StoreBFloat16(int n, bfloat16 *to, Make make) {
  const int whole = n / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes) {
    int32_t bits[kLanes];
    MS_OPTIM_IVDEP
    for (int lane = 0; lane < kLanes; ++lane) bits[lane] = static_cast<int32_t>(make(i + lane));
    NarrowToShorts(bits, &to[i].bits);
  }
  for (int i = whole; i < n; ++i) to[i].bits = static_cast<uint16_t>(make(i));
}

template <>
void Convert<bfloat16>(const void *from, int64_t begin, int n, float *to) {
  ForBFloat16(static_cast<const bfloat16 *>(from) + begin, n,
              [&](int i, uint32_t bits) __attribute__((always_inline)) { to[i] = FromBits(bits << 16); });
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
  StoreBFloat16(n, static_cast<bfloat16 *>(to) + begin,
                [&](int i) __attribute__((always_inline)) { return BFloat16Bits(tile[i]); });
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
  ForBFloat16(static_cast<const bfloat16 *>(t.weight) + begin, n,
              [&](int i, uint32_t bits) __attribute__((always_inline)) {
                tile[i] = BFloat16Bits(master[i]) == bits ? master[i] : FromBits(bits << 16);
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
      const uint32_t kept = Remainder<R>::Kept(BitsOf(tile[i + lane]), random);
      upper[lane] = UpperHalf(kept);
      rest[lane] = Remainder<R>::Of(kept, upper[lane]);
    }
    NarrowToShorts(upper, &weight[i].bits);
    NarrowRemainders(rest, remainder + i);
  }
  for (int i = whole; i < n; ++i) {
    Split(tile[i], kNoisy ? NoiseFor(kWeight, noise[i]) : 0u, &weight[i], &remainder[i]);
  }
}

// States of lower precision are codes with a scale for each block, or bfloat16, both rounded stochastically.

// Calls body(first, count) for each block of codes in a tile. For whole blocks count is a constant, which lets the
// compiler unroll the loops.
template <class Body>
MS_OPTIM_FN void ForBlocks(int n, Body body) {
  const int block = static_cast<int>(kCodeBlock), whole = n / block * block;
  for (int first = 0; first < whole; first += block) body(first, block);
  if (whole < n) body(whole, n - whole);
}

// Returns where the codes of a state are from an element on that begins a word.
template <class Code>
MS_OPTIM_FN typename Code::Type *CodesOf(const Tensor &t, int k, int64_t begin) {
  return static_cast<typename Code::Type *>(t.state[k]) + begin / Code::kInWord;
}

template <class Code>
MS_OPTIM_FN void WidenCodes(const typename Code::Type *from, int32_t (&to)[kLanes]) {
  typedef std::conditional_t<std::is_signed<typename Code::Type>::value, int8_t, uint8_t> Byte;
  if constexpr (Code::kWidth == 4) {
    WidenNibbles<Byte>(from, to);
  } else {
    Widen<Byte>(from, to);
  }
}

template <class Code>
MS_OPTIM_FN void NarrowCodes(const int32_t (&from)[kLanes], typename Code::Type *to) {
  if constexpr (Code::kWidth == 4) {
    NarrowNibbles(from, to);
  } else {
    Narrow(from, to);
  }
}

template <class Code>
void DecodeTile(const Tensor &t, int k, int64_t begin, int n, float *tile) {
  const auto *codes = CodesOf<Code>(t, k, begin);
  ForBlocks(n, [&](int first, int count) __attribute__((always_inline)) {
    const float unit = t.scale[k][(begin + first) / kCodeBlock] / Code::Largest();
    const int whole = first + count / kLanes * kLanes;
    for (int i = first; i < whole; i += kLanes) {
      int32_t code[kLanes];
      WidenCodes<Code>(codes + i / Code::kInWord, code);
      MS_OPTIM_IVDEP
      for (int lane = 0; lane < kLanes; ++lane) tile[i + lane] = Code::Decode(code[lane]) * unit;
    }
    for (int i = whole; i < first + count; ++i) {
      tile[i] = Code::Decode(Code::Unpacked(codes[i / Code::kInWord], i % Code::kInWord)) * unit;
    }
  });
}

template <class Code>
void EncodeTile(const Tensor &t, int k, int64_t begin, int n, const float *tile, const uint32_t *noise) {
  auto *codes = CodesOf<Code>(t, k, begin);
  ForBlocks(n, [&](int first, int count) __attribute__((always_inline)) {
    uint32_t most[kLanes] = {};  // compared as bits, of which a NaN has the largest: it is not lost
    ForLanes(count, [&](int i, int lane) __attribute__((always_inline)) {
      most[lane] = Max(most[lane], BitsOf(tile[first + i]) & 0x7fffffffu);
    });
    const uint32_t largest = BitsOf(LargestOf(most));
    const float scale = FromBits(largest), factor = scale > 1e-37f ? Code::Largest() / scale : 0.0f;
    t.scale[k][(begin + first) / kCodeBlock] = scale;
    const int whole = first + count / kLanes * kLanes;
    for (int i = first; i < whole; i += kLanes) {
      int32_t code[kLanes];
      MS_OPTIM_IVDEP
      for (int lane = 0; lane < kLanes; ++lane) {
        code[lane] = Code::Encode(tile[i + lane], factor, noise[i + lane]);
      }
      NarrowCodes<Code>(code, codes + i / Code::kInWord);
    }
    for (int i = whole; i < first + count; i += Code::kInWord) {
      int32_t code[Code::kInWord] = {};
      for (int e = 0; e < Min(int{Code::kInWord}, first + count - i); ++e) {
        code[e] = Code::Encode(tile[i + e], factor, noise[i + e]);
      }
      codes[i / Code::kInWord] = Code::Packed(code);
    }
  });
}

// The compiler computes the table: code that ran when the library is loaded might use instructions that the processor
// lacks.
struct NoiseTable {
  alignas(64) uint32_t bits[kNoises];
  constexpr NoiseTable() : bits() {
    for (uint32_t i = 0; i < kNoises; ++i) bits[i] = Hash(i);
  }
};
constexpr NoiseTable noise_table;

// Computes Noise::At for the elements of a tile.
void FillNoise(Noise noise, int64_t begin, int n, uint32_t *bits) {
  for (int first = 0; first < n;) {
    const int place = static_cast<int>((begin + first) % kNoises), count = Min(n - first, int{kNoises} - place);
    const uint32_t above = noise.Above(begin + first);
    // By pointers: of indices that are sums, GCC makes a store that scatters, which takes longer than all the rest.
    const uint32_t *table = noise_table.bits + place;
    uint32_t *out = bits + first;
    MS_OPTIM_IVDEP
    for (int i = 0; i < count; ++i) out[i] = table[i] ^ above;
    first += count;
  }
}

template <NoiseUse kUse, class T>
void StoreTileWithNoise(const float *tile, int64_t begin, int n, const uint32_t *noise, void *to) {
  T *target = static_cast<T *>(to) + begin;
  if constexpr (std::is_same<T, bfloat16>::value) {
    StoreBFloat16(n, target, [&](int i) __attribute__((always_inline)) {
      return BFloat16WithNoise(tile[i], NoiseFor(kUse, noise[i]));
    });
    return;
  }
  MS_OPTIM_IVDEP
  for (int i = 0; i < n; ++i) StoreWithNoise(tile[i], NoiseFor(kUse, noise[i]), &target[i]);
}

// What noise is for does not matter to decoding.
template <int kBits>
void LoadCodes(const Tensor &t, int k, int64_t begin, int n, float *tile) {
  if (IsSignedCode(t.state_type[k])) return DecodeTile<SignedCode<kBits, kFirstState>>(t, k, begin, n, tile);
  DecodeTile<UnsignedCode<kBits, kSecondState>>(t, k, begin, n, tile);
}

template <int kBits>
void StoreCodes(const Tensor &t, int k, int64_t begin, int n, const float *tile, const uint32_t *noise) {
  const bool is_signed = IsSignedCode(t.state_type[k]);
  if (k == 0) EncodeTile<SignedCode<kBits, kFirstState>>(t, k, begin, n, tile, noise);
  if (k == 1) EncodeTile<UnsignedCode<kBits, kSecondState>>(t, k, begin, n, tile, noise);
  if (k == 2 && is_signed) EncodeTile<SignedCode<kBits, kThirdState>>(t, k, begin, n, tile, noise);
  if (k == 2 && !is_signed) EncodeTile<UnsignedCode<kBits, kThirdState>>(t, k, begin, n, tile, noise);
}

float *LoadState(const Tensor &t, int k, int64_t begin, int n, float *buffer) {
  if (t.state_type[k] == DType::kFloat32) return static_cast<float *>(t.state[k]) + begin;
  if (t.state_type[k] == DType::kBFloat16) LoadTile(t.state[k], t.state_type[k], begin, n, buffer);
  if (CodeBits(t.state_type[k]) == 8) LoadCodes<8>(t, k, begin, n, buffer);
  if (CodeBits(t.state_type[k]) == 4) LoadCodes<4>(t, k, begin, n, buffer);
  return buffer;
}

void StoreState(const Tensor &t, int k, int64_t begin, int n, const float *tile, const uint32_t *noise) {
  if (CodeBits(t.state_type[k]) == 8) StoreCodes<8>(t, k, begin, n, tile, noise);
  if (CodeBits(t.state_type[k]) == 4) StoreCodes<4>(t, k, begin, n, tile, noise);
  if (t.state_type[k] != DType::kBFloat16) return;
  if (k == 0) StoreTileWithNoise<kFirstState, bfloat16>(tile, begin, n, noise, t.state[k]);
  if (k == 1) StoreTileWithNoise<kSecondState, bfloat16>(tile, begin, n, noise, t.state[k]);
  if (k == 2) StoreTileWithNoise<kThirdState, bfloat16>(tile, begin, n, noise, t.state[k]);
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

// Noise is null where weights are rounded to nearest.
void StoreWeight(const Tensor &t, int64_t begin, int n, const float *tile, const uint32_t *noise) {
  if (t.remainder_type == DType::kInt16) return SplitTile<int16_t>(t, begin, n, tile, noise);
  if (t.remainder_type == DType::kInt8) return SplitTile<int8_t>(t, begin, n, tile, noise);
  if (t.master != nullptr) memcpy(t.master + begin, tile, static_cast<size_t>(n) * sizeof(float));
  if (noise == nullptr || t.master != nullptr) {
    StoreTile(tile, t.weight_type, begin, n, t.weight);
  } else if (t.weight_type == DType::kBFloat16) {
    StoreTileWithNoise<kWeight, bfloat16>(tile, begin, n, noise, t.weight);
  } else if (t.weight_type == DType::kFloat16) {
    StoreTileWithNoise<kWeight, float16>(tile, begin, n, noise, t.weight);
  }
}

}  // namespace
}  // namespace ms_optim
