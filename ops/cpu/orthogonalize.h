// Replaces matrices by orthogonal ones near them, by the iteration of Newton and Schulz that Muon uses.
//
// A matrix of A rows and B columns is taken as X of a rows and b columns, transposed if A > B, of norm 1. An iteration
// with the coefficients a, b and c is S = X X^T, Z = b S + c S S, X <- Z X + a X.
//
// If X is wide, a run of iterations multiplies with it twice only, at its beginning and at its end, and else with
// matrices of a by a (Dao-AILab, "Gram Newton-Schulz", 2026): with S = X X^T and Q = I, each iteration is Z = b S + c S
// S, Q <- Q Z + a Q, W = S Z + a S, S <- Z W + a W, and at the end X <- Q X. Rounding grows in S by all that X grows,
// so a run ends in time: see Muon::MostGrowth.
//
// One thread computes a number, always in the same order, so no bit depends on the thread.
#pragma once

#include <omp.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "denormals.h"
#include "lanes.h"
#include "muon.h"
#include "products.h"
#include "step.h"

namespace ms_optim {
namespace {

// A matrix whose rows are rows of a tensor.
struct Matrix {
  const int64_t *entry;  // its row in Step::matrices
  float *tensor;         // the directions of that tensor, which are orthogonalized in place
  float *row_average;    // NorMuon's V of that tensor's rows; null: rows are not normalized
  double scale;          // the factor of the orthogonal matrix

  int64_t Rows() const { return entry[kRun] * entry[kRuns]; }
  int64_t Columns() const { return entry[kColumns]; }
  bool IsTall() const { return Rows() > Columns(); }
  int64_t TensorRow(int64_t r) const { return entry[kFirstRow] + r / entry[kRun] * entry[kStride] + r % entry[kRun]; }
  float *Row(int64_t r) const { return tensor + TensorRow(r) * Columns(); }
};

// Runs bodies in parallel, or one after the other if the caller is one of several threads already.
class Team {
 public:
  Team(bool is_parallel, ProductBuffers *buffers) : is_parallel_(is_parallel), buffers_(buffers) {}

  template <class Body>
  void For(int64_t n, Body body) const {
    if (!is_parallel_) {
      for (int64_t i = 0; i < n; ++i) body(i, *buffers_);
      return;
    }
#pragma omp parallel
    {
      const DenormalsAreZero in_this_thread;
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < n; ++i) body(i, buffers_[omp_get_thread_num()]);
    }
  }

 private:
  const bool is_parallel_;
  ProductBuffers *buffers_;
};

// Orthogonalizes some matrices at once, with products of float or bfloat16 numbers.
template <class T>
class Orthogonalization {
 public:
  // Returns how many numbers it needs for a matrix.
  static int64_t Numbers(const Matrix &m) {
    const int64_t rows = Even(Min(m.Rows(), m.Columns())), columns = Even(Max(m.Rows(), m.Columns()));
    return 2 * rows * columns + (IsWide(m) ? 5 : 2) * rows * rows;
  }

  Orthogonalization(const Step &step, const Muon &rule, const Team &team) : step_(step), rule_(rule), team_(team) {}

  // Returns the sum of squares of the orthogonal matrices before they are scaled, in the order of the matrices.
  void Run(const Matrix *matrices, int count, T *memory, double *sums) {
    Place(matrices, count, memory);
    ForRows([](Work &w, int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        w.row_sum[static_cast<size_t>(r)] = SumSquares(w.matrix.Row(r), static_cast<int>(w.columns));
      }
    });
    for (Work &w : work_) {
      const double norm = std::sqrt(Total(w));
      w.factor = norm == 0.0 ? 0.0 : 1.0 / norm;
    }
    ForRows(Load);
    for (int64_t first = 0, last = 0; first < step_.iteration_count; first = last) {
      last = EndOfRun(first);
      if (last == first + 1) {
        Iterate(all_, first);
        continue;
      }
      IterateOnGrams(first, last);
      for (int64_t k = first; k < last; ++k) Iterate(narrow_, k);
    }
    ForRows(SumRows);
    for (int i = 0; i < count; ++i) {
      sums[i] = Total(work_[i]);
      NormalizeRows(&work_[i]);
    }
    ForRows(StoreRows);
  }

 private:
  struct Work {
    Matrix matrix;
    int64_t rows, columns;                             // of the matrix
    int64_t a, b;                                      // of X, even where numbers are multiplied in pairs
    T *x, *next, *gram, *polynomial;                   // X and the next X, S, Z
    T *accumulated, *next_accumulated, *half_updated;  // of a wide X: Q and the next Q, W
    double factor;
    std::vector<double> row_sum;
    std::vector<float> row_factor;
  };
  static constexpr int64_t kRowsAtOnce = 32;

  // Tells whether a run takes less work on the Gram matrix. Where X is square, it takes as much.
  static bool IsWide(const Matrix &m) { return 2 * Max(m.Rows(), m.Columns()) >= 3 * Min(m.Rows(), m.Columns()); }

  static int64_t Even(int64_t n) { return std::is_same<T, float>::value ? n : n + n % 2; }

  void Place(const Matrix *matrices, int count, T *memory) {
    work_.resize(static_cast<size_t>(count));
    for (int i = 0; i < count; ++i) {
      Work &w = work_[static_cast<size_t>(i)];
      w.matrix = matrices[i];
      w.rows = w.matrix.Rows();
      w.columns = w.matrix.Columns();
      w.a = Even(Min(w.rows, w.columns));
      w.b = Even(Max(w.rows, w.columns));
      w.x = memory;
      w.next = w.x + w.a * w.b;
      w.gram = w.next + w.a * w.b;
      w.polynomial = w.gram + w.a * w.a;
      memory = w.polynomial + w.a * w.a;
      if (IsWide(w.matrix)) {
        w.accumulated = memory;
        w.next_accumulated = w.accumulated + w.a * w.a;
        w.half_updated = w.next_accumulated + w.a * w.a;
        memory = w.half_updated + w.a * w.a;
      }
      all_.push_back(&w);
      (IsWide(w.matrix) ? wide_ : narrow_).push_back(&w);
      if (w.a * w.b != w.rows * w.columns) memset(w.x, 0, static_cast<size_t>(w.a * w.b) * sizeof(T));
      w.row_sum.assign(static_cast<size_t>(w.rows), 0.0);
      w.row_factor.assign(static_cast<size_t>(w.rows), 1.0f);
    }
  }

  // Calls body for some rows of a matrix at once, until all are done.
  template <class Body>
  void ForRows(Body body) {
    struct Rows {
      int work;
      int64_t first;
    };
    std::vector<Rows> rows;
    for (size_t i = 0; i < work_.size(); ++i) {
      for (int64_t r = 0; r < work_[i].rows; r += kRowsAtOnce) rows.push_back({static_cast<int>(i), r});
    }
    team_.For(static_cast<int64_t>(rows.size()), [&](int64_t i, ProductBuffers &) {
      Work &w = work_[static_cast<size_t>(rows[static_cast<size_t>(i)].work)];
      const int64_t first = rows[static_cast<size_t>(i)].first, last = Min(first + kRowsAtOnce, w.rows);
      body(w, first, last);
    });
  }

  static double Total(const Work &w) {
    double total = 0.0;
    for (double sum : w.row_sum) total += sum;
    return total;
  }

  // Calls body for each element of some rows: the number of its row among these, its column, and its address in X. A
  // tall matrix is transposed in X, and its columns are the outer loop, so that writes to X are adjacent.
  template <class Body>
  static void ForElements(const Work &w, int64_t first, int64_t last, Body body) {
    const int64_t count = last - first;
    if (w.matrix.IsTall()) {
      for (int64_t c = 0; c < w.columns; ++c) {
        for (int64_t i = 0; i < count; ++i) body(i, c, &w.x[c * w.b + first + i]);
      }
    } else {
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t c = 0; c < w.columns; ++c) body(i, c, &w.x[(first + i) * w.b + c]);
      }
    }
  }

  static void Load(Work &w, int64_t first, int64_t last) {
    const float *row[kRowsAtOnce];
    for (int64_t r = first; r < last; ++r) row[r - first] = w.matrix.Row(r);
    const double factor = w.factor;
    ForElements(w, first, last, [&](int64_t i, int64_t c, T *x) { Store(static_cast<float>(row[i][c] * factor), x); });
  }

  static void SumRows(Work &w, int64_t first, int64_t last) {
    double sum[kRowsAtOnce] = {};
    ForElements(w, first, last,
                [&](int64_t i, int64_t, const T *x) { sum[i] += static_cast<double>(ToFloat(*x)) * ToFloat(*x); });
    for (int64_t r = first; r < last; ++r) w.row_sum[static_cast<size_t>(r)] = sum[r - first];
  }

  static void StoreRows(Work &w, int64_t first, int64_t last) {
    float *row[kRowsAtOnce], factor[kRowsAtOnce];
    for (int64_t r = first; r < last; ++r) {
      row[r - first] = w.matrix.Row(r);
      factor[r - first] = static_cast<float>(w.factor) * w.row_factor[static_cast<size_t>(r)];
    }
    ForElements(w, first, last, [&](int64_t i, int64_t c, const T *x) { row[i][c] = factor[i] * ToFloat(*x); });
  }

  // Decides the last factor of each row. NorMuon (Li et al., 2025) divides each by the root of a moving average of its
  // mean square, and all by the norm that is left.
  void NormalizeRows(Work *w) const {
    w->factor = w->matrix.scale;
    if (w->matrix.row_average == nullptr) return;
    double total = 0.0;
    for (int64_t r = 0; r < w->rows; ++r) {
      const double sum = w->row_sum[static_cast<size_t>(r)], mean = sum / static_cast<double>(w->columns);
      float *average = w->matrix.row_average + w->matrix.TensorRow(r);
      *average = static_cast<float>(rule_.row_beta * *average + (1.0 - rule_.row_beta) * mean);
      const double factor = 1.0 / (std::sqrt(static_cast<double>(*average)) + Muon::kRowEps);
      w->row_factor[static_cast<size_t>(r)] = static_cast<float>(factor);
      total += factor * factor * sum;
    }
    w->factor = total > 0.0 ? w->matrix.scale / std::sqrt(total) : 0.0;
  }

  struct Coefficients {
    float a, b, c;
  };

  Coefficients CoefficientsOf(int64_t iteration) const {
    const double *triple = step_.iterations + iteration * 3;
    return {static_cast<float>(triple[0]), static_cast<float>(triple[1]), static_cast<float>(triple[2])};
  }

  // Returns the end of a run that begins with an iteration: it takes one at least.
  int64_t EndOfRun(int64_t first) const {
    double growth = std::fabs(step_.iterations[first * 3]);
    int64_t last = first + 1;
    for (; last < step_.iteration_count; ++last) {
      growth *= std::fabs(step_.iterations[last * 3]);
      if (growth > Muon::MostGrowth(std::is_same<T, bfloat16>::value)) break;
    }
    return last;
  }

  static Product<T> GramOf(const Work &w) { return {w.x, w.x, nullptr, w.gram, w.a, w.a, w.b, true, true, 1.0f, 0.0f}; }

  // Returns scale * left * right + added_scale * added, of matrices of a by a: polynomials of one symmetric matrix, so
  // that the result is symmetric, too. A scale of 0 spares the product.
  static Product<T> Polynomial(const Work &w, const T *left, const T *right, float scale, const T *added,
                               float added_scale, T *result) {
    return {left, right, added, result, w.a, w.a, scale == 0.0f ? 0 : w.a, false, true, scale, added_scale};
  }

  void Iterate(const std::vector<Work *> &works, int64_t iteration) {
    const Coefficients k = CoefficientsOf(iteration);
    Multiply(works, GramOf);
    Multiply(works, [k](const Work &w) { return Polynomial(w, w.gram, w.gram, k.c, w.gram, k.b, w.polynomial); });
    Multiply(works, [k](const Work &w) {
      return Product<T>{w.polynomial, w.x, w.x, w.next, w.a, w.b, w.a, false, false, 1.0f, k.a};
    });
    for (Work *w : works) std::swap(w->x, w->next);
  }

  // Does a run of iterations with the wide matrices.
  void IterateOnGrams(int64_t first, int64_t last) {
    Multiply(wide_, GramOf);
    for (int64_t i = first; i < last; ++i) {
      const Coefficients k = CoefficientsOf(i);
      Multiply(wide_, [k](const Work &w) { return Polynomial(w, w.gram, w.gram, k.c, w.gram, k.b, w.polynomial); });
      if (i == first) {
        for (const Work *w : wide_) AddIdentity(*w, k.a);
      } else {
        Multiply(wide_, [k](const Work &w) {
          return Polynomial(w, w.accumulated, w.polynomial, 1.0f, w.accumulated, k.a, w.next_accumulated);
        });
        for (Work *w : wide_) std::swap(w->accumulated, w->next_accumulated);
      }
      if (i == last - 1) break;
      Multiply(wide_,
               [k](const Work &w) { return Polynomial(w, w.gram, w.polynomial, 1.0f, w.gram, k.a, w.half_updated); });
      Multiply(wide_, [k](const Work &w) {
        return Polynomial(w, w.polynomial, w.half_updated, 1.0f, w.half_updated, k.a, w.gram);
      });
    }
    Multiply(wide_, [](const Work &w) {
      return Product<T>{w.accumulated, w.x, nullptr, w.next, w.a, w.b, w.a, false, false, 1.0f, 0.0f};
    });
    for (Work *w : wide_) std::swap(w->x, w->next);
  }

  // Stores the first Q of a run, Z + a I.
  void AddIdentity(const Work &w, float a) const {
    team_.For(w.a, [&](int64_t row, ProductBuffers &) {
      const T *from = w.polynomial + row * w.a;
      T *to = w.accumulated + row * w.a;
      memcpy(to, from, static_cast<size_t>(w.a) * sizeof(T));
      Store(ToFloat(from[row]) + a, &to[row]);
    });
  }

  template <class Of>
  void Multiply(const std::vector<Work *> &works, Of of) {
    if (works.empty()) return;
    struct Tile {
      const Work *work;
      int64_t row, column;
    };
    const Products &products = ChosenProducts();
    std::vector<Tile> tiles;
    for (const Work *w : works) {
      const Product<T> p = of(*w);
      for (int64_t column = 0; column < p.columns; column += kTileColumns) {
        for (int64_t row = p.symmetric ? column : 0; row < p.rows; row += kTileRows) {
          tiles.push_back({w, row, column});
        }
      }
    }
    team_.For(static_cast<int64_t>(tiles.size()), [&](int64_t i, ProductBuffers &buffers) {
      const Tile &tile = tiles[static_cast<size_t>(i)];
      products.Compute(of(*tile.work), tile.row, tile.column, buffers);
    });
  }

  const Step &step_;
  const Muon &rule_;
  const Team &team_;
  std::vector<Work> work_;
  std::vector<Work *> all_, wide_, narrow_;
};

// The memory that orthogonalization needs besides the matrices.
struct OrthogonalizationMemory {
  // A cache line: numbers that are loaded together lie in one line.
  struct alignas(64) Line {
    float numbers[16];  // float32 or bfloat16
  };
  std::unique_ptr<Line[]> lines;
  std::unique_ptr<ProductBuffers[]> buffers;

  // Makes room for numbers. Throws std::bad_alloc.
  void Reserve(int64_t bytes) {
    constexpr int64_t kLine = sizeof(Line);
    lines.reset(new Line[static_cast<size_t>((bytes + kLine - 1) / kLine)]);
    buffers.reset(new ProductBuffers[static_cast<size_t>(omp_get_max_threads())]);
  }
};

// Returns how many bytes of memory the iterations of a matrix take.
inline int64_t BytesOfIterations(const Muon &rule, const Matrix &matrix) {
  const bool is_bfloat16 = (rule.flags & Muon::kBFloat16Products) != 0;
  return is_bfloat16 ? Orthogonalization<bfloat16>::Numbers(matrix) * int64_t{sizeof(bfloat16)}
                     : Orthogonalization<float>::Numbers(matrix) * int64_t{sizeof(float)};
}

// Orthogonalizes some matrices. Each thread takes a small one alone, since its second-level cache has room for it.
// Stores the sum of squares of each matrix before it is scaled.
template <class T>
void Orthogonalize(const Step &step, const Muon &rule, const std::vector<Matrix> &matrices,
                   const OrthogonalizationMemory &memory, double *sums) {
  constexpr int64_t kSmall = int64_t{1} << 18;
  std::vector<int64_t> first(matrices.size());
  int64_t numbers = 0;
  bool all_small = true;
  for (size_t i = 0; i < matrices.size(); ++i) {
    first[i] = numbers;
    const int64_t own = Orthogonalization<T>::Numbers(matrices[i]);
    all_small &= own <= kSmall;
    numbers += own;
  }
  auto *begin = reinterpret_cast<T *>(memory.lines.get());
  ProductBuffers *buffers = memory.buffers.get();
  const int count = static_cast<int>(matrices.size());
  if (!all_small || count < omp_get_max_threads()) {
    Orthogonalization<T>(step, rule, Team(true, buffers)).Run(matrices.data(), count, begin, sums);
    return;
  }
  Team(true, buffers).For(count, [&](int64_t i, ProductBuffers &own) {
    const auto k = static_cast<size_t>(i);
    Orthogonalization<T>(step, rule, Team(false, &own)).Run(&matrices[k], 1, begin + first[k], &sums[k]);
  });
}

// Does so with products of the numbers that the rule states.
inline void OrthogonalizeBy(const Step &step, const Muon &rule, const std::vector<Matrix> &matrices,
                            const OrthogonalizationMemory &memory, double *sums) {
  if ((rule.flags & Muon::kBFloat16Products) != 0) {
    Orthogonalize<bfloat16>(step, rule, matrices, memory, sums);
  } else {
    Orthogonalize<float>(step, rule, matrices, memory, sums);
  }
}

}  // namespace
}  // namespace ms_optim
