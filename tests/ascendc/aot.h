// The operators on the stand-in as operators of MindSpore on a CPU, for the tests of the step: each by the name of its
// type, with as many cores as the variable MS_OPTIM_CORES says.
#pragma once

#include <cstdlib>

#include "operators.h"

namespace stand_in {

inline int RunAot(const char *type, int count, void **data, int *ndims, int64_t **shapes, const char **dtypes) {
  std::vector<Array> arrays;
  std::string names;
  for (int i = 0; i + 1 < count; ++i) {
    arrays.push_back({std::vector<int64_t>(shapes[i], shapes[i] + ndims[i]), data[i], 0});
    int64_t size = 1;
    for (const int64_t extent : arrays.back().shape) size *= extent;
    arrays.back().bytes = static_cast<size_t>(size) * (std::string(dtypes[i]) == "float32" ? 4 : 2);
    names += (i > 0 ? "," : "") + std::string(dtypes[i]);
  }
  const char *cores = getenv("MS_OPTIM_CORES");
  const std::vector<float> output = Run(type, names, arrays, cores == nullptr ? 4 : static_cast<uint32_t>(atoi(cores)));
  int64_t size = 1;
  for (int i = 0; i < ndims[count - 1]; ++i) size *= shapes[count - 1][i];
  if (size != static_cast<int64_t>(output.size())) return 1;
  std::copy(output.begin(), output.end(), static_cast<float *>(data[count - 1]));
  return 0;
}

}  // namespace stand_in

#define STAND_IN_AOT(type)                                                                                         \
  extern "C" int type(int count, void **data, int *ndims, int64_t **shapes, const char **dtypes, void *, void *) { \
    return stand_in::RunAot(#type, count, data, ndims, shapes, dtypes);                                            \
  }
