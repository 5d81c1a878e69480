// This file is compiled once for each instruction set, whose name is MS_OPTIM_ISA.
#include "kernels.h"

#include "dgc_engine.h"
#include "engine.h"
#include "local_engine.h"
#include "matrices.h"
#include "sinkhorn_engine.h"
#include "stack_engine.h"

#define MS_OPTIM_NAME(isa) #isa
#define MS_OPTIM_QUOTE(isa) MS_OPTIM_NAME(isa)

namespace ms_optim::MS_OPTIM_ISA {

const Kernels kernels = {MS_OPTIM_QUOTE(MS_OPTIM_ISA),
#define MS_OPTIM_ROW(name, Rule) &Run<Rule>,
                         MS_OPTIM_RULES(MS_OPTIM_ROW) MS_OPTIM_HOST_RULES(MS_OPTIM_ROW)
#undef MS_OPTIM_ROW
                             & OrthogonalizeStack,
                         &BeginLocal, &SendLocal, &ApplyLocal};

}  // namespace ms_optim::MS_OPTIM_ISA
