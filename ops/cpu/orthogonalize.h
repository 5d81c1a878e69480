// Replaces matrices by orthogonal ones near them, by the iteration of Newton and Schulz that Muon uses.
//
// A matrix of A rows and B columns is taken as X of a rows and b columns, transposed if A > B, of norm 1. An iteration
// is S = X X^T, P = b S + c S S, X <- a X + P X. One thread computes a number, always in the same order, so no bit
// depends on the thread.
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
    return 2 * rows * columns + 2 * rows * rows;
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
    for (int64_t k = 0; k < step_.iteration_count; ++k) Iterate(step_.iterations + k * 3);
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
    int64_t rows, columns;  // of the matrix
    int64_t a, b;           // of X, even where numbers are multiplied in pairs
    T *x, *next, *gram, *polynomial;
    double factor;
    std::vector<double> row_sum;
    std::vector<float> row_factor;
  };
  static constexpr int64_t kRowsAtOnce = 32;

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

  void Iterate(const double *coefficients) {
    const auto a = static_cast<float>(coefficients[0]), b = static_cast<float>(coefficients[1]);
    const auto c = static_cast<float>(coefficients[2]);
    Multiply(
        [](const Work &w) { return Product<T>{w.x, w.x, nullptr, w.gram, w.a, w.a, w.b, true, true, 1.0f, 0.0f}; });
    Multiply([b, c](const Work &w) {
      return Product<T>{w.gram, w.gram, w.gram, w.polynomial, w.a, w.a, w.a, true, true, c, b};
    });
    Multiply([a](const Work &w) {
      return Product<T>{w.polynomial, w.x, w.x, w.next, w.a, w.b, w.a, false, false, 1.0f, a};
    });
    for (Work &w : work_) std::swap(w.x, w.next);
  }

  template <class Of>
  void Multiply(Of of) {
    struct Tile {
      int work;
      int64_t row, column;
    };
    const Products &products = ChosenProducts();
    std::vector<Tile> tiles;
    for (size_t i = 0; i < work_.size(); ++i) {
      const Product<T> p = of(work_[i]);
      for (int64_t column = 0; column < p.columns; column += kTileColumns) {
        for (int64_t row = p.symmetric ? column : 0; row < p.rows; row += kTileRows) {
          tiles.push_back({static_cast<int>(i), row, column});
        }
      }
    }
    team_.For(static_cast<int64_t>(tiles.size()), [&](int64_t i, ProductBuffers &buffers) {
      const Tile &tile = tiles[static_cast<size_t>(i)];
      products.Compute(of(work_[static_cast<size_t>(tile.work)]), tile.row, tile.column, buffers);
    });
  }

  const Step &step_;
  const Muon &rule_;
  const Team &team_;
  std::vector<Work> work_;
};

// The memory that orthogonalization needs besides the matrices.
struct OrthogonalizationMemory {
  // A cache line: numbers that are loaded together lie in one line.
  struct alignas(64) Line {
    float numbers[16];  // float32 or bfloat16
  };
  std::unique_ptr<Line[]> lines;
  std::unique_ptr<ProductBuffers[]> buffers;

  // Makes room for `count` numbers. Throws std::bad_alloc.
  void Reserve(int64_t count) {
    lines.reset(new Line[static_cast<size_t>((count + 15) / 16)]);
    buffers.reset(new ProductBuffers[static_cast<size_t>(omp_get_max_threads())]);
  }
};

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

}  // namespace
}  // namespace ms_optim
