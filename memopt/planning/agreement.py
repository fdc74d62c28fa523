"""The same plan on every rank: the first rank that plans a call decides for those that plan the same call."""

from __future__ import annotations

import base64
import json
import zlib

from memopt.compat.ddp import shared_store
from memopt.planning.plan_cache import Kept


def agreed(key: str, kept: Kept) -> Kept:
    """The plan of the rank that came first with this key: `kept`, or another one that ranks found.

    Plans of ranks differ where they measured other times, or searched for a limited time. Nobody waits: a rank with
    other shapes has other keys.
    """
    store = shared_store()
    if store is None:
        return kept
    own = _packed(kept)
    first: bytes = store.compare_set(f"memopt/{key}", "", own)
    return kept if first == own.encode() else _unpacked(first)


def _packed(kept: Kept) -> str:
    return base64.b64encode(zlib.compress(json.dumps(kept.as_json()).encode())).decode()


def _unpacked(text: bytes) -> Kept:
    return Kept.from_json(json.loads(zlib.decompress(base64.b64decode(text))))
