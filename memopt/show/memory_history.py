"""Reads a snapshot of torch's memory history (`torch.cuda.memory._dump_snapshot`) of any run, and says what filled the
card.

The format is that of `torch.cuda.memory._snapshot`: segments with their blocks, and the events of each device. A
snapshot is a pickle that may come from anybody: nothing in it is called or imported.
"""

from __future__ import annotations

import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memopt.show.report import new_table
from memopt.terminal import Column, RenderableType
from memopt.units import size

_GAPS = 0.1
"""Gaps between blocks get a row if they are more than this share of the reserved bytes."""
_GAPS_ROW = "gaps between blocks"
_ACTIVATIONS, _BACKWARD, _STATE, _STEP = "activations", "gradients and backward", "optimizer state", "optimizer.step()"
_PARAMETERS, _BEFORE = "parameters and buffers", "held before the recording began"
_WRAPPERS = r"(^|/)(torch|einops|accelerate)/|^<"
"""A pattern of files of torch and of wrappers, whose lines do not say where the user's code allocated memory."""
# For each row, patterns of the function and the file of a frame. A stack belongs to the first row whose patterns match
# one of its frames. Stacks of the autograd engine's own threads have frames of C++ only.
_SIGNS = (
    (_STATE, r"(^|\.)_init_group$|(^|\.)init_state$", r"torch/optim/"),
    (_STEP, r"", r"torch/optim/"),
    (_BACKWARD, r"autograd::(Engine|Node|generated)|(^|\.)(backward|_engine_run_backward|grad)$", r""),
    (_ACTIVATIONS, r"(^|\.)_call_impl$", r"torch/nn/modules/module\.py"),
    (_PARAMETERS, r"(^|\.)(_apply|__init__|reset_parameters|load_state_dict|from_pretrained)$", r""),
)
_ADVICE = {
    _ACTIVATIONS: "memopt recomputes what is cheap to compute again, never holds the logits where a loss follows them "
    "(chunked_loss), and overwrites results that nothing reads any more (reinplace): all on by default",
    _BACKWARD: "gradients need not all be there at once if the optimizer steps within the backward: "
    'allow=memopt.DEFAULT_LEVERS | {"optimizer_in_backward"}; every plan counts the temporaries of the backward',
    _STATE: 'allow "low_bit_optimizer" (8 bits a value) or "offload_optimizer" (on the host)',
    _STEP: "with fused=True, optimizers such as AdamW need no temporaries for all parameters at once",
    _PARAMETERS: 'allow "bf16_parameters", which halves parameters, gradients and optimizer state',
    _BEFORE: "parameters and all else that was allocated before the recording: call "
    "torch.cuda.memory._record_memory_history() before the model is built to see them apart",
    _GAPS_ROW: "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True leaves fewer gaps; a plan counts those that are left",
}


_LINES = 15
"""The most lines of code that `history_parts` lists."""


class _SnapshotError(ValueError):
    """Raised for a file that is no snapshot of torch's memory history."""


@dataclass(frozen=True)
class _HeldBlock:
    """The blocks in use at the peak that are of one kind of memory and that one line of code allocated."""

    row: str
    place: str
    """The function that allocated them, with "file:line"."""
    nbytes: int
    blocks: int


@dataclass(frozen=True)
class _MemoryHistory:
    """The memory of one device at its peak: bytes by kind and line of code."""

    device: int
    reserved_bytes: int
    """Bytes of torch's segments when the snapshot was taken."""
    allocated_bytes: int
    """Bytes of the blocks that were in use when the snapshot was taken."""
    peak_bytes: int
    """The most bytes in use at once while events were recorded."""
    held: tuple[_HeldBlock, ...]
    """Blocks in use at that peak, the most bytes first."""
    gaps_bytes: int = 0
    """Bytes that were reserved at the peak and not in use."""
    missing_bytes: int | None = None
    """The bytes of the last allocation that failed; None if none did."""
    free_bytes: int = 0
    """The bytes that were free on the card when it failed."""

    @property
    def rows(self) -> dict[str, int]:
        """The bytes in use at the peak by kind (such as "activations"), the largest first; gaps between blocks are
        included where they are large."""
        found: Counter[str] = Counter()
        for one in self.held:
            found[one.row] += one.nbytes
        if self.gaps_bytes > _GAPS * (self.peak_bytes + self.gaps_bytes):
            found[_GAPS_ROW] = self.gaps_bytes
        return dict(found.most_common())

    @property
    def advice(self) -> dict[str, str]:
        """For each kind of memory that memopt can reduce, what it would do."""
        return {row: _ADVICE[row] for row in self.rows if row in _ADVICE}


class _Unpickler(pickle.Unpickler):
    """Reads containers, strings and numbers, and raises `_SnapshotError` at anything else."""

    def find_class(self, module: str, name: str) -> Any:
        raise _SnapshotError(f"the file refers to {module}.{name}, not only plain containers, strings and numbers")

    def persistent_load(self, pid: Any) -> Any:
        raise _SnapshotError(f"the file refers to something outside of itself ({str(pid)[:40]!r})")


def read_history(path: str | Path) -> _MemoryHistory:
    """The memory history in a file: of the device that ran out of memory, else of the one that held most. Raises
    `_SnapshotError` for a file that is no snapshot."""
    try:
        with open(path, "rb") as file:
            values = _Unpickler(file).load()
        segments, traces = values["segments"], values["device_traces"]
        devices = {segment["device"] for segment in segments} | {at for at, trace in enumerate(traces) if trace}
        found = [_of_device(device, segments, traces) for device in sorted(devices)]
        if not found:
            raise _SnapshotError(
                "the file has no blocks and no events; call torch.cuda.memory._record_memory_history() before the steps"
            )
        return max(found, key=lambda one: (one.missing_bytes is not None, one.peak_bytes))
    except OSError:
        raise
    except _SnapshotError as error:
        raise _SnapshotError(f"{path} is no snapshot of torch.cuda.memory: {error}") from None
    except (Exception, RecursionError) as error:  # a file that is no snapshot can fail in any way
        text = f"{type(error).__name__}: {str(error)[:80]}"
        raise _SnapshotError(f"{path} is no snapshot of torch.cuda.memory._dump_snapshot ({text})") from None


def history_parts(history: _MemoryHistory, path: str) -> list[RenderableType]:
    """A report on what filled the card, as sentences and tables; `path` is the file's, for the text."""
    end = f"{size(history.allocated_bytes)} allocated of the {size(history.reserved_bytes)} that torch had reserved"
    if history.missing_bytes is not None:
        end = f"an allocation of {size(history.missing_bytes)} failed, with {size(history.free_bytes)} free and {end}"
    whole = sum(history.rows.values()) or 1
    rows = new_table("What filled the card", "row", right=("bytes", "share"))
    for row, nbytes in history.rows.items():
        rows.add_row(row, size(nbytes), f"{nbytes / whole:.0%}")
    shown = history.held[:_LINES]
    headers = Column("function and line", overflow="fold", min_width=20), Column("row", overflow="fold")
    title = f"The lines of code that allocated most of these bytes ({len(shown)} of {len(history.held)})"
    lines = new_table(title, *headers, right=("blocks", "bytes"))
    for one in shown:
        lines.add_row(one.place or "(no line outside of torch)", one.row, str(one.blocks), size(one.nbytes))
    advice = [f"{row}: {text}" for row, text in history.advice.items()]
    plan = f"what that saves and costs: memopt plan MODEL --budget-gb GB, where MODEL is the model that {path} is of"
    return [
        f"GPU {history.device}: at most {size(history.peak_bytes)} allocated at once; at the end {end}",
        rows,
        lines,
        "What memopt would do about each row",
        *advice,
        plan,
    ]


Block = tuple[int, str, list[Mapping[str, Any]]]
"""The bytes of a block, the category that the recorder gave it ("" for none), and the stack that allocated it."""


def _of_device(device: int, segments: list[Any], traces: list[Any]) -> _MemoryHistory:
    segments = [segment for segment in segments if segment["device"] == device]
    events = traces[device] if device < len(traces) else []
    blocks = [block for segment in segments for block in segment["blocks"] if block["state"] != "inactive"]
    end = {block["address"]: (block["size"], "", block.get("frames") or []) for block in blocks}
    reserved = sum(segment["total_size"] for segment in segments)
    held, peak, later = _at_the_peak(end, events)
    failed = [event for event in events if event["action"] == "oom"]
    return _MemoryHistory(
        device,
        reserved,
        sum(size for size, *_ in end.values()),
        peak,
        tuple(sorted(_by_line(held), key=lambda one: -one.nbytes)),
        max(0, reserved - later - peak),
        failed[-1]["size"] if failed else None,
        failed[-1].get("device_free", 0) if failed else 0,
    )


def _at_the_peak(end: dict[int, Block], events: list[Any]) -> tuple[Iterable[Block], int, int]:
    """The blocks that are in use at the peak, the bytes of that peak, and the bytes by which segments grow after it.
    `end` has the blocks in use when the snapshot was taken, by address."""
    live = dict(end)
    for event in reversed(events):  # back to the beginning of the recording
        if event["action"] == "alloc":
            live.pop(event["addr"], None)
        elif event["action"] == "free_completed":
            live[event["addr"]] = (event["size"], "", [])
    if events:
        live = {at: (size, category or _BEFORE * (not frames), frames) for at, (size, category, frames) in live.items()}
    begin, last = dict(live), 0
    now = peak = sum(size for size, *_ in live.values())
    for number, event in enumerate(events, 1):
        now += _apply(event, live)
        if now >= peak:
            peak, last = now, number
    live = begin
    for event in events[:last]:
        _apply(event, live)
    return live.values(), peak, sum(_SEGMENTS.get(event["action"], 0) * event["size"] for event in events[last:])


_SEGMENTS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
"""For each event that changes the reserved bytes, whether they grow (1) or shrink (-1)."""


def _apply(event: Mapping[str, Any], live: dict[int, Block]) -> int:
    """Change the blocks in use (`live`, by address) as an event does. Returns the bytes by which they grew."""
    before = live.pop(event["addr"], (0, "", []))[0] if event["action"] in ("alloc", "free_completed") else 0
    if event["action"] != "alloc":
        return -before
    live[event["addr"]] = (event["size"], event.get("category", ""), event.get("frames") or [])
    return event["size"] - before


def _by_line(blocks: Iterable[Block]) -> Iterator[_HeldBlock]:
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for nbytes, category, frames in blocks:
        found[category or _row(frames), _place(frames)].append(nbytes)
    for key, sizes in found.items():
        yield _HeldBlock(*key, sum(sizes), len(sizes))


def _row(frames: list[Mapping[str, Any]]) -> str:
    """The kind of memory (such as "activations") that was allocated under a stack, the innermost frame first."""
    if not frames:
        return "no stack was recorded"
    for row, function, file in _SIGNS:
        if any(re.search(function, frame["name"]) and re.search(file, _path(frame)) for frame in frames):
            return row
    return "other code"


def _place(frames: list[Mapping[str, Any]]) -> str:
    """The innermost function of a stack outside of torch and of wrappers, with its line; "" where there is none."""
    for frame in frames:
        path = _path(frame)
        if path == "memopt":  # a snapshot that memopt exported
            return str(frame["name"])
        if path.endswith((".py", ".ipynb")) and not re.search(_WRAPPERS, path):
            return f"{frame['name']}, {'/'.join(path.split('/')[-2:])}:{frame['line']}"
    return ""


def _path(frame: Mapping[str, Any]) -> str:
    return str(frame["filename"]).replace("\\", "/")
