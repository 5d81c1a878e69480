// Runs the operators of ops/ascendc on the stand-in: asked on its standard input, it answers on its standard output.
//
//   launch describe          what the operators are
//   launch                   requests to run one, until the input ends
//
// A request is the operator's type, the dtypes of its kernel, the number of cores, the number of inputs and the inputs;
// the answer the inputs as they are then, and the number and the elements of the output. Numbers are int64, texts have
// their length in front, and inputs their shape and their length.
#include <cstdio>
#include <cstring>

#include "operators.h"
#include "stand_in.h"

namespace {

void Read(void *to, size_t bytes) {
  if (bytes != 0 && fread(to, 1, bytes, stdin) != bytes) stand_in::Fail("a request ends early");
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
  if (bytes != 0 && fwrite(from, 1, bytes, stdout) != bytes) stand_in::Fail("an answer is not read");
}
void WriteNumber(int64_t number) { Write(&number, sizeof(number)); }

void Answer() {
  const std::string type = Text(), dtypes = Text();
  const auto cores = static_cast<uint32_t>(Number());
  std::vector<std::vector<uint8_t>> memory;
  std::vector<stand_in::Array> inputs;
  for (int64_t count = Number(); count > 0; --count) {
    stand_in::Array input;
    for (int64_t rank = Number(); rank > 0; --rank) input.shape.push_back(Number());
    memory.emplace_back(static_cast<size_t>(Number()));
    input.data = memory.back().data();
    input.bytes = memory.back().size();
    Read(input.data, input.bytes);
    inputs.push_back(input);
  }
  const std::vector<float> output = stand_in::Run(type, dtypes, inputs, cores);
  for (const stand_in::Array &input : inputs) Write(input.data, input.bytes);
  WriteNumber(static_cast<int64_t>(output.size()));
  Write(output.data(), output.size() * sizeof(float));
  fflush(stdout);
}

}  // namespace

int main(int argc, char **argv) {
  if (argc == 2 && strcmp(argv[1], "describe") == 0) {
    stand_in::Describe();
    return 0;
  }
  for (int next = getc(stdin); next != EOF; next = getc(stdin)) {
    ungetc(next, stdin);
    Answer();
  }
  return 0;
}
