// The arguments of one launch, as MindSpore hands them to an AOT operator.
//
// A launch takes n tensors. Its inputs, in order:
//
//   flags         int8, content unused: its shape is (1 + stages, 1 + shared flags, 1 + rule flags). A shape is
//                 the one thing about an input that a GPU's host code can read without waiting for the device.
//   layout        int32 [n, 5]: for each tensor the indices in rates of its learning rate and of its weight decay
//                 (-1: no decay), whether its gradient is centralized, its row in statistics, and whether its norm is
//                 held; [n, 6] if the rule exchanges, with how many of its elements a worker sends (0: all,
//                 uncompressed)
//   constants     float64: 1 / loss_scale, grad_clip_norm (0: none), seed of the stochastic rounding, whether the decay
//                 is cautious (0 or 1), the decay rate of the average of the weights and whether it rises to that at
//                 first (0 or 1), what holds norms (a WeightNorm), the parts of a norm's growth and of its decline that
//                 a radial brake keeps, the rule's own
//   rates         float32: learning rates and weight decays of this step
//   sums          float64 [N, kSums]: the sums of all N tensors, read only if stages run in launches of their own
//   skipping      float32 [1], only if the rule exchanges: not 0 if some worker's gradient makes all skip the step
//   wires         [wires, words], only if the rule exchanges: what workers sent, read by an apply stage alone
//   worker        int32 [workers], only if the rule exchanges: 1 where it is the worker whose states these are
//   matrices      int64 [matrices, kMatrixColumns], only if the rule has matrices: where they are, in the order of the
//                 tensors; those of a tensor hold each of its rows once. A first tensor of -1: there are none
//   iterations    float64 [iterations, 3], only if the rule has matrices: the coefficients a, b and c of each iteration
//   ranges        int64 [n, 2], only if kShares: the elements, from and to, of each tensor that are this process's
//   global_step   int32 [1], written
//   skipped_steps int32 [1], written
//   statistics    float32 [N, kStatistics], written
//   n weights, written; n gradients; n of each state, written; a float32 master, written, for each weight of
//   lower precision if kMasters; a float32 average of each weight, written, if kAverages; a float32 array of scales,
//   written, for each state held in codes. A launch of
//   the gradient stage alone takes the gradients and nothing else of these, one of the commit stage alone nothing.
//
// A state is as long as its weight; one in codes of 4 bits, int16 or uint16, a fourth of that, rounded up.
//
// If the rule weighs steps, step_weights, float64 [N, 2], written, follow statistics: for each tensor the largest
// learning rate so far, and the sum of the steps' weights.
//
// If the rule has matrices, a tensor that is one has a first state; its second one is float32, one number a row, or
// there is none, as the rule's flags say.
//
// If kKeepsRadii, weight_radii, float32 [N], written, follow these: for each tensor the norm that it had before its
// first step, or 0 before that.
//
// If kBetaPowers, beta1_power and beta2_power, float32 [1], written, follow these.
//
// If kShares, states, masters and scales hold the elements of the range alone, and there are none for a tensor of an
// empty range; weights and gradients are whole. A range begins with a block of codes, and with a row if the gradient is
// centralized.
//
// If kReturned, nothing but states and masters is written in place, and the step is not committed: there are no
// statistics and no weights among the inputs, and the outputs are sums, statistics, and for each tensor the new weight
// where it has a master, else what is to be added to the weight.
//
// If kByAddress, all from global_step on comes as one table of where it is in memory instead:
//
//   addresses     int64 [n + 1, kAddressColumns]: a row for each tensor, then one for what the tensors share
//
// If the rule takes directions, float32 arrays stand in place of the gradients: each holds the directions of some
// tensors, one after the other, and all together those of all tensors. If it returns directions, a launch with the
// moments stage has such arrays as further outputs.
//
// The output is float64 [n, kSums], the sums of this launch's tensors. If the rule exchanges, a launch with the moments
// stage and without the apply stage has a second output: the worker's wire, [words]. Wires are of dtype int32, or
// float32 where no tensor is compressed, so that they can be added up.
#pragma once

#include <cstdint>

#include "formats.h"
#include "rule.h"

namespace ms_optim {

enum Stage : unsigned {
  kGradientStage = 1,  // sum the squares of the gradients, before anything is decided
  kMomentsStage = 2,   // make new states, and sum the squares of weights and directions
  kApplyStage = 4,     // move the weights
  kCommitStage = 8,    // count the step, or count it as skipped; alone, also report from sums
};

enum SharedFlag : unsigned {
  kSkipNonfinite = 1,
  kMasters = 2,
  kStochasticRounding = 4,
  kCentralizes = 8,  // some tensor's gradient is centralized
  kByAddress = 16,   // what is written comes as a table of addresses
  kBetaPowers = 32,  // write beta1^t and beta2^t, of the rule's first two constants, for checkpoints
  kLocks = 64,       // no other launch with this flag touches the same weights at the same time
  kReturned = 128,   // weights are outputs: they live where the kernel cannot reach
  kShares = 256,     // states hold, and a step updates, only a range of each tensor
  kClips = 512,      // there is a bound on the gradients' norm
  kAverages = 1024,  // keep an average of the weights
  kHoldsNorms = 4096,
  kKeepsRadii = 8192,  // norms are held at what they were before the first step
  kBeside = 2048,      // on the host, other operators run at the same time: take threads for large tensors alone
};

// Flags that only a kernel on the host can serve: it reads addresses and ranges before it starts, locks mutexes, and
// returns weights to another device.
constexpr unsigned kHostOnly = kByAddress | kLocks | kReturned | kShares;

enum Sum { kGradientSum, kWeightSum, kDirectionSum, kDirection2Sum, kDirectionsDot, kSums };
enum Statistic { kGradientNorm, kWeightNorm, kUpdateNorm, kTrustRatio, kFinite, kStatistics };
enum Constant {
  kUnscale,
  kClipNorm,
  kSeed,
  kCautious,
  kAverageDecay,
  kAverageWarmup,
  kHeldBy,
  kOutwardKept,
  kInwardKept,
  kRuleConstants
};
enum WeightNorm { kFree, kHyperball, kRelative, kRadialBrake };
enum AddressColumn {
  kWeightAddress,
  kGradientAddress,
  kMasterAddress,   // of a whole master, or of its remainder; 0: none
  kAverageAddress,  // 0: none
  kStateAddress,
  kScaleAddress = kStateAddress + kMaxStates,
  kElements = kScaleAddress + kMaxStates,
  kFirstDimension,  // 0: fewer than two dimensions
  kWeightType,
  kGradientType,
  kMasterType,
  kStateType,
  kAddressColumns = kStateType + kMaxStates,
};
enum SharedAddressColumn {
  kGlobalStepAddress,
  kSkippedStepsAddress,
  kStatisticsAddress,
  kStatisticsRows,
  kBetaPowerAddress,
  kStepWeightsAddress = kBetaPowerAddress + 2,
  kRadiiAddress,
};
enum Layout { kRateIndex, kDecayIndex, kCentralized, kRow, kIsHeld, kLayoutColumns, kSent = kLayoutColumns };

// The columns of a matrix. Its rows are `runs` runs of `run` rows of a tensor, which begin `stride` rows apart.
enum MatrixColumn { kMatrixTensor, kFirstRow, kRun, kRuns, kStride, kColumns, kMatrixColumns };

// The result of a launch for the framework: 0, or the first error.
enum Status {
  kOk = 0,
  kWrongCount = 1,
  kWrongDType = 2,
  kWrongSize = 3,
  kWrongFlags = 4,
  kNoMemory = 5,
  kNoLaunch = 6,   // the device refused a kernel
  kOutOfStep = 7,  // a wire of another worker belongs to another step
  kNegativeStep = 8,
  kNotItsOwn = 9,  // the states are another worker's
};

struct Tensor {
  void *weight;
  const void *gradient;
  void *state[kMaxStates];
  float *scale[kMaxStates];  // null: the state has none
  float *master;             // null: the weight is its own master, or has a remainder
  void *remainder;           // the bits of a master below those of its weight; null: none
  float *average;            // null: none is kept
  float *direction;          // the output of its direction; null: none
  bool returned;             // the weight holds nothing yet
  DType weight_type, gradient_type, remainder_type, state_type[kMaxStates];
  int64_t size;
  int64_t begin, end;   // the elements that are updated; their states are addressed as if they were whole
  int64_t rows;         // extent of the first dimension; 0 where there are fewer than two
  int64_t matrix_rows;  // the rows of all its matrices; 0: it has none
};

struct Step {
  unsigned stages, flags, rule_flags;
  const int32_t *layout;
  const double *constants;
  const float *rates;
  int64_t rate_count;
  const double *sums_in;
  int64_t sums_rows;
  int64_t rows;  // of statistics: N; of sums_in too, where it is read
  int32_t *global_step, *skipped_steps;
  float *statistics;
  float *beta_power[2];  // null: none
  double *step_weights;  // [N, 2]; null: the rule weighs no steps
  float *radii;          // [N]; null: none are kept
  double *sums;
  const Tensor *tensors;
  int count;  // of tensors: n
  int layout_columns;
  const float *skipping;
  const void *wires;
  int64_t wire_count, wire_words;  // of wires
  const int32_t *worker;
  int64_t worker_count;
  void *wire;               // the wire of this worker
  const int64_t *matrices;  // [matrix_count, kMatrixColumns]
  int64_t matrix_count;
  const double *iterations;  // [iteration_count, 3]
  int64_t iteration_count;
};

MS_OPTIM_FN int64_t LayoutOf(const Step &step, int i, Layout column) {
  return step.layout[int64_t{i} * step.layout_columns + column];
}

// The differences between the operators of rules.
struct Interface {
  int states, constants;
  bool exchanges, weighs_steps, has_matrices, returns_directions, takes_directions, balances, may_hold_norms;
  unsigned row_state_flag;
};

template <class Rule>
constexpr Interface InterfaceOf() {
  static_assert(0 <= Rule::kStates && Rule::kStates <= kMaxStates, "a step has room for as many states");
  return {Rule::kStates,        Rule::kConstants,         Rule::kExchanges,       Rule::kWeighsSteps,
          Rule::kHasMatrices,   Rule::kReturnsDirections, Rule::kTakesDirections, Rule::kBalances,
          MayHoldNorms<Rule>(), Rule::kRowStateFlag};
}

}  // namespace ms_optim
