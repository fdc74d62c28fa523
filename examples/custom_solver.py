"""A solver from outside of memopt that betters a real plan of GPT-2, near the smallest budget that works.

memopt's own search is at its weakest there. `NoisyPrices` solves the same step several times with every operator's
seconds changed at random, which leads the search elsewhere each time (a noising method, Charon and Hudry, 1993). Bytes
stay as they are, so each schedule fits the budget, and memopt's simulator judges it by the true seconds.

Plans only, without the model's memory: `python examples/custom_solver.py`, in a minute on a CPU.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import memopt
from memopt.solver import Infeasible, Portfolio, RematProblem, Schedule


@dataclass(frozen=True)
class NoisyPrices:
    restarts: int = 4
    spread: float = 0.3
    name: str = "noisy prices"

    def candidates(self, problem: RematProblem, budget_bytes: int) -> Iterator[Schedule]:
        draw = random.Random(0)  # the same plan in every run
        for _ in range(self.restarts):
            ops = [replace(op, seconds=op.seconds * draw.lognormvariate(0.0, self.spread)) for op in problem.ops]
            try:
                yield Portfolio(replace(problem, ops=tuple(ops))).solve(budget_bytes).schedule
            except Infeasible:
                return


def main() -> None:
    config = GPT2Config(vocab_size=256, n_embd=256, n_head=8, n_layer=4, bos_token_id=0, eos_token_id=0)
    with torch.device("meta"):
        model = GPT2LMHeadModel(config).train()
        ids = torch.zeros(8, 512, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    options = {"optimizer": None, "precision": "fp32", "allow": {"recompute"}, "device": "cpu"}
    least_gb = memopt.plan(model, 8, batch, **options).smallest_gb()
    for budget_gb in (1.005 * least_gb, 1.02 * least_gb, 1.05 * least_gb):
        own = memopt.plan(model, budget_gb, batch, **options)
        custom = memopt.plan(model, budget_gb, batch, solvers=[NoisyPrices()], **options)
        print(f"within {budget_gb:.4f} GB at least {own.bound:.2%} is added")
        for plan in (own, custom):
            print(f"  {plan.added_time:.2%} by {plan.method}; the plain step with {plan.diff().summary()}")


if __name__ == "__main__":
    main()
