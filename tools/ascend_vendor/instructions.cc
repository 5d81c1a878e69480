// A model of the instructions of stub_fun.h: what they compute, and what they ask of the unified buffer.
//
// Copies in, vectors and copies out are three units with a queue each. A unit does what is in its queue in order, and
// waits for another unit only where a flag says so. Which instruction runs first is otherwise open: the variable
// MS_OPTIM_EAGER says which units run at once (1: copies in, 2: vectors, 4: copies out; all, if it is not set), and the
// others run as late as flags allow. A kernel that lacks a flag gives other numbers in one of these orders.
#include <cmath>
#include <cstdlib>
#include <deque>
#include <functional>
#include <vector>

#include "framework.h"
#include "kernel_operator.h"
#include "numbers.h"

namespace model {
namespace {

using stand_in::Fail;
using stand_in::Require;

// ---- Units and flags --------------------------------------------------------------------------------------------

constexpr int kEvents = 8;
// The units, in the order of MS_OPTIM_EAGER; the scalar unit never waits in a queue.
constexpr pipe_t kUnits[] = {PIPE_MTE2, PIPE_V, PIPE_MTE3};

struct Step {
  std::function<bool()> run;  // returns whether it is done; if not, it waits for the unit below
  pipe_t waits_for;
};

std::deque<Step> queues[PIPE_FIX + 1];
int flags[PIPE_FIX + 1][PIPE_FIX + 1][kEvents];

void RunOne(pipe_t unit) {
  Require(!queues[unit].empty(), "a unit waits for a flag that is not set");
  // A step that waits lets the other unit run on, one step at a time.
  while (!queues[unit].front().run()) RunOne(queues[unit].front().waits_for);
  queues[unit].pop_front();
}

void RunAll(pipe_t unit) {
  while (!queues[unit].empty()) RunOne(unit);
}

bool IsEager(pipe_t unit) {
  static const char *given = getenv("MS_OPTIM_EAGER");
  static const int mask = given == nullptr ? 7 : atoi(given);
  for (int i = 0; i < 3; ++i) {
    if (kUnits[i] == unit) return (mask >> i & 1) != 0;
  }
  return true;
}

void Issue(pipe_t unit, std::function<bool()> run, pipe_t waits_for = PIPE_S) {
  queues[unit].push_back({std::move(run), waits_for});
  if (IsEager(unit)) RunAll(unit);
}

void Do(pipe_t unit, std::function<void()> run) {
  Issue(unit, [run] {
    run();
    return true;
  });
}

// ---- The unified buffer -----------------------------------------------------------------------------------------

constexpr size_t kBlock = 32, kUnifiedBuffer = 192 * 1024;
// What Select needs for itself: the last 8 KiB.
constexpr size_t kOfSelect = 184 * 1024;
constexpr int kPoison = 0xFF;  // a NaN in any format

enum class State { kFree, kAllocated, kQueued, kTaken, kWork };

struct Buffer {
  size_t begin, end;
  AscendC::TPosition position;
  State state;
};

std::vector<Buffer> buffers;
// Bytes that a copy wrote and that nothing has read since.
std::vector<uint8_t> unread(kUnifiedBuffer);

size_t OffsetOf(uint64_t address) {
  return address - reinterpret_cast<uint64_t>(AscendC::ConstDefiner::Instance().cpuUB);
}

Buffer &BufferAt(uint64_t address) {
  for (Buffer &b : buffers) {
    if (b.begin == OffsetOf(address)) return b;
  }
  Fail("no buffer begins at byte %zu of the unified buffer", OffsetOf(address));
}

// Checks what a unit does with so many bytes.
void Touch(pipe_t unit, const void *address, size_t bytes) {
  using AscendC::TPosition;
  if (bytes == 0) return;
  const size_t begin = OffsetOf(reinterpret_cast<uint64_t>(address));
  Require(begin < kUnifiedBuffer && bytes <= kUnifiedBuffer - begin, "an access is beyond the unified buffer");
  Require(begin % kBlock == 0, "an address in the unified buffer is not aligned to 32 bytes");
  const Buffer *buffer = nullptr;
  for (const Buffer &b : buffers) {
    if (b.begin <= begin && begin + bytes <= b.end) buffer = &b;
  }
  if (buffer == nullptr) Fail("bytes %zu to %zu of the unified buffer are not in one buffer", begin, begin + bytes);
  if (unit == PIPE_MTE2) {
    Require(buffer->position == TPosition::VECIN && buffer->state == State::kAllocated,
            "a copy in is not to a tensor of VECIN that was allocated");
    Require(memchr(&unread[begin], 1, bytes) == nullptr, "a copy overwrites what a copy wrote and nothing read");
    memset(&unread[begin], 1, bytes);
  } else if (unit == PIPE_MTE3) {
    Require(buffer->position == TPosition::VECOUT && buffer->state == State::kTaken,
            "a copy out is not from a tensor of VECOUT that was dequeued");
  } else {
    const bool is_in = buffer->position == TPosition::VECIN, is_out = buffer->position == TPosition::VECOUT;
    if (is_in) Require(buffer->state == State::kTaken, "vectors use a tensor of VECIN that was not dequeued");
    if (is_out) Require(buffer->state == State::kAllocated, "vectors use a tensor of VECOUT that was not allocated");
    memset(&unread[begin], 0, bytes);
  }
}

// ---- Vectors ----------------------------------------------------------------------------------------------------

uint64_t mask_high = ~uint64_t{0}, mask_low = ~uint64_t{0};
bool counts = false;

constexpr int kLanesOfRepeat = 64;  // elements of 4 bytes in 256

// Which elements an instruction takes, from what the registers said when it was issued.
struct Elements {
  int repeats;
  uint64_t mask, count;
  bool counts;

  explicit Elements(const Shape &shape)
      : repeats(shape.repeats), mask(mask_low), count(mask_low), counts(model::counts) {}

  // Calls function(repeat, lane) for each element.
  template <class Function>
  void ForEach(Function function) const {
    if (counts) {
      for (uint64_t i = 0; i < count; ++i)
        function(static_cast<int>(i / kLanesOfRepeat), static_cast<int>(i % kLanesOfRepeat));
      return;
    }
    for (int r = 0; r < repeats; ++r) {
      for (int lane = 0; lane < kLanesOfRepeat; ++lane) {
        if ((mask >> lane & 1) != 0) function(r, lane);
      }
    }
  }
};

// Where the elements of operand i are.
template <class T>
struct Operand {
  T *begin;
  int block, stride;

  Operand(T *begin, const Shape &shape, int i) : begin(begin), block(shape.blocks[i]), stride(shape.strides[i]) {}

  T *At(int repeat, int lane) const {
    constexpr int kInBlock = kBlock / sizeof(T);
    return begin + (repeat * stride + lane / kInBlock * block) * kInBlock + lane % kInBlock;
  }
  const Operand &Touched(const Elements &elements) const {
    T *last = nullptr;
    elements.ForEach([&](int repeat, int lane) { last = std::max(last, At(repeat, lane)); });
    if (last != nullptr)
      Touch(PIPE_V, begin, reinterpret_cast<const uint8_t *>(last + 1) - reinterpret_cast<const uint8_t *>(begin));
    return *this;
  }
};

template <class Z, class X, class Function>
void Unary(Z *z, const X *x, const Shape &shape, Function function) {
  const Elements elements(shape);
  const auto from = Operand<const X>(x, shape, 1).Touched(elements);
  const auto to = Operand<Z>(z, shape, 0).Touched(elements);
  Do(PIPE_V, [=] { elements.ForEach([&](int r, int lane) { *to.At(r, lane) = function(*from.At(r, lane)); }); });
}

template <class Function>
void OfTwo(float *z, const float *x, const float *y, const Shape &shape, Function function) {
  const Elements elements(shape);
  const auto a = Operand<const float>(x, shape, 1).Touched(elements);
  const auto b = Operand<const float>(y, shape, 2).Touched(elements);
  const auto to = Operand<float>(z, shape, 0).Touched(elements);
  Do(PIPE_V,
     [=] { elements.ForEach([&](int r, int lane) { *to.At(r, lane) = function(*a.At(r, lane), *b.At(r, lane)); }); });
}

// The vendor's types of 16 bits as ours, whose conversions the other tests check.
const ms_optim::float16 *Ours(const half *x) { return reinterpret_cast<const ms_optim::float16 *>(x); }
ms_optim::float16 *Ours(half *x) { return reinterpret_cast<ms_optim::float16 *>(x); }
const ms_optim::bfloat16 *Ours(const bfloat16_t *x) { return reinterpret_cast<const ms_optim::bfloat16 *>(x); }
ms_optim::bfloat16 *Ours(bfloat16_t *x) { return reinterpret_cast<ms_optim::bfloat16 *>(x); }

template <class T>
void Widen(float *z, const T *x, const Shape &shape) {
  Unary(z, x, shape, [](T a) { return ms_optim::ToFloat(a); });
}
template <class T>
void Narrow(T *z, const float *x, const Shape &shape) {
  Unary(z, x, shape, [](float a) {
    T stored;
    ms_optim::Store(a, &stored);
    return stored;
  });
}

// Where the bits of the next Select are.
const uint8_t *bits_of_select;

}  // namespace

void NotModelled(const char *name) { Fail("%s has no model", name); }

void SetFlag(pipe_t from, pipe_t to, int event) {
  Require(event >= 0 && event < kEvents, "there is no such event");
  const auto set = [=] {
    ++flags[from][to][event];
    return true;
  };
  if (from == PIPE_S) {
    set();
  } else {
    Issue(from, set);
  }
}

void WaitFlag(pipe_t from, pipe_t to, int event) {
  Require(event >= 0 && event < kEvents, "there is no such event");
  const auto wait = [=] {
    if (flags[from][to][event] == 0) return false;
    --flags[from][to][event];
    return true;
  };
  if (to == PIPE_S) {
    while (!wait()) RunOne(from);
  } else {
    Issue(to, wait, from);
  }
}

void Barrier(pipe_t pipe) {
  if (pipe != PIPE_ALL) return;  // a unit does what it is told in order
  for (const pipe_t unit : kUnits) RunAll(unit);
}

void SetMask(uint64_t high, uint64_t low) {
  mask_high = high;
  mask_low = low;
}
void CountElements(bool does) { counts = does; }

void Compute(Binary operation, float *z, const float *x, const float *y, const Shape &shape) {
  switch (operation) {
    case Binary::kAdd:
      return OfTwo(z, x, y, shape, [](float a, float b) { return a + b; });
    case Binary::kSub:
      return OfTwo(z, x, y, shape, [](float a, float b) { return a - b; });
    case Binary::kMul:
      return OfTwo(z, x, y, shape, [](float a, float b) { return a * b; });
    case Binary::kDiv:
      return OfTwo(z, x, y, shape, [](float a, float b) { return a / b; });
    case Binary::kMax:
      return OfTwo(z, x, y, shape, [](float a, float b) { return a > b ? a : b; });
  }
}

void Compute(Scalar operation, float *z, const float *x, float b, const Shape &shape) {
  switch (operation) {
    case Scalar::kAdd:
      return Unary(z, x, shape, [b](float a) { return a + b; });
    case Scalar::kMul:
      return Unary(z, x, shape, [b](float a) { return a * b; });
    case Scalar::kMin:
      return Unary(z, x, shape, [b](float a) { return a < b ? a : b; });
    case Scalar::kMax:
      return Unary(z, x, shape, [b](float a) { return a > b ? a : b; });
  }
}

void Root(float *z, const float *x, const Shape &shape) {
  Unary(z, x, shape, [](float a) { return std::sqrt(a); });
}

void Fill(float *z, float value, const Shape &shape) {
  const Elements elements(shape);
  const auto to = Operand<float>(z, shape, 0).Touched(elements);
  Do(PIPE_V, [=] { elements.ForEach([&](int r, int lane) { *to.At(r, lane) = value; }); });
}

void Convert(float *z, const half *x, const Shape &shape) { Widen(z, Ours(x), shape); }
void Convert(float *z, const bfloat16_t *x, const Shape &shape) { Widen(z, Ours(x), shape); }
void Convert(half *z, const float *x, const Shape &shape) { Narrow(Ours(z), x, shape); }
void Convert(bfloat16_t *z, const float *x, const Shape &shape) { Narrow(Ours(z), x, shape); }

// Comparisons heed no mask; each repeat leaves 64 bits.
void Compare(Comparison relation, uint8_t *bits, const float *x, const float *y, const Shape &shape) {
  Elements all(shape);
  all.counts = false;
  all.mask = ~uint64_t{0};
  const auto a = Operand<const float>(x, shape, 1).Touched(all);
  const auto b = Operand<const float>(y, shape, 2).Touched(all);
  const size_t bytes = static_cast<size_t>(shape.repeats) * kLanesOfRepeat / 8;
  Touch(PIPE_V, bits, bytes);
  Do(PIPE_V, [=] {
    memset(bits, 0, bytes);
    all.ForEach([&](int r, int lane) {
      const float p = *a.At(r, lane), q = *b.At(r, lane);
      const bool holds = relation == Comparison::kEqual ? p == q : relation == Comparison::kAtLeast ? p >= q : p <= q;
      const int i = r * kLanesOfRepeat + lane;
      bits[i / 8] |= static_cast<uint8_t>(holds << (i % 8));
    });
  });
}

// At the place is the address of the bits; the place itself is in the memory that Select needs.
void SetComparisonMask(const void *place) {
  for (const Buffer &b : buffers) {
    if (b.end > kOfSelect) {
      Fail("Select's last 8 KiB of the unified buffer, from byte %zu, are in a buffer that ends at byte %zu", kOfSelect,
           b.end);
    }
  }
  int64_t address;
  memcpy(&address, place, sizeof(address));
  bits_of_select = reinterpret_cast<const uint8_t *>(address);
}

void Select(float *z, const float *x, const float *y, const Shape &shape, int mode) {
  Require(mode == static_cast<int>(AscendC::SELMODE::VSEL_TENSOR_TENSOR_MODE), "a mode of Select has no model");
  const Elements elements(shape);
  const auto a = Operand<const float>(x, shape, 1).Touched(elements);
  const auto b = Operand<const float>(y, shape, 2).Touched(elements);
  const auto to = Operand<float>(z, shape, 0).Touched(elements);
  const uint8_t *bits = bits_of_select;
  const size_t count = elements.counts ? elements.count : static_cast<size_t>(shape.repeats) * kLanesOfRepeat;
  Touch(PIPE_V, bits, (count + 7) / 8);
  Do(PIPE_V, [=] {
    elements.ForEach([&](int r, int lane) {
      const int i = r * kLanesOfRepeat + lane;
      *to.At(r, lane) = (bits[i / 8] >> (i % 8) & 1) != 0 ? *a.At(r, lane) : *b.At(r, lane);
    });
  });
}

// ---- Copies -----------------------------------------------------------------------------------------------------

namespace {

size_t InBlocks(size_t bytes) { return (bytes + kBlock - 1) / kBlock * kBlock; }

}  // namespace

void CopyIn(void *to, const void *from, int pieces, size_t bytes, size_t left, size_t right, size_t from_gap,
            size_t to_gap) {
  Require(left == 0 && right == 0, "a copy that fills up its pieces has no model");
  auto *into = static_cast<uint8_t *>(to);
  const auto *source = static_cast<const uint8_t *>(from);
  for (int i = 0; i < pieces; ++i, into += InBlocks(bytes) + to_gap * kBlock, source += bytes + from_gap) {
    Touch(PIPE_MTE2, into, InBlocks(bytes));
    Do(PIPE_MTE2, [=] {
      memset(into, kPoison, InBlocks(bytes));  // what fills up the last block is not known
      memcpy(into, source, bytes);
    });
  }
}

void CopyOut(void *to, const void *from, int pieces, size_t bytes, size_t from_gap, size_t to_gap) {
  auto *into = static_cast<uint8_t *>(to);
  const auto *source = static_cast<const uint8_t *>(from);
  for (int i = 0; i < pieces; ++i, into += bytes + to_gap, source += InBlocks(bytes) + from_gap * kBlock) {
    Touch(PIPE_MTE3, source, bytes);
    Do(PIPE_MTE3, [=] { memcpy(into, source, bytes); });
  }
}

}  // namespace model

// ---- What the framework tells -----------------------------------------------------------------------------------

using model::BufferAt;
using model::State;

void AscendCBufInit(uint8_t position, uint8_t is_work, uint8_t count, uint64_t address, uint64_t bytes) {
  for (int i = 0; i < count; ++i) {
    const size_t begin = model::OffsetOf(address + i * bytes);
    model::buffers.push_back(
        {begin, begin + bytes, static_cast<AscendC::TPosition>(position), is_work != 0 ? State::kWork : State::kFree});
  }
  memset(reinterpret_cast<void *>(address), model::kPoison, count * bytes);
}

// What a buffer held is forgotten by the unit that then writes it.
void AscendCBufAlloc(uint8_t, uint8_t position, uint64_t address, uint64_t bytes) {
  BufferAt(address).state = State::kAllocated;
  memset(&model::unread[model::OffsetOf(address)], 0, bytes);
  const bool is_in = static_cast<AscendC::TPosition>(position) == AscendC::TPosition::VECIN;
  model::Do(is_in ? PIPE_MTE2 : PIPE_V, [=] { memset(reinterpret_cast<void *>(address), model::kPoison, bytes); });
}
void AscendCBufEnque(uint8_t, uint8_t, uint8_t, uint64_t address) { BufferAt(address).state = State::kQueued; }
void AscendCBufDeque(uint8_t, uint8_t, uint8_t, uint64_t address) { BufferAt(address).state = State::kTaken; }
void AscendCBufFree(uint8_t, uint8_t, uint64_t address, uint64_t) { BufferAt(address).state = State::kFree; }

uint64_t ModelFactoryGetMaskHigh() { return model::mask_high; }
uint64_t ModelFactoryGetMaskLow() { return model::mask_low; }
int ModelFactoryGetMaskMode() { return model::counts ? 1 : 0; }

namespace AscendC {

// A flag that is set is waited for, once.
void CheckSyncState() {
  for (const pipe_t unit : model::kUnits) model::RunAll(unit);
  for (const auto &from : model::flags) {
    for (const auto &to : from) {
      for (const int times : to) stand_in::Require(times == 0, "a flag is set that nothing waits for");
    }
  }
}

}  // namespace AscendC
