"""QK-clip: scales the query and key projections of heads whose attention logits are too large."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Parameter, Tensor
from mindspore.train import Callback

from ..arguments.checks import check_positive, fail
from ..arguments.docstrings import documented
from ..arguments.params import ordered
from .attention import Form, Layer

if TYPE_CHECKING:
    from mindspore.train import RunContext

CLIP, CALLBACK = "qk_clip", "QKClip"


@documented
def qk_clip(
    query: Parameter | Sequence[Parameter],
    key: Parameter | Sequence[Parameter],
    max_logits: Tensor | Sequence[float],
    threshold: float = 100.0,
    *,
    key_heads: int | None = None,
    query_rope: int = 0,
    key_values: int = 0,
    query_rows: Sequence[int] | None = None,
    key_rows: Sequence[int] | None = None,
) -> int:
    r"""Scale the query and key projections, head by head, so that no attention logit exceeds a threshold.

    Kimi Team, `Kimi K2 <https://arxiv.org/abs/2507.20534>`_ (2025), Algorithm 1. A head :math:`h` whose largest logit
    :math:`S_h` is above the threshold :math:`\tau` has :math:`\gamma_h = \tau / S_h`, others have 1. Its logits are
    multiplied by :math:`\gamma_h`: queries and keys by :math:`\sqrt{\gamma_h}` each. If several heads share a key, the
    key is multiplied by :math:`\sqrt{\gamma_g}`, where :math:`\gamma_g` is the smallest :math:`\gamma_h` of these
    heads, and the queries of head :math:`h` by :math:`\gamma_h / \sqrt{\gamma_g}`. In multi-head latent attention all
    heads share the rotary part of the key, which is not changed; the rotary part of the queries is multiplied by
    :math:`\gamma_h`.

    The weights are written in place, so that compiled graphs also use them. Rows whose factor is 1 are not changed. The
    logits are then at most the threshold, except for rounding of the weights. Float32 masters of float16 and bfloat16
    weights are updated in the next step of the optimizer. Call this function after the optimizer's step, with the
    logits of the forward pass before that step.

    Rows are those of `nn.Dense`, whose weights have the shape (outputs, inputs). The rows of each head are consecutive.
    If the rows are elsewhere, as in a fused projection, state them in `query_rows` and `key_rows`.

    Args:
        query (Union[Parameter, list[Parameter]]): The query projection: its weight, or its weight and bias.
        key (Union[Parameter, list[Parameter]]): The projection of keys, or of keys and values, likewise.
        max_logits (Union[Tensor, list[float]]): The largest logit of each head, as passed to softmax, after scaling. If
            several processes train with different data, the largest over all processes.
        threshold (Union[float, int]): The largest logit allowed, greater than 0. Default: ``100.0`` .
        key_heads (Union[int, None]): The number of key heads. Consecutive query heads share one key head, so it must
            divide the number of query heads. ``None`` means one for each element of `max_logits`. Default: ``None`` .
        query_rope (int): The number of rows at the end of each head in `query` that are multiplied by a key which all
            heads share, as the rotary part is in latent attention. Default: ``0`` .
        key_values (int): The number of rows at the end of each head in `key` that are its values and are not changed,
            as in the joint projection of latent attention. Default: ``0`` .
        query_rows (Union[Sequence[int], None]): The rows of `query` that are queries, such as ``range(0, 768)`` , head
            by head. ``None`` means all. Default: ``None`` .
        key_rows (Union[Sequence[int], None]): The rows of `key` that are keys, likewise. Default: ``None`` .

    Returns:
        int, the number of heads with a logit above the threshold.

    Raises:
        TypeError: If `query` or `key` is neither a Parameter nor a list of Parameters, `max_logits` are not numbers, or
            another argument has the wrong type.
        ValueError: If `max_logits` is not finite or not 1-dimensional, `threshold` is not greater than 0, rows do not
            exist, appear more than once or are both queries and keys, or the numbers of rows and heads do not match.

    Examples:
        >>> from mindspore import nn
        >>> from ms_optim import qk_clip
        >>> query, key = nn.Dense(8, 4 * 16, has_bias=False), nn.Dense(8, 2 * 16, has_bias=False)
        >>> before = query.weight.asnumpy().copy()
        >>> qk_clip(query.weight, key.weight, [12.0, 400.0, 3.0, -1.0], threshold=100.0, key_heads=2)
        1
        >>> print((query.weight.asnumpy() / before)[::16, 0])  # a head that shares its key is compensated
        [2.  0.5 1.  1. ]
    """
    form = Form(key_heads, query_rope, key_values, query_rows, key_rows)
    layer = Layer(CLIP, "", query, key, form)
    check_positive(CLIP, "threshold", threshold)
    return layer.clip(max_logits, float(threshold))


class QKClip(Callback):
    """Scales the query and key projections after each step of ``Model.train``, by :func:`qk_clip`.

    It calls a function of yours for the largest attention logits of the step. In a training loop of your own, call
    :meth:`clip` after each step. `clipped` is the number of heads that the last step clipped; `total` is the sum of
    this number over all steps. In sink mode callbacks are called once for many steps: train with
    ``dataset_sink_mode=False`` , or with a ``sink_size`` of 1.

    Args:
        layers (list[tuple]): For each layer, the pair of `query` and `key` as in :func:`qk_clip`.
        max_logits (Callable): Called without arguments after each step. It returns the largest logits: a Tensor or an
            array of shape (layers, heads), or a list with the logits of each layer.
        threshold (Union[float, int]): The largest logit allowed, greater than 0. Default: ``100.0`` .
        key_heads (Union[int, None]): As in :func:`qk_clip`. Default: ``None`` .
        query_rope (int): As in :func:`qk_clip`. Default: ``0`` .
        key_values (int): As in :func:`qk_clip`. Default: ``0`` .
        query_rows (Union[Sequence[int], None]): As in :func:`qk_clip`. Default: ``None`` .
        key_rows (Union[Sequence[int], None]): As in :func:`qk_clip`. Default: ``None`` .

    Raises:
        TypeError: If `layers` is not a list of pairs, `max_logits` cannot be called, or another argument has the wrong
            type.
        ValueError: If `layers` is empty, or another argument is out of its range.

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import Parameter, nn, ops
        >>> from ms_optim import Muon, QKClip
        >>> class Attention(nn.Cell):
        ...     def __init__(self, heads=2, width=8):
        ...         super().__init__()
        ...         self.heads, self.max_logits = heads, Parameter(ops.zeros(heads), requires_grad=False)
        ...         self.query, self.key, self.value = (nn.Dense(width, width) for _ in range(3))
        ...     def construct(self, x):
        ...         q, k, v = (
        ...             part(x).reshape((*x.shape[:2], self.heads, -1)).swapaxes(1, 2)
        ...             for part in (self.query, self.key, self.value)
        ...         )
        ...         logits = ops.matmul(q, k.swapaxes(2, 3)) / q.shape[-1] ** 0.5
        ...         ops.assign(self.max_logits, ops.amax(ops.stop_gradient(logits), (0, 2, 3)))
        ...         return ops.matmul(ops.softmax(logits), v).swapaxes(1, 2).reshape(x.shape)
        >>> net = Attention()
        >>> layers = [([net.query.weight, net.query.bias], [net.key.weight, net.key.bias])]
        >>> callback = QKClip(layers, lambda: [net.max_logits], threshold=100.0)
        >>> x = np.random.default_rng(0).standard_normal((16, 5, 8)).astype(np.float32)
        >>> data = ms.dataset.NumpySlicesDataset((x, 0 * x), shuffle=False).batch(4)
        >>> model = ms.Model(net, nn.MSELoss(), Muon(net.trainable_params()))
        >>> model.train(1, data, callbacks=[callback])
        >>> print(callback.total)
        0
    """

    layers: list[Layer]
    max_logits: Callable[[], Any]
    threshold: float
    clipped: int
    total: int

    def __init__(
        self,
        layers: Sequence[tuple[Any, Any]],
        max_logits: Callable[[], Any],
        threshold: float = 100.0,
        *,
        key_heads: int | None = None,
        query_rope: int = 0,
        key_values: int = 0,
        query_rows: Sequence[int] | None = None,
        key_rows: Sequence[int] | None = None,
    ):
        super().__init__()
        pairs = ordered(layers)
        if pairs is None or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
            fail(TypeError, CALLBACK, "layers", "a list of pairs of queries and keys", layers)
        if not pairs:
            fail(ValueError, CALLBACK, "layers", "a list of at least one pair", layers)
        if not callable(max_logits):
            fail(TypeError, CALLBACK, "max_logits", "a function without arguments", max_logits)
        check_positive(CALLBACK, "threshold", threshold)
        self.threshold, self.max_logits = float(threshold), max_logits
        form = Form(key_heads, query_rope, key_values, query_rows, key_rows)
        self.layers = [Layer(CALLBACK, f"layers[{i}].", query, key, form) for i, (query, key) in enumerate(pairs)]
        self.clipped = self.total = 0

    def clip(self) -> int:
        """Clip all layers by the logits that the function returns.

        Returns:
            int, the number of heads with a logit above the threshold.

        Raises:
            TypeError: If the function does not return numbers.
            ValueError: If it returns another number of layers, or logits that :func:`qk_clip` rejects.
        """
        found = self.max_logits()
        logits = list(found) if isinstance(found, (Tensor, np.ndarray)) and found.ndim == 2 else ordered(found)
        if logits is None:
            fail(TypeError, CALLBACK, "max_logits", "a function that returns the logits of each layer", found)
        if len(logits) != len(self.layers):
            raise ValueError(
                f"For '{CALLBACK}', 'max_logits' must return the logits of {len(self.layers)} layers, but returned "
                f"{len(logits)}."
            )
        self.clipped = sum(layer.clip(of_layer, self.threshold) for layer, of_layer in zip(self.layers, logits))
        self.total += self.clipped
        return self.clipped

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Clip after the optimizer's step."""
        self.clip()
