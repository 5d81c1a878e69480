// A float32 number below 2^-126 in magnitude counts as 0 wherever a step reads or makes one.
//
// Kernels for GPUs are compiled this way (-ftz=true); on a CPU it is a mode of each thread. By default some threads of
// a framework flush such numbers and others do not, and the bits of a step would depend on the thread. Besides, a
// moment that decays would end in such numbers, with which processors are many times slower.
#pragma once

#include "numbers.h"

namespace ms_optim {

// Sets the mode of its thread, and restores the earlier mode when it is destroyed. The compiler moves no load or store
// across either, and so no arithmetic.
class DenormalsAreZero {
 public:
  MS_OPTIM_FN DenormalsAreZero() : before_(Mode()) { SetMode(before_ | kFlush); }
  MS_OPTIM_FN ~DenormalsAreZero() { SetMode(before_); }
  DenormalsAreZero(const DenormalsAreZero &) = delete;
  DenormalsAreZero &operator=(const DenormalsAreZero &) = delete;

 private:
#if defined(__x86_64__)
  typedef uint32_t Register;                              // MXCSR
  static constexpr Register kFlush = 1u << 15 | 1u << 6;  // flush to zero, denormals are zero
  MS_OPTIM_FN static Register Mode() {
    Register mode;
    asm volatile("stmxcsr %0" : "=m"(mode) : : "memory");
    return mode;
  }
  MS_OPTIM_FN static void SetMode(Register mode) { asm volatile("ldmxcsr %0" : : "m"(mode) : "memory"); }
#elif defined(__aarch64__)
  typedef uint64_t Register;                    // FPCR
  static constexpr Register kFlush = 1u << 24;  // FZ, for operands and results
  MS_OPTIM_FN static Register Mode() {
    Register mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode) : : "memory");
    return mode;
  }
  MS_OPTIM_FN static void SetMode(Register mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
#else
  typedef uint32_t Register;  // other processors stay in the mode that they have
  static constexpr Register kFlush = 0;
  MS_OPTIM_FN static Register Mode() { return 0; }
  MS_OPTIM_FN static void SetMode(Register) {}
#endif

  const Register before_;
};

}  // namespace ms_optim
