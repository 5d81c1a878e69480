// DGCMomentum on a GPU: the exact selection of the largest elements of r. It selects the same elements as the CPU, bit
// for bit.
#pragma once

#include "step_engine.cuh"

namespace ms_optim {
namespace {

// Returns how many elements of a tensor are sent, the k of the paper; 0: the tensor is not compressed.
__device__ inline int64_t SentOf(const Step &step, int i) { return LayoutOf(step, i, kSent); }

__device__ inline float *U(const Tensor &t) { return static_cast<float *>(t.state[0]); }
__device__ inline float *R(const Tensor &t) { return static_cast<float *>(t.state[1]); }

// The velocity and r with a gradient in them.
struct NewState {
  float u, r;

  __device__ NewState(const DgcMomentum &rule, float gradient, float old_u, float old_r)
      : u(rule.Velocity(gradient, old_u)), r(old_r + rule.Direction(gradient, u)) {}
};

// Returns r of an element with the gradient in it, whether that is stored yet or not.
__device__ inline float NewR(const Step &step, const Workspace &work, int tensor, int64_t i) {
  const Tensor &t = step.tensors[tensor];
  if ((step.stages & kApplyStage) != 0) return R(t)[i];
  const Task &task = work.tasks[tensor];
  const DgcMomentum &rule = RuleOf<DgcMomentum>(work);
  float g = 0.0f;
  if (t.gradient_type == DType::kFloat32) g = static_cast<const float *>(t.gradient)[i];
  if (t.gradient_type == DType::kFloat16) g = ToFloat(static_cast<const float16 *>(t.gradient)[i]);
  if (t.gradient_type == DType::kBFloat16) g = ToFloat(static_cast<const bfloat16 *>(t.gradient)[i]);
  if (task.row != 0) {
    const RowMean &mean = work.means[work.first_row[tensor] + i / task.row];
    g = (g - mean.mean) - mean.rest;
  }
  const float gradient = work.searches[tensor].clip * rule.Gradient(WeightAt(t, i), task.factor * g, task.lambda);
  return NewState(rule, gradient, U(t)[i], R(t)[i]).r;
}

__global__ void __launch_bounds__(kThreads) CountDigit(const Step step, const Workspace work, Digit digit) {
  __shared__ uint32_t count[kDigits[0].bins];
  if (!work.survey->applied) return;
  const Chunk chunk(step, work);
  if (SentOf(step, chunk.tensor) == 0) return;
  Search &search = work.searches[chunk.tensor];
  for (int bin = static_cast<int>(threadIdx.x); bin < digit.bins; bin += kThreads) count[bin] = 0;
  __syncthreads();
  // Zeros are not counted: the r of an embedding may be full of them.
  for (int64_t i = chunk.begin + threadIdx.x; i < chunk.end; i += kThreads) {
    const int32_t key = MagnitudeKey(NewR(step, work, chunk.tensor, i));
    const uint32_t bin = BinOf(digit, key, search.prefix);
    if (key != 0 && bin < static_cast<uint32_t>(digit.bins)) atomicAdd(&count[bin], 1u);
  }
  __syncthreads();
  for (int bin = static_cast<int>(threadIdx.x); bin < digit.bins; bin += kThreads) {
    if (count[bin] != 0) atomicAdd(&search.count[bin], count[bin]);
  }
}

// A block for each tensor: finds the bin of the k-th largest, from the largest down.
__global__ void __launch_bounds__(kThreads) EndDigit(const Step step, const Workspace work, Digit digit) {
  const int i = static_cast<int>(blockIdx.x);
  if (!work.survey->applied || SentOf(step, i) == 0) return;
  Search &search = work.searches[i];
  const int each = digit.bins / kThreads, top = digit.bins - 1 - static_cast<int>(threadIdx.x) * each;
  int64_t own = 0, counted = 0;
  for (int k = 0; k < each; ++k) own += search.count[top - k];
  int64_t remaining = search.remaining - SumBefore(own, &counted);
  const bool first = digit.shift == kDigits[0].shift, last_thread = threadIdx.x == kThreads - 1;
  const int64_t zeros = first ? step.tensors[i].size - counted : search.zeros;
  __syncthreads();
  // If fewer than k magnitudes are not 0, the k-th is 0: its bin is the last thread's.
  if (remaining > 0 && (remaining <= own || last_thread)) {
    int bin = top;
    for (; bin > top - each + 1 && search.count[bin] < remaining; --bin) remaining -= search.count[bin];
    search.prefix |= bin << digit.shift;
    search.remaining = remaining;
  }
  if (last_thread) search.zeros = zeros;
  __syncthreads();
  for (int k = 0; k < each; ++k) search.count[top - k] = 0;
}

__global__ void __launch_bounds__(kThreads) CountSent(const Step step, const Workspace work) {
  if (!work.survey->applied) return;
  const Chunk chunk(step, work);
  if (SentOf(step, chunk.tensor) == 0) return;
  const int32_t magnitude = work.searches[chunk.tensor].prefix;
  int larger = 0, equal = 0;
  for (int64_t i = chunk.begin + threadIdx.x; i < chunk.end; i += kThreads) {
    const int32_t key = MagnitudeKey(NewR(step, work, chunk.tensor, i));
    larger += key > magnitude;
    equal += key == magnitude;
  }
  larger = SumOfBlock(larger);
  equal = SumOfBlock(equal);
  if (threadIdx.x == 0) work.sendings[blockIdx.x] = Sending{larger, equal, 0};
}

// A block for each tensor: decides how many elements each of its chunks sends. The first elements that equal the k-th
// magnitude are sent.
__global__ void __launch_bounds__(kThreads) DecideSent(const Step step, const Workspace work) {
  const int i = static_cast<int>(blockIdx.x);
  if (!work.survey->applied) return;
  if (threadIdx.x == 0 && (step.stages & kApplyStage) == 0) {
    step.sums[int64_t{i} * kSums + kClipFactor] = work.searches[i].clip;
  }
  if (SentOf(step, i) == 0) return;
  int64_t ties = work.searches[i].remaining, before = 0;
  for (int64_t first = work.first_chunk[i]; first < work.first_chunk[i + 1]; first += kThreads) {
    const int64_t k = first + threadIdx.x;
    const bool has = k < work.first_chunk[i + 1];
    Sending sending = has ? work.sendings[k] : Sending{0, 0, 0};
    int64_t equal = 0, sent = 0;
    const int64_t ties_left = Max(int64_t{0}, ties - SumBefore(sending.ties, &equal));
    sending.ties = Min(sending.ties, ties_left);
    sending.before = before + SumBefore(sending.larger + sending.ties, &sent);
    if (has) work.sendings[k] = sending;
    ties = Max(int64_t{0}, ties - equal);
    before += sent;
  }
}

}  // namespace
}  // namespace ms_optim
