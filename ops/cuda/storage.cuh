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
  // A tile that is known to be whole, and aligned.
  __device__ explicit Tile(int64_t tile) : begin(tile), end(tile + kTile), whole(true) {}

  // Returns the element of this thread with the index e.
  __device__ int64_t At(int e) const { return begin + e / kRun * (kRun * kWarp) + LaneOfThread() * kRun + e % kRun; }
  __device__ bool Has(int e) const { return whole || At(e) < end; }
};

// Tells the compiler that a pointer, which comes out of a table, is not to memory of a block or a thread.
template <class T>
__device__ T *InDeviceMemory(T *data) {
#if defined(__CUDA_ARCH__)
  __builtin_assume(__isGlobal(data));
#endif
  return data;
}

template <class T, int kWords>
struct alignas(kWords * sizeof(T)) Run {
  T x[kWords];
};

// The noise of a thread's elements. A tile lies in one group of elements, whose hash is that of all.
__device__ const NoiseTable noise_table;

struct TileNoise {
  uint32_t bits[kEach];

  __device__ void From(const Noise &noise, const Tile &tile) {
    static_assert(kNoises % kTile == 0, "a tile lies in a group");
    const uint32_t above = noise.Above(tile.begin);
    MS_OPTIM_UNROLL
    for (int r = 0; r < kRuns; ++r) {
      const auto run = *reinterpret_cast<const Run<uint32_t, kRun> *>(noise_table.bits + tile.At(r * kRun) % kNoises);
      MS_OPTIM_UNROLL
      for (int k = 0; k < kRun; ++k) bits[r * kRun + k] = run.x[k] ^ above;
    }
  }
};

// What a thread has read of a tile, in registers that are the same for all dtypes. Words that are only fetched wait for
// no memory; they do where they are converted. So all that a tile needs is fetched before any of it is converted.
class Fetched {
 public:
  // Elements beyond the end of the tensor are 0.
  template <class T, int kInWord = 1>
  __device__ void From(const void *from, const Tile &tile) {
    constexpr int kWords = kRun / kInWord;
    const T *source = InDeviceMemory(static_cast<const T *>(from));
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
      memcpy(bits_[r], &run, sizeof(run));
    }
  }

  // Returns the word that holds element e.
  template <class T, int kInWord = 1>
  __device__ T Word(int e) const {
    Run<T, kRun / kInWord> run;
    memcpy(&run, bits_[e / kRun], sizeof(run));
    return run.x[e % kRun / kInWord];
  }

  template <class T>
  __device__ void To(float (&x)[kEach]) const {
    MS_OPTIM_UNROLL
    for (int e = 0; e < kEach; ++e) x[e] = ToFloat(Word<T>(e));
  }

 private:
  alignas(16) uint32_t bits_[kRuns][kRun];
};

template <class T>
__device__ void Load(const void *from, const Tile &tile, float (&x)[kEach]) {
  Fetched fetched;
  fetched.From<T>(from, tile);
  fetched.To<T>(x);
}

// Stores the words that make(e, &word) makes.
template <class T, int kInWord = 1, class Make>
__device__ void Write(void *to, const Tile &tile, Make make) {
  constexpr int kWords = kRun / kInWord;
  T *target = InDeviceMemory(static_cast<T *>(to));
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

// Numbers of one of the three dtypes of weights and gradients.
struct FetchedFloats : Fetched {
  __device__ void From(DType type, const void *from, const Tile &tile) {
    if (type == DType::kFloat32) {
      Fetched::From<float>(from, tile);
    } else {
      Fetched::From<uint16_t>(from, tile);
    }
  }
  __device__ void To(DType type, float (&x)[kEach]) const {
    if (type == DType::kFloat32) Fetched::To<float>(x);
    if (type == DType::kFloat16) Fetched::To<float16>(x);
    if (type == DType::kBFloat16) Fetched::To<bfloat16>(x);
  }
};

__device__ inline float FloatAt(DType type, const void *from, int64_t i) {
  if (type == DType::kFloat32) return InDeviceMemory(static_cast<const float *>(from))[i];
  if (type == DType::kFloat16) return ToFloat(InDeviceMemory(static_cast<const float16 *>(from))[i]);
  return ToFloat(InDeviceMemory(static_cast<const bfloat16 *>(from))[i]);
}

__device__ inline void StoreFloats(void *to, const Tile &tile, const float (&x)[kEach]) {
  Write<float>(to, tile, [&](int e, float *element) { *element = x[e]; });
}

// ---- Weights ----------------------------------------------------------------------------------------------------

// Weights with their masters or remainders.
class FetchedWeight {
 public:
  __device__ void From(const Tensor &t, const Tile &tile) {
    weight_.From(t.weight_type, t.weight, tile);
    if (t.master != nullptr) rest_.From<float>(t.master, tile);
    if (t.remainder_type == DType::kInt16) rest_.From<int16_t>(t.remainder, tile);
    if (t.remainder_type == DType::kInt8) rest_.From<int8_t>(t.remainder, tile);
  }

  __device__ void To(const Tensor &t, float (&w)[kEach]) const {
    if (t.remainder_type == DType::kInt16) {
      Join<int16_t>(w);
    } else if (t.remainder_type == DType::kInt8) {
      Join<int8_t>(w);
    } else if (t.master == nullptr) {
      weight_.To(t.weight_type, w);
    } else if (t.weight_type == DType::kFloat16) {
      Choose<float16>(w);
    } else {
      Choose<bfloat16>(w);
    }
  }

 private:
  template <class R>
  __device__ void Join(float (&w)[kEach]) const {
    MS_OPTIM_UNROLL
    for (int e = 0; e < kEach; ++e) w[e] = MasterOf(weight_.Word<bfloat16>(e), rest_.Word<R>(e));
  }
  template <class T>
  __device__ void Choose(float (&w)[kEach]) const {
    MS_OPTIM_UNROLL
    for (int e = 0; e < kEach; ++e) w[e] = MasterOrWeight(weight_.Word<T>(e), rest_.Word<float>(e));
  }

  FetchedFloats weight_;
  Fetched rest_;
};

__device__ inline void LoadWeight(const Tensor &t, const Tile &tile, float (&w)[kEach]) {
  FetchedWeight weight;
  weight.From(t, tile);
  weight.To(t, w);
}

template <class R>
__device__ void StoreSplit(const Tensor &t, const Tile &tile, const float (&w)[kEach], const TileNoise &noise) {
  bfloat16 weight[kEach];
  Write<R>(t.remainder, tile, [&](int e, R *remainder) {
    const uint32_t random = sizeof(R) == 1 ? NoiseFor(kWeight, noise.bits[e]) : 0u;
    Split(w[e], random, &weight[e], remainder);
  });
  Write<bfloat16>(t.weight, tile, [&](int e, bfloat16 *element) { *element = weight[e]; });
}

template <class T>
__device__ void StoreLow(const Tensor &t, const Tile &tile, const float (&w)[kEach], bool noisy,
                         const TileNoise &noise) {
  Write<T>(t.weight, tile, [&](int e, T *weight) {
    if (noisy && t.master == nullptr) {
      StoreWithNoise(w[e], NoiseFor(kWeight, noise.bits[e]), weight);
    } else {
      Store(w[e], weight);
    }
  });
}

// Reads the noise only if noise enters the weights.
__device__ inline void StoreWeight(const Tensor &t, const Tile &tile, const float (&w)[kEach], bool noisy,
                                   const TileNoise &noise) {
  if (t.remainder_type == DType::kInt16) return StoreSplit<int16_t>(t, tile, w, noise);
  if (t.remainder_type == DType::kInt8) return StoreSplit<int8_t>(t, tile, w, noise);
  if (t.master != nullptr) StoreFloats(t.master, tile, w);
  if (t.weight_type == DType::kFloat32) StoreFloats(t.weight, tile, w);
  if (t.weight_type == DType::kFloat16) StoreLow<float16>(t, tile, w, noisy, noise);
  if (t.weight_type == DType::kBFloat16) StoreLow<bfloat16>(t, tile, w, noisy, noise);
}

// ---- States -----------------------------------------------------------------------------------------------------

// A state: float32 numbers, or words of a format.
template <class Format>
class FetchedState {
 public:
  __device__ void From(const Tensor &t, int k, const Tile &tile) {
    if (t.state_type[k] == DType::kFloat32) {
      words_.From<float>(t.state[k], tile);
    } else if constexpr (First::kIsConverted) {
      words_.From<typename First::Type, First::kInWord>(t.state[k], tile);
      if constexpr (First::kHasScales) scale_ = t.scale[k][tile.begin / kCodeBlock];
    }
  }

  __device__ void To(const Tensor &t, int k, float (&s)[kEach]) const {
    if (t.state_type[k] == DType::kFloat32) return words_.To<float>(s);
    WithCodeOf<Format>(t.state_type[k], k, [&](auto code) {
      if constexpr (code.kIsConverted) Decode<decltype(code)>(s);
    });
  }

 private:
  typedef FirstCode<Format> First;

  template <class Code>
  __device__ void Decode(float (&s)[kEach]) const {
    float unit = 1.0f;
    if constexpr (Code::kHasScales) unit = UnitOf<Code>(scale_);
    MS_OPTIM_UNROLL
    for (int e = 0; e < kEach; ++e) {
      const auto word = words_.Word<typename Code::Type, Code::kInWord>(e);
      s[e] = Code::Decode(Code::Unpacked(word, e % Code::kInWord), unit);
    }
  }

  Fetched words_;
  float scale_;
};

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
__device__ void StoreCodes(const Tensor &t, int k, const Tile &tile, const TileNoise &noise, const float (&s)[kEach]) {
  float factor = 1.0f;
  if constexpr (Code::kHasScales) factor = StoreScale<Code>(t, k, tile, s);
  Write<typename Code::Type, Code::kInWord>(t.state[k], tile, [&](int e, typename Code::Type *word) {
    int32_t code[Code::kInWord];
    MS_OPTIM_UNROLL
    for (int j = 0; j < Code::kInWord; ++j) {
      code[j] = tile.Has(e + j) ? Code::Encode(s[e + j], factor, noise.bits[e + j]) : 0;
    }
    *word = Code::Packed(code);
  });
  // Lane 0 wrote the scale, which all lanes may read again.
  if constexpr (Code::kHasScales) __syncwarp();
}

template <class Format>
__device__ void LoadState(const Tensor &t, int k, const Tile &tile, float (&s)[kEach]) {
  FetchedState<Format> state;
  state.From(t, k, tile);
  state.To(t, k, s);
}

template <class Format>
__device__ void StoreState(const Tensor &t, int k, const Tile &tile, const TileNoise &noise, const float (&s)[kEach]) {
  if (t.state_type[k] == DType::kFloat32) return StoreFloats(t.state[k], tile, s);
  WithCodeOf<Format>(t.state_type[k], k, [&](auto code) {
    if constexpr (code.kIsConverted) StoreCodes<decltype(code)>(t, k, tile, noise, s);
  });
}

template <class Format>
__device__ float StateAt(const Tensor &t, int k, int64_t i) {
  float s = 0.0f;
  if (t.state_type[k] == DType::kFloat32) return InDeviceMemory(static_cast<const float *>(t.state[k]))[i];
  WithCodeOf<Format>(t.state_type[k], k, [&](auto code) {
    typedef decltype(code) Code;
    if constexpr (Code::kIsConverted) {
      float unit = 1.0f;
      if constexpr (Code::kHasScales) unit = UnitOf<Code>(t.scale[k][i / kCodeBlock]);
      const auto word = InDeviceMemory(static_cast<const typename Code::Type *>(t.state[k]))[i / Code::kInWord];
      s = Code::Decode(Code::Unpacked(word, static_cast<int>(i % Code::kInWord)), unit);
    }
  });
  return s;
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
