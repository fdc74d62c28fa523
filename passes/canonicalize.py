"""The pipeline of passes that brings every joint graph into one form before it is planned."""

from passes.eliminate_dead_code import EliminateDeadCode
from passes.forward_writes import ForwardWrites
from passes.graph_pass import Pipeline
from passes.hoist_getitems import HoistGetitems
from passes.merge_common_subexpressions import MergeCommonSubexpressions
from passes.remove_detach import RemoveDetach
from passes.wait_at_once import WaitAtOnce

# Dead code goes first; without detaches and writes more calls are equal; merging scatters getitems: these are last.
CANONICAL = Pipeline(
    (EliminateDeadCode(), RemoveDetach(), ForwardWrites(), MergeCommonSubexpressions(), WaitAtOnce(), HoistGetitems())
)
"""The passes that make a joint graph canonical; it computes the same, bit for bit."""
