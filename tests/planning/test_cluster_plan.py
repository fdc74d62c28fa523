"""Plans for one card of a cluster: bytes, time, what bounds it, and what is refused."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import memopt
from examples.models.checkpoints import FULL, NOTHING, SELECTIVE
from examples.models.cluster import CardStep, Job
from examples.models.llama import LlamaSize
from memopt.account.account import GRADIENTS
from memopt.errors import BudgetError, CaptureError
from memopt.planning.cluster_step import cluster_step
from memopt.planning.plan import Plan

NETWORK = "nvlink4+ib-ndr"
ROOMY_GB = 64.0
WIDTH, LAYERS = 512, 4


def llama() -> nn.Module:
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=4096, hidden_size=WIDTH, intermediate_size=1408, num_hidden_layers=LAYERS,
                num_attention_heads=8, num_key_value_heads=8, use_cache=False,
            )
        )  # fmt: skip
    return model.train()


def batch(samples: int = 2, length: int = 512) -> dict[str, torch.Tensor]:
    tokens = torch.empty(samples, length, dtype=torch.long, device="meta")
    return {"input_ids": tokens, "labels": tokens}


@functools.cache
def planned(
    budget_gb: float = ROOMY_GB,
    *,
    interconnect: str = NETWORK,
    allow: Any = memopt.DEFAULT_LEVERS,
    **mesh: int,
) -> Plan:
    return memopt.plan(llama(), budget_gb, batch(), device="h100", mesh=mesh, interconnect=interconnect, allow=allow)


def numbers() -> int:
    return sum(parameter.numel() for parameter in llama().parameters())


@pytest.mark.slow
def test_everything_of_parameters_is_a_shard() -> None:
    account = planned(dp_shard=64).account
    share = 4 * numbers() // 64
    # Each tensor takes blocks of 512 bytes.
    tensors = len(list(llama().parameters()))
    for row, times in (("parameters", 1), ("gradients", 1), ("optimizer_state", 2)):
        assert times * share <= getattr(account, row) <= times * (share + 512 * tensors) + 4 * 512 * tensors, row


def test_gathered_are_the_root_and_two_blocks() -> None:
    plan = planned(dp_shard=64)
    block = 4 * WIDTH * WIDTH + 3 * WIDTH * 1408 + 2 * WIDTH
    root = 2 * 4096 * WIDTH + WIDTH
    # Norms of 512 numbers divide by 64 as all the rest does, so that nothing is padded.
    assert plan.account.gathered == 2 * (root + 2 * block)
    assert plan.account.exchange == 4 * block


def test_gradients_are_reduced_to_shards_when_a_block_is_done() -> None:
    plan = planned(dp_shard=64)
    assert plan.joined is not None
    problem = plan.joined.problem
    reductions = [op for op in problem.ops if op.name.startswith("reduce_")]
    assert [op.name.removesuffix(" of") for op in reductions] == [
        *(f"reduce_model.layers.{number}" for number in reversed(range(LAYERS))),
        "reduce_root",
    ]
    kept = {storage for op in reductions for storage in op.makes}
    assert all(problem.storages[storage].kept for storage in kept)
    assert sum(problem.storages[storage].bytes for storage in kept) <= plan.account.gradients
    made_late = {s for op in problem.ops[problem.forward_ops :] for s in op.makes if problem.storages[s].kept}
    assert {problem.storages[s].name for s in made_late - kept} <= {"tangents_1"}
    # Whole gradients of a block are dead behind its reduction.
    for op in reductions:
        last = {s: max(i for i, other in enumerate(problem.ops) if s in other.reads) for s in op.reads}
        assert set(last.values()) == {problem.ops.index(op)}


def test_time_is_the_sum_of_what_bounds_it() -> None:
    step = planned(dp_shard=64).cluster
    assert step is not None
    assert step.cards == 64
    assert step.seconds == pytest.approx(sum(seconds for _, seconds in step.bounds))
    assert step.bound == max(step.bounds, key=lambda entry: entry[1])[0]
    # Nothing takes less than what has to be computed, nor than all that has to be exchanged.
    computed = sum(forward + backward for *_, forward, backward in step.blocks)
    assert step.seconds >= max(computed, step.gathers_seconds + step.reductions_seconds) * (1 - 1e-9)
    assert len(step.blocks) == LAYERS + 1


@pytest.mark.slow
def test_a_slower_network_and_more_cards_take_longer() -> None:
    def seconds(plan: Plan) -> float:
        assert plan.cluster is not None
        return plan.cluster.seconds

    usual = seconds(planned(dp_shard=64))
    assert seconds(planned(dp_shard=64, interconnect="pcie4+roce-200")) > usual
    assert seconds(planned(dp_shard=4096)) > usual
    # Blocks are gathered once where there is room, and reduced in fp32.
    assert planned(dp_shard=4096).cluster.bound == "reduce"  # type: ignore[union-attr]
    # Replicas of smaller groups gather within them.
    assert seconds(planned(dp_replicate=64, dp_shard=64)) < seconds(planned(dp_shard=4096))
    assert planned(dp_replicate=64, dp_shard=64).account == planned(dp_shard=64).account


@pytest.mark.slow
def test_a_budget_is_kept_by_recomputation() -> None:
    roomy = planned(dp_shard=64)
    tight = planned(0.5 * (roomy.predicted_peak_gb + roomy.smallest_gb()), dp_shard=64)
    assert tight.predicted_peak_gb <= tight.budget_bytes / 1024**3 < roomy.predicted_peak_gb
    with pytest.raises(BudgetError, match="the smallest that works") as error:
        planned(0.5 * roomy.smallest_gb(), dp_shard=64)
    assert "gathered parameters" in str(error.value)


@pytest.mark.slow
def test_blocks_stay_gathered_where_there_is_room() -> None:
    alike: Any = {"dp_shard": 4096, "allow": frozenset({"recompute"})}  # two plans with the same levers
    roomy = planned(**alike)
    tight = planned(roomy.predicted_peak_gb - roomy.account.kept / 1024**3, **alike)
    assert [path for path, _ in roomy.kept] == [f"model.layers.{number}" for number in range(LAYERS)]
    freed = [f"model.layers.{number}" for number in range(LAYERS - len(tight.kept))]
    assert freed
    assert tight.kept == roomy.kept[len(freed) :]
    assert tight.predicted_peak_bytes <= tight.budget_bytes
    block = roomy.kept[0][1]
    assert roomy.account.kept == (LAYERS - 1) * block
    assert roomy.cluster is not None
    assert tight.cluster is not None
    gathered = {path: seconds for path, _, seconds, *_ in roomy.cluster.blocks}
    assert roomy.cluster.gathers_seconds == pytest.approx(sum(gathered.values()))
    assert tight.cluster.gathers_seconds == pytest.approx(
        sum(gathered.values()) + sum(gathered[path] for path in freed)
    )
    assert roomy.cluster.seconds < tight.cluster.seconds
    assert roomy.smallest_gb() == tight.smallest_gb()
    assert "parameters of model.layers.0 to model.layers.3 stay" in str(roomy)
    assert "kept gathered parameters" in str(roomy.diff(tight))


@pytest.mark.slow
def test_a_step_that_waits_for_gathers_recomputes_more_to_save_some() -> None:
    waiting = planned(dp_shard=4096)
    budget_gb = waiting.predicted_peak_gb - waiting.account.kept / 1024**3
    traded = planned(budget_gb, dp_shard=4096)
    assert traded.added_time > 0
    assert len(traded.kept) > 1
    assert traded.predicted_peak_gb <= budget_gb
    assert waiting.joined is not None
    assert waiting.schedule is not None
    assert waiting.priced is not None
    untraded = cluster_step(waiting.joined, waiting.schedule, waiting.priced, waiting.account, kept=1)
    assert traded.cluster is not None
    assert untraded is not None
    assert traded.cluster.seconds < untraded.seconds


@pytest.mark.slow
def test_the_plan_says_what_it_assumes_and_is_saved(tmp_path: Path) -> None:
    plan = planned(dp_shard=64, tp=8)
    text = str(plan)
    assert "On 512 cards (dp_shard 64 × tp 8)" in text
    for part in ("as FSDP2 runs", "InfiniBand NDR", "NCCL's buffers", "each of the 8 cards of a 'tp' group"):
        assert any(part in note for note in plan.notes), part
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").cluster == plan.cluster


def test_accumulated_gradients_are_held_as_shards() -> None:
    from dataclasses import replace

    plan = planned(dp_shard=64)
    assert plan.priced is not None
    held = plan.priced.priced_for(accumulating=True).problem.problem
    assert not any(storage.name.startswith("reduce_") for storage in held.storages)
    assert replace(plan.account, gradients_held=True).resident_bytes == (
        plan.account.resident_bytes + plan.account.gradients
    )
    assert GRADIENTS not in dict(plan.planned.rows) or dict(plan.planned.rows)[GRADIENTS] <= plan.account.gradients


@pytest.mark.slow
def test_another_cluster_from_the_same_capture() -> None:
    size = LlamaSize(256, 2, 8, 4, 704, words=4096)
    first = CardStep.of(Job(size, {"dp_shard": 8}, 2, 512))
    direct = CardStep.of(Job(size, {"dp_shard": 64}, 2, 512))
    derived = first.over({"dp_shard": 64}, NETWORK)
    assert derived.account == direct.account
    for name in (NOTHING, SELECTIVE, FULL):
        one, other = derived.under(name), direct.under(name)
        assert (one.peak, one.step) == (other.peak, other.step)
    held = [derived.under(name).peak.peak_bytes for name in (NOTHING, SELECTIVE, FULL)]
    assert held == sorted(held, reverse=True)
    assert len(set(held)) == 3


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        torch._dynamo.graph_break()
        return (x * x).mean()


def refused(**changes: Any) -> str:
    options = {"device": "h100", "mesh": {"dp_shard": 8}, "interconnect": NETWORK, **changes}
    with pytest.raises(ValueError, match=r"^") as error:
        memopt.plan(options.pop("model", llama()), ROOMY_GB, options.pop("batch", batch()), **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_options_that_do_not_go_together_are_refused() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    assert "device must name the card to plan for, such as device='h100', not None" in refused(device=None)
    assert "not 'cpu'" in refused(device="cpu")
    assert "precision must be one of 'auto', 'bf16', 'fp32'" in refused(precision="fp16")
    assert "optimizer must be a class or its name" in refused(optimizer=optimizer)
    assert "'fp8' in allow is not planned for a cluster" in refused(allow=memopt.DEFAULT_LEVERS | {"fp8"})
    assert "tp_plan needs 'tp' in mesh" in refused(tp_plan={"lm_head": "colwise"})
    assert "tp_plan needs mesh" in refused(mesh=None, interconnect=None, tp_plan={"lm_head": "colwise"})
    assert "interconnect needs mesh" in refused(mesh=None)


def test_a_forward_that_breaks_is_refused() -> None:
    with pytest.raises(CaptureError, match="mesh needs a forward that is one graph"):
        memopt.plan(Breaks(), ROOMY_GB, (torch.ones(4, 8),), device="h100", mesh={"dp_shard": 8}, interconnect=NETWORK)


def test_a_sequence_that_does_not_divide_is_refused() -> None:
    text = refused(mesh={"dp_shard": 8, "tp": 8}, batch=batch(length=500))
    assert "500" in text
    assert "'tp': 8" in text
