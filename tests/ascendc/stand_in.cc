// The rules of the vector API that kernel_operator.h declares, each checked where it applies.
#include "stand_in.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "kernel_operator.h"

namespace stand_in {

void Fail(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fprintf(stderr, "stand-in: core %ld of %ld: ", static_cast<long>(core), static_cast<long>(cores));
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
  exit(3);
}

void TouchGlobal(const void *address, size_t bytes, bool writes) {
  const auto *first = static_cast<const uint8_t *>(address);
  for (Allocation &a : global_memory) {
    if (first < a.begin || first >= a.begin + a.bytes) continue;
    const size_t offset = static_cast<size_t>(first - a.begin);
    if (bytes > a.bytes - offset) break;
    if (memchr(a.written.data() + offset, 1, bytes) != nullptr) {
      Fail("global memory is %s after a core wrote it", writes ? "written" : "read");
    }
    if (writes) memset(a.written.data() + offset, 1, bytes);
    return;
  }
  if (bytes > 0) Fail("%zu bytes of global memory are %s that no tensor has", bytes, writes ? "written" : "read");
}

}  // namespace stand_in

namespace AscendC {

using stand_in::Fail;
using stand_in::kBlock;
using stand_in::Require;

// ---- A core's memory --------------------------------------------------------------------------------------------

enum class State { kFree, kAllocated, kQueued, kTaken };

struct Buffer {
  TPosition position;
  std::vector<uint8_t> memory;  // with room to begin at an aligned address
  uint8_t *begin;
  size_t bytes;
  std::vector<uint8_t> known;  // whether a byte was written since the buffer was allocated
  State state = State::kFree;
  int generation = 0;

  Buffer(TPosition p, size_t size) : position(p), memory(size + kBlock), bytes(size) {
    begin = memory.data() + (kBlock - reinterpret_cast<uintptr_t>(memory.data()) % kBlock) % kBlock;
    Forget();
  }
  void Forget() {
    memset(begin, stand_in::kPoison, bytes);
    known.assign(bytes, 0);
    ++generation;
  }
};

Piece::Piece(Buffer *buffer) : buffer_(buffer), generation_(buffer->generation) {}

Piece Piece::After(size_t bytes) const {
  buffer();
  Piece rest(*this);
  rest.offset_ += bytes;
  return rest;
}

Buffer *Piece::buffer() const {
  Require(buffer_ != nullptr, "a tensor is used that no queue and no pipe made");
  Require(generation_ == buffer_->generation, "a tensor is used after it was freed");
  return buffer_;
}

void Piece::Touch(Unit unit, size_t bytes) const {
  const State state = buffer()->state;
  Require(offset_ % kBlock == 0, "an address in a core's memory is not aligned to 32 bytes");
  Require(offset_ + bytes <= buffer_->bytes, "a buffer is too small for what is done in it");
  switch (buffer_->position) {
    case TPosition::VECIN:
      Require(unit != Unit::kCopyOut, "a tensor of VECIN is copied out");
      if (unit == Unit::kCopyIn) Require(state == State::kAllocated, "a tensor is copied to after it was queued");
      if (unit == Unit::kVector) Require(state == State::kTaken, "a tensor is computed on that was not dequeued");
      break;
    case TPosition::VECOUT:
      Require(unit != Unit::kCopyIn, "a tensor of VECOUT is copied to");
      if (unit == Unit::kVector) Require(state == State::kAllocated, "a tensor is computed on after it was queued");
      if (unit == Unit::kCopyOut) Require(state == State::kTaken, "a tensor is copied out that was not dequeued");
      break;
    case TPosition::VECCALC:
      Require(unit == Unit::kVector, "a buffer to compute in is copied, and nobody waits for it");
  }
}

const uint8_t *Piece::Reads(Unit unit, size_t bytes) const {
  Touch(unit, bytes);
  const void *unknown = memchr(buffer_->known.data() + offset_, 0, bytes);
  Require(unknown == nullptr, "a core's memory is read before it is written");
  return buffer_->begin + offset_;
}

uint8_t *Piece::Writes(Unit unit, size_t bytes) const {
  Touch(unit, bytes);
  memset(buffer_->known.data() + offset_, 1, bytes);
  return buffer_->begin + offset_;
}

void Piece::Forget(size_t after, size_t end) const {
  memset(buffer_->begin + offset_ + after, stand_in::kPoison, end - after);
  memset(buffer_->known.data() + offset_ + after, 0, end - after);
}

Piece Queue::Alloc() {
  for (Buffer *buffer : buffers_) {
    if (buffer->state != State::kFree) continue;
    buffer->state = State::kAllocated;
    return Piece(buffer);
  }
  Fail("a queue has no buffer left: what it gave was not freed");
}

bool Queue::Append(const Piece &piece) {
  Require(piece.buffer()->state == State::kAllocated, "a tensor is queued that was not allocated, or is so already");
  piece.buffer()->state = State::kQueued;
  queued_.push_back(piece.buffer());
  Require(queued_.size() <= depth_, "more tensors are queued than the queue is deep");
  return true;
}

Piece Queue::First() {
  Require(!queued_.empty(), "a tensor is dequeued from an empty queue");
  Buffer *buffer = queued_.front();
  queued_.pop_front();
  buffer->state = State::kTaken;
  return Piece(buffer);
}

void Queue::Free(const Piece &piece) {
  Require(piece.buffer()->state == State::kTaken, "a tensor is freed that was not dequeued");
  piece.buffer()->state = State::kFree;
  piece.buffer()->Forget();
}

TPipe::TPipe() = default;

TPipe::~TPipe() {
  for (const auto &buffer : buffers_) {
    Require(buffer->state == State::kFree, "a kernel ends with a tensor that was not freed");
  }
}

bool TPipe::InitBuffer(Queue &queue, uint8_t count, uint32_t bytes) {
  size_t &events = events_[queue.position_];
  events += count;
  Require(events <= stand_in::kEvents, "the queues of one position have more than 8 buffers");
  for (uint8_t i = 0; i < count; ++i) queue.buffers_.push_back(Make(queue.position_, bytes));
  return true;
}

Buffer *TPipe::Make(TPosition position, size_t bytes) {
  bytes = (bytes + kBlock - 1) / kBlock * kBlock;
  used_ += bytes;
  Require(used_ <= stand_in::kUnifiedBuffer, "a core's memory is too small for its buffers");
  buffers_.push_back(std::make_unique<Buffer>(position, bytes));
  return buffers_.back().get();
}

// ---- Copies -----------------------------------------------------------------------------------------------------

size_t DataCopyExtParams::Bytes(size_t element) const {
  Require(blockCount == 1 && srcStride == 0 && dstStride == 0, "the stand-in copies one piece at a time");
  Require(blockLen % element == 0 && blockLen < (1u << 21), "a length is no number of elements");
  return blockLen;
}

void CopyPadded(const Piece &to, const uint8_t *from, size_t bytes) {
  const size_t padded = (bytes + kBlock - 1) / kBlock * kBlock;
  memcpy(to.Writes(Unit::kCopyIn, padded), from, bytes);
  to.Forget(bytes, padded);
}

void Copy(uint8_t *to, const Piece &from, size_t bytes, bool aligned) {
  if (aligned) {
    Require(bytes % kBlock == 0, "a copy without padding is not of a multiple of 32 bytes");
    Require(reinterpret_cast<uintptr_t>(to) % kBlock == 0, "a copy without padding is not to an aligned address");
  }
  memcpy(to, from.Reads(Unit::kCopyOut, bytes), bytes);
}

// ---- Vector instructions ----------------------------------------------------------------------------------------

namespace {

void RequireApart(const Piece &to, const Piece &from, size_t to_bytes, size_t from_bytes) {
  const bool same = to.offset() == from.offset() && to_bytes == from_bytes;
  const bool apart = to.offset() + to_bytes <= from.offset() || from.offset() + from_bytes <= to.offset();
  Require(to.buffer() != from.buffer() || same || apart, "what an instruction writes overlaps with what it reads");
}

template <class T>
const T *Read(const LocalTensor<T> &from, uint32_t count) {
  return reinterpret_cast<const T *>(from.Reads(Unit::kVector, count * sizeof(T)));
}

template <class T>
T *Written(const LocalTensor<T> &to, uint32_t count) {
  return reinterpret_cast<T *>(to.Writes(Unit::kVector, count * sizeof(T)));
}

template <class T, class U, class Function>
void Unary(const LocalTensor<T> &to, const LocalTensor<U> &from, uint32_t count, Function function) {
  RequireApart(to, from, count * sizeof(T), count * sizeof(U));
  const U *a = Read(from, count);
  T *out = Written(to, count);
  for (uint32_t i = 0; i < count; ++i) out[i] = function(a[i]);
}

template <class Function>
void Binary(const Floats &to, const Floats &x, const Floats &y, uint32_t count, Function function) {
  RequireApart(to, x, count * sizeof(float), count * sizeof(float));
  RequireApart(to, y, count * sizeof(float), count * sizeof(float));
  const float *a = Read(x, count), *b = Read(y, count);
  float *out = Written(to, count);
  for (uint32_t i = 0; i < count; ++i) out[i] = function(a[i], b[i]);
}

template <class T>
void Widen(const Floats &to, const LocalTensor<T> &from, RoundMode mode, uint32_t count) {
  Require(mode == RoundMode::CAST_NONE, "nothing is rounded on the way to float32");
  Unary(to, from, count, [](T a) { return ms_optim::ToFloat(a); });
}

template <class T>
void Narrow(const LocalTensor<T> &to, const Floats &from, RoundMode mode, uint32_t count) {
  Require(mode == RoundMode::CAST_RINT, "a number is to be rounded to the nearest");
  Unary(to, from, count, [](float a) {
    T stored;
    ms_optim::Store(a, &stored);
    return stored;
  });
}

}  // namespace

void Add(const Floats &to, const Floats &x, const Floats &y, uint32_t count) {
  Binary(to, x, y, count, [](float a, float b) { return a + b; });
}
void Sub(const Floats &to, const Floats &x, const Floats &y, uint32_t count) {
  Binary(to, x, y, count, [](float a, float b) { return a - b; });
}
void Mul(const Floats &to, const Floats &x, const Floats &y, uint32_t count) {
  Binary(to, x, y, count, [](float a, float b) { return a * b; });
}
void Div(const Floats &to, const Floats &x, const Floats &y, uint32_t count) {
  Binary(to, x, y, count, [](float a, float b) { return a / b; });
}
void Max(const Floats &to, const Floats &x, const Floats &y, uint32_t count) {
  Binary(to, x, y, count, [](float a, float b) { return a > b ? a : b; });
}
void Adds(const Floats &to, const Floats &x, float b, uint32_t count) {
  Unary(to, x, count, [b](float a) { return a + b; });
}
void Muls(const Floats &to, const Floats &x, float b, uint32_t count) {
  Unary(to, x, count, [b](float a) { return a * b; });
}
void Mins(const Floats &to, const Floats &x, float b, uint32_t count) {
  Unary(to, x, count, [b](float a) { return a < b ? a : b; });
}
void Maxs(const Floats &to, const Floats &x, float b, uint32_t count) {
  Unary(to, x, count, [b](float a) { return a > b ? a : b; });
}
void Sqrt(const Floats &to, const Floats &x, uint32_t count) {
  Unary(to, x, count, [](float a) { return std::sqrt(a); });
}
void Duplicate(const Floats &to, float value, uint32_t count) {
  float *out = Written(to, count);
  for (uint32_t i = 0; i < count; ++i) out[i] = value;
}

void Cast(const Floats &to, const LocalTensor<half> &from, RoundMode mode, uint32_t count) {
  Widen(to, from, mode, count);
}
void Cast(const Floats &to, const LocalTensor<bfloat16_t> &from, RoundMode mode, uint32_t count) {
  Widen(to, from, mode, count);
}
void Cast(const LocalTensor<half> &to, const Floats &from, RoundMode mode, uint32_t count) {
  Narrow(to, from, mode, count);
}
void Cast(const LocalTensor<bfloat16_t> &to, const Floats &from, RoundMode mode, uint32_t count) {
  Narrow(to, from, mode, count);
}

void Compare(const LocalTensor<uint8_t> &to, const Floats &x, const Floats &y, CMPMODE mode, uint32_t count) {
  Require(count * sizeof(float) % 256 == 0, "a comparison is not of a multiple of 256 bytes");
  const float *a = Read(x, count), *b = Read(y, count);
  uint8_t *out = Written(to, count / 8);
  memset(out, 0, count / 8);
  for (uint32_t i = 0; i < count; ++i) {
    const bool holds = mode == CMPMODE::EQ ? a[i] == b[i] : mode == CMPMODE::GE ? a[i] >= b[i] : a[i] <= b[i];
    out[i / 8] |= static_cast<uint8_t>(holds << (i % 8));
  }
}

void Select(const Floats &to, const LocalTensor<uint8_t> &mask, const Floats &x, const Floats &y, SELMODE,
            uint32_t count) {
  const uint8_t *bits = Read(mask, (count + 7) / 8);
  uint32_t i = 0;
  Binary(to, x, y, count, [bits, &i](float a, float b) {
    const bool first = (bits[i / 8] >> (i % 8) & 1) != 0;
    ++i;
    return first ? a : b;
  });
}

}  // namespace AscendC
