// Sinkhorn on a GPU: divides the rows and columns of matrices by their norms in turn, and moves the weights.
//
// A block has a band of rows, and takes 16 of them at once: 16 threads add up a row, and each thread then adds the 16
// to columns of its own. So it reads a row from memory once, and then again from the cache. The orders of all sums are
// those of the CPU (see ops/include/sinkhorn.h and ops/cpu/sinkhorn_engine.h), and so are the bits.
#pragma once

#include "engine.cuh"
#include "muon.h"
#include "sinkhorn.h"

namespace ms_optim {
namespace {

constexpr int kRowLanes = Sinkhorn::kLanes, kRowsAtOnce = kThreads / kRowLanes;

// Blocks at once on a multiprocessor: a matrix has hardly more, and with these each thread has enough registers.
constexpr int kBandsAtOnce = 2;

// ---- Bands and their elements -----------------------------------------------------------------------------------

// The rows of a matrix for a block.
struct Band : Chunk {
  int64_t index, row, rows, columns;
  Balance balance;
  double *of_rows, *sums;  // the band's
  Sinkhorn rule;
  const Tensor &t;
  Task task;
  const RowMean *means;  // of the tensor's rows
  bool in_place;         // between the first pass and the last, the state holds G

  __device__ Band(const Step &step, const Workspace &work)
      : Chunk(OwnerOf(work.first_band, step.count, blockIdx.x), 0, 0),
        index(static_cast<int64_t>(blockIdx.x) - work.first_band[tensor]),
        row(index * kRowsInBand),
        balance(work.balances[tensor]),
        rule(RuleOf<Sinkhorn>(work)),
        t(step.tensors[tensor]),
        task(work.tasks[tensor]),
        means(work.means + work.first_row[tensor]),
        in_place(t.state_type[0] == DType::kFloat32 && rule.beta >= Sinkhorn::kLeastDivisor) {
    rows = Min(kRowsInBand, balance.rows - row);
    columns = balance.columns;
    begin = row * columns;
    end = begin + rows * columns;
    of_rows = balance.of_rows + row;
    sums = balance.sums + index * columns;
  }

  // Returns the first tile of those that begin in a row or after it.
  __device__ int64_t TilesFrom(int64_t k) const { return Min(end, begin + (k * columns + kTile - 1) / kTile * kTile); }

  // Returns the last tile that does not end after the rows before one.
  __device__ int64_t TilesUpTo(int64_t k) const { return k < rows ? begin + k * columns / kTile * kTile : end; }
};

// The elements of G where a state holds them.
struct HeldElements {
  const float *elements;
  int64_t columns;

  explicit __device__ HeldElements(const Band &band)
      : elements(InDeviceMemory(static_cast<const float *>(band.t.state[0])) + band.begin), columns(band.columns) {}

  __device__ float operator()(int64_t row, int64_t column) const { return elements[row * columns + column]; }
};

// Those that follow from the momentum and the gradient.
template <class Format>
struct MadeElements {
  const Band &band;

  explicit __device__ MadeElements(const Band &its_band) : band(its_band) {}

  __device__ float operator()(int64_t row, int64_t column) const {
    const int64_t i = band.begin + row * band.columns + column;
    float g = FloatAt(band.t.gradient_type, band.t.gradient, i), element;
    if (band.task.row != 0) {
      const RowMean mean = band.means[band.row + row];
      g = (g - mean.mean) - mean.rest;
    }
    const float s = StateAt<Format>(band.t, 0, i);
    band.rule.Directions(0.0f, band.task.factor * g, &s, &element);
    return element;
  }
};

// Calls run(elements) with what returns the elements of G.
template <class Format, class Run>
__device__ void WithElements(const Band &band, const Run &run) {
  if (band.in_place) {
    run(HeldElements(band));
  } else {
    run(MadeElements<Format>(band));
  }
}

// ---- Sums -------------------------------------------------------------------------------------------------------

// Adds up the lanes of a row in pairs.
__device__ inline double SumOfPairs(double x) {
  for (int lane = kRowLanes / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
  return x;
}

// Adds up the squares of the products of a row's elements and the factors of columns, in all of its threads. A warp has
// two rows, or one and threads without a row.
template <class Elements>
__device__ double SumOfElements(const Band &band, const Elements &elements, bool has_row, int64_t row) {
  constexpr int kAtOnce = 8;  // loads that are under way
  const float *factors = band.balance.rounded;
  const int lane = static_cast<int>(threadIdx.x) % kRowLanes;
  double total = 0.0;
  for (int64_t first = 0; first < band.columns; first += Sinkhorn::kSegment) {
    const int64_t end = has_row ? Min(first + Sinkhorn::kSegment, band.columns) : first;
    float squares = 0.0f;
    for (int64_t begin = first + lane; begin < end; begin += kAtOnce * kRowLanes) {
      float x[kAtOnce], c[kAtOnce];
      MS_OPTIM_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        const int64_t j = begin + k * kRowLanes;
        x[k] = j < end ? elements(row, j) : 0.0f;
        c[k] = j < end ? factors[j] : 0.0f;
      }
      MS_OPTIM_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        const float product = x[k] * c[k];
        squares += product * product;
      }
    }
    double sum = SumOfPairs(static_cast<double>(squares));
    const bool is_lost = has_row && !IsExact(sum);
    if (__ballot_sync(0xffffffffu, is_lost) != 0u) {
      double exact = 0.0;
      for (int64_t j = first + lane; is_lost && j < end; j += kRowLanes) {
        const auto product = static_cast<double>(elements(row, j) * factors[j]);
        exact += product * product;
      }
      exact = SumOfPairs(exact);
      if (is_lost) sum = exact;
    }
    total += sum;
  }
  return total;
}

template <class Format>
__device__ double SumOfRow(const Band &band, bool has_row, int64_t row) {
  double sum;
  WithElements<Format>(band, [&](const auto &elements) { sum = SumOfElements(band, elements, has_row, row); });
  return sum;
}

// Adds rows, each multiplied by its factor, to the sums of the columns.
template <class Elements>
__device__ void AddToColumns(const Band &band, const Elements &elements, const int *rows, const float *factors) {
  for (int64_t j = threadIdx.x; j < band.columns; j += kThreads) {
    double sum = band.sums[j];
    MS_OPTIM_UNROLL
    for (int k = 0; k < kRowsAtOnce; k += 4) {
      float p[4];
      MS_OPTIM_UNROLL
      for (int i = k; i < k + 4; ++i) p[i - k] = factors[i] == 0.0f ? 0.0f : factors[i] * elements(rows[i], j);
      sum += static_cast<double>((p[0] * p[0] + p[1] * p[1]) + (p[2] * p[2] + p[3] * p[3]));
    }
    band.sums[j] = sum;
  }
}

// Lists the rows that were kept, or all, in the order in which they are added up, and returns their number.
__device__ inline int ListRows(const Band &band, bool all, int (&listed)[kRowsInBand]) {
  const RowOrder order(band.rows, band.columns, band.in_place);
  int count = 0;
  for (int64_t first = 0; first < band.rows; first += kThreads) {
    const int64_t k = first + threadIdx.x, row = k < band.rows ? order.Row(k) : 0;
    const bool is_kept = k < band.rows && (all || band.of_rows[row] != 0.0);
    int more;
    const int before = SumBefore(static_cast<int>(is_kept), &more);
    if (is_kept) listed[count + before] = static_cast<int>(row);
    count += more;
  }
  __syncthreads();
  return count;
}

// Adds up the columns of a band. Prepare makes the elements of the 16 listed rows from one on; Decide returns the
// factor of a row, in all of its threads: warps call it as a whole.
template <class Format, class Prepare, class Decide>
__device__ void AddRows(const Band &band, bool all, const Prepare &prepare, const Decide &decide) {
  __shared__ int listed[kRowsInBand];
  __shared__ float lifted[kRowsAtOnce];
  const int count = ListRows(band, all, listed), own = static_cast<int>(threadIdx.x) / kRowLanes;
  for (int64_t j = threadIdx.x; j < band.columns; j += kThreads) band.sums[j] = 0.0;
  for (int first = 0; first < count; first += kRowsAtOnce) {
    prepare(first);
    __syncthreads();
    const bool has_row = first + own < count;
    const double factor = decide(has_row, has_row ? listed[first + own] : 0);
    if (threadIdx.x % kRowLanes == 0) lifted[own] = has_row ? Sinkhorn::Lifted(factor) : 0.0f;
    __syncthreads();
    const int *rows = listed + first;
    const float *factors = lifted;
    WithElements<Format>(band, [&](const auto &elements) { AddToColumns(band, elements, rows, factors); });
  }
}

// ---- Passes -----------------------------------------------------------------------------------------------------

// The rule of the first pass, which reads no weights.
struct BalancedMomentum : Sinkhorn {
  static constexpr bool kReturnsDirections = true;
  MS_OPTIM_FN explicit BalancedMomentum(const Sinkhorn &rule) : Sinkhorn(rule) {}
};

// That of the last one, whose directions are given.
struct BalancedDirection : KnownDirection {
  static constexpr int kStates = 0;
};

__global__ void __launch_bounds__(kThreads) StartFactors(const Step step, const Workspace work) {
  if (!work.survey->applied) return;
  const Band band(step, work);
  const int64_t stride = band.balance.bands * kThreads;
  for (int64_t j = band.index * kThreads + threadIdx.x; j < band.columns; j += stride) {
    band.balance.of_columns[j] = 1.0;
    band.balance.rounded[j] = 1.0f;
  }
}

// The first pass: makes the momentum, notes the norm of each row as its factor, and adds up the columns as if all rows
// stayed.
template <class Format>
__global__ void __launch_bounds__(kThreads, kBandsAtOnce)
    MakeMomentum(const Step step, const Workspace work, bool takes_floats) {
  if (!work.survey->applied) return;
  const Band band(step, work);
  if (!Takes<Format>(band.t, takes_floats)) return;
  double sum[kSums] = {};
  const auto make = [&](const auto &rule, const Tensor &t, const Task &task, bool, const Tile &tile,
                        const auto &fetched) {
    Elements<BalancedMomentum, Format> x(fetched, t, task, band.means, tile);
    x.template Apply<true>(rule, task);
    AddSquares(&sum[kGradientSum], tile, x.g);
    if (band.in_place) return StoreFloats(t.state[0], tile, x.d[0]);
    TileNoise noise;
    noise.From(task.noise, tile);
    StoreState<Format>(t, 0, tile, noise, x.s[0]);
  };
  const RowOrder order(band.rows, band.columns, band.in_place);
  const auto make_rows = [&](int first) {
    for (int64_t place = 0; place < order.places; ++place) {
      // A tile with rows of two places is made with the first rows of the second.
      const int64_t begin = order.Begin(place), end = order.Begin(place + 1), last = band.TilesUpTo(end);
      const int64_t from = begin + first / order.places, to = from + kRowsAtOnce / order.places;
      const int64_t tiles = first == 0 ? band.TilesUpTo(begin) : Min(last, band.TilesFrom(from));
      const Chunk strip(band.tensor, tiles, to < end ? Min(last, band.TilesFrom(to)) : last);
      ForTilesOf<Format>(strip, BalancedMomentum(band.rule), band.t, band.task, step.flags, make);
    }
  };
  AddRows<Format>(band, true, make_rows, [&](bool has_row, int64_t row) {
    const double norm = sqrt(SumOfRow<Format>(band, has_row, row));
    if (has_row) band.of_rows[row] = norm;
    return band.rule.FirstFactor(norm, 0.0);
  });
  __syncthreads();
  double norms = 0.0;
  for (int64_t row = threadIdx.x; threadIdx.x < kRowLanes && row < band.rows; row += kRowLanes) {
    norms += band.of_rows[row];
  }
  norms = SumOfPairs(norms);
  if (threadIdx.x == 0) band.balance.norms[band.index] = norms;
  StorePartial<1>(work, sum);
}

// Turns the norms of rows into factors, and adds up the columns again if some rows become 0, but are not 0 already.
template <class Format>
__global__ void __launch_bounds__(kThreads, kBandsAtOnce)
    DecideRows(const Step step, const Workspace work, bool takes_floats) {
  if (!work.survey->applied) return;
  const Band band(step, work);
  if (!Takes<Format>(band.t, takes_floats)) return;
  double total = 0.0;
  for (int64_t k = 0; k < band.balance.bands; ++k) total += band.balance.norms[k];
  const double mean = total / static_cast<double>(band.balance.rows);
  int again = 0;
  for (int64_t row = threadIdx.x; row < band.rows; row += kThreads) {
    const double norm = band.of_rows[row], factor = band.rule.FirstFactor(norm, mean);
    band.of_rows[row] = factor;
    if (factor == 0.0 && norm != 0.0) again = 1;
  }
  if (__syncthreads_count(again) == 0) return;
  const auto factor_of = [&](bool has_row, int64_t row) { return has_row ? band.of_rows[row] : 0.0; };
  AddRows<Format>(band, false, [](int) {}, factor_of);
}

// Divides rows by their norms, and adds up the columns.
template <class Format>
__global__ void __launch_bounds__(kThreads, kBandsAtOnce)
    DivideRows(const Step step, const Workspace work, bool takes_floats) {
  if (!work.survey->applied) return;
  const Band band(step, work);
  if (!Takes<Format>(band.t, takes_floats)) return;
  const auto divide = [&](bool has_row, int64_t row) {
    const double before = has_row ? band.of_rows[row] : 0.0;
    const double factor = band.rule.NextFactor(before, SumOfRow<Format>(band, has_row, row));
    if (has_row) band.of_rows[row] = factor;
    return factor;
  };
  AddRows<Format>(band, false, [](int) {}, divide);
}

__global__ void __launch_bounds__(kThreads) DivideColumns(const Step step, const Workspace work) {
  if (!work.survey->applied) return;
  const Band band(step, work);
  const Balance &b = band.balance;
  for (int64_t j = band.index * kThreads + threadIdx.x; j < b.columns; j += b.bands * kThreads) {
    double sum = b.sums[j];
    for (int64_t k = 1; k < b.bands; ++k) sum += b.sums[k * b.columns + j];
    b.of_columns[j] = band.rule.NextFactor(b.of_columns[j], sum * Sinkhorn::kLowered);
    b.rounded[j] = Sinkhorn::Rounded(b.of_columns[j]);
  }
}

// A tile whose weights were read, with directions in place of gradients.
struct KnownElements {
  struct Directions {
    float d[kEach];
    __device__ void To(DType, float (&x)[kEach]) const { memcpy(x, d, sizeof(d)); }
  };
  FetchedWeight weight;
  Directions gradient;
  FetchedState<Float32Format> state[1];  // none is read
};

// Moves the weights of a tile along its balanced elements, and leaves the momentum in the state.
template <class Format, class Fetched>
__device__ void MoveBalanced(const Band &band, const Tensor &t, const Task &task, bool noisy, const Tile &tile,
                             const Fetched &fetched, double (&sum)[kSums]) {
  Elements<BalancedMomentum, Format> x(fetched, t, task, band.means, tile);
  KnownElements known;
  known.weight = fetched.weight;
  x.template Apply<false>(BalancedMomentum(band.rule), task);
  MS_OPTIM_UNROLL
  for (int r = 0; r < kRuns; ++r) {
    int64_t row = tile.At(r * kRun) / band.columns, column = tile.At(r * kRun) % band.columns;
    MS_OPTIM_UNROLL
    for (int e = r * kRun; e < (r + 1) * kRun; ++e) {
      const float factor = tile.Has(e) ? static_cast<float>(band.balance.of_rows[row]) : 0.0f;
      const float element = band.in_place ? x.s[0][e] : x.d[0][e];
      known.gradient.d[e] = factor == 0.0f ? 0.0f : element * band.balance.rounded[column] * factor;
      x.s[0][e] = band.rule.MomentumOf(element, task.factor * x.g[e]);
      if (++column < band.columns) continue;
      column = 0;
      ++row;
    }
  }
  if (band.in_place) StoreFloats(t.state[0], tile, x.s[0]);
  Task of_known = task;
  of_known.factor = 1.0f;
  of_known.row = 0;
  UpdateTile<true, Float32Format>(BalancedDirection(), t, of_known, band.means, noisy, tile, known, sum);
}

// The last pass: divides rows once more, moves the weights, and leaves the momentum in the state. A row's factor
// becomes that of the update.
template <class Format>
__global__ void __launch_bounds__(kThreads, kBandsAtOnce)
    MoveBalancedWeights(const Step step, const Workspace work, bool takes_floats) {
  if (!work.survey->applied) return;
  const Band band(step, work);
  if (!Takes<Format>(band.t, takes_floats)) return;
  double sum[kSums] = {};
  const auto move = [&](const auto &, const Tensor &t, const Task &task, bool noisy, const Tile &tile,
                        const auto &fetched) { MoveBalanced<Format>(band, t, task, noisy, tile, fetched, sum); };
  // Tiles move after all rows that they have parts of were added up.
  for (int64_t first = 0; first < band.rows; first += kRowsAtOnce) {
    const int64_t row = first + threadIdx.x / kRowLanes;
    double factor = row < band.rows ? band.of_rows[row] : 0.0;
    const bool is_kept = factor != 0.0;
    if (band.rule.pairs > 0) {
      const double squares = SumOfRow<Format>(band, is_kept, row);
      if (is_kept) factor = band.rule.NextFactor(factor, squares);
    }
    __syncwarp();
    if (is_kept) band.of_rows[row] = static_cast<double>(band.rule.LastFactor(factor, band.columns));
    __syncthreads();
    const Chunk strip(band.tensor, band.TilesUpTo(first), band.TilesUpTo(first + kRowsAtOnce));
    ForTilesOf<Format>(strip, band.rule, band.t, band.task, step.flags, move);
  }
  StorePartial<1>(work, sum);
}

template <>
inline Status RunRule<Sinkhorn>(const Step &step, const std::vector<Tensor> &tensors, const WorkspaceLayout &layout,
                                const Workspace &work, Launcher &launch) {
  const bool moves = (step.stages & kMomentsStage) != 0;
  if (moves != ((step.stages & kApplyStage) != 0)) return kWrongFlags;
  if (!Open<Sinkhorn>(step, layout, work, launch)) return launch.Result();
  const int64_t n = step.count;
  Workspace bands = work;  // in which partial sums are those of bands
  bands.first_chunk = work.first_band;
  const auto pass = [&](auto kernel) {
    ForFormats<Sinkhorn>(tensors, [&](auto format, bool takes_floats) {
      launch(kernel(format), layout.bands, step, bands, takes_floats);
    });
  };
  if (moves) {
    launch(StartFactors, layout.bands, step, bands);
    pass([](auto format) { return MakeMomentum<decltype(format)>; });
    launch(AddSums, n, step, bands, unsigned{kGradientsOnly}, true);
    pass([](auto format) { return DecideRows<decltype(format)>; });
    for (unsigned pair = 0; pair < step.rule_flags; ++pair) {
      if (pair > 0) pass([](auto format) { return DivideRows<decltype(format)>; });
      launch(DivideColumns, layout.bands, step, bands);
    }
    pass([](auto format) { return MoveBalancedWeights<decltype(format)>; });
    launch(AddSums, n, step, bands, unsigned{kAll} & ~kGradientsOnly, true);
  }
  launch(Finish, 1, step, work, true, true);
  return launch.Result();
}

}  // namespace
}  // namespace ms_optim
