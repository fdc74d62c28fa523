"""`memopt cards`."""

from __future__ import annotations

import click

from memopt.cli.output import show, show_json


@click.command("cards")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.option("--debug", is_flag=True, help="Show the traceback of a failure.")
def command(as_json: bool, debug: bool) -> None:
    """List the cards that can be planned for, with the rates that their makers state.

    \b
    Example:
      memopt cards
    """
    from rich.table import Table

    from memopt.device import hardware, known_hardware
    from memopt.errors import GIB

    cards = [hardware(name) for name in known_hardware()]
    if as_json:
        show_json(
            [
                {
                    "name": card.name,
                    "memory_gb": card.memory_bytes / GIB,
                    "bytes_per_second": card.bytes_per_second,
                    "link_bytes_per_second": card.link_bytes_per_second,
                    "flops": dict(card.flops),
                    "source": card.source,
                }
                for card in cards
            ]
        )
        return
    table = Table(title="Cards: --device NAME; the default budget is the memory", title_justify="left")
    table.add_column("name", no_wrap=True)
    for title in ("memory GB", "GB/s", "TFLOPS fp32", "16 bits", "link GB/s"):
        table.add_column(title, justify="right")
    for card in cards:
        half = max(card.flops.get("bfloat16", 0.0), card.flops.get("float16", 0.0))
        link = f"{card.link_bytes_per_second / 1e9:.4g}" if card.link_bytes_per_second else "–"
        rates = (f"{card.bytes_per_second / 1e9:,.0f}", f"{card.flops['float32'] / 1e12:.4g}", f"{half / 1e12:.5g}")
        table.add_row(card.name, f"{card.memory_bytes / GIB:.4g}", *rates, link)
    show(table, "link: to the host's memory, each way. cpu: this machine's. --json says where the rates come from.")
