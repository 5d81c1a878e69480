// Compiled once per instruction set, with MS_OPTIM_ISA naming it.
#include "kernels.h"

#include "adam_offload.h"
#include "adamw.h"
#include "compression.h"
#include "engine.h"
#include "lamb.h"
#include "lans.h"

#define MS_OPTIM_NAME(isa) #isa
#define MS_OPTIM_QUOTE(isa) MS_OPTIM_NAME(isa)

namespace ms_optim::MS_OPTIM_ISA {

const Kernels kernels = {
    MS_OPTIM_QUOTE(MS_OPTIM_ISA),
    &Run<AdamW<false>>,
    &Run<AdamW<true>>,
    &Run<Lamb>,
    &Run<Lans>,
    &Run<AdamOffload>,
    &RunDgcMomentum,
};

}  // namespace ms_optim::MS_OPTIM_ISA
