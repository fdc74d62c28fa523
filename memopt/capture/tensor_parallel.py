"""Layers split by tensor parallelism: the part of one card, and the exchanges between cards within layers."""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from memopt.compat.modules import own_tp_plan
from memopt.device.cluster import Ring
from memopt.device.storages import storage_bytes
from passes.graphs.node_facts import block_of


def _repeated(value: Tensor, cards: int, dim: int) -> Tensor:
    return torch.cat([value] * cards, dim)


def _cut(value: Tensor, cards: int, dim: int) -> Tensor:
    if value.shape[dim] % cards:
        raise ValueError(
            f"'tp': {cards} in mesh does not divide dimension {dim} of a value of shape {tuple(value.shape)}; give "
            f"sequences whose length {cards} divides"
        )
    return value.narrow(dim, 0, value.shape[dim] // cards).clone(memory_format=torch.contiguous_format)


def _whole(value: Tensor, cards: int, dim: int) -> Tensor:
    return value.clone(memory_format=torch.contiguous_format)


def _operator(name: str, kernel: Callable[[Tensor, int, int], Tensor]) -> Any:
    """Defines an operator of the namespace `memopt`, and returns it."""
    schema = "(Tensor value, int cards, int dim) -> Tensor"
    torch.library.define(f"memopt::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(f"memopt::{name}", "CompositeExplicitAutograd", kernel)
    torch.library.register_fake(f"memopt::{name}", kernel)
    return getattr(torch.ops.memopt, name)


GATHER_SHARDS = _operator("gather_shards", _repeated)
"""Every card gets the parts of all cards along `dim`; their gradients are summed, and each card gets its part."""
SCATTER_SUMS = _operator("scatter_sums", _cut)
"""The values of all cards are summed, and each card gets its part along `dim`."""
GATHER_COPIES = _operator("gather_copies", _repeated)
"""As `GATHER_SHARDS`, for a result that all cards read alike: each takes its part of the same gradient."""
TAKE_PART = _operator("take_part", _cut)
"""Each card takes its part along `dim` of a value that all cards have; nothing is exchanged but gradients."""
SUM_SHARDS = _operator("sum_shards", _whole)
"""The values of all cards are summed on all of them (`dim` is ignored); a gradient is the same on all cards."""

_BACKWARDS = {
    GATHER_SHARDS: SCATTER_SUMS,
    SCATTER_SUMS: GATHER_SHARDS,
    GATHER_COPIES: TAKE_PART,
    TAKE_PART: GATHER_COPIES,
}
_GATHERS, _SCATTERS = {GATHER_SHARDS.default, GATHER_COPIES.default}, {SCATTER_SUMS.default}


def _differentiate(operator: Any, backward: Any) -> None:
    def setup(ctx: Any, inputs: tuple[Tensor, int, int], output: Tensor) -> None:
        _, ctx.cards, ctx.dim = inputs

    def gradient(ctx: Any, tangent: Tensor) -> tuple[Tensor, None, None]:
        return (tangent if backward is None else backward(tangent, ctx.cards, ctx.dim)), None, None

    torch.library.register_autograd(operator.default, gradient, setup_context=setup)


for _forward, _backward in _BACKWARDS.items():
    _differentiate(_forward, _backward)
_differentiate(SUM_SHARDS, None)


def is_exchange(node: fx.Node) -> bool:
    """Whether the node stands for an exchange between the cards of a tensor-parallel group."""
    return node.target in _GATHERS or node.target in _SCATTERS or node.target == SUM_SHARDS.default


def exchange_seconds(node: fx.Node, ring: Ring) -> float:
    """Seconds that the exchange of `node` (see `is_exchange`) takes over a ring of cards."""
    (given,) = node.all_input_nodes
    if node.target == SUM_SHARDS.default:
        return ring.sum_seconds(storage_bytes(node.meta["val"]))
    whole = node if node.target in _GATHERS else given
    return ring.gather_seconds(storage_bytes(whole.meta["val"]))


COLUMNS, ROWS, GATHERED_COLUMNS = "colwise", "rowwise", "colwise_gather_output"
STYLES = (COLUMNS, ROWS, GATHERED_COLUMNS)
_SEQUENCE, _LAST = 1, -1


def styles_of(model: nn.Module, cards: int, plan: Mapping[str, str] | None) -> dict[str, str]:
    """The style by which each layer of a model is split over `cards`, by the layer's path. `plan` maps patterns of
    paths ("layers.*.attention.wq") to styles; without it, the model's own plan (`tp_plan` of transformers) is used.

    Raises `ValueError` where there is no plan, where `plan` has an unknown style or a pattern that no module matches,
    where a named layer is neither `Linear` nor `Embedding`, and where `cards` does not divide a size."""
    own = plan if plan is not None else own_tp_plan(model)
    if not own:
        raise ValueError(
            f"{type(model).__name__} does not say how 'tp' in mesh splits its layers; give tp_plan, such as "
            "{'layers.*.attention.wq': 'colwise', 'layers.*.attention.wo': 'rowwise'}"
        )
    styles = dict(_styles(model, own, given=plan is not None))
    for path, style in styles.items():
        weight = _weight(model.get_submodule(path), path)
        dim = _split_dim(model.get_submodule(path), style)
        if weight.shape[dim] % cards:
            raise ValueError(
                f"'tp': {cards} in mesh does not divide the {weight.shape[dim]} "
                f"{'rows' if dim == 0 else 'columns'} of {path}.weight; give a size that does"
            )
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(getattr(model, "config", None), name, None)
        if isinstance(heads, int) and heads % cards:
            raise ValueError(f"'tp': {cards} in mesh does not divide {name}={heads}; give a size that does")
    return styles


def part_of_one_card(model: nn.Module, cards: int, styles: Mapping[str, str]) -> nn.Module:
    """Reduce a model on "meta", whose layers are split by these styles (`styles_of`), to one card's part of it, in
    place, and return it: parameters get their local shapes, and hooks stand for the exchanges with the other cards."""
    for path, style in styles.items():
        _split(model.get_submodule(path), style, cards)
    regions = _regions(styles)
    for path in regions:
        _exchange_input(model.get_submodule(path), GATHER_SHARDS, cards)
    blocks = list(dict.fromkeys(block for path in regions if (block := block_of(path))))
    if blocks:
        _exchange_input(model.get_submodule(blocks[0]), TAKE_PART, cards)
        if not any(style != ROWS and "." not in path for path, style in styles.items()):
            _exchange_output(model.get_submodule(blocks[-1]), GATHER_COPIES, cards, _SEQUENCE)
    return model


def _split(layer: nn.Module, style: str, cards: int) -> None:
    dim = _split_dim(layer, style)
    layer.weight = _part(_weight(layer, ""), cards, dim)
    bias = getattr(layer, "bias", None)
    if bias is not None and style != ROWS:
        layer.bias = _part(bias, cards, 0)
    if style == ROWS and isinstance(layer, nn.Embedding):
        _exchange_output(layer, SUM_SHARDS, cards, 0)
    elif style == ROWS:
        _exchange_output(layer, SCATTER_SUMS, cards, _SEQUENCE)
    elif style == GATHERED_COLUMNS:
        _exchange_output(layer, GATHER_COPIES, cards, _LAST)


def _exchange_input(module: nn.Module, exchange: Any, cards: int) -> None:
    """Have the first floating-point argument of a module's calls go through an exchange along its sequence."""

    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _with_first(module, args, kwargs, lambda value: exchange(value, cards, _SEQUENCE))

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _exchange_output(module: nn.Module, exchange: Any, cards: int, dim: int) -> None:
    """Have what a module returns, or the first of a tuple, go through an exchange along `dim`."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return exchange(output[0], cards, dim), *output[1:]
        return exchange(output, cards, dim)

    module.register_forward_hook(hook)


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters and buffers are on "meta": it takes no memory for them."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(meta, requires_grad=tensor.requires_grad) if is_parameter else meta
    return copy.deepcopy(model, memo)


def _styles(model: nn.Module, plan: Mapping[str, str], *, given: bool) -> Iterator[tuple[str, str]]:
    """The paths of the layers that a plan names, with their styles. A model's own plan may name layers that it does not
    have, and styles that split nothing."""
    paths = [path for path, _ in model.named_modules()]
    for pattern, style in plan.items():
        matching = fnmatch.filter(paths, pattern)
        if given and style not in STYLES:
            raise ValueError(f"unknown style {style!r} for {pattern!r} in tp_plan; known are {', '.join(STYLES)}")
        if given and not matching:
            raise ValueError(
                f"tp_plan names {pattern!r}, which no module of {type(model).__name__} matches; give patterns of the "
                "names in model.named_modules()"
            )
        yield from ((path, style) for path in matching if style in STYLES)


def _weight(layer: nn.Module, path: str) -> torch.Tensor:
    weight = getattr(layer, "weight", None)
    if not isinstance(layer, (nn.Linear, nn.Embedding)) or weight is None:
        raise ValueError(f"tp_plan splits {path}, a {type(layer).__name__}, but only Linear and Embedding can be split")
    return weight


def _split_dim(layer: nn.Module, style: str) -> int:
    """The dimension of the weight that is split; an embedding is split by its rows, one for each word."""
    return 1 if style == ROWS and isinstance(layer, nn.Linear) else 0


def _part(parameter: torch.Tensor, cards: int, dim: int) -> nn.Parameter:
    shape = list(parameter.shape)
    shape[dim] //= cards
    meta = torch.empty(shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(meta, requires_grad=parameter.requires_grad)


def _regions(styles: Mapping[str, str]) -> list[str]:
    """The paths of the modules whose input is gathered: the parents of layers that are split by columns, which read one
    input; a layer outside of blocks by itself."""
    found: dict[str, None] = {}
    for path, style in styles.items():
        if style != ROWS:
            parent = path.rpartition(".")[0]
            found[parent if any(part.isdigit() for part in parent.split(".")) else path] = None
    return list(found)


def _with_first(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], change: Any
) -> tuple[Any, dict[str, Any]]:
    """The arguments of a module's call with the first floating-point tensor changed, positional ones first.

    Raises `ValueError` where there is none."""
    named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    floating = (one for one, value in named.items() if isinstance(value, torch.Tensor) and value.is_floating_point())
    first = next(floating, None)
    if first is None:
        raise ValueError(
            f"'tp' in mesh splits the sequence that {type(module).__name__} is called with, but no argument is a "
            "floating-point tensor; give a tp_plan that names only layers of modules that take hidden states"
        )
    named[first] = change(named[first])
    return tuple(named[number] for number in range(len(args))), {name: named[name] for name in kwargs}
