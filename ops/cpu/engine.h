// Runs a rule over all tensors of a step on the CPU.
//
// Tensors are cut into chunks of a fixed size, chunks into tiles that stay in the first-level cache. A tile is
// float32: where the tensor is too, it is the tensor's own memory, else a converted copy. Partial sums belong to
// chunks and are added in the chunks' order, so the result does not depend on the number of threads.
#pragma once

#include <omp.h>
#include <sys/mman.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "decision.h"
#include "denormals.h"
#include "lanes.h"
#include "step.h"
#include "weights.h"

namespace ms_optim {
namespace {

constexpr int kTile = 1024;
constexpr int64_t kChunk = 32 * kTile;
static_assert(kTile % kCodeBlock == 0 && kTile % kLanes == 0, "a tile holds whole blocks and lanes");

struct Chunk {
  int tensor;
  int64_t begin, end;
  double sum[kSums];
};

// What is decided for a tensor, and how it is stored.
struct Task : Decision {
  int64_t row;  // elements that centralization averages over; 0: none
  Noise noise;
  bool low_states;       // some state has fewer bits
  bool bfloat16_states;  // the first and, if there is one, the second are bfloat16
  int code_bits;         // of these, if they are codes; else 0
  bool noisy_weight;     // weights are rounded with noise
  int first_chunk, last_chunk;
};

struct alignas(64) Buffers {
  float weight[kTile];
  float gradient[kTile];
  float state[kMaxStates][kTile];
  float direction[kMaxDirections][kTile];
  uint32_t noise[kTile];
  float row_mean[kTile], row_mean_rest[kTile];  // the mean is their sum
};

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

// ---- Tiles: from storage to float32 and back -------------------------------------------------------------------

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

// A tensor's first step: what starts as the weights.
template <class Rule>
void StartTile(const Tensor &t, const Task &task, int64_t begin, int n, const float *w) {
  if (!task.starts) return;
  const size_t bytes = static_cast<size_t>(n) * sizeof(float);
  if (t.average != nullptr) memcpy(t.average + begin, w, bytes);
  if (Rule::kStartsAtWeights) memcpy(static_cast<float *>(t.state[0]) + begin, w, bytes);
}

// Fetches memory that is needed after the loop over a tile, while that runs.
MS_OPTIM_FN void FetchTile(const float *data, int n) {
  constexpr int kLine = 64 / static_cast<int>(sizeof(float));
  for (int i = 0; i < n; i += kLine) __builtin_prefetch(data + i, 1, 2);
}

// Moves the average towards the weights as they were stored. In this form an average of equal numbers stays as it is.
void AverageTile(const Tensor &t, const Task &task, int64_t begin, int n, float *buffer) {
  if (t.average == nullptr) return;
  const float *__restrict w = LoadWeight(t, begin, n, buffer);
  float *__restrict a = t.average + begin;
  const float rate = task.average_rate;
  MS_OPTIM_IVDEP
  for (int i = 0; i < n; ++i) a[i] += rate * (w[i] - a[i]);
}

// ---- Gradients -------------------------------------------------------------------------------------------------

void RowMeans(const Tensor &t, const Task &task, const Chunk &chunk, Buffers &b) {
  for (int64_t row = chunk.begin; row < chunk.end; row += task.row) {
    double sum = 0.0;
    for (int64_t begin = row; begin < row + task.row; begin += kTile) {
      const int n = static_cast<int>(Min(kTile, row + task.row - begin));
      sum += Sum(LoadTile(t.gradient, t.gradient_type, begin, n, b.gradient), n);
    }
    const double mean = sum / static_cast<double>(task.row);
    const int64_t k = (row - chunk.begin) / task.row;
    b.row_mean[k] = static_cast<float>(mean);
    b.row_mean_rest[k] = static_cast<float>(mean - b.row_mean[k]);
  }
}

const float *LoadGradient(const Tensor &t, const Task &task, const Chunk &chunk, int64_t begin, int n, Buffers &b) {
  const float *g = LoadTile(t.gradient, t.gradient_type, begin, n, b.gradient);
  if (task.row == 0) return g;
  for (int i = 0; i < n;) {
    const int64_t row = (begin + i - chunk.begin) / task.row;
    const int end = static_cast<int>(Min(n, chunk.begin + (row + 1) * task.row - begin));
    const float mean = b.row_mean[row], rest = b.row_mean_rest[row];
    for (; i < end; ++i) b.gradient[i] = (g[i] - mean) - rest;
  }
  return b.gradient;
}

// Calls body(begin, n, centralized gradient) for each tile of the chunk.
template <class Body>
void ForTiles(const Tensor &t, const Task &task, const Chunk &chunk, Buffers &b, Body body) {
  if (task.row != 0) RowMeans(t, task, chunk, b);
  for (int64_t begin = chunk.begin; begin < chunk.end; begin += kTile) {
    const int n = static_cast<int>(Min(kTile, chunk.end - begin));
    body(begin, n, LoadGradient(t, task, chunk, begin, n, b));
  }
}

void GradientSum(const Tensor &t, const Task &task, Chunk &chunk, Buffers &b) {
  double sum = 0.0;
  ForTiles(t, task, chunk, b, [&](int64_t, int n, const float *g) { sum += SumSquares(g, n); });
  chunk.sum[kGradientSum] = sum;
}

// ---- The rule, over one tile -----------------------------------------------------------------------------------

// Sums that the loop over a tile adds up in passing, in lanes: a loop of their own would take as long as the rule.
struct TileSums {
  float lane[kSums][kLanes] = {};

  MS_OPTIM_FN double Total(enum Sum sum) const { return SumOfLanes(lane[sum]); }
};

template <class Rule, bool kUpdateStates, bool kSum>
MS_OPTIM_FN void RuleElement(const Rule &rule, const Task &task, float w, float g, float *s, float *d, int lane,
                             TileSums &sums) {
  Advance<Rule, kUpdateStates>(rule, task, w, g, s, d);
  if (!kSum) return;
  sums.lane[kGradientSum][lane] += g * g;
  sums.lane[kWeightSum][lane] += w * w;
  sums.lane[kDirectionSum][lane] += d[0] * d[0];
  if (Rule::kDirections < 2) return;
  sums.lane[kDirection2Sum][lane] += d[1] * d[1];
  sums.lane[kDirectionsDot][lane] += d[0] * d[1];
}

// By how much a weight moves along its directions.
template <int kDirections>
MS_OPTIM_FN float Moved(const Task &task, float d0, float d1) {
  return kDirections == 1 ? task.coefficient[0] * d0 : task.coefficient[0] * d0 + task.coefficient[1] * d1;
}

template <int kDirections>
MS_OPTIM_FN void MoveTile(const Task &task, int n, float (*d)[kTile], float *w) {
  const Task p = task;
  MS_OPTIM_IVDEP
  for (int i = 0; i < n; ++i) w[i] -= Moved<kDirections>(p, d[0][i], d[1][i]);
}

// What a loop over a tile does: new states from the gradient, sums, new weights.
enum RulePart : unsigned { kNewStates = 1, kSumUp = 2, kMoveWeights = 4 };

template <class Rule, unsigned kParts>
void RuleTile(const Rule &rule, const Task &task, int n, float *__restrict w, const float *__restrict g,
              float *const *s, float (*__restrict d)[kTile], TileSums &total) {
  const Rule r = rule;
  const Task p = task;
  TileSums sums = total;
  // The loop names its states, of which a rule has one to three: no loop over them would be vectorized.
  constexpr bool kSecond = Rule::kStates > 1, kThird = Rule::kStates > 2;
  float *__restrict s0 = s[0], *__restrict s1 = s[kSecond ? 1 : 0], *__restrict s2 = s[Rule::kStates - 1];
  float *__restrict d0 = d[0], *__restrict d1 = d[1];
  ForLanes(n, [&](int i, int lane) __attribute__((always_inline)) {
    float state[] = {s0[i], kSecond ? s1[i] : 0.0f, kThird ? s2[i] : 0.0f}, direction[kMaxDirections];
    RuleElement<Rule, (kParts & kNewStates) != 0, (kParts & kSumUp) != 0>(r, p, w[i], g[i], state, direction, lane,
                                                                          sums);
    if (kParts & kNewStates) {
      s0[i] = state[0];
      if (kSecond) s1[i] = state[1];
      if (kThird) s2[i] = state[2];
    }
    if (kParts & kMoveWeights) {
      w[i] -= Moved<Rule::kDirections>(p, direction[0], direction[1]);
    } else {
      d0[i] = direction[0];
      if (Rule::kDirections > 1) d1[i] = direction[1];
    }
  });
  total = sums;
}

// Prefetches what the loop reaches a tile later. Loops that convert states are too long for the processor to look ahead
// by itself: without this, it waited for a fifth of the time. Loops without conversion would only become slower.
// States have so many elements in a word.
template <int kInWord, class State0, class State1>
MS_OPTIM_FN void FetchAhead(const float *w, const float *g, const State0 *s0, const State1 *s1) {
  __builtin_prefetch(w + kTile, 1, 2);
  __builtin_prefetch(g + kTile, 0, 2);
  __builtin_prefetch(s0 + kTile / kInWord, 1, 2);
  __builtin_prefetch(s1 + kTile / kInWord, 1, 2);
}

// Runs the rule over a tile whose one or two states are bfloat16, and converts these in the same loop. It takes whole
// lanes, and returns how many elements these are.
template <class Rule>
int BFloat16Tile(const Rule &rule, const Task &task, const Tensor &t, int64_t begin, int n, const float *__restrict w,
                 const float *__restrict g, float *__restrict d, const uint32_t *__restrict noise, TileSums &total) {
  const Rule r = rule;
  const Task p = task;
  TileSums sums = total;
  constexpr bool kSecond = Rule::kStates > 1;
  auto *__restrict s0 = static_cast<uint16_t *>(t.state[0]) + begin;
  auto *__restrict s1 = static_cast<uint16_t *>(t.state[kSecond ? 1 : 0]) + begin;
  const int whole = n / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes) {
    FetchAhead<1>(w + i, g + i, s0 + i, s1 + i);
    int32_t bits0[kLanes], bits1[kLanes] = {};
    WidenShorts(s0 + i, bits0);
    if (kSecond) WidenShorts(s1 + i, bits1);
    MS_OPTIM_IVDEP
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint32_t random = noise[i + lane];
      float state[] = {FromBits(static_cast<uint32_t>(bits0[lane]) << 16),
                       FromBits(static_cast<uint32_t>(bits1[lane]) << 16), 0.0f};
      float direction[kMaxDirections];
      RuleElement<Rule, true, true>(r, p, w[i + lane], g[i + lane], state, direction, lane, sums);
      d[i + lane] = direction[0];
      bits0[lane] = static_cast<int32_t>(BFloat16WithNoise(state[0], NoiseFor(kFirstState, random)));
      if (kSecond) bits1[lane] = static_cast<int32_t>(BFloat16WithNoise(state[1], NoiseFor(kSecondState, random)));
    }
    NarrowToShorts(bits0, s0 + i);
    if (kSecond) NarrowToShorts(bits1, s1 + i);
  }
  total = sums;
  return whole;
}

template <int kBits>
using First = SignedCode<kBits, kFirstState>;
template <int kBits>
using Second = UnsignedCode<kBits, kSecondState>;

// A block of new states, one or two, that waits to be encoded.
template <bool kSecond>
struct PendingBlock {
  const float *state[2] = {};
  void *codes[2];
  int bits;
  float factor[2];
  const uint32_t *noise;
  uint32_t noise_above;

  template <int kBits>
  MS_OPTIM_FN void Encode(int i) const {
    const float *__restrict s0 = state[0] + i, *__restrict s1 = kSecond ? state[1] + i : nullptr;
    int32_t new0[kLanes], new1[kLanes];
    MS_OPTIM_IVDEP
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint32_t random = noise[i + lane] ^ noise_above;
      new0[lane] = First<kBits>::Encode(s0[lane], factor[0], random);
      if (kSecond) new1[lane] = Second<kBits>::Encode(s1[lane], factor[1], random);
    }
    constexpr int kInWord = Stored<kBits>::kInWord;
    NarrowCodes<First<kBits>>(new0, static_cast<typename First<kBits>::Type *>(codes[0]) + i / kInWord);
    if (kSecond) NarrowCodes<Second<kBits>>(new1, static_cast<typename Second<kBits>::Type *>(codes[1]) + i / kInWord);
  }

  template <int kBits>
  void EncodeAll() const {
    for (int i = 0; i < kCodeBlock; i += kLanes) Encode<kBits>(i);
  }

  void Finish() {
    if (state[0] == nullptr) return;
    if (bits == 4) EncodeAll<4>();
    if (bits == 8) EncodeAll<8>();
    state[0] = nullptr;
  }
};

// Runs the rule over a block of a tensor whose one or two states are codes. Encoding needs the largest element of the
// block, so a block is encoded while the rule runs over the next one: decoding and encoding hide behind the rule's root
// and division.
template <class Rule, int kBits, bool kPending>
void CodedBlock(const Rule &rule, const Task &task, const Tensor &t, int64_t begin, const float *__restrict w,
                const float *__restrict g, float *__restrict s0, float *__restrict s1, float *__restrict d,
                TileSums &total, PendingBlock<(Rule::kStates > 1)> &pending) {
  constexpr bool kSecond = Rule::kStates > 1;
  const Rule r = rule;
  const Task p = task;
  const PendingBlock<kSecond> last = pending;
  TileSums sums = total;
  const int64_t block = begin / kCodeBlock;
  constexpr int kInWord = Stored<kBits>::kInWord;
  auto *__restrict c0 = CodesOf<First<kBits>>(t, 0, begin);
  auto *__restrict c1 = CodesOf<Second<kBits>>(t, kSecond ? 1 : 0, begin);
  const float unit0 = t.scale[0][block] / First<kBits>::Largest();
  const float unit1 = kSecond ? t.scale[1][block] / Second<kBits>::Largest() : 0.0f;
  uint32_t largest0[kLanes] = {}, largest1[kLanes] = {};
  for (int i = 0; i < kCodeBlock; i += kLanes) {
    FetchAhead<kInWord>(w + i, g + i, c0 + i / kInWord, c1 + i / kInWord);
    int32_t code0[kLanes], code1[kLanes] = {};
    WidenCodes<First<kBits>>(c0 + i / kInWord, code0);
    if (kSecond) WidenCodes<Second<kBits>>(c1 + i / kInWord, code1);
    MS_OPTIM_IVDEP
    for (int lane = 0; lane < kLanes; ++lane) {
      float state[] = {First<kBits>::Decode(code0[lane]) * unit0, Second<kBits>::Decode(code1[lane]) * unit1, 0.0f};
      float direction[kMaxDirections];
      RuleElement<Rule, true, true>(r, p, w[i + lane], g[i + lane], state, direction, lane, sums);
      s0[i + lane] = state[0];
      if (kSecond) s1[i + lane] = state[1];
      d[i + lane] = direction[0];
      largest0[lane] = Max(largest0[lane], BitsOf(state[0]) & 0x7fffffffu);
      if (kSecond) largest1[lane] = Max(largest1[lane], BitsOf(state[1]));
    }
    if constexpr (kPending) last.template Encode<kBits>(i);
  }
  total = sums;
  const float scale0 = LargestOf(largest0), scale1 = LargestOf(largest1);
  t.scale[0][block] = scale0;
  if (kSecond) t.scale[1][block] = scale1;
  pending.state[0] = s0;
  pending.state[1] = s1;
  pending.codes[0] = c0;
  pending.codes[1] = c1;
  pending.bits = kBits;
  pending.factor[0] = scale0 > 1e-37f ? First<kBits>::Largest() / scale0 : 0.0f;
  pending.factor[1] = scale1 > 1e-37f ? Second<kBits>::Largest() / scale1 : 0.0f;
  pending.noise = noise_table.bits + begin % kNoises;
  pending.noise_above = task.noise.Above(begin);
}

// Computes new states, and the directions with their sums. A layer-wise rule must move along the directions whose norms
// it took: states of lower precision are stored and read back before the directions are computed.
template <class Rule>
void StatesAndDirections(const Rule &rule, const Tensor &t, const Task &task, int64_t begin, int n, float *w,
                         const float *g, const uint32_t *noise, float (*d)[kTile], Buffers &b, TileSums &sums) {
  float *s[Rule::kStates];
  for (int k = 0; k < Rule::kStates; ++k) s[k] = LoadState(t, k, begin, n, b.state[k]);
  const bool again = Rule::kLayerwise && task.low_states;
  if (again) {
    RuleTile<Rule, kNewStates>(rule, task, n, w, g, s, d, sums);
  } else {
    RuleTile<Rule, kNewStates | kSumUp>(rule, task, n, w, g, s, d, sums);
  }
  if (!task.low_states) return;
  for (int k = 0; k < Rule::kStates; ++k) StoreState(t, k, begin, n, s[k], noise);
  if (!again) return;
  for (int k = 0; k < Rule::kStates; ++k) s[k] = LoadState(t, k, begin, n, b.state[k]);
  RuleTile<Rule, kSumUp>(rule, task, n, w, g, s, d, sums);
}

void AddTileSums(const TileSums &sums, const float *g, const float *w, float (*d)[kTile], int n, int directions,
                 double *sum) {
  sum[kGradientSum] += ExactWhereLost(sums.Total(kGradientSum), g, n);
  sum[kWeightSum] += ExactWhereLost(sums.Total(kWeightSum), w, n);
  sum[kDirectionSum] += ExactWhereLost(sums.Total(kDirectionSum), d[0], n);
  if (directions < 2) return;
  sum[kDirection2Sum] += ExactWhereLost(sums.Total(kDirection2Sum), d[1], n);
  sum[kDirectionsDot] += sums.Total(kDirectionsDot);
}

// The moments stage of a chunk: new states, and the sums of weights and directions. If nothing waits for these sums,
// the weights move in the same pass (kMove).
template <class Rule, bool kMove>
void UpdateChunk(const Rule &rule, const Tensor &t, const Task &task, Chunk &chunk, Buffers &b) {
  constexpr int kBlock = static_cast<int>(kCodeBlock);
  double sum[kSums] = {};
  PendingBlock<(Rule::kStates > 1)> pending;
  ForTiles(t, task, chunk, b, [&](int64_t begin, int n, const float *g) {
    TileSums sums;
    float *w = LoadWeight(t, begin, n, b.weight);
    if (kMove && t.average != nullptr) FetchTile(t.average + begin, n);
    StartTile<Rule>(t, task, begin, n, w);
    int first = 0;
    if ((task.low_states && task.code_bits == 0) || (kMove && task.noisy_weight))
      FillNoise(task.noise, begin, n, b.noise);
    if constexpr (kMove && Rule::kStates <= 2 && Rule::kDirections == 1) {
      if (task.bfloat16_states) first = BFloat16Tile(rule, task, t, begin, n, w, g, b.direction[0], b.noise, sums);
      for (; task.code_bits != 0 && first + kBlock <= n; first += kBlock) {
        const auto of_8 = pending.state[0] == nullptr ? CodedBlock<Rule, 8, false> : CodedBlock<Rule, 8, true>;
        const auto of_4 = pending.state[0] == nullptr ? CodedBlock<Rule, 4, false> : CodedBlock<Rule, 4, true>;
        const auto block = task.code_bits == 8 ? of_8 : of_4;
        block(rule, task, t, begin + first, w + first, g + first, b.state[0] + first, b.state[1] + first,
              b.direction[0] + first, sums, pending);
      }
    }
    if (first < n) {
      pending.Finish();
      if (task.code_bits != 0) FillNoise(task.noise, begin, n, b.noise);
      auto *d = reinterpret_cast<float (*)[kTile]>(b.direction[0] + first);
      StatesAndDirections(rule, t, task, begin + first, n - first, w + first, g + first, b.noise + first, d, b, sums);
    }
    AddTileSums(sums, g, w, b.direction, n, Rule::kDirections, sum);
    if (kMove) {
      MoveTile<Rule::kDirections>(task, n, b.direction, w);
      StoreWeight(t, begin, n, w, task.noisy_weight ? b.noise : nullptr);
      AverageTile(t, task, begin, n, b.weight);
    }
  });
  pending.Finish();
  memcpy(chunk.sum, sum, sizeof(sum));
}

// The apply stage of a chunk, after its moments stage: new weights.
template <class Rule>
void MoveChunk(const Rule &rule, const Tensor &t, const Task &task, Chunk &chunk, Buffers &b) {
  ForTiles(t, task, chunk, b, [&](int64_t begin, int n, const float *g) {
    TileSums unused;
    float *w = LoadWeight(t, begin, n, b.weight), *s[Rule::kStates];
    if (t.average != nullptr) StartTile<ElementwiseRule>(t, task, begin, n, w);
    for (int k = 0; k < Rule::kStates; ++k) s[k] = LoadState(t, k, begin, n, b.state[k]);
    RuleTile<Rule, kMoveWeights>(rule, task, n, w, g, s, b.direction, unused);
    if (task.noisy_weight) FillNoise(task.noise, begin, n, b.noise);
    StoreWeight(t, begin, n, w, task.noisy_weight ? b.noise : nullptr);
    AverageTile(t, task, begin, n, b.weight);
  });
}

// ---- The step ---------------------------------------------------------------------------------------------------

struct alignas(64) Share {
  std::atomic<int64_t> taken{0};
};

// Before the first step, states are zeros that were never written, and have no memory yet: reading before writing would
// cost one more page fault for each page. Huge pages save the processor most look-ups of addresses. The system may
// ignore either.
inline void Populate(void *data, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = uintptr_t{1} << 21;
  const uintptr_t address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + kPage - 1) / kPage * kPage, end = (address + bytes) / kPage * kPage;
  if (end <= begin) return;
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, which older headers lack
  madvise(reinterpret_cast<void *>(begin), end - begin, MADV_HUGEPAGE);
  madvise(reinterpret_cast<void *>(begin), end - begin, kPopulateWrite);
#endif
}

// Data that two passes over a run of tensors share should still be in the cache the second time.
constexpr int64_t kCachedElements = int64_t{1} << 19;

// Chunks that one thread takes alone where other operators run meanwhile: 8 million elements.
constexpr int64_t kChunksAlone = 256;

// What an engine needs besides its rule: chunks, passes over them, sums and reports.
class StepEngine {
 public:
  explicit StepEngine(const Step &step) : step_(step) {}

 protected:
  bool Has(Stage stage) const { return (step_.stages & stage) != 0; }
  double *SumsOf(int i) const { return step_.sums + int64_t{i} * kSums; }
  int64_t LayoutOf(int i, Layout column) const { return ms_optim::LayoutOf(step_, i, column); }

  Status Begin(bool reads_sums) {
    // A GPU skips such a step, since its host cannot read the count.
    if (*step_.global_step < 0) return kNegativeStep;
    if (const Status status = CheckPlaces(reads_sums); status != kOk) return status;
    if (!CutChunks()) return kNoMemory;
    if (Has(kMomentsStage) && *step_.global_step == 0) PopulateStates();
    return kOk;
  }

  // Checks that all places exist that the layout names.
  Status CheckPlaces(bool reads_sums) const {
    if (reads_sums && step_.sums_rows != step_.rows) return kWrongSize;
    for (int i = 0; i < step_.count; ++i) {
      const int64_t row = LayoutOf(i, kRow), rate = LayoutOf(i, kRateIndex), decay = LayoutOf(i, kDecayIndex);
      if (row < 0 || row >= step_.rows || rate < 0 || decay < -1 || Max(rate, decay) >= step_.rate_count) {
        return kWrongSize;
      }
      const Tensor &t = step_.tensors[i];
      if (t.begin < t.end && t.rows > 0 && LayoutOf(i, kCentralized) != 0 && t.begin % (t.size / t.rows) != 0) {
        return kWrongSize;
      }
    }
    return kOk;
  }

  bool CutChunks() {
    tasks_.reset(new (std::nothrow) Task[static_cast<size_t>(step_.count)]);
    if (!tasks_) return false;
    int chunks = 0;
    for (int pass = 0; pass < 2; ++pass) {
      chunks = 0;
      for (int i = 0; i < step_.count; ++i) {
        const Tensor &t = step_.tensors[i];
        Task &task = tasks_[i];
        task = Task{};
        task.row = t.rows > 0 && LayoutOf(i, kCentralized) != 0 ? t.size / t.rows : 0;
        PrepareStorage(i);
        const int64_t length = task.row == 0 ? kChunk : task.row * RowsInChunk(task);
        task.first_chunk = chunks;
        for (int64_t begin = t.begin; begin < t.end; begin += length, ++chunks) {
          if (pass == 1) chunks_[chunks] = Chunk{i, begin, Min(t.end, begin + length), {}};
        }
        task.last_chunk = chunks;
      }
      if (pass == 0) chunks_.reset(new (std::nothrow) Chunk[static_cast<size_t>(chunks)]);
      if (!chunks_) return false;
    }
    memset(step_.sums, 0, static_cast<size_t>(step_.count) * kSums * sizeof(double));
    return true;
  }

  // A chunk of a centralized tensor has whole rows, no more than there is room for means; and whole blocks, if states
  // are codes.
  static int64_t RowsInChunk(const Task &task) {
    const int64_t rows = Max(1, Min(kTile, kChunk / Max(1, task.row)));
    const int64_t whole = task.low_states ? kCodeBlock / std::gcd(task.row, kCodeBlock) : 1;
    return Max(1, rows / whole) * whole;
  }

  void PrepareStorage(int i) {
    const Tensor &t = step_.tensors[i];
    Task &task = tasks_[i];
    const auto seed = static_cast<int64_t>(step_.constants[kSeed]);
    const int64_t now = *step_.global_step, row = LayoutOf(i, kRow);
    task.noisy_weight = NeedsNoise(t, step_.flags);
    task.noise = Noise(seed, now, row);
    for (int k = 0; k < kMaxStates; ++k) task.low_states |= t.state_type[k] != DType::kFloat32;
    const bool alone = t.state[1] == nullptr;
    task.bfloat16_states = t.state_type[0] == DType::kBFloat16 && (alone || t.state_type[1] == DType::kBFloat16);
    const int bits = CodeBits(t.state_type[0]);
    task.code_bits = alone || CodeBits(t.state_type[1]) == bits ? bits : 0;
  }

  void PopulateStates() {
#pragma omp parallel for schedule(dynamic) collapse(2)
    for (int i = 0; i < step_.count; ++i) {
      for (int k = 0; k < kMaxStates; ++k) {
        const Tensor &t = step_.tensors[i];
        if (t.begin == t.end || t.state[k] == nullptr || (k > 0 && t.matrix_rows > 0)) continue;
        const int64_t before = BytesOfState(t.state_type[k], t.begin);
        Populate(static_cast<char *>(t.state[k]) + before, BytesOfState(t.state_type[k], t.end) - before);
      }
    }
  }

  int64_t ElementsOf(int i) const { return step_.tensors[i].end - step_.tensors[i].begin; }

  int LastOfRun(int first, int64_t most) const {
    int64_t elements = ElementsOf(first);
    int last = first + 1;
    while (last < step_.count && elements + ElementsOf(last) <= most) {
      elements += ElementsOf(last++);
    }
    return last;
  }

  // Calls body for the chunks of tensors first to last. A second pass goes backwards: what the first touched last is
  // still in the cache. Every thread has a share of its own, the same in each pass, since it may have caches of its
  // own; a thread that is done helps the next.
  template <class Body>
  void ForChunks(int first, int last, bool backwards, Body body) {
    const int64_t begin = tasks_[first].first_chunk, count = tasks_[last - 1].last_chunk - begin;
    std::vector<Share> shares(static_cast<size_t>(omp_get_max_threads()));
    // Of one chunk, waking threads would take longer than the step. Threads wait for more work before they sleep, which
    // takes the processor from operators that run meanwhile.
    const int64_t alone = (step_.flags & kBeside) != 0 ? kChunksAlone : 1;
#pragma omp parallel if (count > alone)
    {
      const DenormalsAreZero in_this_thread;
      Buffers buffers;
      const int threads = omp_get_num_threads();
      for (int i = 0; i < threads; ++i) {
        const int owner = (omp_get_thread_num() + i) % threads;
        const int64_t from = begin + count * owner / threads, to = begin + count * (owner + 1) / threads;
        std::atomic<int64_t> &taken = shares[static_cast<size_t>(owner)].taken;
        for (int64_t k; (k = from + taken.fetch_add(1, std::memory_order_relaxed)) < to;) {
          Chunk &chunk = chunks_[backwards ? from + to - 1 - k : k];
          body(chunk, step_.tensors[chunk.tensor], tasks_[chunk.tensor], buffers);
        }
      }
    }
  }

  void SumGradients(int first, int last) {
    ForChunks(first, last, false,
              [](Chunk &chunk, const Tensor &t, const Task &task, Buffers &b) { GradientSum(t, task, chunk, b); });
    AddSums(first, last);
  }

  void AddSums(int first, int last) {
    for (int i = first; i < last; ++i) {
      double *sums = SumsOf(i);
      memset(sums, 0, kSums * sizeof(double));
      for (int k = tasks_[i].first_chunk; k < tasks_[i].last_chunk; ++k) {
        for (int s = 0; s < kSums; ++s) sums[s] += chunks_[k].sum[s];
      }
    }
  }

  void CopySums() {
    for (int i = 0; i < step_.count; ++i) {
      memcpy(SumsOf(i), step_.sums_in + LayoutOf(i, kRow) * kSums, kSums * sizeof(double));
    }
  }

  double TotalGradientSum() const {
    double total = 0.0;
    if (Has(kGradientStage)) {
      for (int i = 0; i < step_.count; ++i) total += SumsOf(i)[kGradientSum];
    } else {
      for (int64_t row = 0; row < step_.rows; ++row) total += step_.sums_in[row * kSums + kGradientSum];
    }
    return total;
  }

  // For a rule whose pass does not reach all weights: the averages start, or move towards the weights.
  void Averages(bool start) {
    if ((step_.flags & kAverages) == 0) return;
    ForChunks(0, step_.count, false, [start](Chunk &chunk, const Tensor &t, const Task &task, Buffers &b) {
      if (t.average == nullptr || (start && !task.starts)) return;
      for (int64_t begin = chunk.begin; begin < chunk.end; begin += kTile) {
        const int n = static_cast<int>(Min(kTile, chunk.end - begin));
        if (start)
          StartTile<ElementwiseRule>(t, task, begin, n, LoadWeight(t, begin, n, b.weight));
        else
          AverageTile(t, task, begin, n, b.weight);
      }
    });
  }

  void Report(int i, bool applied) const { ms_optim::Report(step_, i, tasks_[i], SumsOf(i), applied); }

  Status Skip() {
    for (int i = 0; i < step_.count; ++i) Report(i, false);
    if ((step_.flags & kReturned) != 0) ReturnMasters();
    return Commit(false);
  }

  void ReturnMasters() {
    ForChunks(0, step_.count, false, [](Chunk &chunk, const Tensor &t, const Task &, Buffers &) {
      if (t.master == nullptr) return;
      StoreTile(t.master + chunk.begin, t.weight_type, chunk.begin, static_cast<int>(chunk.end - chunk.begin),
                t.weight);
    });
  }

  Status Commit(bool applied) {
    if (Has(kCommitStage)) ms_optim::Commit(step_, applied);
    return kOk;
  }

  const Step &step_;
  std::unique_ptr<Task[]> tasks_;
  std::unique_ptr<Chunk[]> chunks_;
};

template <class Rule>
class Engine : StepEngine {
 public:
  explicit Engine(const Step &step)
      : StepEngine(step), rule_(step.constants + kRuleConstants, int64_t{*step.global_step} + 1, step.rule_flags) {}

  Status Run() {
    const bool gradients = Has(kGradientStage), moments = Has(kMomentsStage), apply = Has(kApplyStage);
    if (const Status status = Begin(!gradients); status != kOk) return status;
    // To bound the global norm, or to skip a whole step, all gradients must be read before anything moves.
    const bool global = step_.constants[kClipNorm] > 0.0 || (step_.flags & kSkipNonfinite) != 0;
    if (gradients && (global || !moments)) SumGradients(0, step_.count);
    if (!gradients) CopySums();
    if (step_.stages == kGradientStage) return kOk;
    const double total = gradients && !global ? 0.0 : TotalGradientSum();
    // A caller that knows of other gradients that are not finite passes NaN for the scale.
    if ((step_.flags & kSkipNonfinite) != 0 && !AreFinite(step_, total)) return Skip();
    clip_ = ClipFactor(step_, total);

    for (int first = 0, last = 0; first < step_.count; first = last) {
      last = Rule::kLayerwise ? LastOfRun(first, kCachedElements) : step_.count;
      if (Rule::kNormalizesGradient && gradients && !global) SumGradients(first, last);
      for (int i = first; i < last; ++i) Decide(i);
      if (moments) {
        const auto update = apply && !Rule::kLayerwise ? UpdateChunk<Rule, true> : UpdateChunk<Rule, false>;
        Pass(first, last, false, update);
        AddSums(first, last);
      }
      if (apply && (Rule::kLayerwise || !moments)) {
        for (int i = first; i < last; ++i) Decide(i);
        Pass(first, last, true, MoveChunk<Rule>);
      }
    }
    // A launch that only commits reports too: of tensors in parts, it alone has the sums of all parts.
    if (apply || !moments) {
      for (int i = 0; i < step_.count; ++i) Report(i, true);
    }
    return Commit(true);
  }

 private:
  template <class Body>
  void Pass(int first, int last, bool backwards, Body body) {
    ForChunks(first, last, backwards, [this, body](Chunk &chunk, const Tensor &t, const Task &task, Buffers &b) {
      body(rule_, t, task, chunk, b);
    });
  }

  // Decides from the sums known so far what the next pass uses.
  void Decide(int i) { ms_optim::Decide(rule_, step_, i, SumsOf(i), clip_, &tasks_[i]); }

  const Rule rule_;
  double clip_ = 1.0;
};

template <class Rule>
Status Run(const Step &step) {
  if constexpr (Rule::kDecayed > 0) {
    if (step.constants[kCautious] == 0.0) return Engine<NeverCautious<Rule>>(step).Run();
  }
  return Engine<Rule>(step).Run();
}

}  // namespace
}  // namespace ms_optim
