// Sums over a tensor from those over its tiles: see sums.h.
#include "sums.h"

extern "C" __global__ __aicore__ void ms_optim_sums(GM_ADDR partial, GM_ADDR sums, GM_ADDR workspace, GM_ADDR tiling) {
  REGISTER_TILING_DEFAULT(ms_optim::Tiling);
  GET_TILING_DATA(launch, tiling);
  ms_optim::SumsKernel kernel;
  kernel.Run(partial, sums, launch.size);
}
