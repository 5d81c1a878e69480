// In place of the header of this name, which adds the libraries of matrices: these need structures of tilings from a
// header that no repository has (kernel_tiling/kernel_tiling.h). The kernels use the vector API alone.
#pragma once

#include "kernel_vec_intf.h"
