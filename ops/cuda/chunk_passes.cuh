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

__device__ inline bool AllFloat32(const Tensor &t, int states) {
  bool all = t.weight_type == DType::kFloat32 && t.gradient_type == DType::kFloat32;
  for (int k = 0; k < states; ++k) all = all && t.state_type[k] == DType::kFloat32;
  return all;
}

__device__ inline void LoadGradient(const Tensor &t, const Task &task, const Workspace &work, int tensor,
                                    const Tile &tile, float (&g)[kEach]) {
  LoadAs(t.gradient_type, t.gradient, tile, g);
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

// The elements of a tile that belong to a thread. kFloats: weight, gradient and states are float32, and all loads are
// issued before any is waited for.
template <class Rule>
struct Elements {
  static constexpr int kRoom = Rule::kStates > 0 ? Rule::kStates : 1;  // there are no arrays of nothing
  float w[kEach], g[kEach], s[kRoom][kEach], d[kMaxDirections][kEach];

  template <bool kFloats>
  __device__ void Take(const Tensor &t, const Task &task, const RowMean *means, const Tile &tile) {
    if (kFloats) {
      if (!Rule::kReturnsDirections) Load<float>(t.weight, tile, w);
      Load<float>(t.gradient, tile, g);
      MS_OPTIM_UNROLL
      for (int k = 0; k < Rule::kStates; ++k) Load<float>(t.state[k], tile, s[k]);
    } else {
      if (!Rule::kReturnsDirections) LoadWeight(t, tile, w);
      LoadAs(t.gradient_type, t.gradient, tile, g);
      MS_OPTIM_UNROLL
      for (int k = 0; k < Rule::kStates; ++k) LoadState(t, k, tile, s[k]);
    }
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
    MS_OPTIM_UNROLL
    for (int e = 0; e < kEach; ++e) {
      if (!tile.Has(e)) continue;
      AddSquare(&sum[kGradientSum], g[e]);
      AddSquare(&sum[kWeightSum], w[e]);
      AddSquare(&sum[kDirectionSum], d[0][e]);
      if (Rule::kDirections < 2) continue;
      AddSquare(&sum[kDirection2Sum], d[1][e]);
      sum[kDirectionsDot] += static_cast<double>(d[0][e]) * static_cast<double>(d[1][e]);
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
template <class Rule, bool kMove, bool kFloats>
__device__ void UpdateTile(const Rule &rule, const Tensor &t, const Task &task, const RowMean *means, bool noisy,
                           const Tile &tile, double (&sum)[kSums]) {
  Elements<Rule> x;
  x.template Take<kFloats>(t, task, means, tile);
  x.Start(t, task, tile);
  x.template Apply<true>(rule, task);
  MS_OPTIM_UNROLL
  for (int k = 0; k < Rule::kStates; ++k) {
    if (kFloats) {
      StoreFloats(t.state[k], tile, x.s[k]);
      continue;
    }
    StoreState(t, k, tile, task.noise, x.s[k]);
    // A layer-wise rule must move along the directions whose norms it took.
    if (Rule::kLayerwise) LoadState(t, k, tile, x.s[k]);
  }
  if (Rule::kLayerwise && !kFloats) x.template Apply<false>(rule, task);
  if (Rule::kReturnsDirections) StoreFloats(t.direction, tile, x.d[0]);
  x.Sum(tile, sum);
  if (!kMove) return;
  x.Move(task);
  if (kFloats) {
    StoreFloats(t.weight, tile, x.w);
  } else {
    StoreWeight(t, tile, x.w, noisy ? &task.noise : nullptr);
  }
  Average(t, task, tile, x.w);
}

}  // namespace
}  // namespace ms_optim
