// Reads the arguments of a launch of local steps, and compares the marks of workers.
//
// Inputs of all launches but the one that compares:
//   numbers float64 [kLocalNumbers], masters int32 [n]: the index of each tensor's master among these, -1 without one;
//   to send, this worker's mark without the checksum of its start; to apply, the wires [w, words], and this worker's
//   number of workers and rank are in the numbers;
//   n weights, the masters, n starts float32; to apply, n velocities float32 if there is momentum; to send or apply, n
//   residuals float32 if they are kept.
// Outputs: to begin, int32 [1], content undefined; to send, the wire, and the mark int32 [kLocalMarks]; to apply, the
// report float32 [kLocalReports].
//
// A wire is int32 [words]; where all differences are added up, float32 [elements + 1], the last the sum of squares.
#pragma once

#include <cstdio>
#include <exception>
#include <vector>

#include "arguments.h"
#include "denormals.h"
#include "local_steps.h"

namespace ms_optim {

enum class LocalStage { kBegin, kSend, kApply };

inline void TakeMaster(ArgumentReader *in, Tensor *t) {
  DType type = DType::kOther;
  void *master = in->TakeTensor(t->size, true, &type);
  const bool splits = type == DType::kInt16 || type == DType::kInt8;
  const bool fits = splits ? t->weight_type == DType::kBFloat16 : type == DType::kFloat32;
  in->Require(fits && t->weight_type != DType::kFloat32, kWrongDType);
  if (splits) {
    t->remainder = master;
    t->remainder_type = type;
  } else {
    t->master = static_cast<float *>(master);
  }
}

inline Status ParseLocal(ArgumentReader in, LocalStage stage, LocalStep *step, std::vector<LocalTensor> *tensors) {
  const double *numbers = step->numbers = in.Take<double>("float64", kLocalNumbers);
  const int at = in.next();
  const auto *masters = in.Take<int32_t>("int32", -1);
  if (!in.ok()) return in.Finish();
  const bool dense = step->IsDense();
  in.Require(numbers[kChunkElements] >= 1.0 && numbers[kChunkElements] <= 1 << 16, kWrongFlags);
  in.Require(numbers[kLocalRank] >= 0.0 && numbers[kLocalRank] < numbers[kLocalWorkers], kWrongFlags);
  const auto n = static_cast<size_t>(in.Size(at));
  const int32_t *mark = stage == LocalStage::kSend ? in.Take<int32_t>("int32", kLocalMarks - 1) : nullptr;
  const int wires = in.next();
  if (stage == LocalStage::kApply) {
    step->wires = dense ? static_cast<const void *>(in.Take<float>("float32", -1)) : in.Take<int32_t>("int32", -1);
  }
  tensors->assign(n, LocalTensor{});
  for (LocalTensor &tensor : *tensors) {
    Tensor &t = tensor.t;
    const int weight = in.next();
    t.weight = in.TakeTensor(-1, false, &t.weight_type);
    if (!in.ok()) return in.Finish();
    t.size = t.end = in.Size(weight);
    t.remainder_type = DType::kOther;
    tensor.before = step->elements;
    tensor.wire_offset = step->wire_words * 4;
    step->elements += t.size;
    step->wire_words += dense ? t.size : step->BytesSentOf(t.size) / 4;
  }
  step->wire_words += dense;
  int32_t next = 0;
  for (size_t i = 0; i < n && in.ok(); ++i) {
    if (masters[i] < 0) continue;
    in.Require(masters[i] == next++, kWrongSize);
    TakeMaster(&in, &(*tensors)[i].t);
  }
  for (LocalTensor &tensor : *tensors) tensor.start = in.Take<float>("float32", tensor.t.size);
  if (stage == LocalStage::kApply && numbers[kOuterMomentum] != 0.0) {
    for (LocalTensor &tensor : *tensors) tensor.velocity = in.Take<float>("float32", tensor.t.size);
  }
  if (stage != LocalStage::kBegin && numbers[kResidualDecay] >= 0.0) {
    for (LocalTensor &tensor : *tensors) tensor.residual = in.Take<float>("float32", tensor.t.size);
  }
  if (stage == LocalStage::kBegin) in.Take<int32_t>("int32", 1);
  if (stage == LocalStage::kSend) {
    step->wire = dense ? static_cast<void *>(in.Take<float>("float32", step->wire_words))
                       : in.Take<int32_t>("int32", step->wire_words);
    step->mark = in.Take<int32_t>("int32", kLocalMarks);
    if (in.ok()) memcpy(step->mark, mark, sizeof(int32_t) * (kLocalMarks - 1));
  }
  if (stage == LocalStage::kApply) {
    step->report = in.Take<float>("float32", kLocalReports);
    in.Require(in.ok() && in.Size(wires) == step->wire_words * (dense ? 1 : step->Workers()), kWrongSize);
  }
  step->tensors = tensors->data();
  step->count = static_cast<int>(n);
  return in.Finish();
}

inline int LaunchLocal(const ArgumentReader &arguments, LocalStage stage, Status (*run)(const LocalStep &)) {
  try {
    LocalStep step{};
    std::vector<LocalTensor> tensors;
    const Status status = ParseLocal(arguments, stage, &step, &tensors);
    if (status != kOk) return status;
    const DenormalsAreZero in_this_thread;
    return run(step);
  } catch (const std::exception &) {
    return kNoMemory;
  }
}

// Writes a sentence about the first difference between the marks of the workers; returns whether there is one.
inline bool DifferenceOf(const int32_t *marks, int64_t workers, char *text, size_t size) {
  static constexpr const char *kNames[] = {"every",
                                           "fragments",
                                           "outer_learning_rate",
                                           "outer_momentum",
                                           "nesterov",
                                           "bits",
                                           "chunk",
                                           "density",
                                           "decay",
                                           "optimizer",
                                           "parameters",
                                           "step",
                                           "weights at the last exchange"};
  static_assert(sizeof(kNames) / sizeof(kNames[0]) == kLocalMarks, "each mark has a name");
  const auto put = [](int i, int32_t value, char *out, size_t room) {
    const bool real = i == kMarkRate || i == kMarkMomentum || i == kMarkDensity || i == kMarkDecay;
    if (real) {
      snprintf(out, room, "%g", static_cast<double>(FromBits(static_cast<uint32_t>(value))));
    } else {
      const bool is_checksum = i == kMarkOptimizer || i == kMarkTensors || i == kMarkStart;
      snprintf(out, room, is_checksum ? "the checksum %08x" : "%d", static_cast<unsigned>(value));
    }
  };
  for (int64_t k = 1; k < workers; ++k) {
    for (int i = 0; i < kLocalMarks; ++i) {
      const int32_t first = marks[i], other = marks[k * kLocalMarks + i];
      if (first == other) continue;
      char first_text[32], other_text[32];
      put(i, first, first_text, sizeof(first_text));
      put(i, other, other_text, sizeof(other_text));
      snprintf(text, size,
               "the workers must have the same %s, but worker 0 has %s, and worker %lld has %s. Nothing was exchanged.",
               kNames[i], first_text, static_cast<long long>(k), other_text);
      return true;
    }
  }
  return false;
}

// Inputs: the marks of all workers, int32 [workers, kLocalMarks]. Output: int32 [1], 1.
inline int AreAtTheSame(ArgumentReader in) {
  const auto *marks = in.Take<int32_t>("int32", -1);
  auto *same = in.Take<int32_t>("int32", 1);
  if (const Status status = in.Finish(); status != kOk) return status;
  char text[256];
  if (DifferenceOf(marks, in.Size(0) / kLocalMarks, text, sizeof(text))) {
    // In a graph, MindSpore reports the number alone.
    fprintf(stderr, "ms_optim: For 'LocalSteps', %s\n", text);
    return kOutOfStep;
  }
  *same = 1;
  return kOk;
}

}  // namespace ms_optim
