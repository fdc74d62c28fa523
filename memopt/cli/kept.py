"""The details of a job's plan that commands show, on disk: a later command for the same job reads them instead of
planning."""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import memopt
from memopt.capture.inputs import batch_call
from memopt.cli.job import Job, Prepared
from memopt.disk_cache import LIVE
from memopt.planning import plan_cache
from memopt.planning.changes import Change
from memopt.planning.frontier import Recipe
from memopt.planning.job_key import PlanJob
from memopt.planning.options import check_options
from memopt.planning.plan import Plan
from memopt.planning.plan_graphs import PlanDiff
from memopt.planning.terms import ModelTerms, Situation
from memopt.show.op_story import told_graph
from memopt.show.plan_diffs import diff_between, diff_of
from memopt.show.step import Step, step_of

if TYPE_CHECKING:
    from networkx import DiGraph


@dataclass(frozen=True, eq=False)
class _Planned:
    """The plan of a job, and those facts about its graphs that commands show: data that is kept on disk."""

    plan: Plan
    """Without graphs where it was read from disk."""
    step: Step
    changes: tuple[Change, ...]
    """The changes that `Plan.diff` shows."""
    modules: tuple[str, ...]
    """The paths of the model's modules, in the order of the forward."""
    recipes: tuple[Recipe, ...]
    nodes: str
    """The nodes of the `told_graph` with their attributes, and its edges, as JSON."""
    prepared: Prepared | None = field(default=None, metadata=LIVE)
    """The job, already prepared, that the plan was made for."""

    @classmethod
    def of(cls, plan: Plan) -> _Planned:
        """The kept form of a plan made in this process."""
        graph, diff = told_graph(plan), plan.diff()
        edges = [(read, name) for name in graph for read in graph.predecessors(name)]  # in the order of the operands
        nodes = json.dumps((list(graph.nodes(data=True)), edges))
        return cls(plan, step_of(plan), diff.changes, diff.modules, plan.recipes(), nodes)

    @cached_property
    def graph(self) -> DiGraph:
        """The joint graph with the facts about each operator that `memopt explain --op` shows (see `told_graph`)."""
        from networkx import DiGraph  # slow to import

        graph, (nodes, edges) = DiGraph(), json.loads(self.nodes)
        graph.add_nodes_from(nodes)
        graph.add_edges_from(edges)
        return graph

    @cached_property
    def live(self) -> Plan:
        """The plan with its graphs, made again where it was read from disk."""
        assert self.prepared is not None
        return made(self.prepared) if self.plan.source is None else self.plan

    def diff(self, other: _Planned | None = None, *, order: bool = False) -> PlanDiff:
        """As `Plan.diff`; with `other`, the changes that only one of the two plans makes."""
        if order:
            return self.live.diff(None if other is None else other.live, order=True)
        own = diff_of(self.plan, self.changes, self.modules, lambda stage: self.live.diff(stage))
        if other is None:
            return own
        return diff_between(
            self.plan, own, other.plan, other.diff(), lambda stage: self.live.diff(other.live).of_stage(stage)
        )


def planned(job: Job) -> _Planned:
    """The plan of a job, read from disk where it was made before, unless `MEMOPT_CACHE=0`. May raise `UsageError`."""
    prepared = job.prepare()
    key = _key(prepared) if plan_cache.is_on() else None
    found = plan_cache.find(key, _Planned)
    if found is None:
        found = _Planned.of(made(prepared))
        plan_cache.keep(key, found, packed=True)
    return replace(found, prepared=prepared)


def made(prepared: Prepared) -> Plan:
    """The plan of a job, made now. Raises what `memopt.plan` raises."""
    return memopt.plan(prepared.model, prepared.budget_gb, prepared.meta_batch(), **prepared.options)


def _key(prepared: Prepared) -> str | None:
    """The key under which the details of a job's plan are kept, from all that the plan depends on. No graph is captured
    in which an edited function would show, so the files of all loaded code of the user are part of it."""
    options = check_options(prepared.budget_gb, **prepared.options)
    terms = ModelTerms(prepared.model, options)
    call = batch_call(prepared.meta_batch(), options.loss_fn)
    further = _Planned.__name__, terms.backend, _own_code()
    return PlanJob(prepared.model, call, Situation(), options, terms.card, options.loss_fn, further).sketch()


def _own_code() -> list[str]:
    """Hashes of the files of all loaded modules that are the user's own, sorted."""
    installed = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    files = {
        Path(file)
        for name, module in list(sys.modules.items())
        if (file := getattr(module, "__file__", None)) and name.partition(".")[0] not in ("memopt", "passes", "torch")
    }
    own = [file for file in files if not str(file).startswith(installed) and file.is_file()]
    return sorted(hashlib.sha256(file.read_bytes()).hexdigest() for file in own)
