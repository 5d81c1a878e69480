// Reads the arguments of a launch that orthogonalizes a stack of tensors, which processes assemble from their slices.
//
// Inputs: flags int8, as of a step, of which the rule's are read; the rule's constants float64 [Muon::kConstants];
// matrices and iterations as of a step, of one tensor; the tensors float32 [n, ...]; NorMuon's V of their rows before
// the step float32 [n, rows, ...], or float32 of any size if rows are not normalized.
// Outputs: the updates float32 [n, ...]; the new V, as the input is; the sum of squares of each tensor's orthogonal
// matrices before they are scaled, float64 [n].
#pragma once

#include <exception>
#include <vector>

#include "arguments.h"
#include "denormals.h"
#include "muon.h"

namespace ms_optim {

struct MatrixStack {
  Step step;  // its matrices, iterations and flags of the rule
  const double *constants;
  int64_t count, size, rows;  // the number of tensors; the elements and rows of each
  const float *tensors, *averages_before;
  float *updates, *averages;
  double *squares;

  bool NormalizesRows() const { return (step.rule_flags & Muon::kNormalizesRows) != 0; }
};

inline Status ParseStack(ArgumentReader in, MatrixStack *stack) {
  const int flags = in.next();
  in.Take<void>("int8", -1);
  stack->constants = in.Take<double>("float64", Muon::kConstants);
  std::vector<Tensor> stacked(1);
  TakeMatrices(&in, &stack->step, &stacked);
  const int tensors = in.next();
  stack->tensors = in.Take<float>("float32", -1);
  const int averages = in.next();
  stack->averages_before = in.Take<float>("float32", -1);
  if (!in.ok()) return in.Finish();
  stack->step.rule_flags = static_cast<unsigned>(in.Dimension(flags, 2) - 1);
  stack->count = Max(1, in.Dimension(tensors, 0));
  stack->size = in.Size(tensors) / stack->count;
  stack->rows = stacked[0].matrix_rows;
  in.Require(stack->step.matrix_count > 0 && stack->step.iteration_count > 0, kWrongSize);
  for (int64_t k = 0; k < stack->step.matrix_count && in.ok(); ++k) {
    in.Require(FitsMatrix(stack->step.matrices + k * kMatrixColumns, stack->rows, stack->size), kWrongSize);
  }
  in.Require(!stack->NormalizesRows() || in.Size(averages) == stack->count * stack->rows, kWrongSize);
  stack->updates = in.Take<float>("float32", stack->count * stack->size);
  stack->averages = in.Take<float>("float32", in.Size(averages));
  stack->squares = in.Take<double>("float64", stack->count);
  return in.Finish();
}

inline int LaunchStack(const ArgumentReader &arguments, Status (*run)(const MatrixStack &)) {
  try {
    MatrixStack stack{};
    const Status status = ParseStack(arguments, &stack);
    if (status != kOk) return status;
    const DenormalsAreZero in_this_thread;
    return run(stack);
  } catch (const std::exception &) {
    return kNoMemory;
  }
}

}  // namespace ms_optim
