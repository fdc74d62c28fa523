"""Kernels of a card that do not allocate their results in the order in which they return them. Where the allocator puts
later blocks depends on that order."""

from __future__ import annotations

from memopt.compat.operators import schema_of
from memopt.device.op_call import OpCall
from memopt.solver.problem import BlockCall

ORDER: dict[str, tuple[int, ...]] = {
    "native_dropout": (1, 0),  # aten/src/ATen/native/cuda/Dropout.cu: the mask comes first
    "_fused_dropout": (1, 0),
    "_thnn_fused_lstm_cell": (2, 0, 1),  # aten/src/ATen/native/cuda/RNN.cu: the workspace for the backward comes first
}
"""The positions of an operator's results, in the order in which its kernel allocates them."""


def calls_in_order(call: OpCall, workspace_bytes: int) -> tuple[BlockCall, ...]:
    """The allocator's calls of a kernel (`Op.calls`) that is in `ORDER`, whose workspace comes after its results; empty
    for all others."""
    order = ORDER.get(schema_of(call.op).name.split("::")[-1], ())
    if len(order) != len(call.outputs):
        return ()
    results = tuple(BlockCall(True, place, call.outputs[place].bytes) for place in order)
    if not workspace_bytes:
        return results
    return (
        *results,
        BlockCall(True, len(order), workspace_bytes),
        BlockCall(False, len(order), workspace_bytes),
    )
