"""The keys that MindFormers' own AdamW and Muon take in a YAML file and those here do not: what becomes of each.

So that changing `type` alone is enough, a key is taken under the name that it has here, is left out if it has no
meaning here, or is an error that says what to write in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .attention_clip import ENABLED, THRESHOLD

Arguments = dict[str, Any]
# From the optimizer's name, the key and its value to the arguments that it stands for.
Translation = Callable[[str, str, Any], Arguments]


def _left_out(name: str, key: str, value: Any) -> Arguments:
    """Return no argument: the key says how MindFormers computes what is the same here."""
    return {}


def _refused(remedy: str, *without_effect: Any) -> Translation:
    """Return what refuses a key, unless its value asks for nothing."""

    def translated(name, key, value):
        if any(value is allowed or value == allowed for allowed in without_effect):
            return {}
        raise ValueError(f"For '{name}', MindFormers' key {key!r} is not available, but got {value!r}. {remedy}")

    return translated


def _kept(name: str, key: str, value: Any) -> Arguments:
    """Return the key as it is: it has the same name here."""
    return {key: value}


def _called(argument: str, convert: Callable[[Any], Any] = lambda value: value) -> Translation:
    """Return what takes a key under another name; None stands for the default."""
    return lambda name, key, value: {} if value is None else {argument: convert(value)}


def _coefficients(name: str, key: str, value: Any) -> Arguments:
    """Take segments, [[[a, b, c], count], ...], as a list of triples; other forms are those of ns_coefficients."""
    if not _are_segments(value):
        return {key: value}
    return {key: [triple for triple, count in value for _ in range(count)], "ns_steps": None}


def _are_segments(value):
    return isinstance(value, (list, tuple)) and all(
        isinstance(part, (list, tuple)) and len(part) == 2 and isinstance(part[0], (list, tuple)) for part in value
    )


_OFFLOAD = _refused("Write 'offload: True', which keeps the states in host memory.", False, None)
_AVERAGE = _refused("PmaAdamW averages weights of several steps: write 'average_decay', which keeps an average.")
THEIR_KEYS: dict[str, dict[str, Translation]] = {
    "AdamW": {
        "swap": _OFFLOAD,
        "enable_cpu_offload": _OFFLOAD,
        "enable_fused_opt": _left_out,
        **dict.fromkeys(("fused_num", "interleave_step", "fused_algo", "ema_alpha"), _AVERAGE),
    },
    "Muon": {
        "swap": _OFFLOAD,
        "eps": _refused("The norm here needs none: remove the key.", 1e-7),
        "ns_coefficients": _coefficients,
        "adamw_include": _called("adamw_names"),
        "ns_batch_memory_gb": _called("max_temporary_bytes", lambda value: int(value * 2**30)),
        "phase0_batch_memory_gb": _left_out,
        "phase4_batch_memory_gb": _left_out,
        "comm_strategy": _left_out,
        "use_fused_adamw": _left_out,
        **dict.fromkeys((ENABLED, THRESHOLD), _kept),
    },
}


def translated(name: str, optimizer: str, section: Mapping[str, Any]) -> Arguments:
    """Return the arguments of a section, with MindFormers' own keys translated.

    Args:
        name: Name of the class, for the errors.
        optimizer: The optimizer's name without the prefix.
        section: The keys of the section `optimizer` without its type.
    """
    theirs = THEIR_KEYS.get(optimizer, {})
    found: Arguments = {key: value for key, value in section.items() if key not in theirs}
    for key, value in section.items():
        if key in theirs:
            found |= theirs[key](name, key, value)
    if optimizer == "AdamW" and {"beta1", "beta2"} <= found.keys():  # of FP32StateAdamWeightDecay
        found["betas"] = [found.pop("beta1"), found.pop("beta2")]
    return {key: value for key, value in found.items() if key != "ns_steps" or value is not None}
