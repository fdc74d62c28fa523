"""The form in which a joint graph is planned."""

from passes.eliminate_dead_code import EliminateDeadCode
from passes.graph_pass import Pipeline
from passes.hoist_getitems import HoistGetitems
from passes.merge_common_subexpressions import MergeCommonSubexpressions
from passes.remove_detach import RemoveDetach

# Dead detaches go before living ones are looked at; without detaches more calls are equal; merging leaves nothing dead
# but scatters getitems, so they are ordered last.
CANONICAL = Pipeline((EliminateDeadCode(), RemoveDetach(), MergeCommonSubexpressions(), HoistGetitems()))
"""Makes a joint graph canonical, bit for bit the same computation. `dataclasses.replace` gives it an observer."""
