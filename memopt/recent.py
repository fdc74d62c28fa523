"""A table of limited size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import ItemsView
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """The values that were used last, `most` of them at most: the one not used for longest goes first."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, key: Key) -> Value:
        self._values.move_to_end(key)
        return self._values[key]

    def __setitem__(self, key: Key, value: Value) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        while len(self._values) > self.most:
            self._values.popitem(last=False)

    def get(self, key: Key) -> Value | None:
        return self[key] if key in self._values else None

    def drop(self, key: Key) -> None:
        """Forget the value of a key, if there is one."""
        self._values.pop(key, None)

    def items(self) -> ItemsView[Key, Value]:
        return self._values.items()

    def clear(self) -> None:
        self._values.clear()
