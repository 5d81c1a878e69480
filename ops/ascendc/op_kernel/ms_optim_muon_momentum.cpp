// Muon before the products of matrices: the momentum, and the direction that is then orthogonalized.
#include "muon.h"

extern "C" __global__ __aicore__ void ms_optim_muon_momentum(GM_ADDR m, GM_ADDR gradient, GM_ADDR constants,
                                                             GM_ADDR scalars, GM_ADDR direction, GM_ADDR workspace,
                                                             GM_ADDR tiling) {
  REGISTER_TILING_DEFAULT(ms_optim::Tiling);
  GET_TILING_DATA(launch, tiling);
  ms_optim::MuonMomentumKernel kernel;
  kernel.Run(m, gradient, constants, scalars, direction, launch.size);
}
