"""One operator of torch's OpInfo database in a small module, its plain twin beside its planned one. The database itself
is private to torch: whoever uses this imports it."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from types import MethodDescriptorType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import memopt
from examples.models import twins
from examples.models.twins import REFUSALS, said, verdict_of, where
from memopt.account.account import Account
from memopt.compat.operators import tree_leaves
from memopt.planning import stages as planning_stages
from memopt.planning.joined import Joined
from memopt.planning.planner import Request
from memopt.solver import Solution, simulate
from memopt.solver.min_cut import just_in_time

EXACT: dict[str, Any] = {**twins.EXACT, "optimizer": None}
ROOMY_GB = 1000.0
STAGES = ("all outputs", "loss", "in place", "transposed", "smallest", "derivative")
ALL, LOSS, IN_PLACE, TRANSPOSED, SMALLEST, DERIVATIVE = STAGES
"""The smallest budget, or everything recomputed that may be: with results that the call returns, with its loss alone,
with the operator that writes over its operand, with operands whose dimensions lie in memory in reverse order, and with
a loss of the operator's derivatives, where it has second ones."""
MOST_SAMPLES = 40
"""How many of an operator's samples are looked at to choose from."""

NAMED = "does not give the same bits"
"""In the notes of a plan whose operators round in another way than eager mode's."""


class NoCase(Exception):
    """The operator gives nothing to compare, for the reason in the message."""


@dataclass(frozen=True)
class Slot:
    """The place of a tensor among an operator's arguments."""

    number: int


@dataclass(frozen=True)
class ModuleSample:
    """A module with the arguments of its forward, in the form of a sample of an operator."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def input(self) -> Any:
        return self.args[0] if self.args else None


@dataclass(frozen=True)
class ModuleOperator:
    """A module class of torch's database (`torch.testing._internal.common_modules`), in the form of an operator."""

    info: Any
    supports_autograd: bool = True
    inplace_variant: None = None

    @property
    def name(self) -> str:
        return str(self.info.name)

    @property
    def supports_gradgrad(self) -> bool:
        return bool(self.info.supports_gradgrad)

    def supports_dtype(self, dtype: torch.dtype, device: str) -> bool:
        return dtype in self.info.dtypes

    def sample_inputs(self, device: str, dtype: torch.dtype, requires_grad: bool) -> Iterator[ModuleSample]:
        torch.manual_seed(5)
        for given in self.info.module_inputs_func(
            self.info, device=device, dtype=dtype, requires_grad=requires_grad, training=True
        ):
            made, called = given.constructor_input, given.forward_input
            module = self.info.module_cls(*made.args, **made.kwargs).to(dtype).train()
            yield ModuleSample(module, called.args, called.kwargs)


class Case(nn.Module):
    """The loss of an operator whose operands and results lie between operators that save them.

    Operands that take a gradient are parameters, other tensors are inputs of the call.
    """

    def __init__(self, op: Callable[..., Any], finish: Callable[[Any], Any], arguments: Any, stage: str) -> None:
        super().__init__()
        self.op, self.finish, self.transposed = op, finish, stage == TRANSPOSED
        self.all_outputs, self.derives = stage in (ALL, TRANSPOSED), stage == DERIVATIVE
        self.operands = nn.ParameterList()
        self.inputs: list[Tensor] = []
        self.template = self._emptied(arguments)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64 if self._is_double() else torch.float32))

    def _is_double(self) -> bool:
        return any(p.dtype in (torch.float64, torch.complex128) for p in self.operands)

    def _emptied(self, value: Any) -> Any:
        """The arguments with a slot in place of each tensor, which is kept as a parameter or an input."""
        if isinstance(value, Tensor):
            kept = value.detach().clone()
            if self.transposed and kept.layout is torch.strided:
                dims = list(reversed(range(kept.dim())))
                kept = kept.permute(dims).contiguous().permute(dims)
            if value.requires_grad:
                self.operands.append(nn.Parameter(kept))
                return Slot(len(self.operands) - 1)
            self.inputs.append(kept)
            return Slot(-len(self.inputs))
        if isinstance(value, dict):
            return {key: self._emptied(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._emptied(item) for item in value)
        return value

    def forward(self, gain: Tensor, *inputs: Tensor) -> Any:
        operands = [operand * self.scale * gain for operand in self.operands]
        args, kwargs = filled(self.template, operands, inputs)
        results = self.op(*args, **kwargs)
        results = self.finish(results)
        loss = torch.zeros_like(self.scale)
        if self.derives:
            found = [torch.tanh(one).sum() for one in tree_leaves(results) if _differentiable(one)]
            own = self.op.parameters() if isinstance(self.op, nn.Module) else ()
            results = torch.autograd.grad(found, [*operands, *own], create_graph=True, allow_unused=True)
        for result in tree_leaves(results):
            if isinstance(result, Tensor) and result.requires_grad:
                bent = torch.sin(result)
                loss = loss + (bent * torch.tanh(bent)).abs().sum()
        for operand in operands:
            loss = loss + torch.cos(operand).abs().sum() * 0.5
        return (loss, results) if self.all_outputs else loss


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and value.is_floating_point()


def as_it_is(results: Any) -> Any:
    return results


def filled(template: Any, operands: list[Tensor], inputs: tuple[Tensor, ...]) -> Any:
    """The template of an operator's arguments with tensors in its slots."""
    if isinstance(template, Slot):
        return operands[template.number] if template.number >= 0 else inputs[-template.number - 1]
    if isinstance(template, dict):
        return {key: filled(item, operands, inputs) for key, item in template.items()}
    if isinstance(template, list):
        return [filled(item, operands, inputs) for item in template]
    if isinstance(template, tuple):
        return tuple([filled(item, operands, inputs) for item in template])
    return template


@dataclass(frozen=True)
class Run:
    """What one step leaves behind: named tensors, and the state of the generator."""

    tensors: dict[str, Tensor | None]
    generator: Tensor


def step(model: Any, case: Case) -> Run:
    """One forward and backward from a fixed seed; gradients are dropped before it."""
    for parameter in case.parameters():
        parameter.grad = None
    torch.manual_seed(3)
    outputs = model(*inputs_of(case))
    loss = outputs[0] if case.all_outputs else outputs
    loss.backward()
    state = torch.get_rng_state()
    tensors: dict[str, Tensor | None] = {"loss": loss.detach().clone()}
    for number, leaf in enumerate(tree_leaves(outputs[1]) if case.all_outputs else ()):
        if isinstance(leaf, Tensor):
            tensors[f"output {number}"] = leaf.detach()
    for name, parameter in case.named_parameters():
        tensors[f"gradient of {name}"] = parameter.grad
    tensors |= {f"buffer {name}": buffer.clone() for name, buffer in case.named_buffers()}
    return Run(tensors, state)


def two_steps(model: Any, case: Case) -> tuple[Run, Run]:
    """The first run of what the model was planned or compiled to, and a later one: torch runs them differently."""
    return step(model, case), step(model, case)


def inputs_of(case: Case) -> tuple[Tensor, ...]:
    return (torch.ones((), dtype=case.scale.dtype), *[tensor.clone() for tensor in case.inputs])


def difference(ours: Run, plain: Run) -> tuple[float, str]:
    """The largest relative difference and where it is; 1 for other strides, types, or random numbers."""
    found = [(0.0, "")]
    for name, theirs in plain.tensors.items():
        mine = ours.tensors.get(name)
        if mine is None or theirs is None:
            if mine is not theirs:
                found.append((1.0, f"{name}: {'none' if mine is None else 'given'}, unlike plain"))
            continue
        if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            found.append((1.0, f"{name}: {mine.dtype}{list(mine.shape)} for {theirs.dtype}{list(theirs.shape)}"))
        elif apart := _apart(mine, theirs):
            found.append((apart, name))
        elif mine.layout is torch.strided and _strides(mine) != _strides(theirs):
            found.append((1.0, f"{name}: strides {list(mine.stride())} for {list(theirs.stride())}"))
    if not torch.equal(ours.generator, plain.generator):
        found.append((1.0, "state of the generator"))
    return max(found)


def _strides(tensor: Tensor) -> list[int]:
    """The strides of the dimensions with more than one element; none for an empty tensor."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for size, stride in sizes if size > 1] if tensor.numel() else []


def _apart(mine: Tensor, theirs: Tensor) -> float:
    if mine.layout is not torch.strided:
        mine, theirs = mine.to_dense(), theirs.to_dense()
    mine, theirs = mine.resolve_conj().resolve_neg(), theirs.resolve_conj().resolve_neg()
    if torch.equal(mine, theirs):
        return 0.0
    if mine.is_complex():
        mine, theirs = torch.view_as_real(mine), torch.view_as_real(theirs)
    mine, theirs = mine.double(), theirs.double()
    if not torch.equal(mine.isnan(), theirs.isnan()):
        return 1.0
    mine, theirs = mine.nan_to_num(0.0, 1e300, -1e300), theirs.nan_to_num(0.0, 1e300, -1e300)
    return float((mine - theirs).abs().max()) / max(float(theirs.abs().max()), 1e-30)


@contextlib.contextmanager
def everything_recomputed() -> Iterator[None]:
    """Plans made inside recompute all that may be recomputed, right before the backward operators that read it."""

    def forced(joined: Joined, request: Request) -> tuple[Joined, Solution, Account]:
        schedule = just_in_time(joined.problem, ())
        peak, added = simulate(joined.problem, schedule).peak_bytes, schedule.added_seconds(joined.problem)
        return joined, Solution(schedule, peak, added, 0.0, "forced"), request.account

    with mock.patch.object(planning_stages, "solve_on_card", forced):
        yield


def samples(op: Any, dtype: torch.dtype, most: int = 2) -> list[Any]:
    """Samples of the operator that take gradients: the one with the most elements, the one with most options, and
    others evenly among the first `MOST_SAMPLES`."""
    found = []
    for sample in islice(op.sample_inputs("cpu", dtype, requires_grad=True), MOST_SAMPLES):
        tensors = [leaf for leaf in tree_leaves((sample.input, sample.args, sample.kwargs)) if torch.is_tensor(leaf)]
        if isinstance(sample, ModuleSample) or any(tensor.requires_grad for tensor in tensors):
            found.append((sum(tensor.numel() for tensor in tensors), len(sample.kwargs) + len(sample.args), sample))
    if not found:
        raise NoCase("no sample takes a gradient")
    large = max(range(len(found)), key=lambda at: found[at][:2])
    rich = max(range(len(found)), key=lambda at: found[at][1::-1])
    others = (at * len(found) // most for at in range(most))
    return [found[at][2] for at in list(dict.fromkeys((large, rich, *others)))[:most]]


def case_of(op: Any, sample: Any, stage: str) -> Case:
    if isinstance(sample, ModuleSample):
        case = Case(sample.module, as_it_is, (sample.args, sample.kwargs), stage)
        case(*inputs_of(case))  # lazy modules make their parameters
        return case
    function = _as_method(op.inplace_variant if stage == IN_PLACE else op.op)
    arguments = ((sample.input, *sample.args), dict(sample.kwargs))
    return Case(function, sample.output_process_fn_grad, arguments, stage)


def _as_method(function: Any) -> Callable[..., Any]:
    """`torch.Tensor.add_` as a function that calls `add_` of its first argument: Dynamo of torch 2.11 breaks the graph
    at the former, and the operator would run in eager mode."""
    if not isinstance(function, MethodDescriptorType):
        return function
    name = function.__name__
    return lambda tensor, *args, **kwargs: getattr(tensor, name)(*args, **kwargs)


def trial(op: Any, dtype: torch.dtype, stages: tuple[str, ...] = STAGES, most_samples: int = 2) -> dict[str, Any]:
    """The records of an operator, by sample and stage, or one that says why there is nothing to compare."""
    warnings.simplefilter("ignore")
    record: dict[str, Any] = {}
    try:
        chosen = samples(op, dtype, most_samples)
    except Exception as error:
        return {"none": {"verdict": "no case", "message": said(error)}}
    for number, sample in enumerate(chosen):
        for stage in stages:
            if stage == IN_PLACE and op.inplace_variant is None:
                continue
            if stage == DERIVATIVE and not op.supports_gradgrad:
                continue
            record[f"{number}, {stage}"] = staged(op, sample, stage)
    return record


def staged(op: Any, sample: Any, stage: str) -> dict[str, Any]:
    torch.compiler.reset()
    try:
        case = case_of(op, sample, stage)
        plain = plain_run(case)
    except Exception as error:
        return {"verdict": "no case", "message": f"plain PyTorch: {said(error)}"}
    twin = copy.deepcopy(case)
    try:
        found = compared(planned(twin, stage), plain)
        if found["verdict"] == "rounding" and any(NAMED in note for note in memopt.plan_of(twin).notes):
            found["verdict"] = "rounding, named"
    except REFUSALS as refused:
        found = {"verdict": "refused", "message": said(refused), "where": where(refused)}
    except Exception as error:
        found = {"verdict": "error not ours", "message": said(error), "where": where(error)}
    if found["verdict"] != "right":
        found["aot_eager"] = compiled(copy.deepcopy(case), plain)
    return found


def plain_run(case: Case) -> tuple[Run, Run]:
    runs, again = (two_steps(twin, twin) for twin in (copy.deepcopy(case), copy.deepcopy(case)))
    apart, at = furthest(runs, again)
    if apart:
        raise NoCase(f"gives other numbers each time: {at}")
    return runs


def planned(case: Case, stage: str) -> tuple[Run, Run]:
    inputs = inputs_of(case)
    if stage == SMALLEST:
        budget = memopt.plan(case, ROOMY_GB, inputs, **EXACT).smallest_gb()
        memopt.optimize(case, budget, example_inputs=inputs, **EXACT)
        return two_steps(case, case)
    options = {**EXACT, "outputs": "all" if case.all_outputs else "loss"}
    with everything_recomputed():
        memopt.optimize(case, ROOMY_GB, example_inputs=inputs, **options)
        return two_steps(case, case)


def furthest(runs: tuple[Run, Run], plain: tuple[Run, Run]) -> tuple[float, str]:
    """The larger difference of two runs, and where it is."""
    found = [difference(*pair) for pair in zip(runs, plain, strict=True)]
    return max((apart, at and f"{which}{at}") for (apart, at), which in zip(found, ("first run: ", ""), strict=True))


def compared(runs: tuple[Run, Run], plain: tuple[Run, Run]) -> dict[str, Any]:
    apart, at = furthest(runs, plain)
    if not apart:
        return {"verdict": "right"}
    return {"verdict": verdict_of(apart), "message": f"{apart:.1e}: {at}"}


def compiled(case: Case, plain: tuple[Run, Run]) -> str:
    """Say what `torch.compile` with the backend aot_eager makes of the case."""
    try:
        torch.compiler.reset()
        return compared(two_steps(torch.compile(case, backend="aot_eager"), case), plain)["verdict"]
    except Exception as error:
        return f"fails: {said(error)[:100]}"
