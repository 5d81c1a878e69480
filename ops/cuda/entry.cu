// The operators that MindSpore calls on a GPU. The host cannot read data, which is on the device: it knows shapes,
// dtypes and flags, which are a shape. The last output is the workspace.
#include <exception>

#include "abi.h"
#include "dgc_engine.cuh"
#include "engine.cuh"
#include "sinkhorn_engine.cuh"

namespace ms_optim {
namespace {

typedef Status (*Runner)(const Step &, const std::vector<Tensor> &, const WorkspaceLayout &, const Workspace &,
                         Launcher &);

Status Check(const Step &step, bool exchanges) {
  for (int i = 0; i < step.count && exchanges; ++i) {
    const Tensor &t = step.tensors[i];
    if (t.size > kMostElements) return kWrongSize;
    for (int k = 0; k < DgcMomentum::kStates && t.state[k] != nullptr; ++k) {
      if (t.state_type[k] != DType::kFloat32) return kWrongDType;
    }
  }
  // A pass takes the tensors with states of its format: one with states of two formats would be updated twice.
  for (int i = 0; i < step.count; ++i) {
    if (FormatsOf(step.tensors[i]) > 1) return kWrongDType;
  }
  return exchanges && step.count == 0 ? kWrongCount : kOk;
}

Status Launch(int count, void **data, int *ndims, int64_t **shapes, const char **dtypes, void *stream,
              const Interface &interface, Runner run) {
  try {
    if (count == 0) return kWrongCount;
    const ArgumentReader all(count, data, ndims, shapes, dtypes);
    const int last = count - 1;
    Step step{};
    std::vector<Tensor> tensors;
    Status status = ParseStep(ArgumentReader(last, data, ndims, shapes, dtypes), interface, false, &step, &tensors);
    if (status == kOk) status = Check(step, interface.exchanges);
    if (status != kOk) return status;

    std::vector<int64_t> sizes, rows;
    for (const Tensor &t : tensors) {
      sizes.push_back(t.size);
      rows.push_back(t.rows);
    }
    Workspace work;
    const bool centralizes = (step.flags & kCentralizes) != 0;
    const WorkspaceLayout layout(sizes.data(), rows.data(), step.count, centralizes, interface, data[last], &work);
    if (!all.Is(last, "uint8")) return kWrongDType;
    if (all.Size(last) < layout.bytes || reinterpret_cast<uintptr_t>(data[last]) % 16 != 0) return kWrongSize;

    Launcher launch(stream);
    PutTables(tensors, centralizes, layout, work, &launch);
    step.tensors = work.tensors;
    return run(step, tensors, layout, work, launch);
  } catch (const std::exception &) {
    return kNoMemory;
  }
}

}  // namespace
}  // namespace ms_optim

#define MS_OPTIM_ROW(name, Rule)                                                                                       \
  MS_OPTIM_OPERATOR(ms_optim_##name) {                                                                                 \
    constexpr ms_optim::Interface interface = ms_optim::InterfaceOf<ms_optim::Rule>();                                 \
    return ms_optim::Launch(count, data, ndims, shapes, dtypes, stream, interface, ms_optim::RunRule<ms_optim::Rule>); \
  }
MS_OPTIM_RULES(MS_OPTIM_ROW)
MS_OPTIM_GPU_RULES(MS_OPTIM_ROW)
#undef MS_OPTIM_ROW

// Returns the bytes of the workspace of a launch, from the name of its rule, and the sizes and the first dimensions (0:
// fewer than two) of its tensors.
MS_OPTIM_API int64_t ms_optim_workspace(const char *rule, int n, const int64_t *sizes, const int64_t *rows,
                                        int centralizes) {
  ms_optim::Interface interface{};
#define MS_OPTIM_ROW(name, Rule) \
  if (strcmp(rule, #name) == 0) interface = ms_optim::InterfaceOf<ms_optim::Rule>();
  MS_OPTIM_RULES(MS_OPTIM_ROW)
  MS_OPTIM_GPU_RULES(MS_OPTIM_ROW)
#undef MS_OPTIM_ROW
  ms_optim::Workspace work;
  return ms_optim::WorkspaceLayout(sizes, rows, n, centralizes != 0, interface, nullptr, &work).bytes;
}
