"""The words of errors: what came, briefly, and what was probably meant."""

from __future__ import annotations

import difflib
import math
import os
import warnings
from collections.abc import Collection, Iterable, Sized
from typing import Any, NoReturn

import numpy as np
from mindspore import Tensor, nn
from mindspore import dtype as mstype

MOST_LETTERS = 60  # of a value in an error
MOST_NAMES = 5
PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic, type, mstype.Type, range, os.PathLike)
# What other frameworks and MindSpore's own optimizers call an argument, a group key, a value or an optimizer: its names
# here, of which the first that is known is meant. Without a name, what looks alike here is something else.
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "lr": ("learning_rate",),
    "learning_rate": ("lr",),
    "param": ("params",),
    "parameters": ("params",),
    "wd": ("weight_decay",),
    "beta1": ("betas", "adamw_betas"),
    "beta2": ("betas", "adamw_betas"),
    "betas": ("beta1 and beta2", "adamw_betas"),
    "epsilon": ("eps", "adamw_eps"),
    "eps": ("adamw_eps",),
    "correct_bias": ("bias_correction",),
    "use_nesterov": ("nesterov",),
    "nesterov": ("use_nesterov",),
    "fused": ("backend",),
    "foreach": ("backend",),
    "native": ("auto",),
    "max_grad_norm": ("grad_clip_norm",),
    "max_norm": ("grad_clip_norm",),
    "clip_norm": ("grad_clip_norm",),
    "clipnorm": ("grad_clip_norm",),
    "clip_gradient": ("grad_clip_norm",),
    "grad_clip": ("grad_clip_norm",),
    "ema_decay": ("average_decay",),
    "multi_precision": ("master_weights",),
    "int8": ("8bit",),
    "uint8": ("8bit",),
    "8": ("8bit",),
    "8-bit": ("8bit",),
    "int4": ("4bit",),
    "4": ("4bit",),
    "4-bit": ("4bit",),
    "bf16": ("bfloat16",),
    "fp16": ("float16",),
    "half": ("float16",),
    "fp32": ("float32",),
    "float": ("float32",),
    "momentum": (),
    "adamax": (),
    "nadam": (),
    "radam": (),
}


_warned: set[str] = set()


def described(value: Any) -> str:
    """Return a value in few letters: of tensors the shape, of networks the type, of large collections the length."""
    kind = type(value).__name__
    if isinstance(value, np.ndarray):
        return f"a NumPy array of shape {value.shape}"
    if isinstance(value, Tensor):
        return f"a {kind} of shape {value.shape}"
    if isinstance(value, nn.Cell):
        return f"a Cell of type {kind}"
    text = shortened(value)
    if text is not None:
        return f"{text} of type {kind}"
    if isinstance(value, Sized):
        return f"a {kind} of length {len(value)}"
    return f"a value of type {kind}"


def shortened(value: Any, depth: int = 3) -> str | None:
    """Return the text of a plain value, cut if it is long; None if its text may be long, or says little."""
    if isinstance(value, (str, bytes)):
        return repr(value) if len(value) <= MOST_LETTERS else f"{value[:MOST_LETTERS]!r}..."
    if isinstance(value, int) and value.bit_length() > 3 * MOST_LETTERS:  # Python refuses to print very large ones
        return f"about {'-' * (value < 0)}1e{int(value.bit_length() * math.log10(2))}"
    if isinstance(value, PLAIN):
        return repr(value)[: 2 * MOST_LETTERS]
    if not isinstance(value, (list, tuple, set, frozenset, dict)) or len(value) > MOST_LETTERS or not depth:
        return None
    members = [*value, *value.values()] if isinstance(value, dict) else value
    texts = [shortened(member, depth - 1) for member in members]
    # A large number is the one whose text is no repr.
    if any(text is None or text.startswith("about") for text in texts):
        return None
    text = repr(value)
    return text if len(text) <= MOST_LETTERS else None


def listed(names: Collection[Any]) -> str:
    """Return names in brackets, the first few and the number of the others."""
    shown = [repr(name) for name in names][:MOST_NAMES]
    more = [f"and {len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return f"[{', '.join([*shown, *more])}]"


def warn_once(text: str, stacklevel: int) -> None:
    """Warn, unless the same was said before in this process."""
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=stacklevel)


def fail(error: type[Exception], optimizer: str, name: str, expected: str, value: Any, hint: str = "") -> NoReturn:
    """Raise an error that names the argument, what was expected, what was given, and, in a sentence, what to do."""
    raise error(f"For '{optimizer}', the argument '{name}' must be {expected}, but got {described(value)}.{hint}")


def meant(given: Any, known: Iterable[str]) -> str | None:
    """Return the known name that is given in another case, or as others call it; None if there is none."""
    text = given[:MOST_LETTERS] if isinstance(given, str) else shortened(given) or ""
    lower = {name.lower(): name for name in known}
    if text.lower() in lower:
        return lower[text.lower()]
    found = [names for names in ELSEWHERE.get(text.lower(), ()) if all(name in lower for name in names.split(" and "))]
    return found[0].replace(" and ", "' and '") if found else None


def closest(given: Any, known: Iterable[str]) -> str:
    """Return a sentence with the one of the known names that was probably meant; nothing if none is close."""
    known = list(known)
    found = meant(given, known)
    if found is None and isinstance(given, str) and given.lower() not in ELSEWHERE:
        close = difflib.get_close_matches(given[:MOST_LETTERS].lower(), [name.lower() for name in known], n=1)
        found = meant(close[0], known) if close else None
    return f" Did you mean '{found}'?" if found else ""
