// What the stand-in for an Ascend processor keeps count of: global memory, who wrote it, and which core is running.
//
// It is made for these tests from the documented rules of the vector API, and is stricter than the hardware where that
// finds mistakes. It is no simulator: cores run one after the other, and a copy is done when it is asked for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace stand_in {

constexpr size_t kBlock = 32;  // bytes that addresses in a core's memory are aligned to
// Of 192 KiB, Select needs the last 8 for itself.
constexpr size_t kUnifiedBuffer = 184 * 1024;
constexpr size_t kEvents = 8;  // buffers that the queues of one position may have together
constexpr int kPoison = 0xFF;  // a NaN in any format

inline int64_t core = 0, cores = 1;

[[noreturn]] __attribute__((format(printf, 1, 2))) void Fail(const char *format, ...);
inline void Require(bool condition, const char *otherwise) {
  if (!condition) Fail("%s", otherwise);
}

// One tensor in global memory. A byte that was written in a launch is neither read nor written again in it: another
// core would race, and the same core would have to wait for its own copy.
struct Allocation {
  uint8_t *begin;
  size_t bytes;
  std::vector<uint8_t> written;
};

inline std::vector<Allocation> global_memory;
void TouchGlobal(const void *address, size_t bytes, bool writes);

// An operator's kernel for some dtypes, from the addresses of inputs, output, workspace and tiling.
using Kernel = std::function<void(uint8_t **)>;
inline std::map<std::string, Kernel> &Kernels() {
  static std::map<std::string, Kernel> kernels;
  return kernels;
}

// Makes a kernel known by the operator's type and the dtypes of its inputs.
template <class... P, size_t... i>
bool Add(const char *name, void (*kernel)(P...), std::index_sequence<i...>) {
  return Kernels().emplace(name, [kernel](uint8_t **a) { kernel(a[i]...); }).second;
}
template <class... P>
bool Add(const char *name, void (*kernel)(P...)) {
  return Add(name, kernel, std::index_sequence_for<P...>());
}

}  // namespace stand_in
