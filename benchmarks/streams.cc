// The least time in which threads pass over float32 arrays: a loop that does nothing else. streams.py compiles it.
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = 16;
constexpr long kChunk = 32768;

typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));

// Arrays begin at multiples of 16 bytes alone.
inline Lanes Load(const float *from) {
  Lanes lanes;
  __builtin_memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

inline void Store(const Lanes &lanes, float *to) { __builtin_memcpy(to, &lanes, sizeof lanes); }

// Stores past the caches, where the processor can, so that what is there is not read first.
inline void StoreOnce(const Lanes &lanes, float *to) {
#if defined(__SSE2__)
  const auto *from = reinterpret_cast<const float *>(&lanes);
  for (int k = 0; k < kLanes; k += 4) _mm_stream_ps(to + k, _mm_loadu_ps(from + k));
#else
  Store(lanes, to);
#endif
}

// The arrays that are read come first, then those that are read and written, then one that is written alone. Threads
// take chunks as they come free. A pass that goes backwards finds in the caches what the one before it read last.
template <int read, int updated, bool writes>
float Pass(float *const *arrays, long n, bool backwards) {
  float total = 0.0f;
  const long chunks = (n + kChunk - 1) / kChunk;
#pragma omp parallel for schedule(dynamic) reduction(+ : total)
  for (long chunk = 0; chunk < chunks; ++chunk) {
    const long begin = kChunk * (backwards ? chunks - 1 - chunk : chunk), end = begin + kChunk < n ? begin + kChunk : n;
    float *own[read + updated + writes];
    for (int a = 0; a < read + updated + writes; ++a) own[a] = arrays[a];
    Lanes sums = {};
    for (long i = begin; i < end; i += kLanes) {
      Lanes lanes = {};
      for (int a = 0; a < read; ++a) lanes += Load(own[a] + i);
      for (int a = read; a < read + updated; ++a) Store(0.5f * Load(own[a] + i) + lanes, own[a] + i);
      if (writes) StoreOnce(lanes, own[read + updated] + i);
      sums += lanes;
    }
    for (int k = 0; k < kLanes; ++k) total += sums[k];
  }
  return total;
}

}  // namespace

// Of n elements, a multiple of 16, of arrays at multiples of 16 bytes.
extern "C" float pass(float *const *arrays, int read, int updated, int writes, long n, int backwards) {
  const auto run = [&](auto pass) { return pass(arrays, n, backwards != 0); };
  if (read == 2 && updated == 0 && writes) return run(Pass<2, 0, true>);
  if (read == 2 && updated == 0) return run(Pass<2, 0, false>);
  if (read == 3 && updated == 0) return run(Pass<3, 0, false>);
  if (read == 1 && updated == 0) return run(Pass<1, 0, false>);
  if (read == 1 && updated == 1) return run(Pass<1, 1, false>);
  if (read == 1 && updated == 2) return run(Pass<1, 2, false>);
  if (read == 1 && updated == 3) return run(Pass<1, 3, false>);
  if (read == 0 && updated == 3) return run(Pass<0, 3, false>);
  return -1.0f;
}
