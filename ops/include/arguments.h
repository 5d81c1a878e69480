// Reads the arguments of a launch, in the order that step.h states, and checks that they fit together.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "step.h"

namespace ms_optim {

// Hands out the arguments one after the other. After the first one that does not fit, ok() stays false.
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

// Returns the beginning of the array of a whole tensor, from a part that begins after some bytes.
template <class T>
T *AsIfWhole(T *data, int64_t bytes_before) {
  return reinterpret_cast<T *>(reinterpret_cast<uintptr_t>(data) - static_cast<uintptr_t>(bytes_before));
}

// Takes the matrices, and makes the checks that do not depend on the tensors' sizes.
inline void TakeMatrices(ArgumentReader *in, Step *step, std::vector<Tensor> *tensors) {
  const int matrices = in->next();
  step->matrices = in->Take<int64_t>("int64", -1);
  const int iterations = in->next();
  step->iterations = in->Take<double>("float64", -1);
  if (!in->ok()) return;
  step->matrix_count = in->Dimension(matrices, 0);
  step->iteration_count = in->Dimension(iterations, 0);
  in->Require(in->Size(matrices) == step->matrix_count * kMatrixColumns, kWrongSize);
  in->Require(in->Size(iterations) == step->iteration_count * 3, kWrongSize);
  if (!in->ok()) return;
  if (step->matrix_count > 0 && step->matrices[kMatrixTensor] < 0) step->matrix_count = 0;
  for (int64_t k = 0, before = 0; k < step->matrix_count && in->ok(); ++k) {
    const int64_t *entry = step->matrices + k * kMatrixColumns, i = entry[kMatrixTensor];
    in->Require(before <= i && i < static_cast<int64_t>(tensors->size()) && entry[kFirstRow] >= 0 && entry[kRun] > 0 &&
                    entry[kRuns] > 0 && entry[kStride] >= entry[kRun] && entry[kColumns] > 0,
                kWrongSize);
    if (in->ok()) (*tensors)[static_cast<size_t>(i)].matrix_rows += entry[kRun] * entry[kRuns];
    before = i;
  }
}

// Tells whether a matrix lies within a tensor of so many rows and elements.
inline bool FitsMatrix(const int64_t *entry, int64_t rows, int64_t size) {
  return entry[kFirstRow] + (entry[kRuns] - 1) * entry[kStride] + entry[kRun] <= rows && rows * entry[kColumns] == size;
}

// Takes the ranges, and makes the checks that do not depend on the tensors' sizes.
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

// Tells whether a dtype may be that of a master: a master is whole, or the remainder of a bfloat16 weight that is an
// input.
inline bool HoldsMaster(DType type, const Tensor &t) {
  const bool is_remainder = type == DType::kInt16 || type == DType::kInt8;
  return type == DType::kFloat32 || (is_remainder && t.weight_type == DType::kBFloat16 && !t.returned);
}

inline void KeepMaster(void *master, DType type, Tensor *t) {
  if (type == DType::kFloat32) {
    t->master = static_cast<float *>(master);
  } else {
    t->remainder = master;
    t->remainder_type = type;
  }
}

// Takes float32 arrays, each of which holds the elements of some tensors, one after the other, and gives each tensor
// its part.
template <class Give>
void TakeStacks(ArgumentReader *in, std::vector<Tensor> *tensors, Give give) {
  char *next = nullptr;
  int64_t left = 0;
  for (Tensor &t : *tensors) {
    while (left == 0 && t.size > 0) {
      const int k = in->next();
      next = static_cast<char *>(in->Take<void>("float32", -1));
      if (!in->ok()) return;
      left = in->Size(k);
    }
    in->Require(t.size <= left, kWrongSize);
    if (!in->ok()) return;
    give(&t, reinterpret_cast<float *>(next));
    next += t.size * int64_t{sizeof(float)};
    left -= t.size;
  }
  in->Require(left == 0, kWrongSize);
}

// Takes the tensors; states, masters, averages and scales are those of a tensor's range.
inline void TakeTensors(ArgumentReader *in, const Interface &rule, const Step &step, std::vector<Tensor> *tensors) {
  const int states = rule.states;
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
  if (rule.takes_directions) {
    TakeStacks(in, tensors, [](Tensor *t, const float *direction) {
      t->gradient = direction;
      t->gradient_type = DType::kFloat32;
    });
  }
  for (Tensor &t : *tensors) {
    if (!rule.takes_directions) {
      const int i = in->next();
      t.gradient = in->TakeTensor(t.size, false, &t.gradient_type);
      if (!in->ok()) return;
      t.size = in->Size(i);
      t.rows = in->Rank(i) < 2 ? 0 : in->Dimension(i, 0);
    }
    if (!shares) t.end = t.size;
    in->Require(t.end <= t.size, kWrongSize);
  }
  if (gradients_only) return;
  const auto absent = [shares](const Tensor &t) { return shares && t.begin == t.end; };
  for (int k = 0; k < states; ++k) {
    for (Tensor &t : *tensors) {
      if (absent(t)) continue;
      if (k == 1 && t.matrix_rows > 0) {
        t.state_type[k] = DType::kFloat32;
        if ((step.rule_flags & rule.row_state_flag) != 0) t.state[k] = in->Take<float>("float32", t.matrix_rows);
        if (!in->ok()) return;
        continue;
      }
      const int i = in->next();
      void *state = in->TakeTensor(-1, true, &t.state_type[k]);
      in->Require(HoldsState(t.state_type[k], k), kWrongDType);
      if (!in->ok()) return;
      in->Require(in->Size(i) == LengthOfState(t.state_type[k], t.end - t.begin), kWrongSize);
      t.state[k] = AsIfWhole(state, BytesOfState(t.state_type[k], t.begin));
    }
  }
  for (Tensor &t : *tensors) {
    if (absent(t) || (step.flags & kMasters) == 0 || t.weight_type == DType::kFloat32) continue;
    DType type = DType::kOther;
    void *master = in->TakeTensor(t.end - t.begin, true, &type);
    in->Require(HoldsMaster(type, t), kWrongDType);
    if (!in->ok()) return;
    KeepMaster(AsIfWhole(master, t.begin * SizeOf(type)), type, &t);
  }
  for (Tensor &t : *tensors) {
    if (absent(t) || (step.flags & kAverages) == 0) continue;
    t.average = AsIfWhole(in->Take<float>("float32", t.end - t.begin), t.begin * int64_t{sizeof(float)});
    if (!in->ok()) return;
  }
  for (int k = 0; k < states; ++k) {
    for (Tensor &t : *tensors) {
      if (absent(t) || !HasScales(t.state_type[k])) continue;
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
    KeepMaster(reinterpret_cast<void *>(row[kMasterAddress]), static_cast<DType>(row[kMasterType]), &t);
    t.average = reinterpret_cast<float *>(row[kAverageAddress]);
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
  step->step_weights = reinterpret_cast<double *>(row[kStepWeightsAddress]);
  step->radii = reinterpret_cast<float *>(row[kRadiiAddress]);
}

// Takes the outputs of a launch that returns weights. A weight without a master starts from 0, and becomes the update.
inline void TakeReturned(ArgumentReader *in, Step *step, std::vector<Tensor> *tensors) {
  step->statistics = in->Take<float>("float32", step->rows * kStatistics);
  for (Tensor &t : *tensors) {
    t.weight = in->TakeTensor(t.size, false, &t.weight_type);
    in->Require(t.master != nullptr || t.weight_type == DType::kFloat32, kWrongDType);
    if (!in->ok()) return;
    if (t.master == nullptr) memset(t.weight, 0, static_cast<size_t>(t.size) * sizeof(float));
  }
}

// Returns the dtype of a wire, which follows from the layout. The layout on a device cannot be read here: then it is
// the dtype of the argument.
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
  const bool may_hold_norms = on_host && rule.may_hold_norms && (step->flags & kReturned) == 0;
  in.Require((step->flags & kHoldsNorms) == 0 || may_hold_norms, kWrongFlags);

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
  if (rule.has_matrices) TakeMatrices(&in, step, tensors);
  const bool shares = (step->flags & kShares) != 0;
  in.Require(!shares || (step->flags & (kByAddress | kReturned)) == 0, kWrongFlags);
  in.Require((step->flags & kReturned) == 0 || ((step->flags & kAverages) == 0 && !rule.weighs_steps), kWrongFlags);
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
    if (rule.weighs_steps) step->step_weights = in.Take<double>("float64", step->rows * 2);
    if ((step->flags & kKeepsRadii) != 0) step->radii = in.Take<float>("float32", step->rows);
    if ((step->flags & kBetaPowers) != 0) {
      for (float *&power : step->beta_power) power = in.Take<float>("float32", 1);
    }
    if (!in.ok()) return in.Finish();
    TakeTensors(&in, rule, *step, tensors);
  }
  step->tensors = tensors->data();
  step->count = static_cast<int>(n);
  step->sums = in.Take<double>("float64", n * kSums);
  if (rule.exchanges) TakeOwnWire(&in, n, on_host, step);
  if (rule.returns_directions && in.ok() && (step->stages & kMomentsStage) != 0) {
    TakeStacks(&in, tensors, [](Tensor *t, float *direction) { t->direction = direction; });
  }
  if (in.ok() && (step->flags & kReturned) != 0) TakeReturned(&in, step, tensors);
  return in.Finish();
}

}  // namespace ms_optim
