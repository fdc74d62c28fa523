"""The options that all planning commands share, and the model, inputs and budget that they stand for."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, cast

import click
from click.shell_completion import CompletionItem

from memopt.cli.early import CARDS, LEVERS, OPTIMIZERS, UsageError, check_early, gigabytes, model_types
from memopt.progress import stage

if TYPE_CHECKING:
    import torch
    from torch import nn

    from memopt.cli.shapes import Shapes
    from memopt.planning.options import PlanOptions


def _among(names: Sequence[str]) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """For completion in the shell, a function that returns those of `names` that begin with what was typed."""
    return lambda _context, _parameter, typed: [name for name in names if name.startswith(typed.lower())]


def _levers(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """For completion in the shell, the text of `--allow` with its last name completed by each lever that fits."""
    *named, last = incomplete.split(",")
    before, taken = "".join(f"{name}," for name in named), last[:1] == "-"
    words = (f"-{name}" for name in LEVERS) if taken else ("default", *LEVERS)
    return [f"{before}{word}" for word in words if word.startswith(last) and word not in named]


def _models(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """For completion in the shell, the model types that begin with what was typed, else files."""
    found = [CompletionItem(name) for name in model_types() if name.startswith(incomplete)]
    return found or [CompletionItem(incomplete, type="file")]


_ARGUMENTS = (
    click.argument("model", metavar="MODEL", required=False, shell_complete=_models),
    click.option(
        "--shape", "shapes", multiple=True, metavar="NAME=SIZES:DTYPE",
        help="Shape of one input, such as input_ids=8x1024:int64; repeatable. Language models have defaults, and "
        "labels are added where the model takes them. Without NAME= inputs are positional.",
    ),
    click.option(
        "--set", "settings", multiple=True, metavar="NAME=VALUE",
        help="A field of the architecture's configuration (n_layer=4), or a keyword of your function; repeatable.",
    ),
    click.option(
        "--loss", metavar="FUNCTION",
        help="Trains loss(model(inputs), target): a name of torch.nn.functional, or package.module:function; its "
        "second argument is --shape target=….",
    ),
    click.option(
        "--device", metavar="CARD", shell_complete=_among(CARDS),
        help="The card to plan for: rtx-4090, h100, cpu, … (memopt cards). Default: this machine's.",
    ),
    click.option("--budget-gb", metavar="GB", help="GB of 1024³ bytes for the whole step. Default: the card's memory."),
    click.option(
        "--allow", metavar="LEVERS", shell_complete=_levers,
        help="Levers that may be used, separated by commas: recompute,reinplace, or default,fp8, or "
        "default,-offload_activations. Default: default.",
    ),
    click.option(
        "--lora", type=click.IntRange(min=1), metavar="RANK",
        help="Trains LoRA adapters of this rank on every linear layer (peft), in fp32; the model itself is frozen, in "
        "bf16 unless --precision is fp32.",
    ),
    click.option(
        "--bits", type=click.Choice(["4"]),
        help="With --lora: the frozen linear layers have this many bits a weight (NF4 of bitsandbytes, as in QLoRA).",
    ),
    click.option(
        "--host-gb", metavar="GB",
        help="GB of host memory that the plan may use. Without --allow, frozen parameters may lie there too "
        "(offload_parameters), with the backend aten.",
    ),
    click.option(
        "--precision", type=click.Choice(("auto", "fp32", "bf16", "fp16", "search")), default="auto", show_default=True
    ),
    click.option(
        "--optimizer", default="adamw", metavar="NAME", show_default=True, shell_complete=_among(OPTIMIZERS),
        help="A name of torch.optim, or none.",
    ),
    click.option("--backend", type=click.Choice(("auto", "aten", "inductor")), default="auto", show_default=True),
    click.option("--effort", type=click.Choice(("fast", "default", "best")), default="default", show_default=True),
    click.option("--json", is_flag=True, help="Print the figures as JSON."),
    click.option("--debug", is_flag=True, help="Show the traceback of a failure."),
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """The options that all planning commands share, as they are written on the command line."""

    model: str
    shapes: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    loss: str | None = None
    device: str | None = None
    budget_gb: str | None = None
    allow: str | None = None
    lora: int | None = None
    bits: str | None = None
    host_gb: str | None = None
    precision: str = "auto"
    optimizer: str = "adamw"
    backend: str = "auto"
    effort: str = "default"
    json: bool = False
    debug: bool = field(default=False, repr=False)

    def prepare(self) -> Prepared:
        """Read the options, build the model on "meta", and determine its inputs. May raise `UsageError`."""
        with stage(f"loading {self.model}"):
            return self._prepare()

    def _prepare(self) -> Prepared:
        import torch

        from memopt.cli.names import budget_gb, card_named, model_factory, on_meta, with_lora
        from memopt.cli.shapes import parse_shapes, shapes_of, with_defaults
        from memopt.planning.options import check_options

        card = card_named(self.device)
        budget = budget_gb(self.budget_gb, card)
        options: PlanOptions = {**self.options(), "device": card}
        shapes = parse_shapes(self.shapes)
        check_options(budget, **options)  # and again by what plans: loading the model takes a while
        build = model_factory(self.model, self.settings)
        if self.bits is not None and self.lora is None:
            raise UsageError("--bits needs --lora: 4-bit weights are not trained")
        if self.lora is not None:
            dtype = torch.float32 if self.precision == "fp32" else torch.bfloat16
            build = with_lora(build, self.lora, dtype, packed=self.bits is not None)
        model, inputs = on_meta(build)
        if not shapes and inputs is not None:
            shapes = shapes_of(inputs, self.model, with_target=self.loss is not None)
        if self.loss is not None and "target" not in shapes:
            raise UsageError("--loss needs --shape target=SIZES:DTYPE, the shape of its second argument")
        return Prepared(build, model, with_defaults(model, shapes), budget, options)

    def options(self) -> PlanOptions:
        """The options for `memopt.plan`, without the device. Raises `UsageError` for a value that cannot be used."""
        from memopt.cli.names import named_function

        options: dict[str, Any] = {"precision": self.precision, "backend": self.backend, "effort": self.effort}
        options["optimizer"] = None if self.optimizer.lower() == "none" else self.optimizer
        if self.allow is not None:
            options["allow"] = _allowed(self.allow)
        if self.host_gb is not None:
            options["host_gb"] = gigabytes("--host-gb", self.host_gb)
            options["allow"] = options.get("allow", _allowed("default,offload_parameters"))
        if self.loss is not None:
            options["loss_fn"] = named_function(self.loss)
        return cast("PlanOptions", options)


@dataclass(frozen=True)
class Prepared:
    """A model and its inputs, ready to be planned."""

    build: Callable[[], tuple[nn.Module, Any]]
    """Builds the model again, with memory."""
    model: nn.Module
    """On "meta", in training mode."""
    shapes: Shapes
    budget_gb: float
    options: PlanOptions

    def batch(self, make: Callable[[str], torch.Tensor]) -> Any:
        """The example inputs as `memopt.plan` takes them: a dict, or a tuple if they have no names. With a loss
        function, they are a pair of the inputs and the target. `make` returns the tensor for each name in `shapes`."""
        names = [name for name in self.shapes if not (name == "target" and "loss_fn" in self.options)]
        positional = any(name.isdigit() for name in names)
        inputs: Any = tuple(map(make, names)) if positional else {name: make(name) for name in names}
        if "loss_fn" in self.options:
            return (inputs[0] if positional and len(inputs) == 1 else inputs, make("target"))
        return inputs

    def meta_batch(self) -> Any:
        """The example inputs (see `batch`), with tensors on "meta"."""
        return self.batch(lambda name: self.shapes[name].meta())


def _allowed(written: str) -> frozenset[str]:
    """The names of the levers that the text of `--allow` means: names to add, "default" for the default levers, "-name"
    to take one away. Raises `UsageError` for an unknown one."""
    from memopt.levers.all import DEFAULT_LEVERS, allowable

    default = {str(name) for name in DEFAULT_LEVERS}
    added, removed = set[str](), set[str]()
    for name in filter(None, map(str.strip, written.split(","))):
        lever = name.removeprefix("-")
        if lever not in {*allowable(), "default"}:
            close = difflib.get_close_matches(lever, allowable(), n=1)
            meant = f"; did you mean {close[0]}?" if close else f"; known are default, {', '.join(allowable())}"
            raise UsageError(f"--allow has no lever {name!r}{meant}")
        (removed if name.startswith("-") else added).update(default if lever == "default" else {lever})
    return frozenset(added - removed)


def takes_job(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """Adds the shared options to a command's own, and passes their values as its first argument, a `Job`."""
    shared = [one.name for one in fields(Job)]

    @functools.wraps(command)
    def with_job(**values: Any) -> int | None:
        if values["model"] is None and not values.get("locked"):
            context = click.get_current_context()
            raise click.MissingParameter(ctx=context, param_hint="'MODEL'", param_type="argument")
        values["model"] = values["model"] or ""
        job = Job(**{name: values.pop(name) for name in shared})
        check_early(job.model, job.device, job.budget_gb)
        return command(job, **values)

    decorated = with_job
    for option in reversed(_ARGUMENTS):
        decorated = option(decorated)
    return decorated
