// LANS, apply stage: c and s once more, the weight, and the sum of squares of the update.
#include "adam.h"

extern "C" __global__ __aicore__ void ms_optim_lans_apply(GM_ADDR weight, GM_ADDR master, GM_ADDR m, GM_ADDR v,
                                                          GM_ADDR gradient, GM_ADDR constants, GM_ADDR scalars,
                                                          GM_ADDR sums, GM_ADDR workspace, GM_ADDR tiling) {
  REGISTER_TILING_DEFAULT(ms_optim::Tiling);
  GET_TILING_DATA(launch, tiling);
  ms_optim::RuleKernel<ms_optim::Lans, ms_optim::kApplyStage, DTYPE_WEIGHT, DTYPE_MASTER, DTYPE_GRADIENT> kernel;
  kernel.Run({weight, master, {m, v}, gradient, constants, scalars, sums}, launch.size);
}
