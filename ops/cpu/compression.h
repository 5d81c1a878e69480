// DGCMomentum on the CPU: local accumulation, exact selection of the largest, and what is done with what was sent.
//
// A launch that does not apply the step leaves the states as they are, since the exchange may fail: it computes r and
// does not store it. The launch that applies the step computes it once more, with the same bits, and stores it.
//
// The selection needs no samples and no second guess. The pass that accumulates r keeps the largest magnitude of each
// group of 64 elements. The k-th largest of these maxima is a bound that at least k elements reach, and few besides;
// only groups whose maximum reaches it are looked at again, once: their candidates are noted down. Among these the
// exact k-th magnitude is found digit by digit, by counting; ties go to the lowest index.
#pragma once

#include <cstdio>

#include "dgc.h"
#include "engine.h"

namespace ms_optim {
namespace {

constexpr int kGroup = 64;
constexpr int kBlock = 128 * kGroup;
static_assert(kTile % kGroup == 0, "a tile holds whole groups");
int64_t GroupsOf(const Chunk &chunk) { return (chunk.end - chunk.begin + kGroup - 1) / kGroup; }

// So many elements are accumulated before the threads wait for each other and select. Many, since waiting takes long;
// not all, since the maxima take memory.
constexpr int64_t kSelectedElements = int64_t{1} << 26;

// An element that may be among the k largest, by its place in its chunk, and r there.
struct Candidate {
  int32_t place;
  float value;
};

// A chunk with more candidates is scanned each time instead: notes of all would take memory that grows with r.
constexpr int kMostNoted = static_cast<int>(kChunk / 16);

// What the selection knows of a chunk.
struct Selection {
  int64_t first_group;   // in maxima_
  int thread;            // whose notes hold the candidates
  int64_t first, count;  // which of these notes; a count below 0: the candidates are not noted down
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

class CompressedEngine : StepEngine {
 public:
  explicit CompressedEngine(const Step &step)
      : StepEngine(step), rule_(step.constants + kRuleConstants, step.rule_flags) {}

  Status Run() {
    const bool moments = Has(kMomentsStage), apply = Has(kApplyStage), skips = step_.skipping[0] != 0.0f;
    if (const Status status = Check(); status != kOk) return status;
    if (!OwnsStates()) return kNotItsOwn;
    const bool reads_sums = (apply && !moments) || skips;
    if (const Status status = Begin(reads_sums); status != kOk) return status;
    if (!Prepare()) return kNoMemory;
    if (Has(kGradientStage) && (!moments || (step_.flags & kSkipNonfinite) != 0)) {
      SumGradients(0, step_.count);
      if (!moments) return Commit(true);
      if (!AreFinite(step_, TotalGradientSum())) return Skip();
    }
    const int64_t words = LayWire(step_, wire_.get());
    if (moments != apply && step_.wire_words != words) return kWrongSize;
    if (!moments && !HasAllWires(step_, rule_)) return kWrongSize;
    if (!moments && !InStep()) return kOutOfStep;
    if (!moments || skips) CopySums();
    if (skips && step_.wire != nullptr) memset(step_.wire, 0, static_cast<size_t>(words) * sizeof(float));
    if (step_.wire != nullptr) PutMark(step_, rule_, step_.wire);
    if (skips) return apply ? Skip() : kOk;
    for (int i = 0; i < step_.count && !moments; ++i) clip_[i] = static_cast<float>(SumsOf(i)[kClipFactor]);
    for (int i = 0; i < step_.count; ++i) DecideRates(step_, i, &tasks_[i]);
    if (apply) Averages(true);
    for (int first = 0, last = 0; first < step_.count; first = last) {
      last = LastOfRun(first, kSelectedElements);
      if (moments) {
        if (step_.constants[kClipNorm] > 0.0) ClipLocally(first, last);
        ForChunks(first, last, false, [this](Chunk &chunk, const Tensor &t, const Task &task, Buffers &b) {
          Sent(chunk.tensor) > 0 ? Accumulate(t, task, chunk, b) : Dense(t, task, chunk, b);
        });
        AddSums(first, last);
        for (int i = first; i < last && !apply; ++i) SumsOf(i)[kClipFactor] = clip_[i];
        Select(first, last);
      } else {
        ForChunks(first, last, false, [this](Chunk &chunk, const Tensor &t, const Task &task, Buffers &b) {
          Sent(chunk.tensor) > 0 ? Receive(t, task, chunk, b) : ReceiveDense(t, task, chunk, b);
        });
        AddUpdates(first, last);
      }
    }
    if (apply) {
      Averages(false);
      for (int i = 0; i < step_.count; ++i) Report(i, true);
    }
    return Commit(true);
  }

 private:
  static float *U(const Tensor &t) { return static_cast<float *>(t.state[0]); }
  static float *R(const Tensor &t) { return static_cast<float *>(t.state[1]); }
  // How many elements of a tensor are sent, the k of the paper; 0: the tensor is not compressed.
  int64_t Sent(int i) const { return LayoutOf(i, kSent); }
  Selection &SelectionOf(const Chunk &chunk) const { return selections_[&chunk - chunks_.get()]; }
  int32_t *MaximaOf(const Chunk &chunk) const { return &maxima_[SelectionOf(chunk).first_group]; }

  Status Check() const {
    if (step_.count == 0) return kWrongCount;
    for (int i = 0; i < step_.count; ++i) {
      const Tensor &t = step_.tensors[i];
      if (Sent(i) < 0 || Sent(i) > t.size || t.size > kMostElements) return kWrongSize;
      for (int k = 0; k < DgcMomentum::kStates; ++k) {
        if (t.state_type[k] != DType::kFloat32) return kWrongDType;
      }
    }
    return kOk;
  }

  bool Prepare() {
    const size_t n = static_cast<size_t>(step_.count), chunks = static_cast<size_t>(tasks_[n - 1].last_chunk);
    clip_.reset(new (std::nothrow) float[n]);
    wire_.reset(new (std::nothrow) WirePlace[n]);
    bound_.reset(new (std::nothrow) int32_t[n]);
    magnitude_.reset(new (std::nothrow) int32_t[n]);
    selections_.reset(new (std::nothrow) Selection[chunks]);
    if (!clip_ || !wire_ || !bound_ || !magnitude_ || !selections_) return false;
    notes_.resize(static_cast<size_t>(omp_get_max_threads()));
    int64_t most = 0;
    for (int first = 0, last = 0; first < step_.count; first = last) {
      last = LastOfRun(first, kSelectedElements);
      int64_t groups = 0;
      for (int i = first; i < last; ++i) {
        clip_[i] = 1.0f;
        for (int k = tasks_[i].first_chunk; Sent(i) > 0 && k < tasks_[i].last_chunk; ++k) {
          selections_[k].first_group = groups;
          groups += GroupsOf(chunks_[k]);
        }
      }
      most = Max(most, groups);
    }
    maxima_.reset(new (std::nothrow) int32_t[static_cast<size_t>(most)]);
    return maxima_ != nullptr;
  }

  // The framework shows a failure as a number: the words go to the log.
  bool InStep() const {
    for (int64_t worker = 0; worker < step_.wire_count; ++worker) {
      if (IsOfThisStep(step_, rule_, worker)) continue;
      fprintf(
          stderr,
          "ms_optim: DGCMomentum at step %d received what belongs to another step or to other settings: some worker "
          "has left out a step that others took, or was built with other arguments. Nothing was changed.\n",
          static_cast<int>(*step_.global_step));
      return false;
    }
    return true;
  }

  bool OwnsStates() const {
    if (HoldsItsOwn(step_, rule_)) return true;
    int64_t whose = 0;
    while (whose + 1 < step_.worker_count && step_.worker[whose] == 0) ++whose;
    fprintf(
        stderr,
        "ms_optim: DGCMomentum of worker %d holds the residuals of worker %d, from a checkpoint of that worker. Load "
        "this worker's own, by load_state_dict(), or what fold_residuals() makes. Nothing was changed.\n",
        static_cast<int>(rule_.rank), static_cast<int>(whose));
    return false;
  }

  // ---- The local gradient, and what becomes of it -----------------------------------------------------------------

  void GradientTile(const Task &task, float clip, int n, const float *__restrict w, const float *__restrict g,
                    float *__restrict out) const {
    const DgcMomentum rule = rule_;
    const float factor = task.factor, lambda = task.lambda;
    MS_OPTIM_IVDEP
    for (int i = 0; i < n; ++i) out[i] = clip * rule.Gradient(w[i], factor * g[i], lambda);
  }

  void ClipLocally(int first, int last) {
    ForChunks(first, last, false, [this](Chunk &chunk, const Tensor &t, const Task &task, Buffers &b) {
      if (Sent(chunk.tensor) == 0) return;
      double sum = 0.0;
      ForTiles(t, task, chunk, b, [&](int64_t begin, int n, const float *g) {
        GradientTile(task, 1.0f, n, LoadWeight(t, begin, n, b.weight), g, b.direction[0]);
        sum += SumSquares(b.direction[0], n);
      });
      chunk.sum[kGradientSum] = sum;
    });
    AddSums(first, last);
    for (int i = first; i < last; ++i) {
      if (Sent(i) == 0) continue;
      clip_[i] = rule_.Clip(std::sqrt(SumsOf(i)[kGradientSum]), step_.constants[kClipNorm]);
    }
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

  // Elements that are not sent do not touch their master, so the first step writes all masters.
  void BeginMaster(const Tensor &t, int64_t begin, int n, const float *w) const {
    if (t.master == nullptr || *step_.global_step != 0) return;
    memcpy(t.master + begin, w, static_cast<size_t>(n) * sizeof(float));
  }

  void Accumulate(const Tensor &t, const Task &task, Chunk &chunk, Buffers &b) {
    const bool apply = Has(kApplyStage);
    int32_t *group = MaximaOf(chunk);
    double sum[kSums] = {};
    ForTiles(t, task, chunk, b, [&](int64_t begin, int n, const float *__restrict g) {
      const float *w = LoadWeight(t, begin, n, b.weight);
      if (apply) BeginMaster(t, begin, n, w);
      float *u = apply ? U(t) + begin : b.state[0], *r = apply ? R(t) + begin : b.state[1];
      sum[kGradientSum] += SumSquares(g, n);
      sum[kWeightSum] += SumSquares(w, n);
      NewStates(t, task, clip_[chunk.tensor], begin, n, w, g, u, r);
      for (int i = 0; i < n; i += kGroup) *group++ = LargestKey(r + i, Min(kGroup, n - i));
    });
    memcpy(chunk.sum, sum, sizeof(sum));
  }

  static int32_t LargestKey(const float *r, int n) {
    int32_t largest = 0;
    MS_OPTIM_IVDEP
    for (int i = 0; i < n; ++i) largest = Max(largest, MagnitudeKey(r[i]));
    return largest;
  }

  void Dense(const Tensor &t, const Task &task, Chunk &chunk, Buffers &b) {
    double sum[kSums] = {};
    ForTiles(t, task, chunk, b, [&](int64_t begin, int n, const float *g) {
      float *w = LoadWeight(t, begin, n, b.weight);
      sum[kGradientSum] += SumSquares(g, n);
      sum[kWeightSum] += SumSquares(w, n);
      GradientTile(task, 1.0f, n, w, g, b.direction[0]);
      if (Has(kApplyStage)) {
        sum[kDirectionSum] += Momentum(t, task, begin, n, w, b);
      } else {
        auto *values = reinterpret_cast<float *>(static_cast<uint8_t *>(step_.wire) + wire_[chunk.tensor].values);
        memcpy(values + begin, b.direction[0], static_cast<size_t>(n) * sizeof(float));
      }
    });
    memcpy(chunk.sum, sum, sizeof(sum));
  }

  // Momentum SGD with the mean gradient in direction[0]; returns the sum of squares of what the weights move along.
  double Momentum(const Tensor &t, const Task &task, int64_t begin, int n, float *__restrict w, Buffers &b) {
    const DgcMomentum rule = rule_;
    const float rate = task.coefficient[0];
    float *__restrict u = U(t) + begin, *__restrict d = b.direction[0];
    MS_OPTIM_IVDEP
    for (int i = 0; i < n; ++i) {
      u[i] = rule.Velocity(d[i], u[i]);
      d[i] = rule.Direction(d[i], u[i]);
      w[i] -= rate * d[i];
    }
    if (task.noisy_weight) FillNoise(task.noise, begin, n, b.noise);
    StoreWeight(t, begin, n, w, task.noisy_weight ? b.noise : nullptr);
    return SumSquares(d, n);
  }

  // ---- Selection --------------------------------------------------------------------------------------------------

  void Select(int first, int last) {
    bool any = false;
    for (int i = first; i < last; ++i) any |= Sent(i) > 0;
    if (!any) return;
    for (auto &notes : notes_) notes.clear();
#pragma omp parallel for schedule(dynamic)
    for (int i = first; i < last; ++i) {
      if (Sent(i) > 0) bound_[i] = BoundOf(i);
    }
    ForChunks(first, last, false, [this](Chunk &chunk, const Tensor &, const Task &, Buffers &) {
      if (Sent(chunk.tensor) > 0) Note(chunk);
    });
#pragma omp parallel for schedule(dynamic)
    for (int i = first; i < last; ++i) {
      if (Sent(i) > 0) Rank(i);
    }
    ForChunks(first, last, false, [this](Chunk &chunk, const Tensor &t, const Task &task, Buffers &) {
      if (Sent(chunk.tensor) > 0) Send(t, task, chunk);
    });
    AddUpdates(first, last);
  }

  // Returns a magnitude that at least k elements reach. It is at least 1, so that zeros, of which an embedding's r may
  // be full, are not scanned.
  int32_t BoundOf(int i) const {
    const Chunk &last = chunks_[tasks_[i].last_chunk - 1];
    const int32_t *maxima = MaximaOf(chunks_[tasks_[i].first_chunk]);
    const int64_t groups = MaximaOf(last) - maxima + GroupsOf(last);
    if (Sent(i) > groups) return 1;
    Search search;
    search.Start(Sent(i));
    // Two digits are enough: a third would exclude few candidates more.
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

  // Finds a tensor's k-th magnitude, and what each of its chunks sends.
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

  // Calls body(index, r there) for the elements of a chunk whose magnitude is at least the bound, in order.
  template <class Body>
  MS_OPTIM_FN void ForCandidates(const Chunk &chunk, int32_t bound, Body body) const {
    const Selection &selection = SelectionOf(chunk);
    if (selection.count < 0 || bound < bound_[chunk.tensor]) return Scan(chunk, bound, body);
    const Candidate *notes = notes_[static_cast<size_t>(selection.thread)].data() + selection.first;
    for (int64_t k = 0; k < selection.count; ++k) {
      if (MagnitudeKey(notes[k].value) >= bound) body(chunk.begin + notes[k].place, notes[k].value);
    }
  }

  // The same, from r instead of the notes.
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

  // Computes r of some groups of a block; adjacent ones at once.
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

  // Finds the places of candidates in a block's groups; returns their number.
  static int HitsOf(const float *r, int n, const int *group, int groups, int32_t bound, int32_t *key, int *hit) {
    int hits = 0;
    for (int g = 0; g < groups; ++g) {
      for (int line = 0; line < kGroup; line += 16) __builtin_prefetch(r + group[g] + line);
    }
    for (int g = 0; g < groups; ++g) {
      const int begin = group[g], end = Min(begin + kGroup, n);
      MS_OPTIM_IVDEP
      for (int j = begin; j < end; ++j) key[j] = MagnitudeKey(r[j]);
      // Without branches, which the processor would predict wrong.
      for (int j = begin; j < end; ++j) {
        hit[hits] = j;
        hits += key[j] >= bound;
      }
    }
    return hits;
  }

  // ---- What is sent -----------------------------------------------------------------------------------------------

  // Sends the elements of a chunk above the k-th magnitude, and the first of those that equal it.
  //
  // Elements that are applied at once lie far apart, each in a page of its own: those of a chunk are all prefetched
  // before any is used.
  void Send(const Tensor &t, const Task &task, Chunk &chunk) {
    const int32_t magnitude = magnitude_[chunk.tensor];
    const WirePlace &wire = wire_[chunk.tensor];
    auto *bytes = static_cast<uint8_t *>(step_.wire);
    const bool apply = Has(kApplyStage);
    int64_t k = SelectionOf(chunk).sent_before, ties = SelectionOf(chunk).ties;
    double sum = 0.0;
    if (apply && SelectionOf(chunk).count >= 0) {
      ForCandidates(chunk, magnitude, [&](int64_t i, float) {
        __builtin_prefetch(R(t) + i, 1);
        __builtin_prefetch(U(t) + i, 1);
        if (t.weight_type == DType::kFloat32) __builtin_prefetch(static_cast<float *>(t.weight) + i, 1);
      });
    }
    ForCandidates(chunk, magnitude, [&](int64_t i, float accumulated) {
      if (MagnitudeKey(accumulated) == magnitude && ties-- <= 0) return;
      const float value = rule_.Travelled(accumulated);
      if (apply) {
        StartAnew(t, i, value);
        sum += MoveByMean(t, task, i, value);
        return;
      }
      PutValue(rule_, bytes + wire.values, k, value);
      PutPlace(bytes + wire.places, wire.place_bytes, k++, i);
    });
    chunk.sum[kDirectionSum] = sum;
  }

  // Momentum factor masking, section 3.3, of an element that is sent.
  static void StartAnew(const Tensor &t, int64_t i, float sent) {
    U(t)[i] = 0.0f;
    R(t)[i] = DgcMomentum::Behind(R(t)[i], sent);
  }

  // Plain SGD: r holds velocities, a second momentum would count them twice. Returns the square of the mean.
  double MoveByMean(const Tensor &t, const Task &task, int64_t i, float total) const {
    const float mean = rule_.Mean(total);
    Move(t, task.noisy_weight ? &task.noise : nullptr, i, task.coefficient[0] * mean);
    return static_cast<double>(mean) * static_cast<double>(mean);
  }

  // ---- What is received -------------------------------------------------------------------------------------------

  const uint8_t *Wire(int64_t worker) const {
    return static_cast<const uint8_t *>(step_.wires) + 4 * worker * step_.wire_words;
  }
  const float *DenseOf(int64_t worker, int tensor) const {
    return reinterpret_cast<const float *>(Wire(worker) + wire_[tensor].values);
  }

  // Stores the states that the launch which sent has computed, and removes what it sent.
  void KeepStates(const Tensor &t, const Task &task, int tensor, int64_t begin, int n, const float *g, Buffers &b) {
    const float *w = LoadWeight(t, begin, n, b.weight);
    BeginMaster(t, begin, n, w);
    NewStates(t, task, clip_[tensor], begin, n, w, g, U(t) + begin, R(t) + begin);
    ForSentBy(rule_.rank, tensor, begin, begin + n, [&t](int64_t i, float value) { StartAnew(t, i, value); });
  }

  // Adds up what the workers sent, in their order, tile by tile.
  void Receive(const Tensor &t, const Task &task, Chunk &chunk, Buffers &b) {
    float *total = b.direction[0];
    double sum = 0.0;
    ForTiles(t, task, chunk, b, [&](int64_t begin, int n, const float *g) {
      KeepStates(t, task, chunk.tensor, begin, n, g, b);
      const int64_t end = begin + n;
      bool any = false;
      ForReceived(chunk.tensor, begin, end, [&](int64_t i, float value) {
        if (!any) memset(total, 0, kTile * sizeof(float));
        any = true;
        total[i - begin] += value;
      });
      if (!any) return;
      ForReceived(chunk.tensor, begin, end, [&](int64_t i, float) {
        sum += MoveByMean(t, task, i, total[i - begin]);
        // If another worker sent it too, the weight moves by 0 then.
        total[i - begin] = 0.0f;
      });
    });
    chunk.sum[kDirectionSum] = sum;
  }

  // Calls body(index, value) for what each worker sent of the elements from begin to end.
  template <class Body>
  MS_OPTIM_FN void ForReceived(int tensor, int64_t begin, int64_t end, Body body) const {
    for (int64_t worker = 0; worker < step_.wire_count; ++worker) ForSentBy(worker, tensor, begin, end, body);
  }

  // The same for what one worker sent.
  template <class Body>
  MS_OPTIM_FN void ForSentBy(int64_t worker, int tensor, int64_t begin, int64_t end, Body body) const {
    const WirePlace &wire = wire_[tensor];
    const int64_t sent = Sent(tensor);
    const uint8_t *values = Wire(worker) + wire.values, *places = Wire(worker) + wire.places;
    for (int64_t k = FirstPlace(places, wire.place_bytes, sent, begin); k < sent; ++k) {
      const int64_t i = PlaceAt(places, wire.place_bytes, k);
      // Places ascend, if a worker of this step sent them.
      if (i < begin || i >= end) break;
      body(i, ValueAt(rule_, values, k));
    }
  }

  void ReceiveDense(const Tensor &t, const Task &task, Chunk &chunk, Buffers &b) {
    const DgcMomentum rule = rule_;
    double sum = 0.0;
    for (int64_t begin = chunk.begin; begin < chunk.end; begin += kTile) {
      const int n = static_cast<int>(Min(kTile, chunk.end - begin));
      float *__restrict mean = b.direction[0];
      memcpy(mean, DenseOf(0, chunk.tensor) + begin, static_cast<size_t>(n) * sizeof(float));
      for (int64_t worker = 1; worker < step_.wire_count; ++worker) {
        const float *__restrict more = DenseOf(worker, chunk.tensor) + begin;
        MS_OPTIM_IVDEP
        for (int i = 0; i < n; ++i) mean[i] += more[i];
      }
      MS_OPTIM_IVDEP
      for (int i = 0; i < n; ++i) mean[i] = rule.Mean(mean[i]);
      sum += Momentum(t, task, begin, n, LoadWeight(t, begin, n, b.weight), b);
    }
    chunk.sum[kDirectionSum] = sum;
  }

  // The other sums are those of the launch that sent.
  void AddUpdates(int first, int last) {
    for (int i = first; i < last; ++i) {
      double &sum = SumsOf(i)[kDirectionSum];
      sum = 0.0;
      for (int k = tasks_[i].first_chunk; k < tasks_[i].last_chunk; ++k) sum += chunks_[k].sum[kDirectionSum];
    }
  }

  const DgcMomentum rule_;
  std::unique_ptr<float[]> clip_;
  std::unique_ptr<WirePlace[]> wire_;
  std::unique_ptr<int32_t[]> bound_, magnitude_;  // of each tensor: what its candidates reach; its k-th
  std::unique_ptr<Selection[]> selections_;       // of each chunk
  std::unique_ptr<int32_t[]> maxima_;
  std::vector<std::vector<Candidate>> notes_;  // of each thread
};

template <>
inline Status Run<DgcMomentum>(const Step &step) {
  return CompressedEngine(step).Run();
}

}  // namespace
}  // namespace ms_optim
