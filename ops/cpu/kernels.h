// One table of kernels per instruction set; entry.cc picks the best that the processor has.
#pragma once

#include "step.h"

namespace ms_optim {

struct Kernels {
  const char *instruction_set;
  Status (*adamw)(const Step &);
  Status (*adamw_amsgrad)(const Step &);
  Status (*lamb)(const Step &);
  Status (*lans)(const Step &);
  Status (*adam_offload)(const Step &);
  Status (*dgc_momentum)(const Step &);
};

namespace avx512 {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace baseline {
extern const Kernels kernels;
}

}  // namespace ms_optim
