// Runs a rule over all tensors of a step on the CPU.
//
// Tensors are cut into chunks of a fixed size, chunks into tiles that stay in the first-level cache. A tile is
// float32: where the tensor is too, it is the tensor's own memory, else a converted copy. Partial sums belong to
// chunks and are added in the chunks' order, so the result does not depend on the number of threads.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <new>

#include "lanes.h"
#include "step.h"

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

// What the gradients' norms decide for a tensor, and then what the rule does.
struct Plan {
  float factor;  // from the gradient as it came to the gradient that enters the rule
  float lambda;
  double learning_rate, trust_ratio;
  float coefficient[kMaxDirections];
  int64_t row;  // elements that centralization averages over; 0: none
  int first_chunk, last_chunk;
};

struct alignas(64) Buffers {
  float weight[kTile];
  float gradient[kTile];
  float state[kMaxStates][kTile];
  float direction[kMaxDirections][kTile];
  float row_mean[kTile], row_mean_rest[kTile];  // the mean is their sum
};

// ---- Tiles: from storage to float32 and back -------------------------------------------------------------------

template <class T>
void Convert(const void *from, int64_t begin, int n, float *to) {
  const T *source = static_cast<const T *>(from) + begin;
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) to[i] = ToFloat(source[i]);
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
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) Store(tile[i], &target[i]);
}

void StoreTile(const float *tile, DType type, int64_t begin, int n, void *to) {
  if (type == DType::kFloat16) StoreAs<float16>(tile, begin, n, to);
  if (type == DType::kBFloat16) StoreAs<bfloat16>(tile, begin, n, to);
}

// A master counts for as long as it still rounds to the weight: a weight that was loaded or set since then wins.
template <class T>
void MasterTile(const Tensor &t, int64_t begin, int n, float *tile) {
  const T *weight = static_cast<const T *>(t.weight) + begin;
  const float *master = t.master + begin;
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) {
    T rounded;
    Store(master[i], &rounded);
    tile[i] = rounded.bits == weight[i].bits ? master[i] : ToFloat(weight[i]);
  }
}

float *LoadWeight(const Tensor &t, int64_t begin, int n, float *buffer) {
  if (t.weight_type == DType::kFloat32) return static_cast<float *>(t.weight) + begin;
  if (t.master == nullptr) {
    LoadTile(t.weight, t.weight_type, begin, n, buffer);
  } else if (t.weight_type == DType::kFloat16) {
    MasterTile<float16>(t, begin, n, buffer);
  } else {
    MasterTile<bfloat16>(t, begin, n, buffer);
  }
  return buffer;
}

void StoreWeight(const Tensor &t, int64_t begin, int n, const float *tile) {
  if (t.master != nullptr) memcpy(t.master + begin, tile, static_cast<size_t>(n) * sizeof(float));
  StoreTile(tile, t.weight_type, begin, n, t.weight);
}

// ---- Gradients -------------------------------------------------------------------------------------------------

void RowMeans(const Tensor &t, const Plan &plan, const Chunk &chunk, Buffers &b) {
  for (int64_t row = chunk.begin; row < chunk.end; row += plan.row) {
    double sum = 0.0;
    for (int64_t begin = row; begin < row + plan.row; begin += kTile) {
      const int n = static_cast<int>(Min(kTile, row + plan.row - begin));
      sum += Sum(LoadTile(t.gradient, t.gradient_type, begin, n, b.gradient), n);
    }
    const double mean = sum / static_cast<double>(plan.row);
    const int64_t k = (row - chunk.begin) / plan.row;
    b.row_mean[k] = static_cast<float>(mean);
    b.row_mean_rest[k] = static_cast<float>(mean - b.row_mean[k]);
  }
}

const float *LoadGradient(const Tensor &t, const Plan &plan, const Chunk &chunk, int64_t begin, int n, Buffers &b) {
  const float *g = LoadTile(t.gradient, t.gradient_type, begin, n, b.gradient);
  if (plan.row == 0) return g;
  for (int i = 0; i < n;) {
    const int64_t row = (begin + i - chunk.begin) / plan.row;
    const int end = static_cast<int>(Min(n, chunk.begin + (row + 1) * plan.row - begin));
    const float mean = b.row_mean[row], rest = b.row_mean_rest[row];
    for (; i < end; ++i) b.gradient[i] = (g[i] - mean) - rest;
  }
  return b.gradient;
}

// Calls body(begin, n, centralized gradient) for each tile of the chunk.
template <class Body>
void ForTiles(const Tensor &t, const Plan &plan, const Chunk &chunk, Buffers &b, Body body) {
  if (plan.row != 0) RowMeans(t, plan, chunk, b);
  for (int64_t begin = chunk.begin; begin < chunk.end; begin += kTile) {
    const int n = static_cast<int>(Min(kTile, chunk.end - begin));
    body(begin, n, LoadGradient(t, plan, chunk, begin, n, b));
  }
}

void GradientSum(const Tensor &t, const Plan &plan, Chunk &chunk, Buffers &b) {
  double sum = 0.0;
  ForTiles(t, plan, chunk, b, [&](int64_t, int n, const float *g) { sum += SumSquares(g, n); });
  chunk.sum[kGradientSum] = sum;
}

// ---- The rule, over one tile -----------------------------------------------------------------------------------

template <class Rule, bool kUpdateStates>
MS_OPTIM_FN void RuleElement(const Rule &rule, float factor, float lambda, float w, float g, float *s, float *d) {
  const float gradient = rule.Gradient(w, factor * g, lambda);
  if (kUpdateStates) rule.Moments(gradient, s);
  rule.Directions(w, gradient, lambda, s, d);
}

template <class Rule, bool kUpdateStates>
void RuleTile(const Rule &rule, const Plan &plan, int n, const float *__restrict w, const float *__restrict g,
              float *const *s, float (*__restrict d)[kTile]) {
  static_assert(Rule::kStates == 2 || Rule::kStates == 3, "the loop below names its states");
  const Rule r = rule;
  const float factor = plan.factor, lambda = plan.lambda;
  float *__restrict s0 = s[0], *__restrict s1 = s[1], *__restrict s2 = s[Rule::kStates - 1];
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) {
    float state[] = {s0[i], s1[i], s2[i]}, direction[kMaxDirections];
    RuleElement<Rule, kUpdateStates>(r, factor, lambda, w[i], g[i], state, direction);
    if (kUpdateStates) {
      s0[i] = state[0];
      s1[i] = state[1];
      if (Rule::kStates > 2) s2[i] = state[2];
    }
    d[0][i] = direction[0];
    if (Rule::kDirections > 1) d[1][i] = direction[1];
  }
}

template <int kDirections>
MS_OPTIM_FN void MoveTile(const Plan &plan, int n, float (*d)[kTile], float *w) {
  const float c0 = plan.coefficient[0], c1 = plan.coefficient[1];
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) w[i] -= kDirections == 1 ? c0 * d[0][i] : c0 * d[0][i] + c1 * d[1][i];
}

// Stages of a chunk: new states and the sums of what they give (kUpdateStates), new weights (kMove), or both.
template <class Rule, bool kUpdateStates, bool kMove>
void RuleChunk(const Rule &rule, const Tensor &t, const Plan &plan, Chunk &chunk, Buffers &b) {
  double sum[kSums] = {};
  ForTiles(t, plan, chunk, b, [&](int64_t begin, int n, const float *g) {
    float *w = LoadWeight(t, begin, n, b.weight);
    float *s[Rule::kStates];
    for (int k = 0; k < Rule::kStates; ++k) {
      s[k] = const_cast<float *>(LoadTile(t.state[k], t.state_type[k], begin, n, b.state[k]));
    }
    if (kUpdateStates) {
      sum[kGradientSum] += SumSquares(g, n);
      sum[kWeightSum] += SumSquares(w, n);
    }
    RuleTile<Rule, kUpdateStates>(rule, plan, n, w, g, s, b.direction);
    if (kUpdateStates) {
      sum[kDirectionSum] += SumSquares(b.direction[0], n);
      if (Rule::kDirections == 2) {
        sum[kDirection2Sum] += SumSquares(b.direction[1], n);
        sum[kDirectionsDot] += Dot(b.direction[0], b.direction[1], n);
      }
      for (int k = 0; k < Rule::kStates; ++k) StoreTile(s[k], t.state_type[k], begin, n, t.state[k]);
    }
    if (kMove) {
      MoveTile<Rule::kDirections>(plan, n, b.direction, w);
      StoreWeight(t, begin, n, w);
    }
  });
  if (kUpdateStates) memcpy(chunk.sum, sum, sizeof(sum));
}

// ---- The step ---------------------------------------------------------------------------------------------------

// Data that two passes over a run of tensors share should still be in the cache the second time.
constexpr int64_t kCachedElements = int64_t{1} << 19;

template <class Rule>
class Engine {
 public:
  explicit Engine(const Step &step)
      : step_(step), rule_(step.constants + kRuleConstants, int64_t{*step.global_step} + 1, step.rule_flags) {}

  Status Run() {
    if (!CutChunks()) return kNoMemory;
    const bool gradients = Has(kGradientStage), moments = Has(kMomentsStage), apply = Has(kApplyStage);
    // A bound on the global norm, or a step that is skipped whole, wants all gradients read before anything moves.
    const bool global = step_.constants[kClipNorm] > 0.0 || (step_.flags & kSkipNonfinite) != 0;
    if (gradients && (global || !moments)) SumGradients(0, step_.count);
    if (!gradients) CopySums();
    if (!moments && !apply) return Commit(true);
    const double total = gradients && !global ? 0.0 : TotalGradientSum();
    if ((step_.flags & kSkipNonfinite) != 0 && !std::isfinite(total)) return Skip();
    clip_ = ClipFactor(total);

    for (int first = 0, last = 0; first < step_.count; first = last) {
      last = Rule::kLayerwise ? LastOfRun(first) : step_.count;
      if (Rule::kNormalizesGradient && gradients && !global) SumGradients(first, last);
      for (int i = first; i < last; ++i) Decide(i);
      if (moments && apply && !Rule::kLayerwise) {
        Pass<true, true>(first, last);
        AddSums(first, last);
      } else {
        if (moments) {
          Pass<true, false>(first, last);
          AddSums(first, last);
        }
        for (int i = first; i < last; ++i) Decide(i);
        if (apply) Pass<false, true>(first, last);
      }
    }
    if (apply) {
      for (int i = 0; i < step_.count; ++i) Report(i, true);
    }
    return Commit(true);
  }

 private:
  bool Has(Stage stage) const { return (step_.stages & stage) != 0; }
  double *SumsOf(int i) const { return step_.sums + int64_t{i} * kSums; }
  int64_t LayoutOf(int i, Layout column) const { return step_.layout[int64_t{i} * kLayoutColumns + column]; }

  bool CutChunks() {
    plans_.reset(new (std::nothrow) Plan[static_cast<size_t>(step_.count)]);
    if (!plans_) return false;
    int chunks = 0;
    for (int pass = 0; pass < 2; ++pass) {
      chunks = 0;
      for (int i = 0; i < step_.count; ++i) {
        const Tensor &t = step_.tensors[i];
        Plan &plan = plans_[i];
        plan = Plan{};
        plan.row = t.rows > 0 && LayoutOf(i, kCentralized) != 0 ? t.size / t.rows : 0;
        // A chunk of a centralized tensor is made of whole rows, at most one mean for each place in a tile.
        const int64_t length = plan.row == 0 ? kChunk : plan.row * Max(1, Min(kTile, kChunk / Max(1, plan.row)));
        plan.first_chunk = chunks;
        for (int64_t begin = 0; begin < t.size; begin += length, ++chunks) {
          if (pass == 1) chunks_[chunks] = Chunk{i, begin, Min(t.size, begin + length), {}};
        }
        plan.last_chunk = chunks;
      }
      if (pass == 0) chunks_.reset(new (std::nothrow) Chunk[static_cast<size_t>(chunks)]);
      if (!chunks_) return false;
    }
    memset(step_.sums, 0, static_cast<size_t>(step_.count) * kSums * sizeof(double));
    return true;
  }

  int LastOfRun(int first) const {
    int64_t elements = step_.tensors[first].size;
    int last = first + 1;
    while (last < step_.count && elements + step_.tensors[last].size <= kCachedElements) {
      elements += step_.tensors[last++].size;
    }
    return last;
  }

  // The chunks of tensors first to last, backwards on request: what a first pass touched last is still in the cache.
  template <class Body>
  void ForChunks(int first, int last, bool backwards, Body body) {
    const int begin = plans_[first].first_chunk, end = plans_[last - 1].last_chunk;
    // Many small chunks are handed out several at a time.
    const int grain = Max(1, (end - begin) / 512);
#pragma omp parallel
    {
      Buffers buffers;
#pragma omp for schedule(dynamic, grain)
      for (int k = begin; k < end; ++k) {
        Chunk &chunk = chunks_[backwards ? begin + end - 1 - k : k];
        body(chunk, step_.tensors[chunk.tensor], plans_[chunk.tensor], buffers);
      }
    }
  }

  template <bool kUpdateStates, bool kMove>
  void Pass(int first, int last) {
    ForChunks(first, last, !kUpdateStates, [this](Chunk &chunk, const Tensor &t, const Plan &plan, Buffers &b) {
      RuleChunk<Rule, kUpdateStates, kMove>(rule_, t, plan, chunk, b);
    });
  }

  void SumGradients(int first, int last) {
    ForChunks(first, last, false,
              [](Chunk &chunk, const Tensor &t, const Plan &plan, Buffers &b) { GradientSum(t, plan, chunk, b); });
    AddSums(first, last);
  }

  void AddSums(int first, int last) {
    for (int i = first; i < last; ++i) {
      double *sums = SumsOf(i);
      memset(sums, 0, kSums * sizeof(double));
      for (int k = plans_[i].first_chunk; k < plans_[i].last_chunk; ++k) {
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

  double ClipFactor(double total) const {
    const double norm = step_.constants[kUnscale] * std::sqrt(total), bound = step_.constants[kClipNorm];
    return bound > 0.0 && norm > bound ? bound / norm : 1.0;
  }

  // From the sums known so far to the numbers that the next pass uses.
  void Decide(int i) {
    Plan &plan = plans_[i];
    const double *sums = SumsOf(i);
    const int64_t decay = LayoutOf(i, kDecayIndex);
    double factor = step_.constants[kUnscale] * clip_;
    if (Rule::kNormalizesGradient) factor = sums[kGradientSum] > 0.0 ? 1.0 / std::sqrt(sums[kGradientSum]) : 0.0;
    plan.factor = static_cast<float>(factor);
    plan.lambda = decay < 0 ? 0.0f : step_.rates[decay];
    plan.learning_rate = step_.rates[LayoutOf(i, kRateIndex)];
    const double norms[kMaxDirections] = {std::sqrt(sums[kDirectionSum]), std::sqrt(sums[kDirection2Sum])};
    double coefficient[kMaxDirections] = {};
    plan.trust_ratio =
        rule_.Coefficients(plan.learning_rate, plan.lambda, std::sqrt(sums[kWeightSum]), norms, coefficient);
    for (int k = 0; k < kMaxDirections; ++k) plan.coefficient[k] = static_cast<float>(coefficient[k]);
  }

  void Report(int i, bool applied) const {
    const Plan &plan = plans_[i];
    const double *sums = SumsOf(i), c0 = plan.coefficient[0], c1 = plan.coefficient[1];
    const double update =
        c0 * c0 * sums[kDirectionSum] + c1 * c1 * sums[kDirection2Sum] + 2.0 * c0 * c1 * sums[kDirectionsDot];
    float *statistics = step_.statistics + LayoutOf(i, kRow) * kStatistics;
    statistics[kGradientNorm] = static_cast<float>(step_.constants[kUnscale] * std::sqrt(sums[kGradientSum]));
    statistics[kWeightNorm] = static_cast<float>(std::sqrt(sums[kWeightSum]));
    statistics[kUpdateNorm] = applied ? static_cast<float>(std::sqrt(Max(0.0, update))) : 0.0f;
    statistics[kTrustRatio] = applied ? static_cast<float>(plan.trust_ratio) : 0.0f;
    statistics[kFinite] = std::isfinite(sums[kGradientSum]) ? 1.0f : 0.0f;
  }

  Status Skip() {
    for (int i = 0; i < step_.count; ++i) Report(i, false);
    return Commit(false);
  }

  Status Commit(bool applied) {
    if (Has(kCommitStage)) ++*(applied ? step_.global_step : step_.skipped_steps);
    return kOk;
  }

  const Step &step_;
  const Rule rule_;
  double clip_ = 1.0;
  std::unique_ptr<Plan[]> plans_;
  std::unique_ptr<Chunk[]> chunks_;
};

template <class Rule>
Status Run(const Step &step) {
  return Engine<Rule>(step).Run();
}

}  // namespace
}  // namespace ms_optim
