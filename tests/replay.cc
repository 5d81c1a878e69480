// Replays launches that tests/recording.py wrote down, through the C interface of the operators, and writes what
// they made of their arrays: on other processors, and under sanitizers, which cannot be had from inside Python.
//
//   replay RECORDING RESULTS
//
// Every array has memory of its own, of exactly its size, so that a sanitizer sees the first byte beyond it.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "operators.h"
#include "rules.h"

// What all operators are declared as; none has this name.
MS_OPTIM_OPERATOR(ms_optim_operator);
#define MS_OPTIM_ROW(name, Rule) MS_OPTIM_OPERATOR(ms_optim_##name);
MS_OPTIM_RULES(MS_OPTIM_ROW)
#undef MS_OPTIM_ROW
// Operators for the host are without the one kind of these rules, operators for a GPU without the other.
#define MS_OPTIM_ROW(name, Rule) extern "C" __attribute__((weak)) decltype(ms_optim_operator) ms_optim_##name;
MS_OPTIM_HOST_RULES(MS_OPTIM_ROW)
MS_OPTIM_GPU_RULES(MS_OPTIM_ROW)
#undef MS_OPTIM_ROW
// Operators for a GPU are without those of local steps, which run on the host.
#define MS_OPTIM_LOCAL(ROW) ROW(local_begin, ) ROW(local_send, ) ROW(local_apply, )
#define MS_OPTIM_ROW(name, Rule) extern "C" __attribute__((weak)) decltype(ms_optim_operator) ms_optim_##name;
MS_OPTIM_LOCAL(MS_OPTIM_ROW)
#undef MS_OPTIM_ROW
// Nor have they instruction sets.
extern "C" __attribute__((weak)) const char *ms_optim_instruction_set();

namespace {

constexpr struct {
  const char *name;
  decltype(&ms_optim_operator) function;
} kOperators[] = {
#define MS_OPTIM_ROW(name, Rule) {"ms_optim_" #name, ms_optim_##name},
    MS_OPTIM_RULES(MS_OPTIM_ROW) MS_OPTIM_HOST_RULES(MS_OPTIM_ROW) MS_OPTIM_GPU_RULES(MS_OPTIM_ROW)
        MS_OPTIM_LOCAL(MS_OPTIM_ROW)
#undef MS_OPTIM_ROW
};

[[noreturn]] void Fail(const char *what) {
  fprintf(stderr, "replay: %s\n", what);
  exit(2);
}

class File {
 public:
  File(const char *path, const char *mode) : file_(fopen(path, mode)) {
    if (file_ == nullptr) Fail(path);
  }
  ~File() { Close(); }
  File(const File &) = delete;
  File &operator=(const File &) = delete;

  void Read(void *to, size_t bytes) {
    if (bytes != 0 && fread(to, 1, bytes, file_) != bytes) Fail("the recording is too short");
  }
  int64_t Number() {
    int64_t number;
    Read(&number, sizeof(number));
    return number;
  }
  std::string Text() {
    std::string text(static_cast<size_t>(Number()), '\0');
    Read(&text[0], text.size());
    return text;
  }
  void Write(const void *from, size_t bytes) {
    if (bytes != 0 && fwrite(from, 1, bytes, file_) != bytes) Fail("the results cannot be written");
  }
  void Close() {
    if (file_ != nullptr && fclose(file_) != 0) Fail("the results cannot be written");
    file_ = nullptr;
  }

 private:
  FILE *file_;
};

// Each array begins 16 bytes behind the start of a cache line, as large tensors do, and ends where its memory ends.
struct Array {
  std::string dtype;
  std::vector<int64_t> shape;
  size_t bytes;
  std::unique_ptr<void, decltype(&free)> memory{nullptr, &free};
  void *data = nullptr;

  explicit Array(File *in) : dtype(in->Text()), shape(static_cast<size_t>(in->Number())) {
    for (int64_t &extent : shape) extent = in->Number();
    bytes = static_cast<size_t>(in->Number());
    constexpr size_t kLine = 64, kBehind = 16;
    void *line = nullptr;
    if (posix_memalign(&line, kLine, kBehind + bytes) != 0) Fail("no memory");
    memory.reset(line);
    data = static_cast<char *>(line) + kBehind;
    in->Read(data, bytes);
  }
};

// One launch: `passed` of its arrays are arguments; the others are what a table among these points to.
void Replay(File *in, File *out) {
  const std::string name = in->Text();
  const int64_t steps = in->Number(), callers = in->Number();
  const int passed = static_cast<int>(in->Number());
  std::vector<Array> arrays;
  for (int64_t n = in->Number(); n > 0; --n) arrays.emplace_back(in);
  for (int64_t n = in->Number(); n > 0; --n) {
    auto *table = static_cast<int64_t *>(arrays.at(static_cast<size_t>(in->Number())).data);
    const int64_t element = in->Number(), target = in->Number(), offset = in->Number();
    table[element] = reinterpret_cast<int64_t>(arrays.at(static_cast<size_t>(target)).data) + offset;
  }

  decltype(&ms_optim_operator) function = nullptr;
  for (const auto &candidate : kOperators) {
    if (name == candidate.name) function = candidate.function;
  }
  if (function == nullptr) Fail("no such operator");
  const auto call = [&](int64_t *status) {
    std::vector<void *> data;
    std::vector<int> ndims;
    std::vector<int64_t *> shapes;
    std::vector<const char *> dtypes;
    for (int i = 0; i < passed; ++i) {
      Array &array = arrays[static_cast<size_t>(i)];
      data.push_back(array.data);
      ndims.push_back(static_cast<int>(array.shape.size()));
      shapes.push_back(array.shape.data());
      dtypes.push_back(array.dtype.c_str());
    }
    for (int64_t step = 0; step < steps && *status == 0; ++step) {
      *status = function(passed, data.data(), ndims.data(), shapes.data(), dtypes.data(), nullptr, nullptr);
    }
  };
  std::vector<int64_t> status(static_cast<size_t>(callers));
  std::vector<std::thread> threads;
  for (size_t i = 1; i < status.size(); ++i) threads.emplace_back(call, &status[i]);
  call(&status[0]);
  for (std::thread &thread : threads) thread.join();

  int64_t worst = 0;
  for (const int64_t s : status) worst = s != 0 ? s : worst;
  out->Write(&worst, sizeof(worst));
  for (const Array &array : arrays) out->Write(array.data, array.bytes);
}

}  // namespace

int main(int argc, char **argv) {
  if (argc != 3) Fail("usage: replay RECORDING RESULTS");
  puts(ms_optim_instruction_set != nullptr ? ms_optim_instruction_set() : "none");
  File in(argv[1], "rb"), out(argv[2], "wb");
  for (int64_t n = in.Number(); n > 0; --n) Replay(&in, &out);
  out.Close();
  return 0;
}
