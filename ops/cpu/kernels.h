// A table of kernels for each instruction set; entry.cc picks the best that the processor has.
#pragma once

#include "local_steps.h"
#include "rules.h"
#include "stack_arguments.h"
#include "step.h"

namespace ms_optim {

struct Kernels {
  const char *instruction_set;
#define MS_OPTIM_ROW(name, Rule) Status (*name)(const Step &);
  MS_OPTIM_RULES(MS_OPTIM_ROW)
  MS_OPTIM_HOST_RULES(MS_OPTIM_ROW)
#undef MS_OPTIM_ROW
  Status (*orthogonalize)(const MatrixStack &);
  Status (*begin_local)(const LocalStep &);
  Status (*send_local)(const LocalStep &);
  Status (*apply_local)(const LocalStep &);
};

namespace avx512 {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace baseline {
extern const Kernels kernels;
}

}  // namespace ms_optim
