// Tensors in memory: weights, gradients and states, from storage to float32 and back, a tile at a time.
//
// A tile is 256 elements, which a warp converts. A thread has two runs of four adjacent elements, 128 apart, so that a
// warp reads and writes whole lines of the cache. If a tensor is not aligned to 16 bytes, or ends within the tile, a
// thread takes its elements one by one.
#pragma once

#include "blocks.cuh"
#include "codes.h"
#include "weights.h"

namespace ms_optim {
namespace {

constexpr int kRun = 4, kRuns = 2, kEach = kRun * kRuns;

struct Tile {
  int64_t begin, end;  // elements; end of the tensor
  bool whole;

  __device__ Tile(int64_t tile, int64_t tensor_end, bool aligned)
      : begin(tile), end(tensor_end), whole(aligned && tile + kTile <= tensor_end) {}

  // Returns the element of this thread with the index e.
  __device__ int64_t At(int e) const { return begin + e / kRun * (kRun * kWarp) + LaneOfThread() * kRun + e % kRun; }
  __device__ bool Has(int e) const { return whole || At(e) < end; }
};

template <class T, int kWords>
struct alignas(kWords * sizeof(T)) Run {
  T x[kWords];
};

// Calls take(e, word) for each word of a thread, which holds kInWord elements; e is the first of these. Elements beyond
// the end of the tensor are 0.
template <class T, int kInWord = 1, class Take>
__device__ void Read(const void *from, const Tile &tile, Take take) {
  constexpr int kWords = kRun / kInWord;
  const T *source = static_cast<const T *>(from);
  MS_OPTIM_UNROLL
  for (int r = 0; r < kRuns; ++r) {
    Run<T, kWords> run{};
    if (tile.whole) {
      run = *reinterpret_cast<const Run<T, kWords> *>(source + tile.At(r * kRun) / kInWord);
    } else {
      MS_OPTIM_UNROLL
      for (int k = 0; k < kWords; ++k) {
        const int64_t i = tile.At(r * kRun + k * kInWord);
        if (i < tile.end) run.x[k] = source[i / kInWord];
      }
    }
    MS_OPTIM_UNROLL
    for (int k = 0; k < kWords; ++k) take(r * kRun + k * kInWord, run.x[k]);
  }
}

// Stores the words that make(e, &word) makes.
template <class T, int kInWord = 1, class Make>
__device__ void Write(void *to, const Tile &tile, Make make) {
  constexpr int kWords = kRun / kInWord;
  T *target = static_cast<T *>(to);
  MS_OPTIM_UNROLL
  for (int r = 0; r < kRuns; ++r) {
    Run<T, kWords> run;
    MS_OPTIM_UNROLL
    for (int k = 0; k < kWords; ++k) make(r * kRun + k * kInWord, &run.x[k]);
    if (tile.whole) {
      *reinterpret_cast<Run<T, kWords> *>(target + tile.At(r * kRun) / kInWord) = run;
      continue;
    }
    MS_OPTIM_UNROLL
    for (int k = 0; k < kWords; ++k) {
      const int64_t i = tile.At(r * kRun + k * kInWord);
      if (i < tile.end) target[i / kInWord] = run.x[k];
    }
  }
}

template <class T>
__device__ void Load(const void *from, const Tile &tile, float (&x)[kEach]) {
  Read<T>(from, tile, [&](int e, T element) { x[e] = ToFloat(element); });
}

__device__ inline void LoadAs(DType type, const void *from, const Tile &tile, float (&x)[kEach]) {
  if (type == DType::kFloat32) Load<float>(from, tile, x);
  if (type == DType::kFloat16) Load<float16>(from, tile, x);
  if (type == DType::kBFloat16) Load<bfloat16>(from, tile, x);
}

__device__ inline void StoreFloats(void *to, const Tile &tile, const float (&x)[kEach]) {
  Write<float>(to, tile, [&](int e, float *element) { *element = x[e]; });
}

// ---- Weights ----------------------------------------------------------------------------------------------------

template <class T>
__device__ void LoadMaster(const Tensor &t, const Tile &tile, float (&w)[kEach]) {
  Load<float>(t.master, tile, w);
  Read<T>(t.weight, tile, [&](int e, T weight) { w[e] = MasterOrWeight(weight, w[e]); });
}

template <class R>
__device__ void LoadSplit(const Tensor &t, const Tile &tile, float (&w)[kEach]) {
  R remainder[kEach];
  Read<R>(t.remainder, tile, [&](int e, R element) { remainder[e] = element; });
  Read<bfloat16>(t.weight, tile, [&](int e, bfloat16 weight) { w[e] = MasterOf(weight, remainder[e]); });
}

template <class R>
__device__ void StoreSplit(const Tensor &t, const Tile &tile, const float (&w)[kEach], const Noise *noise) {
  bfloat16 weight[kEach];
  Write<R>(t.remainder, tile, [&](int e, R *remainder) {
    const uint32_t random = sizeof(R) == 1 ? NoiseFor(kWeight, noise->At(tile.At(e))) : 0u;
    Split(w[e], random, &weight[e], remainder);
  });
  Write<bfloat16>(t.weight, tile, [&](int e, bfloat16 *element) { *element = weight[e]; });
}

__device__ inline void LoadWeight(const Tensor &t, const Tile &tile, float (&w)[kEach]) {
  if (t.remainder_type == DType::kInt16) {
    LoadSplit<int16_t>(t, tile, w);
  } else if (t.remainder_type == DType::kInt8) {
    LoadSplit<int8_t>(t, tile, w);
  } else if (t.master == nullptr) {
    LoadAs(t.weight_type, t.weight, tile, w);
  } else if (t.weight_type == DType::kFloat16) {
    LoadMaster<float16>(t, tile, w);
  } else {
    LoadMaster<bfloat16>(t, tile, w);
  }
}

template <class T>
__device__ void StoreLow(const Tensor &t, const Tile &tile, const float (&w)[kEach], const Noise *noise) {
  Write<T>(t.weight, tile, [&](int e, T *weight) {
    if (noise != nullptr && t.master == nullptr) {
      StoreWithNoise(w[e], NoiseFor(kWeight, noise->At(tile.At(e))), weight);
    } else {
      Store(w[e], weight);
    }
  });
}

// Noise is null if weights are rounded to nearest.
__device__ inline void StoreWeight(const Tensor &t, const Tile &tile, const float (&w)[kEach], const Noise *noise) {
  if (t.remainder_type == DType::kInt16) return StoreSplit<int16_t>(t, tile, w, noise);
  if (t.remainder_type == DType::kInt8) return StoreSplit<int8_t>(t, tile, w, noise);
  if (t.master != nullptr) StoreFloats(t.master, tile, w);
  if (t.weight_type == DType::kFloat32) StoreFloats(t.weight, tile, w);
  if (t.weight_type == DType::kFloat16) StoreLow<float16>(t, tile, w, noise);
  if (t.weight_type == DType::kBFloat16) StoreLow<bfloat16>(t, tile, w, noise);
}

// ---- States -----------------------------------------------------------------------------------------------------

template <class Code>
__device__ void LoadCodes(const Tensor &t, int k, const Tile &tile, float (&s)[kEach]) {
  float unit = 1.0f;
  if constexpr (Code::kHasScales) unit = UnitOf<Code>(t.scale[k][tile.begin / kCodeBlock]);
  Read<typename Code::Type, Code::kInWord>(t.state[k], tile, [&](int e, typename Code::Type word) {
    MS_OPTIM_UNROLL
    for (int j = 0; j < Code::kInWord; ++j) s[e + j] = Code::Decode(Code::Unpacked(word, j), unit);
  });
}

// Stores the scale of a tile, and returns the factor of its elements before they are encoded.
template <class Code>
__device__ float StoreScale(const Tensor &t, int k, const Tile &tile, const float (&s)[kEach]) {
  uint32_t largest = 0;  // compared as bits, so that a NaN is the largest and is not lost
  MS_OPTIM_UNROLL
  for (int e = 0; e < kEach; ++e) largest = Max(largest, BitsOf(s[e]) & 0x7fffffffu);
  const float scale = FromBits(LargestOfWarp(largest));
  if (LaneOfThread() == 0) t.scale[k][tile.begin / kCodeBlock] = scale;
  return FactorOf<Code>(scale);
}

template <class Code>
__device__ void StoreCodes(const Tensor &t, int k, const Tile &tile, const Noise &noise, const float (&s)[kEach]) {
  float factor = 1.0f;
  if constexpr (Code::kHasScales) factor = StoreScale<Code>(t, k, tile, s);
  Write<typename Code::Type, Code::kInWord>(t.state[k], tile, [&](int e, typename Code::Type *word) {
    int32_t code[Code::kInWord];
    MS_OPTIM_UNROLL
    for (int j = 0; j < Code::kInWord; ++j) {
      code[j] = tile.Has(e + j) ? Code::Encode(s[e + j], factor, noise.At(tile.At(e + j))) : 0;
    }
    *word = Code::Packed(code);
  });
  // Lane 0 wrote the scale, which all lanes may read again.
  if constexpr (Code::kHasScales) __syncwarp();
}

__device__ inline void LoadState(const Tensor &t, int k, const Tile &tile, float (&s)[kEach]) {
  WithCode(t.state_type[k], k, [&](auto code) {
    if constexpr (code.kIsConverted) {
      LoadCodes<decltype(code)>(t, k, tile, s);
    } else {
      Load<float>(t.state[k], tile, s);
    }
  });
}

__device__ inline void StoreState(const Tensor &t, int k, const Tile &tile, const Noise &noise,
                                  const float (&s)[kEach]) {
  WithCode(t.state_type[k], k, [&](auto code) {
    if constexpr (code.kIsConverted) {
      StoreCodes<decltype(code)>(t, k, tile, noise, s);
    } else {
      StoreFloats(t.state[k], tile, s);
    }
  });
}

// ---- Gradients --------------------------------------------------------------------------------------------------

__device__ inline void Centralize(const RowMean *means, int64_t row, const Tile &tile, float (&g)[kEach]) {
  MS_OPTIM_UNROLL
  for (int r = 0; r < kRuns; ++r) {
    int64_t row_index = tile.At(r * kRun) / row, column = tile.At(r * kRun) % row;
    MS_OPTIM_UNROLL
    for (int k = 0; k < kRun; ++k) {
      const int e = r * kRun + k;
      if (tile.Has(e)) g[e] = (g[e] - means[row_index].mean) - means[row_index].rest;
      if (++column < row) continue;
      column = 0;
      ++row_index;
    }
  }
}

}  // namespace
}  // namespace ms_optim
