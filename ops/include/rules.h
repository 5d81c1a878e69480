// The rules that have a kernel, on every device: a row is all that makes one known.
#pragma once

#include "adam.h"
#include "adamw.h"
#include "ademamix.h"
#include "dgc.h"
#include "lamb.h"
#include "lans.h"
#include "lion.h"
#include "momentum.h"
#include "muon.h"
#include "schedule_free_adamw.h"
#include "sinkhorn.h"

// RULE(name, struct): the operator's name is `ms_optim_` and the rule's. Numbers of states and constants are the
// struct's own.
#define MS_OPTIM_RULES(RULE)                   \
  RULE(adamw, AdamW<false>)                    \
  RULE(adamw_amsgrad, AdamW<true>)             \
  RULE(lamb, Lamb)                             \
  RULE(lans, Lans)                             \
  RULE(adam, Adam<false>)                      \
  RULE(adam_amsgrad, Adam<true>)               \
  RULE(adam_offload, Adam<false>)              \
  RULE(momentum, Momentum)                     \
  RULE(dgc_momentum, DgcMomentum)              \
  RULE(lion, Lion)                             \
  RULE(ademamix, AdEMAMix)                     \
  RULE(schedule_free_adamw, ScheduleFreeAdamW) \
  RULE(sinkhorn, Sinkhorn)

// Rules that have a kernel on the host alone.
#define MS_OPTIM_HOST_RULES(RULE) RULE(muon, Muon)

// Rules that have a kernel on GPUs alone: the passes before and after what the framework's operators compute.
#define MS_OPTIM_GPU_RULES(RULE) \
  RULE(muon_before, MuonBefore)  \
  RULE(muon_after, MuonAfter)

// FLAG(struct, flag): the bits that choose between forms of a rule.
#define MS_OPTIM_RULE_FLAGS(FLAG)     \
  FLAG(AdamW<false>, kAmsgrad)        \
  FLAG(AdamW<false>, kMaximize)       \
  FLAG(AdamW<false>, kBiasCorrection) \
  FLAG(Lamb, kBiasCorrection)         \
  FLAG(Lamb, kAlwaysAdapt)            \
  FLAG(Adam<false>, kNesterov)        \
  FLAG(Adam<false>, kCorrectsEps)     \
  FLAG(Momentum, kNesterov)           \
  FLAG(DgcMomentum, kNesterov)        \
  FLAG(DgcMomentum, kL1)              \
  FLAG(DgcMomentum, kHalfValues)      \
  FLAG(Muon, kNesterov)               \
  FLAG(Muon, kOriginalScale)          \
  FLAG(Muon, kNormalizesRows)         \
  FLAG(Muon, kBFloat16Products)
