// The least time in which threads pass over float32 arrays: a loop that does nothing else. streams.py compiles it.
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = 16;

// Stores past the caches, where the processor can, so that what is there is not read first.
inline void StoreOnce(const float *lanes, float *to) {
#if defined(__SSE2__)
  for (int k = 0; k < kLanes; k += 4) _mm_stream_ps(to + k, _mm_loadu_ps(lanes + k));
#else
  for (int k = 0; k < kLanes; ++k) to[k] = lanes[k];
#endif
}

// The arrays that are read come first, then those that are read and written, then one that is written alone.
template <int read, int updated, bool writes>
float Pass(float *const *arrays, long n) {
  float total = 0.0f;
#pragma omp parallel reduction(+ : total)
  {
    float sums[kLanes] = {};
#pragma omp for schedule(static)
    for (long i = 0; i < n; i += kLanes) {
      float lanes[kLanes] = {};
      for (int a = 0; a < read; ++a) {
        for (int k = 0; k < kLanes; ++k) lanes[k] += arrays[a][i + k];
      }
      for (int a = read; a < read + updated; ++a) {
        float *to = arrays[a] + i;
        for (int k = 0; k < kLanes; ++k) to[k] = 0.5f * to[k] + lanes[k];
      }
      if (writes) StoreOnce(lanes, arrays[read + updated] + i);
      for (int k = 0; k < kLanes; ++k) sums[k] += lanes[k];
    }
    for (int k = 0; k < kLanes; ++k) total += sums[k];
  }
  return total;
}

}  // namespace

// Of n elements, a multiple of 16, of arrays at addresses that are multiples of 16 bytes.
extern "C" float pass(float *const *arrays, int read, int updated, int writes, long n) {
  if (read == 2 && updated == 0 && writes) return Pass<2, 0, true>(arrays, n);
  if (read == 2 && updated == 0) return Pass<2, 0, false>(arrays, n);
  if (read == 3 && updated == 0) return Pass<3, 0, false>(arrays, n);
  if (read == 1 && updated == 0) return Pass<1, 0, false>(arrays, n);
  if (read == 1 && updated == 1) return Pass<1, 1, false>(arrays, n);
  if (read == 1 && updated == 2) return Pass<1, 2, false>(arrays, n);
  if (read == 1 && updated == 3) return Pass<1, 3, false>(arrays, n);
  if (read == 0 && updated == 3) return Pass<0, 3, false>(arrays, n);
  return -1.0f;
}
