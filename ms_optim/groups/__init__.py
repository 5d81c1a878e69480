"""Parameter groups from a network."""

from .muon import muon_groups
from .param_groups import ParamGroups, groups_by_decay, layerwise_groups, no_decay_groups, pattern_groups

__all__ = ["ParamGroups", "groups_by_decay", "layerwise_groups", "muon_groups", "no_decay_groups", "pattern_groups"]
