// A plugin of the emulators that counts the instructions that a program executes, and for aarch64 those of them that
// work on a single number: arithmetic of one float, and one code on its way between memory, vectors and general
// registers. Addresses, counters and whole vectors are none of these. It writes both counts to the standard error at
// the end.
#include <cstdint>
#include <cstdio>
#include <cstring>

// What it takes of qemu-plugin.h, which distributions do not ship.
extern "C" {
struct qemu_plugin_tb;
struct qemu_plugin_insn;
struct qemu_info_t {
  const char *target_name;
};
enum qemu_plugin_op { QEMU_PLUGIN_INLINE_ADD_U64 };
size_t qemu_plugin_tb_n_insns(const qemu_plugin_tb *);
qemu_plugin_insn *qemu_plugin_tb_get_insn(const qemu_plugin_tb *, size_t);
const void *qemu_plugin_insn_data(const qemu_plugin_insn *);
void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t, void (*)(uint64_t, qemu_plugin_tb *));
void qemu_plugin_register_vcpu_tb_exec_inline(qemu_plugin_tb *, qemu_plugin_op, void *, uint64_t);
void qemu_plugin_register_atexit_cb(uint64_t, void (*)(uint64_t, void *), void *);
__attribute__((visibility("default"))) extern const int qemu_plugin_version = 1;
}

namespace {

uint64_t executed, single;
bool is_aarch64;

// Instructions of which some bits have a value.
struct Class {
  uint32_t mask, value;
};
constexpr Class kSingle[] = {
    {0x5e000000, 0x1e000000},  // arithmetic, comparison, conversion of a float
    {0xde000000, 0x5e000000},  // a vector's lane by itself, and sums of lanes
    {0xbe000000, 0x38000000},  // a byte or two from memory to a general register, or back
    {0xbfe0fc00, 0x0e003c00},  // a lane to a general register
    {0xbfe0fc00, 0x0e002c00},  // the same, with its sign
    {0xffe0fc00, 0x4e001c00},  // a general register to a lane
};
// A lane from memory or to memory, unless all lanes get it.
bool IsLaneInMemory(uint32_t word) { return (word & 0xbf000000) == 0x0d000000 && (word >> 14 & 3) != 3; }

bool IsSingle(uint32_t word) {
  for (const Class &c : kSingle) {
    if ((word & c.mask) == c.value) return true;
  }
  return IsLaneInMemory(word);
}

void Translated(uint64_t, qemu_plugin_tb *block) {
  const size_t count = qemu_plugin_tb_n_insns(block);
  uint64_t of_single = 0;
  for (size_t i = 0; is_aarch64 && i < count; ++i) {
    uint32_t word;
    memcpy(&word, qemu_plugin_insn_data(qemu_plugin_tb_get_insn(block, i)), sizeof(word));
    of_single += IsSingle(word);
  }
  qemu_plugin_register_vcpu_tb_exec_inline(block, QEMU_PLUGIN_INLINE_ADD_U64, &executed, count);
  qemu_plugin_register_vcpu_tb_exec_inline(block, QEMU_PLUGIN_INLINE_ADD_U64, &single, of_single);
}

void Ended(uint64_t, void *) {
  fprintf(stderr, "executed %llu single %llu\n", static_cast<unsigned long long>(executed),
          static_cast<unsigned long long>(single));
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int qemu_plugin_install(uint64_t id, const qemu_info_t *info, int,
                                                                          char **) {
  is_aarch64 = strcmp(info->target_name, "aarch64") == 0;
  qemu_plugin_register_vcpu_tb_trans_cb(id, Translated);
  qemu_plugin_register_atexit_cb(id, Ended, nullptr);
  return 0;
}
