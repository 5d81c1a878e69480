// The operators of ops/ascendc as a framework would run them: shapes, tiling, then the kernel on every core.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace stand_in {

struct Array {
  std::vector<int64_t> shape;
  void *data;
  size_t bytes;
};

// What the operators are, in JSON, as the vendor's tools would write it for MindSpore.
void Describe();

// Runs an operator whose kernel is for some dtypes; what it writes of its inputs is in place.
std::vector<float> Run(const std::string &type, const std::string &dtypes, const std::vector<Array> &inputs,
                       uint32_t cores_there);

}  // namespace stand_in
