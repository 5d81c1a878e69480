// Runs Muon, a rule that sees matrices as a whole, and AdamW over the other tensors.
//
// Matrices are taken a batch of tensors at a time. One pass forms their directions, which are then orthogonalized, and
// a second pass moves the weights along them.
#pragma once

#include "arguments.h"
#include "held_norms.h"
#include "orthogonalize.h"
#include "step_engine.h"

namespace ms_optim {
namespace {

// The most elements of a batch of more than one tensor.
constexpr int64_t kBatchElements = int64_t{1} << 22;

// Forms the new momentum and the direction of a matrix.
inline void FormDirections(const Muon &rule, const Tensor &t, const Task &task, float *directions, Chunk &chunk,
                           Buffers &b) {
  double sum = 0.0;
  ForTiles(t, task, chunk, b, [&](int64_t begin, int n, const float *g) {
    TileSums<MuonMomentum> sums;
    float *w = LoadWeight(t, begin, n, b.weight), *s[MuonMomentum::kStates];
    if (task.low_states) FillNoise(task.noise, begin, n, b.noise);
    StatesAndDirections<MuonMomentum, 0>(rule.matrices, t, task, begin, n, w, g, b.noise, s, b.direction, nullptr,
                                         b.state, sums);
    sum += ExactWhereLost(sums.Total(kGradientSum), g, n);
    memcpy(directions + begin, b.direction[0], static_cast<size_t>(n) * sizeof(float));
  });
  chunk.sum[kGradientSum] = sum;
}

inline void AddMatrixSums(const TileSums<KnownDirection> &sums, const float *w, const float *d, int n, double *sum) {
  sum[kWeightSum] += ExactWhereLost(sums.Total(kWeightSum), w, n);
  sum[kDirectionSum] += ExactWhereLost(sums.Total(kDirectionSum), d, n);
}

// Takes the elements of a chunk along their directions, the decay included: adds up sums and moves weights, or does one
// of these alone where the sums decide how weights move.
inline void MoveMatrix(const Tensor &t, const Task &task, unsigned parts, float *directions, Chunk &chunk, Buffers &b) {
  Task unscaled = task;
  unscaled.factor = 1.0f;
  for (int64_t begin = chunk.begin; begin < chunk.end; begin += kTile) {
    const int n = static_cast<int>(Min(kTile, chunk.end - begin));
    TileSums<KnownDirection> sums;
    float *w = LoadWeight(t, begin, n, b.weight), *direction = directions + (begin - chunk.begin);
    RuleTile<KnownDirection, kSumUp>(KnownDirection{}, unscaled, n, w, direction, &direction, b.direction, nullptr,
                                     sums);
    if (parts == kSumUp) {
      AddHeldSums(sums, w, b.direction[0], n, chunk.sum);
      continue;
    }
    if ((parts & kSumUp) != 0) AddMatrixSums(sums, w, b.direction[0], n, chunk.sum);
    StartTile<ElementwiseRule>(t, task, begin, n, w);
    MoveHeldTile(task, n, b.direction, w);
    if (task.noisy_weight) FillNoise(task.noise, begin, n, b.noise);
    StoreWeight(t, begin, n, w, task.noisy_weight ? b.noise : nullptr);
    AverageTile(t, task, begin, n, b.weight);
  }
}

class MatrixEngine : StepEngine {
 public:
  explicit MatrixEngine(const Step &step)
      : StepEngine(step),
        rule_(step.constants + kRuleConstants, int64_t{*step.global_step} + 1, step.rule_flags),
        mean_squares_(static_cast<size_t>(step.count), 0.0) {}

  Status Run() {
    const bool moves = Has(kMomentsStage);
    if (moves != Has(kApplyStage) || (step_.flags & kReturned) != 0) return kWrongFlags;
    if (const Status status = Begin(!Has(kGradientStage)); status != kOk) return status;
    if (moves && !Fits()) return kWrongSize;
    const Prologue prologue(step_, step_.constants[kClipNorm] > 0.0);
    Open(prologue);
    if (step_.stages == kGradientStage) return kOk;
    if (!Applies(prologue)) return Skip();
    DecideAll(rule_.others, 0, step_.count);
    if (moves) {
      const std::vector<Batch> batches = Batches();  // allocates all memory, before anything moves
      MoveOthers();
      for (const Batch &batch : batches) MoveMatrices(batch);
      AddSums(0, step_.count);
      for (int i = 0; i < step_.count; ++i) SumsOf(i)[kDirection2Sum] = mean_squares_[static_cast<size_t>(i)];
    }
    for (int i = 0; i < step_.count; ++i) {
      if (step_.tensors[i].matrix_rows > 0) tasks_[i].trust_ratio *= std::sqrt(SumsOf(i)[kDirection2Sum]);
      Report(i, true);
    }
    return Commit(true);
  }

 private:
  // Tells whether matrices and their states fit, and whether this process has each of them whole or not at all.
  bool Fits() const {
    for (int i = 0; i < step_.count; ++i) {
      const Tensor &t = step_.tensors[i];
      const bool normalizes = (step_.rule_flags & Muon::kNormalizesRows) != 0;
      if (t.matrix_rows == 0 || t.begin == t.end) continue;
      if (t.begin != 0 || t.end != t.size || (t.state[1] != nullptr) != normalizes) return false;
    }
    for (int64_t k = 0; k < step_.matrix_count; ++k) {
      const int64_t *entry = step_.matrices + k * kMatrixColumns;
      const Tensor &t = step_.tensors[entry[kMatrixTensor]];
      if (!FitsMatrix(entry, t.matrix_rows, t.size)) return false;
    }
    return true;
  }

  void MoveOthers() {
    if (step_.constants[kCautious] != 0.0) {
      MoveOthersBy(rule_.others);
    } else {
      MoveOthersBy(NeverCautious<AdamW<false>>(rule_.others));
    }
  }

  template <class Rule>
  void MoveOthersBy(const Rule &rule) {
    const auto pass = [&](int first, int last, auto body) {
      ForChunks(first, last, false, [&](Chunk &chunk, const Tensor &t, const Task &task, Buffers &b) {
        if (t.matrix_rows == 0) body(rule, t, task, chunk, b);
      });
    };
    if (!Holds()) return pass(0, step_.count, UpdateChunk<Rule, true>);
    for (int first = 0, last = 0; first < step_.count; first = last) {
      last = LastOfRun(first, kCachedElements);
      pass(first, last, HoldChunk<Rule, false>);
      AddSums(first, last);
      DecideAll(rule_.others, first, last);
      pass(first, last, HoldChunk<Rule, true>);
    }
  }

  // Tensors that are taken together, and the matrices among them.
  struct Batch {
    int first, last;
    std::vector<Matrix> matrices;
    std::vector<int> tensors;  // of each matrix
  };

  // Cuts the tensors into batches, and allocates the memory of the largest one.
  std::vector<Batch> Batches() {
    std::vector<Batch> batches;
    offsets_.assign(static_cast<size_t>(step_.count), -1);
    const std::vector<int64_t> bytes_of = BytesOfEach();
    int64_t most = 0, most_bytes = 0, next = 0;
    for (int first = 0, last = 0; first < step_.count; first = last) {
      last = LastOfBatch(first, bytes_of);
      int64_t elements = 0;
      for (int i = first; i < last; ++i) {
        if (step_.tensors[i].matrix_rows == 0 || ElementsOf(i) == 0) continue;
        offsets_[static_cast<size_t>(i)] = elements;
        elements += ElementsOf(i);
      }
      if (elements == 0) continue;
      most = Max(most, elements);
      batches.push_back({first, last, {}, {}});
    }
    directions_.reset(new float[static_cast<size_t>(most)]);
    for (Batch &batch : batches) {
      int64_t bytes = 0;
      for (; next < step_.matrix_count; ++next) {
        const int64_t *entry = step_.matrices + next * kMatrixColumns;
        const auto i = static_cast<int>(entry[kMatrixTensor]);
        if (i >= batch.last) break;
        if (DirectionsOf(i) == nullptr) continue;
        auto *average = static_cast<float *>(step_.tensors[i].state[1]);
        const double scale = rule_.ScaleOf(entry[kRun] * entry[kRuns], entry[kColumns]);
        batch.matrices.push_back({entry, DirectionsOf(i), average, scale});
        batch.tensors.push_back(i);
        bytes += BytesOfIterations(rule_, batch.matrices.back());
      }
      most_bytes = Max(most_bytes, bytes);
    }
    memory_.Reserve(most_bytes);
    return batches;
  }

  // Returns the bytes of temporary memory that each tensor takes: its directions, and its matrices' iterations.
  std::vector<int64_t> BytesOfEach() const {
    std::vector<int64_t> bytes(static_cast<size_t>(step_.count), 0);
    for (int i = 0; i < step_.count; ++i) {
      if (step_.tensors[i].matrix_rows > 0) bytes[static_cast<size_t>(i)] = ElementsOf(i) * int64_t{sizeof(float)};
    }
    for (int64_t k = 0; k < step_.matrix_count; ++k) {
      const int64_t *entry = step_.matrices + k * kMatrixColumns;
      const auto i = static_cast<size_t>(entry[kMatrixTensor]);
      if (bytes[i] > 0) bytes[i] += BytesOfIterations(rule_, {entry, nullptr, nullptr, 0.0});
    }
    return bytes;
  }

  // Returns the end of a batch that begins with a tensor.
  int LastOfBatch(int first, const std::vector<int64_t> &bytes_of) const {
    if (rule_.batch_bytes == 0.0) return LastOfRun(first, kBatchElements);
    int64_t bytes = bytes_of[static_cast<size_t>(first)];
    int last = first + 1;
    for (; last < step_.count; ++last) {
      bytes += bytes_of[static_cast<size_t>(last)];
      if (static_cast<double>(bytes) > rule_.batch_bytes) break;
    }
    return last;
  }

  float *DirectionsOf(int i) const {
    const int64_t begin = offsets_[static_cast<size_t>(i)];
    return begin < 0 ? nullptr : directions_.get() + begin;
  }

  void MoveMatrices(const Batch &batch) {
    ForChunks(batch.first, batch.last, false, [&](Chunk &chunk, const Tensor &t, const Task &task, Buffers &b) {
      if (float *own = DirectionsOf(chunk.tensor)) FormDirections(rule_, t, task, own, chunk, b);
    });
    std::vector<double> sums(batch.matrices.size(), 0.0);
    OrthogonalizeBy(step_, rule_, batch.matrices, memory_, sums.data());
    NoteOrthogonality(batch.matrices, batch.tensors, sums);
    const auto pass = [&](unsigned parts) {
      ForChunks(batch.first, batch.last, true, [&](Chunk &chunk, const Tensor &t, const Task &task, Buffers &b) {
        if (float *own = DirectionsOf(chunk.tensor)) MoveMatrix(t, task, parts, own + chunk.begin, chunk, b);
      });
    };
    MoveBySums(rule_.others, batch.first, batch.last, pass);
  }

  // Notes the mean square of each tensor's singular values, which are all 1 in an orthogonal matrix. It is stored as
  // the sum of a second direction, which Muon lacks, so that all workers report it.
  void NoteOrthogonality(const std::vector<Matrix> &matrices, const std::vector<int> &tensors,
                         const std::vector<double> &sums) {
    for (size_t k = 0, next = 0; k < matrices.size(); k = next) {
      double squares = 0.0, values = 0.0;
      for (next = k; next < matrices.size() && tensors[next] == tensors[k]; ++next) {
        squares += sums[next];
        values += static_cast<double>(Min(matrices[next].Rows(), matrices[next].Columns()));
      }
      mean_squares_[static_cast<size_t>(tensors[k])] = squares / values;
    }
  }

  const Muon rule_;
  std::vector<double> mean_squares_;
  std::vector<int64_t> offsets_;  // of each tensor in directions_; -1: this process has no matrix of it
  std::unique_ptr<float[]> directions_;
  OrthogonalizationMemory memory_;
};

template <>
inline Status Run<Muon>(const Step &step) {
  return MatrixEngine(step).Run();
}

}  // namespace
}  // namespace ms_optim
