// The workspace: the tables about the tensors of a step that its kernels need, in the memory of the device.
//
// The framework allocates it as one more output of the operator, and nothing in it outlives the step. The host fills in
// the tables by launches that take them as arguments: a copy from memory that is not pinned would make the host wait,
// and could not be recorded in a CUDA graph.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "decision.h"
#include "dgc.h"
#include "sinkhorn.h"

namespace ms_optim {

constexpr int kWarp = 32, kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kTile = static_cast<int>(kCodeBlock);  // a warp's share of work
// A block's. Where workers exchange, its sums are in the memory of the block, which is small.
constexpr int64_t kChunk = 64 * kTile, kExchangedChunk = 32 * kTile;

// The decisions of a step about a tensor.
struct Task : Decision {
  int64_t row;  // the elements of a row, if the gradient is centralized; else 0
  Noise noise;
};

// The decisions about the step, and the rule, built from its constants.
struct SurveyAndRule : Survey {
  alignas(16) unsigned char rule[256];
};

// A row's mean is the sum of both.
struct RowMean {
  float mean, rest;
};

// The search for the k-th magnitude of a tensor that is compressed.
struct Search {
  int64_t remaining;  // how many of the k largest begin with the prefix
  int64_t zeros;
  int32_t prefix;  // the digits found so far, then zeros
  float clip;      // the factor that clips this worker's gradient
  uint32_t count[kDigits[0].bins];
};

// The numbers of elements that a chunk sends: those larger than the k-th magnitude, those that equal it, and those that
// its tensor sends before it.
struct Sending {
  int64_t larger, ties, before;
};

// The factors of a tensor's rows and columns, if the rule balances them. Its rows are cut into bands, a block for each.
struct Balance {
  int64_t rows, columns, bands;
  double *of_rows, *of_columns;
  double *sums;    // [bands, columns], of squares
  double *norms;   // [bands], the sums of the norms of rows
  float *rounded;  // of_columns in float32

  Balance() = default;
  Balance(int64_t size, int64_t first_dimension)
      : rows(Max(1, first_dimension)),
        columns(size / rows),
        bands(size > 0 ? (rows + kRowsInBand - 1) / kRowsInBand : 0) {}

  int64_t Numbers() const { return rows + columns + bands * (columns + 1); }

  // Gives its arrays the next memory.
  void Lay(double **numbers, float **floats) {
    of_rows = *numbers;
    of_columns = of_rows + rows;
    sums = of_columns + columns;
    norms = sums + bands * columns;
    rounded = *floats;
    *numbers += Numbers();
    *floats += columns;
  }
};

struct Workspace {
  int64_t chunk;  // elements of a tensor for a block
  Tensor *tensors;
  int64_t *first_chunk, *first_row, *first_band;  // [n + 1]
  Balance *balances;
  Task *tasks;
  SurveyAndRule *survey;
  double *partial;  // [chunks, kSums]
  RowMean *means;
  Search *searches;
  WireOffsets *wire;
  Sending *sendings;
  double *numbers;  // of the balances
  float *floats;
};

// Lays out the workspace for tensors and counts its bytes.
struct WorkspaceLayout {
  int64_t tables, chunks = 0, rows = 0, bands = 0, bytes = 0;

  WorkspaceLayout(const int64_t *sizes, const int64_t *first_dimensions, int n, bool centralizes, const Interface &rule,
                  void *base, Workspace *work) {
    const bool exchanges = rule.exchanges;
    int64_t numbers = 0, floats = 0;
    work->chunk = exchanges ? kExchangedChunk : kChunk;
    for (int i = 0; i < n; ++i) {
      chunks += (sizes[i] + work->chunk - 1) / work->chunk;
      rows += centralizes ? first_dimensions[i] : 0;
      if (!rule.balances) continue;
      const Balance balance(sizes[i], first_dimensions[i]);
      bands += balance.bands;
      numbers += balance.Numbers();
      floats += balance.columns;
    }
    const auto reserve = [&](auto **array, int64_t count) {
      using T = typename std::remove_reference<decltype(**array)>::type;
      *array = reinterpret_cast<T *>(static_cast<char *>(base) + bytes);
      bytes += (count * int64_t{sizeof(T)} + 255) / 256 * 256;
    };
    reserve(&work->tensors, n);
    reserve(&work->first_chunk, n + 1);
    reserve(&work->first_row, n + 1);
    reserve(&work->first_band, n + 1);
    reserve(&work->balances, rule.balances ? n : 0);
    tables = bytes;
    reserve(&work->tasks, n);
    reserve(&work->survey, 1);
    reserve(&work->partial, Max(chunks, bands) * kSums);
    reserve(&work->means, rows);
    reserve(&work->searches, exchanges ? n : 0);
    reserve(&work->wire, exchanges ? n : 0);
    reserve(&work->sendings, exchanges ? chunks : 0);
    reserve(&work->numbers, numbers);
    reserve(&work->floats, floats);
  }
};

// The most words of an argument of a kernel.
#if defined(CUDART_VERSION) && CUDART_VERSION < 12010
constexpr int kMostWords = 1000;
#else
constexpr int kMostWords = 8000;
#endif
struct Words {
  uint32_t word[kMostWords];
};

// Launches kernels one after the other and keeps the first error.
class Launcher {
 public:
  explicit Launcher(void *stream) : stream_(static_cast<cudaStream_t>(stream)) {}

  // Launches a number of blocks of kThreads.
  template <class... Parameters, class... Arguments>
  void operator()(void (*kernel)(Parameters...), int64_t blocks, const Arguments &...arguments) {
    if (blocks == 0 || error_ != cudaSuccess) return;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(kThreads);
    config.stream = stream_;
    error_ = cudaLaunchKernelEx(&config, kernel, arguments...);
  }

  void Zero(void *data, int64_t bytes) {
    if (error_ == cudaSuccess && bytes > 0) error_ = cudaMemsetAsync(data, 0, static_cast<size_t>(bytes), stream_);
  }

  Status Result() const { return error_ == cudaSuccess ? kOk : kNoLaunch; }

 private:
  cudaStream_t stream_;
  cudaError_t error_ = cudaSuccess;
};

}  // namespace ms_optim
