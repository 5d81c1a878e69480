// Lion: momentum, weight, and the sums of squares of the weight from before and of the update.
#include "lion.h"

extern "C" __global__ __aicore__ void ms_optim_lion(GM_ADDR weight, GM_ADDR master, GM_ADDR m, GM_ADDR gradient,
                                                    GM_ADDR constants, GM_ADDR scalars, GM_ADDR sums, GM_ADDR workspace,
                                                    GM_ADDR tiling) {
  REGISTER_TILING_DEFAULT(ms_optim::Tiling);
  GET_TILING_DATA(launch, tiling);
  ms_optim::RuleKernel<ms_optim::Lion, ms_optim::kMomentsStage | ms_optim::kApplyStage, DTYPE_WEIGHT, DTYPE_MASTER,
                       DTYPE_GRADIENT>
      kernel;
  kernel.Run({weight, master, {m}, gradient, constants, scalars, sums}, launch.size);
}
