// The operators that MindSpore calls, and the functions that describe them.
#include <omp.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <set>

#define MS_OPTIM_HOST  // abi.h describes the rules of the host, too
#include "abi.h"
#include "copies.h"
#include "denormals.h"
#include "kernels.h"
#include "local_arguments.h"
#include "products.h"

namespace ms_optim {
namespace {

const Kernels *const kAvailable[] = {
#if defined(__x86_64__)
    &avx512::kernels,
    &avx2::kernels,
#endif
    &baseline::kernels,
};

bool Supported(const Kernels *kernels) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (kernels == &avx512::kernels) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
  if (kernels == &avx2::kernels) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return kernels == &baseline::kernels;
}

// Returns the kernels of that name, or the best for a null name; null if the processor cannot run them.
const Kernels *Find(const char *name) {
  for (const Kernels *kernels : kAvailable) {
    if (Supported(kernels) && (name == nullptr || strcmp(name, kernels->instruction_set) == 0)) return kernels;
  }
  return nullptr;
}

const Kernels *&Chosen() {
  static const Kernels *chosen = [] {
    const Kernels *forced = Find(std::getenv("MS_OPTIM_INSTRUCTION_SET"));
    return forced != nullptr ? forced : Find(nullptr);
  }();
  return chosen;
}

}  // namespace

namespace {

#if defined(__x86_64__)
// Tells whether the processor has tiles of bfloat16 numbers and this process may use them: the operating system keeps
// no room for them unless it is asked to.
[[maybe_unused]] bool MayUseTiles() {
  unsigned eax, ebx, ecx, edx;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  constexpr unsigned kHasBFloat16 = 1u << 22, kHasTiles = 1u << 24;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return (edx & kHasBFloat16) != 0 && (edx & kHasTiles) != 0 &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

// The products that belong to kernels, and the test for instructions that the kernels do not need.
struct NamedProducts {
  const char *name;
  const Products *products;
  const Kernels *kernels;
  bool (*is_supported)();
};

const NamedProducts kProducts[] = {
#if defined(__x86_64__)
#if !defined(MS_OPTIM_LACKS_AMX)
    {"amx", &amx::products, &avx512::kernels, MayUseTiles},
#endif
#if !defined(MS_OPTIM_LACKS_AVX512BF16)
    {"avx512bf16", &avx512bf16::products, &avx512::kernels, [] { return __builtin_cpu_supports("avx512bf16") != 0; }},
#endif
    {"avx512", &avx512::products, &avx512::kernels, [] { return true; }},
    {"avx2", &avx2::products, &avx2::kernels, [] { return true; }},
#endif
    {"baseline", &baseline::products, &baseline::kernels, [] { return true; }},
};

// Returns the products of that name, or the best that belong to the chosen kernels for a null name; null if the
// processor lacks them.
const Products *FindProducts(const char *name) {
  for (const NamedProducts &named : kProducts) {
    const bool wanted = name == nullptr ? named.kernels == Chosen() : strcmp(name, named.name) == 0;
    if (wanted && Supported(named.kernels) && named.is_supported()) return named.products;
  }
  return nullptr;
}

const Products *&OfChosenKernels() {
  static const Products *chosen = FindProducts(nullptr);
  return chosen;
}

}  // namespace

const Products &ChosenProducts() { return *OfChosenKernels(); }

namespace {

// Locks all weights of a step. Weights share a fixed number of locks, which every launch takes in the same order, so
// that no two launches wait for each other.
class Locks {
 public:
  explicit Locks(const Step &step) {
    if ((step.flags & kLocks) == 0) return;
    std::set<size_t> indices;
    for (int i = 0; i < step.count; ++i) {
      indices.insert((reinterpret_cast<uintptr_t>(step.tensors[i].weight) >> 6) % kShared);
    }
    static std::mutex shared[kShared];
    for (size_t index : indices) locks_.emplace_back(shared[index]);
  }

 private:
  static constexpr size_t kShared = 61;
  std::vector<std::unique_lock<std::mutex>> locks_;
};

int Launch(const ArgumentReader &arguments, const Interface &interface, Status (*Kernels::*rule)(const Step &)) {
  try {
    Step step{};
    std::vector<Tensor> tensors;
    const Status status = ParseStep(arguments, interface, true, &step, &tensors);
    if (status != kOk) return status;
    const Locks locks(step);
    const DenormalsAreZero in_this_thread;
    const Status done = (Chosen()->*rule)(step);
    // In a graph, MindSpore reports the number alone.
    if (done == kNegativeStep) {
      fprintf(
          stderr,
          "ms_optim: this step is refused, and nothing was changed: the parameters hold the averaged weights, for "
          "which "
          "global_step is negative (%d). Leave 'with optimizer.averaged()', or call optimizer.train(), and make the "
          "Model or the training step anew, with a new data set, as MindSpore runs none again that failed. Outside of "
          "such a block, a wrong global_step was loaded.\n",
          *step.global_step);
    }
    return done;
  } catch (const std::exception &) {
    return kNoMemory;
  }
}

}  // namespace
}  // namespace ms_optim

#define MS_OPTIM_ROW(name, Rule)                                                       \
  MS_OPTIM_OPERATOR(ms_optim_##name) {                                                 \
    constexpr ms_optim::Interface interface = ms_optim::InterfaceOf<ms_optim::Rule>(); \
    return ms_optim::Launch(MS_OPTIM_ARGUMENTS, interface, &ms_optim::Kernels::name);  \
  }
MS_OPTIM_RULES(MS_OPTIM_ROW)
MS_OPTIM_HOST_RULES(MS_OPTIM_ROW)
#undef MS_OPTIM_ROW

// Copy tensors to a wire, and a wire to tensors.
MS_OPTIM_OPERATOR(ms_optim_pack) { return ms_optim::CopyPieces(MS_OPTIM_ARGUMENTS, count, data, dtypes, true); }
MS_OPTIM_OPERATOR(ms_optim_unpack) { return ms_optim::CopyPieces(MS_OPTIM_ARGUMENTS, count, data, dtypes, false); }

// Copies tensors to other tensors.
MS_OPTIM_OPERATOR(ms_optim_copy) { return ms_optim::CopyTensors(MS_OPTIM_ARGUMENTS, count, data, dtypes); }

// Orthogonalizes the matrices of a stack of tensors.
MS_OPTIM_OPERATOR(ms_optim_orthogonalize) {
  return ms_optim::LaunchStack(MS_OPTIM_ARGUMENTS, ms_optim::Chosen()->orthogonalize);
}

// Local steps: begin a round, send its differences, apply the outer step, and compare the marks of the workers.
MS_OPTIM_OPERATOR(ms_optim_local_begin) {
  return ms_optim::LaunchLocal(MS_OPTIM_ARGUMENTS, ms_optim::LocalStage::kBegin, ms_optim::Chosen()->begin_local);
}
MS_OPTIM_OPERATOR(ms_optim_local_send) {
  return ms_optim::LaunchLocal(MS_OPTIM_ARGUMENTS, ms_optim::LocalStage::kSend, ms_optim::Chosen()->send_local);
}
MS_OPTIM_OPERATOR(ms_optim_local_apply) {
  return ms_optim::LaunchLocal(MS_OPTIM_ARGUMENTS, ms_optim::LocalStage::kApply, ms_optim::Chosen()->apply_local);
}
MS_OPTIM_OPERATOR(ms_optim_local_agree) { return ms_optim::AreAtTheSame(MS_OPTIM_ARGUMENTS); }

MS_OPTIM_API int ms_optim_local_difference(const int32_t *marks, int64_t workers, char *text, int64_t size) {
  return ms_optim::DifferenceOf(marks, workers, text, static_cast<size_t>(size));
}

// Returns the 4-byte words that a worker sends for a tensor.
MS_OPTIM_API int64_t ms_optim_local_words(int64_t size, int64_t chunk, double density, int bits) {
  return ms_optim::WireBytes(size, chunk, density, bits) / 4;
}

MS_OPTIM_API const char *ms_optim_instruction_set() { return ms_optim::Chosen()->instruction_set; }

// Chooses an instruction set, for tests and for the doctor; null: the best. Returns 0, or 1 if the processor lacks the
// set.
MS_OPTIM_API int ms_optim_force_instruction_set(const char *name) {
  const ms_optim::Kernels *kernels = ms_optim::Find(name);
  if (kernels == nullptr) return 1;
  ms_optim::Chosen() = kernels;
  ms_optim::OfChosenKernels() = ms_optim::FindProducts(nullptr);
  return 0;
}

// Chooses the products of matrices; null: the best that belong to the instruction set.
MS_OPTIM_API int ms_optim_force_products(const char *name) {
  const ms_optim::Products *products = ms_optim::FindProducts(name);
  if (products != nullptr) ms_optim::OfChosenKernels() = products;
  return products == nullptr;
}

MS_OPTIM_API const char *ms_optim_product_set() {
  for (const ms_optim::NamedProducts &named : ms_optim::kProducts) {
    if (named.products == ms_optim::OfChosenKernels()) return named.name;
  }
  return "";
}

MS_OPTIM_API int ms_optim_threads() { return omp_get_max_threads(); }
