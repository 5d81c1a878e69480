// Local steps: how a chunk is written to a wire and read from it, 16 values at a time.
//
// Arrays of values have room for whole vectors, and those that are written to a wire end with zeros.
#pragma once

#include "local_select.h"

namespace ms_optim {
namespace {

// ---- Values ---------------------------------------------------------------------------------------------------------
//
// Each kind has scales before the values of a chunk. It chooses these (Choose, PutHead) or reads them (ReadHead), and
// with them writes 16 values to 2 * kBits bytes, and reads them.

inline LanesOf<float> Magnitudes(LanesOf<float> x) {
  const auto bits = reinterpret_cast<LanesOf<int32_t>>(x) & 0x7fffffff;
  return reinterpret_cast<LanesOf<float>>(bits);
}

// The values themselves, in float32 or in float16.
template <int bits>
struct PlainValues {
  static constexpr int kBits = bits;

  void Choose(const float *, int) {}
  void PutHead(uint8_t *) const {}
  void ReadHead(const uint8_t *) {}

  void Write(LanesOf<float> x, uint8_t *to) const {
    if (kBits == 32) {
      memcpy(to, &x, sizeof(x));
      return;
    }
    float16 halves[kLanes];
    for (int k = 0; k < kLanes; ++k) HalfOf(x[k], halves + k);
    memcpy(to, halves, sizeof(halves));
  }

  LanesOf<float> Read(const uint8_t *from) const {
    LanesOf<float> x;
    if (kBits == 32) {
      memcpy(&x, from, sizeof(x));
      return x;
    }
    float16 halves[kLanes];
    memcpy(halves, from, sizeof(halves));
    for (int k = 0; k < kLanes; ++k) x[k] = ToFloat(halves[k]);
    return x;
  }
};

// Multiples of a scale; the largest magnitude is kLevels times the scale.
template <int bits>
struct Levels {
  static constexpr int kBits = bits, kLevels = (1 << (bits - 1)) - 1;
  float scale;
  bool usable;

  void Choose(const float *x, int n) {
    int32_t largest = 0;
    for (int i = 0; i < n; ++i) largest = std::max(largest, KeyOf(x[i]));
    scale = FromBits(static_cast<uint32_t>(largest)) / static_cast<float>(kLevels);
    usable = scale > 0.0f && largest < 0x7f800000;
  }
  void PutHead(uint8_t *head) const { memcpy(head, &scale, sizeof(scale)); }
  void ReadHead(const uint8_t *head) { memcpy(&scale, head, sizeof(scale)); }

  void Write(LanesOf<float> x, uint8_t *to) const {
    // Adding this rounds a number of at most 2^22 to nearest, ties to even: the sum has no bits for a fraction.
    constexpr float kShift = 12582912.0f;
    const LanesOf<float> levels = usable ? x / scale + kShift - kShift : LanesOf<float>{};
    const auto stored = __builtin_convertvector(levels, LanesOf<int32_t>) + (kLevels + 1);
    int32_t numbers[kLanes];
    memcpy(numbers, &stored, sizeof(numbers));
    if (kBits == 8) {
      Narrow(numbers, to);
    } else {
      NarrowNibbles(numbers, to);
    }
  }

  LanesOf<float> Read(const uint8_t *from) const {
    int32_t numbers[kLanes];
    if (kBits == 8) {
      Widen(from, numbers);
    } else {
      WidenNibbles<uint8_t>(from, numbers);
    }
    return scale * __builtin_convertvector(LoadLanes(numbers) - (kLevels + 1), LanesOf<float>);
  }
};

// A sign and one of two magnitudes: the mean of the magnitudes up to the mean of all, and the mean of the others.
struct TwoMagnitudes {
  static constexpr int kBits = 2;
  float mean;        // of all
  float16 means[2];  // of the small ones and of the large ones
  float small, large;

  void Choose(const float *x, int n) {
    LanesOf<double> sum = {}, below = {};
    for (int i = 0; i < n; i += kLanes) sum += Wide(Magnitudes(LoadLanes(x + i)));
    const double of_all = Sum(sum);
    mean = static_cast<float>(of_all / n);
    LanesOf<int32_t> count = {};
    for (int i = 0; i < n; i += kLanes) {
      const LanesOf<float> magnitude = Magnitudes(LoadLanes(x + i));
      const LanesOf<int32_t> above = magnitude > mean;  // -1 where it is
      below += Wide(reinterpret_cast<LanesOf<float>>(reinterpret_cast<LanesOf<int32_t>>(magnitude) & ~above));
      count -= above;
    }
    int above = 0;
    for (int k = 0; k < kLanes; ++k) above += count[k];
    const double of_small = Sum(below);
    HalfOf(static_cast<float>(of_small / std::max(n - above, 1)), &means[0]);
    HalfOf(static_cast<float>((of_all - of_small) / std::max(above, 1)), &means[1]);
  }
  void PutHead(uint8_t *head) const { memcpy(head, means, sizeof(means)); }
  void ReadHead(const uint8_t *head) {
    memcpy(means, head, sizeof(means));
    small = ToFloat(means[0]);
    large = ToFloat(means[1]);
  }

  void Write(LanesOf<float> x, uint8_t *to) const {
    const LanesOf<int32_t> is_negative = reinterpret_cast<LanesOf<int32_t>>(x)<0, is_large = Magnitudes(x)> mean;
    const LanesOf<int32_t> codes = (is_negative & 2) | (is_large & 1);
    int32_t numbers[kLanes];
    memcpy(numbers, &codes, sizeof(numbers));
    uint8_t one_a_byte[kLanes];
    Narrow(numbers, one_a_byte);
    typedef uint32_t FourBytes __attribute__((vector_size(kLanes)));
    FourBytes four;
    memcpy(&four, one_a_byte, sizeof(four));
    four |= four >> 6;
    four |= four >> 12;
    for (int k = 0; k < 4; ++k) to[k] = static_cast<uint8_t>(four[k]);
  }

  LanesOf<float> Read(const uint8_t *from) const {
    uint32_t packed;
    memcpy(&packed, from, sizeof(packed));
    LanesOf<uint32_t> shifts = {};
    for (int k = 0; k < kLanes; ++k) shifts[k] = 2 * static_cast<uint32_t>(k);
    const LanesOf<uint32_t> codes = (LanesOf<uint32_t>{} + packed) >> shifts, is_large = -(codes & 1u);
    const LanesOf<uint32_t> magnitudes = (BitsOf(large) & is_large) | (BitsOf(small) & ~is_large);
    return reinterpret_cast<LanesOf<float>>(magnitudes | (codes & 2u) << 30);
  }

 private:
  static LanesOf<double> Wide(LanesOf<float> x) { return __builtin_convertvector(x, LanesOf<double>); }
  static double Sum(const LanesOf<double> &lanes) {
    double sums[kLanes];
    memcpy(sums, &lanes, sizeof(sums));
    for (int half = kLanes / 2; half > 0; half /= 2) {
      for (int k = 0; k < half; ++k) sums[k] += sums[k + half];
    }
    return sums[0];
  }
};

// Calls work(values) with the values of a number of bits.
template <class Work>
MS_OPTIM_FN void WithValues(int bits, const Work &work) {
  if (bits == 2) work(TwoMagnitudes());
  if (bits == 4) work(Levels<4>());
  if (bits == 8) work(Levels<8>());
  if (bits == 16) work(PlainValues<16>());
  if (bits == 32) work(PlainValues<32>());
}

inline void PutValues(const ChunkCode &code, const float *chosen, uint8_t *wire) {
  WithValues(code.value_bits, [&](auto values) {
    constexpr int kBytes = 2 * decltype(values)::kBits;
    values.Choose(chosen, code.sent);
    values.PutHead(wire);
    uint8_t *to = wire + code.values;
    int j = 0;
    for (; j + kLanes <= code.sent; j += kLanes, to += kBytes) values.Write(LoadLanes(chosen + j), to);
    if (j == code.sent) return;
    const int rest = (code.sent - j) * values.kBits;
    uint8_t last[kBytes];
    values.Write(LoadLanes(chosen + j), last);
    if (rest % 8 != 0) last[rest / 8] = static_cast<uint8_t>(last[rest / 8] & ((1 << rest % 8) - 1));
    memcpy(to, last, static_cast<size_t>((rest + 7) / 8));
  });
}

// Reads up to 16 values, and no byte after them.
template <class Values>
MS_OPTIM_FN LanesOf<float> ReadSome(const Values &values, const uint8_t *from, int count) {
  count = std::min(count, kLanes);
  uint8_t bytes[2 * Values::kBits] = {};
  memcpy(bytes, from, static_cast<size_t>((count * Values::kBits + 7) / 8));
  LanesOf<float> some = values.Read(bytes);
  for (int k = count; k < kLanes; ++k) some[k] = 0.0f;
  return some;
}

// Calls use(j, values) with the values from `begin`, a multiple of 16, to `end` that a worker sent of a chunk: 16 at a
// time, j counted from `begin`, with zeros after the last one. Calls come in pairs, so that compilers know j modulo 32
// and sums in lanes stay in registers.
template <class Use>
MS_OPTIM_FN void ReadValues(const ChunkCode &code, const uint8_t *wire, int begin, int end, const Use &use) {
  WithValues(code.value_bits, [&](auto values) {
    constexpr int kBytes = 2 * decltype(values)::kBits;
    values.ReadHead(wire);
    const uint8_t *from = wire + code.values + begin / kLanes * kBytes;
    const int n = end - begin;
    int j = 0;
    for (; j + 2 * kLanes <= n; j += 2 * kLanes, from += 2 * kBytes) {
      use(j, values.Read(from));
      use(j + kLanes, values.Read(from + kBytes));
    }
    if (j < n) use(j, ReadSome(values, from, n - j));
    if (j + kLanes < n) use(j + kLanes, ReadSome(values, from + kBytes, n - j - kLanes));
  });
}

// ---- Indices -------------------------------------------------------------------------------------------------------

// Writes an integer, or as many of its bytes as there are before the end.
inline void WriteBefore(const uint8_t *end, uint64_t bits, uint8_t *to) {
  if (end - to >= static_cast<int>(sizeof(bits))) {
    memcpy(to, &bits, sizeof(bits));
  } else {
    memcpy(to, &bits, static_cast<size_t>(end - to));
  }
}

// Writes the indices of a chunk to a wire of zeros.
inline void PutIndices(const ChunkCode &code, const int32_t *indices, uint8_t *wire) {
  uint8_t *low = wire + code.low, *high = wire + code.high, *end = wire + code.bytes;
  const uint32_t mask = (1u << code.low_bits) - 1u;
  constexpr int kWritten = 32;  // bits of a write
  uint64_t bits = 0, flags = 0;
  int count = 0;
  uint32_t word = 0;
  for (int j = 0; j < code.sent; ++j) {
    const auto index = static_cast<uint32_t>(indices[j]);
    bits |= uint64_t{index & mask} << count;
    count += code.low_bits;
    if (count >= kWritten) {
      memcpy(low, &bits, kWritten / 8);
      low += kWritten / 8;
      bits >>= kWritten;
      count -= kWritten;
    }
    const uint32_t at = static_cast<uint32_t>(j) + (index >> code.low_bits);
    if (at / 64 != word) {
      WriteBefore(end, flags, high + 8 * word);
      word = at / 64;
      flags = 0;
    }
    flags |= uint64_t{1} << at % 64;
  }
  memcpy(low, &bits, static_cast<size_t>((count + 7) / 8));
  WriteBefore(end, flags, high + 8 * word);
}

// Reads an integer; bytes after the end are 0.
template <class T>
T ReadBefore(const uint8_t *end, const uint8_t *from) {
  T bits = 0;
  if (end - from >= static_cast<int>(sizeof(bits))) {
    memcpy(&bits, from, sizeof(bits));
  } else {
    memcpy(&bits, from, static_cast<size_t>(end - from));
  }
  return bits;
}

// Reads the indices of a chunk. An index beyond the chunk is read as 0. The high bits come first: each step is short,
// and the processor overlaps many.
inline void ReadIndices(const ChunkCode &code, const uint8_t *wire, int32_t *indices) {
  const uint8_t *low = wire + code.low, *high = wire + code.high, *end = wire + code.bytes;
  int j = 0;
  for (int byte = 0; byte < end - high; byte += 8) {
    auto flags = ReadBefore<uint64_t>(end, high + byte);
    const int last = std::min(j + __builtin_popcountll(flags), code.sent);
    for (; j < last; ++j, flags &= flags - 1) {
      const auto step = static_cast<uint32_t>(8 * byte + __builtin_ctzll(flags) - j);
      indices[j] = static_cast<int32_t>(step << code.low_bits);
    }
  }
  for (; j < code.sent; ++j) indices[j] = code.elements;
  const uint32_t mask = (1u << code.low_bits) - 1u;
  const auto add_low = [&](const auto &read) {
    for (int k = 0, at = 0; k < code.sent; ++k, at += code.low_bits) {
      const uint32_t index = static_cast<uint32_t>(indices[k]) | (read(low + at / 8) >> at % 8 & mask);
      indices[k] = index < static_cast<uint32_t>(code.elements) ? static_cast<int32_t>(index) : 0;
    }
  };
  // A read of 32 bits stays within the wire if at least 32 bits follow the low bits.
  if (end - high >= static_cast<int>(sizeof(uint32_t))) {
    add_low([](const uint8_t *from) {
      uint32_t bits;
      memcpy(&bits, from, sizeof(bits));
      return bits;
    });
  } else {
    add_low([=](const uint8_t *from) { return ReadBefore<uint32_t>(end, from); });
  }
}

}  // namespace
}  // namespace ms_optim
