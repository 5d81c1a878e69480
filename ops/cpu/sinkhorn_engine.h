// Runs Sinkhorn: divides the rows and columns of matrices by their norms in turn, and moves the weights.
//
// A step keeps a factor for each row and column, and sums for the columns of each chunk; no matrix. A pass reads each
// row once: as soon as its own sum gives its factor, the row enters the sums of the columns. So K divisions take
// (K + 1) / 2 passes: the first makes the momentum, the last moves the weights.
//
// Which rows become 0 depends on the norms of all rows. The first pass adds up all of them, and the chunks where some
// become 0, but are not 0 already, are added up again. A chunk is a band of rows.
#pragma once

#include <algorithm>

#include "matrices.h"
#include "sinkhorn.h"

namespace ms_optim {
namespace {

static_assert(kRowsInBand <= kTile, "the means of a band's rows fit into a buffer");
static_assert(Sinkhorn::kLanes == kLanes && Sinkhorn::kSegment == kTile, "sums are those of lanes and tiles");

// Adds up lanes in pairs.
template <class T>
MS_OPTIM_FN double SumOfPairs(const T (&lane)[kLanes]) {
  double sum[kLanes];
  for (int i = 0; i < kLanes; ++i) sum[i] = static_cast<double>(lane[i]);
  for (int pairs = kLanes / 2; pairs > 0; pairs /= 2) {
    for (int i = 0; i < pairs; ++i) sum[i] += sum[i + pairs];
  }
  return sum[0];
}

// Computes a sum of squares of products in float64. Most rows for which it is asked are zeros: tokens not seen.
inline double ExactSum(const float *x, const float *c, int n) {
  uint32_t any = 0;
  for (int i = 0; i < n; ++i) any |= BitsOf(x[i] * c[i]) << 1;
  if (any == 0) return 0.0;
  double lane[kLanes] = {};
  for (int i = 0; i < n; ++i) {
    const auto product = static_cast<double>(x[i] * c[i]);
    lane[i % kLanes] += product * product;
  }
  return SumOfPairs(lane);
}

// Four rows and their factors, which enter the sums of the columns.
struct Factored {
  const float *rows[4];
  float factors[4];

  // Adds the squares of the rows' elements, each multiplied by its factor: in float32, and then in float64.
  MS_OPTIM_FN void AddTo(double *sums, int64_t j) const {
    const float p0 = factors[0] * rows[0][j], p1 = factors[1] * rows[1][j], p2 = factors[2] * rows[2][j],
                p3 = factors[3] * rows[3][j];
    sums[j] += static_cast<double>((p0 * p0 + p1 * p1) + (p2 * p2 + p3 * p3));
  }
};

inline void AddToColumns(const Factored &four, int64_t columns, double *__restrict sums) {
  const Factored own = four;
  MS_OPTIM_IVDEP
  for (int64_t j = 0; j < columns; ++j) own.AddTo(sums, j);
}

// Rows whose elements memory holds.
template <int kCount>
struct HeldRows {
  static constexpr int kRows = kCount;
  const float *rows[kRows];

  template <int k>
  MS_OPTIM_FN float At(int64_t j, int) {
    return rows[k][j];
  }
  template <int k>
  MS_OPTIM_FN void Put(int64_t, float) const {}
  template <int k>
  MS_OPTIM_FN void Fetch(int64_t j) const {
    FetchAhead(rows[k] + j);
  }
  void EndSegment(int64_t, int) {}
};

// Rows of the momentum, in whose place the loop makes the elements of G. It adds up the squares of the gradients.
template <int kCount>
struct MadeRows {
  static constexpr int kRows = kCount;
  Sinkhorn rule;
  float factor;  // of the gradients
  float *rows[kRows];
  const float *gradients[kRows];
  double squares = 0.0;
  float lanes[kRows][kLanes] = {};

  template <int k>
  MS_OPTIM_FN float At(int64_t j, int lane) {
    const float g = gradients[k][j];
    float state = rows[k][j], element;
    lanes[k][lane] += g * g;
    rule.Moments(factor * g, &state);
    rule.Directions(0.0f, factor * g, &state, &element);
    return element;
  }
  template <int k>
  MS_OPTIM_FN void Put(int64_t j, float element) const {
    rows[k][j] = element;
  }
  // The loop reads eight rows at once, and computes much. It waits for a tenth of the time if what it reads next is
  // not in the first cache.
  template <int k>
  MS_OPTIM_FN void Fetch(int64_t j) const {
    constexpr int64_t kSoon = 192;
    FetchAhead(rows[k] + j);
    FetchAhead(gradients[k] + j);
    __builtin_prefetch(rows[k] + j + kSoon, 1, 3);
    __builtin_prefetch(gradients[k] + j + kSoon, 0, 3);
  }
  void EndSegment(int64_t begin, int n) {
    for (int k = 0; k < kRows; ++k) {
      squares += ExactWhereLost(SumOfLanes(lanes[k]), gradients[k] + begin, n);
      for (float &lane : lanes[k]) lane = 0.0f;
    }
  }
};

// Computes for rows the sums of squares of the products of their elements and the factors of columns. Several rows at
// once keep memory busier than one after the other. In the same loop (kAdds), rows that were read before enter the sums
// of the columns: their arithmetic takes the time in which memory delivers the next ones. Elements that are
// made are stored after all reads: rows are often whole pages apart (see AddGiven).
template <bool kAdds, class Source>
void SumRows(Source &source, const float *factors, int64_t columns, double *totals, const Factored &before = {},
             double *sums = nullptr) {
  constexpr int kRows = Source::kRows, kLast = kRows - 1;
  static_assert(kRows == 1 || kRows == 4, "the loop names each row, or it would not be vectorized");
  const Factored own = before;
  Source from = source;
  for (int k = 0; k < kRows; ++k) totals[k] = 0.0;
  for (int64_t begin = 0; begin < columns; begin += kTile) {
    const int n = static_cast<int>(Min(int64_t{kTile}, columns - begin));
    const float *c = factors + begin;
    float lanes[4][kLanes] = {};
    const auto add = [&](int i, int lane) __attribute__((always_inline)) {
      const int64_t j = begin + i;
      const float e0 = from.template At<0>(j, lane), p0 = e0 * c[i];
      lanes[0][lane] += p0 * p0;
      float e1 = 0.0f, e2 = 0.0f, e3 = 0.0f;
      if (kRows > 1) {
        e1 = from.template At<kLast / 3>(j, lane);
        e2 = from.template At<2 * kLast / 3>(j, lane);
        e3 = from.template At<kLast>(j, lane);
        const float p1 = e1 * c[i], p2 = e2 * c[i], p3 = e3 * c[i];
        lanes[1][lane] += p1 * p1;
        lanes[2][lane] += p2 * p2;
        lanes[3][lane] += p3 * p3;
      }
      from.template Put<0>(j, e0);
      if (kRows > 1) {
        from.template Put<kLast / 3>(j, e1);
        from.template Put<2 * kLast / 3>(j, e2);
        from.template Put<kLast>(j, e3);
      }
    };
    const int whole = n / kLanes * kLanes;
    for (int i = 0; i < whole; i += kLanes) {
      from.template Fetch<0>(begin + i);
      if (kRows > 1) {
        from.template Fetch<kLast / 3>(begin + i);
        from.template Fetch<2 * kLast / 3>(begin + i);
        from.template Fetch<kLast>(begin + i);
      }
      if (kAdds) {
        MS_OPTIM_IVDEP
        for (int lane = 0; lane < kLanes; ++lane) own.AddTo(sums, begin + i + lane);
      }
      MS_OPTIM_IVDEP
      for (int lane = 0; lane < kLanes; ++lane) add(i + lane, lane);
    }
    for (int i = whole; i < n; ++i) {
      if (kAdds) own.AddTo(sums, begin + i);
      add(i, i - whole);
    }
    for (int k = 0; k < kRows; ++k) {
      const double sum = SumOfPairs(lanes[k]);
      totals[k] += IsExact(sum) ? sum : ExactSum(from.rows[k] + begin, c, n);
    }
    from.EndSegment(begin, n);
  }
  source = from;
}

// The momentum of a matrix and its gradients, of which G is made.
struct Making {
  Sinkhorn rule;
  float factor;     // of the gradients
  double *squares;  // the sum of the gradients' squares
};

// Takes rows four at a time: decides their factors from their sums, and adds them to the sums of the columns together
// with the next four. If they are made first, their elements are the momentum until then.
//
// Decide returns the factor of a row by its index and sum.
template <class Decide>
class Rows {
 public:
  Rows(int64_t columns, const float *factors, double *sums, Decide decide, const Making *making = nullptr)
      : columns_(columns), factors_(factors), sums_(sums), decide_(decide), making_(making) {
    std::fill_n(sums, columns, 0.0);
  }

  // Moves the elements of those that wait, at most three, into memory where they stay until they are taken.
  void Keep(float *memory) {
    AddDecided();
    for (int k = 0; k < count_; ++k, memory += columns_) {
      if (rows_[k] != memory) memcpy(memory, rows_[k], static_cast<size_t>(columns_) * sizeof(float));
      rows_[k] = memory;
    }
  }

  void Add(int64_t index, const float *elements, const float *gradients) {
    indices_[count_] = index;
    rows_[count_] = elements;
    gradients_[count_] = gradients;
    if (++count_ == 4) Take();
  }

  // Takes those that are left.
  void Finish() {
    if (count_ > 0) Take();
    AddDecided();
  }

 private:
  void Take() {
    double totals[4];
    if (count_ == 4) {
      Sum<4>(0, totals);
    } else {
      for (int k = 0; k < count_; ++k) Sum<1>(k, totals + k);
    }
    for (int k = 0; k < 4; ++k) {
      decided_.rows[k] = rows_[k < count_ ? k : 0];
      decided_.factors[k] = k < count_ ? Sinkhorn::Lifted(decide_(indices_[k], totals[k])) : 0.0f;
    }
    has_decided_ = true;
    count_ = 0;
  }

  template <int kRows>
  void Sum(int first, double *totals) {
    if (making_ != nullptr) {
      MadeRows<kRows> source{making_->rule, making_->factor, {}, {}};
      for (int k = 0; k < kRows; ++k) {
        source.rows[k] = const_cast<float *>(rows_[first + k]);
        source.gradients[k] = gradients_[first + k];
      }
      Sum(source, totals);
      *making_->squares += source.squares;
    } else {
      HeldRows<kRows> source;
      for (int k = 0; k < kRows; ++k) source.rows[k] = rows_[first + k];
      Sum(source, totals);
    }
  }

  template <class Source>
  void Sum(Source &source, double *totals) {
    if (has_decided_) {
      SumRows<true>(source, factors_, columns_, totals, decided_, sums_);
    } else {
      SumRows<false>(source, factors_, columns_, totals);
    }
    has_decided_ = false;
  }

  void AddDecided() {
    if (has_decided_) AddToColumns(decided_, columns_, sums_);
    has_decided_ = false;
  }

  const int64_t columns_;
  const float *const factors_;
  double *const sums_;
  const Decide decide_;
  const Making *const making_;
  int64_t indices_[4];
  const float *rows_[4], *gradients_[4];
  int count_ = 0;
  bool has_decided_ = false;
  Factored decided_;
};

class SinkhornEngine : StepEngine {
 public:
  explicit SinkhornEngine(const Step &step)
      : StepEngine(step), rule_(step.constants + kRuleConstants, int64_t{*step.global_step} + 1, step.rule_flags) {
    rows_in_chunk_ = kRowsInBand;
  }

  Status Run() {
    const bool moves = Has(kMomentsStage);
    if (moves != Has(kApplyStage) || (step_.flags & kReturned) != 0) return kWrongFlags;
    if (const Status status = Begin(!Has(kGradientStage)); status != kOk) return status;
    if (moves && !Fits()) return kWrongSize;
    const Prologue prologue(step_, step_.constants[kClipNorm] > 0.0);
    Open(prologue);
    if (step_.stages == kGradientStage) return kOk;
    if (!Applies(prologue)) return Skip();
    DecideAll(rule_, 0, step_.count);
    if (moves) {
      Reserve();  // allocates all memory, before anything moves
      for (int first = 0, last = 0; first < step_.count; first = last) {
        last = LastOfRun(first, kCachedElements);
        Move(first, last, prologue.sums_gradients);
      }
      AddSums(0, step_.count);
    }
    for (int i = 0; i < step_.count; ++i) Report(i, true);
    return Commit(true);
  }

 private:
  // The factors of a tensor's rows and columns, and of each of its chunks the sums of columns and that of norms of
  // rows.
  struct Factors {
    int64_t columns, rows;
    bool in_place;  // between the first pass and the last, its state holds G
    double *of_rows, *of_columns, *sums, *norms;
    float *rounded;  // of_columns in float32
  };

  // Rows that a pass takes together.
  struct Strip : Chunk {
    int64_t row, rows;
  };

  // Tells whether this process has each matrix whole or not at all.
  bool Fits() const {
    for (int i = 0; i < step_.count; ++i) {
      const Tensor &t = step_.tensors[i];
      if (t.begin != t.end && (t.begin != 0 || t.end != t.size)) return false;
    }
    return true;
  }

  // The most rows of a strip: about a tile, or one. If states are codes, these are whole blocks.
  static int64_t RowsInStrip(int64_t columns, const Task &task) {
    const int64_t whole = task.low_states ? kCodeBlock / std::gcd(columns, kCodeBlock) : 1;
    return Max(1, kTile / (columns * whole)) * whole;
  }

  void Reserve() {
    factors_.resize(static_cast<size_t>(step_.count));
    int64_t numbers = 0, rounded = 0, strip = 0;
    for (int i = 0; i < step_.count; ++i) {
      if (ElementsOf(i) == 0) continue;
      const Tensor &t = step_.tensors[i];
      Factors &f = factors_[static_cast<size_t>(i)];
      f.rows = Max(1, t.rows);
      f.columns = t.size / f.rows;
      f.in_place = t.state_type[0] == DType::kFloat32 && rule_.beta >= Sinkhorn::kLeastDivisor;
      numbers += f.rows + f.columns + (f.columns + 1) * ChunksOf(i);
      rounded += f.columns;
      const int64_t rows = RowsInStrip(f.columns, tasks_[i]);
      // One of each place, besides those that wait.
      strip = Max(strip, (RowOrder(f.rows, f.columns, f.in_place).places * Min(rows, f.rows) + 3) * f.columns);
    }
    numbers_.reset(new double[static_cast<size_t>(numbers)]);
    rounded_.reset(new float[static_cast<size_t>(rounded)]);
    strips_.resize(static_cast<size_t>(omp_get_max_threads()));
    for (auto &own : strips_) own.reset(new float[static_cast<size_t>(strip)]);
    again_.reset(new bool[static_cast<size_t>(tasks_[step_.count - 1].last_chunk)]());
    double *next = numbers_.get();
    float *next_rounded = rounded_.get();
    for (int i = 0; i < step_.count; ++i) {
      if (ElementsOf(i) == 0) continue;
      Factors &f = factors_[static_cast<size_t>(i)];
      f.of_rows = next;
      f.of_columns = f.of_rows + f.rows;
      f.sums = f.of_columns + f.columns;
      f.norms = f.sums + f.columns * ChunksOf(i);
      next = f.norms + ChunksOf(i);
      f.rounded = next_rounded;
      next_rounded += f.columns;
      std::fill_n(f.of_columns, f.columns, 1.0);
      std::fill_n(f.rounded, f.columns, 1.0f);
    }
  }

  // Takes tensors through all passes. Passes go there and back: what one read last is still in the cache.
  void Move(int first, int last, bool backwards) {
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
    const auto move = [&](unsigned parts) {
      pass([=](Chunk &chunk, const Tensor &t, const Task &task, Buffers &b) { MoveWeights(t, task, parts, chunk, b); });
    };
    MoveBySums(rule_, first, last, move);
  }

  // Returns the order in which a chunk's rows enter the sums of columns.
  RowOrder OrderOf(const Chunk &chunk) const {
    const Factors &f = FactorsOf(chunk);
    return {(chunk.end - chunk.begin) / f.columns, f.columns, f.in_place};
  }

  // Calls body(strips, number) for the strips of a chunk: one of each place at once.
  template <class Body>
  void ForStrips(const Chunk &chunk, const Task &task, const RowOrder &order, Body body) {
    const int64_t columns = FactorsOf(chunk).columns, most = RowsInStrip(columns, task), first = chunk.begin / columns;
    for (int64_t k = 0; k < order.Begin(1); k += most) {
      Strip strips[4];
      int count = 0;
      for (int64_t place = 0; place < order.places; ++place) {
        const int64_t begin = order.Begin(place) + k, rows = Min(most, order.Begin(place + 1) - begin);
        const int64_t row = first + begin;
        if (rows > 0) strips[count++] = Strip{{chunk.tensor, row * columns, (row + rows) * columns, {}}, row, rows};
      }
      body(strips, count);
    }
  }

  // What is read of a strip's rows, in their own memory or in a thread's.
  struct Loaded {
    const float *elements;
    const float *gradients = nullptr;  // if elements are made of the momentum and these
  };

  // Adds up the columns of a chunk: of all rows (kAll), or of those that did not become 0. Load returns what is read of
  // a strip, for which it is given memory.
  template <bool kAll, class Load, class Decide>
  void AddRows(const Chunk &chunk, const Task &task, Load load, Decide decide, const Making *making = nullptr) {
    const Factors &f = FactorsOf(chunk);
    Rows adding(f.columns, f.rounded, SumsOfColumns(chunk), decide, making);
    ForStrips(chunk, task, OrderOf(chunk), [&](const Strip *strips, int count) {
      Loaded loaded[4] = {};
      float *memory = Memory() + 3 * f.columns;
      for (int k = 0; k < count; memory += strips[k++].rows * f.columns) {
        if (kAll || !AreZero(strips[k])) loaded[k] = load(strips[k], memory);
      }
      for (int64_t k = 0; k < strips[0].rows; ++k) {
        for (int place = 0; place < count; ++place) {
          const int64_t row = strips[place].row + k;
          if (k >= strips[place].rows || (!kAll && f.of_rows[row] == 0.0)) continue;
          const float *g = loaded[place].gradients;
          adding.Add(row, loaded[place].elements + k * f.columns, g != nullptr ? g + k * f.columns : nullptr);
        }
      }
      // The next strips overwrite this memory. Gradients in it never wait: before the last strips, each of the four
      // places has the same number of rows.
      if (!f.in_place) adding.Keep(Memory());
    });
    adding.Finish();
  }

  // This thread's memory: for three rows that wait, and a strip of each place.
  float *Memory() const { return strips_[static_cast<size_t>(omp_get_thread_num())].get(); }

  // Returns what the loop over a strip's rows makes G of, in the place of the momentum.
  Loaded LoadBoth(const Tensor &t, const Task &task, const Strip &strip, float *memory, Buffers &b) {
    const float *momentum = static_cast<const float *>(t.state[0]) + strip.begin;
    if (t.gradient_type == DType::kFloat32 && task.row == 0) {
      return {momentum, static_cast<const float *>(t.gradient) + strip.begin};
    }
    ForTiles(t, task, strip, b, [&](int64_t begin, int n, const float *g) {
      memcpy(memory + (begin - strip.begin), g, static_cast<size_t>(n) * sizeof(float));
    });
    return {momentum, memory};
  }

  // Makes the momentum of a strip, and returns the elements of G.
  Loaded Make(const Tensor &t, const Task &task, const Strip &strip, float *memory, Chunk &chunk, Buffers &b) {
    ForTiles(t, task, strip, b, [&](int64_t begin, int n, const float *g) {
      float *s = LoadState(t, 0, begin, n, b.state[0]);
      MomentumTile(task.factor, g, s, n);
      if (task.low_states) FillNoise(task.noise, begin, n, b.noise);
      StoreState(t, 0, begin, n, s, b.noise);
      chunk.sum[kGradientSum] += SumSquares(g, n);
    });
    return {Load(t, task, strip, memory, b)};
  }

  // Returns the elements of G in a strip, of a pass after the momentum was made.
  float *Load(const Tensor &t, const Task &task, const Strip &strip, float *memory, Buffers &b) {
    if (FactorsOf(strip).in_place) return static_cast<float *>(t.state[0]) + strip.begin;
    ForTiles(t, task, strip, b, [&](int64_t begin, int n, const float *g) {
      const float *__restrict s = LoadState(t, 0, begin, n, b.state[0]);
      float *__restrict to = memory + (begin - strip.begin);
      const float factor = task.factor;
      const Sinkhorn rule = rule_;
      MS_OPTIM_IVDEP
      for (int i = 0; i < n; ++i) rule.Directions(0.0f, factor * g[i], s + i, to + i);
    });
    return memory;
  }

  void MomentumTile(float factor, const float *__restrict g, float *__restrict s, int n) const {
    const Sinkhorn rule = rule_;
    MS_OPTIM_IVDEP
    for (int i = 0; i < n; ++i) rule.Moments(factor * g[i], s + i);
  }

  // The first pass: makes the momentum, notes the norm of each row as its factor, and adds up the columns as if all
  // rows stayed.
  void MakeMomentum(const Tensor &t, const Task &task, Chunk &chunk, Buffers &b) {
    const Factors &f = FactorsOf(chunk);
    chunk.sum[kGradientSum] = 0.0;
    const Making in_place{rule_, task.factor, &chunk.sum[kGradientSum]};
    AddRows<true>(
        chunk, task,
        [&](const Strip &strip, float *memory) {
          return f.in_place ? LoadBoth(t, task, strip, memory, b) : Make(t, task, strip, memory, chunk, b);
        },
        [&](int64_t row, double sum) {
          f.of_rows[row] = std::sqrt(sum);
          return rule_.FirstFactor(f.of_rows[row], 0.0);
        },
        f.in_place ? &in_place : nullptr);
    double norms[kLanes] = {};
    const int64_t first = chunk.begin / f.columns, rows = chunk.end / f.columns - first;
    for (int64_t k = 0; k < rows; ++k) norms[k % kLanes] += f.of_rows[first + k];
    f.norms[IndexOf(chunk)] = SumOfPairs(norms);
  }

  // Turns the norms of rows into factors, and returns whether chunks must be added up again.
  bool DecideRows(int i) {
    if (ElementsOf(i) == 0) return false;
    const Factors &f = factors_[static_cast<size_t>(i)];
    double total = 0.0;
    for (int64_t k = 0; k < ChunksOf(i); ++k) total += f.norms[k];
    const double mean = total / static_cast<double>(f.rows);
    bool any = false;
    for (int64_t row = 0; row < f.rows; ++row) {
      const double norm = f.of_rows[row];
      f.of_rows[row] = rule_.FirstFactor(norm, mean);
      if (f.of_rows[row] == 0.0 && norm != 0.0) any = again_[tasks_[i].first_chunk + row / kRowsInBand] = true;
    }
    return any;
  }

  // Divides rows by their norms (kDivide), and adds up the columns.
  template <bool kDivide>
  void DivideRows(const Tensor &t, const Task &task, Chunk &chunk, Buffers &b) {
    const Factors &f = FactorsOf(chunk);
    AddRows<false>(
        chunk, task, [&](const Strip &strip, float *memory) { return Loaded{Load(t, task, strip, memory, b)}; },
        [&](int64_t row, double sum) {
          if (kDivide) f.of_rows[row] = rule_.NextFactor(f.of_rows[row], sum);
          return f.of_rows[row];
        });
  }

  void DivideColumns(int i) {
    if (ElementsOf(i) == 0) return;
    const Factors &f = factors_[static_cast<size_t>(i)];
    for (int64_t chunk = 1; chunk < ChunksOf(i); ++chunk) {
      for (int64_t j = 0; j < f.columns; ++j) f.sums[j] += f.sums[chunk * f.columns + j];
    }
    for (int64_t j = 0; j < f.columns; ++j) {
      f.of_columns[j] = rule_.NextFactor(f.of_columns[j], f.sums[j] * Sinkhorn::kLowered);
      f.rounded[j] = Sinkhorn::Rounded(f.of_columns[j]);
    }
  }

  // The last pass: divides rows once more, moves the weights, and leaves the momentum in the state. If norms are held,
  // a pass that only adds up comes before it.
  void MoveWeights(const Tensor &t, const Task &task, unsigned parts, Chunk &chunk, Buffers &b) {
    const Factors &f = FactorsOf(chunk);
    RowOrder order = OrderOf(chunk);
    // Short rows are read and written faster one after the other.
    if (f.columns <= kTile) order.places = 1;
    ForStrips(chunk, task, order, [&](Strip *strips, int count) {
      LastRows rows[4];
      float *memory = Memory();
      for (int k = 0; k < count; memory += strips[k++].rows * f.columns) {
        const bool loads = f.in_place || !AreZero(strips[k]);
        rows[k].updates = memory;
        rows[k].elements = loads ? Load(t, task, strips[k], memory, b) : memory;
      }
      DivideLast(strips, count, rows);
      for (int k = 0; k < count; ++k) {
        Strip &strip = strips[k];
        if (parts != (kSumUp | kMoveWeights) || (strip.rows > 1 && f.columns % kLanes != 0)) {
          MoveInParts(t, task, parts, rows[k], strip, b);
        } else if (f.in_place) {
          MoveInOneLoop<true>(t, task, rows[k], strip, b);
        } else {
          MoveInOneLoop<false>(t, task, rows[k], strip, b);
        }
        for (int s = 0; s < kSums; ++s) chunk.sum[s] += strip.sum[s];
      }
    });
  }

  // The elements of G in a strip's rows, memory for their updates, and the factors of rows in these.
  struct LastRows {
    float *elements, *updates, factors[kRowsInBand];
  };

  // Divides the rows of strips by their norms once more, four at a time, and notes their factors in the update.
  void DivideLast(const Strip *strips, int count, LastRows *last) const {
    const Factors &f = FactorsOf(strips[0]);
    const float *rows[4];
    double before[4], sums[4];
    float *after[4];
    int waiting = 0;
    const auto divide = [&] {
      if (waiting == 4) {
        HeldRows<4> four = {{rows[0], rows[1], rows[2], rows[3]}};
        SumRows<false>(four, f.rounded, f.columns, sums);
      } else {
        for (int k = 0; k < waiting; ++k) {
          HeldRows<1> row = {{rows[k]}};
          SumRows<false>(row, f.rounded, f.columns, sums + k);
        }
      }
      for (int k = 0; k < waiting; ++k) *after[k] = rule_.LastFactor(rule_.NextFactor(before[k], sums[k]), f.columns);
      waiting = 0;
    };
    for (int64_t row = 0; row < strips[0].rows; ++row) {
      for (int k = 0; k < count && row < strips[k].rows; ++k) {
        const double factor = f.of_rows[strips[k].row + row];
        if (factor == 0.0 || rule_.pairs == 0) {
          last[k].factors[row] = rule_.LastFactor(factor, f.columns);
          continue;
        }
        rows[waiting] = last[k].elements + row * f.columns;
        before[waiting] = factor;
        after[waiting] = &last[k].factors[row];
        if (++waiting == 4) divide();
      }
    }
    if (waiting > 0) divide();
  }

  // Moves the weights of a strip, and makes its momentum again (kRestores), in one loop over each row.
  template <bool kRestores>
  void MoveInOneLoop(const Tensor &t, const Task &task, const LastRows &last, Strip &strip, Buffers &b) {
    const Factors &f = FactorsOf(strip);
    ForTiles(t, task, strip, b, [&](int64_t begin, int n, const float *g) {
      TileSums<KnownDirection> sums;
      float *w = LoadWeight(t, begin, n, b.weight);
      StartTile<ElementwiseRule>(t, task, begin, n, w);
      for (int first = 0, end = 0; first < n; first = end) {
        const int64_t offset = begin - strip.begin + first, row = offset / f.columns, column = offset % f.columns;
        end = static_cast<int>(Min(n, first + f.columns - column));
        const auto move = f.of_rows[strip.row + row] == 0.0 ? &SinkhornEngine::MoveRow<true, kRestores>
                                                            : &SinkhornEngine::MoveRow<false, kRestores>;
        (this->*move)(t, task, begin + first, end - first, last.elements + offset, f.rounded + column,
                      last.factors[row], g + first, w + first, b.direction[0] + first, b.weight_before + first, sums);
      }
      AddMatrixSums(sums, b.weight_before, b.direction[0], n, strip.sum);
      if (task.noisy_weight) FillNoise(task.noise, begin, n, b.noise);
      StoreWeight(t, begin, n, w, task.noisy_weight ? b.noise : nullptr);
      AverageTile(t, task, begin, n, b.weight);
    });
  }

  // A row, or the part of one in a tile. All is read before anything is stored (see AddGiven). The processor is told
  // what the loop reaches a tile later of weights and gradients: rows are too short for it to look ahead.
  template <bool kIsZero, bool kRestores>
  void MoveRow(const Tensor &t, const Task &task, int64_t begin, int n, float *__restrict elements,
               const float *__restrict c, float factor, const float *__restrict g, float *__restrict w,
               float *__restrict directions, float *__restrict before, TileSums<KnownDirection> &total) const {
    const Sinkhorn rule = rule_;
    TileSums<KnownDirection> sums = total;
    Task unscaled = task;
    const float of_gradient = task.factor;
    unscaled.factor = 1.0f;
    const char *weight = static_cast<const char *>(t.weight), *gradient = static_cast<const char *>(t.gradient);
    const int64_t weight_bytes = SizeOf(t.weight_type), gradient_bytes = SizeOf(t.gradient_type);
    const auto fetch = [=](int i) __attribute__((always_inline)) {
      __builtin_prefetch(weight + (begin + i + kTile) * weight_bytes, 1, 2);
      __builtin_prefetch(gradient + (begin + i + kTile) * gradient_bytes, 0, 2);
    };
    ForLanes(n, fetch, [&](int i, int lane) __attribute__((always_inline)) {
      const float momentum = kRestores ? rule.MomentumOf(elements[i], of_gradient * g[i]) : 0.0f;
      const float update = kIsZero ? 0.0f : elements[i] * c[i] * factor;
      sums.lane[kWeightSum][lane] += w[i] * w[i];
      float d[kMaxDirections];
      Advance<KnownDirection, false>(KnownDirection{}, unscaled, w[i], update, nullptr, d);
      sums.lane[kDirectionSum][lane] += d[0] * d[0];
      if (kRestores) elements[i] = momentum;
      directions[i] = d[0];
      before[i] = w[i];
      w[i] -= Moved<1>(unscaled, d[0], 0.0f);
    });
    total = sums;
  }

  // Does the same for any shape and for norms that are held, in a loop for each part.
  void MoveInParts(const Tensor &t, const Task &task, unsigned parts, const LastRows &last, Strip &strip, Buffers &b) {
    const Factors &f = FactorsOf(strip);
    for (int64_t row = 0; row < strip.rows; ++row) {
      const float *elements = last.elements + row * f.columns, *c = f.rounded, factor = last.factors[row];
      float *update = last.updates + row * f.columns;
      if (f.of_rows[strip.row + row] == 0.0) {
        std::fill_n(update, f.columns, 0.0f);
        continue;
      }
      MS_OPTIM_IVDEP
      for (int64_t j = 0; j < f.columns; ++j) update[j] = elements[j] * c[j] * factor;
    }
    if (f.in_place && (parts & kMoveWeights) != 0) RestoreMomentum(t, task, strip, b);
    MoveMatrix(t, task, parts, last.updates, strip, b);
  }

  // Makes the momentum of the elements of G that a state holds.
  void RestoreMomentum(const Tensor &t, const Task &task, const Strip &strip, Buffers &b) {
    ForTiles(t, task, strip, b, [&](int64_t begin, int n, const float *__restrict g) {
      float *__restrict s = static_cast<float *>(t.state[0]) + begin;
      const float factor = task.factor;
      const Sinkhorn rule = rule_;
      MS_OPTIM_IVDEP
      for (int i = 0; i < n; ++i) s[i] = rule.MomentumOf(s[i], factor * g[i]);
    });
  }

  bool AreZero(const Strip &strip) const {
    const double *factors = FactorsOf(strip).of_rows + strip.row;
    return std::all_of(factors, factors + strip.rows, [](double factor) { return factor == 0.0; });
  }

  const Factors &FactorsOf(const Chunk &chunk) const { return factors_[static_cast<size_t>(chunk.tensor)]; }

  int64_t ChunksOf(int i) const { return tasks_[i].last_chunk - tasks_[i].first_chunk; }

  // Returns which of its tensor's chunks a chunk is.
  int64_t IndexOf(const Chunk &chunk) const { return &chunk - chunks_.get() - tasks_[chunk.tensor].first_chunk; }

  double *SumsOfColumns(const Chunk &chunk) const {
    const Factors &f = FactorsOf(chunk);
    return f.sums + IndexOf(chunk) * f.columns;
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
