"""What articles reached by hand, and what memopt plans for the same training: a JSON file and a table a model.

    python -m benchmarks.articles [--only ViT-L/16]

Planned for an H100 on the meta device: nothing is run. Parameters are fp32, the optimizer is AdamW (fused, as the plain
one holds a parameter-size more at its step than the article's figure leaves room for). GB are 10^9 bytes that torch's
allocator holds, without the CUDA context, as the articles' `max_memory_reserved`. "exact" are the levers that are on by
default, each row with those above it and nothing offloaded: the smallest peak that has a plan, and its time beside
the plain step's, by the time model.
The articles: Raschka, "Optimizing memory usage for training LLMs and vision transformers in PyTorch" (2023). By its
scripts (rasbt/pytorch-memory-optim) the ViT's batch is 64, which its log's 703 steps for 45,000 images confirm (beside
"batch size 32" in words); its loop frees the gradients of the step before only after the forward, which "as its loop
does it" counts; DistilBERT trains on 12 reviews padded to 512 tokens; BigBird on 12 of 4,096 one by one, in bfloat16 on
four GPUs with parameters and optimizer on the host.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

import memopt
from benchmarks.real_models import VIT, integers
from benchmarks.stamp import stamp, write_result
from memopt.account.account import Account, breakdown
from memopt.device import hardware
from memopt.errors import GIB, BudgetError
from memopt.levers import DEFAULT_LEVERS, OPTIMIZER_LEVERS, levers_named
from memopt.levers.optimizer_levers import PricedLevers, TrainingFacts
from memopt.microbatch import split
from memopt.planning.joined import Joined
from memopt.planning.planner import smallest
from memopt.solver import Schedule

RESULT = Path(__file__).parent / "results" / "articles.json"
GB = 1e9
HERE = DEFAULT_LEVERS - {"offload_activations"}
CARD = "h100"
ADAMW = partial(torch.optim.AdamW, fused=True)
Batch = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Article:
    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    plain_gb: float | None
    """The peak before the article's techniques; None where it could not be run."""
    best_gb: float
    ladder: dict[str, float]
    """The peaks that the article reaches step by step."""


@dataclass(frozen=True)
class Row:
    step: str
    peak_gb: float
    added_time: float | None
    """That of the whole effective batch, as a fraction of the plain step in the same precision; None if not known."""


def on_meta(head: str, config: transformers.PretrainedConfig, loss: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        with torch.device("meta"):
            model: nn.Module = getattr(transformers, head)(config)
        model.loss_type = loss  # type: ignore[assignment]
        return model.train()

    return make


def big_bird() -> nn.Module:
    """BigBird with the attention blocks of its eval mode: in train mode numpy draws as many, which no graph holds."""
    config = transformers.BigBirdConfig(num_labels=2, problem_type="single_label_classification")
    model = on_meta("BigBirdForSequenceClassification", config, "ForSequenceClassification")()
    for module in model.modules():
        if isinstance(module, BigBirdBlockSparseAttention):
            module.eval()
    return model


def images(batch: int) -> Batch:
    return {"pixel_values": torch.empty(batch, 3, 224, 224, device="meta"), "labels": integers(batch)}


def reviews(batch: int, length: int) -> Batch:
    return {"input_ids": integers(batch, length), "labels": integers(batch)}


DISTILBERT = transformers.DistilBertConfig(num_labels=2, problem_type="single_label_classification")
ARTICLES = (
    Article(
        "ViT-L/16", on_meta("ViTForImageClassification", VIT, "ForSequenceClassification"), partial(images, 32),
        26.84, 1.34, {"mixed precision": 18.21, "bf16": 13.82, "batch 16": 5.69},
    ),
    # The batch at which this model holds what the article says, in each of its steps.
    Article(
        "ViT-L/16, batch 64", on_meta("ViTForImageClassification", VIT, "ForSequenceClassification"),
        partial(images, 64), 26.84, 1.34, {"mixed precision": 18.21, "bf16": 13.82, "batch 16": 5.69},
    ),
    Article(
        "DistilBERT",
        on_meta("DistilBertForSequenceClassification", DISTILBERT, "ForSequenceClassification"),
        partial(reviews, 12, 512), 3.99, 1.15, {},
    ),
    Article("BigBird-base", big_bird, partial(reviews, 12, 4096), None, 4.03, {}),
)  # fmt: skip


class Ladder:
    """Plans one article's training step by step and collects its rows."""

    def __init__(self, article: Article) -> None:
        self.article, self.rows = article, list[Row]()

    def plan(self, budget_bytes: float, batch: Batch | None = None, **options: Any) -> memopt.Plan:
        options = {"optimizer": ADAMW, "device": CARD, "allow": HERE, **options}
        return memopt.plan(self.article.make(), budget_bytes / GIB, batch or self.article.batch(), **options)

    def plan_all(self) -> list[Row]:
        for precision in ("fp32", "bf16"):
            plain = self.plan(1e12, precision=precision)
            context, seconds = plain.account.context, plain.step_seconds
            self.add(f"plain, {precision}", plain.predicted_peak_bytes - context, 0.0)
            if precision == "fp32":
                self.add("plain, fp32, as its loop does it", with_old_gradients(plain) - context, 0.0)
            least = self.least(precision=precision)
            for name, peak_gb in self.article.ladder.items():
                if (budget := int(peak_gb * GB) + context) > least:
                    self.planned(f"exact, {precision}, as {name!r}", budget, context, seconds, precision=precision)
            self.planned(f"exact, {precision}", least, context, seconds, precision=precision)
            self.in_pieces(precision, context, seconds)
        self.narrow(seconds)
        self.everything(context, seconds)
        return self.rows

    def add(self, step: str, nbytes: float, added: float | None) -> None:
        self.rows.append(Row(step, nbytes / GB, added))
        print(self.article.name, self.rows[-1], file=sys.stderr, flush=True)

    def least(self, batch: Batch | None = None, **options: Any) -> int:
        """Return the smallest budget that works, as the refusal names it."""
        try:
            self.plan(0.7 * GB, batch, **options)
        except BudgetError as error:
            return error.smallest_bytes
        raise AssertionError("0.7 GB fit")

    def planned(self, step: str, least: int, context: int, seconds: float, **options: Any) -> None:
        plan = self.plan(least, **options)
        self.add(step, plan.predicted_peak_bytes - context, (plan.step_seconds + plan.added_seconds) / seconds - 1)

    def in_pieces(self, precision: str, context: int, seconds: float) -> None:
        """Plan microbatches, and then also the levers on the optimizer."""
        model = self.article.make()
        samples, joined, account = self.sample_by_sample(model, precision=precision)
        nbytes, _ = smallest(joined, account)
        added = self.added(samples, joined, seconds)
        self.add(f"exact, {precision}, {samples} microbatches", nbytes - context, added)
        facts = TrainingFacts.of(model, ADAMW, hardware(CARD))
        for names in (("low_bit_optimizer",), ("offload_optimizer",)):
            offer = PricedLevers.of(facts, levers_named(names))
            nbytes, _ = smallest(joined, offer.adjusted(account))
            step = f"exact, {precision}, {samples} microbatches, {' and '.join(names)}"
            self.add(step, nbytes - context, added + offer.added_seconds / seconds)

    def narrow(self, seconds: float) -> None:
        """Plan with all optimizer levers: parameters and gradients in bf16, the optimizer's state on the host."""
        levers = levers_named(("bf16_parameters", "offload_optimizer"))
        price = PricedLevers.of(TrainingFacts.of(self.article.make(), ADAMW, hardware(CARD)), levers).after
        samples, joined, account = self.sample_by_sample(self.article.make().bfloat16(), precision="fp32")
        account = replace(
            account,
            optimizer_state=price.optimizer_state,
            optimizer_temporaries=price.optimizer_temporaries,
        )
        nbytes, _ = smallest(joined, account)
        added = self.added(samples, joined, seconds) + price.seconds / seconds
        step = f"bf16 parameters, {samples} microbatches, offload_optimizer"
        self.add(step, nbytes - account.context, added)

    def everything(self, context: int, seconds: float) -> None:
        """The whole batch at once, at the article's best and at the smallest budget, with the levers that the plan
        uses."""
        allow = HERE | OPTIMIZER_LEVERS
        least = self.least(precision="bf16", allow=allow)
        for budget in (int(self.article.best_gb * GB) + context, least):
            if budget >= least:
                plan = self.plan(budget, precision="bf16", allow=allow)
                facts = TrainingFacts.of(self.article.make(), ADAMW, hardware(CARD))
                price = PricedLevers.of(facts, levers_named(plan.proposals))
                added = (plan.step_seconds + plan.added_seconds + price.added_seconds) / seconds - 1
                step = f"whole batch, {' + '.join(plan.proposals) or 'exact'}"
                self.add(step, plan.predicted_peak_bytes - context, added)

    def sample_by_sample(self, model: nn.Module, **options: Any) -> tuple[int, Joined, Account]:
        """Return the number of samples, and problem and account of a step on one that adds to gradients."""
        batch = self.article.batch()
        samples, dtype = len(next(iter(batch.values()))), next(model.parameters()).dtype
        first = split(batch, samples)[0]
        piece = {name: value.to(dtype) if value.is_floating_point() else value for name, value in first.items()}
        plan = memopt.plan(model, 1e12 / GIB, piece, optimizer=ADAMW, device=CARD, **options)
        assert plan.captured is not None
        held = replace(plan.account, gradients_held=True)
        return samples, plan.priced.under(held).problem, held

    @staticmethod
    def added(samples: int, joined: Joined, seconds: float) -> float:
        """Return the added time at the smallest peak, for the whole effective batch."""
        return samples * (joined.problem.seconds + joined.portfolio.smallest().added_seconds) / seconds - 1


def with_old_gradients(plan: memopt.Plan) -> int:
    """The plain peak of a step whose forward runs while the gradients of the step before are still there."""
    assert plan.captured is not None
    problem = plan.priced.priced_for(accumulating=True).problem.problem
    return breakdown(problem, Schedule.save_all(problem), replace(plan.account, gradients_held=True)).peak_bytes


def table(article: Article, rows: list[Row]) -> Table:
    table = Table(title=f"{article.name}: the article {article.plain_gb} → {article.best_gb} GB", title_justify="left")
    for column in ("step", "peak GB", "added time"):
        table.add_column(column, justify="left" if column == "step" else "right")
    for name, peak in article.ladder.items():
        table.add_row(f"the article: {name}", f"{peak:.2f}", "")
    for row in rows:
        table.add_row(row.step, f"{row.peak_gb:.2f}", "" if row.added_time is None else f"{row.added_time:+.1%}")
    return table


def chosen_articles(only: list[str] | None) -> Iterator[Article]:
    return (article for article in ARTICLES if not only or article.name in only)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[article.name for article in ARTICLES])
    known = json.loads(RESULT.read_text())["articles"] if RESULT.exists() else {}
    found: dict[Article, list[Row]] = {}
    for article in chosen_articles(parser.parse_args().only):
        found[article] = Ladder(article).plan_all()
        known[article.name] = list(map(asdict, found[article]))
        write_result(RESULT, {**stamp(), "articles": known})
    for article, rows in found.items():
        Console(width=120).print(table(article, rows))


if __name__ == "__main__":
    main()
