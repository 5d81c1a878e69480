// Makes the kernels known to tests/ascendc/launch.cc, and runs one on the vendor's framework: a process for each core.
#pragma once

#include <utility>

#include "kern_fwk.h"
#include "stand_in.h"

namespace model {

// Checks, when a kernel returns, that nothing is left to do.
void Finish();

// Calls run with copies of the arguments in memory that the cores share, with a guard behind each; the copies go back.
void Launch(const char *name, uint8_t **arguments, size_t count, const std::function<void(uint8_t **)> &run);

template <class... P, size_t... i>
bool Add(const char *name, void (*kernel)(P...), std::index_sequence<i...>) {
  const auto whole = [kernel](P... parameters) {
    kernel(parameters...);
    Finish();
  };
  const auto run = [name, whole](uint8_t **a) {
    AscendC::RunKernelFunctionOnCpu(whole, name, static_cast<unsigned>(stand_in::cores), a[i]...);
  };
  const auto launch = [name, run](uint8_t **a) { Launch(name, a, sizeof...(P), run); };
  return stand_in::Kernels().emplace(name, launch).second;
}
template <class... P>
bool Add(const char *name, void (*kernel)(P...)) {
  return Add(name, kernel, std::index_sequence_for<P...>());
}

}  // namespace model
