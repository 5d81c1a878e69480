// The description of a library for Python: its rules, and the numbers of the C interface by name. Python states these
// numbers once more, in ms_optim/kernels/interface.py, as it also runs without a library; a test compares the two.
//
// Included by the one source of a library that exports its operators.
#pragma once

#include "dgc.h"
#include "local_steps.h"
#include "operators.h"
#include "rules.h"

namespace ms_optim {

struct DescribedRule {
  const char *name;
  int32_t states, constants, exchanges, weighs_steps, has_matrices;
};

struct DescribedConstant {
  const char *name;
  int64_t value;
};

template <class Rule>
constexpr DescribedRule Described(const char *name) {
  constexpr Interface interface = InterfaceOf<Rule>();
  return {
      name, interface.states, interface.constants, interface.exchanges, interface.weighs_steps, interface.has_matrices};
}

// Each array ends with a null name.
#define MS_OPTIM_ROW(name, Rule) Described<Rule>(#name),
#if defined(MS_OPTIM_HOST)
#undef MS_OPTIM_GPU_RULES
#define MS_OPTIM_GPU_RULES(RULE)
#else
#undef MS_OPTIM_HOST_RULES
#define MS_OPTIM_HOST_RULES(RULE)
#endif
constexpr DescribedRule kDescribedRules[] = {MS_OPTIM_RULES(MS_OPTIM_ROW) MS_OPTIM_HOST_RULES(MS_OPTIM_ROW)
                                                 MS_OPTIM_GPU_RULES(MS_OPTIM_ROW){}};
#undef MS_OPTIM_ROW

#define MS_OPTIM_CONSTANTS(CONSTANT)                  \
  CONSTANT(kMaxStates)                                \
  CONSTANT(kMaxDirections)                            \
  CONSTANT(kCodeBlock)                                \
  CONSTANT(kMostElements)                             \
  CONSTANT(kLimbBits)                                 \
  CONSTANT(kLimbs)                                    \
  CONSTANT(kMarkWords)                                \
  CONSTANT(DType::kOther)                             \
  CONSTANT(Stage::kGradientStage)                     \
  CONSTANT(Stage::kMomentsStage)                      \
  CONSTANT(Stage::kApplyStage)                        \
  CONSTANT(Stage::kCommitStage)                       \
  CONSTANT(SharedFlag::kSkipNonfinite)                \
  CONSTANT(SharedFlag::kMasters)                      \
  CONSTANT(SharedFlag::kStochasticRounding)           \
  CONSTANT(SharedFlag::kCentralizes)                  \
  CONSTANT(SharedFlag::kByAddress)                    \
  CONSTANT(SharedFlag::kBetaPowers)                   \
  CONSTANT(SharedFlag::kLocks)                        \
  CONSTANT(SharedFlag::kReturned)                     \
  CONSTANT(SharedFlag::kShares)                       \
  CONSTANT(SharedFlag::kClips)                        \
  CONSTANT(SharedFlag::kAverages)                     \
  CONSTANT(SharedFlag::kBeside)                       \
  CONSTANT(SharedFlag::kHoldsNorms)                   \
  CONSTANT(SharedFlag::kKeepsRadii)                   \
  CONSTANT(Sum::kGradientSum)                         \
  CONSTANT(Sum::kWeightSum)                           \
  CONSTANT(Sum::kDirectionSum)                        \
  CONSTANT(Sum::kDirection2Sum)                       \
  CONSTANT(Sum::kDirectionsDot)                       \
  CONSTANT(Sum::kSums)                                \
  CONSTANT(Statistic::kGradientNorm)                  \
  CONSTANT(Statistic::kWeightNorm)                    \
  CONSTANT(Statistic::kUpdateNorm)                    \
  CONSTANT(Statistic::kTrustRatio)                    \
  CONSTANT(Statistic::kFinite)                        \
  CONSTANT(Statistic::kStatistics)                    \
  CONSTANT(Constant::kUnscale)                        \
  CONSTANT(Constant::kClipNorm)                       \
  CONSTANT(Constant::kSeed)                           \
  CONSTANT(Constant::kCautious)                       \
  CONSTANT(Constant::kAverageDecay)                   \
  CONSTANT(Constant::kAverageWarmup)                  \
  CONSTANT(Constant::kHeldBy)                         \
  CONSTANT(Constant::kOutwardKept)                    \
  CONSTANT(Constant::kInwardKept)                     \
  CONSTANT(Constant::kRuleConstants)                  \
  CONSTANT(WeightNorm::kFree)                         \
  CONSTANT(WeightNorm::kHyperball)                    \
  CONSTANT(WeightNorm::kRelative)                     \
  CONSTANT(WeightNorm::kRadialBrake)                  \
  CONSTANT(AddressColumn::kWeightAddress)             \
  CONSTANT(AddressColumn::kGradientAddress)           \
  CONSTANT(AddressColumn::kMasterAddress)             \
  CONSTANT(AddressColumn::kAverageAddress)            \
  CONSTANT(AddressColumn::kStateAddress)              \
  CONSTANT(AddressColumn::kScaleAddress)              \
  CONSTANT(AddressColumn::kElements)                  \
  CONSTANT(AddressColumn::kFirstDimension)            \
  CONSTANT(AddressColumn::kWeightType)                \
  CONSTANT(AddressColumn::kGradientType)              \
  CONSTANT(AddressColumn::kMasterType)                \
  CONSTANT(AddressColumn::kStateType)                 \
  CONSTANT(AddressColumn::kAddressColumns)            \
  CONSTANT(SharedAddressColumn::kGlobalStepAddress)   \
  CONSTANT(SharedAddressColumn::kSkippedStepsAddress) \
  CONSTANT(SharedAddressColumn::kStatisticsAddress)   \
  CONSTANT(SharedAddressColumn::kStatisticsRows)      \
  CONSTANT(SharedAddressColumn::kBetaPowerAddress)    \
  CONSTANT(SharedAddressColumn::kStepWeightsAddress)  \
  CONSTANT(SharedAddressColumn::kRadiiAddress)        \
  CONSTANT(Layout::kRateIndex)                        \
  CONSTANT(Layout::kDecayIndex)                       \
  CONSTANT(Layout::kCentralized)                      \
  CONSTANT(Layout::kRow)                              \
  CONSTANT(Layout::kIsHeld)                           \
  CONSTANT(Layout::kLayoutColumns)                    \
  CONSTANT(Layout::kSent)                             \
  CONSTANT(MatrixColumn::kMatrixTensor)               \
  CONSTANT(MatrixColumn::kFirstRow)                   \
  CONSTANT(MatrixColumn::kRun)                        \
  CONSTANT(MatrixColumn::kRuns)                       \
  CONSTANT(MatrixColumn::kStride)                     \
  CONSTANT(MatrixColumn::kColumns)                    \
  CONSTANT(MatrixColumn::kMatrixColumns)              \
  CONSTANT(LocalNumber::kLocalWorkers)                \
  CONSTANT(LocalNumber::kLocalRank)                   \
  CONSTANT(LocalNumber::kOuterRate)                   \
  CONSTANT(LocalNumber::kOuterMomentum)               \
  CONSTANT(LocalNumber::kOuterNesterov)               \
  CONSTANT(LocalNumber::kResidualDecay)               \
  CONSTANT(LocalNumber::kValueBits)                   \
  CONSTANT(LocalNumber::kChunkElements)               \
  CONSTANT(LocalNumber::kDensity)                     \
  CONSTANT(LocalNumber::kLocalNumbers)                \
  CONSTANT(LocalMark::kMarkStep)                      \
  CONSTANT(LocalMark::kMarkEvery)                     \
  CONSTANT(LocalMark::kMarkFragments)                 \
  CONSTANT(LocalMark::kMarkRate)                      \
  CONSTANT(LocalMark::kMarkMomentum)                  \
  CONSTANT(LocalMark::kMarkNesterov)                  \
  CONSTANT(LocalMark::kMarkBits)                      \
  CONSTANT(LocalMark::kMarkChunk)                     \
  CONSTANT(LocalMark::kMarkDensity)                   \
  CONSTANT(LocalMark::kMarkDecay)                     \
  CONSTANT(LocalMark::kMarkOptimizer)                 \
  CONSTANT(LocalMark::kMarkTensors)                   \
  CONSTANT(LocalMark::kMarkStart)                     \
  CONSTANT(LocalMark::kLocalMarks)                    \
  CONSTANT(LocalReport::kDifferenceNorm)              \
  CONSTANT(LocalReport::kResidualNorm)                \
  CONSTANT(LocalReport::kMeanNorm)                    \
  CONSTANT(LocalReport::kAgreement)                   \
  CONSTANT(LocalReport::kLocalReports)                \
  CONSTANT(Status::kOk)                               \
  CONSTANT(Status::kWrongCount)                       \
  CONSTANT(Status::kWrongDType)                       \
  CONSTANT(Status::kWrongSize)                        \
  CONSTANT(Status::kWrongFlags)                       \
  CONSTANT(Status::kNoMemory)                         \
  CONSTANT(Status::kNoLaunch)                         \
  CONSTANT(Status::kOutOfStep)                        \
  CONSTANT(Status::kNegativeStep)                     \
  CONSTANT(Status::kNotItsOwn)

#define MS_OPTIM_ROW(name) {#name, static_cast<int64_t>(name)},
#define MS_OPTIM_DTYPE_ROW(name, text, bytes) {"DType::" #name, static_cast<int64_t>(DType::name)},
#define MS_OPTIM_FLAG_ROW(Rule, flag) {#Rule "::" #flag, Rule::flag},
constexpr DescribedConstant kDescribedConstants[] = {
    MS_OPTIM_CONSTANTS(MS_OPTIM_ROW) MS_OPTIM_DTYPES(MS_OPTIM_DTYPE_ROW) MS_OPTIM_RULE_FLAGS(MS_OPTIM_FLAG_ROW){}};
#undef MS_OPTIM_ROW
#undef MS_OPTIM_DTYPE_ROW
#undef MS_OPTIM_FLAG_ROW

}  // namespace ms_optim

MS_OPTIM_API const ms_optim::DescribedRule *ms_optim_rules() { return ms_optim::kDescribedRules; }
MS_OPTIM_API const ms_optim::DescribedConstant *ms_optim_constants() { return ms_optim::kDescribedConstants; }
