import random
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx import GraphModule

from passes import (
    ApplySchedule,
    FreeFirst,
    HostStay,
    PassError,
    Reinplace,
    find_reuses,
    format_graph,
)
from passes.apply_schedule import BACKWARD, FORWARD
from passes.graphs.verify import verify
from tests.passes.capture import (
    Captured,
    Sketch,
    assert_bitwise_equal,
    aten,
    gpt2,
    resnet,
    rows_above_zero,
    with_inputs,
)
from tests.passes.test_apply_schedule import ONCE, layer, plain_schedule


def offloaded(*stays: HostStay, evaluations: str = " ".join(ONCE), boundary: int = 4) -> GraphModule:
    return ApplySchedule(tuple(evaluations.split()), boundary, 2, stays)(layer())


def test_golden() -> None:
    after = offloaded(HostStay("getitem_1", 2, 3, 4, 4), HostStay("getitem", 2, 4, 5, 6))
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
native_dropout: (f32[8], b8[8]) = aten.native_dropout(view, 0.5, True)
getitem: f32[8] = native_dropout[0]
getitem_1: b8[8] = native_dropout[1]
getitem_1_out: b8[8] = memopt.copy_out(getitem_1)
getitem_out: f32[8] = memopt.copy_out(getitem)
getitem_1_host: b8[8] = memopt.await_out(getitem_1_out, getitem_1)
sum_1: f32[] = aten.sum(getitem)
getitem_host: f32[8] = memopt.await_out(getitem_out, getitem)
view_3: f32[2, 4] = aten.view(relu, [2, 4])
getitem_1_fetched: b8[8] = memopt.copy_back(getitem_1_host, cpu)
getitem_1_back: b8[8] = memopt.await_back(getitem_1_fetched, getitem_1_host)
view_1: b8[4, 2] = aten.view(getitem_1_back, [4, 2])
mul: f32[4, 2] = aten.mul.Tensor(view_1, tangents_1)
getitem_fetched: f32[8] = memopt.copy_back(getitem_host, cpu)
t_1: f32[2, 4] = aten.t(mul)
mm: f32[2, 3] = aten.mm(t_1, primals_3)
getitem_back: f32[8] = memopt.await_back(getitem_fetched, getitem_host)
view_2: f32[4, 2] = aten.view(getitem_back, [4, 2])
neg: f32[4, 2] = aten.neg(view_2)
return (sum_1, view_3, mm, neg)""",
    )
    assert_bitwise_equal(with_inputs(layer()), layer(), after)
    verify(after)


def test_other_passes_leave_what_is_copied_alone() -> None:
    """`Reinplace` writes over what is back, not over what is on its way out; `FreeFirst` moves nothing past a copy."""
    sketch = Sketch()
    sin = sketch.call(aten.sin.default, sketch.input("primals_1", 4, 4))
    neg = sketch.call(aten.neg.default, sin)
    total = sketch.call(aten.sum.default, neg)
    module = sketch.returns(total, sketch.call(aten.mul.Tensor, sin, total))
    evaluations = ("sin", "neg", "sum_1", "mul")
    free = ApplySchedule(evaluations, 3, 1, ())(module)
    assert find_reuses(free) == (("mul", "sin"),)
    moved = ApplySchedule(evaluations, 3, 1, (HostStay("sin", 0, 2, 3, 3),))(module)
    assert find_reuses(moved) == (("mul", "sin_back"),)
    after = FreeFirst()(Reinplace()(moved))
    assert [node.name for node in after.graph.nodes][:-2] == [node.name for node in moved.graph.nodes][:-2]
    assert_bitwise_equal(with_inputs(module), module, after)


def test_each_half_does_its_own_part() -> None:
    """At the boundary, memory is freed in the forward half, and values are fetched in the backward half."""
    after = offloaded(HostStay("getitem", 2, 4, 4, 4))
    tags = {node.name: node.meta["partitioner_tag"] for node in after.graph.nodes if node.op == "call_function"}
    assert tags["getitem_out"] == tags["getitem_host"] == FORWARD
    assert tags["getitem_fetched"] == tags["getitem_back"] == BACKWARD


def test_what_is_recomputed_replaces_what_was_fetched() -> None:
    again = "addmm relu native_dropout sum_1 mul addmm relu native_dropout mm neg"
    after = offloaded(HostStay("getitem_1", 2, 3, 4, 4), HostStay("getitem", 2, 4, 5, 5), evaluations=again)
    text = format_graph(after)
    assert "view_1: b8[4, 2] = aten.view(getitem_1_back, [4, 2])" in text
    assert "view_2: f32[4, 2] = aten.view(getitem_again, [4, 2])" in text
    assert_bitwise_equal(with_inputs(layer()), layer(), after)


def test_two_offloads_of_one_value() -> None:
    after = offloaded(HostStay("getitem_1", 2, 3, 4, 4), HostStay("getitem_1", 4, 5, 5, 6))
    assert "getitem_1_out_1: b8[8] = memopt.copy_out(getitem_1_back)" in format_graph(after)
    assert_bitwise_equal(with_inputs(layer()), layer(), after)


def test_nothing_moved_is_the_schedule_alone() -> None:
    assert format_graph(offloaded()) == format_graph(ApplySchedule(ONCE, 4, 2)(layer()))


def random_stays(state: random.Random, module: GraphModule, plain: ApplySchedule) -> tuple[HostStay, ...]:
    """Stays of values that evaluations return whole, at random positions."""
    nodes = {node.name: node for node in module.graph.nodes}
    end, stays = len(plain.evaluations), []
    for position, name in enumerate(plain.evaluations):
        if not isinstance(nodes[name].meta.get("val"), torch.Tensor) or position + 2 >= end or state.random() < 0.5:
            continue
        out_after = state.randrange(position, end - 1)
        stays.append(HostStay(name, out_after, *sorted(state.randrange(out_after + 1, end) for _ in range(3))))
    return tuple(stays)


@pytest.mark.parametrize("model", [gpt2, resnet, rows_above_zero])
@pytest.mark.parametrize("seed", [0, 1])
def test_any_stays_give_equal_numbers(model: Callable[[], Captured], seed: int) -> None:
    module, plain, _ = plain_schedule(model())
    stays = random_stays(random.Random(seed), module, plain)
    after = ApplySchedule(plain.evaluations, plain.boundary, plain.forward_outputs, stays)(module)
    assert sum("copy_out" in str(node.target) for node in after.graph.nodes) == len(stays)
    assert_bitwise_equal(model(), module, after)


def test_refusals() -> None:
    with pytest.raises(PassError, match="node gelu: an offload names this node, which the graph does not have; make"):
        offloaded(HostStay("gelu", 2, 3, 4, 4))
    with pytest.raises(PassError, match=r"node relu: .* must be copied to the host, freed and fetched in this order"):
        offloaded(HostStay("relu", 2, 2, 4, 4))


def test_repr() -> None:
    schedule = ApplySchedule(("relu", "mm", "relu"), 2, 1, (HostStay("relu", 0, 1, 1, 2),))
    assert repr(schedule) == "ApplySchedule(3 evaluations, 1 of them recomputations, 1 offloads)"
