// Copies bytes: between the ranges of many tensors and one buffer, which workers exchange, a wire; and between tensors.
//
// MindSpore's own slices, concatenations and assignments lack some dtypes of weights, and make further copies.
#pragma once

#include <cstdlib>
#include <cstring>

#include "arguments.h"

namespace ms_optim {

// A piece of a tensor, and where it begins in the wire, in bytes.
struct Piece {
  int64_t tensor, begin, bytes, wire_offset;
};
constexpr int64_t kPieceColumns = 4;

inline int64_t BytesOf(const char *dtype) {
  const char *bits = strpbrk(dtype, "0123456789");
  return bits == nullptr ? 0 : atoi(bits) / 8;
}

// Inputs: pieces int64 [m, 4]; if the wire is read, the wire, int32; the tensors. Output: the wire, int32, if it is
// written, else int32 [1], content undefined.
inline Status CopyPieces(ArgumentReader in, int count, void **data, const char **dtypes, bool writes_wire) {
  const int at = in.next(), wire = writes_wire ? count - 1 : at + 1, first = writes_wire ? at + 1 : at + 2;
  const auto *pieces = reinterpret_cast<const Piece *>(in.Take<int64_t>("int64", -1));
  if (!in.ok()) return in.Finish();
  if (first >= count || strcmp(dtypes[wire], "int32") != 0) return kWrongDType;
  const int64_t m = in.Size(at) / kPieceColumns, words = in.Size(wire);
  for (int64_t k = 0; k < m; ++k) {
    const Piece &piece = pieces[k];
    if (piece.tensor < 0 || piece.tensor >= count - 1 - first) return kWrongSize;
    const int tensor = first + static_cast<int>(piece.tensor);
    const int64_t bytes = in.Size(tensor) * BytesOf(dtypes[tensor]);
    if (piece.begin < 0 || piece.bytes < 0 || piece.begin > bytes - piece.bytes) return kWrongSize;
    if (piece.wire_offset < 0 || piece.wire_offset > words * int64_t{sizeof(int32_t)} - piece.bytes) return kWrongSize;
  }
#pragma omp parallel for schedule(dynamic)
  for (int64_t k = 0; k < m; ++k) {
    const Piece &piece = pieces[k];
    char *own = static_cast<char *>(data[first + piece.tensor]) + piece.begin;
    char *sent = static_cast<char *>(data[wire]) + piece.wire_offset;
    memcpy(writes_wire ? sent : own, writes_wire ? own : sent, static_cast<size_t>(piece.bytes));
  }
  return kOk;
}

// Copies the first n tensors to the n that follow. An output after these, of any dtype, stays as it is.
inline Status CopyTensors(ArgumentReader in, int count, void **data, const char **dtypes) {
  const int n = count / 2;
  for (int i = 0; i < n; ++i) {
    if (strcmp(dtypes[i], dtypes[n + i]) != 0) return kWrongDType;
    if (in.Size(i) != in.Size(n + i)) return kWrongSize;
  }
#pragma omp parallel for schedule(dynamic)
  for (int i = 0; i < n; ++i) {
    if (in.Size(i) > 0) memcpy(data[n + i], data[i], static_cast<size_t>(in.Size(i) * BytesOf(dtypes[i])));
  }
  return kOk;
}

}  // namespace ms_optim
