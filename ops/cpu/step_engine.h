// The base of all engines: chunks, passes over them, sums and reports.
//
// Tensors are cut into chunks of a fixed size. Partial sums belong to chunks and are added in the chunks' order, so the
// result does not depend on the number of threads.
#pragma once

#include <omp.h>
#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "chunk_passes.h"
#include "denormals.h"

namespace ms_optim {
namespace {

struct alignas(64) Share {
  std::atomic<int64_t> taken{0};
};

// Gives memory to states before the first step. They are zeros that nobody has written, so they have none yet, and each
// page that is read before it is written costs one more page fault. Huge pages save the processor most look-ups of
// addresses. The system may ignore either request.
inline void Populate(void *data, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = uintptr_t{1} << 21;
  const uintptr_t address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + kPage - 1) / kPage * kPage, end = (address + bytes) / kPage * kPage;
  if (end <= begin) return;
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, which older headers lack
  madvise(reinterpret_cast<void *>(begin), end - begin, MADV_HUGEPAGE);
  madvise(reinterpret_cast<void *>(begin), end - begin, kPopulateWrite);
#endif
}

// The elements of a run of tensors that two passes share: the second pass finds them in the cache.
constexpr int64_t kCachedElements = int64_t{1} << 19;

// The chunks that one thread takes alone while other operators run: 8 million elements.
constexpr int64_t kChunksAlone = 256;

class StepEngine {
 public:
  explicit StepEngine(const Step &step) : step_(step) {}

 protected:
  bool Has(Stage stage) const { return (step_.stages & stage) != 0; }
  bool Holds() const { return (step_.flags & kHoldsNorms) != 0; }
  double *SumsOf(int i) const { return step_.sums + int64_t{i} * kSums; }
  int64_t LayoutOf(int i, Layout column) const { return ms_optim::LayoutOf(step_, i, column); }

  Status Begin(bool reads_sums) {
    // A GPU skips such a step, since its host cannot read the count.
    if (*step_.global_step < 0) return kNegativeStep;
    if (const Status status = CheckPlaces(reads_sums); status != kOk) return status;
    if (!CutChunks()) return kNoMemory;
    if (Has(kMomentsStage) && *step_.global_step == 0) PopulateStates();
    return kOk;
  }

  // Checks that all rows and rates exist that the layout names.
  Status CheckPlaces(bool reads_sums) const {
    if (reads_sums && step_.sums_rows != step_.rows) return kWrongSize;
    for (int i = 0; i < step_.count; ++i) {
      const int64_t row = LayoutOf(i, kRow), rate = LayoutOf(i, kRateIndex), decay = LayoutOf(i, kDecayIndex);
      if (row < 0 || row >= step_.rows || rate < 0 || decay < -1 || Max(rate, decay) >= step_.rate_count) {
        return kWrongSize;
      }
      const Tensor &t = step_.tensors[i];
      if (t.begin < t.end && t.rows > 0 && LayoutOf(i, kCentralized) != 0 && t.begin % (t.size / t.rows) != 0) {
        return kWrongSize;
      }
    }
    return kOk;
  }

  bool CutChunks() {
    tasks_.reset(new (std::nothrow) Task[static_cast<size_t>(step_.count)]);
    if (!tasks_) return false;
    int chunks = 0;
    for (int pass = 0; pass < 2; ++pass) {
      chunks = 0;
      for (int i = 0; i < step_.count; ++i) {
        const Tensor &t = step_.tensors[i];
        Task &task = tasks_[i];
        task = Task{};
        task.row = t.rows > 0 && LayoutOf(i, kCentralized) != 0 ? t.size / t.rows : 0;
        PrepareStorage(i);
        const int64_t by_rows = rows_in_chunk_ * (t.size / Max(1, t.rows));
        const int64_t length = by_rows > 0 ? by_rows : task.row == 0 ? kChunk : task.row * RowsInChunk(task);
        task.first_chunk = chunks;
        for (int64_t begin = t.begin; begin < t.end; begin += length, ++chunks) {
          if (pass == 1) chunks_[chunks] = Chunk{i, begin, Min(t.end, begin + length), {}};
        }
        task.last_chunk = chunks;
      }
      if (pass == 0) chunks_.reset(new (std::nothrow) Chunk[static_cast<size_t>(chunks)]);
      if (!chunks_) return false;
    }
    memset(step_.sums, 0, static_cast<size_t>(step_.count) * kSums * sizeof(double));
    return true;
  }

  // Returns the rows of a chunk of a centralized tensor. Their means fit into a buffer and, if states are codes, the
  // rows are whole blocks.
  static int64_t RowsInChunk(const Task &task) {
    const int64_t rows = Max(1, Min(kTile, kChunk / Max(1, task.row)));
    const int64_t whole = task.low_states ? kCodeBlock / std::gcd(task.row, kCodeBlock) : 1;
    return Max(1, rows / whole) * whole;
  }

  void PrepareStorage(int i) {
    const Tensor &t = step_.tensors[i];
    Task &task = tasks_[i];
    const auto seed = static_cast<int64_t>(step_.constants[kSeed]);
    const int64_t now = *step_.global_step, row = LayoutOf(i, kRow);
    task.noisy_weight = NeedsNoise(t, step_.flags);
    task.noise = Noise(seed, now, row);
    for (int k = 0; k < kMaxStates; ++k) task.low_states |= t.state_type[k] != DType::kFloat32;
  }

  void PopulateStates() {
#pragma omp parallel for schedule(dynamic) collapse(2)
    for (int i = 0; i < step_.count; ++i) {
      for (int k = 0; k < kMaxStates; ++k) {
        const Tensor &t = step_.tensors[i];
        if (t.begin == t.end || t.state[k] == nullptr || (k > 0 && t.matrix_rows > 0)) continue;
        const int64_t before = BytesOfState(t.state_type[k], t.begin);
        Populate(static_cast<char *>(t.state[k]) + before, BytesOfState(t.state_type[k], t.end) - before);
      }
    }
  }

  int64_t ElementsOf(int i) const { return step_.tensors[i].end - step_.tensors[i].begin; }

  int LastOfRun(int first, int64_t most) const {
    int64_t elements = ElementsOf(first);
    int last = first + 1;
    while (last < step_.count && elements + ElementsOf(last) <= most) {
      elements += ElementsOf(last++);
    }
    return last;
  }

  // Calls body for the chunks of tensors first to last. A second pass goes backwards: the chunks that the first pass
  // read last are still in the cache. Every thread has its own share, the same in each pass, since it may have its own
  // caches. A thread that is done helps the next one.
  template <class Body>
  void ForChunks(int first, int last, bool backwards, Body body) {
    const int64_t begin = tasks_[first].first_chunk, count = tasks_[last - 1].last_chunk - begin;
    std::vector<Share> shares(static_cast<size_t>(omp_get_max_threads()));
    // Waking threads takes longer than a step over one chunk. Besides, threads wait for more work before they sleep,
    // which takes the processor from operators that run at the same time.
    const int64_t alone = (step_.flags & kBeside) != 0 ? kChunksAlone : 1;
#pragma omp parallel if (count > alone)
    {
      const DenormalsAreZero in_this_thread;
      Buffers buffers;
      const int threads = omp_get_num_threads();
      for (int i = 0; i < threads; ++i) {
        const int owner = (omp_get_thread_num() + i) % threads;
        const int64_t from = begin + count * owner / threads, to = begin + count * (owner + 1) / threads;
        std::atomic<int64_t> &taken = shares[static_cast<size_t>(owner)].taken;
        for (int64_t k; (k = from + taken.fetch_add(1, std::memory_order_relaxed)) < to;) {
          Chunk &chunk = chunks_[backwards ? from + to - 1 - k : k];
          body(chunk, step_.tensors[chunk.tensor], tasks_[chunk.tensor], buffers);
        }
      }
    }
  }

  void SumGradients(int first, int last) {
    ForChunks(first, last, false,
              [](Chunk &chunk, const Tensor &t, const Task &task, Buffers &b) { GradientSum(t, task, chunk, b); });
    AddSums(first, last);
  }

  void AddSums(int first, int last) {
    for (int i = first; i < last; ++i) {
      double *sums = SumsOf(i);
      memset(sums, 0, kSums * sizeof(double));
      for (int k = tasks_[i].first_chunk; k < tasks_[i].last_chunk; ++k) {
        for (int s = 0; s < kSums; ++s) sums[s] += chunks_[k].sum[s];
      }
    }
  }

  // Calls pass(parts), which takes tensors along directions that are known: once, or once for the sums and once for the
  // moves that are decided by them, if norms are held.
  template <class Rule, class Pass>
  void MoveBySums(const Rule &rule, int first, int last, Pass pass) {
    if (!Holds()) return pass(kSumUp | kMoveWeights);
    pass(kSumUp);
    AddSums(first, last);
    DecideAll(rule, first, last);
    pass(kMoveWeights);
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

  // Sums the gradients, or copies the sums of an earlier launch. A pass behind that goes backwards finds the gradients
  // that were read last in the cache.
  void Open(const Prologue &prologue) {
    if (prologue.sums_gradients) SumGradients(0, step_.count);
    if (!Has(kGradientStage)) CopySums();
  }

  // Returns whether the step is applied, and notes the factor of clipping.
  bool Applies(const Prologue &prologue) {
    const Survey survey = SurveyOf(step_, prologue.takes_total ? TotalGradientSum() : 0.0);
    clip_factor_ = survey.clip;
    return survey.applied;
  }

  // Decides from the sums so far the numbers that the next pass uses.
  template <class Rule>
  void DecideAll(const Rule &rule, int first, int last) {
    for (int i = first; i < last; ++i) Decide(rule, step_, i, SumsOf(i), clip_factor_, &tasks_[i]);
  }

  // Starts the averages, or moves them towards the weights, for a rule whose pass does not reach all weights.
  void Averages(bool start) {
    if ((step_.flags & kAverages) == 0) return;
    ForChunks(0, step_.count, false, [start](Chunk &chunk, const Tensor &t, const Task &task, Buffers &b) {
      if (t.average == nullptr || (start && !task.starts)) return;
      for (int64_t begin = chunk.begin; begin < chunk.end; begin += kTile) {
        const int n = static_cast<int>(Min(kTile, chunk.end - begin));
        if (start)
          StartTile<ElementwiseRule>(t, task, begin, n, LoadWeight(t, begin, n, b.weight));
        else
          AverageTile(t, task, begin, n, b.weight);
      }
    });
  }

  void Report(int i, bool applied) const { ms_optim::Report(step_, i, tasks_[i], SumsOf(i), applied); }

  Status Skip() {
    for (int i = 0; i < step_.count; ++i) Report(i, false);
    if ((step_.flags & kReturned) != 0) ReturnMasters();
    return Commit(false);
  }

  void ReturnMasters() {
    ForChunks(0, step_.count, false, [](Chunk &chunk, const Tensor &t, const Task &, Buffers &) {
      if (t.master == nullptr) return;
      StoreTile(t.master + chunk.begin, t.weight_type, chunk.begin, static_cast<int>(chunk.end - chunk.begin),
                t.weight);
    });
  }

  Status Commit(bool applied) {
    if (Has(kCommitStage)) ms_optim::Commit(step_, applied);
    return kOk;
  }

  const Step &step_;
  int64_t rows_in_chunk_ = 0;  // of an engine that sees whole rows; 0: chunks have a fixed size
  std::unique_ptr<Task[]> tasks_;
  double clip_factor_ = 1.0;
  std::unique_ptr<Chunk[]> chunks_;
};

// Runs a rule over all tensors of a step. engine.h defines it for most rules; a rule with its own engine specializes
// it.
template <class Rule>
Status Run(const Step &step);

}  // namespace
}  // namespace ms_optim
