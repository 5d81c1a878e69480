// What tests/ascendc/launch.cc and operators.cc ask of the stand-in, on the vendor's framework instead.
#include "framework.h"

#include <cstdarg>
#include <cstdio>

#include "numbers.h"
#include "tiling.h"

namespace stand_in {

void Fail(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fprintf(stderr, "ours: core %ld of %ld: ", static_cast<long>(block_idx), static_cast<long>(cores));
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
  _exit(3);
}

}  // namespace stand_in

namespace model {
namespace {

// Which cores came to their end, in memory that they share.
uint8_t *ended;
bool returned;

// What the framework prints goes where errors go: on the standard output are answers.
class Redirected {
 public:
  Redirected() : output_(dup(1)) {
    fflush(stdout);
    dup2(2, 1);
  }
  ~Redirected() {
    std::cout.flush();
    fflush(stdout);
    dup2(output_, 1);
    close(output_);
  }

 private:
  int output_;
};

size_t BytesAt(const uint8_t *address) {
  for (const stand_in::Allocation &a : stand_in::global_memory) {
    if (a.begin == address) return a.bytes;
  }
  return address == nullptr ? 0 : sizeof(ms_optim::Tiling);
}

}  // namespace

void Launch(const char *name, uint8_t **arguments, size_t count, const std::function<void(uint8_t **)> &run) {
  if (stand_in::core != 0) return;  // the framework runs all cores at once
  const Redirected redirected;
  std::vector<uint8_t *> copies;
  for (size_t i = 0; i < count; ++i) {
    const size_t bytes = BytesAt(arguments[i]);
    copies.push_back(bytes > 0 ? static_cast<uint8_t *>(AscendC::GmAlloc(bytes)) : nullptr);
    if (bytes > 0) memcpy(copies[i], arguments[i], bytes);
  }
  ended = static_cast<uint8_t *>(AscendC::GmAlloc(stand_in::cores));
  memset(ended, 0, stand_in::cores);
  AscendC::SetKernelMode(KernelMode::AIV_MODE);
  g_taskRation = 1;  // a task has one core, of vectors
  run(copies.data());
  for (int64_t core = 0; core < stand_in::cores; ++core) {
    if (ended[core] == 0) {
      fprintf(stderr, "%s: core %ld of %ld did not end\n", name, static_cast<long>(core),
              static_cast<long>(stand_in::cores));
      _exit(3);
    }
  }
  AscendC::GmFree(ended);
  for (size_t i = 0; i < count; ++i) {
    if (copies[i] == nullptr) continue;
    memcpy(arguments[i], copies[i], BytesAt(arguments[i]));
    AscendC::GmFree(copies[i]);
  }
}

void Finish() { returned = true; }

}  // namespace model

int get_process_num() { return static_cast<int>(block_num); }
void set_block_dim(int core) { block_idx = core; }
void set_core_type(int) { AscendC::SetGCoreType(AscendC::AIV_TYPE); }

void AscendCBlockEnd(int core, const char *, size_t, uint64_t *) {
  if (model::returned) model::ended[core] = 1;
}

namespace AscendC {

void StubInit() {}  // binds instructions by the vendor's table of them; ours are bound by the linker

// No kernel adds to memory that cores share, for which the framework has this lock.
bool g_isAtomic = false;
ProcessLock *ProcessLock::processLock = nullptr;
ProcessLock *ProcessLock::CreateLock() { return nullptr; }
void ProcessLock::FreeLock() {}
int ProcessLock::Write() { return 0; }
int ProcessLock::Unlock() { return 0; }

}  // namespace AscendC

namespace bfloat16 {

// Of the vendor's type, these two are in its closed library.
uint16_t Bf16T::FloatToBf16(const float &x) const {
  ms_optim::bfloat16 rounded;
  ms_optim::Store(x, &rounded);
  uint16_t bits;
  memcpy(&bits, &rounded, sizeof(bits));
  return bits;
}
Bf16T &Bf16T::operator=(const Bf16T &x) {
  val = x.val;
  return *this;
}

}  // namespace bfloat16
