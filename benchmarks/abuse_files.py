"""Mutated kept plans and plan files: see `benchmarks.abuse`."""

from __future__ import annotations

import json
import os
import random
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import memopt
from benchmarks.abuse_trial import BAD, Batch, Row, equal, make_batch, make_model
from memopt.disk_cache import DIGEST, opened, sealed
from memopt.planning import plan_cache
from memopt.run.session import session_of
from memopt.solver import simulate

Path_ = tuple[Any, ...]
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**40, -(2**70), 10**400, 0.5, -3.5, float("nan"), float("inf"), "", "nothing",
    "../../x", "\ud800", [], {}, [1], {"a": 1},
)  # fmt: skip
OPTIONS: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}, "elsewhere_gb": 0}


def prepare(row: Row) -> Callable[[int], None]:
    """Plan the model at four budgets; returns a function that mutates the first kept plan and notes the outcome."""
    folder = Path(tempfile.mkdtemp(prefix="memopt-abuse-"))
    os.environ["MEMOPT_CACHE_DIR"] = str(folder)
    warnings.simplefilter("error", UserWarning)
    batch = make_batch(4, 64)
    expected = step(make_model(), batch)
    model = make_model()
    loose = memopt.plan(model, 1.0, batch, **OPTIONS)
    least, most = loose.smallest_gb(), loose.plain_peak_gb
    budgets = [least + share * (most - least) for share in (0.3, 0.02, 0.6, 1.2)]
    files = [kept_file(folder / "plans", batch, budget_gb) for budget_gb in budgets]
    donors = [file.read_text() for file in files]
    memopt.optimize(model, budgets[0], **OPTIONS)
    assert equal(step(model, batch), expected), "the plan is right before anything is mutated"
    plan = memopt.plan_of(model)
    plan.save(folder / "plan.json")
    saved = (folder / "plan.json").read_text()
    for file in files[1:]:
        file.unlink()

    def one(seed: int) -> None:
        rng = random.Random(seed)
        kind = rng.choice([*KINDS, FORGED, FORGED])
        data = KINDS[kind](rng, donors)
        files[0].write_bytes(data)
        try:
            # A file that is deleted when it is read leaves nothing to judge: every tenth is planned all the same.
            dropped = seed % 10 and plan_cache.find(files[0].stem, plan_cache.Kept) is None and not files[0].exists()
            outcome = "dropped" if dropped else judge(model, batch, expected, plan, files[0], donors[0])
        except Exception as error:
            outcome = f"{BAD}{type(error).__name__}"
            row.note(seed, outcome, f"{kind}: {error}")
        else:
            row.note(seed, outcome if outcome.startswith(BAD) else f"{kind}: {outcome}", kind)
        files[0].write_text(donors[0])
        row.note(seed, named_file(folder / "plan.json", KINDS[kind](rng, [saved, *donors[1:]])), kind)
        if seed % 40 == 39:
            row.note(seed, fresh_start(folder, files[0], budgets[0], batch, expected, rng), kind)
        left = sorted(file.name for file in (folder / "plans").iterdir() if file not in files)
        if left:
            row.note(seed, f"{BAD}further files", str(left))

    return one


def judge(model: Any, batch: Batch, expected: Any, plan: memopt.Plan, file: Path, whole: str) -> str:
    """Return the outcome of a step with the kept plan in `file`, which may be mutated. `whole` is its text before."""
    before = file.read_bytes() if file.exists() else b""
    session_of(model).forward.recorded.forget()  # type: ignore[union-attr]
    found = step(model, batch)
    now = memopt.plan_of(model)
    if not equal(found, expected):
        return f"{BAD}other numbers"
    assert now.joined is not None
    assert now.schedule is not None
    resident = now.account.resident_bytes
    if resident + simulate(now.joined.problem, now.schedule, now.joined.link).peak_bytes > plan.budget_bytes:
        return f"{BAD}over the budget"
    if now.account != plan.account or now.budget_bytes != plan.budget_bytes:
        return f"{BAD}other figures"
    if file.read_bytes() == before:
        return "taken" if now.regions == plan.regions else "taken with another valid schedule"
    return "planned again" if json.loads(file.read_text()) == json.loads(whole) else f"{BAD}another file is kept"


def fresh_start(folder: Path, file: Path, budget_gb: float, batch: Batch, expected: Any, rng: random.Random) -> str:
    """Return the outcome of a job that plans ahead, after its kept plan and the file that names it were mutated."""
    whole = file.read_text()

    def start() -> list[torch.Tensor]:
        model = make_model()
        memopt.optimize(model, budget_gb, example_inputs=batch, **OPTIONS)
        memopt.plan_of(model).table()
        return step(model, batch)

    start()
    for other in folder.glob("plans/*.json"):
        text = other.read_text()
        other.write_bytes(KINDS[rng.choice([FORGED, "bytes flipped", "fields changed"])](rng, [text, text]))
    try:
        right = equal(start(), expected)
    except Exception as error:
        return f"{BAD}start ahead: {type(error).__name__} {error}"
    for other in set(folder.glob("plans/*.json")) - {file}:
        other.unlink()
    file.write_text(whole)
    return "start ahead: right" if right else f"{BAD}start ahead: other numbers"


def named_file(path: Path, data: bytes) -> str:
    """Return the outcome of loading a plan file with these contents, as a user would."""
    path.write_bytes(data)
    try:
        memopt.Plan.load(path).table()
    except memopt.PlanFileError as error:
        return "named file: refused" if str(path) in str(error) else f"{BAD}refused without the file's name"
    except Exception as error:
        return f"{BAD}named file: {type(error).__name__}"
    return "named file: loaded"


def step(model: Any, batch: Batch) -> list[torch.Tensor]:
    """Loss and gradients of one step."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    loss = model(**batch).loss
    loss.backward()
    found = [loss.detach(), *(parameter.grad for parameter in model.parameters())]
    model.zero_grad(set_to_none=True)
    return found


def kept_file(folder: Path, batch: Batch, budget_gb: float) -> Path:
    """Return the plan file that a first start within the budget writes."""
    before = set(folder.iterdir()) if folder.exists() else set()
    model = make_model()
    memopt.optimize(model, budget_gb, **OPTIONS)
    step(model, batch)
    (file,) = set(folder.iterdir()) - before
    return file


def flipped(rng: random.Random, donors: list[str]) -> bytes:
    data = bytearray(donors[0].encode())
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def cut(rng: random.Random, donors: list[str]) -> bytes:
    return donors[0].encode()[: rng.randrange(len(donors[0]))]


def garbage(rng: random.Random, donors: list[str]) -> bytes:
    data = donors[0].encode()
    at = rng.randrange(len(data))
    made = (b"", rng.randbytes(200), data[:at] + rng.randbytes(9) + data[at:], b"[" * 10**5, data + data, b"null")
    return rng.choice(made)


def changed(rng: random.Random, donors: list[str]) -> bytes:
    """One to three fields with another value; the digest is that of the file before."""
    values = json.loads(donors[0])
    for _ in range(rng.choice((1, 1, 2, 3))):
        change(values, rng)
    return json.dumps(values).encode()


def forged(rng: random.Random, donors: list[str]) -> bytes:
    """As `changed`, with the digest made again."""
    values = json.loads(donors[0])
    values.pop(DIGEST, None)
    for _ in range(rng.choice((1, 1, 2, 3))):
        change(values, rng)
    return json.dumps(sealed(values)).encode()


def of_another_budget(rng: random.Random, donors: list[str]) -> bytes:
    """The whole file of another budget."""
    return rng.choice(donors[1:]).encode()


def forged_budget(rng: random.Random, donors: list[str]) -> bytes:
    """The plan of another budget under this file's name, at times with this one's budget and account in it."""
    own, other = (opened(json.loads(text)) for text in (donors[0], rng.choice(donors[1:])))
    if "value" not in own:  # a plan in a file of its own
        own, other = {"value": {"plan": own}}, other
    other["name"] = own.get("name", "")
    for field in ("budget_bytes", "account", "planned", "ceiling_bytes", "held_bytes", "regions"):
        if rng.random() < 0.5:
            other["value"]["plan"][field] = own["value"]["plan"][field]
    return json.dumps(sealed(other)).encode()


def crossed(rng: random.Random, donors: list[str]) -> bytes:
    """One field with the value that it has in the file of another budget."""
    own, other = (opened(json.loads(text)) for text in (donors[0], rng.choice(donors[1:])))
    place = rng.choice([place for place, _ in places(own)])
    value = at(other, place)
    if value is not None:
        put(own, place, value)
    return json.dumps(sealed(own)).encode()


def rescheduled(rng: random.Random, donors: list[str]) -> bytes:
    """Another order, with more or fewer recomputations, in the schedule and in the region alike."""
    values = opened(json.loads(donors[0]))
    kept = values.get("value", {"plan": values, "schedule": {"evaluations": []}})
    lists = [kept["schedule"]["evaluations"], kept["plan"]["regions"][0]["evaluations"]]
    seed, what = rng.random(), rng.choice(("swap", "drop", "repeat", "move"))
    for evaluations in lists:
        same = random.Random(seed)
        count = len(evaluations)
        if not count:
            continue
        first, second = int(same.random() * count), int(same.random() * count)
        if what == "swap":
            evaluations[first], evaluations[second] = evaluations[second], evaluations[first]
        elif what == "drop":
            del evaluations[first]
        elif what == "repeat":
            evaluations.insert(second, evaluations[first])
        else:
            evaluations.insert(second, evaluations.pop(first))
    return json.dumps(sealed(values)).encode()


FORGED = "fields changed, right digest"
KINDS: dict[str, Callable[[random.Random, list[str]], bytes]] = {
    "bytes flipped": flipped,
    "cut off": cut,
    "garbage": garbage,
    "fields changed": changed,
    FORGED: forged,
    "file of another budget": of_another_budget,
    "plan of another budget, right digest": forged_budget,
    "a field of another plan, right digest": crossed,
    "schedule changed, right digest": rescheduled,
}


def places(value: Any, place: Path_ = ()) -> list[tuple[Path_, Any]]:
    """All values in a JSON value, with their places."""
    found = [(place, value)] if place else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        found += places(item, (*place, name))
    return found


def at(value: Any, place: Path_) -> Any:
    """The value at a place; None where there is none."""
    for name in place:
        try:
            value = value[name]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def put(value: Any, place: Path_, new: Any) -> None:
    at(value, place[:-1])[place[-1]] = new


def change(values: Any, rng: random.Random) -> None:
    """Give a random place another value; places near the root as often as the many in long lists."""
    by_depth: dict[int, list[tuple[Path_, Any]]] = {}
    for place, value in places(values):
        by_depth.setdefault(len(place), []).append((place, value))
    if not by_depth:
        return
    place, value = rng.choice(by_depth[rng.choice(list(by_depth))])
    what = rng.randrange(5)
    if what == 0:
        del at(values, place[:-1])[place[-1]]
    elif what == 1 and isinstance(value, list) and value:
        shorter = list(value)
        rng.choice((shorter.pop, shorter.reverse, lambda: shorter.append(shorter[0]), lambda: rng.shuffle(shorter)))()
        put(values, place, shorter)
    elif what <= 3 and isinstance(value, (int, float)) and not isinstance(value, bool):
        put(values, place, rng.choice((value + 1, value - 1, -value, value * 2, 0, value * 10**6)))
    else:
        put(values, place, rng.choice(VALUES))
