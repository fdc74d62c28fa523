"""The command `memopt` and its subcommands. A subcommand's module is imported when it is called."""

from __future__ import annotations

from importlib import import_module

import click

SUBCOMMANDS = {
    "plan": "Plan a training step within a budget.",
    "explain": "Say where the bytes go, what memopt changed, and why an op is treated as it is.",
    "diff": "Show what the plan changes in the model's graph.",
    "frontier": "Show the least added time for every budget.",
    "report": "Write one HTML page about the plan.",
    "export": "Write the step for PyTorch's memory visualiser, Perfetto, Graphviz or Netron.",
    "max-batch": "Find the largest batch that fits.",
    "check": "Train a few steps here, and compare them with the plan and with the plain model.",
    "cards": "List the cards that can be planned for.",
}
_EPILOG = """\b
MODEL is one of
  gpt2, llama, bert, …            a model type of transformers, random weights
  BertForSequenceClassification   a class of transformers, random weights
  path/config.json                a configuration file of transformers
  package.module:function         a function or class that gives the model
  path/model.py:function          the same in a file

\b
Exit codes: 0 fits, 1 the model cannot be planned or a check failed,
2 bad usage, 3 no plan fits, 130 interrupted.

\b
Completion: eval "$(_MEMOPT_COMPLETE=bash_source memopt)", also zsh_source
and fish_source.
"""


class _Subcommands(click.Group):
    """Subcommands that are imported when they are used, so that `memopt --help` is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SUBCOMMANDS:
            return None
        command: click.Command = import_module(f"memopt.cli.commands.{cmd_name.replace('-', '_')}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(SUBCOMMANDS.items()))


def _print_version(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        from memopt import __version__

        click.echo(f"memopt {__version__}")
        context.exit()


@click.command(cls=_Subcommands, epilog=_EPILOG, invoke_without_command=True)
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version)
@click.pass_context
def memopt(context: click.Context) -> None:
    """Fit the training step of a PyTorch model into a number of gigabytes, and see the plan.

    Nothing is run, downloaded or allocated to plan: models are built without memory, for any card.

    \b
    Example:
      memopt plan gpt2 --budget-gb 8 --device rtx-4090
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
