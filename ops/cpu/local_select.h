// Local steps: the elements of a chunk that are largest in magnitude.
#pragma once

#include <algorithm>

#include "local_lanes.h"

namespace ms_optim {
namespace {

constexpr int kLargestChunk = 1 << 16;
// Elements of an array for a chunk. Vectors may reach past the chunk's end. No two arrays are whole pages apart:
// processors confuse loads and stores that are.
constexpr int kChunkRoom = kLargestChunk + 208;

// Keys have the order of magnitudes, NaN above all.
inline int32_t KeyOf(float x) { return static_cast<int32_t>(BitsOf(x) & 0x7fffffffu); }

inline LanesOf<int32_t> KeysOf(LanesOf<float> x) {
  LanesOf<int32_t> keys;
  memcpy(&keys, &x, sizeof(keys));
  return keys & 0x7fffffff;
}

// Finds the largest elements of one chunk after the other.
//
// Chunks that follow each other are much alike. So elements are first compared with a little less than what the k-th
// largest of the last chunk was, which few reach. What is found does not depend on it.
class LargestElements {
 public:
  // Compares a vector of the chunk to come, from element i on; its caller has it at hand while it waits for memory.
  void Compare(int i, LanesOf<float> x) { Compare(i, x, likely_, kLanes); }

  // Writes the places of the k largest of n elements, in ascending order; of equal ones the first. So many of the first
  // elements were compared.
  void Find(const float *x, int n, int k, int compared, int32_t *places) {
    int count = Reaching(x, n, compared, likely_);
    if (count < k || count > 4 * k) count = Reaching(x, n, 0, ReachedByGroups(x, n, k));
    for (int j = 0; j < count; ++j) keys_[j] = KeyOf(x[candidates_[j]]);
    const int32_t low = ReachedBy(keys_, count, k, k);
    likely_ = std::max(low - kMargin, 0);
    int found = 0;
    for (int j = 0; j < count; j += kLanes) {
      found += Keep(LoadLanes(candidates_ + j), LanesReaching(LoadLanes(keys_ + j), low, count - j), places + found);
    }
    if (found > k) LeaveOutTies(x, low, found, k, places);
  }

 private:
  static constexpr int kOfGroup = 16;
  static constexpr int32_t kMargin = 1 << 19;  // 3 to 6 percent of a number

  void Compare(int i, LanesOf<float> x, int32_t bound, int count) {
    reach_[i / kLanes] = static_cast<uint16_t>(LanesReaching(KeysOf(x), bound, count));
  }

  // Finds the elements that reach a bound, in ascending order, and returns how many these are.
  int Reaching(const float *x, int n, int compared, int32_t bound) {
    constexpr int kOfWord = 64, kUsual = 4;
    for (int i = compared; i < n; i += kLanes) Compare(i, LoadLanes(x + i), bound, n - i);
    std::fill_n(reach_ + (n + kLanes - 1) / kLanes, kOfWord / kLanes, uint16_t{0});
    int count = 0;
    for (int i = 0; i < n; i += kOfWord) {
      uint64_t reach = 0;
      for (int part = 0; part < kOfWord; part += kLanes) reach |= uint64_t{reach_[(i + part) / kLanes]} << part;
      int32_t *to = candidates_ + count;
      count += __builtin_popcountll(reach);
      // The first ones without a branch, which a processor could not predict.
      for (int k = 0; k < kUsual; ++k, reach &= reach - 1) *to++ = i + __builtin_ctzll(reach | uint64_t{1} << 63);
      for (; reach != 0; reach &= reach - 1) *to++ = i + __builtin_ctzll(reach);
    }
    return count;
  }

  // Returns a bound that at least k elements reach, and few more. At least k elements reach the k-th largest of the
  // maxima of groups. An element is in the group of those that are as far into each row of the chunk.
  int32_t ReachedByGroups(const float *x, int n, int k) {
    const int groups = n / kOfGroup;
    if (k > groups / 2) return 0;
    for (int g = 0; g < groups; g += kLanes) {  // lanes past the row's end are of groups that nobody reads
      LanesOf<int32_t> most = KeysOf(LoadLanes(x + g));
      for (int row = 1; row < kOfGroup; ++row) {
        const LanesOf<int32_t> keys = KeysOf(LoadLanes(x + row * groups + g));
        most = keys > most ? keys : most;
      }
      StoreLanes(most, keys_ + g);
    }
    return ReachedBy(keys_, groups, k, k + k / 4);
  }

  // Returns a bound that at least k of n keys reach, and no more than `most` unless there are equal ones.
  static int32_t ReachedBy(const int32_t *keys, int n, int k, int most) {
    int32_t smallest = keys[0], largest = keys[0];
    for (int i = 1; i < n; ++i) {
      smallest = std::min(smallest, keys[i]);
      largest = std::max(largest, keys[i]);
    }
    int64_t low = smallest, high = int64_t{largest} + 1;  // at least k keys reach low, and fewer reach high
    while (high - low > 1) {
      const auto middle = static_cast<int32_t>(low + (high - low) / 2);
      int reach = 0;
      for (int i = 0; i < n; ++i) reach += keys[i] >= middle;
      (reach >= k ? low : high) = middle;
      if (reach >= k && reach <= most) break;
    }
    return static_cast<int32_t>(low);
  }

  // Returns which of the first lanes reach a bound, a bit each.
  static uint32_t LanesReaching(LanesOf<int32_t> keys, int32_t bound, int count) {
    const uint32_t first = count < kLanes ? (1u << count) - 1u : (1u << kLanes) - 1u;
#if defined(__AVX512F__)
    return first & _mm512_cmpge_epi32_mask(reinterpret_cast<__m512i>(keys), _mm512_set1_epi32(bound));
#else
    const auto reach = keys >= bound;
    int32_t any = 0;
    for (int k = 0; k < kLanes; ++k) any |= reach[k];
    if (any == 0) return 0;
    uint32_t lanes = 0;
    for (int k = 0; k < kLanes; ++k) lanes |= reach[k] != 0 ? 1u << k : 0u;
    return first & lanes;
#endif
  }

  // Writes the chosen lanes one behind the other, and returns how many there are. It may write a whole vector.
  static int Keep(LanesOf<int32_t> lanes, uint32_t chosen, int32_t *to) {
#if defined(__AVX512F__)
    const auto mask = static_cast<__mmask16>(chosen);
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(mask, reinterpret_cast<__m512i>(lanes)));
#else
    for (uint32_t left = chosen; left != 0; left &= left - 1) *to++ = lanes[__builtin_ctz(left)];
#endif
    return __builtin_popcount(chosen);
  }

  // Of the elements with the lowest key, as many stay as make k of all.
  static void LeaveOutTies(const float *x, int32_t low, int found, int k, int32_t *places) {
    int ties = k, kept = 0;
    for (int j = 0; j < found; ++j) ties -= KeyOf(x[places[j]]) > low;
    for (int j = 0; kept < k; ++j) {
      const bool equals = KeyOf(x[places[j]]) == low;
      places[kept] = places[j];
      kept += !equals || ties > 0;
      ties -= equals;
    }
  }

  int32_t likely_ = 0;
  int32_t keys_[kChunkRoom], candidates_[kChunkRoom];
  uint16_t reach_[kChunkRoom / kLanes];  // a bit for each element that reaches the bound
};

}  // namespace
}  // namespace ms_optim
