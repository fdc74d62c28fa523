"""How much of memopt's own code one `optimize` and its steps run through, and how large the packages are.

    python -m benchmarks.structure [--name NAME]

A GPT-2 of 2 layers, width 64, default options, planned ahead and run three times; all modules are imported and the
device's libraries started by a first model before anything is counted. For each of `optimize` (to the plan), the first
step (to its end), a later step, and a later step at the smallest budget: the files and functions of memopt and passes
that run, their calls, the closures among them, and the functions that code of torch calls. `frames_to_solver` and
`frames_to_emission` are the frames of memopt and passes on the stack where the portfolio is first asked and where a
region is first partitioned. The packages' size is counted by `ast`: files, lines, public classes.
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import transformers

import memopt
from benchmarks.stamp import stamp, write_result

RESULT = Path(__file__).parent / "results" / "structure.json"
ROOT = Path(memopt.__file__).parents[1]
OURS = tuple(str(ROOT / package) + "/" for package in ("memopt", "passes"))
SOLVER, EMISSION = ("solver/", "solve"), ("emit/emit.py", "")
"""Part of the file's path, and the function's name where one is meant, of the places whose depth is reported."""


@dataclass
class Walk:
    """The calls of memopt's own functions while `watching`."""

    calls: Counter[CodeType] = field(default_factory=Counter)
    from_torch: set[CodeType] = field(default_factory=set)
    depths: dict[tuple[str, str], int] = field(default_factory=dict)
    """Frames of memopt on the stack at the first call of each place."""

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """Count a call, as a function for `sys.setprofile`."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(OURS):
            return
        self.calls[code] += 1
        caller = frame.f_back
        if caller is not None and "/torch/" in caller.f_code.co_filename:
            self.from_torch.add(code)
        for place in (SOLVER, EMISSION):
            part, name = place
            if place not in self.depths and part in code.co_filename and name in ("", code.co_name):
                self.depths[place] = sum(1 for _ in _own_frames(frame))

    def report(self) -> dict[str, Any]:
        """The counts as a record."""
        functions = [code for code in self.calls if not code.co_name.startswith("<")]
        return {
            "files": len({code.co_filename for code in self.calls}),
            "functions": len(functions),
            "calls": sum(self.calls.values()),
            "closures": sum("<locals>" in code.co_qualname for code in functions),
            "from_torch": len(self.from_torch),
            "frames_to_solver": self.depths.get(SOLVER),
            "frames_to_emission": self.depths.get(EMISSION),
        }


def _own_frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        if frame.f_code.co_filename.startswith(OURS):
            yield frame
        frame = frame.f_back


@contextmanager
def watching() -> Iterator[Walk]:
    """A context in which the calls of memopt's functions are counted."""
    walk = Walk()
    sys.setprofile(walk.note)
    try:
        yield walk
    finally:
        sys.setprofile(None)


def watched(run: Callable[[], Any]) -> dict[str, Any]:
    """The counts of one call of `run`."""
    with watching() as walk:
        run()
    return walk.report()


def make() -> Any:
    """The model that is walked through."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4, use_cache=False, bos_token_id=1, eos_token_id=2
    )
    model: Any = transformers.GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"
    return model


def walks() -> dict[str, Any]:
    """The counts of `optimize`, a first and a later step, and a later step at the smallest budget."""
    tokens = torch.randint(0, 256, (4, 32))
    batch = {"input_ids": tokens, "labels": tokens}

    def trained(budget_gb: float, **options: Any) -> tuple[Any, Callable[[], None]]:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters())
        memopt.optimize(model, budget_gb, example_inputs=batch, optimizer=optimizer, **options)

        def step() -> None:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, step

    for _ in range(2):  # imports, libraries, caches of torch
        trained(12)[1]()
    gc.collect()  # the ledger would count these models
    held: list[Any] = []
    found: dict[str, Any] = {"optimize": watched(lambda: held.append(trained(12)))}
    step = held.pop()[1]
    # Each step is watched: what the watcher itself allocates would be growth on the device in a first watched one.
    found["first step"], _, found["later step"] = watched(step), watched(step), watched(step)
    del step
    gc.collect()
    smallest = memopt.plan(make(), 12, batch, precision="fp32").smallest_gb()
    _, step = trained(1.02 * smallest, precision="fp32")
    found["later step, tight"] = [watched(step) for _ in range(4)][-1]
    return found


def sizes() -> dict[str, Any]:
    """Files, lines and public classes of the packages."""
    found: dict[str, Any] = {}
    for package in ("memopt", "passes"):
        sources = [path.read_text(encoding="utf-8") for path in sorted((ROOT / package).rglob("*.py"))]
        classes = [
            node.name for text in sources for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)
        ]
        found[package] = {
            "files": len(sources),
            "lines": sum(text.count("\n") for text in sources),
            "public_classes": sum(not name.startswith("_") for name in classes),
        }
    return found


def main() -> None:
    """Write the counts under a name into the result file, beside those of earlier names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="now", help="the name of this record: 'before', 'after', a commit")
    name = parser.parse_args().name
    os.environ["MEMOPT_CACHE"] = "0"  # a plan from disk takes the place of the search
    record = {"name": name, **stamp(), "walks": walks(), "sizes": sizes()}
    earlier = json.loads(RESULT.read_text(encoding="utf-8"))["records"] if RESULT.exists() else []
    write_result(RESULT, {"records": [*(one for one in earlier if one["name"] != name), record]})
    for title, walk in record["walks"].items():
        print(f"{title:20}", ", ".join(f"{key} {value}" for key, value in walk.items()))
    print(record["sizes"])


if __name__ == "__main__":
    main()
