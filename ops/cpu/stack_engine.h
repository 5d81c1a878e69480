// Orthogonalizes a stack of tensors, each by itself: those that a process owns among all that are sliced.
#pragma once

#include "orthogonalize.h"
#include "stack_arguments.h"

namespace ms_optim {
namespace {

inline Status OrthogonalizeStack(const MatrixStack &stack) {
  const Step &step = stack.step;
  const Muon rule(stack.constants, 1, step.rule_flags);
  const bool normalizes = stack.NormalizesRows();
  std::vector<Matrix> matrices;
  int64_t bytes = 0;
  for (int64_t i = 0; i < stack.count; ++i) {
    float *averages = normalizes ? stack.averages + i * stack.rows : nullptr;
    for (int64_t k = 0; k < step.matrix_count; ++k) {
      const int64_t *entry = step.matrices + k * kMatrixColumns;
      const double scale = rule.ScaleOf(entry[kRun] * entry[kRuns], entry[kColumns]);
      matrices.push_back({entry, stack.updates + i * stack.size, averages, scale});
      bytes += BytesOfIterations(rule, matrices.back());
    }
  }
  OrthogonalizationMemory memory;
  memory.Reserve(bytes);
  std::vector<double> sums(matrices.size(), 0.0);
  memcpy(stack.updates, stack.tensors, static_cast<size_t>(stack.count * stack.size) * sizeof(float));
  if (normalizes) {
    memcpy(stack.averages, stack.averages_before, static_cast<size_t>(stack.count * stack.rows) * sizeof(float));
  }
  OrthogonalizeBy(step, rule, matrices, memory, sums.data());
  for (int64_t i = 0; i < stack.count; ++i) {
    stack.squares[i] = 0.0;
    for (int64_t k = 0; k < step.matrix_count; ++k) {
      stack.squares[i] += sums[static_cast<size_t>(i * step.matrix_count + k)];
    }
  }
  return kOk;
}

}  // namespace
}  // namespace ms_optim
