// Passes of a rule over a chunk of a tensor, tile by tile: gradients, new states with the sums that a step needs, new
// weights.
#pragma once

#include <cstring>

#include "decision.h"
#include "storage.h"

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

// The elements of a tile whose states are float32 numbers. The weights move in a loop of their own, which leaves the
// memory idle. Where tiles are short, the processor reads the next one meanwhile. Where states are converted, the start
// of a loop takes longer than that gains.
constexpr int kWholeTile = kTile / 2;

// Calls body(begin, n, centralized gradient) for each tile of the chunk.
template <class Body>
void ForTiles(const Tensor &t, const Task &task, const Chunk &chunk, Buffers &b, Body body) {
  if (task.row != 0) RowMeans(t, task, chunk, b);
  const int64_t tile = task.low_states ? kTile : kWholeTile;
  for (int64_t begin = chunk.begin; begin < chunk.end; begin += tile) {
    const int n = static_cast<int>(Min(tile, chunk.end - begin));
    body(begin, n, LoadGradient(t, task, chunk, begin, n, b));
  }
}

void GradientSum(const Tensor &t, const Task &task, Chunk &chunk, Buffers &b) {
  double sum = 0.0;
  ForTiles(t, task, chunk, b, [&](int64_t, int n, const float *g) { sum += SumSquares(g, n); });
  chunk.sum[kGradientSum] = sum;
}

// ---- The rule, over one tile -----------------------------------------------------------------------------------

// Sums of a tile, in lanes. The loop of the rule adds them up: a loop of their own would take as long as the rule.
template <class Rule>
struct TileSums {
  static constexpr int kCount = Rule::kDirections < 2 ? kDirectionSum + 1 : kSums;
  alignas(64) float lane[kCount][kLanes] = {};

  MS_OPTIM_FN double Total(enum Sum sum) const { return SumOfLanes(lane[sum]); }
};

template <class Rule, bool kUpdateStates, bool kSum>
MS_OPTIM_FN void RuleElement(const Rule &rule, const Task &task, float w, float g, float *s, float *d, int lane,
                             TileSums<Rule> &sums) {
  Advance<Rule, kUpdateStates>(rule, task, w, g, s, d);
  if (!kSum) return;
  sums.lane[kGradientSum][lane] += g * g;
  sums.lane[kWeightSum][lane] += w * w;
  sums.lane[kDirectionSum][lane] += d[0] * d[0];
  if constexpr (Rule::kDirections > 1) {
    sums.lane[kDirection2Sum][lane] += d[1] * d[1];
    sums.lane[kDirectionsDot][lane] += d[0] * d[1];
  }
}

// Returns the move of a weight along its directions.
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

// The work of a loop over a tile: it makes new states from the gradient, adds up sums, and moves weights.
enum RulePart : unsigned { kNewStates = 1, kSumUp = 2, kMoveWeights = 4 };

template <class Rule, unsigned kParts>
void RuleTile(const Rule &rule, const Task &task, int n, float *__restrict w, const float *__restrict g,
              float *const *s, float (*__restrict d)[kTile], TileSums<Rule> &total) {
  const Rule r = rule;
  const Task p = task;
  TileSums<Rule> sums = total;
  // A rule has one to three states, and the loop names each: compilers do not vectorize a loop over them. A pointer to
  // a state that the rule lacks is a copy of another pointer, against the promise of __restrict, but the constants
  // kSecond and kThird keep the loop from using it.
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

// Prefetches the memory that the loop reaches a tile later. A loop that converts states is too long for the processor
// to look ahead: without this, it waits for a fifth of the time. A loop without conversion becomes slower with it. A
// word of a state holds kInWord elements.
template <int kInWord, class State0, class State1>
MS_OPTIM_FN void FetchAhead(const float *w, const float *g, const State0 *s0, const State1 *s1) {
  __builtin_prefetch(w + kTile, 1, 2);
  __builtin_prefetch(g + kTile, 0, 2);
  __builtin_prefetch(s0 + kTile / kInWord, 1, 2);
  __builtin_prefetch(s1 + kTile / kInWord, 1, 2);
}

// Runs the rule over a tile whose one or two states are of a format without scales, and converts these in the same
// loop. It takes whole lanes, and returns the number of their elements.
template <class Rule, class Format>
int ConvertedTile(const Rule &rule, const Task &task, const Tensor &t, int64_t begin, int n, const float *__restrict w,
                  const float *__restrict g, float *__restrict d, const uint32_t *__restrict noise,
                  TileSums<Rule> &total) {
  typedef FirstCode<Format> First;
  typedef SecondCode<Format> Second;
  const Rule r = rule;
  const Task p = task;
  TileSums<Rule> sums = total;
  constexpr bool kSecond = Rule::kStates > 1;
  constexpr int kInWord = First::kInWord;
  auto *__restrict c0 = CodesOf<First>(t, 0, begin);
  auto *__restrict c1 = CodesOf<Second>(t, kSecond ? 1 : 0, begin);
  const int whole = n / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes) {
    FetchAhead<kInWord>(w + i, g + i, c0 + i / kInWord, c1 + i / kInWord);
    int32_t code0[kLanes], code1[kLanes] = {};
    WidenCodes<First>(c0 + i / kInWord, code0);
    if (kSecond) WidenCodes<Second>(c1 + i / kInWord, code1);
    MS_OPTIM_IVDEP
    for (int lane = 0; lane < kLanes; ++lane) {
      float state[] = {First::Decode(code0[lane], 1.0f), Second::Decode(code1[lane], 1.0f), 0.0f};
      float direction[kMaxDirections];
      RuleElement<Rule, true, true>(r, p, w[i + lane], g[i + lane], state, direction, lane, sums);
      d[i + lane] = direction[0];
      code0[lane] = First::Encode(state[0], 1.0f, noise[i + lane]);
      if (kSecond) code1[lane] = Second::Encode(state[1], 1.0f, noise[i + lane]);
    }
    NarrowCodes<First>(code0, c0 + i / kInWord);
    if (kSecond) NarrowCodes<Second>(code1, c1 + i / kInWord);
  }
  total = sums;
  return whole;
}

// Whether the loop over a block encodes the block before it. Where vectors are short and registers few, such a loop
// loads its constants again and again, which takes longer than it gains.
constexpr bool kOverlapsBlocks = kVectorBytes == 64;

// A block of new states, one or two, that waits to be encoded: its scale is known only when the rule has run over all
// of it. The loop over a block therefore encodes the block before it:
//
//   loop over   block 0 | block 1  | block 2  | Finish()
//   rule          0     |    1     |    2     |
//   encode              |    0     |    1     |    2
template <bool kSecond>
struct PendingBlock {
  const float *state[2] = {};
  void *codes[2];
  float factor[2];
  const uint32_t *noise;
  uint32_t noise_above;
  void (*encode_all)(const PendingBlock &);

  template <class Format>
  MS_OPTIM_FN void Encode(int i) const {
    typedef FirstCode<Format> First;
    typedef SecondCode<Format> Second;
    const float *__restrict s0 = state[0] + i, *__restrict s1 = kSecond ? state[1] + i : nullptr;
    int32_t new0[kLanes], new1[kLanes];
    MS_OPTIM_IVDEP
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint32_t random = noise[i + lane] ^ noise_above;
      new0[lane] = First::Encode(s0[lane], factor[0], random);
      if (kSecond) new1[lane] = Second::Encode(s1[lane], factor[1], random);
    }
    NarrowCodes<First>(new0, static_cast<typename First::Type *>(codes[0]) + i / First::kInWord);
    if (kSecond) NarrowCodes<Second>(new1, static_cast<typename Second::Type *>(codes[1]) + i / Second::kInWord);
  }

  template <class Format>
  static void EncodeAll(const PendingBlock &block) {
    for (int i = 0; i < kCodeBlock; i += kLanes) block.Encode<Format>(i);
  }

  void Finish() {
    if (state[0] == nullptr) return;
    encode_all(*this);
    state[0] = nullptr;
  }
};

// Runs the rule over a block of a tensor whose one or two states are of a format with scales. Encoding needs the
// largest element of the block, so a block is encoded while the rule runs over the next one: decoding and encoding then
// take the cycles in which the rule waits for its root and its division.
template <class Rule, class Format, bool kPending>
void CodedBlock(const Rule &rule, const Task &task, const Tensor &t, int64_t begin, const float *__restrict w,
                const float *__restrict g, float *__restrict s0, float *__restrict s1, float *__restrict d,
                TileSums<Rule> &total, PendingBlock<(Rule::kStates > 1)> &pending) {
  typedef FirstCode<Format> First;
  typedef SecondCode<Format> Second;
  constexpr bool kSecond = Rule::kStates > 1;
  const Rule r = rule;
  const Task p = task;
  const PendingBlock<kSecond> last = pending;
  TileSums<Rule> sums = total;
  const int64_t block = begin / kCodeBlock;
  constexpr int kInWord = First::kInWord;
  auto *__restrict c0 = CodesOf<First>(t, 0, begin);
  auto *__restrict c1 = CodesOf<Second>(t, kSecond ? 1 : 0, begin);
  const float unit0 = UnitOf<First>(t.scale[0][block]);
  const float unit1 = kSecond ? UnitOf<Second>(t.scale[1][block]) : 0.0f;
  uint32_t largest0[kLanes] = {}, largest1[kLanes] = {};
  for (int i = 0; i < kCodeBlock; i += kLanes) {
    FetchAhead<kInWord>(w + i, g + i, c0 + i / kInWord, c1 + i / kInWord);
    int32_t code0[kLanes], code1[kLanes] = {};
    WidenCodes<First>(c0 + i / kInWord, code0);
    if (kSecond) WidenCodes<Second>(c1 + i / kInWord, code1);
    MS_OPTIM_IVDEP
    for (int lane = 0; lane < kLanes; ++lane) {
      float state[] = {First::Decode(code0[lane], unit0), Second::Decode(code1[lane], unit1), 0.0f};
      float direction[kMaxDirections];
      RuleElement<Rule, true, true>(r, p, w[i + lane], g[i + lane], state, direction, lane, sums);
      s0[i + lane] = state[0];
      if (kSecond) s1[i + lane] = state[1];
      d[i + lane] = direction[0];
      largest0[lane] = Max(largest0[lane], BitsOf(state[0]) & 0x7fffffffu);
      if (kSecond) largest1[lane] = Max(largest1[lane], BitsOf(state[1]));
    }
    if constexpr (kPending) last.template Encode<Format>(i);
  }
  total = sums;
  const float scale0 = LargestOf(largest0), scale1 = LargestOf(largest1);
  t.scale[0][block] = scale0;
  if (kSecond) t.scale[1][block] = scale1;
  pending.state[0] = s0;
  pending.state[1] = s1;
  pending.codes[0] = c0;
  pending.codes[1] = c1;
  pending.encode_all = PendingBlock<kSecond>::template EncodeAll<Format>;
  pending.factor[0] = FactorOf<First>(scale0);
  pending.factor[1] = FactorOf<Second>(scale1);
  pending.noise = noise_table.bits + begin % kNoises;
  pending.noise_above = task.noise.Above(begin);
  if (!kOverlapsBlocks) pending.Finish();
}

// Tells whether the loop of a rule converts the states of a tensor: it does if there are one or two, of the format.
template <class Rule, class Format>
MS_OPTIM_FN bool IsFused(const Tensor &t) {
  if (Rule::kStates > 2 || Rule::kDirections > 1 || !FirstCode<Format>::kIsConverted) return false;
  return t.state_type[0] == Format::kSigned && (Rule::kStates < 2 || t.state_type[1] == Format::kUnsigned);
}

// Tells whether such a loop takes its noise from the table, which it does where it takes whole blocks.
template <class Rule>
MS_OPTIM_FN bool IsFusedWithScales(const Tensor &t) {
#define MS_OPTIM_ROW(Format) \
  if (IsFused<Rule, Format>(t)) return FirstCode<Format>::kHasScales;
  MS_OPTIM_FORMATS(MS_OPTIM_ROW)
#undef MS_OPTIM_ROW
  return false;
}

// Runs the rule over the first elements of a tile, as many as its loop can convert, and returns their number.
template <class Rule, class Format>
MS_OPTIM_FN int FusedTile(const Rule &rule, const Task &task, const Tensor &t, int64_t begin, int n, const float *w,
                          const float *g, Buffers &b, TileSums<Rule> &sums,
                          PendingBlock<(Rule::kStates > 1)> &pending) {
  if constexpr (FirstCode<Format>::kHasScales) {
    constexpr int kBlock = static_cast<int>(kCodeBlock);
    int first = 0;
    for (; first + kBlock <= n; first += kBlock) {
      const auto block = pending.state[0] == nullptr ? CodedBlock<Rule, Format, false> : CodedBlock<Rule, Format, true>;
      block(rule, task, t, begin + first, w + first, g + first, b.state[0] + first, b.state[1] + first,
            b.direction[0] + first, sums, pending);
    }
    return first;
  } else {
    return ConvertedTile<Rule, Format>(rule, task, t, begin, n, w, g, b.direction[0], b.noise, sums);
  }
}

// Computes new states, and the directions with their sums. A layer-wise rule must move along the directions whose norms
// it took: states of lower precision are stored and read back before the directions are computed.
template <class Rule>
void StatesAndDirections(const Rule &rule, const Tensor &t, const Task &task, int64_t begin, int n, float *w,
                         const float *g, const uint32_t *noise, float (*d)[kTile], Buffers &b, TileSums<Rule> &sums) {
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

template <class Rule>
void AddTileSums(const TileSums<Rule> &sums, const float *g, const float *w, float (*d)[kTile], int n, double *sum) {
  sum[kGradientSum] += ExactWhereLost(sums.Total(kGradientSum), g, n);
  sum[kWeightSum] += ExactWhereLost(sums.Total(kWeightSum), w, n);
  sum[kDirectionSum] += ExactWhereLost(sums.Total(kDirectionSum), d[0], n);
  if constexpr (Rule::kDirections > 1) {
    sum[kDirection2Sum] += ExactWhereLost(sums.Total(kDirection2Sum), d[1], n);
    sum[kDirectionsDot] += sums.Total(kDirectionsDot);
  }
}

// The moments stage of a chunk: new states, and the sums of weights and directions. Where nothing waits for these sums,
// the weights move in the same pass (kMove).
template <class Rule, bool kMove>
void UpdateChunk(const Rule &rule, const Tensor &t, const Task &task, Chunk &chunk, Buffers &b) {
  double sum[kSums] = {};
  PendingBlock<(Rule::kStates > 1)> pending;
  const bool from_table = kMove && IsFusedWithScales<Rule>(t);
  const bool has_noise = (task.low_states && !from_table) || (kMove && task.noisy_weight);
  ForTiles(t, task, chunk, b, [&](int64_t begin, int n, const float *g) {
    TileSums<Rule> sums;
    float *w = LoadWeight(t, begin, n, b.weight);
    if (kMove && t.average != nullptr) FetchTile(t.average + begin, n);
    StartTile<Rule>(t, task, begin, n, w);
    if (has_noise) FillNoise(task.noise, begin, n, b.noise);
    int first = 0;
    if constexpr (kMove && Rule::kStates <= 2 && Rule::kDirections == 1) {
#define MS_OPTIM_ROW(Format)                                                                                        \
  if constexpr (FirstCode<Format>::kIsConverted) {                                                                  \
    if (IsFused<Rule, Format>(t)) first = FusedTile<Rule, Format>(rule, task, t, begin, n, w, g, b, sums, pending); \
  }
      MS_OPTIM_FORMATS(MS_OPTIM_ROW)
#undef MS_OPTIM_ROW
    }
    if (first < n) {
      pending.Finish();
      if (task.low_states && !has_noise) FillNoise(task.noise, begin, n, b.noise);
      // The directions are rows of kTile elements. A pointer to such rows that begins at the column `first` gives each
      // row from this column on: d[k][i] is b.direction[k][first + i].
      auto *d = reinterpret_cast<float (*)[kTile]>(b.direction[0] + first);
      StatesAndDirections(rule, t, task, begin + first, n - first, w + first, g + first, b.noise + first, d, b, sums);
    }
    AddTileSums(sums, g, w, b.direction, n, sum);
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
    TileSums<Rule> unused;
    float *w = LoadWeight(t, begin, n, b.weight), *s[Rule::kStates];
    if (t.average != nullptr) StartTile<ElementwiseRule>(t, task, begin, n, w);
    for (int k = 0; k < Rule::kStates; ++k) s[k] = LoadState(t, k, begin, n, b.state[k]);
    RuleTile<Rule, kMoveWeights>(rule, task, n, w, g, s, b.direction, unused);
    if (task.noisy_weight) FillNoise(task.noise, begin, n, b.noise);
    StoreWeight(t, begin, n, w, task.noisy_weight ? b.noise : nullptr);
    AverageTile(t, task, begin, n, b.weight);
  });
}

}  // namespace
}  // namespace ms_optim
