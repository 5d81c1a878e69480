// A stand-in for the header of this name: what defines an operator, its tiling and its shapes. See ../stand_in.h.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace ge {
enum DataType { DT_FLOAT, DT_FLOAT16, DT_BF16 };
enum Format { FORMAT_ND };
using graphStatus = uint32_t;
constexpr graphStatus GRAPH_SUCCESS = 0;
}  // namespace ge

namespace gert {

class Shape {
 public:
  std::vector<int64_t> extents;
  int64_t GetShapeSize() const {
    int64_t size = 1;
    for (const int64_t extent : extents) size *= extent;
    return size;
  }
  int64_t GetDim(size_t i) const { return extents.at(i); }
  void SetDimNum(size_t count) { extents.resize(count); }
  void AppendDim(int64_t extent) { extents.push_back(extent); }
};

struct StorageShape {
  Shape shape;
  const Shape &GetStorageShape() const { return shape; }
};

struct PlatformInfo {
  uint32_t cores;
};

struct TilingContext {
  std::vector<StorageShape> inputs;
  PlatformInfo platform;
  uint32_t block_dim = 0;
  size_t workspaces[1] = {~size_t{0}};
  std::vector<uint8_t> tiling;

  const StorageShape *GetInputShape(size_t i) const { return &inputs.at(i); }
  PlatformInfo *GetPlatformInfo() { return &platform; }
  void SetBlockDim(uint32_t cores) { block_dim = cores; }
  size_t *GetWorkspaceSizes(size_t) { return workspaces; }
  template <class T>
  T *GetTilingData() {
    tiling.assign(sizeof(T), 0xFF);
    return reinterpret_cast<T *>(tiling.data());
  }
};

struct InferShapeContext {
  std::vector<StorageShape> inputs;
  Shape output;
  const Shape *GetInputShape(size_t i) const { return &inputs.at(i).shape; }
  Shape *GetOutputShape(size_t) { return &output; }
};

struct InferDataTypeContext {
  ge::DataType output;
  ge::graphStatus SetOutputDataType(size_t, ge::DataType type) {
    output = type;
    return ge::GRAPH_SUCCESS;
  }
};

struct OpImplRegisterV2 {
  using TilingKernelFunc = ge::graphStatus (*)(TilingContext *);
  using InferShapeKernelFunc = ge::graphStatus (*)(InferShapeContext *);
  using InferDataTypeKernelFunc = ge::graphStatus (*)(InferDataTypeContext *);
};

}  // namespace gert

namespace ops {

enum Option { REQUIRED };

struct OpParamDef {
  std::string name;
  std::vector<ge::DataType> dtypes;
  std::vector<ge::Format> formats;
  OpParamDef &ParamType(Option) { return *this; }
  OpParamDef &DataType(std::vector<ge::DataType> types) {
    dtypes = types;
    return *this;
  }
  OpParamDef &Format(std::vector<ge::Format> given) {
    formats = given;
    return *this;
  }
  OpParamDef &UnknownShapeFormat(std::vector<ge::Format>) { return *this; }
};

struct OpAICoreDef {
  gert::OpImplRegisterV2::TilingKernelFunc tiling = nullptr;
  std::vector<std::string> processors;
  OpAICoreDef &SetTiling(gert::OpImplRegisterV2::TilingKernelFunc function) {
    tiling = function;
    return *this;
  }
  OpAICoreDef &AddConfig(const char *processor) {
    processors.push_back(processor);
    return *this;
  }
};

class OpDef {
 public:
  explicit OpDef(const char *type) : type(type) {}
  OpParamDef &Input(const char *name) { return Named(&inputs, name); }
  OpParamDef &Output(const char *name) { return Named(&outputs, name); }
  OpAICoreDef &AICore() { return core; }
  OpDef &SetInferShape(gert::OpImplRegisterV2::InferShapeKernelFunc function) {
    infer_shape = function;
    return *this;
  }
  OpDef &SetInferDataType(gert::OpImplRegisterV2::InferDataTypeKernelFunc function) {
    infer_dtype = function;
    return *this;
  }

  std::string type;
  std::vector<std::unique_ptr<OpParamDef>> inputs, outputs;
  OpAICoreDef core;
  gert::OpImplRegisterV2::InferShapeKernelFunc infer_shape = nullptr;
  gert::OpImplRegisterV2::InferDataTypeKernelFunc infer_dtype = nullptr;

 private:
  static OpParamDef &Named(std::vector<std::unique_ptr<OpParamDef>> *all, const char *name) {
    all->push_back(std::make_unique<OpParamDef>());
    all->back()->name = name;
    return *all->back();
  }
};

inline std::map<std::string, std::unique_ptr<OpDef>> &Definitions() {
  static std::map<std::string, std::unique_ptr<OpDef>> definitions;
  return definitions;
}

}  // namespace ops

#define OP_ADD(type) static const bool type##_added = Definitions().emplace(#type, std::make_unique<type>(#type)).second
