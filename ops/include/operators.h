// The operators that MindSpore calls, alike on every device: their C interface, and what each takes.
#pragma once

#include "step.h"

#define MS_OPTIM_API extern "C" __attribute__((visibility("default")))
#define MS_OPTIM_OPERATOR(name)                                                                    \
  MS_OPTIM_API int name(int count, void **data, int *ndims, int64_t **shapes, const char **dtypes, \
                        [[maybe_unused]] void *stream, void *)
#define MS_OPTIM_ARGUMENTS ms_optim::ArgumentReader(count, data, ndims, shapes, dtypes)

// For each rule: its name, how many states and constants it has, whether it exchanges.
#define MS_OPTIM_RULES(RULE)       \
  RULE(adamw, 2, 3, false)         \
  RULE(adamw_amsgrad, 3, 3, false) \
  RULE(lamb, 2, 7, false)          \
  RULE(lans, 2, 6, false)          \
  RULE(adam_offload, 2, 3, false)  \
  RULE(dgc_momentum, 2, 4, true)
