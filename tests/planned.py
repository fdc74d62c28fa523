"""Joint graphs written by hand, for tests of what is planned from them: nothing is traced, nothing is measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import Node

from memopt.account.account import Account
from memopt.capture.joint import JointGraph
from memopt.capture.operators import Rewriting
from memopt.device import hardware
from memopt.planning.plan import Plan
from memopt.planning.priced_step import PricedStep, PriceSettings, TracedStep
from memopt.planning.stages import Priced
from tests.passes.capture import Sketch, aten

ACCOUNT = Account(
    parameters=3072, buffers=0, inputs=4096, optimizer_state=6144, optimizer_temporaries=2048, gradients=3072, reserve=0
)


def region(layers: int, *, loss: bool = True, width: int = 16, batch: int = 64, first: int = 0) -> JointGraph:
    """Return a region of `layers` times gelu(x @ weight), which gives the sum (`loss`) or the last hidden state."""
    sketch = Sketch()
    weights = [sketch.input(f"primals_{number + 1}", width, width) for number in range(layers)]
    x = sketch.input(f"primals_{layers + 1}", batch, width)
    tangent = sketch.input("tangents_1") if loss else sketch.input("tangents_1", batch, width)

    def call(path: str, *args: object) -> Node:
        node = sketch.call(*args)
        node.meta["nn_module_stack"] = {"self": ("L['self']", object), "layer": (f"L['self'].{path}", object)}
        return node

    hidden, wide = [x], []
    for number, weight in enumerate(weights):
        wide.append(call(f"layers.{first + number}.linear", aten.mm.default, hidden[-1], weight))
        hidden.append(call(f"layers.{first + number}", aten.gelu.default, wide[-1]))
    output = sketch.call(aten.sum.default, hidden[-1]) if loss else hidden[-1]
    gradient = sketch.call(aten.expand.default, tangent, [batch, width]) if loss else tangent
    gradients = []
    for number in reversed(range(layers)):
        gradient = sketch.call(aten.gelu_backward.default, gradient, wide[number])
        turned = sketch.call(aten.t.default, hidden[number])
        gradients.append(sketch.call(aten.mm.default, turned, gradient))
        gradient = sketch.call(aten.mm.default, gradient, sketch.call(aten.t.default, weights[number]))
    module = sketch.returns(output, *reversed(gradients), None if loss and not first else gradient)
    return JointGraph.of(module, 1, frozenset(range(layers)))


def reading_late() -> JointGraph:
    """Return `region(2)` with a result at its end that reads the first hidden state once more."""
    joint = region(2)
    graph = joint.module.graph
    named = {node.name: node for node in graph.nodes}
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    with graph.inserting_before(output):
        late = graph.call_function(aten.mul.Tensor, (named["gelu"], named["gelu_backward_1"]), name="mul")
    late.meta = dict(named["gelu_backward_1"].meta)
    output.args = ((*results[:-1], late),)
    joint.module.recompile()
    return JointGraph(joint.module, joint.forward_outputs, joint.parameter_inputs)


def captured(*regions: JointGraph) -> PricedStep:
    return TracedStep("Layers", regions or (region(3),)).price(PriceSettings(hardware("h100")))


def make_plan(step: PricedStep, account: Account, budget_bytes: int, *args: Any, **options: Any) -> Plan:
    """Return the plan of a step with an account, by the arguments of `Priced.solve`."""
    return Priced(step.under(account), account).solve(budget_bytes, *args, **options)


def under_levers(step: PricedStep, levers: Rewriting, account: Account = ACCOUNT) -> Priced:
    """Return a step as it would be priced under a set of levers."""
    return Priced(replace(step.traced, rewriting=levers).price(step.settings), account)


def two_regions() -> PricedStep:
    """Return a call of two regions: two layers, a graph break, and two more layers with the loss."""
    return captured(region(2, loss=False), region(2, first=2))
