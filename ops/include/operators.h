// The C interface of the operators that MindSpore calls, alike on every device.
#pragma once

#include "arguments.h"

#define MS_OPTIM_API extern "C" __attribute__((visibility("default")))
#define MS_OPTIM_OPERATOR(name)                                                                    \
  MS_OPTIM_API int name(int count, void **data, int *ndims, int64_t **shapes, const char **dtypes, \
                        [[maybe_unused]] void *stream, void *)
#define MS_OPTIM_ARGUMENTS ms_optim::ArgumentReader(count, data, ndims, shapes, dtypes)
