// LAMB, apply stage: u once more, the weight, and the sum of squares of the update.
#include "adam.h"

extern "C" __global__ __aicore__ void ms_optim_lamb_apply(GM_ADDR weight, GM_ADDR master, GM_ADDR m, GM_ADDR v,
                                                          GM_ADDR constants, GM_ADDR scalars, GM_ADDR sums,
                                                          GM_ADDR workspace, GM_ADDR tiling) {
  REGISTER_TILING_DEFAULT(ms_optim::Tiling);
  GET_TILING_DATA(launch, tiling);
  ms_optim::RuleKernel<ms_optim::Lamb, ms_optim::kApplyStage, DTYPE_WEIGHT, DTYPE_MASTER, float> kernel;
  kernel.Run({weight, master, {m, v}, nullptr, constants, scalars, sums}, launch.size);
}
