// The dtypes of tensors, and the formats that states are stored in. A row is all that makes one known, to the kernels
// for CPU and CUDA and to the checks of arguments.
//
// A format is a struct that states two dtypes, kSigned and kUnsigned, and the code that one element of a state is
// stored as, Code<kIsSigned, kUse>. The dtypes are the same if the code is the same. Moments of gradients have either
// sign, moments of their squares are never negative: a first state is signed, a second one is not, and a third one may
// be either. codes.h says what a code states.
#pragma once

#include <cstdint>
#include <cstring>

#include "codes.h"

namespace ms_optim {

// DTYPE(name, the framework's name, bytes)
#define MS_OPTIM_DTYPES(DTYPE)    \
  DTYPE(kFloat32, "float32", 4)   \
  DTYPE(kFloat16, "float16", 2)   \
  DTYPE(kBFloat16, "bfloat16", 2) \
  DTYPE(kInt8, "int8", 1)         \
  DTYPE(kUInt8, "uint8", 1)       \
  DTYPE(kInt16, "int16", 2)       \
  DTYPE(kUInt16, "uint16", 2)

enum class DType {
#define MS_OPTIM_ROW(name, text, bytes) name,
  MS_OPTIM_DTYPES(MS_OPTIM_ROW)
#undef MS_OPTIM_ROW
      kOther
};

inline DType ParseDType(const char *text) {
#define MS_OPTIM_ROW(name, own_text, bytes) \
  if (strcmp(text, own_text) == 0) return DType::name;
  MS_OPTIM_DTYPES(MS_OPTIM_ROW)
#undef MS_OPTIM_ROW
  return DType::kOther;
}

inline int64_t SizeOf(DType type) {
#define MS_OPTIM_ROW(name, text, bytes) \
  if (type == DType::name) return bytes;
  MS_OPTIM_DTYPES(MS_OPTIM_ROW)
#undef MS_OPTIM_ROW
  return 0;
}

inline bool IsFloat(DType type) {
  return type == DType::kFloat32 || type == DType::kFloat16 || type == DType::kBFloat16;
}

struct Float32Format {
  static constexpr DType kSigned = DType::kFloat32, kUnsigned = DType::kFloat32;
  template <bool kIsSigned, NoiseUse kUse>
  using Code = Float32Code;
};

struct BFloat16Format {
  static constexpr DType kSigned = DType::kBFloat16, kUnsigned = DType::kBFloat16;
  template <bool kIsSigned, NoiseUse kUse>
  using Code = BFloat16Code<kUse>;
};

struct EightBitFormat {
  static constexpr DType kSigned = DType::kInt8, kUnsigned = DType::kUInt8;
  template <bool kIsSigned, NoiseUse kUse>
  using Code = std::conditional_t<kIsSigned, SignedCode<8, kUse>, UnsignedCode<8, kUse>>;
};

struct FourBitFormat {
  static constexpr DType kSigned = DType::kInt16, kUnsigned = DType::kUInt16;  // each holds four codes
  template <bool kIsSigned, NoiseUse kUse>
  using Code = std::conditional_t<kIsSigned, SignedCode<4, kUse>, UnsignedCode<4, kUse>>;
};

#define MS_OPTIM_FORMATS(FORMAT) \
  FORMAT(Float32Format)          \
  FORMAT(BFloat16Format)         \
  FORMAT(EightBitFormat)         \
  FORMAT(FourBitFormat)

// The codes of a first and of a second state.
template <class Format>
using FirstCode = typename Format::template Code<true, kFirstState>;
template <class Format>
using SecondCode = typename Format::template Code<false, kSecondState>;

template <class Format>
MS_OPTIM_FN bool HasFormat(DType type) {
  return type == Format::kSigned || type == Format::kUnsigned;
}

// Tells whether state k may be of a dtype.
inline bool HoldsState(DType type, int k) {
#define MS_OPTIM_ROW(Format)                          \
  if (k != 1 && type == Format::kSigned) return true; \
  if (k != 0 && type == Format::kUnsigned) return true;
  MS_OPTIM_FORMATS(MS_OPTIM_ROW)
#undef MS_OPTIM_ROW
  return false;
}

// Tells whether each block of a state has a scale.
inline bool HasScales(DType state) {
#define MS_OPTIM_ROW(Format) \
  if (HasFormat<Format>(state)) return FirstCode<Format>::kHasScales;
  MS_OPTIM_FORMATS(MS_OPTIM_ROW)
#undef MS_OPTIM_ROW
  return false;
}

// Returns the length of an array that holds so many elements of a state.
inline int64_t LengthOfState(DType state, int64_t elements) {
#define MS_OPTIM_ROW(Format)                            \
  if (HasFormat<Format>(state)) {                       \
    constexpr int kInWord = FirstCode<Format>::kInWord; \
    return (elements + kInWord - 1) / kInWord;          \
  }
  MS_OPTIM_FORMATS(MS_OPTIM_ROW)
#undef MS_OPTIM_ROW
  return elements;
}

// Returns the bytes of so many elements of a state.
inline int64_t BytesOfState(DType state, int64_t elements) { return LengthOfState(state, elements) * SizeOf(state); }

// Calls work(code) with the code of state k, whose dtype is one of a format.
template <class Format, class Work>
MS_OPTIM_CALLER void WithCodeOf(DType type, int k, const Work &work) {
  if (k == 0) return work(FirstCode<Format>());
  if (k == 1) return work(SecondCode<Format>());
  if (type == Format::kSigned) return work(typename Format::template Code<true, kThirdState>());
  return work(typename Format::template Code<false, kThirdState>());
}

// Calls work(code) with the code of state k.
template <class Work>
MS_OPTIM_CALLER void WithCode(DType type, int k, const Work &work) {
#define MS_OPTIM_ROW(Format) \
  if (HasFormat<Format>(type)) return WithCodeOf<Format>(type, k, work);
  MS_OPTIM_FORMATS(MS_OPTIM_ROW)
#undef MS_OPTIM_ROW
}

}  // namespace ms_optim
