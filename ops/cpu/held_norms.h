// Passes of a rule over a chunk of a tensor whose norm may be held; see ops/include/weight_norms.h.
//
// A first pass adds up what decides how weights move. It stores float32 states, of which the second pass makes the same
// directions again. Other states are dropped, as are those of directions that see the states from before the step: the
// second pass is then a step as it would be without.
#pragma once

#include "chunk_passes.h"
#include "weight_norms.h"

namespace ms_optim {
namespace {

// Adds up the sums of a tile. Squares of weights, and their products with directions, are those of float64: the new
// norm is as exact as these.
template <class Rule>
void AddHeldSums(const TileSums<Rule> &sums, const float *w, const float *d, int n, double *sum) {
  double weights[kLanes] = {}, products[kLanes] = {};
  ForLanes(n, [&](int i, int lane) __attribute__((always_inline)) {
    const double x = w[i], y = d[i];
    weights[lane] += x * x;
    products[lane] += x * y;
  });
  sum[kWeightSum] += SumOfLanes(weights);
  sum[kDirectionSum] += ExactWhereLost(sums.Total(kDirectionSum), d, n);
  sum[kDirectionsDot] += SumOfLanes(products);
}

// Moves a tile along its directions and, if its norm is held, along the weights themselves.
void MoveHeldTile(const Task &task, int n, float (*d)[kTile], float *__restrict w) {
  if (task.coefficient[1] == 0.0f) return MoveTile<1>(task, n, d, w);
  const Task p = task;
  const float *__restrict d0 = d[0];
  MS_OPTIM_IVDEP
  for (int i = 0; i < n; ++i) w[i] -= Moved<2>(p, d0[i], w[i]);
}

template <class Rule>
MS_OPTIM_FN bool StoresStatesFirst(const Task &task) {
  return !Rule::kDirectsFirst && !task.low_states;
}

template <class Rule, bool kMove>
void HoldChunk(const Rule &rule, const Tensor &t, const Task &task, Chunk &chunk, Buffers &b) {
  double sum[kSums] = {};
  const bool stores_first = StoresStatesFirst<Rule>(task);
  ForTiles(t, task, chunk, b, [&](int64_t begin, int n, const float *g) {
    TileSums<Rule> sums;
    float *w = LoadWeight(t, begin, n, b.weight), *s[Rule::kStates];
    for (int k = 0; k < Rule::kStates; ++k) s[k] = LoadState(t, k, begin, n, b.state[k]);
    if (!kMove) {
      if (stores_first) {
        RuleTile<Rule, kNewStates | kSumUp>(rule, task, n, w, g, s, b.direction, nullptr, sums);
      } else {
        RuleTile<Rule, kNewStates | kDropStates | kSumUp>(rule, task, n, w, g, s, b.direction, nullptr, sums);
      }
      sum[kGradientSum] += ExactWhereLost(sums.Total(kGradientSum), g, n);
      AddHeldSums(sums, w, b.direction[0], n, sum);
      return;
    }
    StartTile<Rule>(t, task, begin, n, w);
    if (task.low_states || task.noisy_weight) FillNoise(task.noise, begin, n, b.noise);
    if (!stores_first) {
      RuleTile<Rule, kNewStates>(rule, task, n, w, g, s, b.direction, nullptr, sums);
      for (int k = 0; k < Rule::kStates; ++k) StoreState(t, k, begin, n, s[k], b.noise);
      MoveHeldTile(task, n, b.direction, w);
    } else if (task.coefficient[1] != 0.0f) {
      RuleTile<Rule, kMoveWeights | kAlongWeights>(rule, task, n, w, g, s, b.direction, nullptr, sums);
    } else {
      RuleTile<Rule, kMoveWeights>(rule, task, n, w, g, s, b.direction, nullptr, sums);
    }
    StoreWeight(t, begin, n, w, task.noisy_weight ? b.noise : nullptr);
    AverageTile(t, task, begin, n, b.weight);
  });
  if (!kMove) memcpy(chunk.sum, sum, sizeof(sum));
}

}  // namespace
}  // namespace ms_optim
