// As much of CUDA as the kernels of ops/cuda use, on the host: so that their sources, unchanged, run where there is no
// GPU, and under sanitizers, which see every access. It is not NVIDIA's, and says nothing of speed.
//
// The threads of a block are fibers that run one after the other, each up to the next barrier. A block's threads run in
// order or, if MS_OPTIM_STANDIN_BACKWARDS is set, from the last to the first, and so do blocks: where the result
// depends on it, a barrier is missing, or two blocks touch the same memory. Threads that wait at different barriers, or
// that end while others wait, are an error, as are the data races that this order can show. Memory is the host's.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#include "denormals.h"

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)
// Blocks run one after the other, so one copy serves; but a block finds what the last one left, as on a GPU.
#define __shared__ static

typedef struct Stream *cudaStream_t;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9 };

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  void *attrs;
  unsigned numAttrs;
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace standin {

constexpr unsigned kWarp = 32, kMostThreads = 1024;
constexpr size_t kStack = 256 * 1024;

[[noreturn]] inline void Fail(const char *what) {
  fprintf(stderr, "stand-in for CUDA: %s\n", what);
  abort();
}

struct Fiber {
  ucontext_t context;
  jmp_buf here;
  bool entered;
  std::unique_ptr<char[]> stack;
  bool done;
  int barrier;      // what it waits at; 0: nothing
  uint64_t shared;  // what it shows the other threads of its warp or block
  void *fake_stack;
};

class Block {
 public:
  void Run(unsigned threads, const std::function<void()> &body) {
    if (threads > kMostThreads || threads % kWarp != 0) Fail("blocks are made of whole warps");
    threads_ = threads;
    body_ = &body;
    if (fibers_.size() < threads) fibers_.resize(threads);
    for (unsigned i = 0; i < threads; ++i) Start(i);
    const bool backwards = getenv("MS_OPTIM_STANDIN_BACKWARDS") != nullptr;
    for (bool running = true; running;) {
      running = false;
      for (unsigned k = 0; k < threads; ++k) {
        const unsigned i = backwards ? threads - 1 - k : k;
        if (fibers_[i].done || (fibers_[i].barrier != 0 && !Open(i))) continue;
        if (fibers_[i].barrier != 0) Release(i);
        Resume(i);
        running = true;
      }
    }
    for (unsigned i = 0; i < threads; ++i) {
      if (!fibers_[i].done) Fail("threads wait at a barrier that others never reach");
    }
  }

  // Waits until all threads of the block, or of the warp, wait at this barrier.
  void Wait(bool whole_block) {
    fibers_[current_].barrier = whole_block ? 1 : 2;
    SwitchOut(false);
  }
  void Show(uint64_t shared) { fibers_[current_].shared = shared; }
  uint64_t Shown(unsigned thread) const { return fibers_[thread].shared; }
  unsigned current() const { return current_; }
  unsigned threads() const { return threads_; }

 private:
  // Whether all who have to be at a thread's barrier are there.
  bool Open(unsigned i) const {
    const bool whole = fibers_[i].barrier == 1;
    const unsigned first = whole ? 0 : i / kWarp * kWarp, last = whole ? threads_ : first + kWarp;
    for (unsigned k = first; k < last; ++k) {
      if (fibers_[k].done) Fail("a thread has ended while others wait for it at a barrier");
      if (fibers_[k].barrier == 0) return false;
      if (!whole && fibers_[k].barrier != 2) Fail("threads of a warp wait at different barriers");
      if (whole && fibers_[k].barrier != 1) return false;
    }
    return true;
  }
  void Release(unsigned i) {
    const bool whole = fibers_[i].barrier == 1;
    const unsigned first = whole ? 0 : i / kWarp * kWarp, last = whole ? threads_ : first + kWarp;
    for (unsigned k = first; k < last; ++k) fibers_[k].barrier = 0;
  }

  static void Enter(unsigned high, unsigned low) {
    auto *block = reinterpret_cast<Block *>(static_cast<uintptr_t>(high) << 32 | low);
    block->Arrived(nullptr);
    (*block->body_)();
    block->fibers_[block->current_].done = true;
    block->SwitchOut(true);
  }
  void Start(unsigned i) {
    Fiber &fiber = fibers_[i];
    if (!fiber.stack) fiber.stack.reset(new char[kStack]);
    fiber.done = fiber.entered = false;
    fiber.barrier = 0;
    fiber.fake_stack = nullptr;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    const auto self = reinterpret_cast<uintptr_t>(this);
    makecontext(&fiber.context, reinterpret_cast<void (*)()>(Enter), 2, static_cast<unsigned>(self >> 32),
                static_cast<unsigned>(self));
  }
  void Resume(unsigned i) {
    current_ = i;
    threadIdx = dim3(i);
    threadIdx.y = threadIdx.z = 0;
#if defined(__SANITIZE_ADDRESS__)
    void *fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, fibers_[i].stack.get(), kStack);
    swapcontext(&main_, &fibers_[i].context);
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
    // swapcontext would ask the kernel for the signal mask each time.
    if (_setjmp(main_here_) != 0) return;
    if (fibers_[i].entered) _longjmp(fibers_[i].here, 1);
    fibers_[i].entered = true;
    setcontext(&fibers_[i].context);
#endif
  }
  void SwitchOut(bool for_good) {
    Fiber &fiber = fibers_[current_];
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(for_good ? nullptr : &fiber.fake_stack, main_stack_, main_stack_bytes_);
    swapcontext(&fiber.context, &main_);
    Arrived(fiber.fake_stack);
#else
    if (for_good || _setjmp(fiber.here) == 0) _longjmp(main_here_, 1);
#endif
  }
  void Arrived(void *fake_stack) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack, &main_stack_, &main_stack_bytes_);
#else
    (void)fake_stack;
#endif
  }

  std::vector<Fiber> fibers_;
  const std::function<void()> *body_;
  ucontext_t main_;
  jmp_buf main_here_;
  const void *main_stack_ = nullptr;
  size_t main_stack_bytes_ = 0;
  unsigned threads_ = 0, current_ = 0;
};

inline Block &TheBlock() {
  static Block block;
  return block;
}

template <class T>
uint64_t Pack(T x) {
  uint64_t bits = 0;
  memcpy(&bits, &x, sizeof(x));
  return bits;
}

// What another thread of the warp shows; its own where there is no such thread.
template <class T>
T FromLane(T own, int lane) {
  Block &block = TheBlock();
  const unsigned warp = block.current() / kWarp * kWarp;
  block.Show(Pack(own));
  block.Wait(false);
  T other = own;
  if (lane >= 0 && lane < static_cast<int>(kWarp)) {
    const uint64_t bits = block.Shown(warp + static_cast<unsigned>(lane));
    memcpy(&other, &bits, sizeof(other));
  }
  // Before anyone shows something else.
  block.Wait(false);
  return other;
}

}  // namespace standin

inline void __syncthreads() { standin::TheBlock().Wait(true); }
inline void __syncwarp() { standin::TheBlock().Wait(false); }

inline int __syncthreads_count(int condition) {
  standin::Block &block = standin::TheBlock();
  block.Show(condition != 0);
  block.Wait(true);
  int count = 0;
  for (unsigned i = 0; i < block.threads(); ++i) count += static_cast<int>(block.Shown(i));
  block.Wait(true);
  return count;
}

inline unsigned __ballot_sync(unsigned, bool condition) {
  standin::Block &block = standin::TheBlock();
  const unsigned warp = block.current() / standin::kWarp * standin::kWarp;
  block.Show(condition);
  block.Wait(false);
  unsigned lanes = 0;
  for (unsigned i = 0; i < standin::kWarp; ++i) lanes |= static_cast<unsigned>(block.Shown(warp + i)) << i;
  block.Wait(false);
  return lanes;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

[[noreturn]] inline void __trap() { standin::Fail("a kernel has stopped by itself"); }

template <class T>
T __shfl_xor_sync(unsigned, T x, int lanes) {
  return standin::FromLane(x, static_cast<int>(threadIdx.x % standin::kWarp) ^ lanes);
}

template <class T>
T __shfl_up_sync(unsigned, T x, unsigned by) {
  return standin::FromLane(x, static_cast<int>(threadIdx.x % standin::kWarp) - static_cast<int>(by));
}

template <class T>
T atomicAdd(T *to, T x) {
  const T before = *to;
  *to += x;
  return before;
}

// A framework may call operators from several threads; on a stream their kernels run one after the other.
inline std::mutex stream;

inline cudaError_t cudaMemsetAsync(void *data, int value, size_t bytes, cudaStream_t) {
  memset(data, value, bytes);
  return cudaSuccess;
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Parameters...),
                               Arguments &&...arguments) {
  if (config->gridDim.x == 0 || config->blockDim.x == 0) return cudaErrorInvalidConfiguration;
  const std::lock_guard<std::mutex> alone(stream);
  const ms_optim::DenormalsAreZero as_compiled_for_a_gpu;
  const std::function<void()> body = [&] { kernel(arguments...); };
  const bool backwards = getenv("MS_OPTIM_STANDIN_BACKWARDS") != nullptr;
  gridDim = config->gridDim;
  blockDim = config->blockDim;
  for (unsigned k = 0; k < gridDim.x; ++k) {
    blockIdx = dim3(backwards ? gridDim.x - 1 - k : k);
    blockIdx.y = blockIdx.z = 0;
    standin::TheBlock().Run(blockDim.x, body);
  }
  return cudaSuccess;
}
