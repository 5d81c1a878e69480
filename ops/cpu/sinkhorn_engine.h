// Runs Sinkhorn: divides the rows and columns of matrices by their norms in turn, and moves the weights.
//
// A step keeps a factor for each row and column, and sums for the columns of each chunk; no matrix. A pass reads each
// row once: as soon as its own sum gives its factor, the row enters the sums of the columns. So K divisions take
// (K + 1) / 2 reads of the momentum and the gradient: the first makes the momentum, the last moves the weights.
//
// Which rows become 0 depends on the norms of all rows. The first pass adds up all of them, and the chunks where some
// become 0, but are not 0 already, are added up again.
#pragma once

#include <algorithm>

#include "matrices.h"

namespace ms_optim {
namespace {

// The rows of a chunk. The sums of its columns take less than 1 % of its elements' memory.
constexpr int64_t kRowsInChunk = 512;
static_assert(kRowsInChunk % kCodeBlock == 0, "chunks begin with a block of codes");
static_assert(kRowsInChunk <= kTile, "the means of a chunk's rows fit into a buffer");

// Returns the sum of squares of the products of a row's elements and the factors of columns.
MS_OPTIM_FN double SumOfRow(const float *g, const float *factors, int64_t columns, float *buffer) {
  double total = 0.0;
  for (int64_t begin = 0; begin < columns; begin += kTile) {
    const int n = static_cast<int>(Min(int64_t{kTile}, columns - begin));
    const float *__restrict x = g + begin, *__restrict c = factors + begin;
    float *__restrict products = buffer;
    float lanes[kLanes] = {};
    ForLanes(n, [&](int i, int lane) __attribute__((always_inline)) {
      const float product = x[i] * c[i];
      products[i] = product;
      lanes[lane] += product * product;
    });
    total += ExactWhereLost(SumOfLanes(lanes), products, n);
  }
  return total;
}

// Adds the squares of a row, times its factor, to the sums of the columns. In float64, a column of tiny elements counts.
MS_OPTIM_FN void AddToColumns(const float *__restrict g, float factor, int64_t columns, double *__restrict sums) {
  MS_OPTIM_IVDEP
  for (int64_t j = 0; j < columns; ++j) {
    const double product = static_cast<double>(factor * g[j]);
    sums[j] += product * product;
  }
}

class SinkhornEngine : StepEngine {
 public:
  explicit SinkhornEngine(const Step &step)
      : StepEngine(step), rule_(step.constants + kRuleConstants, int64_t{*step.global_step} + 1, step.rule_flags) {
    rows_in_chunk_ = kRowsInChunk;
  }

  Status Run() {
    const bool moves = Has(kMomentsStage);
    if (moves != Has(kApplyStage) || (step_.flags & kReturned) != 0) return kWrongFlags;
    if (const Status status = Begin(!Has(kGradientStage)); status != kOk) return status;
    if (moves && !Fits()) return kWrongSize;
    const Prologue prologue(step_, step_.constants[kClipNorm] > 0.0);
    Open(prologue);
    if (step_.stages == kGradientStage) return kOk;
    const Survey survey = TakeSurvey(prologue);
    if (!survey.applied) return Skip();
    for (int i = 0; i < step_.count; ++i) Decide(rule_, step_, i, SumsOf(i), survey.clip, &tasks_[i]);
    if (moves) {
      Reserve();  // allocates all memory, before anything moves
      for (int first = 0, last = 0; first < step_.count; first = last) {
        last = LastOfRun(first, kCachedElements);
        Move(first, last);
      }
      AddSums(0, step_.count);
    }
    for (int i = 0; i < step_.count; ++i) Report(i, true);
    return Commit(true);
  }

 private:
  // The factors of a tensor's rows and columns, and the sums of the columns of each of its chunks.
  struct Factors {
    int64_t columns, rows;
    double *of_rows, *of_columns, *sums;
    float *rounded;  // of_columns in float32
  };

  // Tells whether this process has each matrix whole or not at all.
  bool Fits() const {
    for (int i = 0; i < step_.count; ++i) {
      const Tensor &t = step_.tensors[i];
      if (t.begin != t.end && (t.begin != 0 || t.end != t.size)) return false;
    }
    return true;
  }

  // The rows that a pass takes together: about a tile. If states are codes, they are whole blocks.
  static int64_t RowsInStrip(int64_t columns, const Task &task) {
    const int64_t whole = task.low_states ? kCodeBlock / std::gcd(columns, kCodeBlock) : 1;
    return Max(1, kTile / (columns * whole)) * whole;
  }

  void Reserve() {
    factors_.resize(static_cast<size_t>(step_.count));
    int64_t numbers = 0, rounded = 0, strip = 0;
    for (int pass = 0; pass < 2; ++pass) {
      if (pass == 1) {
        numbers_.reset(new double[static_cast<size_t>(numbers)]);
        rounded_.reset(new float[static_cast<size_t>(rounded)]);
      }
      double *next = numbers_.get();
      float *next_rounded = rounded_.get();
      for (int i = 0; i < step_.count; ++i) {
        if (ElementsOf(i) == 0) continue;
        const Tensor &t = step_.tensors[i];
        Factors &f = factors_[static_cast<size_t>(i)];
        f.rows = Max(1, t.rows);
        f.columns = t.size / f.rows;
        const int64_t sums = (tasks_[i].last_chunk - tasks_[i].first_chunk) * f.columns;
        if (pass == 0) {
          numbers += f.rows + f.columns + sums;
          rounded += f.columns;
          strip = Max(strip, Min(RowsInStrip(f.columns, tasks_[i]), f.rows) * f.columns);
          continue;
        }
        f.of_rows = next;
        f.of_columns = f.of_rows + f.rows;
        f.sums = f.of_columns + f.columns;
        next = f.sums + sums;
        f.rounded = next_rounded;
        next_rounded += f.columns;
        std::fill_n(f.of_columns, f.columns, 1.0);
        std::fill_n(f.rounded, f.columns, 1.0f);
      }
    }
    strips_.resize(static_cast<size_t>(omp_get_max_threads()));
    for (auto &own : strips_) own.reset(new float[static_cast<size_t>(strip)]);
    again_.reset(new bool[static_cast<size_t>(tasks_[step_.count - 1].last_chunk)]());
  }

  // Takes tensors through all passes. Passes go there and back: what one read last is still in the cache.
  void Move(int first, int last) {
    bool backwards = false;
    const auto pass = [&](auto body) {
      ForChunks(first, last, backwards, body);
      backwards = !backwards;
    };
    pass([this](Chunk &chunk, const Tensor &t, const Task &task, Buffers &b) { MakeMomentum(t, task, chunk, b); });
    bool again = false;
    for (int i = first; i < last; ++i) again |= DecideRows(i);
    if (again && rule_.pairs > 0) {
      pass([this](Chunk &chunk, const Tensor &t, const Task &task, Buffers &b) {
        if (again_[&chunk - chunks_.get()]) DivideRows<false>(t, task, chunk, b);
      });
    }
    for (int k = 0; k < rule_.pairs; ++k) {
      if (k > 0) {
        pass([this](Chunk &chunk, const Tensor &t, const Task &task, Buffers &b) {
          DivideRows<true>(t, task, chunk, b);
        });
      }
      for (int i = first; i < last; ++i) DivideColumns(i);
    }
    pass([this](Chunk &chunk, const Tensor &t, const Task &task, Buffers &b) { MoveWeights(t, task, chunk, b); });
  }

  // Calls body(first row, number of rows, part of the tensor) for each strip of a chunk.
  template <class Body>
  void ForStrips(const Chunk &chunk, const Task &task, Body body) {
    const int64_t columns = FactorsOf(chunk).columns, most = RowsInStrip(columns, task);
    const int64_t end = chunk.end / columns;
    for (int64_t row = chunk.begin / columns; row < end; row += most) {
      const int64_t rows = Min(most, end - row);
      body(row, rows, Chunk{chunk.tensor, row * columns, (row + rows) * columns, {}});
    }
  }

  // Returns the elements of G in a strip. With kNewStates, it makes the momentum first.
  template <unsigned kParts>
  float *Load(const Tensor &t, const Task &task, const Chunk &strip, Buffers &b, double *gradient_sum) {
    float *elements = strips_[static_cast<size_t>(omp_get_thread_num())].get();
    ForTiles(t, task, strip, b, [&](int64_t begin, int n, const float *g) {
      TileSums<Sinkhorn> unused;
      auto *d = reinterpret_cast<float (*)[kTile]>(elements + (begin - strip.begin));
      float *s = LoadState(t, 0, begin, n, b.state[0]);
      RuleTile<Sinkhorn, kParts>(rule_, task, n, b.weight, g, &s, d, nullptr, unused);
      if (kParts == 0) return;
      *gradient_sum += SumSquares(g, n);
      if (!task.low_states) return;
      FillNoise(task.noise, begin, n, b.noise);
      StoreState(t, 0, begin, n, s, b.noise);
      s = LoadState(t, 0, begin, n, b.state[0]);
      RuleTile<Sinkhorn, 0>(rule_, task, n, b.weight, g, &s, d, nullptr, unused);
    });
    return elements;
  }

  // The first pass: makes the momentum, notes the norm of each row as its factor, and adds up the columns as if all
  // rows stayed.
  void MakeMomentum(const Tensor &t, const Task &task, Chunk &chunk, Buffers &b) {
    const Factors &f = FactorsOf(chunk);
    double *sums = ClearedSums(chunk), gradient_sum = 0.0;
    ForStrips(chunk, task, [&](int64_t row, int64_t rows, const Chunk &strip) {
      const float *g = Load<kNewStates>(t, task, strip, b, &gradient_sum);
      for (int64_t i = row; i < row + rows; ++i, g += f.columns) {
        const double norm = std::sqrt(SumOfRow(g, f.rounded, f.columns, b.direction[0]));
        f.of_rows[i] = norm;
        const double factor = rule_.FirstFactor(norm, 0.0);
        if (rule_.pairs > 0 && factor != 0.0) AddToColumns(g, Sinkhorn::Rounded(factor), f.columns, sums);
      }
    });
    chunk.sum[kGradientSum] = gradient_sum;
  }

  // Turns the norms of rows into factors, and returns whether chunks must be added up again.
  bool DecideRows(int i) {
    if (ElementsOf(i) == 0) return false;
    const Factors &f = factors_[static_cast<size_t>(i)];
    double total = 0.0;
    for (int64_t row = 0; row < f.rows; ++row) total += f.of_rows[row];
    const double mean = total / static_cast<double>(f.rows);
    bool any = false;
    for (int64_t row = 0; row < f.rows; ++row) {
      const double norm = f.of_rows[row];
      f.of_rows[row] = rule_.FirstFactor(norm, mean);
      if (f.of_rows[row] == 0.0 && norm != 0.0) any = again_[tasks_[i].first_chunk + row / kRowsInChunk] = true;
    }
    return any;
  }

  // Divides rows by their norms (kDivide), and adds up the columns.
  template <bool kDivide>
  void DivideRows(const Tensor &t, const Task &task, Chunk &chunk, Buffers &b) {
    const Factors &f = FactorsOf(chunk);
    double *sums = ClearedSums(chunk);
    ForStrips(chunk, task, [&](int64_t row, int64_t rows, const Chunk &strip) {
      if (AreZero(f.of_rows + row, rows)) return;
      const float *g = Load<0>(t, task, strip, b, nullptr);
      for (int64_t i = row; i < row + rows; ++i, g += f.columns) {
        if (f.of_rows[i] == 0.0) continue;
        if (kDivide) DivideRow(f, i, g, b);
        AddToColumns(g, Sinkhorn::Rounded(f.of_rows[i]), f.columns, sums);
      }
    });
  }

  void DivideColumns(int i) {
    if (ElementsOf(i) == 0) return;
    const Factors &f = factors_[static_cast<size_t>(i)];
    const int64_t chunks = tasks_[i].last_chunk - tasks_[i].first_chunk;
    for (int64_t chunk = 1; chunk < chunks; ++chunk) {
      for (int64_t j = 0; j < f.columns; ++j) f.sums[j] += f.sums[chunk * f.columns + j];
    }
    for (int64_t j = 0; j < f.columns; ++j) {
      f.of_columns[j] = rule_.NextFactor(f.of_columns[j], f.sums[j]);
      f.rounded[j] = Sinkhorn::Rounded(f.of_columns[j]);
    }
  }

  // The last pass: divides rows once more, and moves the weights.
  void MoveWeights(const Tensor &t, const Task &task, Chunk &chunk, Buffers &b) {
    const Factors &f = FactorsOf(chunk);
    ForStrips(chunk, task, [&](int64_t row, int64_t rows, Chunk strip) {
      float *elements = strips_[static_cast<size_t>(omp_get_thread_num())].get();
      if (!AreZero(f.of_rows + row, rows)) Load<0>(t, task, strip, b, nullptr);
      float *__restrict g = elements;
      const float *__restrict c = f.rounded;
      for (int64_t i = row; i < row + rows; ++i, g += f.columns) {
        if (f.of_rows[i] == 0.0) {
          memset(g, 0, static_cast<size_t>(f.columns) * sizeof(float));
          continue;
        }
        if (rule_.pairs > 0) DivideRow(f, i, g, b);
        const float factor = rule_.LastFactor(f.of_rows[i], f.columns);
        MS_OPTIM_IVDEP
        for (int64_t j = 0; j < f.columns; ++j) g[j] = g[j] * c[j] * factor;
      }
      MoveMatrix(t, task, elements, strip, b);
      for (Sum sum : {kWeightSum, kDirectionSum}) chunk.sum[sum] += strip.sum[sum];
    });
  }

  void DivideRow(const Factors &f, int64_t i, const float *g, Buffers &b) {
    f.of_rows[i] = rule_.NextFactor(f.of_rows[i], SumOfRow(g, f.rounded, f.columns, b.direction[0]));
  }

  static bool AreZero(const double *factors, int64_t count) {
    return std::all_of(factors, factors + count, [](double factor) { return factor == 0.0; });
  }

  const Factors &FactorsOf(const Chunk &chunk) const { return factors_[static_cast<size_t>(chunk.tensor)]; }

  double *ClearedSums(const Chunk &chunk) const {
    const Factors &f = FactorsOf(chunk);
    double *sums = f.sums + (&chunk - chunks_.get() - tasks_[chunk.tensor].first_chunk) * f.columns;
    std::fill_n(sums, f.columns, 0.0);
    return sums;
  }

  const Sinkhorn rule_;
  std::vector<Factors> factors_;
  std::unique_ptr<double[]> numbers_;
  std::unique_ptr<float[]> rounded_;
  std::vector<std::unique_ptr<float[]>> strips_;  // of each thread
  std::unique_ptr<bool[]> again_;                 // of each chunk: whether it is added up again
};

template <>
inline Status Run<Sinkhorn>(const Step &step) {
  return SinkhornEngine(step).Run();
}

}  // namespace
}  // namespace ms_optim
