"""The examples of README and docs: which blocks of code there are, and what a page takes as given.

The Python blocks of a page run in order and share their names. What a page does not define is its reader's own: a small
model with its batch, optimiser and data (`given`). A block whose first line is `# not run here: WHY` is only parsed;
commands are the lines of ```console and ```sh blocks that start with `memopt`.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import memopt

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_RUN = "# not run here: "
_BLOCK = re.compile(r"^( *)```(\w+)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^ *(?:\$ )?memopt ((?:.*\\\n)*.*)$", re.MULTILINE)


def python_blocks(page: Path) -> list[str]:
    """Return the Python blocks of a page that are run."""
    return [block for block in _blocks(page, "python") if not block.startswith(NOT_RUN)]


def marked_blocks(page: Path) -> list[str]:
    """Return the Python blocks of a page that say that they are not run."""
    return [block for block in _blocks(page, "python") if block.startswith(NOT_RUN)]


def commands(text: str) -> list[str]:
    """Return the arguments of the `memopt` commands in a text, with continued lines joined."""
    return [re.sub(r"\s*\\\n\s*", " ", found) for found in _COMMAND.findall(text)]


def commands_of(page: Path) -> list[str]:
    """Return the arguments of the `memopt` commands in a page."""
    return commands("\n".join(_blocks(page, "console") + _blocks(page, "sh") + _blocks(page, "bash")))


def _blocks(page: Path, language: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return [textwrap.dedent(body) for _, named, body in _BLOCK.findall(text) if named == language]


def given() -> dict[str, Any]:
    """Return the names that a page takes as given."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=64, n_embd=32, n_layer=1, n_head=2, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters())

    def make_inputs(samples: int, length: int = 64) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 256, (samples, length))
        return {"input_ids": tokens, "labels": tokens}

    return {
        "torch": torch,
        "memopt": memopt,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LinearLR(optimizer),
        "batch": make_inputs(4),
        "loader": [make_inputs(4) for _ in range(5)],
        "make_inputs": make_inputs,
    }
