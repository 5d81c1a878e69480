// The operators as the framework sees them: inputs, outputs, dtypes, shapes, and how many cores a launch takes. What an
// operator updates is an input that it writes: an output of the same name would be one argument of its C interface,
// where MindSpore passes two.
#include <initializer_list>
#include <vector>

#include "../op_kernel/tiling.h"
#include "register/op_def_registry.h"
#include "tiling/platform/platform_ascendc.h"

namespace ms_optim {

static ge::graphStatus Launch(gert::TilingContext *context, int64_t size, uint32_t cores) {
  context->SetBlockDim(cores);
  context->GetTilingData<Tiling>()->size = size;
  context->GetWorkspaceSizes(1)[0] = 0;
  return ge::GRAPH_SUCCESS;
}

// Input k has the shape of the tensor that is updated; inputs before it may be absent, and then have one element.
template <size_t k>
static ge::graphStatus TileTensor(gert::TilingContext *context) {
  const int64_t size = context->GetInputShape(k)->GetStorageShape().GetShapeSize();
  const platform_ascendc::PlatformAscendC platform(context->GetPlatformInfo());
  return Launch(context, size, CoresFor(TilesOf(size), platform.GetCoreNumAiv()));
}

static ge::graphStatus TileSums(gert::TilingContext *context) {
  const gert::Shape &shape = context->GetInputShape(0)->GetStorageShape();
  return Launch(context, shape.GetDim(1), static_cast<uint32_t>(shape.GetDim(0)));
}

// Infers the shape of the sums of an operator over tensors of the shape of input k.
template <size_t k, int64_t kinds>
static ge::graphStatus InferTileSums(gert::InferShapeContext *context) {
  gert::Shape *sums = context->GetOutputShape(0);
  sums->SetDimNum(0);
  sums->AppendDim(kinds);
  sums->AppendDim(TilesOf(context->GetInputShape(k)->GetShapeSize()) * kLanes);
  return ge::GRAPH_SUCCESS;
}

static ge::graphStatus InferSums(gert::InferShapeContext *context) {
  gert::Shape *sums = context->GetOutputShape(0);
  sums->SetDimNum(0);
  sums->AppendDim(context->GetInputShape(0)->GetDim(0));
  sums->AppendDim(kLanes);
  return ge::GRAPH_SUCCESS;
}

// Infers the shape of an output that is as large as input k.
template <size_t k>
static ge::graphStatus InferLike(gert::InferShapeContext *context) {
  *context->GetOutputShape(0) = *context->GetInputShape(k);
  return ge::GRAPH_SUCCESS;
}

static ge::graphStatus InferFloat(gert::InferDataTypeContext *context) {
  return context->SetOutputDataType(0, ge::DT_FLOAT);
}

struct DTypes {
  ge::DataType weight, master, gradient;
};

// A weight without a master has its own dtype there. Gradients are of the weight's dtype or of float32.
static const std::vector<DTypes> kDTypes = {
    {ge::DT_FLOAT, ge::DT_FLOAT, ge::DT_FLOAT}, {ge::DT_FLOAT16, ge::DT_FLOAT, ge::DT_FLOAT16},
    {ge::DT_BF16, ge::DT_FLOAT, ge::DT_BF16},   {ge::DT_FLOAT16, ge::DT_FLOAT16, ge::DT_FLOAT16},
    {ge::DT_BF16, ge::DT_BF16, ge::DT_BF16},    {ge::DT_FLOAT16, ge::DT_FLOAT, ge::DT_FLOAT},
    {ge::DT_BF16, ge::DT_FLOAT, ge::DT_FLOAT},  {ge::DT_FLOAT16, ge::DT_FLOAT16, ge::DT_FLOAT},
    {ge::DT_BF16, ge::DT_BF16, ge::DT_FLOAT},
};
constexpr size_t kWithoutGradient = 5;  // the first have every pair of weight and master

}  // namespace ms_optim

namespace ops {

class MsOptimDef : public OpDef {
 protected:
  explicit MsOptimDef(const char *name) : OpDef(name) {}

  void Tensor(OpParamDef &parameter, const std::vector<ge::DataType> &dtypes) {
    const std::vector<ge::Format> formats(dtypes.size(), ge::FORMAT_ND);
    parameter.ParamType(REQUIRED).DataType(dtypes).Format(formats).UnknownShapeFormat(formats);
  }
  void Floats(const char *name, size_t columns) {
    Tensor(Input(name), std::vector<ge::DataType>(columns, ge::DT_FLOAT));
  }
  void Take(const char *name, size_t columns, ge::DataType ms_optim::DTypes::*of) {
    std::vector<ge::DataType> dtypes;
    for (size_t i = 0; i < columns; ++i) dtypes.push_back(ms_optim::kDTypes[i].*of);
    Tensor(Input(name), dtypes);
  }
  void Weights(size_t columns) {
    Take("weight", columns, &ms_optim::DTypes::weight);
    Take("master", columns, &ms_optim::DTypes::master);
  }
  void Sums(size_t columns) { Tensor(Output("sums"), std::vector<ge::DataType>(columns, ge::DT_FLOAT)); }

  // These processors copy any number of bytes between global memory and a core.
  void Runs(gert::OpImplRegisterV2::TilingKernelFunc tiling, gert::OpImplRegisterV2::InferShapeKernelFunc shape) {
    SetInferShape(shape).SetInferDataType(ms_optim::InferFloat);
    AICore().SetTiling(tiling).AddConfig("ascend910b").AddConfig("ascend910_93");
  }
};

// A launch of a rule.
template <int64_t kinds>
class MsOptimRuleDef : public MsOptimDef {
 protected:
  static constexpr size_t kFirstState = 2;

  MsOptimRuleDef(const char *name, std::initializer_list<const char *> states, bool gradient) : MsOptimDef(name) {
    const size_t columns = gradient ? ms_optim::kDTypes.size() : ms_optim::kWithoutGradient;
    Weights(columns);
    for (const char *state : states) Floats(state, columns);
    if (gradient) Take("gradient", columns, &ms_optim::DTypes::gradient);
    Floats("constants", columns);
    Floats("scalars", columns);
    Sums(columns);
    Runs(ms_optim::TileTensor<kFirstState>, ms_optim::InferTileSums<kFirstState, kinds>);
  }
};

class MsOptimAdamw : public MsOptimRuleDef<2> {
 public:
  explicit MsOptimAdamw(const char *name) : MsOptimRuleDef(name, {"m", "v"}, true) {}
};
OP_ADD(MsOptimAdamw);

class MsOptimAdamwAmsgrad : public MsOptimRuleDef<2> {
 public:
  explicit MsOptimAdamwAmsgrad(const char *name) : MsOptimRuleDef(name, {"m", "v", "vhat"}, true) {}
};
OP_ADD(MsOptimAdamwAmsgrad);

class MsOptimLambMoments : public MsOptimRuleDef<2> {
 public:
  explicit MsOptimLambMoments(const char *name) : MsOptimRuleDef(name, {"m", "v"}, true) {}
};
OP_ADD(MsOptimLambMoments);

class MsOptimLambApply : public MsOptimRuleDef<1> {
 public:
  explicit MsOptimLambApply(const char *name) : MsOptimRuleDef(name, {"m", "v"}, false) {}
};
OP_ADD(MsOptimLambApply);

class MsOptimLansMoments : public MsOptimRuleDef<3> {
 public:
  explicit MsOptimLansMoments(const char *name) : MsOptimRuleDef(name, {"m", "v"}, true) {}
};
OP_ADD(MsOptimLansMoments);

class MsOptimLansApply : public MsOptimRuleDef<1> {
 public:
  explicit MsOptimLansApply(const char *name) : MsOptimRuleDef(name, {"m", "v"}, true) {}
};
OP_ADD(MsOptimLansApply);

class MsOptimLion : public MsOptimRuleDef<2> {
 public:
  explicit MsOptimLion(const char *name) : MsOptimRuleDef(name, {"m"}, true) {}
};
OP_ADD(MsOptimLion);

class MsOptimAdemamix : public MsOptimRuleDef<2> {
 public:
  explicit MsOptimAdemamix(const char *name) : MsOptimRuleDef(name, {"m1", "nu", "m2"}, true) {}
};
OP_ADD(MsOptimAdemamix);

class MsOptimMuonMomentum : public MsOptimDef {
 public:
  explicit MsOptimMuonMomentum(const char *name) : MsOptimDef(name) {
    for (const char *input : {"m", "gradient", "constants", "scalars"}) Floats(input, 1);
    Tensor(Output("direction"), {ge::DT_FLOAT});
    Runs(ms_optim::TileTensor<0>, ms_optim::InferLike<0>);
  }
};
OP_ADD(MsOptimMuonMomentum);

class MsOptimMuonApply : public MsOptimDef {
 public:
  explicit MsOptimMuonApply(const char *name) : MsOptimDef(name) {
    constexpr size_t columns = ms_optim::kWithoutGradient;
    Weights(columns);
    Floats("direction", columns);
    Floats("scalars", columns);
    Sums(columns);
    Runs(ms_optim::TileTensor<2>, ms_optim::InferTileSums<2, 2>);
  }
};
OP_ADD(MsOptimMuonApply);

class MsOptimDelta : public MsOptimDef {
 public:
  explicit MsOptimDelta(const char *name) : MsOptimDef(name) {
    Tensor(Input("weight"), {ge::DT_FLOAT, ge::DT_FLOAT16, ge::DT_BF16});
    Floats("delta", 3);
    Sums(3);
    Runs(ms_optim::TileTensor<0>, ms_optim::InferTileSums<0, 1>);
  }
};
OP_ADD(MsOptimDelta);

class MsOptimSums : public MsOptimDef {
 public:
  explicit MsOptimSums(const char *name) : MsOptimDef(name) {
    Floats("partial", 1);
    Sums(1);
    Runs(ms_optim::TileSums, ms_optim::InferSums);
  }
};
OP_ADD(MsOptimSums);

}  // namespace ops
