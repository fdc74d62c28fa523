"""What the loss of a language model holds, plain and in chunks: a JSON file and a table.

    python -m benchmarks.chunk_loss [--only GPT-2]

A linear layer and Hugging Face's causal loss on N tokens, forward and backward, run for real on the CPU with
`memopt.measure_peak`, plain and after `passes.ChunkLoss`. "Loss" is what it holds beside the gradients: the peak less
that of `hidden`, with the layer's weight frozen (logits, log softmax and their gradient, against a chunk). "Peak" is
that of a trained layer. The backward multiplies the weight's gradient by the incoming one, which holds it twice for a
moment, unless `weight_in_backward` ("later") computes it there. Times are of one run.
Errors are norms, ‖difference‖ / ‖gradient‖, in fp32, of the chunked gradients to the plain ones and of both to float64.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss

import memopt
from benchmarks.stamp import stamp, write_result
from memopt.capture.operators import operator_graph
from memopt.compat.dynamo import capture_settings, compile_with
from passes import ChunkLoss

RESULT = Path(__file__).parent / "results" / "chunk_loss.json"
MB = 1024**2


@dataclass(frozen=True)
class Size:
    classes: int
    width: int
    tokens: int


SIZES = {
    "GPT-2": Size(50257, 768, 1024),
    "GPT-2, 4 x 1024": Size(50257, 768, 4096),
    "GPT-2's vocabulary, narrow": Size(50257, 64, 1024),
    "Llama-3's vocabulary, narrow": Size(128256, 64, 1024),
    "Llama-3.2-1B": Size(128256, 2048, 1024),
}


@dataclass(frozen=True)
class Run:
    """One forward and backward, in bytes beside hidden, weight and targets."""

    peak_bytes: int
    seconds: float
    loss: float
    gradients: tuple[Tensor, ...]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--only", choices=SIZES)
    only = arguments.parse_args().only
    rows = json.loads(RESULT.read_text())["sizes"] if only and RESULT.exists() else {}
    for name in [only] if only else SIZES:
        rows[name] = compare(SIZES[name])
        print(name, rows[name], flush=True)
    write_result(RESULT, {**stamp(), "sizes": rows})
    Console(width=140).print(table(rows))


def compare(size: Size) -> dict[str, Any]:
    """Measure one size, plain and in chunks, and return its row."""
    torch.manual_seed(0)
    hidden = torch.randn(1, size.tokens, size.width, requires_grad=True)
    weight = (torch.randn(size.classes, size.width) / size.width**0.5).requires_grad_()
    labels = torch.randint(0, size.classes, (1, size.tokens))
    before, inputs = operators(hidden, weight, labels)
    after = ChunkLoss()(before)
    weight.requires_grad_(False)
    of_hidden = hidden.numel() * hidden.element_size()
    plain_loss, chunked_loss = (measure(module, inputs).peak_bytes - of_hidden for module in (before, after))
    weight.requires_grad_(True)
    in_backward = ChunkLoss(weight_in_backward=True)(before)
    plain, chunked, later = (measure(module, inputs) for module in (before, after, in_backward))
    exact = reference(hidden, weight, labels)
    return {
        **asdict(size),
        "plain_loss_mb": plain_loss / MB,
        "chunked_loss_mb": chunked_loss / MB,
        "fall": plain_loss / chunked_loss,
        "plain_peak_mb": plain.peak_bytes / MB,
        "chunked_peak_mb": chunked.peak_bytes / MB,
        "later_peak_mb": later.peak_bytes / MB,
        "plain_seconds": plain.seconds,
        "chunked_seconds": chunked.seconds,
        "later_seconds": later.seconds,
        "loss_error": abs(chunked.loss - plain.loss) / abs(plain.loss),
        "gradient_error": error(chunked.gradients, plain.gradients),
        "later_gradient_error": error(later.gradients, plain.gradients),
        "plain_error_to_float64": error(plain.gradients, exact),
        "chunked_error_to_float64": error(chunked.gradients, exact),
    }


def operators(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[fx.GraphModule, list[Any]]:
    """The operator graph of layer and loss, and its inputs in order."""
    found: list[tuple[fx.GraphModule, list[Any]]] = []

    def backend(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        found.append((operator_graph(graph_module, inputs, frozenset()).module, list(inputs)))
        # Dynamo is done: nothing has to be computed.
        return lambda *_: (inputs[0].new_zeros(()),)

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return ForCausalLMLoss(F.linear(hidden, weight), labels, vocab_size=weight.shape[0])

    torch._dynamo.reset()
    with capture_settings():
        compile_with(backend, loss, whole=True)(hidden, weight, labels)
    return found[0]


def measure(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Run a graph and its backward; return the loss and the gradients of the inputs that require them."""
    leaves = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]
    begin = time.perf_counter()
    with memopt.measure_peak("cpu") as peak:
        (loss,) = graph_module(*inputs)
        gradients = torch.autograd.grad(loss, leaves)
    seconds = time.perf_counter() - begin
    return Run(peak.allocated_bytes, seconds, float(loss.detach()), gradients)


def reference(hidden: Tensor, weight: Tensor, labels: Tensor, rows: int = 128) -> list[Tensor]:
    """Return the gradients in float64, computed for some rows at a time."""
    wide = weight.detach().double()
    given = hidden.detach()[0, :-1].double()
    targets = labels[0, 1:]
    of_hidden, of_weight = torch.zeros_like(hidden[0], dtype=torch.float64), torch.zeros_like(wide)
    for start in range(0, len(given), rows):
        part = slice(start, start + rows)
        gradient = (given[part] @ wide.T).softmax(-1)
        gradient[torch.arange(len(gradient)), targets[part]] -= 1
        gradient /= len(given)
        of_hidden[:-1][part] = gradient @ wide
        of_weight.addmm_(gradient.T, given[part])
    return [of_hidden.unsqueeze(0), of_weight]


def error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest relative error of a gradient, as the norm of the difference over the norm."""
    pairs = sorted(found, key=lambda gradient: gradient.dim()), sorted(expected, key=lambda gradient: gradient.dim())
    return max(float((one.double() - other).norm() / other.double().norm()) for one, other in zip(*pairs, strict=True))


def table(rows: dict[str, Any]) -> Table:
    made = Table(title="A linear layer and its cross entropy, fp32 on the CPU, in MB: plain, and in chunks")
    columns = ("loss, plain", "in chunks", "falls", "peak, plain", "in chunks", "later", "time", "later", "error")
    for name in ("", "classes x width, tokens", *columns):
        made.add_column(name, justify="right" if name else "left")
    for name, row in rows.items():
        held = [f"{row[f'{key}_mb']:.1f}" for key in ("plain_loss", "chunked_loss")]
        peaks = [f"{row[f'{key}_mb']:.1f}" for key in ("plain_peak", "chunked_peak", "later_peak")]
        times = [f"{row[f'{key}_seconds'] / row['plain_seconds']:.2f}x" for key in ("chunked", "later")]
        size = f"{row['classes']} x {row['width']}, {row['tokens']}"
        made.add_row(name, size, *held, f"{row['fall']:.1f}x", *peaks, *times, f"{row['gradient_error']:.1e}")
    return made


if __name__ == "__main__":
    main()
