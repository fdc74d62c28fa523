"""Problems for the solver tests: a tape that writes the backward by itself, models, and random graphs."""

from __future__ import annotations

import random
from collections.abc import Sequence

from memopt.solver.problem import Op, RematProblem, Schedule, Storage

MATMUL_FLOPS, MEMORY_BYTES, LAUNCH_SECONDS = 553e12, 4.3e12, 5e-6


def op_seconds(flops: float, moved_bytes: float) -> float:
    """A roofline price in seconds."""
    return max(flops / MATMUL_FLOPS, moved_bytes / MEMORY_BYTES, LAUNCH_SECONDS)


class Tape:
    """Records forward ops; `problem` adds a gradient op for each in reverse, and sums where gradients meet."""

    def __init__(self) -> None:
        self._ops: list[Op] = []
        self._storages: list[Storage] = []
        self._gradients: list[tuple[Op, tuple[int, ...], int]] = []
        self.block = -1

    def op(
        self,
        name: str,
        reads: Sequence[int],
        makes: Sequence[int],
        *,
        seconds: float | None = None,
        flops: float = 0.0,
        saves: Sequence[int] = (),
        saves_makes: Sequence[int] = (),
        weight_bytes: int = 0,
        workspace_bytes: int = 0,
        recomputable: bool = True,
        attention: bool = False,
        kept: Sequence[int] = (),
    ) -> tuple[int, ...]:
        """Record an op that makes storages of `makes` bytes; its gradient op reads `saves` and those it made.

        `saves_makes` and `kept` are places among `makes`; `weight_bytes` gives it a weight gradient, which is kept.
        """
        made = tuple(range(len(self._storages), len(self._storages) + len(makes)))
        for place, size in enumerate(makes):
            self._storages.append(Storage(f"{name}.{place}", size, kept=place in kept))
        moved = sum(self._storages[s].bytes for s in reads) + sum(makes)
        price = op_seconds(flops, moved) if seconds is None else seconds
        op = Op(name, price, tuple(reads), made, workspace_bytes, recomputable, self.block, attention)
        self._ops.append(op)
        self._gradients.append((op, (*saves, *(made[place] for place in saves_makes)), weight_bytes))
        return made

    def problem(self, resident_bytes: int = 0) -> RematProblem:
        """The forward so far and its backward, from the last op's first output."""
        forward_ops = len(self._ops)
        gradient = {self._ops[-1].makes[0]: self._make("loss.grad", 4)}
        self._ops.append(Op("loss.grad", LAUNCH_SECONDS, (), (gradient[self._ops[-1].makes[0]],)))
        for op, saved, weight_bytes in reversed(self._gradients):
            arriving = [gradient[storage] for storage in op.makes if storage in gradient]
            if not arriving:
                continue
            self.block = op.block
            reads = tuple(dict.fromkeys((*arriving, *saved)))
            if weight_bytes:
                weight = self._make(f"{op.name}.weight_grad", weight_bytes, kept=True)
                weight_reads = tuple(dict.fromkeys((*arriving, *op.reads)))
                self._ops.append(Op(f"{op.name}.weight_grad", op.seconds, weight_reads, (weight,), 0, True, op.block))
            targets = list(dict.fromkeys(op.reads))
            made = [self._make(f"{op.name}.grad.{i}", self._storages[s].bytes) for i, s in enumerate(targets)]
            if made:
                workspace = op.workspace_bytes
                self._ops.append(Op(f"{op.name}.grad", op.seconds, reads, tuple(made), workspace, True, op.block))
            for storage, piece in zip(targets, made, strict=True):
                gradient[storage] = self._sum(gradient[storage], piece) if storage in gradient else piece
        return RematProblem(tuple(self._ops), tuple(self._storages), forward_ops, resident_bytes)

    def _make(self, name: str, size: int, kept: bool = False) -> int:
        self._storages.append(Storage(name, size, kept))
        return len(self._storages) - 1

    def _sum(self, left: int, right: int) -> int:
        size = self._storages[left].bytes
        total = self._make("sum", size)
        self._ops.append(Op("sum", op_seconds(0, 3 * size), (left, right), (total,), 0, True, self.block))
        return total


def transformer(
    layers: int, *, batch: int = 8, length: int = 1024, width: int = 768, blocks: bool = True
) -> RematProblem:
    """GPT-2's shape in 16 bits with dropout, its loss chunked."""
    tape = Tape()
    tokens = batch * length
    full = 2 * tokens * width
    heads = width // 64
    weight = 2 * width * width

    def linear(name: str, read: int, wide_in: int, wide_out: int) -> int:
        flops = 2.0 * tokens * width * width * wide_in * wide_out
        return tape.op(name, [read], [full * wide_out], flops=flops, weight_bytes=weight * wide_in * wide_out)[0]

    def norm(name: str, read: int) -> int:
        tape_op = tape.op(name, [read], [full, 4 * tokens, 4 * tokens], saves=[read], saves_makes=[1, 2])
        return tape_op[0]

    def dropout(name: str, read: int, other: int) -> int:
        dropped, _ = tape.op(f"{name}.dropout", [read], [full, full // 2], saves_makes=[1])
        return tape.op(f"{name}.add", [other, dropped], [full])[0]

    (x,) = tape.op("embedding", [], [full], seconds=2e-5, weight_bytes=2 * 50257 * width)
    for layer in range(layers):
        tape.block = layer if blocks else -1
        h = norm(f"{layer}.norm1", x)
        qkv = linear(f"{layer}.qkv", h, 1, 3)
        parts = [tape.op(f"{layer}.{part}", [qkv], [full])[0] for part in "qkv"]
        attended, _ = tape.op(
            f"{layer}.attention", parts, [full, 4 * tokens * heads], flops=2.0 * batch * length * length * width,
            workspace_bytes=full, attention=True, saves=parts, saves_makes=[0, 1],
        )  # fmt: skip
        joined = tape.op(f"{layer}.join", [attended], [full])[0]
        x = dropout(f"{layer}.proj", linear(f"{layer}.proj", joined, 1, 1), x)
        h = norm(f"{layer}.norm2", x)
        wide = linear(f"{layer}.up", h, 1, 4)
        active = tape.op(f"{layer}.gelu", [wide], [4 * full], saves=[wide])[0]
        x = dropout(f"{layer}.down", linear(f"{layer}.down", active, 4, 1), x)
    tape.block = -1
    h = norm("norm", x)
    tape.op("loss", [h], [4], flops=6.0 * tokens * width * 50257, saves=[h], workspace_bytes=2 * tokens * 50257 // 8,
            kept=[0])  # fmt: skip
    parameters = layers * 12 * weight + 2 * 50257 * width
    return tape.problem(resident_bytes=parameters)


def unet(depth: int = 4, *, size: int = 64, channels: int = 64) -> RematProblem:
    """An hourglass whose long skips hold the largest tensors through the whole forward."""
    tape = Tape()

    def convolution(name: str, read: Sequence[int], level: int) -> int:
        pixels, wide = (size >> level) ** 2 * 16, channels << level
        made = 4 * pixels * wide
        out = tape.op(f"{name}.conv", read, [made], flops=2.0 * pixels * wide * wide * 9, weight_bytes=36 * wide * wide,
                      workspace_bytes=made // 2)[0]  # fmt: skip
        normed, *_ = tape.op(
            f"{name}.norm", [out], [made, 4 * wide, 4 * wide], saves=[out], saves_makes=[1, 2], kept=[2]
        )
        return tape.op(f"{name}.relu", [normed], [made], saves_makes=[0])[0]

    x = tape.op("input", [], [4 * size * size * 16 * channels], seconds=1e-5)[0]
    skips = []
    for level in range(depth):
        for repeat in range(2):
            x = convolution(f"down{level}.{repeat}", [x], level)
        skips.append(x)
        x = tape.op(f"pool{level}", [x], [4 * (size >> (level + 1)) ** 2 * 16 * channels << level], saves=[x])[0]
    for level in reversed(range(depth)):
        x = tape.op(f"upsample{level}", [x], [4 * (size >> level) ** 2 * 16 * channels << level])[0]
        x = convolution(f"up{level}.0", [x, skips.pop()], level)
        x = convolution(f"up{level}.1", [x], level)
    tape.op("loss", [x], [4], saves=[x], kept=[0])
    return tape.problem(resident_bytes=10**8)


def chain(length: int, size: int = 10, seconds: float = 1.0) -> RematProblem:
    """`length` equal ops, the gradient of each reading its input: the problem of Griewank's treeverse."""
    tape = Tape()
    (x,) = tape.op("0", [], [size], seconds=seconds)
    for index in range(1, length):
        (x,) = tape.op(str(index), [x], [size], seconds=seconds, saves=[x])
    return tape.problem()


def random_problem(random_state: random.Random, forward_ops: int) -> RematProblem:
    """A training-step-like graph with several outputs, workspaces, kept results and ops that cannot be repeated."""
    tape = Tape()
    made: list[int] = []
    for index in range(forward_ops):
        tape.block = index // 4 if random_state.random() < 0.8 else -1
        near = made[-4:] if random_state.random() < 0.8 else made
        reads = random_state.sample(near, min(len(near), random_state.choice([1, 1, 1, 2, 2, 3]))) if near else []
        makes = [random_state.randint(0, 30) for _ in range(random_state.choice([1, 1, 1, 2, 3]))]
        places = range(len(makes))
        made += tape.op(
            str(index),
            reads,
            makes,
            seconds=random_state.choice([0.0, 1.0, 1.0, 2.0, 5.0, random_state.random()]),
            saves=[storage for storage in reads if random_state.random() < 0.6],
            saves_makes=[place for place in places if random_state.random() < 0.4],
            weight_bytes=random_state.choice([0, 0, 5]),
            workspace_bytes=random_state.choice([0, 0, 0, 12]),
            recomputable=random_state.random() < 0.85,
            attention=random_state.random() < 0.2,
            kept=[place for place in places if random_state.random() < 0.08],
        )
    return tape.problem(resident_bytes=random_state.choice([0, 7]))


def text(problem: RematProblem, schedule: Schedule) -> str:
    """The names of a schedule's evaluations, repeated ones in brackets."""
    seen: set[int] = set()
    names = []
    for op in schedule.evaluations:
        names.append(f"({problem.ops[op].name})" if op in seen else problem.ops[op].name)
        seen.add(op)
    return " ".join(names)


def random_schedule(random_state: random.Random, problem: RematProblem) -> Schedule:
    """Every op once in order, with forward ops recomputed at random places after they first ran."""
    evaluations: list[int] = []
    for index in range(len(problem.ops)):
        evaluations.append(index)
        again = [op for op in range(min(index + 1, problem.forward_ops)) if problem.ops[op].recomputable]
        evaluations += random_state.choices(again, k=random_state.choice([0, 0, 0, 1, 2])) if again else []
    return Schedule(tuple(evaluations))
