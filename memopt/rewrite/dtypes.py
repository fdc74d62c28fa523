"""The option `precision`, and the plan of dtypes that is made from it: by default 16 bits in and out wherever kernels
sum in fp32, else fp32.

The value of the option is called a policy: a name such as "auto" or "bf16", from which the 16-bit dtype for a device
follows, or a dict of rules that set the dtypes of operators, modules or nodes. The plan has a dtype and a reason for
each operator.
"""

from __future__ import annotations

import fnmatch
import operator
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import fx

from memopt.device.devices import device_of
from memopt.device.hardware import Hardware
from passes.graphs.node_facts import has_floats, module_path
from passes.graphs.op_kinds import (
    FP32,
    FP32_SET_DTYPE,
    LOWER_PRECISION,
    follows_input,
    is_cast,
    is_new,
    is_pointwise,
    mutated_arguments,
    op_name,
)


@dataclass(frozen=True)
class Choice:
    """The dtype in which one operator computes, and the reason in a few words."""

    dtype: torch.dtype
    reason: str
    wished: bool = False
    """Whether the user, or a measurement on sample data, asks for it. Then none of its values is saved rounded."""


@dataclass(frozen=True)
class PrecisionPlan:
    """The dtype chosen for each operator, by name of its node; nodes without a choice follow their input. `low` is the
    16-bit dtype."""

    low: torch.dtype
    choices: Mapping[str, Choice] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def assignment(self) -> dict[str, torch.dtype]:
        """Name of a node → its dtype, as `passes.InsertCasts` takes them."""
        return {name: choice.dtype for name, choice in self.choices.items()}

    @property
    def reasons(self) -> dict[str, str]:
        """Name of a node → its dtype and the reason, for printing with a graph: `bf16: autocast's list`."""
        return {name: f"{dtype_name(choice.dtype)}: {choice.reason}" for name, choice in self.choices.items()}

    @property
    def exact(self) -> frozenset[str]:
        """The names of the nodes that are in fp32 because the user, or a measurement, requires it."""
        return frozenset(
            name for name, choice in self.choices.items() if choice.wished and choice.dtype == torch.float32
        )

    def summary(self) -> str:
        """The number of operators in each dtype, as in `220 ops in bf16, 31 in fp32`."""
        counts = Counter(dtype_name(choice.dtype) for choice in self.choices.values())
        (most, times), *others = counts.most_common() or [("fp32", 0)]
        return ", ".join([f"{times} ops in {most}", *(f"{number} in {name}" for name, number in others)])


NAMES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype: `bf16`, `fp16`, `fp32`, or torch's own for others."""
    return next((name for name, entry in NAMES.items() if entry == dtype), str(dtype).removeprefix("torch."))


def dtype_of(name: str) -> torch.dtype:
    """The dtype for a name that users give, such as "bf16". Raises `ValueError` for others."""
    if name not in NAMES:
        raise ValueError(f"unknown dtype {name!r} in precision; known are fp32, bf16, fp16")
    return NAMES[name]


DEFAULT = "default"


@dataclass(frozen=True)
class Rules:
    """Dtypes by pattern, in the user's order.

    A pattern is the name of a node, of an operator (`softmax`, `aten.softmax`), or of a module with all that is in it
    (`lm_head`, `layers.0`, `layers.*.mlp`). If several match, a node's name takes precedence over an operator's name,
    and that over module patterns, of which the longest counts."""

    dtypes: tuple[tuple[str, torch.dtype], ...] = ()

    @staticmethod
    def of(given: Mapping[str, str]) -> Rules:
        """Returns the rules of a user's dict, pattern → name of a dtype, without its entry "default". Raises ValueError
        for unknown dtypes."""
        return Rules(tuple((pattern, dtype_of(name)) for pattern, name in given.items() if pattern != DEFAULT))

    def choose(self, node: fx.Node) -> tuple[str, torch.dtype] | None:
        """Returns (pattern, dtype) of the rule that applies to a node, or None."""
        matching = [(_rank(pattern, node), pattern, dtype) for pattern, dtype in self.dtypes]
        rank, pattern, dtype = max(matching, key=lambda rule: rule[0], default=(0, "", torch.float32))
        return (pattern, dtype) if rank else None

    def unmatched(self, nodes: Iterable[fx.Node]) -> tuple[str, ...]:
        """Returns the patterns that match none of the nodes."""
        known = list(nodes)
        return tuple(pattern for pattern, _ in self.dtypes if not any(_rank(pattern, node) for node in known))


def _rank(pattern: str, node: fx.Node) -> int:
    """Returns how closely a pattern matches a node; 0 if it does not match."""
    if pattern == node.name:
        return 1_000_000
    if op_name(node) and pattern.removeprefix("aten.") == op_name(node):
        return 100_000
    path = module_path(node)
    parts = path.split(".")
    prefixes = (".".join(parts[: count + 1]) for count in range(len(parts)))
    return len(pattern) if path and any(fnmatch.fnmatchcase(prefix, pattern) for prefix in prefixes) else 0


PolicyName: TypeAlias = Literal["fp32", "bf16", "fp16", "search", "auto"]
Policy: TypeAlias = PolicyName | Mapping[str, str]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


def check_policy(policy: Any) -> Policy:
    """Returns the policy unchanged. Raises `TypeError` or `ValueError` if it is neither a known name nor a dict whose
    values are known dtypes (for its entry "default" also "auto" or "search")."""
    if isinstance(policy, str):
        if policy not in POLICIES:
            known = ", ".join(map(repr, POLICIES))
            raise ValueError(f"precision must be one of {known}, or a dict of rules, not {policy!r}")
        return policy
    if not isinstance(policy, Mapping) or not all(isinstance(part, str) for pair in policy.items() for part in pair):
        raise TypeError(
            "precision must be a name, such as 'bf16', or a dict of dtypes by operator, module or node, such as "
            f"{{'default': 'bf16', 'lm_head': 'fp32'}}, not {policy!r}"
        )
    for pattern, name in policy.items():
        if not (pattern == DEFAULT and name in ("auto", "search")):
            dtype_of(name)
    return policy


def searches(policy: Policy) -> bool:
    """Returns whether a policy, or the default of a user's rules, is "search"."""
    return (policy if isinstance(policy, str) else policy.get(DEFAULT)) == "search"


def low_dtype(policy: Policy, hardware: Hardware) -> torch.dtype:
    """Returns the dtype that a policy, or the "default" of a user's rules, means on a device: for "auto" and "search"
    bf16 where the device computes in it, fp16 where it has only that, else fp32. "search" means bf16 also on a CPU that
    is no faster in it. Raises ValueError for fp16 where `hardware` has no rate for it."""
    name = policy if isinstance(policy, str) else policy.get(DEFAULT, "auto")
    if name in ("auto", "search"):
        device = device_of(hardware)
        if name == "search" and device.is_host:
            return torch.bfloat16
        known = (dtype for dtype in (torch.bfloat16, torch.float16) if device.computes_in(hardware, dtype))
        return next(known, torch.float32)
    dtype = dtype_of(name)
    if dtype == torch.float16 and str(dtype).removeprefix("torch.") not in hardware.flops:
        raise ValueError(f"precision={name!r}: {hardware.name} does not compute in {dtype_name(dtype)}; use 'auto'")
    return dtype


FP32_OURS = frozenset(
    {
        "cross_entropy_loss", "ctc_loss", "binary_cross_entropy", "nll_loss_nd", "mean", "var", "std", "var_mean",
        "std_mean", "norm", "nansum",
    }
)  # fmt: skip
"""Operators in fp32 that are on no list of autocast's: composites that call a listed one, and sums."""

KERNELS_SUM_IN_FP32 = frozenset(
    {"layer_norm", "native_layer_norm", "rms_norm", "group_norm", "native_group_norm", "batch_norm"}
    | {"native_batch_norm", "instance_norm"}
    | {f"{kind}{dims}d" for kind in ("avg_pool", "adaptive_avg_pool", "upsample_nearest") for dims in (1, 2, 3)}
)
"""Operators whose kernels take 16 bits, compute in fp32 and round once, also where autocast lists them for fp32."""

SATURATING = frozenset({"sigmoid", "tanh"})
"""Operators whose results lie close to a limit that 16 bits would round them to: a probability of 0.999 to 1, so that a
loss takes the logarithm of 0."""

_BEHIND = ("dropout", "add", "masked_fill", "where")


class _State(Enum):
    """The precision of a value: fp32 of a master parameter or an input, 16 bits, or fp32 by decision or request."""

    MASTER = 0
    LOW = 1
    FULL = 2


@dataclass(frozen=True)
class AssignPrecision:
    """Decides the dtype of each operator of a graph captured in fp32. The graph is not changed: `passes.InsertCasts`
    applies the plan that is returned.

    Operators on autocast's lists get 16 bits or fp32 as their list says, norms the dtype of their input. Elementwise
    ones compute in 16 bits unless a full-size operand is fp32, or they saturate and a loss may read them. Sums that
    only attention's softmax reads, and that softmax, compute in 16 bits. The residual stream, which starts at the
    embeddings, is summed in fp32. A cast to fp32 in the model widens a 16-bit value, and an fp32 value that was widened
    before becomes 16 bits again: in a model captured in fp32, `.to(input_dtype)` appears as `.to(float32)`. Unknown
    operators get operands in the dtype that they had before."""

    low: torch.dtype
    rules: Rules = field(default_factory=Rules)
    author_typed: Collection[str] = frozenset()
    """Names of nodes that keep the dtypes that they have."""
    kept_out: tuple[tuple[str, str], ...] = ()
    """Nodes that must compute in fp32, with the reason, as `screen` finds them."""
    sums_in_16_bits: frozenset[str] = frozenset()
    """Operators that must compute in fp32 on this device, for whose kernels `KERNELS_SUM_IN_FP32` is not true
    (`Device.sums_in_16_bits`)."""

    @property
    def sum_in_fp32(self) -> frozenset[str]:
        """The operators of `KERNELS_SUM_IN_FP32` whose kernels sum in fp32 on this device, too."""
        return KERNELS_SUM_IN_FP32 - self.sums_in_16_bits

    def __call__(self, graph_module: fx.GraphModule) -> PrecisionPlan:
        calls = [node for node in graph_module.graph.nodes if node.op == "call_function"]
        walk = _Walk(self)
        for node in calls:
            walk.visit(node)
        return PrecisionPlan(self.low, walk.choices)


class _Walk:
    """One walk over the calls, in order, that collects the choices."""

    def __init__(self, decider: AssignPrecision) -> None:
        self.decider = decider
        self.kept_out = dict(decider.kept_out)
        self.states: dict[fx.Node, _State] = {}
        self.given: set[fx.Node] = set()
        """Parameters and inputs, and what is computed from them."""
        self.choices: dict[str, Choice] = {}

    def visit(self, node: fx.Node) -> None:
        operands = [source for source in node.all_input_nodes if has_floats(source)]
        if any(operand.op == "placeholder" or operand in self.given for operand in operands):
            self.given |= {node, *operands}
        if not has_floats(node) and not operands:
            return
        if node.target is operator.getitem or is_new(node) or op_name(node) == "detach":
            self.states[node] = self._state(operands[0]) if operands else _State.MASTER
            return
        chosen = self._choose(node, operands)
        if chosen is None:
            self.states[node] = self._state(operands[0]) if follows_input(node) and operands else _State.MASTER
            return
        self.choices[node.name] = chosen
        self.states[node] = _State.LOW if chosen.dtype == self.decider.low else _State.FULL

    def _choose(self, node: fx.Node, operands: list[fx.Node]) -> Choice | None:
        low, name = self.decider.low, op_name(node)
        if node.name in self.decider.author_typed or not name or not operands:
            return None
        if written := [argument for argument in mutated_arguments(node) if has_floats(argument)]:
            return self._as(self._state(written[0]), "it writes in place")
        if node.name in self.kept_out:
            return Choice(torch.float32, self.kept_out[node.name], wished=True)
        if is_cast(node):
            return self._cast(node, operands[0])
        if (rule := self.decider.rules.choose(node)) is not None:
            return Choice(rule[1], f"rule {rule[0]!r}", wished=True)
        if name in SATURATING and _leads_to_fp32(node):
            reason = "its results, which are returned or read in fp32, would round to 1 in 16 bits where it saturates"
            return Choice(torch.float32, reason, wished=True)
        if name in self.decider.sum_in_fp32 and self._state(operands[0]) is _State.LOW:
            return Choice(low, "its kernel computes in fp32 inside")
        if (
            name == "softmax"
            and self._state(operands[0]) is _State.LOW
            and only_read_by(node, LOWER_PRECISION, _BEHIND)
        ):
            return Choice(low, "its kernel computes in fp32 inside, and a 16-bit product reads it")
        if node.kwargs.get("dtype") == torch.float32 or (name in FP32_SET_DTYPE and torch.float32 in node.args):
            return Choice(torch.float32, "the model asks for fp32")
        if name in LOWER_PRECISION:
            return Choice(low, "as under torch.autocast")
        if name in FP32 | FP32_SET_DTYPE and not self._small_power(node, operands):
            return Choice(torch.float32, "as under torch.autocast")
        if name in FP32_OURS:
            return Choice(torch.float32, "it sums, or is made of operators that torch.autocast keeps in fp32")
        if follows_input(node):
            return None
        return self._pointwise(node, operands) if is_pointwise(node) else None

    def _small_power(self, node: fx.Node, operands: list[fx.Node]) -> bool:
        """Returns whether a call is x² or x³ of a 16-bit value, which are as exact as products."""
        if op_name(node) != "pow" or len(operands) != 1 or self.decider.low != torch.bfloat16:
            return False
        return node.args[1] in (2, 3, 2.0, 3.0) and self._state(operands[0]) is _State.LOW

    def _cast(self, node: fx.Node, source: fx.Node) -> Choice | None:
        if not has_floats(node) or node.meta["val"].dtype != torch.float32:
            return None
        if source.meta["val"].dtype != torch.float32:
            return None
        if str(node.target) == "aten.to.dtype_layout":
            return self._as(self._state(source), "moves between devices")
        if self._state(source) is _State.FULL and self._before_widening(source) is _State.LOW:
            return Choice(self.decider.low, "the model casts back")
        return Choice(torch.float32, "the model casts to fp32")

    def _before_widening(self, node: fx.Node) -> _State:
        """Returns the state of the value from which `node`, an fp32 value, was computed before the model widened it;
        LOW if that is not visible."""
        pending, seen = [node], {node}
        while pending:
            node = pending.pop(0)
            if op_name(node) == "softmax":
                return self._state(node.all_input_nodes[0])
            if is_cast(node):
                state = self._state(node.all_input_nodes[0])
                return _State.LOW if state is _State.LOW else _State.FULL
            if not (is_pointwise(node) or follows_input(node) or op_name(node) in ("mean", "sum", "var", "rsqrt")):
                continue
            fresh = [source for source in node.all_input_nodes if source not in seen]
            seen.update(fresh)
            pending += fresh
        return _State.LOW

    def _pointwise(self, node: fx.Node, operands: list[fx.Node]) -> Choice | None:
        # As text, so that symbols in sizes leave no guards.
        size = str(node.meta["val"].shape) if isinstance(node.meta["val"], torch.Tensor) else None
        full_size = [operand for operand in operands if size is None or str(operand.meta["val"].shape) == size]
        states = {self._state(operand) for operand in full_size or operands}
        if op_name(node) in ("add", "sub") and only_read_by(node, {"softmax"}, _BEHIND):
            states -= {_State.FULL}
        elif _State.LOW in states and op_name(node) in ("add", "sub") and any(map(self._stream, operands)):
            return Choice(torch.float32, "the residual stream is summed in fp32")
        if _State.FULL in states:
            return Choice(torch.float32, "an operand is fp32")
        if _State.LOW in states or _State.LOW in {self._state(operand) for operand in operands}:
            return Choice(self.decider.low, "elementwise, operands in 16 bits")
        if _State.FULL in {self._state(operand) for operand in operands}:
            return Choice(torch.float32, "an operand is fp32")
        return None

    def _stream(self, operand: fx.Node) -> bool:
        """Returns whether an fp32 parameter or input holds activations or positions rather than a bias."""
        if self._state(operand) is not _State.MASTER or operand not in self.given:
            return False
        return sum(str(size) != "1" for size in operand.meta["val"].shape) > 1

    def _as(self, state: _State, reason: str) -> Choice | None:
        """Returns the choice that leaves a value in its state; None for fp32 parameters, inputs and what follows them,
        which need none."""
        if state is _State.MASTER:
            return None
        return Choice(self.decider.low if state is _State.LOW else torch.float32, reason)

    def _state(self, node: fx.Node) -> _State:
        return self.states.get(node, _State.MASTER)


def _leads_to_fp32(node: fx.Node) -> bool:
    """Whether a value is returned, or read by an operator that computes in fp32: directly, or through casts, calls that
    only move data, and elementwise operators on this value alone, as `1 - p`."""
    for reader in node.users:
        name = op_name(reader)
        if reader.op == "output" or name in (FP32 | FP32_SET_DTYPE | FP32_OURS) - KERNELS_SUM_IN_FP32:
            return True
        alone = is_pointwise(reader) and [one for one in reader.all_input_nodes if has_floats(one)] == [node]
        if (alone or is_cast(reader) or follows_input(reader)) and _leads_to_fp32(reader):
            return True
    return False


def only_read_by(
    node: fx.Node, readers: Collection[str], behind: Collection[str] = ("add", "masked_fill", "where")
) -> bool:
    """Whether a value is read at all, and only by the operators named in `readers`.

    They may also read it through casts, through calls that follow their input's dtype, and through the operators in
    `behind`."""
    for reader in node.users:
        passes_on = is_cast(reader) or follows_input(reader) or op_name(reader) in behind
        if op_name(reader) not in readers and not (passes_on and only_read_by(reader, readers, behind)):
            return False
    return bool(node.users)
