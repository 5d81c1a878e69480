// The arguments of one launch, unpacked from what MindSpore hands an AOT operator.
//
// A launch takes n tensors. Its inputs, in order:
//
//   flags         int8, content unused: its shape is (1 + stages, 1 + shared flags, 1 + rule flags). A shape is
//                 the one thing about an input that a GPU's host code can read without waiting for the device.
//   layout        int32 [n, 4]: for each tensor its learning rate's and its weight decay's place in rates
//                 (-1: no decay), whether its gradient is centralized, and its row in statistics; [n, 5] if the rule
//                 exchanges, with how many of its elements a worker sends (0: all, uncompressed)
//   constants     float64: 1 / loss_scale, grad_clip_norm (0: none), seed of the stochastic rounding, the rule's own
//   rates         float32: learning rates and weight decays of this step
//   sums          float64 [N, kSums]: the sums of all N tensors when stages run in launches of their own, else unread
//   skipping      float32 [1], only if the rule exchanges: not 0 where some worker's gradient makes all skip the step
//   wires         [wires, words], only if the rule exchanges: what workers sent, read by an apply stage of its own
//   worker        int32 [workers], only if the rule exchanges: 1 where it is the worker whose states these are
//   ranges        int64 [n, 2], only if kShares: the elements, from and to, of each tensor that are this process's
//   global_step   int32 [1], written
//   skipped_steps int32 [1], written
//   statistics    float32 [N, kStatistics], written
//   n weights, written; n gradients; n of each state, written; a float32 master, written, for each weight of
//   lower precision if kMasters; a float32 array of scales, written, for each state held in 8-bit codes. A launch of
//   the gradient stage alone takes the gradients and nothing else of these, one of the commit stage alone nothing.
//
// If kBetaPowers, beta1_power and beta2_power, float32 [1], written, follow statistics.
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
// The output is float64 [n, kSums], the sums of this launch's tensors. A moments stage of a rule that exchanges, where
// no apply stage follows in the same launch, has another: its wire, [words]. Wires are of dtype int32, or float32 where
// no tensor is compressed, so that they can be added up.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "codes.h"
#include "numbers.h"
#include "rule.h"

namespace ms_optim {

enum Stage : unsigned {
  kGradientStage = 1,  // sums of squares of the gradients, before anything is decided
  kMomentsStage = 2,   // new states, and the sums of squares of weights and directions
  kApplyStage = 4,     // new weights
  kCommitStage = 8,    // count the step, or count it as skipped; alone, report from sums as well
};

enum SharedFlag : unsigned {
  kSkipNonfinite = 1,
  kMasters = 2,
  kStochasticRounding = 4,
  kCentralizes = 8,  // some tensor's gradient is centralized
  kByAddress = 16,   // what is written comes as a table of addresses
  kBetaPowers = 32,  // keep beta1^t and beta2^t, the rule's first two constants, for checkpoints
  kLocks = 64,       // let no other launch with this flag touch the same weights meanwhile
  kReturned = 128,   // weights are outputs: they live where the kernel cannot reach
  kShares = 256,     // of each tensor only a range is updated, and held in states
  kClips = 512,      // there is a bound on the gradients' norm
};

// They have data read before the launch, or memory that is the host's.
constexpr unsigned kHostOnly = kByAddress | kLocks | kReturned | kShares;

enum Sum { kGradientSum, kWeightSum, kDirectionSum, kDirection2Sum, kDirectionsDot, kSums };
enum Statistic { kGradientNorm, kWeightNorm, kUpdateNorm, kTrustRatio, kFinite, kStatistics };
enum Constant { kUnscale, kClipNorm, kSeed, kRuleConstants };
enum AddressColumn {
  kWeightAddress,
  kGradientAddress,
  kMasterAddress,  // 0: none
  kStateAddress,
  kScaleAddress = kStateAddress + kMaxStates,
  kElements = kScaleAddress + kMaxStates,
  kFirstDimension,  // 0: fewer than two dimensions
  kWeightType,
  kGradientType,
  kStateType,
  kAddressColumns = kStateType + kMaxStates,
};
enum SharedAddressColumn {
  kGlobalStepAddress,
  kSkippedStepsAddress,
  kStatisticsAddress,
  kStatisticsRows,
  kBetaPowerAddress,
};
enum Layout { kRateIndex, kDecayIndex, kCentralized, kRow, kLayoutColumns, kSent = kLayoutColumns };

// What a launch returns to the framework: 0, or the first thing found wrong.
enum Status {
  kOk = 0,
  kWrongCount = 1,
  kWrongDType = 2,
  kWrongSize = 3,
  kWrongFlags = 4,
  kNoMemory = 5,
  kNoLaunch = 6,   // the device took a kernel not
  kOutOfStep = 7,  // another worker sent what belongs to another step
  kNegativeStep = 8,
  kNotItsOwn = 9,  // the states are another worker's
};

struct Tensor {
  void *weight;
  const void *gradient;
  void *state[kMaxStates];
  float *scale[kMaxStates];  // of an 8-bit state, else null
  float *master;             // null: the weight is its own master
  bool returned;             // the weight holds nothing yet
  DType weight_type, gradient_type, state_type[kMaxStates];
  int64_t size;
  int64_t begin, end;  // the elements that are updated; what is held of these alone is addressed as if it were whole
  int64_t rows;        // extent of the first dimension; 0 where there are fewer than two
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
  double *sums;
  const Tensor *tensors;
  int count;  // of tensors: n
  int layout_columns;
  const float *skipping;
  const void *wires;
  int64_t wire_count, wire_words;  // of wires
  const int32_t *worker;
  int64_t worker_count;
  void *wire;  // what this worker sends
};

// What the operators of different rules take.
struct Interface {
  int states, constants;
  bool exchanges;
};

template <class Rule>
constexpr Interface InterfaceOf() {
  static_assert(1 <= Rule::kStates && Rule::kStates <= kMaxStates, "a step has room for as many states");
  return {Rule::kStates, Rule::kConstants, Rule::kExchanges};
}

inline DType ParseDType(const char *name) {
  if (strcmp(name, "float32") == 0) return DType::kFloat32;
  if (strcmp(name, "float16") == 0) return DType::kFloat16;
  if (strcmp(name, "bfloat16") == 0) return DType::kBFloat16;
  if (strcmp(name, "int8") == 0) return DType::kInt8;
  if (strcmp(name, "uint8") == 0) return DType::kUInt8;
  return DType::kOther;
}

inline int64_t SizeOf(DType type) {
  return type == DType::kFloat32 ? 4 : type == DType::kFloat16 || type == DType::kBFloat16 ? 2 : 1;
}

MS_OPTIM_FN bool IsFloat(DType type) {
  return type == DType::kFloat32 || type == DType::kFloat16 || type == DType::kBFloat16;
}

// First moments take either sign, the others do not.
inline bool HoldsState(DType type, int k) {
  return type == DType::kFloat32 || type == DType::kBFloat16 || type == (k == 0 ? DType::kInt8 : DType::kUInt8);
}

// Hands out the arguments one after the other; ok turns false for good at the first misfit.
class ArgumentReader {
 public:
  ArgumentReader(int count, void **data, int *ndims, int64_t **shapes, const char **dtypes)
      : count_(count), data_(data), ndims_(ndims), shapes_(shapes), dtypes_(dtypes) {}

  int next() const { return next_; }
  int count() const { return count_; }
  int64_t Size(int i) const {
    int64_t size = 1;
    for (int k = 0; k < ndims_[i]; ++k) size *= shapes_[i][k];
    return size;
  }
  int Rank(int i) const { return ndims_[i]; }
  int64_t Dimension(int i, int k) const { return k < ndims_[i] ? shapes_[i][k] : 1; }
  DType Type(int i) const { return ParseDType(dtypes_[i]); }
  bool Is(int i, const char *dtype) const { return strcmp(dtypes_[i], dtype) == 0; }
  void *Data(int i) const { return data_[i]; }

  template <class T>
  T *Take(const char *dtype, int64_t size) {
    const int i = Next();
    if (i < 0) return nullptr;
    if (!Is(i, dtype)) return Fail<T>(kWrongDType);
    if (size >= 0 && Size(i) != size) return Fail<T>(kWrongSize);
    return static_cast<T *>(data_[i]);
  }
  // A tensor of floating-point numbers, or of codes where those are allowed.
  void *TakeTensor(int64_t size, bool codes, DType *type) {
    const int i = Next();
    if (i < 0) return nullptr;
    *type = Type(i);
    if (!IsFloat(*type) && !(codes && *type != DType::kOther)) return Fail<void>(kWrongDType);
    if (size >= 0 && Size(i) != size) return Fail<void>(kWrongSize);
    return data_[i];
  }
  void Require(bool condition, Status otherwise) {
    if (status_ == kOk && !condition) status_ = otherwise;
  }
  bool ok() const { return status_ == kOk; }
  Status Finish() {
    Require(next_ == count_, kWrongCount);
    return status_;
  }

 private:
  int Next() {
    Require(next_ < count_, kWrongCount);
    return ok() ? next_++ : -1;
  }
  template <class T>
  T *Fail(Status status) {
    status_ = status;
    return nullptr;
  }

  int count_, next_ = 0;
  void **data_;
  int *ndims_;
  int64_t **shapes_;
  const char **dtypes_;
  Status status_ = kOk;
};

// Returns where the array of a whole tensor would begin, of which there is only the part after some bytes.
template <class T>
T *AsIfWhole(T *data, int64_t bytes_before) {
  return reinterpret_cast<T *>(reinterpret_cast<uintptr_t>(data) - static_cast<uintptr_t>(bytes_before));
}

// Whether ranges are in order and begin where they may, as far as that is known before the tensors are.
inline bool TakeRanges(ArgumentReader *in, std::vector<Tensor> *tensors) {
  const auto *range = in->Take<int64_t>("int64", static_cast<int64_t>(tensors->size()) * 2);
  if (range == nullptr) return false;
  for (Tensor &t : *tensors) {
    t.begin = *range++;
    t.end = *range++;
    in->Require(0 <= t.begin && t.begin <= t.end && t.begin % kCodeBlock == 0, kWrongSize);
  }
  return in->ok();
}

// Where states and the like are held, they are of the tensor's range.
inline void TakeTensors(ArgumentReader *in, int states, const Step &step, std::vector<Tensor> *tensors) {
  const bool gradients_only = step.stages == kGradientStage, returned = (step.flags & kReturned) != 0;
  const bool shares = (step.flags & kShares) != 0;
  const int n = static_cast<int>(tensors->size());
  if (step.stages == kCommitStage) return;
  in->Require(!returned || in->count() - n >= in->next(), kWrongCount);
  if (!in->ok()) return;
  for (int i = 0; i < n; ++i) {
    Tensor &t = (*tensors)[i];
    t.size = -1;
    t.returned = returned;
    if (returned) t.weight_type = in->Type(in->count() - n + i);
    if (returned || gradients_only) continue;
    const int k = in->next();
    t.weight = in->TakeTensor(-1, false, &t.weight_type);
    if (!in->ok()) return;
    t.size = in->Size(k);
  }
  for (Tensor &t : *tensors) {
    const int i = in->next();
    t.gradient = in->TakeTensor(t.size, false, &t.gradient_type);
    if (!in->ok()) return;
    t.size = in->Size(i);
    t.rows = in->Rank(i) < 2 ? 0 : in->Dimension(i, 0);
    if (!shares) t.end = t.size;
    in->Require(t.end <= t.size, kWrongSize);
  }
  if (gradients_only) return;
  const auto absent = [shares](const Tensor &t) { return shares && t.begin == t.end; };
  for (int k = 0; k < states; ++k) {
    for (Tensor &t : *tensors) {
      if (absent(t)) continue;
      void *state = in->TakeTensor(t.end - t.begin, true, &t.state_type[k]);
      in->Require(HoldsState(t.state_type[k], k), kWrongDType);
      if (!in->ok()) return;
      t.state[k] = AsIfWhole(state, t.begin * SizeOf(t.state_type[k]));
    }
  }
  for (Tensor &t : *tensors) {
    if (absent(t) || (step.flags & kMasters) == 0 || t.weight_type == DType::kFloat32) continue;
    t.master = AsIfWhole(in->Take<float>("float32", t.end - t.begin), t.begin * int64_t{sizeof(float)});
    if (!in->ok()) return;
  }
  for (int k = 0; k < states; ++k) {
    for (Tensor &t : *tensors) {
      if (absent(t) || IsFloat(t.state_type[k])) continue;
      const int64_t blocks = (t.end - t.begin + kCodeBlock - 1) / kCodeBlock, before = t.begin / kCodeBlock;
      t.scale[k] = AsIfWhole(in->Take<float>("float32", blocks), before * int64_t{sizeof(float)});
      if (!in->ok()) return;
    }
  }
}

inline void ReadAddresses(const int64_t *row, Step *step, std::vector<Tensor> *tensors) {
  for (Tensor &t : *tensors) {
    t.weight = reinterpret_cast<void *>(row[kWeightAddress]);
    t.gradient = reinterpret_cast<void *>(row[kGradientAddress]);
    t.master = reinterpret_cast<float *>(row[kMasterAddress]);
    t.size = t.end = row[kElements];
    t.rows = row[kFirstDimension];
    t.weight_type = static_cast<DType>(row[kWeightType]);
    t.gradient_type = static_cast<DType>(row[kGradientType]);
    for (int k = 0; k < kMaxStates; ++k) {
      t.state[k] = reinterpret_cast<void *>(row[kStateAddress + k]);
      t.scale[k] = reinterpret_cast<float *>(row[kScaleAddress + k]);
      t.state_type[k] = static_cast<DType>(row[kStateType + k]);
    }
    row += kAddressColumns;
  }
  step->global_step = reinterpret_cast<int32_t *>(row[kGlobalStepAddress]);
  step->skipped_steps = reinterpret_cast<int32_t *>(row[kSkippedStepsAddress]);
  step->statistics = reinterpret_cast<float *>(row[kStatisticsAddress]);
  step->rows = row[kStatisticsRows];
  for (int k = 0; k < 2; ++k) step->beta_power[k] = reinterpret_cast<float *>(row[kBetaPowerAddress + k]);
}

// A weight without a master starts from 0.
inline void TakeReturned(ArgumentReader *in, Step *step, std::vector<Tensor> *tensors) {
  step->statistics = in->Take<float>("float32", step->rows * kStatistics);
  for (Tensor &t : *tensors) {
    t.weight = in->TakeTensor(t.size, false, &t.weight_type);
    in->Require(t.master != nullptr || t.weight_type == DType::kFloat32, kWrongDType);
    if (!in->ok()) return;
    if (t.master == nullptr) memset(t.weight, 0, static_cast<size_t>(t.size) * sizeof(float));
  }
}

// Whether it fits the layout is seen where that can be read: on the host.
inline const char *WireType(const ArgumentReader &in, const Step &step, int64_t n, bool on_host) {
  bool compressed = !on_host && in.ok() && in.next() < in.count() && in.Is(in.next(), "int32");
  for (int64_t i = 0; i < n && on_host; ++i) compressed |= step.layout[i * step.layout_columns + kSent] > 0;
  return compressed ? "int32" : "float32";
}

inline void TakeWires(ArgumentReader *in, int64_t n, bool on_host, Step *step) {
  step->skipping = in->Take<float>("float32", 1);
  const int wires = in->next();
  const bool read = (step->stages & (kMomentsStage | kApplyStage)) == kApplyStage;
  step->wires = in->Take<void>(in->ok() && read ? WireType(*in, *step, n, on_host) : "float32", -1);
  if (!in->ok()) return;
  step->wire_count = in->Dimension(wires, 0);
  step->wire_words = in->Dimension(wires, 1);
  const int worker = in->next();
  step->worker = in->Take<int32_t>("int32", -1);
  if (in->ok()) step->worker_count = in->Size(worker);
}

inline void TakeOwnWire(ArgumentReader *in, int64_t n, bool on_host, Step *step) {
  if (!in->ok() || (step->stages & (kMomentsStage | kApplyStage)) != kMomentsStage) return;
  const int wire = in->next();
  step->wire = in->Take<void>(WireType(*in, *step, n, on_host), -1);
  if (!in->ok()) return;
  step->wire_count = 1;
  step->wire_words = in->Size(wire);
}

// On a device, data cannot be read here, only shapes and dtypes.
inline Status ParseStep(ArgumentReader in, const Interface &rule, bool on_host, Step *step,
                        std::vector<Tensor> *tensors) {
  step->layout_columns = kLayoutColumns + (rule.exchanges ? 1 : 0);
  const int flags = in.next();
  in.Take<void>("int8", -1);
  const int layout = in.next();
  step->layout = in.Take<int32_t>("int32", -1);
  if (!in.ok()) return in.Finish();
  step->stages = static_cast<unsigned>(in.Dimension(flags, 0) - 1);
  step->flags = static_cast<unsigned>(in.Dimension(flags, 1) - 1);
  step->rule_flags = static_cast<unsigned>(in.Dimension(flags, 2) - 1);
  const int64_t n = in.Dimension(layout, 0);
  const bool commits_returned = (step->flags & kReturned) != 0 && (step->stages & kCommitStage) != 0;
  in.Require(step->stages != 0 && step->stages < 16 && !commits_returned && in.Size(layout) == n * step->layout_columns,
             kWrongFlags);
  in.Require(on_host || (step->flags & kHostOnly) == 0, kWrongFlags);

  step->constants = in.Take<double>("float64", kRuleConstants + rule.constants);
  const int rates = in.next();
  step->rates = in.Take<float>("float32", -1);
  const int sums = in.next();
  step->sums_in = in.Take<double>("float64", -1);
  if (rule.exchanges) TakeWires(&in, n, on_host, step);
  if (!in.ok()) return in.Finish();
  step->rate_count = in.Size(rates);
  step->sums_rows = in.Size(sums) / kSums;

  tensors->assign(static_cast<size_t>(n), Tensor{});
  const bool shares = (step->flags & kShares) != 0;
  in.Require(!shares || (step->flags & (kByAddress | kReturned)) == 0, kWrongFlags);
  if (shares && !TakeRanges(&in, tensors)) return in.Finish();
  if ((step->flags & kByAddress) != 0) {
    const int64_t *table = in.Take<int64_t>("int64", (n + 1) * kAddressColumns);
    if (in.ok()) ReadAddresses(table, step, tensors);
  } else {
    step->global_step = in.Take<int32_t>("int32", 1);
    step->skipped_steps = in.Take<int32_t>("int32", 1);
    step->rows = n;
    if ((step->flags & kReturned) == 0) {
      const int statistics = in.next();
      step->statistics = in.Take<float>("float32", -1);
      if (in.ok()) step->rows = in.Dimension(statistics, 0);
    }
    if ((step->flags & kBetaPowers) != 0) {
      for (float *&power : step->beta_power) power = in.Take<float>("float32", 1);
    }
    if (!in.ok()) return in.Finish();
    TakeTensors(&in, rule.states, *step, tensors);
  }
  step->tensors = tensors->data();
  step->count = static_cast<int>(n);
  step->sums = in.Take<double>("float64", n * kSums);
  if (rule.exchanges) TakeOwnWire(&in, n, on_host, step);
  if (in.ok() && (step->flags & kReturned) != 0) TakeReturned(&in, step, tensors);
  return in.Finish();
}

}  // namespace ms_optim
