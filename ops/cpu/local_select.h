// Local steps: the elements of a chunk that are largest in magnitude.
#pragma once

#include <algorithm>

#include "local_lanes.h"

namespace ms_optim {
namespace {

constexpr int kLargestChunk = 1 << 16;
// The elements of an array for a chunk. Vectors may reach past the end of the chunk. No two arrays are whole pages
// apart: processors take loads and stores at such a distance for the same address.
constexpr int kChunkRoom = kLargestChunk + 208;

// Returns the key of a number. Keys have the order of magnitudes, with NaN above all.
inline int32_t KeyOf(float x) { return static_cast<int32_t>(BitsOf(x) & 0x7fffffffu); }

inline LanesOf<int32_t> KeysOf(LanesOf<float> x) {
  LanesOf<int32_t> keys;
  memcpy(&keys, &x, sizeof(keys));
  return keys & 0x7fffffff;
}

// Returns a bit for each lane, which is set if the lane reaches a bound.
inline uint32_t LanesReaching(LanesOf<int32_t> keys, int32_t bound) {
#if defined(__AVX512F__)
  return _mm512_cmpge_epi32_mask(reinterpret_cast<__m512i>(keys), _mm512_set1_epi32(bound));
#else
  const auto reach = keys >= bound;
  int32_t any = 0;
  for (int k = 0; k < kLanes; ++k) any |= reach[k];
  if (any == 0) return 0;
  uint32_t lanes = 0;
  for (int k = 0; k < kLanes; ++k) lanes |= reach[k] != 0 ? 1u << k : 0u;
  return lanes;
#endif
}

// Writes the chosen lanes one behind the other. It may write a whole vector.
template <class Vector, class T>
void KeepLanes(const Vector &lanes, uint32_t chosen, T *to) {
#if defined(__AVX512F__)
  const auto compressed = _mm512_maskz_compress_epi32(static_cast<__mmask16>(chosen), reinterpret_cast<__m512i>(lanes));
  _mm512_storeu_si512(to, compressed);
#else
  for (uint32_t left = chosen; left != 0; left &= left - 1) *to++ = lanes[__builtin_ctz(left)];
#endif
}

// The elements of a chunk whose keys reach a bound, and their indices, one after the other.
struct Candidates {
  int32_t bound = 0, *indices = nullptr;
  float *values = nullptr;
  int count = 0;
  LanesOf<int32_t> lanes = {};  // numbers of a vector's lanes

  Candidates() = default;
  Candidates(int32_t least, int32_t *to_indices, float *to_values)
      : bound(least), indices(to_indices), values(to_values) {
    for (int k = 0; k < kLanes; ++k) lanes[k] = k;
  }

  // Adds the elements of a vector, or a single element, that reach the bound; the first is element i of the chunk. With
  // AVX-512 there is no branch, which a processor could not predict. A whole vector may be written after the last
  // element.
  MS_OPTIM_FN void Add(int i, LanesOf<float> x) {
    const uint32_t chosen = LanesReaching(KeysOf(x), bound);
    KeepLanes(lanes + i, chosen, indices + count);
    KeepLanes(x, chosen, values + count);
    count += __builtin_popcount(chosen);
  }
  void Add(int i, float x) {
    indices[count] = i;
    values[count] = x;
    count += KeyOf(x) >= bound;
  }
};

// Finds the largest elements of one chunk after the other.
//
// Adjacent chunks are much alike. So the first candidates are all elements that reach a little less than the k-th
// largest of the last chunk: they are few, and a loop that waits for memory can collect them. The result does not
// depend on this.
class LargestElements {
 public:
  // Returns empty candidates for the next chunk. The caller adds all its elements, in their order. There is room for
  // several chunks, together no longer than the largest one, after the candidates that are in use.
  Candidates None(int in_use) { return {likely_, indices_ + in_use, values_ + in_use}; }

  // Writes the k largest of a chunk's n elements and their indices, which ascend; of equal ones the first. `fill`
  // writes all n elements to an array with room for whole vectors.
  template <class Fill>
  void Find(Candidates of_chunk, int n, int k, const Fill &fill, float *values, int32_t *indices) {
    if (of_chunk.count < k || of_chunk.count > 4 * k) of_chunk = OfGroups(n, k, fill);
    const int count = of_chunk.count;
    for (int j = 0; j < count; j += kLanes) StoreLanes(KeysOf(LoadLanes(of_chunk.values + j)), keys_ + j);
    const int32_t low = ReachedBy(count, k, k, of_chunk.bound);
    likely_ = std::max(low - kMargin, 0);
    int reaching = 0;
    for (int j = 0; j < count; j += kLanes) {
      const uint32_t chosen = LanesReaching(LoadLanes(keys_ + j), low);
      KeepLanes(LoadLanes(of_chunk.indices + j), chosen, indices + reaching);
      KeepLanes(LoadLanes(of_chunk.values + j), chosen, values + reaching);
      reaching += __builtin_popcount(chosen);
    }
    if (reaching > k) LeaveOutTies(low, reaching, k, values, indices);
  }

 private:
  static constexpr int kOfGroup = 16;
  static constexpr int32_t kMargin = 1 << 19;  // 3 to 6 percent of a number

  template <class Fill>
  Candidates OfGroups(int n, int k, const Fill &fill) {
    fill(x_);
    Candidates candidates(ReachedByGroups(n, k), group_indices_, group_values_);
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) candidates.Add(i, LoadLanes(x_ + i));
    for (; i < n; ++i) candidates.Add(i, x_[i]);
    return candidates;
  }

  // Returns a bound that at least k elements reach, and few more. At least k elements reach the k-th largest of the
  // maxima of groups. A group is a column of the chunk's rows.
  int32_t ReachedByGroups(int n, int k) {
    const int groups = n / kOfGroup;
    if (k > groups / 2) return 0;
    for (int g = 0; g < groups; g += kLanes) {  // lanes past the row's end belong to groups that nobody reads
      LanesOf<int32_t> most = KeysOf(LoadLanes(x_ + g));
      for (int row = 1; row < kOfGroup; ++row) {
        const LanesOf<int32_t> keys = KeysOf(LoadLanes(x_ + row * groups + g));
        most = keys > most ? keys : most;
      }
      StoreLanes(most, keys_ + g);
    }
    return ReachedBy(groups, k, k + k / 4, 0);
  }

  int32_t Largest(int n) const {
    LanesOf<int32_t> most = LoadLanes(keys_);
    for (int i = kLanes; i < n; i += kLanes) {
      const LanesOf<int32_t> keys = LoadLanes(keys_ + i);
      most = keys > most ? keys : most;
    }
    int32_t largest = most[0];
    for (int l = 1; l < kLanes; ++l) largest = std::max(largest, most[l]);
    return largest;
  }

  // Returns a bound that at least k of the first n keys reach, and no more than `most` unless there are equal ones. All
  // keys reach `low`. A vector of keys behind them becomes -1, which no bound is, so that whole vectors are compared.
  int32_t ReachedBy(int n, int k, int most, int64_t low) {
    std::fill_n(keys_ + n, kLanes, -1);
    int64_t high = int64_t{Largest(n)} + 1;  // fewer than k keys reach it
    while (high - low > 1) {
      const auto middle = static_cast<int32_t>(low + (high - low) / 2);
      int reach = 0;
      for (int i = 0; i < n; i += kLanes) reach += __builtin_popcount(LanesReaching(LoadLanes(keys_ + i), middle));
      (reach >= k ? low : high) = middle;
      if (reach >= k && reach <= most) break;
    }
    return static_cast<int32_t>(low);
  }

  // Removes the last of the elements with the lowest key, so that k elements are left.
  static void LeaveOutTies(int32_t low, int count, int k, float *values, int32_t *indices) {
    int ties = k, next = 0;
    for (int j = 0; j < count; ++j) ties -= KeyOf(values[j]) > low;
    for (int j = 0; next < k; ++j) {
      const bool equals = KeyOf(values[j]) == low;
      indices[next] = indices[j];
      values[next] = values[j];
      next += !equals || ties > 0;
      ties -= equals;
    }
  }

  int32_t likely_ = 0;
  float values_[kChunkRoom], x_[kChunkRoom], group_values_[kChunkRoom];
  int32_t indices_[kChunkRoom], keys_[kChunkRoom], group_indices_[kChunkRoom];
};

}  // namespace
}  // namespace ms_optim
