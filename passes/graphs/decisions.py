"""The decisions in a joint graph: indices, masks and roundings that are computed from floating-point numbers.

Forward and recomputation may be compiled into different kernels, which round differently: in 16 bits a value that stays
within a kernel keeps the bits of fp32, and one that is read from memory has lost them. Nearly every operator returns
nearly the same result then. One that decides may return a quite different one: the index of another expert or of
another entry of a codebook, or a mask with other elements. A step that computes it twice may differentiate a function
that the forward did not compute.

In the backward, a comparison at which the derivative of a continuous function jumps (that of relu at zero) may have
either result. But the gradient of `amax` goes to the elements that equal the maximum: it finds none of them if the
backward computes them again with bits other than those from which the forward took the maximum.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

from passes.graphs.aliases import viewed_argument
from passes.graphs.node_facts import (
    OPERATOR_OVERLOAD,
    ancestors,
    arguments_of,
    backward_nodes,
    is_random,
    is_tangent,
    tensors,
)
from passes.graphs.op_kinds import follows_input, is_new

# They decide although their results are floating-point numbers. All others whose results are integers or booleans do.
_ROUNDINGS = frozenset(
    {
        "bernoulli", "binomial", "ceil", "copysign", "fix", "floor", "floor_divide", "fmod", "frac", "hardshrink",
        "heaviside", "histc", "poisson", "remainder", "round", "sgn", "sign", "threshold", "trunc", "_sample_dirichlet",
        "_standard_gamma",
    }
)  # fmt: skip
# Their integers do not depend on the values that they read: seeds of dropout, its masks, and memory for their backward.
_OWN_STATE = ("attention", "dropout", "batch_norm", "rnn", "lstm", "gru")
# Decomposed into comparisons and signs, these are continuous at the thresholds.
_CONTINUOUS = frozenset(
    {
        "celu", "clamp", "elu", "fmax", "fmin", "hardsigmoid", "hardswish", "hardtanh", "huber_loss", "leaky_relu",
        "lerp", "log_sigmoid_forward", "logaddexp", "logaddexp2", "logit", "logsumexp", "maximum", "minimum",
        "nan_to_num", "nansum", "renorm", "rrelu_with_noise", "rrelu_with_noise_functional", "selu", "sinc",
        "smooth_l1_loss", "softplus", "softshrink", "special_entr", "special_log_ndtr", "special_xlog1py", "xlogy",
        "_prelu_kernel", "_safe_softmax",
    }
)  # fmt: skip
# Their floating-point results are numbers that they read, or exact functions of single ones.
_EXACT = frozenset(
    {
        "abs", "arange", "cat", "ceil", "clamp", "clamp_max", "clamp_min", "copy", "cummax", "cummin", "floor", "fmax",
        "fmin", "full", "histc", "kthvalue", "masked_fill", "maximum", "minimum", "mode", "neg", "ones", "relu",
        "round", "scalar_tensor", "scatter", "select_scatter", "sign", "slice_scatter", "stack", "trunc", "where",
        "zeros",
    }
)  # fmt: skip
# Drawn by the generator's state or a seed alone; of their arguments the shape is read, or numbers.
_DRAWS = frozenset(
    {
        "bernoulli", "cauchy", "exponential", "geometric", "inductor_random", "log_normal", "normal_functional", "rand",
        "rand_like", "randn", "randn_like", "random", "uniform",
    }
)  # fmt: skip
_CASTS = frozenset({"_to_copy", "convert_element_type"})
_COMPARISONS = frozenset({"eq", "ge", "gt", "le", "lt", "ne"})
# Operators of the backward that compare or round what they read, for these values of an argument.
_DECIDE_WITHIN: dict[str, tuple[str, tuple[Any, ...]]] = {
    "grid_sampler_2d_backward": ("interpolation_mode", (1,)),  # nearest
    "grid_sampler_3d_backward": ("interpolation_mode", (1,)),
    "_cdist_backward": ("p", (math.inf,)),
    "_pdist_backward": ("p", (math.inf,)),
    "_segment_reduce_backward": ("reduce", ("max", "min")),
}

MARKED: set[Any] = set()
"""The operators that `mark_deciding` was called with."""


def mark_deciding(deciding: Any) -> None:
    """Marks an operator (`torch.ops.library.name`, or one overload of it) as making discrete choices, as `topk` does:
    compiled steps, and steps on a card, then never recompute a call of it that reads computed floating-point numbers.

    Call it before the model is optimised. Raises `TypeError` for anything but an operator."""
    if isinstance(deciding, OPERATOR_OVERLOAD):
        MARKED.add(deciding)
    elif isinstance(deciding, type(torch.ops.aten.add)):
        overloads: Any = deciding
        MARKED.update(getattr(overloads, name) for name in overloads.overloads())
    else:
        raise TypeError(f"mark_deciding takes an operator, such as torch.ops.aten.softmax, not {deciding!r}")


def find_decisions(graph: Graph) -> frozenset[Node]:
    """Returns the calls of a joint graph's forward that must not be recomputed, since the backward needs the very bits
    that they gave in the forward.

    Some of them make a discrete choice from numbers that may be rounded differently the second time. On the results of
    the others a choice in the backward depends, such as that of the elements that equal a maximum.

    Numbers that are exact each time do not count: inputs, copies, integers, draws from a saved seed or state. So masks
    of dropout, and masks made of positions, are not among the results."""
    return _Search(graph).run()


class _Search:
    """One walk over a graph, in its order."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.late = backward_nodes(graph)
        self.found: set[Node] = set()
        self.loose: set[Node] = set()
        """The values that may have other bits when they are computed again."""
        self.gradients: set[Node] = set()
        """Nodes that depend on the outputs' gradients."""

    def run(self) -> frozenset[Node]:
        for node in self.graph.nodes:
            if is_tangent(node) or any(source in self.gradients for source in node.all_input_nodes):
                self.gradients.add(node)
                argument, values = _DECIDE_WITHIN.get(_name(node), ("", ()))
                if argument and arguments_of(node).get(argument) in values:
                    self.pin(node.all_input_nodes)
            elif node.op == "call_function":
                self.visit(node)
        return frozenset(self.found)

    def visit(self, node: Node) -> None:
        read = [source for source in node.all_input_nodes if source in self.loose]
        if not read:
            if not _is_exact(node):
                self.loose.add(node)
        elif node.target is operator.getitem:
            if _floats(node) and (read[0] not in self.found or not _is_wide(node)):
                self.loose.add(node)
        elif is_new(node) or (_name(node) in _DRAWS and not _draws_by_values(node)):
            return
        elif not _decides(node):
            if _floats(node):
                self.loose.add(node)
        elif node in self.late:
            if self.decides_again(node):
                self.pin(read)
        elif self.is_continuous(node):
            self.loose.add(node)
        else:
            self.found.add(_maker(node))
            if _floats(node) and not _is_wide(node):
                self.loose.add(node)

    def is_continuous(self, node: Node) -> bool:
        """Returns whether a call is part of a continuous operator that was decomposed, and is read in the forward by
        other parts of it alone."""
        whole = _whole(node)
        if _is_marked(node) or whole not in _CONTINUOUS:
            return False
        return all(_whole(user) == whole for user in node.users if user not in self.late)

    def decides_again(self, node: Node) -> bool:
        """Returns whether a call of the backward that decides by the forward's values must read the forward's bits. It
        need not if it is a threshold, at which the derivative of a continuous function jumps."""
        if _name(node) not in _COMPARISONS:
            masks = all(value.dtype == torch.bool for value in tensors(node.meta.get("val")))
            return _is_marked(node) or not (masks or _name(node) in ("sign", "sgn"))
        makers = [self.makers(source) for source in node.all_input_nodes]
        return len(makers) == 2 and any(
            not sources.isdisjoint(ancestors(read for result in results - sources for read in result.all_input_nodes))
            for results, sources in (makers, makers[::-1])
        )

    def pin(self, values: Iterable[Node]) -> None:
        """Adds to `found` the calls of the forward, of those in `loose`, that `values` are computed from."""
        self.found.update(maker for value in values for maker in self.makers(value) if maker in self.loose)

    def makers(self, value: Node) -> set[Node]:
        """Returns the calls of the forward that make what a value of the backward is computed from."""
        behind = ancestors([value], (self.late - self.gradients).__contains__)
        return {_maker(node) for node in behind if node not in self.late and node.op == "call_function"}


def _name(node: Node) -> str:
    """Returns `topk` for a call of `aten.topk.default`, and alike for other operators; "" for other functions."""
    return str(node.target.overloadpacket.__name__) if isinstance(node.target, OPERATOR_OVERLOAD) else ""


def _whole(node: Node) -> str:
    """Returns the name of the operator that a call was decomposed from; its own where it is whole."""
    original: Any = node.meta.get("original_aten")
    return str(original.overloadpacket.__name__) if isinstance(original, OPERATOR_OVERLOAD) else _name(node)


def _is_marked(node: Node) -> bool:
    return node.target in MARKED or node.meta.get("original_aten") in MARKED


def _maker(node: Node) -> Node:
    """Returns the call that makes the memory of a forward value."""
    while (source := node.args[0] if node.target is operator.getitem else viewed_argument(node)) is not None:
        assert isinstance(source, Node)
        if source.op != "call_function":
            break
        node = source
    return node


def _decides(node: Node) -> bool:
    """Returns whether a call makes a discrete choice (an index, a mask, a rounding) by the values that it reads."""
    if _is_marked(node) or _name(node) in _ROUNDINGS or "fake_quantize" in _name(node):
        return True
    if _name(node) == "div" and arguments_of(node).get("rounding_mode") is not None:
        return True
    discrete = any(not _is_float(value) for value in tensors(node.meta.get("val")))
    return discrete and not any(part in _name(node) for part in _OWN_STATE)


def _draws_by_values(node: Node) -> bool:
    """Returns whether a call draws with probabilities that are a tensor."""
    return _name(node) == "bernoulli" and not isinstance(arguments_of(node).get("p"), float)


def _is_exact(node: Node) -> bool:
    """Returns whether a call of exact values gives the same bits each time, in whichever kernel it is computed."""
    if not _floats(node) or node.target is operator.getitem or follows_input(node) or is_new(node):
        return True
    if _name(node) in _CASTS:
        return _casts_exactly(node)
    return _name(node) in _EXACT or (_name(node) in _DRAWS and "randn" not in node.args)


def _casts_exactly(node: Node) -> bool:
    """Returns whether a cast of an exact value rounds nothing, or a random draw, which no kernel keeps in more bits."""
    source = node.all_input_nodes[0]
    before, after = source.meta["val"].dtype, node.meta["val"].dtype
    if before == after or before == torch.bool or is_random(source) or _name(source) == "inductor_random":
        return True
    return after.itemsize >= (before.itemsize if _is_float(source.meta["val"]) else 4)


def _is_float(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _floats(node: Node) -> bool:
    return any(map(_is_float, tensors(node.meta.get("val"))))


def _is_wide(node: Node) -> bool:
    """Returns whether all floating-point results have 32 bits or more: kernels compute with no more than these."""
    return all(value.dtype.itemsize >= 4 for value in tensors(node.meta.get("val")) if _is_float(value))
