// Passes of a rule over a chunk of a tensor, tile by tile: gradients, new states with the sums that a step needs, new
// weights.
#pragma once

#include <cstring>

#include "rule_tiles.h"

namespace ms_optim {
namespace {

constexpr int64_t kChunk = 32 * kTile;

struct Chunk {
  int tensor;
  int64_t begin, end;
  double sum[kSums];
};

// The decisions of a step about a tensor, and how the tensor is stored.
struct Task : Decision {
  int64_t row;  // the elements of a row, if the gradient is centralized; else 0
  Noise noise;
  bool low_states;    // some state has fewer bits
  bool noisy_weight;  // weights are rounded with noise
  int first_chunk, last_chunk;
};

struct alignas(64) Buffers {
  float weight[kTile];
  float weight_before[kTile + kLanes];  // which a pass that moves the weights leaves for sums of squares
  float gradient[kTile];
  float state[kMaxStates][kTile];
  float direction[kMaxDirections][kTile];
  uint32_t noise[kTile];
  float row_mean[kTile], row_mean_rest[kTile];  // the mean is their sum
};

// Copies the weights, in a tensor's first step, to the average and to a state that starts as they do.
template <class Rule>
void StartTile(const Tensor &t, const Task &task, int64_t begin, int n, const float *w) {
  if (!task.starts) return;
  const size_t bytes = static_cast<size_t>(n) * sizeof(float);
  if (t.average != nullptr) memcpy(t.average + begin, w, bytes);
  if (Rule::kStartsAtWeights) memcpy(static_cast<float *>(t.state[0]) + begin, w, bytes);
}

// Prefetches memory that is read after the loop over a tile, while that loop runs.
MS_OPTIM_FN void FetchTile(const float *data, int n) {
  constexpr int kLine = 64 / static_cast<int>(sizeof(float));
  for (int i = 0; i < n; i += kLine) __builtin_prefetch(data + i, 1, 2);
}

// Moves the average towards the weights as they are stored. In this form, an average that equals them does not change.
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

template <int kDirections>
MS_OPTIM_FN void MoveTile(const Task &task, int n, float (*d)[kTile], float *w) {
  const Task p = task;
  MS_OPTIM_IVDEP
  for (int i = 0; i < n; ++i) w[i] -= Moved<kDirections>(p, d[0][i], d[1][i]);
}

// Prefetches what the loop reaches a tile later. A loop that converts states is too long for the processor to look
// ahead: without this, it waits for a fifth of the time. A loop without conversion becomes slower with it. A word of a
// state holds kInWord elements.
template <int kInWord = 1, class T>
MS_OPTIM_FN void FetchAhead(T *data) {
  __builtin_prefetch(data + kTile / kInWord, std::is_const<T>::value ? 0 : 1, 2);
}

// Runs the rule over a block of a tensor whose one or two states are of a format without scales, and converts these in
// the same loop.
template <class Rule, class Format>
void ConvertedBlock(const Rule &rule, const Task &task, const Tensor &t, int64_t begin, float *__restrict w,
                    const float *__restrict g, float *__restrict d, float *__restrict before, TileSums<Rule> &total) {
  typedef FirstCode<Format> First;
  typedef SecondCode<Format> Second;
  constexpr bool kSecond = Rule::kStates > 1;
  constexpr int kBlock = static_cast<int>(kCodeBlock), kInWord = First::kInWord;
  const Rule r = rule;
  const Task p = task;
  TileSums<Rule> sums = total;
  auto *__restrict c0 = CodesOf<First>(t, 0, begin);
  auto *__restrict c1 = CodesOf<Second>(t, kSecond ? 1 : 0, begin);
  const uint32_t *__restrict noise = noise_table.bits + begin % kNoises;
  const uint32_t noise_above = task.noise.Above(begin);
  for (int i = 0; i < kBlock; i += kLanes) {
    FetchAhead(w + i);
    FetchAhead(g + i);
    FetchAhead<kInWord>(c0 + i / kInWord);
    FetchAhead<kInWord>(c1 + i / kInWord);
    int32_t code0[kLanes], code1[kLanes] = {};
    WidenCodes<First>(c0 + i / kInWord, code0);
    if (kSecond) WidenCodes<Second>(c1 + i / kInWord, code1);
    MS_OPTIM_IVDEP
    for (int lane = 0; lane < kLanes; ++lane) {
      float state[] = {First::Decode(code0[lane], 1.0f), Second::Decode(code1[lane], 1.0f), 0.0f};
      float direction[kMaxDirections];
      AddGiven<Rule>(w[i + lane], g[i + lane], lane, sums);
      Advance<Rule, true>(r, p, w[i + lane], g[i + lane], state, direction);
      AddDirections<Rule>(direction, lane, sums);
      d[i + lane] = direction[0];
      before[i + lane] = w[i + lane];
      w[i + lane] -= Moved<1>(p, direction[0], 0.0f);
      const uint32_t random = noise[i + lane] ^ noise_above;
      code0[lane] = First::Encode(state[0], 1.0f, random);
      if (kSecond) code1[lane] = Second::Encode(state[1], 1.0f, random);
    }
    NarrowCodes<First>(code0, c0 + i / kInWord);
    if (kSecond) NarrowCodes<Second>(code1, c1 + i / kInWord);
  }
  total = sums;
}

// Runs the rule over a block of a tensor whose one or two states are of a format with scales. Encoding needs the
// largest element of the block, so a first loop makes the new states, and a second one encodes them. The directions are
// the second loop's: encoding takes the cycles in which they wait for their root and their division. Each loop
// prefetches half of what comes: all at once, the memory would be idle during the other loop. Inlined, the loops would
// share registers with their callers, and take up to a tenth longer.
template <class Rule, class Format>
[[gnu::noinline]] void CodedBlock(const Rule &rule, const Task &task, const Tensor &t, int64_t begin,
                                  float *__restrict w, const float *__restrict g, float *__restrict s0,
                                  float *__restrict s1, float *__restrict d, float *__restrict before,
                                  TileSums<Rule> &total) {
  typedef FirstCode<Format> First;
  typedef SecondCode<Format> Second;
  constexpr bool kSecond = Rule::kStates > 1;
  constexpr int kBlock = static_cast<int>(kCodeBlock), kInWord = First::kInWord;
  const Rule r = rule;
  const Task p = task;
  TileSums<Rule> sums = total;
  const int64_t block = begin / kCodeBlock;
  auto *__restrict c0 = CodesOf<First>(t, 0, begin);
  auto *__restrict c1 = CodesOf<Second>(t, kSecond ? 1 : 0, begin);
  const float unit0 = UnitOf<First>(t.scale[0][block]);
  const float unit1 = kSecond ? UnitOf<Second>(t.scale[1][block]) : 0.0f;
  uint32_t largest0[kLanes] = {}, largest1[kLanes] = {};
  for (int i = 0; i < kBlock; i += kLanes) {
    FetchAhead(w + i);
    FetchAhead<kInWord>(c0 + i / kInWord);
    int32_t code0[kLanes], code1[kLanes] = {};
    WidenCodes<First>(c0 + i / kInWord, code0);
    if (kSecond) WidenCodes<Second>(c1 + i / kInWord, code1);
    MS_OPTIM_IVDEP
    for (int lane = 0; lane < kLanes; ++lane) {
      float state[] = {First::Decode(code0[lane], unit0), Second::Decode(code1[lane], unit1), 0.0f};
      float direction[kMaxDirections];
      Advance<Rule, true>(r, p, w[i + lane], g[i + lane], state, direction);
      s0[i + lane] = state[0];
      if (kSecond) s1[i + lane] = state[1];
      if (Rule::kDirectsFirst) d[i + lane] = direction[0];
      largest0[lane] = Max(largest0[lane], BitsOf(state[0]) & 0x7fffffffu);
      if (kSecond) largest1[lane] = Max(largest1[lane], BitsOf(state[1]));
    }
  }
  const float scale0 = LargestOf(largest0), scale1 = LargestOf(largest1);
  t.scale[0][block] = scale0;
  if (kSecond) t.scale[1][block] = scale1;
  const float factor0 = FactorOf<First>(scale0), factor1 = FactorOf<Second>(scale1);
  const uint32_t *__restrict noise = noise_table.bits + begin % kNoises;
  const uint32_t noise_above = task.noise.Above(begin);
  for (int i = 0; i < kBlock; i += kLanes) {
    FetchAhead(g + i);
    FetchAhead<kInWord>(c1 + i / kInWord);
    int32_t code0[kLanes], code1[kLanes];
    MS_OPTIM_IVDEP
    for (int lane = 0; lane < kLanes; ++lane) {
      float state[] = {s0[i + lane], kSecond ? s1[i + lane] : 0.0f, 0.0f}, direction[] = {d[i + lane], 0.0f};
      AddGiven<Rule>(w[i + lane], g[i + lane], lane, sums);
      if (!Rule::kDirectsFirst) Advance<Rule, false>(r, p, w[i + lane], g[i + lane], state, direction);
      AddDirections<Rule>(direction, lane, sums);
      before[i + lane] = w[i + lane];
      w[i + lane] -= Moved<1>(p, direction[0], 0.0f);
      const uint32_t random = noise[i + lane] ^ noise_above;
      code0[lane] = First::Encode(state[0], factor0, random);
      if (kSecond) code1[lane] = Second::Encode(state[1], factor1, random);
    }
    NarrowCodes<First>(code0, c0 + i / kInWord);
    if (kSecond) NarrowCodes<Second>(code1, c1 + i / kInWord);
  }
  total = sums;
}

// Whether the loops over a block serve a rule. A state that starts as the weights is float32.
template <class Rule>
constexpr bool kHasCodedBlocks = Rule::kStates <= 2 && Rule::kDirections == 1 && !Rule::kStartsAtWeights;

// Tells whether the states of a tensor are of a format.
template <class Rule, class Format>
MS_OPTIM_FN bool AreOf(const Tensor &t) {
  return t.state_type[0] == Format::kSigned && (Rule::kStates < 2 || t.state_type[1] == Format::kUnsigned);
}

// Runs the rule over the whole blocks at the beginning of a tile if its loops can convert the states, and returns the
// number of their elements.
template <class Rule>
int CodedBlocks(const Rule &rule, const Task &task, const Tensor &t, int64_t begin, int n, float *w, const float *g,
                Buffers &b, TileSums<Rule> &sums) {
  constexpr int kBlock = static_cast<int>(kCodeBlock);
  int first = 0;
  const auto of = [&](auto format) __attribute__((always_inline)) {
    typedef decltype(format) Format;
    if constexpr (FirstCode<Format>::kIsConverted) {
      if (!AreOf<Rule, Format>(t)) return;
      for (; first + kBlock <= n; first += kBlock) {
        float *d = b.direction[0] + first, *before = b.weight_before + first;
        if constexpr (FirstCode<Format>::kHasScales) {
          CodedBlock<Rule, Format>(rule, task, t, begin + first, w + first, g + first, b.state[0] + first,
                                   b.state[1] + first, d, before, sums);
        } else {
          ConvertedBlock<Rule, Format>(rule, task, t, begin + first, w + first, g + first, d, before, sums);
        }
      }
    }
  };
#define MS_OPTIM_ROW(Format) of(Format{});
  MS_OPTIM_FORMATS(MS_OPTIM_ROW)
#undef MS_OPTIM_ROW
  return first;
}

// Computes new states, to which s then points, and the sums of the directions, and does what kMore says besides. A
// layer-wise rule must move along the directions whose norms it took: states of lower precision are stored and read
// back before the directions are computed. They get rows of `room`.
template <class Rule, unsigned kMore>
void StatesAndDirections(const Rule &rule, const Tensor &t, const Task &task, int64_t begin, int n, float *w,
                         const float *g, const uint32_t *noise, float **s, float (*d)[kTile], float *before,
                         float (*room)[kTile], TileSums<Rule> &sums) {
  static_assert((kMore & kMoveWeights) == 0 || !Rule::kLayerwise, "a layer-wise rule moves in a pass of its own");
  for (int k = 0; k < Rule::kStates; ++k) s[k] = LoadState(t, k, begin, n, room[k]);
  const bool again = Rule::kLayerwise && task.low_states;
  if (again) {
    RuleTile<Rule, kNewStates | kMore>(rule, task, n, w, g, s, d, before, sums);
  } else {
    RuleTile<Rule, kNewStates | kSumUp | kMore>(rule, task, n, w, g, s, d, before, sums);
  }
  if (!task.low_states) return;
  for (int k = 0; k < Rule::kStates; ++k) StoreState(t, k, begin, n, s[k], noise);
  if (!again) return;
  for (int k = 0; k < Rule::kStates; ++k) s[k] = LoadState(t, k, begin, n, room[k]);
  RuleTile<Rule, kSumUp | kMore>(rule, task, n, w, g, s, d, before, sums);
}

// Makes the directions of a tile once more from its new states. Inlined, this would take registers from other loops.
template <class Rule>
[[gnu::noinline]] void DirectAgain(const Rule &rule, const Task &task, int n, float *w, const float *g, float *const *s,
                                   float (*d)[kTile]) {
  TileSums<Rule> unused;
  RuleTile<Rule, 0>(rule, task, n, w, g, s, d, nullptr, unused);
}

// Adds the sums of a tile, whose lane 0 is at place `first`, to those of its chunk. directions() returns the rows of
// directions, if they are needed.
template <class Rule, class Directions>
void AddTileSums(const TileSums<Rule> &sums, int first, const float *g, const float *w, int n, double *sum,
                 Directions directions) {
  const auto of_directions = [&](enum Sum which, int k) __attribute__((always_inline)) {
    const double total = sums.Total(which, first);
    return IsExact(total) ? total : ExactSumSquares(directions()[k], n);
  };
  sum[kGradientSum] += ExactWhereLost(sums.Total(kGradientSum, first), g, n);
  sum[kWeightSum] += ExactWhereLost(sums.Total(kWeightSum, first), w, n);
  sum[kDirectionSum] += of_directions(kDirectionSum, 0);
  if constexpr (Rule::kDirections > 1) {
    sum[kDirection2Sum] += of_directions(kDirection2Sum, 1);
    sum[kDirectionsDot] += sums.Total(kDirectionsDot, first);
  }
}

// Whether a chunk has the whole memory of its rule as float32, and nothing to convert.
template <class Rule>
MS_OPTIM_FN bool IsFloat32(const Tensor &t, const Task &task) {
  // Directions that are kept reach into the next tile.
  constexpr bool kHasRoom = Rule::kDirections == 1 || kDirectsAgain<Rule>;
  return kHasRoom && t.weight_type == DType::kFloat32 && t.gradient_type == DType::kFloat32 && !task.low_states &&
         task.row == 0;
}

// The memory of a chunk that is float32.
template <class Rule>
struct Float32Chunk {
  int n;
  float *w, *s[Rule::kStates];
  const float *g;
  int ahead;  // the elements before the first cache line, if it begins at the same element of each tensor; else 0

  MS_OPTIM_FN Float32Chunk(const Tensor &t, const Chunk &chunk)
      : n(static_cast<int>(chunk.end - chunk.begin)),
        w(static_cast<float *>(t.weight) + chunk.begin),
        g(static_cast<const float *>(t.gradient) + chunk.begin) {
    const auto place = [](const float *x) { return reinterpret_cast<uintptr_t>(x) / sizeof(float) % kLine; };
    bool alike = place(g) == place(w);
    for (int k = 0; k < Rule::kStates; ++k) {
      s[k] = static_cast<float *>(t.state[k]) + chunk.begin;
      alike &= place(s[k]) == place(w);
    }
    ahead = alike && place(w) != 0 ? kLine - static_cast<int>(place(w)) : 0;
    if (ahead > n) ahead = 0;
  }

  // The elements by which a buffer begins behind a cache line, so that its lines are those of the tensors.
  int Behind() const { return ahead > 0 ? kLine - ahead : 0; }
};

// Does what UpdateChunk does where all is float32.
template <class Rule, bool kMove>
void UpdateFloat32(const Rule &rule, const Tensor &t, const Task &task, Chunk &chunk, Buffers &b) {
  const Float32Chunk<Rule> c(t, chunk);
  double sum[kSums] = {};
  float *const before = b.weight_before + c.Behind();
  auto *const d = reinterpret_cast<float (*)[kTile]>(b.direction[0] + (kDirectsAgain<Rule> ? 0 : c.Behind()));
  StartTile<Rule>(t, task, chunk.begin, c.n, c.w);
  if (kMove && t.average != nullptr) FetchTile(t.average + chunk.begin, Min(kTile, c.n));
  constexpr unsigned kMore = (kMove ? kMoveWeights : 0u) | (kDirectsAgain<Rule> ? kDropDirections : 0u);
  const auto done = [&](int tile, int end, const TileSums<Rule> &sums) {
    const int n = end - tile;
    float *const w = kMove ? before : c.w + tile;
    AddTileSums(sums, c.Behind(), c.g + tile, w, n, sum, [&] {
      if constexpr (kDirectsAgain<Rule>) {
        float *s[Rule::kStates];
        for (int k = 0; k < Rule::kStates; ++k) s[k] = c.s[k] + tile;
        DirectAgain(rule, task, n, w, c.g + tile, s, d);
      }
      return d;
    });
    if (!kMove || t.average == nullptr) return;
    if (end < c.n) FetchTile(t.average + chunk.begin + end, Min(kTile, c.n - end));
    AverageTile(t, task, chunk.begin + tile, n, b.weight);
  };
  RuleTiles<Rule, kNewStates | kSumUp | kMore>(rule, task, c.ahead, c.n, c.w, c.g, c.s, d, before, done);
  memcpy(chunk.sum, sum, sizeof(sum));
}

// The moments stage of a chunk: new states, and the sums of weights and directions. Where nothing waits for these sums,
// the weights move in the same pass (kMove).
template <class Rule, bool kMove>
void UpdateChunk(const Rule &rule, const Tensor &t, const Task &task, Chunk &chunk, Buffers &b) {
  if (IsFloat32<Rule>(t, task)) return UpdateFloat32<Rule, kMove>(rule, t, task, chunk, b);
  double sum[kSums] = {};
  const bool noisy_weight = kMove && task.noisy_weight;
  ForTiles(t, task, chunk, b, [&](int64_t begin, int n, const float *g) {
    TileSums<Rule> sums;
    float *w = LoadWeight(t, begin, n, b.weight);
    if (kMove && t.average != nullptr) FetchTile(t.average + begin, n);
    StartTile<Rule>(t, task, begin, n, w);
    if (noisy_weight) FillNoise(task.noise, begin, n, b.noise);
    float *s[Rule::kStates], *before = kMove ? b.weight_before : w;
    int first = 0;
    if constexpr (kMove && kHasCodedBlocks<Rule>) first = CodedBlocks(rule, task, t, begin, n, w, g, b, sums);
    // The directions are rows of kTile elements. A pointer to such rows that begins at the column `first` gives each
    // row from this column on: d[k][i] is b.direction[k][first + i].
    auto *d = reinterpret_cast<float (*)[kTile]>(b.direction[0] + first);
    auto *room = reinterpret_cast<float (*)[kTile]>(b.state[0] + first);
    if (first < n) {
      if (task.low_states && !noisy_weight) FillNoise(task.noise, begin + first, n - first, b.noise + first);
      constexpr unsigned kMore = (kMove ? kMoveWeights : 0u) | (kDirectsAgain<Rule> ? kDropDirections : 0u);
      StatesAndDirections<Rule, kMore>(rule, t, task, begin + first, n - first, w + first, g + first, b.noise + first,
                                       s, d, before + first, room, sums);
    }
    AddTileSums(sums, 0, g, before, n, sum, [&] {
      if constexpr (kDirectsAgain<Rule>) {
        // Blocks with scales have left their new states in the buffers.
        float *of_blocks[] = {b.state[0], b.state[1], b.state[2]};
        if (first > 0 && t.scale[0] != nullptr) DirectAgain(rule, task, first, before, g, of_blocks, b.direction);
        if (first < n) DirectAgain(rule, task, n - first, before + first, g + first, s, d);
      }
      return b.direction;
    });
    if (kMove) {
      StoreWeight(t, begin, n, w, noisy_weight ? b.noise : nullptr);
      AverageTile(t, task, begin, n, b.weight);
    }
  });
  memcpy(chunk.sum, sum, sizeof(sum));
}

// Does what MoveChunk does where all is float32.
template <class Rule>
void MoveFloat32(const Rule &rule, const Tensor &t, const Task &task, Chunk &chunk, Buffers &b) {
  const Float32Chunk<Rule> c(t, chunk);
  StartTile<ElementwiseRule>(t, task, chunk.begin, c.n, c.w);
  RuleTiles<Rule, kMoveWeights>(rule, task, c.ahead, c.n, c.w, c.g, c.s, b.direction, nullptr,
                                [&](int tile, int end, const TileSums<Rule> &) {
                                  AverageTile(t, task, chunk.begin + tile, end - tile, b.weight);
                                });
}

// The apply stage of a chunk, after its moments stage: new weights.
template <class Rule>
void MoveChunk(const Rule &rule, const Tensor &t, const Task &task, Chunk &chunk, Buffers &b) {
  if (IsFloat32<Rule>(t, task)) return MoveFloat32<Rule>(rule, t, task, chunk, b);
  ForTiles(t, task, chunk, b, [&](int64_t begin, int n, const float *g) {
    TileSums<Rule> unused;
    float *w = LoadWeight(t, begin, n, b.weight), *s[Rule::kStates];
    if (t.average != nullptr) StartTile<ElementwiseRule>(t, task, begin, n, w);
    for (int k = 0; k < Rule::kStates; ++k) s[k] = LoadState(t, k, begin, n, b.state[k]);
    RuleTile<Rule, kMoveWeights>(rule, task, n, w, g, s, b.direction, nullptr, unused);
    if (task.noisy_weight) FillNoise(task.noise, begin, n, b.noise);
    StoreWeight(t, begin, n, w, task.noisy_weight ? b.noise : nullptr);
    AverageTile(t, task, begin, n, b.weight);
  });
}

}  // namespace
}  // namespace ms_optim
