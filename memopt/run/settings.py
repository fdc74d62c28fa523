"""The code and the settings of a model's modules, on which its calls depend besides their inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from itertools import chain, compress
from operator import is_not, itemgetter
from types import CodeType
from typing import Any, TypeAlias

from torch import nn

from memopt.compat.modules import forward_hook_tables, modules_of
from memopt.lru import LruCache

_PLAIN = frozenset((bool, int, float, str, type(None)))
_MOST_CHANGES = 4
"""A number that changes more often counts steps or follows a schedule: then only whether it is zero matters."""
_MOST_STATES = 64
"""The number of states that are remembered."""

_Table: TypeAlias = dict[str, Any]


class Settings:
    """Gives each state of a model's modules a number: the same one for equal code and settings, another one after each
    change. Settings are attributes of plain types, such as `training`, a dropout's probability or whether activations
    are checkpointed, also those of `config` objects of modules."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._modules: list[nn.Module] = []
        self._hook_tables: list[Sized] = []
        self._readers: list[tuple[Callable[[_Table], tuple[Any, ...]], _Table]] = []
        self._attributes = 0
        """The number of attributes of all tables when the readers were made."""
        self._latest: list[Any] = []
        self._changes: Counter[int] = Counter()
        """How often each setting has changed, by its position."""
        self._number = 0
        self._numbers: LruCache[tuple[Any, ...], int] = LruCache(_MOST_STATES)
        """The numbers of the latest states."""
        self._states = 0

    def number(self, modules: Sequence[nn.Module] | None = None) -> int:
        """The number of the current state: equal for two moments only if code and settings are the same. `modules` are
        the model's, if the caller has them already (`modules_of`).

        It is called at every step, and takes 0.1 ms for a model of 12 layers."""
        modules = modules_of(self.model) if modules is None else list(modules)
        if modules != self._modules:
            self._watch(modules)
        latest = self._read()
        if len(latest) != len(self._latest) or any(map(is_not, latest, self._latest)):
            self._note(latest)
        return self._number

    @property
    def have_schedule(self) -> bool:
        """Whether a setting changes so often, as a count of steps does, that its values no longer count as different
        states. Of a number, only whether it is zero still counts."""
        return any(changes > _MOST_CHANGES for changes in self._changes.values())

    @contextmanager
    def naming(self) -> Iterator[None]:
        """A context for a run of the model. If the run changes settings from None to a string and no others, the state
        keeps its `number`, so that nothing is captured again: transformers sets `config.problem_type` from the first
        labels. Enter the context right after a call of `number`."""
        before, number = self._latest, self._number
        yield
        latest = self._read()
        if self._latest is not before or len(latest) != len(before):
            return  # attributes came or went
        changed = [(old, new) for old, new in zip(before, latest, strict=True) if old is not new]
        state = self._state(_without_tensors(latest))
        if state not in self._numbers and all(old is None and type(new) is str for old, new in changed):
            self._numbers[state] = number

    def _watch(self, modules: list[nn.Module]) -> None:
        """Find the settings of these modules, and forget earlier changes."""
        self._modules, self._latest = modules, []
        self._hook_tables = list(forward_hook_tables(modules))
        self._changes.clear()
        configs = {
            id(config): config for module in modules if hasattr(config := vars(module).get("config"), "__dict__")
        }
        tables = [vars(holder) for holder in (*modules, *configs.values())]
        self._readers = [(_reader(table), table) for table in tables]
        self._attributes = sum(map(len, tables))

    def _read(self) -> list[Any]:
        """The settings now, and the code of each kind of module."""
        if sum([len(table) for _, table in self._readers]) != self._attributes:
            self._watch(self._modules)
        try:
            settings = [read(table) for read, table in self._readers]
        except KeyError:  # an attribute was replaced by another one
            self._watch(self._modules)
            settings = [read(table) for read, table in self._readers]
        kinds: dict[Any, None] = dict.fromkeys(map(type, self._modules))
        codes = [getattr(kind.forward, "__code__", None) for kind in kinds]
        return [*chain.from_iterable(settings), *codes, sum(map(len, self._hook_tables))]

    def _note(self, latest: list[Any]) -> None:
        """Make these settings the present ones."""
        if len(latest) != len(self._latest):
            self._changes.clear()
        else:
            self._changes.update(compress(range(len(latest)), map(is_not, latest, self._latest)))
        self._latest = _without_tensors(latest)
        state = self._state(self._latest)
        if state not in self._numbers:
            self._states += 1
            self._numbers[state] = self._states
        self._number = self._numbers[state]

    def _state(self, settings: list[Any]) -> tuple[Any, ...]:
        """The settings as a key; a number that changes often counts only as zero or not zero."""
        often = {position for position, changes in self._changes.items() if changes > _MOST_CHANGES}
        return tuple(
            bool(value) if position in often and type(value) in (int, float) else value
            for position, value in enumerate(settings)
        )


def _reader(table: _Table) -> Callable[[_Table], tuple[Any, ...]]:
    """A function that reads the plain settings in a table, and the instance's own `forward` if it has one."""
    names = [name for name, value in table.items() if type(value) in _PLAIN or name == "forward"]
    if not names:
        return lambda _: ()
    return itemgetter(*names, names[0])  # a single name would not give a tuple


def _without_tensors(settings: list[Any]) -> list[Any]:
    """The settings, with its type in place of each value that is no longer plain: it may be a tensor, which must not be
    kept alive."""
    return [
        value if type(value) in _PLAIN or callable(value) or isinstance(value, CodeType) else type(value)
        for value in settings
    ]
