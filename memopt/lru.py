"""A dict of limited size."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class LruCache(OrderedDict[Key, Value]):
    """A dict of at most `most` values, in which a further value replaces the least recently used one. Iterate over
    `items()`: reading a value by its key changes the order."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __getitem__(self, key: Key) -> Value:
        self.move_to_end(key)
        return super().__getitem__(key)

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self.most:
            del self[next(iter(self))]

    def get(self, key: Key, default: Value | None = None) -> Value | None:  # type: ignore[override]
        """The value of a key, which counts as a use of it; `default` if there is none."""
        if key not in self:
            return default
        self.move_to_end(key)
        return super().__getitem__(key)
