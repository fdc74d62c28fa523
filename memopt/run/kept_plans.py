"""Plans made earlier for the same step: by another start, which left them on disk, or by another rank."""

from __future__ import annotations

from memopt.capture.inputs import Call
from memopt.capture.operators import NothingToRewrite
from memopt.planning import plan_cache
from memopt.planning.call_planner import CallPlanner
from memopt.planning.plan import Plan
from memopt.planning.plan_cache import Kept, agreed, is_sound
from memopt.planning.refit import Footprint
from memopt.planning.stages import Recorded
from memopt.planning.terms import Situation


class KeptPlans:
    """Finds and keeps the plans of one model's calls. A plan from elsewhere is data: it is used where it was made for
    the same options and the same graphs, and where its schedule holds what it says (`is_sound`)."""

    def __init__(self, planner: CallPlanner) -> None:
        self.planner = planner

    def key(self, recorded: Recorded) -> str | None:
        """The key that plans of a recorded call are kept under; None where they are not kept."""
        graph = recorded.captured.graph
        if graph is None or not self._keeps():
            return None
        return self.planner.job(recorded.call, recorded.situation).key(graph)

    def note(self, key: str | None, recorded: Recorded) -> None:
        """Keep the key of a call for `find_uncaptured`."""
        plan_cache.note(self._sketch(recorded.call, recorded.situation), key)

    def find_uncaptured(self, call: Call, situation: Situation) -> Kept | None:
        """The plan on disk for a call that is not captured yet, if it fits beside what lies on the device now; it is
        judged by the call's graphs before it runs."""
        key, kept = plan_cache.find_by(self._sketch(call, situation))
        if kept and not self._belongs(kept):
            plan_cache.drop(key)
            return None
        return kept if kept and self.planner.accounts.still_fits(kept.plan, call, situation) else None

    def find(self, key: str | None) -> Kept | None:
        """The plan on disk under a key; one that is not for these options is deleted."""
        kept = plan_cache.find(key)
        if kept and not self._belongs(kept):
            plan_cache.drop(key)
            return None
        return kept

    def plan(self, key: str | None, recorded: Recorded) -> Plan | None:
        """The plan on disk under a key with the graphs of this recorded call; None where there is none for these
        graphs, in which case what is there is deleted."""
        kept = self.find(key)
        plan = self.adopted(kept, recorded) if kept else None
        if plan is None:
            plan_cache.drop(key)
        return plan

    def keep(self, key: str | None, plan: Plan, footprint: Footprint | None = None) -> None:
        """Keep a plan on disk for the next start, with the bytes that its compiled code holds."""
        kept = self._data_of(plan, footprint)
        if kept is not None:
            plan_cache.keep(key, kept)

    def drop(self, key: str | None) -> None:
        """Delete the plan under a key, which turned out to belong to another step."""
        plan_cache.drop(key)

    def adopted(self, kept: Kept, recorded: Recorded, *, lowering_bytes: int = 0) -> Plan | None:
        """A plan from disk or of another rank with the graphs of this recorded call; None where it was made for other
        graphs, or is not sound for these (`is_sound`)."""
        planner = self.planner
        if not self._belongs(kept) or not planner.accounts.still_fits(kept.plan, recorded.call, recorded.situation):
            return None
        try:
            traced = recorded.trace(planner.terms.lever_sets[kept.lever_set])
        except NothingToRewrite:
            return None
        if [joint.fingerprint for joint in traced.step.regions] != [one.fingerprint for one in kept.plan.regions]:
            return None
        account = planner.proposing.account_as_kept(traced.account(lowering_bytes), kept.plan)
        priced = traced.price_as_kept(kept.plan, account)
        plan = kept.live(lambda: priced.step)
        return plan if is_sound(plan, kept.footprint, account, recorded.situation.to_come) else None

    def agreed(self, plan: Plan, recorded: Recorded, lowering_bytes: int = 0) -> Plan:
        """The plan that the first rank made for such a call, with this rank's graphs; on one rank `plan` itself."""
        kept = self._data_of(plan)
        first = self.of_ranks(kept, recorded, lowering_bytes) if kept else None
        if first is kept or first is None:
            return plan
        return self.adopted(first, recorded, lowering_bytes=lowering_bytes) or plan

    def of_ranks(self, kept: Kept, recorded: Recorded, lowering_bytes: int = 0) -> Kept:
        """The plan by which all ranks run such a call, which is `kept` unless another rank has planned it before."""
        captured, situation = recorded.captured, recorded.situation
        if captured.graph is None or (situation.buckets is None and not captured.split):
            return kept
        key = self.planner.job(recorded.call, situation).key_of_ranks(captured.graph)
        return kept if key is None else agreed(f"{key}-{lowering_bytes}", kept)

    def _keeps(self) -> bool:
        return self.planner.terms.options.kept and plan_cache.is_on()

    def _sketch(self, call: Call, situation: Situation) -> str | None:
        """The key on disk of a call that is not captured yet; None where plans are not kept."""
        return self.planner.job(call, situation).sketch() if self._keeps() else None

    def _data_of(self, plan: Plan, footprint: Footprint | None = None) -> Kept | None:
        """The part of a plan that other starts and ranks need; None where it depends on sizes that depend on data."""
        captured = plan.captured
        assert captured is not None
        rewritings = self.planner.terms.lever_sets
        if captured.data_sizes.allowed or captured.rewriting not in rewritings:
            return None
        return Kept(plan, rewritings.index(captured.rewriting), footprint)

    def _belongs(self, kept: Kept) -> bool:
        """Whether a plan is for the budget and the levers of these options."""
        options, plan = self.planner.terms.options, kept.plan
        known = 0 <= kept.lever_set < len(self.planner.terms.lever_sets) and options.allow.issuperset(plan.proposals)
        return known and plan.budget_bytes == options.budget_bytes
