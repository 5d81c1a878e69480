// DGCMomentum on the CPU: the exact selection of the largest elements of r.
//
// The selection needs no samples and no second guess. The pass that accumulates r stores the largest magnitude of each
// group of 64 elements. The k-th largest of these maxima is a bound that at least k elements reach, and few besides;
// only groups whose maximum reaches it are read again, once, and their candidates are noted down. Among these the exact
// k-th magnitude is found digit by digit, by counting; ties go to the lowest index.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "dgc.h"
#include "step_engine.h"

namespace ms_optim {
namespace {

constexpr int kGroup = 64;
constexpr int kBlock = 128 * kGroup;
static_assert(kTile % kGroup == 0, "a tile holds whole groups");
int64_t GroupsOf(const Chunk &chunk) { return (chunk.end - chunk.begin + kGroup - 1) / kGroup; }

// An element that may be among the k largest: its index in its chunk, and its r.
struct Candidate {
  int32_t index;
  float value;
};

// A chunk with more candidates is scanned each time: notes of all of them would take memory that grows with r.
constexpr int kMostNoted = static_cast<int>(kChunk / 16);

// The selection of a chunk.
struct Selection {
  int64_t first_group;   // in maxima_
  int thread;            // whose notes hold the candidates
  int64_t first, count;  // the range of these notes; a count below 0: the candidates are not noted down
  int64_t sent_before;   // how many elements the tensor's earlier chunks send
  int64_t ties;          // how many of the elements that equal the k-th magnitude this chunk sends
};

// The search for a tensor's k-th magnitude.
struct Search {
  int64_t remaining;  // how many of the k largest begin with the prefix
  int32_t prefix;     // the digits found so far, then zeros
  Digit digit;
  int64_t count[kDigits[0].bins];

  void Start(int64_t k) {
    remaining = k;
    prefix = 0;
  }
  void StartDigit(const Digit &next) {
    digit = next;
    memset(count, 0, sizeof(count));
  }
  MS_OPTIM_FN void Add(int32_t key) {
    const uint32_t bin = BinOf(digit, key, prefix);
    if (bin < static_cast<uint32_t>(digit.bins)) ++count[bin];
  }
  void EndDigit() {
    int bin = digit.bins - 1;
    for (; bin > 0 && count[bin] < remaining; --bin) remaining -= count[bin];
    prefix |= bin << digit.shift;
  }
};

// The local gradient of a launch, and the selection of what is sent of it.
class DgcSelect : protected StepEngine {
 protected:
  explicit DgcSelect(const Step &step) : StepEngine(step), rule_(step.constants + kRuleConstants, step.rule_flags) {}

  static float *U(const Tensor &t) { return static_cast<float *>(t.state[0]); }
  static float *R(const Tensor &t) { return static_cast<float *>(t.state[1]); }
  // Returns how many elements of a tensor are sent, the k of the paper; 0: the tensor is not compressed.
  int64_t Sent(int i) const { return LayoutOf(i, kSent); }
  Selection &SelectionOf(const Chunk &chunk) const { return selections_[&chunk - chunks_.get()]; }
  int32_t *MaximaOf(const Chunk &chunk) const { return &maxima_[SelectionOf(chunk).first_group]; }

  // ---- The local gradient and the new states ----------------------------------------------------------------------

  void GradientTile(const Task &task, float clip, int n, const float *__restrict w, const float *__restrict g,
                    float *__restrict out) const {
    const DgcMomentum rule = rule_;
    const float factor = task.factor, lambda = task.lambda;
    MS_OPTIM_IVDEP
    for (int i = 0; i < n; ++i) out[i] = clip * rule.Gradient(w[i], factor * g[i], lambda);
  }

  // Computes the velocity and r with a tile's gradient in them; the new ones may overwrite the old.
  void NewStates(const Tensor &t, const Task &task, float clip, int64_t begin, int n, const float *w, const float *g,
                 float *new_u, float *new_r) const {
    const DgcMomentum rule = rule_;
    const float factor = task.factor, lambda = task.lambda;
    const float *u = U(t) + begin, *r = R(t) + begin;
    MS_OPTIM_IVDEP
    for (int i = 0; i < n; ++i) {
      const float gradient = clip * rule.Gradient(w[i], factor * g[i], lambda),
                  velocity = rule.Velocity(gradient, u[i]);
      new_u[i] = velocity;
      new_r[i] = r[i] + rule.Direction(gradient, velocity);
    }
  }

  // ---- Selection --------------------------------------------------------------------------------------------------

  // Returns a magnitude that at least k elements reach. It is at least 1, so that zeros are not scanned: the r of an
  // embedding may be full of them.
  int32_t BoundOf(int i) const {
    const Chunk &last = chunks_[tasks_[i].last_chunk - 1];
    const int32_t *maxima = MaximaOf(chunks_[tasks_[i].first_chunk]);
    const int64_t groups = MaximaOf(last) - maxima + GroupsOf(last);
    if (Sent(i) > groups) return 1;
    Search search;
    search.Start(Sent(i));
    // Two digits are enough: a third one would exclude few more candidates.
    for (const Digit &digit : {kDigits[0], kDigits[1]}) {
      search.StartDigit(digit);
      for (int64_t k = 0; k < groups; ++k) search.Add(maxima[k]);
      search.EndDigit();
    }
    return Max(search.prefix, 1);
  }

  void Note(const Chunk &chunk) {
    Selection &selection = SelectionOf(chunk);
    std::vector<Candidate> &notes = notes_[static_cast<size_t>(omp_get_thread_num())];
    selection.thread = omp_get_thread_num();
    selection.first = static_cast<int64_t>(notes.size());
    selection.count = 0;
    try {
      Scan(chunk, bound_[chunk.tensor], [&](int64_t i, float value) {
        if (selection.count++ < kMostNoted) notes.push_back({static_cast<int32_t>(i - chunk.begin), value});
      });
    } catch (const std::bad_alloc &) {
      selection.count = kMostNoted + 1;
    }
    if (selection.count <= kMostNoted) return;
    notes.resize(static_cast<size_t>(selection.first));
    selection.count = -1;
  }

  // Finds the k-th magnitude of a tensor, and the number of elements that each of its chunks sends.
  void Rank(int i) {
    const int first = tasks_[i].first_chunk, last = tasks_[i].last_chunk;
    Search search;
    search.Start(Sent(i));
    int64_t zeros = 0;
    for (const Digit &digit : kDigits) {
      search.StartDigit(digit);
      for (int k = first; k < last; ++k) {
        ForCandidates(chunks_[k], Max(bound_[i], search.prefix),
                      [&](int64_t, float value) { search.Add(MagnitudeKey(value)); });
      }
      if (bound_[i] == 1 && digit.shift == kDigits[0].shift) {
        zeros = step_.tensors[i].size;
        for (const int64_t count : search.count) zeros -= count;
      }
      if (search.prefix == 0) search.count[0] += zeros;
      search.EndDigit();
    }
    magnitude_[i] = search.prefix;
    int64_t sent = 0, ties = search.remaining;
    for (int k = first; k < last; ++k) {
      int64_t larger = 0, equal = 0;
      ForCandidates(chunks_[k], search.prefix, [&](int64_t, float value) {
        larger += MagnitudeKey(value) > search.prefix;
        equal += MagnitudeKey(value) == search.prefix;
      });
      Selection &selection = selections_[k];
      selection.sent_before = sent;
      selection.ties = Min(equal, ties);
      ties -= selection.ties;
      sent += larger + selection.ties;
    }
  }

  // Calls body(index, r) for the elements of a chunk whose magnitude is at least the bound, in order.
  template <class Body>
  MS_OPTIM_FN void ForCandidates(const Chunk &chunk, int32_t bound, Body body) const {
    const Selection &selection = SelectionOf(chunk);
    if (selection.count < 0 || bound < bound_[chunk.tensor]) return Scan(chunk, bound, body);
    const Candidate *notes = notes_[static_cast<size_t>(selection.thread)].data() + selection.first;
    for (int64_t k = 0; k < selection.count; ++k) {
      if (MagnitudeKey(notes[k].value) >= bound) body(chunk.begin + notes[k].index, notes[k].value);
    }
  }

  // Does the same from r in place of the notes.
  template <class Body>
  MS_OPTIM_FN void Scan(const Chunk &chunk, int32_t bound, Body body) const {
    const Tensor &t = step_.tensors[chunk.tensor];
    const int32_t *maxima = MaximaOf(chunk);
    const bool stored = Has(kApplyStage);
    Buffers b;
    if (!stored && tasks_[chunk.tensor].row != 0) RowMeans(t, tasks_[chunk.tensor], chunk, b);
    for (int64_t begin = chunk.begin; begin < chunk.end; begin += kBlock, maxima += kBlock / kGroup) {
      int group[kBlock / kGroup + 1], hit[kBlock + 1];
      int32_t key[kBlock];
      float again[kBlock];
      const int n = static_cast<int>(Min(kBlock, chunk.end - begin));
      const int groups = GroupsThatReach(bound, maxima, n, group);
      if (!stored) AccumulateAgain(chunk, begin, n, group, groups, b, again);
      const float *r = stored ? R(t) + begin : again;
      const int hits = HitsOf(r, n, group, groups, bound, key, hit);
      for (int j = 0; j < hits; ++j) body(begin + hit[j], r[hit[j]]);
    }
  }

  // Finds the groups of a block whose maximum reaches the bound; stores where they begin, and returns their number.
  static int GroupsThatReach(int32_t bound, const int32_t *maxima, int n, int *group) {
    int groups = 0;
    for (int begin = 0; begin < n; begin += kGroup) {
      group[groups] = begin;
      groups += *maxima++ >= bound;
    }
    return groups;
  }

  // Computes r again for some groups of a block, for adjacent ones at once.
  void AccumulateAgain(const Chunk &chunk, int64_t block, int n, const int *group, int groups, Buffers &b,
                       float *r) const {
    const Tensor &t = step_.tensors[chunk.tensor];
    const Task &task = tasks_[chunk.tensor];
    for (int k = 0; k < groups;) {
      const int from = group[k];
      int to = from;
      for (; k < groups && group[k] == to && to - from < kTile; ++k) to += kGroup;
      const int64_t begin = block + from;
      const int count = Min(to, n) - from;
      const float *w = LoadWeight(t, begin, count, b.weight), *g = LoadGradient(t, task, chunk, begin, count, b);
      NewStates(t, task, clip_[chunk.tensor], begin, count, w, g, b.state[0], r + from);
    }
  }

  // Finds the indices of candidates in a block's groups; returns their number.
  static int HitsOf(const float *r, int n, const int *group, int groups, int32_t bound, int32_t *key, int *hit) {
    int hits = 0;
    for (int g = 0; g < groups; ++g) {
      for (int line = 0; line < kGroup; line += 16) __builtin_prefetch(r + group[g] + line);
    }
    for (int g = 0; g < groups; ++g) {
      const int begin = group[g], end = Min(begin + kGroup, n);
      MS_OPTIM_IVDEP
      for (int j = begin; j < end; ++j) key[j] = MagnitudeKey(r[j]);
      // There is no branch: the processor would mispredict it.
      for (int j = begin; j < end; ++j) {
        hit[hits] = j;
        hits += key[j] >= bound;
      }
    }
    return hits;
  }

  const DgcMomentum rule_;
  std::unique_ptr<float[]> clip_;
  std::unique_ptr<WireOffsets[]> wire_;
  std::unique_ptr<int32_t[]> bound_, magnitude_;  // of each tensor: the bound of its candidates; its k-th
  std::unique_ptr<Selection[]> selections_;       // of each chunk
  std::unique_ptr<int32_t[]> maxima_;
  std::vector<std::vector<Candidate>> notes_;  // of each thread
};

}  // namespace
}  // namespace ms_optim
