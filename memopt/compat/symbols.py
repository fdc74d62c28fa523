"""Symbolic sizes: their values, bounds and names, and the conditions on them that a trace assumed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx

from memopt.compat.fakes import FakeTensorMode
from memopt.errors import CaptureError
from passes.compat import free_unbacked_symbols, private

# No underscores, but undocumented.
PRIVATE_NAMES = private("""
    torch: SymInt.node?
    torch.fx.experimental.sym_node: SymNode.has_hint? .hint? .expr? .shape_env? .maybe_as_float?
    torch.fx.experimental.symbolic_shapes: ShapeEnv.bound_sympy .produce_guards_expression .evaluate_guards_expression
        .guards? .replacements? .replacements_slocs? rebind_unbacked guard_scalar
    torch.utils._sympy.symbol: SymT.UNBACKED_FLOAT symbol_is_type
""")


_known_sizes: ContextVar[tuple[Mapping[str, int], bool] | None] = ContextVar("known_sizes", default=None)
"""The values of symbols by their names, and whether they may be smaller."""


@contextmanager
def known_sizes(sizes: Mapping[str, int], *, may_be_smaller: bool = False) -> Iterator[None]:
    """Context in which `upper_bound` uses these values for symbols, by symbol name."""
    token = _known_sizes.set((sizes, may_be_smaller))
    try:
        yield
    finally:
        _known_sizes.reset(token)


def sizes_up_to(largest: Mapping[str, int]) -> AbstractContextManager[None]:
    """Context in which `upper_bound` assumes each of these symbols, by name, to be at most the given value."""
    return known_sizes(largest, may_be_smaller=True)


def fixed_float(value: object) -> float | None:
    """The value of a symbolic float that a guard requires to have one value; the guard may be on the symbol, or on the
    expression that the float stands for. None for anything else."""
    if not isinstance(value, torch.SymFloat):
        return None
    node: Any = value.node
    fixed: float | None = node.maybe_as_float()
    if fixed is None and node.has_hint():
        equal = (guard.expr for guard in node.shape_env.guards if guard.expr.func.__name__ == "Equality")
        fixed = node.hint if any(one.lhs == node.expr and one.rhs.is_number for one in equal) else None
    return fixed


def fix_float(value: torch.SymFloat) -> None:
    """Add a guard on the value of a symbolic float: Dynamo compiles again for a call in which the float differs."""
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    guard_scalar(value)


def has_unknown_float(value: Any) -> bool:
    """Whether the shape of a tensor depends on a float without a known value."""
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    if not isinstance(value, torch.Tensor):
        return False
    return any(symbol_is_type(one, SymT.UNBACKED_FLOAT) for one in free_unbacked_symbols(value.shape))


def upper_bound(size: torch.SymInt) -> int:
    """The largest value that a symbolic size may take, at least 0: from `known_sizes` or `sizes_up_to` where these name
    its symbols, else its hint, else the symbols' bounds. Raises `CaptureError` if a symbol has no bound."""
    node: Any = size.node
    known, may_be_smaller = _known_sizes.get() or ({}, False)
    values = {s: known[s.name] for s in node.expr.free_symbols if s.name in known}
    if not values and node.has_hint():
        return int(node.hint)
    bound = _bound(node, values)
    if may_be_smaller and not _grows(node.expr):
        for symbol in values:
            least = node.shape_env.bound_sympy(symbol).lower
            fewer = {**values, symbol: int(least) if _is_limit(least) and least > 0 else 0}
            try:
                lower = _bound(node, fewer)
            except ZeroDivisionError:
                lower = _bound(node, fewer := {**values, symbol: 1})
            if lower > bound:
                values, bound = fewer, lower
    if not _is_limit(bound):
        mend = f"call torch._check({size} <= …) in the model"
        raise CaptureError(f"the size {size} depends on data and has no bound; {mend}")
    return max(int(bound), 0)


def largest_value(size: int | torch.SymInt) -> int:
    """The size itself, or, for a symbolic one, the largest value that it may take (see `upper_bound`)."""
    return size if isinstance(size, int) else upper_bound(size)


def _bound(node: Any, values: Mapping[Any, int]) -> Any:
    """The upper bound of a symbolic size, as sympy gives it, if the symbols in `values` have these values."""
    import sympy

    return node.shape_env.bound_sympy(sympy.sympify(node.expr.xreplace(values))).upper


def _grows(expression: Any) -> bool:
    """Whether an expression of sizes is known never to decrease when one of its symbols increases."""
    if expression.is_Add or expression.is_Mul:
        return all(map(_grows, expression.args))
    return bool(expression.is_Symbol or (expression.is_nonnegative and expression.is_number))


def data_symbols_of(value: Any) -> set[str]:
    """The names of the data-dependent symbols in a node's value: a tensor, a number, or tuples and lists of these."""
    if isinstance(value, (tuple, list)):
        return set().union(*map(data_symbols_of, value))
    symbolic = isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat))
    return {symbol.name for symbol in free_unbacked_symbols(value)} if symbolic else set()


def shape_symbols(value: Any) -> set[str]:
    """The names of the symbols in the shape of a tensor, or in those of all tensors in tuples and lists."""
    if isinstance(value, (tuple, list)):
        return set().union(*map(shape_symbols, value))
    if not isinstance(value, torch.Tensor):
        return set()
    sizes: list[Any] = [size for size in value.shape if isinstance(size, torch.SymInt)]
    return {symbol.name for size in sizes for symbol in size.node.expr.free_symbols}


def is_symbolic(value: Any) -> bool:
    """Whether a value is a symbolic number, or a tensor with a symbolic size."""
    if isinstance(value, torch.Tensor):
        return any(not isinstance(size, int) for size in value.shape)
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def has_gaps(value: Any) -> bool:
    """Whether a value is a tensor of known sizes between whose elements there is memory that is not its own."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    if not all(isinstance(number, int) for number in (*value.shape, *value.stride())):
        return False
    reach = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return 0 not in value.stride() and reach >= value.numel() > 0


def plain_symbol(size: int | torch.SymInt) -> str | None:
    """The name of a size's symbol; None if the size is a number, or an expression such as `2*s0`."""
    if isinstance(size, int):
        return None
    expression: Any = size.node.expr
    return expression.name if expression.is_symbol else None


def symbol_values(symbolic: Sequence[Any], concrete: Sequence[Any]) -> dict[Any, int]:
    """Sympy expression → value, for each symbolic number among the inputs `symbolic` and each symbolic size or stride
    of a tensor among them. `concrete` has the same inputs, in order, with values."""
    found: dict[Any, int] = {}
    for one, other in zip(symbolic, concrete, strict=True):
        pairs = [(one, other)]
        if isinstance(one, torch.Tensor):
            pairs = [*zip(one.shape, other.shape, strict=True), *zip(one.stride(), other.stride(), strict=True)]
        found.update((size.node.expr, int(value)) for size, value in pairs if isinstance(size, torch.SymInt))
    return found


def with_values(sizes: Iterable[int | torch.SymInt], values: Mapping[Any, int]) -> tuple[int, ...]:
    """The sizes as numbers, with `values` substituted for symbols."""
    return tuple([size if isinstance(size, int) else int(size.node.expr.xreplace(values)) for size in sizes])


def rebind_data_sizes(mode: FakeTensorMode, node: fx.Node, result: Any) -> None:
    """Make the data-dependent symbols in `result` equal to those that the first run of `node` in the fake mode made.
    `result` is what a second run returned."""
    from torch.fx.experimental.symbolic_shapes import rebind_unbacked

    rebind_unbacked(mode.shape_env, node, result)


def limit_of(size: torch.SymInt) -> int | None:
    """The largest value of a symbolic size that the conditions recorded at the time of the call allow, or None."""
    node: Any = size.node
    upper = node.shape_env.bound_sympy(node.expr).upper
    return int(upper) if _is_limit(upper) else None


def _is_limit(bound: Any) -> bool:
    """Whether a bound of a size, from sympy, is a real limit, not the largest 64-bit integer, torch's for no limit."""
    return bool(bound.is_Integer) and bound < _NO_LIMIT


_NO_LIMIT = 2**62


class AssumedSizes:
    """The conditions on the symbolic sizes of a region (`sizes`) under which its graphs are valid, also those that are
    found after Dynamo's callback, while graphs are traced, and that Dynamo does not check."""

    def __init__(self, sizes: Sequence[torch.SymInt]) -> None:
        self._sizes = sizes
        self._known = -1
        self._condition: str | None = None

    def hold(self, values: Sequence[int]) -> bool:
        """Whether the conditions hold for these values of `sizes`, the argument of the constructor, in its order."""
        if not self._sizes:
            return True
        shape_env: Any = self._sizes[0].node.shape_env
        if self._known != len(shape_env.guards):
            self._known = len(shape_env.guards)
            self._condition = shape_env.produce_guards_expression(list(self._sizes))
        return not self._condition or bool(shape_env.evaluate_guards_expression(self._condition, list(values)))

    def broken(self, values: Sequence[int]) -> dict[str, str]:
        """Symbol name → line of the model that made a condition on it that does not hold for these values (as in
        `hold`). If no condition can be named, "torch" for every symbol."""
        expressions: list[Any] = [size.node.expr for size in self._sizes]
        known = dict(zip(expressions, values, strict=True))
        guards: Any = self._sizes[0].node.shape_env.guards
        failing = [guard for guard in guards if _fails(guard.expr, known)]
        found = {symbol.name: _line(guard.sloc) for guard in failing for symbol in guard.expr.free_symbols}
        return found or {expression.name: "torch" for expression in expressions if expression.is_symbol}


def _fails(condition: Any, known: dict[Any, int]) -> bool:
    """Whether a condition does not hold for these values of symbols, or divides by a value of 0."""
    try:
        return bool(condition.xreplace(known) == False)  # noqa: E712  (a sympy value)
    except ZeroDivisionError:
        return True


def line_that_fixed(tensor: torch.Tensor, dimension: int) -> str | None:
    """The line of the model that made this size of a fake tensor a constant, though it was captured as a symbol. None
    if the size is a symbol still, or no line is known."""
    shape_env: Any = getattr(getattr(tensor, "fake_mode", None), "shape_env", None)
    size: Any = tensor.shape[dimension]
    if isinstance(size, torch.SymInt):
        size = size.node.expr
    if shape_env is None or not (isinstance(size, int) or size.is_number):
        return None
    symbols = (symbol for symbol, value in shape_env.replacements.items() if value == size)
    return next((_line(shape_env.replacements_slocs[symbol]) for symbol in symbols), None)


def _line(location: Any) -> str:
    """File, line and function where a condition arose: in the model's code, or in torch's."""
    return str(location.maybe_user_loc or location.framework_loc).split("  # ")[-1]
