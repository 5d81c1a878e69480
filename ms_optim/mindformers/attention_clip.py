"""QK-clip from the YAML file: by the largest attention logits that a model of MindFormers reports.

With the key `qk_clip_threshold`, each step is followed by :class:`ms_optim.QKClip` on the projections of queries and
keys, as in MindFormers' own Muon. Its attention keeps the largest logit of each head in `max_logits_val` until its
callback MaxLogitsMonitor resets it, at the end of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from mindspore import Parameter, Tensor, nn

from ..arguments.checks import check_positive, check_type
from ..dtensors.local_shards import is_distributed
from ..states.shares import peers
from ..training.qk_clip import QKClip

ENABLED, THRESHOLD = "qk_clip_enabled", "qk_clip_threshold"
DEFAULT = 100.0  # MindFormers'
# The projections in its attention, of one class or another: of queries, and of keys and values.
QUERY = ("linear_qb", "linear_q_up_proj", "linear_q_proj", "linear_qkv")
KEY = ("linear_kvb", "linear_kv_up_proj")
RESET = "reset_max_attention_logit"


def taken_threshold(name: str, arguments: dict[str, Any]) -> float | None:
    """Take the keys of QK-clip out of the arguments, and return the threshold; None if nothing is clipped.

    Args:
        name: Name of the optimizer's class, for the errors.
        arguments: The arguments, which are changed.
    """
    enabled, threshold = arguments.pop(ENABLED, None), arguments.pop(THRESHOLD, None)
    if enabled is not None:
        check_type(name, ENABLED, enabled, bool)
    if enabled is False or (enabled is None and threshold is None):
        return None
    threshold = DEFAULT if threshold is None else threshold
    check_positive(name, THRESHOLD, threshold)
    return float(threshold)


class AttentionClip:
    """Clips the attention of MindFormers' models after each step that was taken.

    Args:
        name: Name of the optimizer's class, for the errors.
        models: The model or models of this process, which MindFormers has given to the optimizer; None if it has not.
        threshold: The largest logit allowed.
        steps: The optimizer's step count.
    """

    callback: QKClip

    def __init__(self, name: str, models: Any, threshold: float, steps: Parameter):
        if models is None:
            _fail(
                name,
                "the model, which MindFormers' trainer for static graphs gives to the type 'Muon' alone. Write 'type: "
                "Muon' and 'auto_register: optimizers.Muon', which is this package's Muon",
            )
        if peers().count > 1:
            _fail(name, "a single process: the largest logits of all processes would have to be compared")
        self._models: Sequence[nn.Cell] = models if isinstance(models, (list, tuple)) else [models]
        cells = [cell for model in self._models for _, cell in model.cells_and_names() if _reports(cell)]
        if not cells:
            _fail(
                name,
                "a model that reports its largest logits. The PyNative trainer's does with 'type: MaxLogitsMonitor' in "
                "the section 'callbacks', and models for static graphs with 'use_flash_attention: True'",
            )
        layers = [(_projection(name, cell, QUERY), _projection(name, cell, KEY)) for cell in cells]
        config = cells[0].config
        rows = len(cells[0].core_attention.max_logits_val) * (config.qk_head_dim + config.qk_pos_emb_head_dim)
        self._steps, self._clipped_at = steps, int(steps.asnumpy()[0])
        self.callback = QKClip(
            layers,
            lambda: [Tensor(cell.core_attention.max_logits_val) for cell in cells],
            threshold,
            query_rope=config.qk_pos_emb_head_dim,
            key_values=config.v_head_dim,
            # A projection of queries may have other rows after theirs.
            query_rows=range(rows),
        )

    def after_step(self) -> None:
        """Clip, unless the step was skipped."""
        step = int(self._steps.asnumpy()[0])
        if step != self._clipped_at:
            self._clipped_at = step
            self.callback.clip()

    def before_reset(self) -> None:
        """Let the models clip before they reset the logits, where steps are taken in a graph."""
        for model in self._models:
            reset = getattr(model, RESET)

            def clipped_and_reset(reset=reset):
                self.after_step()
                return reset()

            object.__setattr__(model, RESET, clipped_and_reset)


def _reports(cell: Any) -> bool:
    """Return whether a cell is an attention that keeps its largest logits."""
    return hasattr(getattr(cell, "core_attention", None), "max_logits_val")


def _projection(name: str, cell: Any, names: Sequence[str]) -> list[Parameter]:
    """Return the weight of a projection, and its bias if it has one."""
    found = next((getattr(cell, each) for each in names if getattr(cell, each, None) is not None), None)
    if found is None or getattr(cell, "use_dsa", False):
        _fail(
            name, f"multi-head latent attention, but a layer is {type(cell).__name__}. Use the callback ms_optim.QKClip"
        )
    parameters = [p for p in (found.weight, getattr(found, "bias", None)) if isinstance(p, Parameter)]
    if any(map(is_distributed, parameters)):
        _fail(name, "parameters that are not DTensors")
    return parameters


def _fail(name: str, what: str) -> NoReturn:
    raise ValueError(f"For '{name}', MindFormers' key {THRESHOLD!r} needs {what}.")
