import operator
import random
from collections.abc import Callable

import pytest
from expecttest import assert_expected_inline
from torch.fx import GraphModule

from memopt.device.storages import is_view
from memopt.price.price import price
from memopt.price.priced_graph import NodePrice
from passes import CANONICAL, ApplySchedule, PassError, diff_graphs, format_graph
from passes.apply_schedule import BACKWARD, FORWARD
from tests.passes.capture import (
    Captured,
    Sketch,
    assert_bitwise_equal,
    aten,
    dynamic_mlp,
    gpt2,
    resnet,
    rows_above_zero,
    with_inputs,
)

ONCE = ("addmm", "relu", "native_dropout", "sum_1", "mul", "mm", "neg")


def layer() -> GraphModule:
    """A layer with dropout that is read through views on both sides of the boundary."""
    sketch = Sketch()
    bias, weight = sketch.input("primals_1", 2), sketch.input("primals_2", 2, 3)
    x, tangent = sketch.input("primals_3", 4, 3), sketch.input("tangents_1")
    relu = sketch.call(aten.relu.default, sketch.call(aten.addmm.default, bias, x, sketch.call(aten.t.default, weight)))
    dropout = sketch.call(aten.native_dropout.default, sketch.call(aten.view.default, relu, [8]), 0.5, True)
    left, mask = (sketch.call(operator.getitem, dropout, place) for place in (0, 1))
    loss = sketch.call(aten.sum.default, left)
    gradient = sketch.call(aten.mul.Tensor, sketch.call(aten.view.default, mask, [4, 2]), tangent)
    gradients = [
        sketch.call(aten.mm.default, sketch.call(aten.t.default, gradient), x),
        sketch.call(aten.neg.default, sketch.call(aten.view.default, left, [4, 2])),
    ]
    return sketch.returns(loss, sketch.call(aten.view.default, relu, [2, 4]), *gradients)


def scheduled(evaluations: str, boundary: int = 4) -> GraphModule:
    return ApplySchedule(tuple(evaluations.split()), boundary, forward_outputs=2)(layer())


def test_what_is_evaluated_once_stays() -> None:
    """But for a view that the forward returns: it is made there, not where the graph last stood."""
    diff = diff_graphs(layer(), scheduled(" ".join(ONCE)))
    assert (diff.summary(), diff.moved) == ("1 moved", ("view_3",))


def test_golden() -> None:
    after = scheduled("addmm relu native_dropout sum_1 addmm relu native_dropout mul mm neg")
    assert_expected_inline(
        format_graph(after),
        """\
input primals_1: f32[2]
input primals_2: f32[2, 3]
input primals_3: f32[4, 3]
input tangents_1: f32[]
t: f32[3, 2] = aten.t(primals_2)
addmm: f32[4, 2] = aten.addmm(primals_1, primals_3, t)
relu: f32[4, 2] = aten.relu(addmm)
view: f32[8] = aten.view(relu, [8])
native_dropout_and_state: (u8[5056], (f32[8], b8[8])) = run_and_save_rng_state(aten.native_dropout, view, 0.5, True)
native_dropout: (f32[8], b8[8]) = native_dropout_and_state[1]
native_dropout_state: u8[5056] = native_dropout_and_state[0]
getitem: f32[8] = native_dropout[0]
sum_1: f32[] = aten.sum(getitem)
view_3: f32[2, 4] = aten.view(relu, [2, 4])
t_again: f32[3, 2] = aten.t(primals_2)
addmm_again: f32[4, 2] = aten.addmm(primals_1, primals_3, t_again)
relu_again: f32[4, 2] = aten.relu(addmm_again)
view_again: f32[8] = aten.view(relu_again, [8])
native_dropout_again: (f32[8], b8[8]) = run_with_rng_state(native_dropout_state, aten.native_dropout, view_again, 0.5, True)
getitem_again: f32[8] = native_dropout_again[0]
getitem_1_again: b8[8] = native_dropout_again[1]
view_1: b8[4, 2] = aten.view(getitem_1_again, [4, 2])
mul: f32[4, 2] = aten.mul.Tensor(view_1, tangents_1)
t_1: f32[2, 4] = aten.t(mul)
mm: f32[2, 3] = aten.mm(t_1, primals_3)
view_2: f32[4, 2] = aten.view(getitem_again, [4, 2])
neg: f32[4, 2] = aten.neg(view_2)
return (sum_1, view_3, mm, neg)""",  # noqa: E501
    )


def test_every_node_is_tagged_with_its_half() -> None:
    after = scheduled("addmm relu native_dropout sum_1 addmm relu native_dropout mul mm neg")
    tags = {node.name: node.meta["partitioner_tag"] for node in after.graph.nodes if node.op == "call_function"}
    assert tags["relu"] == tags["view_3"] == tags["native_dropout_state"] == FORWARD
    assert tags["relu_again"] == tags["native_dropout_again"] == tags["mm"] == tags["view_again"] == BACKWARD


def test_again_in_the_forward() -> None:
    """The loss is summed over the second draw, and the outputs are the versions that the forward had last."""
    after = scheduled("addmm relu native_dropout relu native_dropout sum_1 mul mm neg", boundary=6)
    assert_expected_inline(
        "\n".join(line for line in format_graph(after).splitlines() if "again" in line),
        """\
relu_again: f32[4, 2] = aten.relu(addmm)
view_again: f32[8] = aten.view(relu_again, [8])
native_dropout_again: (f32[8], b8[8]) = run_with_rng_state(native_dropout_state, aten.native_dropout, view_again, 0.5, True)
getitem_again: f32[8] = native_dropout_again[0]
getitem_1_again: b8[8] = native_dropout_again[1]
sum_1: f32[] = aten.sum(getitem_again)
view_3: f32[2, 4] = aten.view(relu_again, [2, 4])
view_1: b8[4, 2] = aten.view(getitem_1_again, [4, 2])
view_2: f32[4, 2] = aten.view(getitem_again, [4, 2])""",  # noqa: E501
    )
    assert_bitwise_equal(with_inputs(layer()), layer(), after)


def test_three_draws_from_one_state() -> None:
    again = "addmm relu native_dropout"
    after = scheduled(f"{again} sum_1 {again} mul mm {again} neg")
    draws = [node for node in after.graph.nodes if "rng_state" in str(node.target)]
    assert len(draws) == 3
    assert_bitwise_equal(with_inputs(layer()), layer(), after)


def test_outputs_are_the_versions_of_the_forward() -> None:
    after = scheduled("addmm relu native_dropout sum_1 addmm relu native_dropout sum_1 mul mm neg")
    loss, activation, *_ = after.graph.output_node().args[0]
    assert (loss.name, activation.args[0].name) == ("sum_1", "relu")
    assert all(node.meta["partitioner_tag"] == FORWARD for node in (loss, activation))


def test_views_of_views_follow() -> None:
    sketch = Sketch()
    sin = sketch.call(aten.sin.default, sketch.input("primals_1", 4, 2))
    view = sketch.call(aten.view.default, sketch.call(aten.t.default, sin), [2, 2, 2])
    module = sketch.returns(sketch.call(aten.sum.default, view), sketch.call(aten.neg.default, view))
    assert_expected_inline(
        format_graph(ApplySchedule(("sin", "sum_1", "sin", "neg"), 4, 2)(module)),
        """\
input primals_1: f32[4, 2]
sin: f32[4, 2] = aten.sin(primals_1)
t: f32[2, 4] = aten.t(sin)
view: f32[2, 2, 2] = aten.view(t, [2, 2, 2])
sum_1: f32[] = aten.sum(view)
sin_again: f32[4, 2] = aten.sin(primals_1)
t_again: f32[2, 4] = aten.t(sin_again)
view_again: f32[2, 2, 2] = aten.view(t_again, [2, 2, 2])
neg: f32[2, 2, 2] = aten.neg(view_again)
return (sum_1, neg)""",
    )


def plain_schedule(captured: Captured) -> tuple[GraphModule, ApplySchedule, tuple[str, ...]]:
    """The canonical graph, a schedule with every op once, and the names of the ops that may be recomputed."""
    module = CANONICAL(captured.graph_module)
    priced = price(module, captured.forward_outputs, lambda _: NodePrice(1.0, 0))
    ops = [
        (node, index, op) for index, (node, op) in enumerate(zip(priced.nodes, priced.problem.ops, strict=True)) if node
    ]
    forward = priced.problem.forward_ops
    again = tuple(node for node, index, op in ops if index < forward and op.recomputable)
    boundary = sum(index < forward for _, index, _ in ops)
    return module, ApplySchedule(tuple(node for node, *_ in ops), boundary, captured.forward_outputs), again


@pytest.mark.parametrize("model", [gpt2, resnet])
def test_nothing_repeated_changes_no_call(model: Callable[[], Captured]) -> None:
    module, schedule, _ = plain_schedule(model())
    after = schedule(module)
    diff = diff_graphs(module, after)
    assert not diff.removed
    assert not diff.renamed
    # Views that both halves read are made in both.
    assert all(is_view(node) for node in after.graph.nodes if node.name in diff.added)
    assert_bitwise_equal(model(), module, after)


@pytest.mark.parametrize("model", [gpt2, resnet, dynamic_mlp, rows_above_zero])
@pytest.mark.parametrize("seed", [0, 1])
def test_any_repetition_gives_equal_numbers(model: Callable[[], Captured], seed: int) -> None:
    module, schedule, again = plain_schedule(model())
    chance = random.Random(seed)
    evaluations = list(schedule.evaluations)
    boundary = schedule.boundary
    for name in chance.choices(again, k=2 * len(again)):
        place = chance.randint(evaluations.index(name) + 1, len(evaluations))
        evaluations.insert(place, name)
        boundary += place < boundary
    after = ApplySchedule(tuple(evaluations), boundary, schedule.forward_outputs)(module)
    assert_bitwise_equal(model(), module, after)


def test_unknown_names() -> None:
    with pytest.raises(PassError, match="node gelu: the schedule names this node, which the graph does not have; make"):
        scheduled("addmm gelu sum_1")


def test_what_draws_must_be_scheduled() -> None:
    with pytest.raises(
        PassError, match="node native_dropout: the schedule leaves out this node, which is random or has side effects"
    ):
        scheduled("addmm relu sum_1 mul mm neg", boundary=3)


def test_writes_are_scheduled_once() -> None:
    sketch = Sketch()
    x = sketch.input("primals_1", 4)
    written = sketch.returns(sketch.call(aten.copy_.default, x, sketch.call(aten.neg.default, x)))
    assert "copy_: " in format_graph(ApplySchedule(("neg", "copy_"), 2, 1)(written))
    with pytest.raises(PassError, match="node copy_: the schedule leaves out this node"):
        ApplySchedule(("neg",), 1, 1)(written)
    with pytest.raises(PassError, match="node copy_: the schedule repeats this node"):
        ApplySchedule(("neg", "copy_", "copy_"), 3, 1)(written)


def test_it_verifies_what_it_made() -> None:
    module = layer()
    next(node for node in module.graph.nodes if node.name == "relu").meta["val"] = None
    with pytest.raises(PassError, match="node relu_again"):
        ApplySchedule((*ONCE[:4], "relu", *ONCE[4:]), 4, 2)(module)


def test_repr() -> None:
    assert repr(ApplySchedule(("relu", "mm", "relu"), 2, 1)) == "ApplySchedule(3 evaluations, 1 of them recomputations)"
