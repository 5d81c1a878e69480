"""Sparse gradients of embeddings: the dense result, or words; never a silent wrong one."""

import mindspore as ms
import numpy as np
from cases import CASES, OF_EACH_KIND, every_case
from harness import numbers, tensor
from mindspore import nn
from refusals import refused

# A row tensor is made dense before it reaches a rule; the other optimizers differ in their rules alone.
each_kind = every_case([case for case in CASES if case.name in (*OF_EACH_KIND, "Muon")])
ROWS, WIDTH, STEPS = 6, 3, 4
LOOKUPS = [[1, 2, 2], [0, 5, 1], [3, 3, 3], [2, 0, 4]]


class Net(nn.Cell):
    """An embedding whose gradient is a RowTensor if sparse, and a classifier."""

    def __init__(self, sparse):
        super().__init__()
        rng = np.random.default_rng(0)
        table = tensor(rng.standard_normal((ROWS, WIDTH)), "float32")
        target = "CPU" if sparse else "DEVICE"
        self.embedding = nn.EmbeddingLookup(ROWS, WIDTH, param_init=table, target=target, sparse=sparse)
        weight = tensor(rng.standard_normal((2, WIDTH)), "float32")
        self.out = nn.Dense(WIDTH, 2, weight_init=weight, bias_init="zeros")

    def construct(self, x):
        return ms.ops.square(self.out(self.embedding(x))).sum()


def trained(case, sparse, **arguments):
    net = Net(sparse)
    step = nn.TrainOneStepCell(net, case.optimizer(net.trainable_params(), 0.05, weight_decay=0.1, **arguments))
    for ids in LOOKUPS[:STEPS]:
        step(ms.Tensor(ids, ms.int32))
    return [numbers(p) for p in net.trainable_params()]


@each_kind
def test_a_row_tensor_counts_as_the_dense_gradient(case):
    ms.set_context(mode=ms.GRAPH_MODE)
    for sparse, dense in zip(trained(case, True), trained(case, False)):
        np.testing.assert_allclose(sparse, dense, rtol=1e-5, atol=1e-6)


@each_kind
def test_without_a_kernel_a_row_tensor_is_refused(case):
    ms.set_context(mode=ms.GRAPH_MODE)
    refused(
        TypeError,
        r"'embedding.embedding_table' must be a Tensor, but is sparse \(a RowTensor\).*sparse=False",
        lambda: trained(case, True, backend="composite"),
    )


@each_kind
def test_rows_without_their_indices_are_refused(case, backend):
    """What PyNative mode hands over of a RowTensor: the values, and nothing that says which rows they are."""
    refused(
        ValueError,
        r"embedding_table' must have the parameter's shape \(6, 3\), but got \(3, 3\)\..*PyNative mode loses",
        lambda: trained(case, True, backend=backend),
    )
