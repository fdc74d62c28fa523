"""Sizes that depend on data: planned as seen, guarded, and planned once more before a larger size takes its memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import memopt
from examples.models.families import BY_NAME
from examples.models.step import train_step
from examples.models.twins import EXACT
from memopt.capture.data_sizes import MARGIN, DataSizes
from memopt.errors import GIB
from tests.elsewhere import counted
from tests.end_to_end.steps import assert_equal
from tests.marks import slow
from tests.shortened import SHORT

__all__ = ["counted"]


def send_all_to_one_expert(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "router" in name or "gate" in name:
                parameter.zero_()
                parameter[0].fill_(1.0)


@pytest.mark.slow
def test_a_batch_that_outgrows_the_plan_is_planned_anew() -> None:
    family = BY_NAME["moe"]
    model, batch = family.make(), family.batch("usual")
    even = train_step(model, batch)
    smallest = memopt.plan(model, 1000, batch, optimizer=None, precision="fp32", allow={"recompute"}).smallest_gb()
    budget_gb = smallest + 0.7 * (even.peak_bytes / GIB - smallest)
    memopt.optimize(model, budget_gb, optimizer=None, precision="fp32", allow={"recompute"})
    assert_equal(train_step(model, batch), even)
    first = memopt.plan_of(model)

    send_all_to_one_expert(model)
    ours = train_step(model, batch)
    second = memopt.plan_of(model)
    memopt.remove(model)
    assert_equal(ours, train_step(model, batch))
    assert second.captured is not None
    assert first.captured is not None
    assert second.captured.data_sizes != first.captured.data_sizes
    assert ours.peak_bytes <= second.predicted_peak_bytes <= 1.02 * ours.peak_bytes
    assert ours.peak_bytes <= budget_gb * GIB


class Selected(nn.Module):
    """Rows are selected by their values behind layers whose activations are many."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.GELU())
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        return self.head(self.layers(x)[chosen].sin()).square().sum() / len(x)


@pytest.mark.slow
@pytest.mark.usefixtures("counted")
def test_what_the_outgrown_forward_made_is_gone_when_the_call_is_planned_anew() -> None:
    exact: dict[str, Any] = {"optimizer": None, "precision": "fp32", "allow": {"recompute", "reinplace"}}
    torch.manual_seed(0)
    model, x, chosen = Selected(), torch.randn(512, 64), torch.arange(512) % 8 == 0
    more = torch.arange(512) % 4 == 0
    plan = memopt.plan(model, 1000, (x, more), **exact)
    memopt.optimize(model, 1.1 * plan.smallest_gb(), **exact)
    model(x, chosen).backward()
    first = memopt.plan_of(model)
    model.zero_grad()
    model(x, more).backward()
    second = memopt.plan_of(model)
    assert second.captured is not first.captured
    assert second.account.elsewhere == first.account.elsewhere


class Wide(Selected):
    """Its forward in fp32 holds more, though nothing is saved, than a step in 16 bits does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 4096), nn.GELU(), nn.Linear(4096, 64))


@pytest.mark.usefixtures("counted")
def test_the_run_that_observes_sizes_holds_no_more_than_a_step_in_16_bits() -> None:
    torch.manual_seed(0)
    model, x, chosen = Wide(), torch.randn(512, 64), torch.arange(512) % 8 == 0
    budget_gb = 1.02 * memopt.plan(model, 1000, (x, chosen), optimizer=None).smallest_gb()
    memopt.optimize(model, budget_gb, optimizer=None)
    with memopt.measure_peak() as peak:
        model(x, chosen).backward()
    assert peak.bytes <= budget_gb * GIB


class Added(Selected):
    """Adds the selected rows in place to zeros, which `index_add_` does in one dtype only: autocast makes them two."""

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        rows = chosen.nonzero().squeeze(1)
        return self.head(torch.zeros_like(x).index_add_(0, rows, self.layers(x[rows]))).square().sum() / len(x)


def test_sizes_in_16_bits_of_a_model_that_autocast_cannot_run() -> None:
    torch.manual_seed(0)
    model, x, chosen = Added(), torch.randn(512, 64), torch.arange(512) % 8 == 0
    with pytest.raises(RuntimeError, match="index_add_"), torch.autocast("cpu", torch.bfloat16):
        model(x, chosen)
    plan = memopt.plan(model, 1000, (x, chosen), optimizer=None, precision="bf16")
    assert plan.captured is not None
    assert list(plan.captured.data_sizes.seen.values()) == [64]


@pytest.mark.slow
def test_fakes_are_planned_for_the_largest_sizes() -> None:
    family = BY_NAME["moe"]
    model, batch = family.make(), family.batch("usual")
    seen = memopt.plan(model, 1000, batch, optimizer=None, precision="fp32", allow={"recompute"})
    largest = memopt.plan(
        model.to("meta"), 1000, {k: v.to("meta") for k, v in batch.items()}, optimizer=None, precision="fp32"
    )
    assert largest.plain_peak_gb > seen.plain_peak_gb
    assert not largest.notes
    assert "planned for up to" in seen.notes[0]


def test_allowance_never_shrinks() -> None:
    first = DataSizes.of({"u0": 100, "u1": 10})
    assert first.allowed == {"u0": 100 * MARGIN, "u1": 13}
    assert DataSizes.of({"u0": 40, "u1": 20}, first).allowed == {"u0": 125, "u1": 25}


@pytest.mark.parametrize("family", [SHORT["gpt2-sdpa"], slow(SHORT["mixtral"])], ids=str)
def test_models_without_such_sizes_are_not_run_ahead(family, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = "memopt.planning.call_planner.observe"
    monkeypatch.setattr(ran, lambda *_: pytest.fail("ran the forward to observe sizes"))
    memopt.plan(family.make(), 1000, family.batch("usual"), optimizer=None, precision="fp32", allow={"recompute"})


def images_of(shapes: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """A batch of images cut into patches, each with its height and width in patches, and padded to 256 of them."""
    draws = torch.Generator().manual_seed(0)
    mask = torch.arange(256) < torch.tensor([[height * width] for height, width in shapes])
    pixels = torch.randn(len(shapes), 256, 768, generator=draws)
    return {
        "pixel_values": pixels, "pixel_attention_mask": mask.long(), "spatial_shapes": torch.tensor(shapes),
        "labels": torch.arange(len(shapes)) % 3,
    }  # fmt: skip


@pytest.mark.slow
def test_sizes_that_the_forward_reads_as_a_list_may_grow_and_shrink() -> None:
    """SigLIP 2 resizes its position embeddings to the patches of each image, and pads them to a fixed number."""
    vision = transformers.Siglip2VisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_patches=256
    )
    config = transformers.Siglip2Config(vision_config=vision.to_dict(), num_labels=3)
    model = transformers.Siglip2ForImageClassification(config).train()
    batches = [images_of(shapes) for shapes in ([(8, 9), (12, 6)], [(2, 2), (3, 1)], [(16, 16), (10, 20)])]
    plain = [train_step(model, batch) for batch in batches]
    smallest = memopt.plan(model, 1000, batches[0], **EXACT).smallest_gb()
    budget_gb = smallest + 0.5 * (plain[0].peak_bytes / GIB - smallest)
    memopt.optimize(model, budget_gb, **EXACT)
    for batch, theirs in zip(batches, plain, strict=True):
        ours, plan = train_step(model, batch), memopt.plan_of(model)
        assert_equal(ours, theirs)
        assert ours.peak_bytes <= min(plan.predicted_peak_bytes, budget_gb * GIB)


class WritesToItsBatch(nn.Module):
    """Replaces what its batch, a dictionary, holds; its loss has a factor that depends on data."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.layer, self.breaks = nn.Linear(4, 4), breaks

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        batch["x"] = batch["x"] * 2
        batch["hidden"] = self.layer(batch["x"])
        if self.breaks:
            torch._dynamo.graph_break()
        return self.layer(batch["hidden"]).square().mean() * int((batch["x"] > 0).sum())


@pytest.mark.parametrize("ahead", [False, True], ids=["at the first call", "ahead"])
@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "breaks"])
def test_a_batch_is_written_to_once(breaks: bool, ahead: bool) -> None:
    """Runs that find sizes or regions left their values in the batch: the step began from them, without a word."""
    model = WritesToItsBatch(breaks=breaks)
    plain, given = copy.deepcopy(model), {"x": torch.arange(12.0).view(3, 4)}
    mine, theirs = dict(given), dict(given)
    options: dict[str, Any] = {"optimizer": None, "precision": "fp32", "allow": {"recompute"}}
    memopt.optimize(model, 1.0, example_inputs=(mine,) if ahead else None, **options)
    assert mine == given
    found, expected = model(mine), plain(theirs)
    assert torch.equal(found, expected)
    assert mine.keys() == theirs.keys()
    assert torch.equal(mine["x"], theirs["x"])


class ReadsOtherNumbers(nn.Module):
    """Where it is not compiled, it reads one number more, before the one that is a size."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling() and int((x > 100).sum()):
            x = x + 1
        rows = picked.sum().item()
        torch._check(rows >= 2)
        torch._check(rows <= len(x))
        return self.layer(x.new_ones(rows, 16) * x[0]).relu().sum()


@pytest.mark.parametrize("wanted", ["", "always"])
def test_sizes_that_cannot_be_observed_are_no_error_of_memopt_s_own(
    wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMOPT_PLAN", wanted)
    model = ReadsOtherNumbers()
    x, picked = torch.randn(64, 16), torch.arange(64) < 40
    model(x, picked).backward()
    expected = model.layer.weight.grad
    model.zero_grad()
    memopt.optimize(model, 1, precision="fp32")
    if wanted:
        with pytest.raises(memopt.CaptureError, match="in eager mode the code computes another size"):
            model(x, picked)
    else:
        model(x, picked).backward()
        assert torch.equal(model.layer.weight.grad, expected)


class TwoMasks(nn.Module):
    """Each mask selects from two tensors, so that only the first of both introduces a size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, one: Tensor, other: Tensor) -> Tensor:
        weights = self.first(x)
        return (x[one] * weights[one]).sum() + (self.second(x)[other] * weights[other]).sum()


@pytest.mark.plans_always
def test_two_tensors_by_each_of_two_masks() -> None:
    """The second mask got the size of the first one, and every step was refused."""
    x, rows = torch.randn(64, 8), torch.arange(64)
    batch = x, rows < 5, rows < 40
    torch.manual_seed(0)
    model = TwoMasks()
    plain = copy.deepcopy(model)
    memopt.optimize(model, 1.0, precision="fp32", outputs="loss", optimizer=None)
    for each in (model, plain):
        each(*batch).backward()
    assert all(
        torch.equal(one.grad, other.grad) for one, other in zip(model.parameters(), plain.parameters(), strict=True)
    )
    sizes = memopt.plan_of(model).captured.data_sizes
    assert sorted(sizes.seen.values()) == [5, 40]
