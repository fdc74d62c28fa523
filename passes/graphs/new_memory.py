"""Which operators are known to make their results in new memory."""

from torch.fx import Node

from passes.graphs.op_kinds import mutated_arguments, op_name
from passes.ops.inplace_ops import known_targets

_IN_PLACE = frozenset(known_targets())
# Besides those of `inplace_variants`: operators that make their results in new memory.
_MAKERS = frozenset(
    {
        "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "_log_softmax",
        "_native_batch_norm_legit_functional", "_softmax", "_to_copy", "addmm",
        "avg_pool2d_backward", "baddbmm", "bmm", "cat", "clone", "constant_pad_nd", "convolution",
        "convolution_backward", "embedding", "embedding_dense_backward", "gather", "index", "max_pool2d_with_indices",
        "max_pool2d_with_indices_backward", "mean", "mm", "native_batch_norm_backward", "native_dropout",
        "native_dropout_backward", "native_group_norm", "native_group_norm_backward", "native_layer_norm",
        "native_layer_norm_backward", "nll_loss_backward", "rsub", "sum",
    }
)  # fmt: skip


def makes_memory(node: Node) -> bool:
    """Returns whether every result of a call is known to lie in new memory of its own."""
    if node.op != "call_function" or mutated_arguments(node):
        return False
    return node.target in _IN_PLACE or op_name(node) in _MAKERS
