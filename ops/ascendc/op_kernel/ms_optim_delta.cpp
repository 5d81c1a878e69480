// AdamOffload's step on the device: see delta.h.
#include "delta.h"

extern "C" __global__ __aicore__ void ms_optim_delta(GM_ADDR weight, GM_ADDR delta, GM_ADDR sums, GM_ADDR workspace,
                                                     GM_ADDR tiling) {
  REGISTER_TILING_DEFAULT(ms_optim::Tiling);
  GET_TILING_DATA(launch, tiling);
  ms_optim::DeltaKernel<DTYPE_WEIGHT> kernel;
  kernel.Run(weight, delta, sums, launch.size);
}
