"""Two ranks under tensor and sequence parallelism: a split model trains within its budget, bit for bit as without
memopt; all ranks stop together where one of them cannot go on, and what is not planned is refused."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

import memopt
from examples.models.ddp import fingerprint
from examples.models.settled_gloo import SettledCollectives
from examples.models.tensor_parallel import Family, Transformer, families, split, texts
from memopt.compat.tensors import shard_of
from tests.two_ranks import check_refused_together, ended, on_two_ranks

pytestmark = pytest.mark.plans_always  # the plain steps would fit

EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}}
NAMES = tuple(families())
STEPS, SHARES = 3, (0.0, 0.33, 0.66)
"""The steps of a run, and how far its budgets lie from the smallest to plain training's peak."""


def step_of(model: Any, batch: dict[str, torch.Tensor]) -> Callable[[], Any]:
    def step() -> torch.Tensor:
        outputs = model(**batch)
        loss: torch.Tensor = outputs if isinstance(outputs, torch.Tensor) else outputs.loss
        loss.backward()
        return loss.detach()

    return step


def facts(parameter: torch.Tensor) -> tuple[str, ...]:
    """The fingerprints of a parameter and its gradient on this rank, and how the gradient is spread over ranks."""
    gradient = parameter.grad
    if gradient is None:
        return (fingerprint(shard_of(parameter)),)
    return fingerprint(shard_of(parameter)), fingerprint(shard_of(gradient)), str(getattr(gradient, "placements", ""))


def train(
    model: Any, batches: Callable[[int], dict[str, torch.Tensor]], steps: int = STEPS, accumulate: int = 1
) -> Any:
    """The fingerprints of the losses, gradients and parameters of some AdamW steps, with the placements of gradients,
    and the peak of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found, peaks = [], []
    for number in range(steps):
        torch.manual_seed(number)
        with memopt.measure_peak() as peak:
            losses = [step_of(model, batches(accumulate * number + part))() for part in range(accumulate)]
            optimizer.step()
        peaks.append(peak.bytes)
        found.append([*map(fingerprint, losses), *map(facts, model.parameters())])
        optimizer.zero_grad()
    return found, peaks


def planned(family: Family, budget_bytes: int, **options: Any) -> Any:
    return memopt.optimize(family.sharded(), budget_bytes / 1024**3, **{**EXACT, **options})


def smallest_bytes(family: Family) -> int:
    """The smallest budget that works for the first batch."""
    try:
        step_of(planned(family, 1024**2 // 4), family.batch(0))()
    except memopt.BudgetError as refused:
        return refused.smallest_bytes + 64  # for the GB that it becomes
    raise AssertionError("a quarter of a megabyte is enough")


def within_budgets(rank: int, name: str) -> list[tuple[int, int, int, int, int, bool, bool]]:
    """For each budget: its bytes, the smallest in which the step itself fits, the bytes that the plan predicts, those
    of them that it leaves free, and the bytes that the steps held, whether all numbers are those of plain training, and
    whether as many collectives ran; at first plain training's peak in place of all bytes."""
    collectives = SettledCollectives(distributed.group.WORLD)
    family = families()[name]
    plain, peaks = train(family.sharded(), family.batch)
    found = [(max(peaks),) * 5 + (True, True)]
    calls = len(collectives.calls)
    least = smallest_bytes(family)
    for share in SHARES:
        gc.collect()
        budget_bytes = least + int(share * (max(peaks) - least))
        collectives.calls.clear()
        model = planned(family, budget_bytes)
        numbers, measured = train(model, family.batch)
        plan = memopt.plan_of(model)
        free, as_many = plan.account.tolerance + plan.account.reserve, len(collectives.calls) == calls
        smallest, predicted = plan.smallest_bytes(), plan.predicted_peak_bytes
        found.append((budget_bytes, smallest, predicted, free, max(measured), numbers == plain, as_many))
        del model
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_a_split_model_trains_within_its_budget_bit_for_bit(name: str) -> None:
    for (plain_peak, *_), *runs in on_two_ranks(within_budgets, name):
        assert runs[0][1] < 0.75 * plain_peak
        for budget, _, predicted, free, measured, equal, as_many_collectives in runs:
            assert measured <= predicted <= budget
            assert predicted - free <= 1.002 * measured  # models so small that what is left free is some percent
            assert equal
            assert as_many_collectives


def dropping() -> Family:
    """A model that is split by sequences and drops values out, where all ranks have them whole and in parts."""
    family = families()["sequence parallel"]
    return Family(lambda: Transformer(dropout=0.2), family.split, family.batch)


def partly_frozen() -> Family:
    def frozen(model: Any, mesh: Any) -> Any:
        for parameter in (*model.blocks[0].parameters(), model.embedding.weight):
            parameter.requires_grad_(False)
        return split(model, mesh, sequences=True)

    return Family(Transformer, frozen, families()["GPT"].batch)


def uneven() -> Family:
    """A model whose second rank has fewer rows of the embedding."""
    family = families()["GPT"]

    def make() -> nn.Module:
        model = Transformer()
        model.embedding, model.logits = nn.Embedding(257, 64), nn.Linear(64, 257, bias=False)
        return model

    return Family(make, family.split, family.batch)


def of_lengths() -> Family:
    family = families()["GPT"]
    return Family(family.make, family.split, lambda n: texts(4, (32, 64, 48)[n % 3], "tokens", "targets")(n))


CASES: dict[str, tuple[Callable[[], Family], int, int]] = {
    "dropout": (dropping, STEPS, 1),
    "accumulation": (lambda: families()["sequence parallel"], 2, 2),
    "frozen parameters": (partly_frozen, 2, 2),
    "uneven shards": (uneven, 2, 1),
    "several lengths": (of_lengths, 5, 1),
}
"""The family of a case, the number of its steps, and of backwards before each."""


def held_bytes(parameter: torch.Tensor) -> int:
    """The bytes of a trained parameter on this rank, with the padding of an uneven shard."""
    return shard_of(parameter).untyped_storage().nbytes() if parameter.requires_grad else 0


def further_cases(rank: int) -> dict[str, tuple[bool, bool, int, int]]:
    """Whether the numbers are those of plain training and anything was recomputed; the bytes of gradients in the
    account, and of this rank's shards of the trained parameters."""
    found = {}
    for name, (make, steps, accumulate) in CASES.items():
        family = make()
        plain, _ = train(family.sharded(), family.batch, steps, accumulate)
        gc.collect()
        model = planned(family, 2_600_000)
        numbers, _ = train(model, family.batch, steps, accumulate)
        plan = memopt.plan_of(model)
        own = sum(map(held_bytes, model.parameters()))
        found[name] = numbers == plain, plan.added_time > 0, plan.account.gradients, own
        del model
        gc.collect()
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_further_cases_are_exact_and_counted_by_shards() -> None:
    for found in on_two_ranks(further_cases):
        for equal, _, gradients, own in found.values():
            assert equal
            assert gradients == own
        assert any(recomputes for _, recomputes, _, _ in found.values())


def one_does_not_fit(rank: int) -> list[tuple[str, str]]:
    """A step that fits on both ranks, one beside which rank 1 holds too much else, and a step after that."""
    family = families()["GPT"]
    model = planned(family, 3_200_000)
    found = []
    for size in (1, 2**20 if rank else 1, 1):
        beside = torch.ones(size)
        found.append(ended(step_of(model, family.batch(0))))
        model.zero_grad()
        del beside
        gc.collect()
    return found


def shapes_apart(rank: int) -> list[tuple[str, str]]:
    """A step of equal batches, one in which the ranks have other lengths, and one of equal ones again."""
    model = planned(families()["GPT"], 10_000_000)
    lengths = ((64, 64), (64, 32), (32, 32))
    return [ended(step_of(model, texts(4, own[rank], "tokens", "targets")(0))) for own in lengths]


def together_or_not_at_all(rank: int) -> dict[str, Any]:
    family = families()["GPT"]
    terms = ended(step_of(planned(family, 10_000_000 * (1 + rank)), family.batch(0)))
    return {"too large": one_does_not_fit(rank), "shapes": shapes_apart(rank), "terms": terms}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_ranks_go_on_together_or_not_at_all() -> None:
    ranks = on_two_ranks(together_or_not_at_all)
    check_refused_together([rank["too large"] for rank in ranks])
    for rank in ranks:
        assert [kind for kind, _ in rank["shapes"]] == ["", "RankError", ""]
        assert "give all ranks batches of the same shapes" in rank["shapes"][1][1]
        assert rank["terms"][0] == "ValueError"
        assert "the budget is 9.54 MB on rank 0, 19.1 MB on rank 1" in rank["terms"][1]


class Returning(Transformer):
    """Returns a DTensor, where its last layer does."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.logits(self.norm(self.embedding(tokens))).square().mean()
        return loss


class Breaking(Transformer):
    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()  # type: ignore[no-untyped-call]
        return super().forward(tokens, targets)


def split_in_parts(model: nn.Module) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    return parallelize_module(model, mesh, {"logits": ColwiseParallel(use_local_output=False)})


def two_meshes() -> Any:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    return fully_shard(split(Transformer(), mesh["tp"]), mesh=mesh["dp"])


def in_a_train_step(model: Any) -> None:
    memopt.TrainStep(model, torch.optim.SGD(model.parameters()))


def under_loss_parallel(batch: dict[str, torch.Tensor]) -> None:
    model = memopt.optimize(split_in_parts(Transformer()), 1.0, **EXACT)
    with loss_parallel():
        step_of(model, batch)()


def acts(family: Family) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every way in which a split model is not planned, by the words that say so."""

    def optimized(model: Any = None, **options: Any) -> Any:
        return memopt.optimize(family.sharded() if model is None else model, 1.0, **{**EXACT, **options})

    batch = family.batch(0)
    meta = {name: value.to("meta") for name, value in batch.items()}
    yield "does not plan together; use one of the two", lambda: optimized(two_meshes())
    yield "give backend='aten'", lambda: optimized(backend="inductor")
    yield "give precision='fp32'", lambda: optimized(precision="bf16")
    yield "'tiles' cannot be used", lambda: optimized(allow={"recompute", "tiles"})
    stepping = {"recompute", "optimizer_in_backward"}
    yield "'optimizer_in_backward' cannot be used", lambda: optimized(allow=stepping, example_inputs=batch)
    yield "leave out outputs='all'", lambda: optimized(outputs="all")
    yield "leave out the argument forwards", lambda: optimized(forwards=2)
    yield "leave out the argument dynamic", lambda: optimized(dynamic={"tokens": {0: torch.export.Dim.AUTO}})
    yield "the model returns a DTensor", lambda: step_of(optimized(split_in_parts(Returning())), batch)()
    yield "the model returns a DTensor", lambda: under_loss_parallel(batch)
    yield "captured on tensors with values", lambda: memopt.plan(family.sharded(), 1.0, meta, **EXACT)
    yield "TrainStep does not train Transformer", lambda: in_a_train_step(optimized())
    breaking = Family(Breaking, family.split, family.batch)
    yield "is not one graph, as a plan for it needs", lambda: step_of(optimized(breaking.sharded()), batch)()


def refusals_and_a_step(rank: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    family = families(layers=1)["sequence parallel"]
    refused = [(words, *ended(act)) for words, act in acts(family)]
    plain, _ = train(family.sharded(), family.batch, 1)
    return {"refused": refused, "equal": train(planned(family, 1_900_000), family.batch, 1)[0] == plain}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_is_not_planned_is_refused_before_anything_runs() -> None:
    for found in on_two_ranks(refusals_and_a_step):
        for words, kind, text in found["refused"]:
            assert kind in ("ValueError", "CaptureError"), (words, kind, text)
            assert words in text
        assert found["equal"]
