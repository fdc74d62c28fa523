"""How large the pages of large models are, and how soon one can work with them: one JSON file and a table.

    python -m benchmarks.page [--only "GPT-2, 12 blocks"] [--picture]

Each model is planned for an H100 at a quarter of the way from the smallest budget to the plain peak, and its page
opened five times in a headless Chromium. "ready" is from the beginning of the navigation until everything is drawn and
takes input; "hover" and "search" are until the page has answered a movement of the mouse and the word "softmax". All
are medians. --picture makes docs/page.png instead: the memory over the first model's step, with the mouse on it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import memopt
from benchmarks.stamp import stamp, write_result
from examples.models.browser import chromium, open_page, why_no_browser
from memopt.errors import GIB

RESULT = Path(__file__).parent / "results" / "page.json"
PICTURE = Path(__file__).parents[1] / "docs" / "page.png"
SHARE, TIMES, LENGTH = 0.25, 5, 512
LLAMA = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "vocab_size": 32000}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT-2, 12 blocks": lambda: GPT2LMHeadModel(GPT2Config()),
    "GPT-2, 48 blocks": lambda: GPT2LMHeadModel(GPT2Config(n_layer=48, n_embd=1600, n_head=25)),
    "Llama, 48 blocks": lambda: LlamaForCausalLM(LlamaConfig(num_hidden_layers=48, **LLAMA)),
}
ANSWERS = """
const took = action => { const start = performance.now(); action(); return performance.now() - start; };
const chart = document.getElementById('chart'), box = chart.getBoundingClientRect();
const at = {clientX: box.left + box.width / 2, clientY: box.top + 40, bubbles: true};
const hover = took(() => chart.dispatchEvent(new PointerEvent('pointermove', at)));
const search = document.getElementById('search');
search.focus();
search.value = 'softmax';
const find = took(() => { search.dispatchEvent(new Event('input')); document.body.offsetHeight; });
return [Number(document.documentElement.dataset.ready), hover, find];
"""


@dataclass(frozen=True)
class Row:
    """The page of one model; milliseconds."""

    model: str
    operators: int
    evaluations: int
    page_mb: float
    ready_ms: float
    hover_ms: float
    search_ms: float


def planned(make: Callable[[], nn.Module]) -> memopt.Plan:
    """Return the plan of a model on the meta device."""
    with torch.device("meta"):
        model = make().train()
        tokens = torch.zeros(4, LENGTH, dtype=torch.int64)
    roomy = memopt.plan(
        model, 1000, {"input_ids": tokens, "labels": tokens}, device="h100", backend="aten", effort="fast"
    )
    smallest = roomy.smallest_gb()
    return roomy.at(smallest + SHARE * (roomy.plain_peak_gb - smallest))


def measure(driver: Any, name: str, folder: Path) -> Row:
    plan = planned(MODELS[name])
    page = folder / "page.html"
    plan.report(page)
    answers = []
    for _ in range(TIMES):
        open_page(driver, page)
        answers.append(driver.execute_script(ANSWERS))
    ready, hover, search = (statistics.median(values) for values in zip(*answers, strict=True))
    evaluations = sum(len(region.evaluations) for region in plan.regions)
    size = page.stat().st_size * 1024 / GIB
    return Row(name, plan.networkx().number_of_nodes(), evaluations, size, ready, hover, search)


def take_picture(driver: Any, folder: Path) -> None:
    """Write docs/page.png."""
    from selenium.webdriver.common.action_chains import ActionChains

    page = folder / "page.html"
    planned(next(iter(MODELS.values()))).report(page)
    open_page(driver, page)
    driver.set_window_size(1280, 860)
    driver.execute_script("document.getElementById('timeline').scrollIntoView()")
    chart = driver.find_element("id", "chart")
    ActionChains(driver).move_to_element_with_offset(chart, 40, 20).perform()
    driver.save_screenshot(str(PICTURE))


def show(rows: list[Row]) -> None:
    table = Table(title="Pages of large models")
    for field in Row.__dataclass_fields__:
        table.add_column(field.replace("_", " "))
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in asdict(row).values()))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS)
    parser.add_argument("--picture", action="store_true")
    arguments = parser.parse_args()
    only = arguments.only
    if why_no_browser():
        sys.exit(why_no_browser())
    with chromium() as driver, tempfile.TemporaryDirectory() as folder:
        if arguments.picture:
            take_picture(driver, Path(folder))
            return
        rows = [measure(driver, name, Path(folder)) for name in ([only] if only else MODELS)]
    show(rows)
    if not only:
        write_result(RESULT, {**stamp(), "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
