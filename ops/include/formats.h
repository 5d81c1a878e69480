// What the dtypes of a tensor are, and how states are held in them.
#pragma once

#include <cstdint>
#include <cstring>

#include "codes.h"

namespace ms_optim {

inline DType ParseDType(const char *name) {
  if (strcmp(name, "float32") == 0) return DType::kFloat32;
  if (strcmp(name, "float16") == 0) return DType::kFloat16;
  if (strcmp(name, "bfloat16") == 0) return DType::kBFloat16;
  if (strcmp(name, "int8") == 0) return DType::kInt8;
  if (strcmp(name, "uint8") == 0) return DType::kUInt8;
  if (strcmp(name, "int16") == 0) return DType::kInt16;
  if (strcmp(name, "uint16") == 0) return DType::kUInt16;
  return DType::kOther;
}

MS_OPTIM_FN bool IsFloat(DType type) {
  return type == DType::kFloat32 || type == DType::kFloat16 || type == DType::kBFloat16;
}

inline int64_t SizeOf(DType type) {
  if (type == DType::kFloat32) return 4;
  return type == DType::kInt8 || type == DType::kUInt8 ? 1 : 2;
}

// Returns the bits of the codes that a state of a dtype is held in, 0 if it is held in numbers.
MS_OPTIM_FN int CodeBits(DType state) {
  if (state == DType::kInt8 || state == DType::kUInt8) return 8;
  return state == DType::kInt16 || state == DType::kUInt16 ? 4 : 0;
}

MS_OPTIM_FN bool IsSignedCode(DType state) { return state == DType::kInt8 || state == DType::kInt16; }

// Returns how long an array is that holds so many elements of a state.
MS_OPTIM_FN int64_t LengthOfState(DType state, int64_t elements) {
  constexpr int kInWord = Stored<4>::kInWord;
  return CodeBits(state) == 4 ? (elements + kInWord - 1) / kInWord : elements;
}

// Returns the bytes of so many elements of a state.
inline int64_t BytesOfState(DType state, int64_t elements) { return LengthOfState(state, elements) * SizeOf(state); }

// Moments of gradients have either sign, moments of their squares are never negative: a first state is of the one kind,
// a second one of the other, a third one may be either.
inline bool HoldsState(DType type, int k) {
  if (CodeBits(type) == 0) return type == DType::kFloat32 || type == DType::kBFloat16;
  return k == 2 || IsSignedCode(type) == (k == 0);
}

}  // namespace ms_optim
