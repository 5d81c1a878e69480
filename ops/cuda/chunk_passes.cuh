// Passes of a rule over a chunk of a tensor, tile by tile: gradients, new states with the sums that a step needs, new
// weights.
#pragma once

#include "storage.cuh"

namespace ms_optim {
namespace {

__device__ inline bool Aligned(const void *data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// Tells whether runs of four elements may be read and written as one.
__device__ inline bool Aligned(const Tensor &t) {
  bool aligned = Aligned(t.weight) && Aligned(t.gradient) && Aligned(t.master) && Aligned(t.remainder);
  aligned = aligned && Aligned(t.average) && Aligned(t.direction);
  for (int k = 0; k < kMaxStates; ++k) aligned = aligned && Aligned(t.state[k]);
  return aligned;
}

__device__ inline void LoadGradient(const Tensor &t, const Task &task, const Workspace &work, int tensor,
                                    const Tile &tile, float (&g)[kEach]) {
  FetchedFloats gradient;
  gradient.From(t.gradient_type, t.gradient, tile);
  gradient.To(t.gradient_type, g);
  if (task.row != 0) Centralize(work.means + work.first_row[tensor], task.row, tile, g);
}

// Calls body for each tile of a chunk that belongs to this warp.
template <class Body>
__device__ void ForTiles(const Chunk &chunk, const Tensor &t, Body body) {
  const bool aligned = Aligned(t);
  for (int64_t begin = chunk.begin + WarpOfThread() * kTile; begin < chunk.end; begin += kThreads / kWarp * kTile) {
    body(Tile(begin, t.size, aligned));
  }
}

__device__ inline void AddSquare(double *sum, float x) { *sum += static_cast<double>(x) * static_cast<double>(x); }

// Adds up the squares of a thread's elements in float32, which takes a third of the instructions; in float64 where
// squares may have overflowed or vanished.
__device__ inline void AddSquares(double *sum, const Tile &tile, const float (&x)[kEach]) {
  float squares = 0.0f;
  MS_OPTIM_UNROLL
  for (int e = 0; e < kEach; ++e) squares = fmaf(x[e], x[e], squares);
  if (tile.whole && squares > 1e-30f && squares < 1e38f) {
    *sum += static_cast<double>(squares);
    return;
  }
  MS_OPTIM_UNROLL
  for (int e = 0; e < kEach; ++e) {
    if (tile.Has(e)) AddSquare(sum, x[e]);
  }
}

// What a pass reads of a tile.
template <class Rule, class Format>
struct FetchedElements {
  static constexpr int kRoom = Rule::kStates > 0 ? Rule::kStates : 1;  // there are no arrays of nothing
  FetchedWeight weight;
  FetchedFloats gradient;
  FetchedState<Format> state[kRoom];

  __device__ void From(const Tensor &t, const Tile &tile) {
    if (!Rule::kReturnsDirections) weight.From(t, tile);
    gradient.From(t.gradient_type, t.gradient, tile);
    MS_OPTIM_UNROLL
    for (int k = 0; k < Rule::kStates; ++k) state[k].From(t, k, tile);
  }
};

// The elements of a tile that belong to a thread.
template <class Rule, class Format>
struct Elements {
  static constexpr int kRoom = Rule::kStates > 0 ? Rule::kStates : 1;  // there are no arrays of nothing
  float w[kEach], g[kEach], s[kRoom][kEach], d[kMaxDirections][kEach];

  template <class Fetched>
  __device__ Elements(const Fetched &fetched, const Tensor &t, const Task &task, const RowMean *means,
                      const Tile &tile) {
    if (!Rule::kReturnsDirections) fetched.weight.To(t, w);
    fetched.gradient.To(t.gradient_type, g);
    MS_OPTIM_UNROLL
    for (int k = 0; k < Rule::kStates; ++k) fetched.state[k].To(t, k, s[k]);
    if (task.row != 0) Centralize(means, task.row, tile, g);
    MS_OPTIM_UNROLL
    for (int e = 0; Rule::kReturnsDirections && e < kEach; ++e) w[e] = 0.0f;
  }

  // Copies the weights, in a tensor's first step, to the average and to a state that starts as they do.
  __device__ void Start(const Tensor &t, const Task &task, const Tile &tile) {
    if (!task.starts) return;
    if (t.average != nullptr) StoreFloats(t.average, tile, w);
    MS_OPTIM_UNROLL
    for (int e = 0; Rule::kStartsAtWeights && e < kEach; ++e) s[0][e] = w[e];
  }

  template <bool kNewStates>
  __device__ void Apply(const Rule &rule, const Task &task) {
    MS_OPTIM_UNROLL
    for (int e = 0; e < kEach; ++e) {
      float state[kRoom], direction[kMaxDirections] = {};
      MS_OPTIM_UNROLL
      for (int k = 0; k < Rule::kStates; ++k) state[k] = s[k][e];
      Advance<Rule, kNewStates>(rule, task, w[e], g[e], state, direction);
      MS_OPTIM_UNROLL
      for (int k = 0; k < Rule::kStates; ++k) s[k][e] = state[k];
      MS_OPTIM_UNROLL
      for (int k = 0; k < Rule::kDirections; ++k) d[k][e] = direction[k];
    }
  }

  __device__ void Sum(const Tile &tile, double (&sum)[kSums]) const {
    AddSquares(&sum[kGradientSum], tile, g);
    AddSquares(&sum[kWeightSum], tile, w);
    AddSquares(&sum[kDirectionSum], tile, d[0]);
    if (Rule::kDirections < 2) return;
    AddSquares(&sum[kDirection2Sum], tile, d[1]);
    MS_OPTIM_UNROLL
    for (int e = 0; e < kEach; ++e) {
      if (tile.Has(e)) sum[kDirectionsDot] += static_cast<double>(d[0][e]) * static_cast<double>(d[1][e]);
    }
  }

  __device__ void Move(const Task &task) {
    MS_OPTIM_UNROLL
    for (int e = 0; e < kEach; ++e) {
      w[e] -= Rule::kDirections == 1 ? task.coefficient[0] * d[0][e]
                                     : task.coefficient[0] * d[0][e] + task.coefficient[1] * d[1][e];
    }
  }
};

// Moves the average towards the weights as they are stored; see ops/cpu/chunk_passes.h.
__device__ inline void Average(const Tensor &t, const Task &task, const Tile &tile, float (&w)[kEach]) {
  if (t.average == nullptr) return;
  if (t.master == nullptr && t.weight_type != DType::kFloat32) LoadWeight(t, tile, w);
  float a[kEach];
  Load<float>(t.average, tile, a);
  MS_OPTIM_UNROLL
  for (int e = 0; e < kEach; ++e) a[e] += task.average_rate * (w[e] - a[e]);
  StoreFloats(t.average, tile, a);
}

// Computes new states, and the sums of weights and directions. Where nothing waits for these sums, the weights move,
// too (kMove).
template <bool kMove, class Format, class Rule, class Fetched>
__device__ void UpdateTile(const Rule &rule, const Tensor &t, const Task &task, const RowMean *means, bool noisy,
                           const Tile &tile, const Fetched &fetched, double (&sum)[kSums]) {
  constexpr bool kConverts = FirstCode<Format>::kIsConverted;
  Elements<Rule, Format> x(fetched, t, task, means, tile);
  TileNoise noise;
  if (kConverts || noisy) noise.From(task.noise, tile);
  x.Start(t, task, tile);
  x.template Apply<true>(rule, task);
  MS_OPTIM_UNROLL
  for (int k = 0; k < Rule::kStates; ++k) {
    StoreState<Format>(t, k, tile, noise, x.s[k]);
    // A layer-wise rule must move along the directions whose norms it took.
    if (Rule::kLayerwise && kConverts) LoadState<Format>(t, k, tile, x.s[k]);
  }
  if (Rule::kLayerwise && kConverts) x.template Apply<false>(rule, task);
  if (Rule::kReturnsDirections) StoreFloats(t.direction, tile, x.d[0]);
  x.Sum(tile, sum);
  if (!kMove) return;
  x.Move(task);
  StoreWeight(t, tile, x.w, noisy, noise);
  Average(t, task, tile, x.w);
}

// Moves the weights along the directions of states that an earlier pass made.
template <class Format, class Rule, class Fetched>
__device__ void MoveTile(const Rule &rule, const Tensor &t, const Task &task, const RowMean *means, bool noisy,
                         const Tile &tile, const Fetched &fetched) {
  Elements<Rule, Format> x(fetched, t, task, means, tile);
  TileNoise noise = {};
  if (noisy) noise.From(task.noise, tile);
  x.Start(t, task, tile);
  x.template Apply<false>(rule, task);
  x.Move(task);
  StoreWeight(t, tile, x.w, noisy, noise);
  Average(t, task, tile, x.w);
}

// What most tensors of a model have in common. Where the compiler knows it, and that a tile is whole, there are no
// branches and fewer registers are needed.
template <class Rule, class Format, DType kWeightAndGradient>
struct UsualOf {
  static constexpr bool kHasMaster = kWeightAndGradient != DType::kFloat32;
  NeverCautious<Rule> rule;
  Tensor t;
  Task task;

  __device__ static bool Is(const Tensor &t, const Task &task) {
    bool is = t.weight_type == kWeightAndGradient && t.gradient_type == kWeightAndGradient;
    is = is && t.average == nullptr && task.row == 0 && task.cautious == 0u && (t.master != nullptr) == kHasMaster;
    for (int k = 0; k < Rule::kStates; ++k) is = is && HasFormat<Format>(t.state_type[k]);
    return is && t.remainder == nullptr;
  }

  __device__ UsualOf(const Rule &its_rule, const Tensor &tensor, const Task &its_task)
      : rule(its_rule), t(tensor), task(its_task) {
    t.weight_type = t.gradient_type = kWeightAndGradient;
    t.remainder_type = DType::kFloat32;
    t.average = nullptr;
    if (!kHasMaster) t.master = nullptr;
    task.row = 0;
    // A third state may be signed or not.
    if (Rule::kStates > 0) t.state_type[0] = Format::kSigned;
    if (Rule::kStates > 1) t.state_type[1] = Format::kUnsigned;
  }
};

// Whether a tile is fetched before the one ahead of it is computed, so that its words arrive meanwhile. That takes
// registers. Measured on an H200: states in bfloat16 gain 8 to 10 % of the time; in codes, where arithmetic is waited
// for, a third block at once on a multiprocessor is worth more.
template <class Format>
constexpr bool kFetchesAhead = !FirstCode<Format>::kHasScales;

// Calls run(rule, tensor, task, noisy, tile, fetched) for each tile of a chunk that belongs to this warp, with as much
// known as can be.
template <class Format, class Rule, class Run>
__device__ void ForTilesOf(const Chunk &chunk, const Rule &rule, const Tensor &t, const Task &task, unsigned flags,
                           const Run &run) {
  typedef FetchedElements<Rule, Format> Fetched;
  constexpr int64_t kStride = kThreads / kWarp * kTile;
  const bool aligned = Aligned(t);
  int64_t begin = chunk.begin + WarpOfThread() * kTile;
  const auto run_usual = [&](const auto &usual) {
    Fetched next;
    if (kFetchesAhead<Format> && begin + kTile <= chunk.end) next.From(usual.t, Tile(begin));
    for (; begin + kTile <= chunk.end; begin += kStride) {
      if (!kFetchesAhead<Format>) next.From(usual.t, Tile(begin));
      const Fetched fetched = next;
      const int64_t following = begin + kStride;
      if (kFetchesAhead<Format> && following + kTile <= chunk.end) next.From(usual.t, Tile(following));
      run(usual.rule, usual.t, usual.task, false, Tile(begin), fetched);
    }
  };
  if (aligned && UsualOf<Rule, Format, DType::kFloat32>::Is(t, task)) {
    run_usual(UsualOf<Rule, Format, DType::kFloat32>(rule, t, task));
  } else if (aligned && UsualOf<Rule, Format, DType::kBFloat16>::Is(t, task)) {
    run_usual(UsualOf<Rule, Format, DType::kBFloat16>(rule, t, task));
  }
  const bool noisy = NeedsNoise(t, flags);
  for (; begin < chunk.end; begin += kStride) {
    const Tile tile(begin, t.size, aligned);
    Fetched fetched;
    fetched.From(t, tile);
    run(rule, t, task, noisy, tile, fetched);
  }
}

// Tells whether states of a tensor are of a format.
template <class Format>
MS_OPTIM_FN bool HasStatesOf(const Tensor &t) {
  bool has = false;
  for (int k = 0; k < kMaxStates; ++k) has = has || (t.state[k] != nullptr && HasFormat<Format>(t.state_type[k]));
  return has;
}

// Returns the number of formats, besides float32, that states of a tensor have.
MS_OPTIM_FN int FormatsOf(const Tensor &t) {
  int formats = 0;
#define MS_OPTIM_ROW(Format) formats += FirstCode<Format>::kIsConverted && HasStatesOf<Format>(t);
  MS_OPTIM_FORMATS(MS_OPTIM_ROW)
#undef MS_OPTIM_ROW
  return formats;
}

// Tells whether a pass over states of a format takes a tensor.
template <class Format>
__device__ bool Takes(const Tensor &t, bool takes_floats) {
  return HasStatesOf<Format>(t) || (takes_floats && FormatsOf(t) == 0);
}

}  // namespace
}  // namespace ms_optim
