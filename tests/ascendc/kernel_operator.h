// A stand-in for the header of this name: the part of the Ascend C vector API that the kernels use. Its rules are
// checked in stand_in.cc.
#pragma once

#include <cmath>
#include <cstring>
#include <deque>
#include <map>
#include <memory>

#include "numbers.h"
#include "stand_in.h"

#define __aicore__
#define __global__
#define __gm__
#define GM_ADDR uint8_t *
#define REGISTER_TILING_DEFAULT(type) using LaunchTiling = type
#define GET_TILING_DATA(name, address) \
  LaunchTiling name;                   \
  memcpy(&name, address, sizeof(name))

using half = ms_optim::float16;
using bfloat16_t = ms_optim::bfloat16;

namespace AscendC {

enum class TPosition { VECIN, VECOUT, VECCALC };
enum class RoundMode { CAST_NONE, CAST_RINT };
enum class CMPMODE { EQ, GE, LE };
enum class SELMODE { VSEL_TENSOR_TENSOR_MODE };

inline int64_t GetBlockIdx() { return stand_in::core; }
inline int64_t GetBlockNum() { return stand_in::cores; }

// ---- A core's memory --------------------------------------------------------------------------------------------

struct Buffer;  // see stand_in.cc
enum class Unit { kCopyIn, kVector, kCopyOut };

// A piece of a buffer, whatever it holds.
class Piece {
 public:
  Piece() = default;
  explicit Piece(Buffer *buffer);

  Piece After(size_t bytes) const;
  Buffer *buffer() const;
  size_t offset() const { return offset_; }

  // Check what every instruction asks of its operands.
  const uint8_t *Reads(Unit unit, size_t bytes) const;
  uint8_t *Writes(Unit unit, size_t bytes) const;
  void Forget(size_t after, size_t end) const;

 private:
  void Touch(Unit unit, size_t bytes) const;

  Buffer *buffer_ = nullptr;
  size_t offset_ = 0;
  int generation_ = 0;
};

template <class T>
class LocalTensor : public Piece {
 public:
  LocalTensor() = default;
  explicit LocalTensor(const Piece &piece) : Piece(piece) {}

  LocalTensor operator[](uint32_t elements) const { return LocalTensor(After(elements * sizeof(T))); }
  template <class U>
  LocalTensor<U> ReinterpretCast() const {
    return LocalTensor<U>(After(0));
  }
};

class Queue {
 public:
  Queue(TPosition position, size_t depth) : position_(position), depth_(depth) {}

  template <class T>
  LocalTensor<T> AllocTensor() {
    return LocalTensor<T>(Alloc());
  }
  template <class T>
  bool EnQue(const LocalTensor<T> &tensor) {
    return Append(tensor);
  }
  template <class T>
  LocalTensor<T> DeQue() {
    return LocalTensor<T>(First());
  }
  template <class T>
  void FreeTensor(LocalTensor<T> &tensor) {
    Free(tensor);
  }

 private:
  friend class TPipe;
  Piece Alloc();
  bool Append(const Piece &piece);
  Piece First();
  void Free(const Piece &piece);

  TPosition position_;
  size_t depth_;
  std::vector<Buffer *> buffers_;
  std::deque<Buffer *> queued_;
};

template <TPosition kPosition, int kDepth>
class TQue : public Queue {
 public:
  TQue() : Queue(kPosition, kDepth) {}
};

template <TPosition kPosition>
class TBuf {
 public:
  template <class T>
  LocalTensor<T> Get() {
    return LocalTensor<T>(piece_.After(0));
  }

 private:
  friend class TPipe;
  Piece piece_;
};

class TPipe {
 public:
  TPipe();
  ~TPipe();
  bool InitBuffer(Queue &queue, uint8_t count, uint32_t bytes);
  template <TPosition kPosition>
  bool InitBuffer(TBuf<kPosition> &buffer, uint32_t bytes) {
    buffer.piece_ = Piece(Make(kPosition, bytes));
    return true;
  }

 private:
  Buffer *Make(TPosition position, size_t bytes);

  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::map<TPosition, size_t> events_;
  size_t used_ = 0;
};

// ---- Global memory and copies -----------------------------------------------------------------------------------

template <class T>
class GlobalTensor {
 public:
  void SetGlobalBuffer(T *address, uint64_t size) {
    address_ = address;
    size_ = size;
  }
  GlobalTensor operator[](uint64_t offset) const {
    stand_in::Require(offset <= size_, "an offset is beyond a tensor");
    GlobalTensor rest;
    rest.SetGlobalBuffer(address_ + offset, size_ - offset);
    return rest;
  }
  T GetValue(uint64_t offset) const { return *reinterpret_cast<T *>((*this)[offset].Touch(sizeof(T), false)); }

  uint8_t *Touch(size_t bytes, bool writes) const {
    stand_in::Require(size_ * sizeof(T) >= bytes, "a copy goes beyond a tensor");
    stand_in::TouchGlobal(address_, bytes, writes);
    return reinterpret_cast<uint8_t *>(address_);
  }

 private:
  T *address_ = nullptr;
  uint64_t size_ = 0;
};

struct DataCopyExtParams {
  uint16_t blockCount;
  uint32_t blockLen, srcStride, dstStride, rsv;
  DataCopyExtParams(uint16_t count, uint32_t length, uint32_t from, uint32_t to, uint32_t reserved)
      : blockCount(count), blockLen(length), srcStride(from), dstStride(to), rsv(reserved) {}

  size_t Bytes(size_t element) const;
};

template <class T>
struct DataCopyPadExtParams {};  // what fills up the last 32 bytes is not known

void CopyPadded(const Piece &to, const uint8_t *from, size_t bytes);
void Copy(uint8_t *to, const Piece &from, size_t bytes, bool aligned);

template <class T>
void DataCopyPad(const LocalTensor<T> &to, const GlobalTensor<T> &from, const DataCopyExtParams &parameters,
                 const DataCopyPadExtParams<T> &) {
  const size_t bytes = parameters.Bytes(sizeof(T));
  CopyPadded(to, from.Touch(bytes, false), bytes);
}
template <class T>
void DataCopyPad(const GlobalTensor<T> &to, const LocalTensor<T> &from, const DataCopyExtParams &parameters) {
  const size_t bytes = parameters.Bytes(sizeof(T));
  Copy(to.Touch(bytes, true), from, bytes, false);
}
template <class T>
void DataCopy(const GlobalTensor<T> &to, const LocalTensor<T> &from, uint32_t count) {
  Copy(to.Touch(count * sizeof(T), true), from, count * sizeof(T), true);
}

// ---- Vector instructions ----------------------------------------------------------------------------------------

using Floats = LocalTensor<float>;

void Add(const Floats &to, const Floats &x, const Floats &y, uint32_t count);
void Sub(const Floats &to, const Floats &x, const Floats &y, uint32_t count);
void Mul(const Floats &to, const Floats &x, const Floats &y, uint32_t count);
void Div(const Floats &to, const Floats &x, const Floats &y, uint32_t count);
void Max(const Floats &to, const Floats &x, const Floats &y, uint32_t count);
void Adds(const Floats &to, const Floats &x, float b, uint32_t count);
void Muls(const Floats &to, const Floats &x, float b, uint32_t count);
void Mins(const Floats &to, const Floats &x, float b, uint32_t count);
void Maxs(const Floats &to, const Floats &x, float b, uint32_t count);
void Sqrt(const Floats &to, const Floats &x, uint32_t count);
void Duplicate(const Floats &to, float value, uint32_t count);
void Cast(const Floats &to, const LocalTensor<half> &from, RoundMode mode, uint32_t count);
void Cast(const Floats &to, const LocalTensor<bfloat16_t> &from, RoundMode mode, uint32_t count);
void Cast(const LocalTensor<half> &to, const Floats &from, RoundMode mode, uint32_t count);
void Cast(const LocalTensor<bfloat16_t> &to, const Floats &from, RoundMode mode, uint32_t count);
void Compare(const LocalTensor<uint8_t> &to, const Floats &x, const Floats &y, CMPMODE mode, uint32_t count);
void Select(const Floats &to, const LocalTensor<uint8_t> &mask, const Floats &x, const Floats &y, SELMODE mode,
            uint32_t count);

}  // namespace AscendC
