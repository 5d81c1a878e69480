// Sums and maxima over the threads of a warp or of a block, in an order that is always the same.
#pragma once

#include "workspace.h"

// Stands before a loop over the elements of a thread. An unrolled loop keeps their arrays in registers.
#if defined(__CUDACC__)
#define MS_OPTIM_UNROLL _Pragma("unroll")
#else
#define MS_OPTIM_UNROLL
#endif

namespace ms_optim {
namespace {

__device__ inline int WarpOfThread() { return static_cast<int>(threadIdx.x) / kWarp; }
__device__ inline int LaneOfThread() { return static_cast<int>(threadIdx.x) % kWarp; }

template <class T>
__device__ T SumOfWarp(T x) {
  for (int lane = kWarp / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
  return x;
}

__device__ inline uint32_t LargestOfWarp(uint32_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xffffffffu, x);
#else
  for (int lane = kWarp / 2; lane > 0; lane /= 2) x = Max(x, __shfl_xor_sync(0xffffffffu, x, lane));
  return x;
#endif
}

// Returns the sum over a block, in all its threads.
template <class T>
__device__ T SumOfBlock(T x) {
  __shared__ T of_warp[kWarps];
  x = SumOfWarp(x);
  if (LaneOfThread() == 0) of_warp[WarpOfThread()] = x;
  __syncthreads();
  T total = of_warp[0];
  for (int i = 1; i < kWarps; ++i) total += of_warp[i];
  __syncthreads();
  return total;
}

// Returns the sum over the threads before this one, and stores the sum over the block in `total`.
template <class T>
__device__ T SumBefore(T x, T *total) {
  __shared__ T of_warp[kWarps];
  T up_to = x;
  for (int by = 1; by < kWarp; by *= 2) {
    const T other = __shfl_up_sync(0xffffffffu, up_to, by);
    if (LaneOfThread() >= by) up_to += other;
  }
  if (LaneOfThread() == kWarp - 1) of_warp[WarpOfThread()] = up_to;
  __syncthreads();
  T before = 0;
  *total = 0;
  for (int i = 0; i < kWarps; ++i) {
    if (i < WarpOfThread()) before += of_warp[i];
    *total += of_warp[i];
  }
  __syncthreads();
  return before + up_to - x;
}

// Returns the tensor, of n, that a chunk or a row belongs to, from the first one of each tensor. A whole warp asks, for
// the same index: its lanes compare it with 32 tensors at once, because each load waits for the one before.
__device__ inline int OwnerOf(const int64_t *first, int n, int64_t index) {
  int owner = 0;
  for (int left = n; left > 1;) {
    const int stride = (left + kWarp - 1) / kWarp, i = LaneOfThread() * stride;
    const bool begins_before = i < left && first[owner + i] <= index;
    const int last = __popc(__ballot_sync(0xffffffffu, begins_before)) - 1;
    owner += last * stride;
    left = Min(stride, left - last * stride);
  }
  return owner;
}

// The part of a tensor for a block.
struct Chunk {
  int tensor;
  int64_t begin, end;

  __device__ Chunk(const Step &step, const Workspace &work)
      : tensor(OwnerOf(work.first_chunk, step.count, blockIdx.x)),
        begin((static_cast<int64_t>(blockIdx.x) - work.first_chunk[tensor]) * work.chunk),
        end(Min(begin + work.chunk, step.tensors[tensor].size)) {}
  __device__ Chunk(int its_tensor, int64_t its_begin, int64_t its_end)
      : tensor(its_tensor), begin(its_begin), end(its_end) {}
};

// Adds up the sums of a block's threads, and stores them. Without a second direction there are fewer of them.
template <int kDirections>
__device__ void StorePartial(const Workspace &work, const double (&sum)[kSums]) {
  constexpr int kMade = kDirections < 2 ? kDirectionSum + 1 : kSums;
  __shared__ double of_warp[kMade][kWarps];
  MS_OPTIM_UNROLL
  for (int s = 0; s < kMade; ++s) {
    const double of_lanes = SumOfWarp(sum[s]);
    if (LaneOfThread() == 0) of_warp[s][WarpOfThread()] = of_lanes;
  }
  __syncthreads();
  const auto s = static_cast<int>(threadIdx.x);
  if (s >= kSums) return;
  double total = 0.0;
  for (int i = 0; s < kMade && i < kWarps; ++i) total += of_warp[s][i];
  work.partial[static_cast<int64_t>(blockIdx.x) * kSums + s] = total;
}

}  // namespace
}  // namespace ms_optim
