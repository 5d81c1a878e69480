// The loop of a rule over the elements of tiles, with the sums that a step needs.
#pragma once

#include <cstring>

#include "decision.h"
#include "storage.h"

namespace ms_optim {
namespace {

// The float32 numbers of a cache line.
constexpr int kLine = 64 / static_cast<int>(sizeof(float));
static_assert(kLine == kLanes, "the vector at the end of a tile has one element of each lane");

// Sums of a tile, in lanes. The loop of the rule adds them up: a loop of their own would take as long as the rule.
template <class Rule>
struct TileSums {
  static constexpr int kCount = Rule::kDirections < 2 ? kDirectionSum + 1 : kSums;
  alignas(64) float lane[kCount][kLanes];

  MS_OPTIM_FN TileSums() {
    // A constructor of zeros becomes an instruction that repeats stores, which takes as long as three vectors.
    const Lanes::Vector zeros = {};
    for (int k = 0; k < kCount; ++k) {
      for (int i = 0; i < kLanes; i += Lanes::kWidth) memcpy(lane[k] + i, &zeros, sizeof(zeros));
    }
  }

  // Lane 0 is at place `first`.
  MS_OPTIM_FN double Total(enum Sum sum, int first = 0) const {
    if (first == 0) return SumOfLanes(lane[sum]);
    float twice[2 * kLanes];
    memcpy(twice, lane[sum], sizeof(lane[sum]));
    memcpy(twice + kLanes, lane[sum], sizeof(lane[sum]));
    return SumOfLanes(twice + first);
  }
};

// Adds what a loop has read to sums, before the loop stores new states and weights. After that, compilers would read it
// once more, and wait for the stores: large tensors begin at the same place of a page, and a processor takes addresses
// with the same last twelve bits for the same one until the store is done.
template <class Rule>
MS_OPTIM_FN void AddGiven(float w, float g, int lane, TileSums<Rule> &sums) {
  sums.lane[kGradientSum][lane] += g * g;
  sums.lane[kWeightSum][lane] += w * w;
}

template <class Rule>
MS_OPTIM_FN void AddDirections(const float *d, int lane, TileSums<Rule> &sums) {
  sums.lane[kDirectionSum][lane] += d[0] * d[0];
  if constexpr (Rule::kDirections > 1) {
    sums.lane[kDirection2Sum][lane] += d[1] * d[1];
    sums.lane[kDirectionsDot][lane] += d[0] * d[1];
  }
}

// Returns the move of a weight along its directions.
template <int kDirections>
MS_OPTIM_FN float Moved(const Decision &p, float d0, float d1) {
  return kDirections == 1 ? p.coefficient[0] * d0 : p.coefficient[0] * d0 + p.coefficient[1] * d1;
}

// The work of a loop over a tile: it makes new states from the gradient, which it may drop, adds up sums, and moves
// weights, along directions and maybe along themselves. It may drop the directions, too: they are needed again only
// where float32 has lost a sum of their squares, and storing them takes a twentieth of the time.
enum RulePart : unsigned {
  kNewStates = 1,
  kSumUp = 2,
  kMoveWeights = 4,
  kDropStates = 8,
  kAlongWeights = 16,
  kDropDirections = 32
};

// Whether the directions of a tile can be made again from its new states.
template <class Rule>
constexpr bool kDirectsAgain = !Rule::kDirectsFirst && !Rule::kStartsAtWeights;

// Selects the first lanes of a vector: those from kLanes - count on are `count` masks of ones, then of zeros.
struct LaneMasks {
  alignas(64) uint32_t bits[2 * kLanes];
  constexpr LaneMasks() : bits() {
    for (int i = 0; i < kLanes; ++i) bits[i] = ~0u;
  }
  MS_OPTIM_FN const uint32_t *First(int count) const { return bits + kLanes - count; }
};
constexpr LaneMasks lane_masks;

// Adds the first lanes to the sums of a tile, and begins those of the next one with the others.
template <class Rule>
MS_OPTIM_FN void Divide(const TileSums<Rule> &both, int count, TileSums<Rule> &tile, TileSums<Rule> &next) {
  const uint32_t *mine = lane_masks.First(count);
  for (int k = 0; k < TileSums<Rule>::kCount; ++k) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint32_t bits = BitsOf(both.lane[k][lane]);
      tile.lane[k][lane] += FromBits(bits & mine[lane]);
      next.lane[k][lane] = FromBits(bits & ~mine[lane]);
    }
  }
}

// Keeps a compiler from vectorizing a loop over a few elements, which would make the library a fifth larger.
MS_OPTIM_FN void KeepScalar() { asm volatile(""); }

// Completes what has been stored through restricted pointers, for functions that read it through others.
MS_OPTIM_FN void CompleteStores() { asm volatile("" ::: "memory"); }

// What a loop over tiles calls after each: a reference to it, so that the loop is compiled once.
template <class Rule>
class AfterTile {
 public:
  template <class Body>
  MS_OPTIM_FN AfterTile(const Body &body)
      : body_(&body), call_([](const void *of, int tile, int end, const TileSums<Rule> &sums) {
          (*static_cast<const Body *>(of))(tile, end, sums);
        }) {}
  MS_OPTIM_FN void operator()(int tile, int end, const TileSums<Rule> &sums) const { call_(body_, tile, end, sums); }

 private:
  const void *body_;
  void (*call_)(const void *, int, int, const TileSums<Rule> &);
};

// The loops of RuleTile and, by lines, of RuleTiles.
template <class Rule, unsigned kParts, bool kByLines>
void RuleLoop(const Rule &rule, const Decision &decision, int ahead, int n, float *__restrict w,
              const float *__restrict g, float *const *s, float (*__restrict d)[kTile], float *__restrict before,
              TileSums<Rule> &total, const AfterTile<Rule> *done) {
  constexpr bool kAdds = (kParts & kSumUp) != 0, kMoves = (kParts & kMoveWeights) != 0;
  constexpr bool kStores = (kParts & kNewStates) != 0 && (kParts & kDropStates) == 0;
  constexpr bool kDirects = (kParts & kDropDirections) == 0 && (kAdds || !kMoves);
  const Rule r = rule;
  const Decision p = decision;
  // A rule has one to three states, and the loop names each: compilers do not vectorize a loop over them. A pointer to
  // a state that the rule lacks is a copy of another pointer, against the promise of __restrict, but the constants
  // kSecond and kThird keep the loop from using it.
  constexpr bool kSecond = Rule::kStates > 1, kThird = Rule::kStates > 2;
  float *__restrict s0 = s[0], *__restrict s1 = s[kSecond ? 1 : 0], *__restrict s2 = s[Rule::kStates - 1];
  float *__restrict d0 = d[0], *__restrict d1 = d[1];
  int tile = 0;
  const auto element = [&](int i, int lane, TileSums<Rule> &sums) __attribute__((always_inline)) {
    float state[] = {s0[i], kSecond ? s1[i] : 0.0f, kThird ? s2[i] : 0.0f}, direction[kMaxDirections];
    if (kAdds) AddGiven<Rule>(w[i], g[i], lane, sums);
    Advance<Rule, (kParts & kNewStates) != 0>(r, p, w[i], g[i], state, direction);
    if (kAdds) AddDirections<Rule>(direction, lane, sums);
    if (kStores) {
      s0[i] = state[0];
      if (kSecond) s1[i] = state[1];
      if (kThird) s2[i] = state[2];
    }
    if (kDirects) {
      d0[i - tile] = direction[0];
      if (Rule::kDirections > 1) d1[i - tile] = direction[1];
    }
    if (kMoves) {
      if (kAdds) before[i - tile] = w[i];
      w[i] -= (kParts & kAlongWeights) != 0 ? Moved<2>(p, direction[0], w[i])
                                            : Moved<Rule::kDirections>(p, direction[0], direction[1]);
    }
  };
  const auto vector = [&](int i, TileSums<Rule> &sums) __attribute__((always_inline)) {
    MS_OPTIM_IVDEP
    for (int lane = 0; lane < kLanes; ++lane) element(i + lane, lane, sums);
  };
  TileSums<Rule> sums = total;
  int i = 0;
  if constexpr (!kByLines) {
    for (; i + kLanes <= n; i += kLanes) vector(i, sums);
    for (int lane = 0; i < n; ++i, ++lane) element(i, lane, sums);
    total = sums;
    return;
  }
  TileSums<Rule> next;
  const int behind = kLanes - ahead;
  for (; i < ahead; ++i) {
    element(i, behind + i, sums);
    KeepScalar();
  }
  for (;; tile += kTile) {
    const int end = Min(tile + kTile, n);
    for (; i + kLanes <= end; i += kLanes) vector(i, sums);
    if (i < end) {
      TileSums<Rule> both;
      const int count = Min(tile + kTile - i, kLanes);
      if (i + kLanes <= n) {
        vector(i, both);
        i += kLanes;
      } else {
        for (int lane = 0; i < n; ++i, ++lane) element(i, lane, both);
      }
      if constexpr (kAdds) Divide(both, count, sums, next);
    }
    // A copy, since sums whose address is known elsewhere would be stored and loaded for each vector.
    total = sums;
    CompleteStores();
    (*done)(tile, end, total);
    CompleteStores();
    if (end == n) return;
    if (ahead > 0) {
      constexpr size_t kBytes = kLanes * sizeof(float);
      if (kAdds && kMoves) memcpy(before - behind, before + kTile - behind, kBytes);
      if (kDirects) memcpy(d0 - behind, d0 + kTile - behind, kBytes);
    }
    sums = next;
    next = TileSums<Rule>{};
  }
}

// Runs a rule over n elements of a tile, wherever it begins, and adds to sums. Inlined, the loop would share registers
// with its callers.
template <class Rule, unsigned kParts>
[[gnu::noinline]] void RuleTile(const Rule &rule, const Decision &decision, int n, float *w, const float *g,
                                float *const *s, float (*d)[kTile], float *before, TileSums<Rule> &sums) {
  RuleLoop<Rule, kParts, false>(rule, decision, 0, n, w, g, s, d, before, sums, nullptr);
}

// Runs a rule over n elements from the beginning of a tile on. After each tile, done(tile, end, sums) gets its first
// element, its end, and its sums.
//
// The element `ahead` begins a cache line, and a vector. Large tensors begin 16 bytes behind the start of a line: if
// vectors began with the tensors, too, each one of AVX-512 and every second one of AVX2 would lie in two lines, which
// takes a tenth of the time. Lanes are counted from there, and come to the same sums: each one gets the same elements
// in the same order. The vector at the end of a tile has elements of two tiles then.
//
// Directions, and weights from before the move, are kept for a tile at a time, since more of them take the first-level
// cache from the tensors. Those of the next tile's first elements go to the beginning.
template <class Rule, unsigned kParts>
[[gnu::noinline]] void RuleTiles(const Rule &rule, const Decision &decision, int ahead, int n, float *w, const float *g,
                                 float *const *s, float (*d)[kTile], float *before, AfterTile<Rule> done) {
  TileSums<Rule> sums;
  RuleLoop<Rule, kParts, true>(rule, decision, ahead, n, w, g, s, d, before, sums, &done);
}

}  // namespace
}  // namespace ms_optim
