// Muon after the products of matrices: the weight, and the sums of squares of the weight from before and of the update.
#include "muon.h"

extern "C" __global__ __aicore__ void ms_optim_muon_apply(GM_ADDR weight, GM_ADDR master, GM_ADDR direction,
                                                          GM_ADDR scalars, GM_ADDR sums, GM_ADDR workspace,
                                                          GM_ADDR tiling) {
  REGISTER_TILING_DEFAULT(ms_optim::Tiling);
  GET_TILING_DATA(launch, tiling);
  ms_optim::RuleKernel<ms_optim::KnownDirection, ms_optim::kMomentsStage | ms_optim::kApplyStage, DTYPE_WEIGHT,
                       DTYPE_MASTER, float>
      kernel;
  kernel.Run({weight, master, {}, direction, scalars, scalars, sums}, launch.size);
}
