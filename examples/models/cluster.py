"""A Llama on one card of a cluster under a recipe of checkpointing: bytes and seconds. It is captured once for all
clusters that split its layers alike, since what a card computes does not depend on the number of shards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

import memopt
from examples.models.checkpoints import recipe
from examples.models.llama import TP_PLAN, LlamaSize, batch, on_meta, token_loss
from memopt.account.account import Account, Breakdown, breakdown
from memopt.device.cluster import check_cluster
from memopt.planning.cluster_step import ClusterStep, cluster_step
from memopt.planning.joined import on_card, without_allocator
from memopt.planning.priced_step import PricedStep

_ROOMY_GB = 2.0**30


@dataclass(frozen=True)
class Job:
    """A model on a mesh of cards, with the sequences that each group of `tp` cards trains on."""

    size: LlamaSize
    mesh: dict[str, int]
    samples: int
    length: int = 8192
    card: str = "h100"
    interconnect: str = "nvlink4+ib-ndr"

    @property
    def tokens(self) -> float:
        """The tokens of a step for each card."""
        return self.samples * self.length / self.mesh.get("tp", 1)


@dataclass(frozen=True)
class CardStep:
    """A job's step on one card, captured and priced, with nothing decided about what is recomputed."""

    priced: PricedStep
    account: Account

    @classmethod
    def of(cls, job: Job, **options: Any) -> CardStep:
        """Capture a job."""
        split = {"tp_plan": TP_PLAN} if job.mesh.get("tp", 1) > 1 else {}
        plan = memopt.plan(
            on_meta(job.size),
            _ROOMY_GB,
            batch(job.samples, job.length),
            loss_fn=token_loss,
            device=job.card,
            mesh=job.mesh,
            interconnect=job.interconnect,
            allow={"recompute"},
            **{**split, **options},
        )
        assert plan.priced is not None
        return cls(plan.priced, without_allocator(replace(plan.account, kept=0)))

    def over(self, mesh: dict[str, int], interconnect: str) -> CardStep:
        """The same step on another cluster with as many cards in "tp"."""
        cluster, before = check_cluster(mesh, interconnect), self.priced.traced.sharded
        assert cluster is not None
        assert before is not None
        assert cluster.mesh.tp == before.cluster.mesh.tp
        sharding = before.over(cluster)
        account = sharding.account(
            self.account, torch.optim.AdamW, self.priced.settings.hardware, lambda parameter: True
        )
        traced = replace(self.priced.traced, sharded=sharding)
        return CardStep(traced.price(self.priced.settings), account)

    def under(self, name: str) -> CardFigures:
        """What the step holds and takes under a recipe of checkpointing."""
        joined = self.priced.problem
        schedule = recipe(joined.problem, name)
        step = cluster_step(joined, schedule, self.priced, self.account)
        there = on_card(joined, schedule, self.account)
        return CardFigures(breakdown(joined.problem, schedule, there), there, step)


@dataclass(frozen=True)
class CardFigures:
    """What a step holds on one card, the gaps between the allocator's blocks included, and how long it takes."""

    peak: Breakdown
    account: Account
    step: ClusterStep

    @property
    def reserved_bytes(self) -> int:
        """The most that torch's allocator reserves: all but the context of the card."""
        return self.peak.peak_bytes - self.account.context
