// The kernels that run for every rule: tables, sums, decisions about a tensor, averages and reports.
//
// Tensors are cut into chunks, a block of threads for each. Partial sums belong to chunks and are added in an order
// that does not depend on when blocks run, so the result is the same from run to run.
#pragma once

#include "chunk_passes.cuh"

namespace ms_optim {
namespace {

template <class Rule>
__device__ const Rule &RuleOf(const Workspace &work) {
  static_assert(sizeof(Rule) <= sizeof(work.survey->rule), "the rule has room in the workspace");
  return *reinterpret_cast<const Rule *>(work.survey->rule);
}

// ---- Tables and sums --------------------------------------------------------------------------------------------

__global__ void PutWords(const __grid_constant__ Words words, uint32_t *to, int count) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) to[i] = words.word[i];
}

// Computes the means of rows, a warp for each.
__global__ void __launch_bounds__(kThreads) MeanRows(const Step step, const Workspace work) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + WarpOfThread();
  if (row >= work.first_row[step.count]) return;
  const int i = OwnerOf(work.first_row, step.count, row);
  if (LayoutOf(step, i, kCentralized) == 0) return;
  const Tensor &t = step.tensors[i];
  const int64_t length = t.size / t.rows, begin = (row - work.first_row[i]) * length;
  double sum = 0.0;
  for (int64_t k = begin + LaneOfThread(); k < begin + length; k += kWarp) {
    sum += FloatAt(t.gradient_type, t.gradient, k);
  }
  const double mean = SumOfWarp(sum) / static_cast<double>(length);
  if (LaneOfThread() != 0) return;
  const float rounded = static_cast<float>(mean);
  work.means[row] = RowMean{rounded, static_cast<float>(mean - rounded)};
}

// The sums that a pass over chunks computes; the others are those of an earlier pass.
enum PassSums : unsigned {
  kAll = (1u << kSums) - 1,
  kGradientsOnly = 1u << kGradientSum,
  kUpdates = 1u << kDirectionSum
};

// Adds up the sums of chunks, a block for each tensor.
__global__ void __launch_bounds__(kThreads)
    AddSums(const Step step, const Workspace work, unsigned pass_sums, bool surveyed) {
  if (surveyed && !work.survey->applied) return;
  const int64_t i = blockIdx.x;
  for (int s = 0; s < kSums; ++s) {
    if ((pass_sums >> s & 1u) == 0) continue;
    double sum = 0.0;
    for (int64_t k = work.first_chunk[i] + threadIdx.x; k < work.first_chunk[i + 1]; k += kThreads) {
      sum += work.partial[k * kSums + s];
    }
    sum = SumOfBlock(sum);
    if (threadIdx.x == 0) step.sums[i * kSums + s] = sum;
  }
}

// Copies the sums of earlier launches.
__global__ void CopySums(const Step step, bool skipped_only) {
  if (skipped_only && (step.skipping[0] == 0.0f || step.sums_rows != step.rows)) return;
  const int i = static_cast<int>(blockIdx.x), s = static_cast<int>(threadIdx.x);
  if (s < kSums) step.sums[i * kSums + s] = step.sums_in[LayoutOf(step, i, kRow) * kSums + s];
}

__device__ inline double TotalGradientSum(const Step &step) {
  const bool here = (step.stages & kGradientStage) != 0;
  const double *sums = here ? step.sums : step.sums_in;
  double total = 0.0;
  for (int64_t i = threadIdx.x; i < (here ? step.count : step.rows); i += kThreads) {
    total += sums[i * kSums + kGradientSum];
  }
  return SumOfBlock(total);
}

// One block: decides how each tensor is read and stored.
__global__ void __launch_bounds__(kThreads) PrepareAll(const Step step, const Workspace work) {
  for (int i = static_cast<int>(threadIdx.x); i < step.count; i += kThreads) {
    const Tensor &t = step.tensors[i];
    Task &task = work.tasks[i];
    task.row = t.rows > 0 && LayoutOf(step, i, kCentralized) != 0 ? t.size / t.rows : 0;
    task.noise = Noise(static_cast<int64_t>(step.constants[kSeed]), *step.global_step, LayoutOf(step, i, kRow));
  }
}

// One block.
__global__ void __launch_bounds__(kThreads)
    Finish(const Step step, const Workspace work, bool reports, bool reports_skipped) {
  const bool applied = work.survey->applied, any = applied ? reports : reports_skipped;
  for (int i = static_cast<int>(threadIdx.x); any && i < step.count; i += kThreads) {
    Report(step, i, work.tasks[i], step.sums + int64_t{i} * kSums, applied);
  }
  if (threadIdx.x == 0 && (step.stages & kCommitStage) != 0) Commit(step, applied);
}

__global__ void __launch_bounds__(kThreads) SumGradients(const Step step, const Workspace work) {
  const Chunk chunk(step, work);
  const Tensor &t = step.tensors[chunk.tensor];
  const Task task = work.tasks[chunk.tensor];
  double sum[kSums] = {};
  ForTiles(chunk, t, [&](const Tile &tile) {
    float g[kEach];
    LoadGradient(t, task, work, chunk.tensor, tile, g);
    MS_OPTIM_UNROLL
    for (int e = 0; e < kEach; ++e) AddSquare(&sum[kGradientSum], g[e]);
  });
  StorePartial<1>(work, sum);
}

// Starts the averages, or moves them towards the weights, for a rule whose pass does not reach all weights.
__global__ void __launch_bounds__(kThreads) Averages(const Step step, const Workspace work, bool start) {
  if (!work.survey->applied) return;
  const Chunk chunk(step, work);
  const Tensor &t = step.tensors[chunk.tensor];
  const Task task = work.tasks[chunk.tensor];
  if (t.average == nullptr || (start && !task.starts)) return;
  ForTiles(chunk, t, [&](const Tile &tile) {
    float w[kEach];
    LoadWeight(t, tile, w);
    if (start) {
      StoreFloats(t.average, tile, w);
    } else {
      Average(t, task, tile, w);
    }
  });
}

inline int64_t Blocks(int64_t threads) { return (threads + kThreads - 1) / kThreads; }

// Fills in the workspace's tables.
inline void PutTables(const std::vector<Tensor> &tensors, bool centralizes, const WorkspaceLayout &layout,
                      const Workspace &work, Launcher *launch) {
  std::vector<uint32_t> words(static_cast<size_t>(layout.tables / 4));
  const auto at = [&](const void *table) {
    return reinterpret_cast<unsigned char *>(words.data()) +
           (static_cast<const char *>(table) - reinterpret_cast<const char *>(work.tensors));
  };
  memcpy(at(work.tensors), tensors.data(), tensors.size() * sizeof(Tensor));
  int64_t chunk = 0, row = 0, band = 0;
  double *numbers = work.numbers;
  float *floats = work.floats;
  for (size_t i = 0; i <= tensors.size(); ++i) {
    memcpy(at(work.first_chunk + i), &chunk, sizeof(chunk));
    memcpy(at(work.first_row + i), &row, sizeof(row));
    memcpy(at(work.first_band + i), &band, sizeof(band));
    if (i == tensors.size()) break;
    chunk += (tensors[i].size + work.chunk - 1) / work.chunk;
    row += centralizes ? tensors[i].rows : 0;
    if (layout.bands == 0) continue;
    Balance balance(tensors[i].size, tensors[i].rows);
    balance.Lay(&numbers, &floats);
    memcpy(at(work.balances + i), &balance, sizeof(balance));
    band += balance.bands;
  }
  auto *to = reinterpret_cast<uint32_t *>(work.tensors);
  for (size_t first = 0; first < words.size(); first += kMostWords) {
    Words part;
    const size_t count = Min(words.size() - first, size_t{kMostWords});
    memcpy(part.word, &words[first], count * sizeof(uint32_t));
    (*launch)(PutWords, 1, part, to + first, static_cast<int>(count));
  }
}

}  // namespace
}  // namespace ms_optim
