#include "operators.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "register/op_def_registry.h"
#include "stand_in.h"

namespace stand_in {
namespace {

const char *NameOf(ge::DataType type) {
  return type == ge::DT_FLOAT ? "float32" : type == ge::DT_FLOAT16 ? "float16" : "bfloat16";
}

void DescribeParameters(const char *kind, const std::vector<std::unique_ptr<ops::OpParamDef>> &parameters) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const ops::OpParamDef &p = *parameters[i];
    std::string dtypes, formats;
    for (size_t k = 0; k < p.dtypes.size(); ++k) {
      dtypes += (k > 0 ? "," : "") + std::string(NameOf(p.dtypes[k]));
      formats += k > 0 ? ",ND" : "ND";
    }
    stand_in::Require(p.formats.size() == p.dtypes.size(), "dtypes and formats are not as many");
    printf(", \"%s%zu\": {\"name\": \"%s\", \"dtype\": \"%s\", \"format\": \"%s\", \"paramType\": \"required\"}", kind,
           i, p.name.c_str(), dtypes.c_str(), formats.c_str());
  }
}

using Memory = std::unique_ptr<uint8_t, decltype(&free)>;

// Memory of exactly so many bytes, so that a sanitizer sees the first beyond them.
Memory Allocate(size_t bytes) {
  void *address = nullptr;
  Require(posix_memalign(&address, 512, bytes) == 0, "there is no memory");
  memset(address, kPoison, bytes);
  global_memory.push_back({static_cast<uint8_t *>(address), bytes, std::vector<uint8_t>(bytes)});
  return Memory(static_cast<uint8_t *>(address), &free);
}

}  // namespace

void Describe() {
  const char *before = "{";
  for (const auto &[type, op] : ops::Definitions()) {
    std::string processors;
    for (const std::string &name : op->core.processors) processors += (processors.empty() ? "" : ",") + name;
    printf("%s\"%s\": {\"processors\": {\"value\": \"%s\"}", before, type.c_str(), processors.c_str());
    DescribeParameters("input", op->inputs);
    DescribeParameters("output", op->outputs);
    printf("}");
    before = ",\n";
  }
  puts("}");
}

std::vector<float> Run(const std::string &type, const std::string &dtypes, const std::vector<Array> &inputs,
                       uint32_t cores_there) {
  const ops::OpDef &op = *ops::Definitions().at(type);
  Require(inputs.size() == op.inputs.size(), "an operator is given too few inputs, or too many");
  gert::TilingContext tiling;
  tiling.platform.cores = cores_there;
  std::vector<Memory> memory;
  for (const Array &input : inputs) {
    tiling.inputs.push_back({{input.shape}});
    memory.push_back(Allocate(input.bytes));
    memcpy(memory.back().get(), input.data, input.bytes);
  }
  gert::InferShapeContext shapes{tiling.inputs, {}};
  gert::InferDataTypeContext types{};
  Require(op.infer_shape(&shapes) == ge::GRAPH_SUCCESS && op.infer_dtype(&types) == ge::GRAPH_SUCCESS &&
              op.core.tiling(&tiling) == ge::GRAPH_SUCCESS && tiling.workspaces[0] == 0,
          "an operator's shapes or tiling fail");
  Require(types.output == ge::DT_FLOAT && op.outputs[0]->dtypes[0] == ge::DT_FLOAT, "an output is not float32");
  std::vector<float> output(static_cast<size_t>(shapes.output.GetShapeSize()));
  memory.push_back(Allocate(output.size() * sizeof(float)));

  std::vector<uint8_t *> arguments;
  for (const Memory &m : memory) arguments.push_back(m.get());
  arguments.push_back(nullptr);
  arguments.push_back(tiling.tiling.data());
  const auto kernel = Kernels().find(type + "/" + dtypes);
  if (kernel == Kernels().end()) Fail("no kernel %s/%s", type.c_str(), dtypes.c_str());
  cores = tiling.block_dim;
  for (core = 0; core < cores; ++core) kernel->second(arguments.data());

  for (size_t i = 0; i < inputs.size(); ++i) memcpy(inputs[i].data, memory[i].get(), inputs[i].bytes);
  memcpy(output.data(), memory.back().get(), output.size() * sizeof(float));
  global_memory.clear();
  return output;
}

}  // namespace stand_in
