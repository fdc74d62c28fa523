import operator
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx import GraphModule, Node

from passes import VerifyError, copy_graph_module
from passes.graphs import verify as verify_module
from passes.graphs.verify import changed_nodes, check_signature, verify
from tests.passes.capture import Captured, Sketch, aten, dynamic_mlp, gpt2, resnet, rows_above_zero

CAPTURED = [gpt2, resnet, rows_above_zero, dynamic_mlp]


def two_layers() -> GraphModule:
    sketch = Sketch()
    x, weight = sketch.input("primals_1", 2, 3), sketch.input("primals_2", 3, 3)
    hidden = sketch.call(aten.mm.default, x, weight)
    return sketch.returns(sketch.call(aten.relu.default, hidden))


def named(graph_module: GraphModule, name: str) -> Node:
    return next(node for node in graph_module.graph.nodes if node.name == name)


@pytest.mark.parametrize("captured", CAPTURED, ids=lambda function: function.__name__)
def test_captured_graphs_hold_together(captured: Callable[[], Captured]) -> None:
    verify(captured().graph_module)


@pytest.mark.parametrize("captured", CAPTURED, ids=lambda function: function.__name__)
def test_nothing_is_left_behind(captured: Callable[[], Captured]) -> None:
    graph_module = captured().graph_module
    mode = graph_module.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode
    guards, pending = len(mode.shape_env.guards), len(mode.shape_env.pending_fresh_unbacked_symbols)
    state = torch.get_rng_state()
    values = [node.meta.get("val") for node in graph_module.graph.nodes]
    verify(graph_module)
    assert torch.equal(state, torch.get_rng_state())
    assert len(mode.shape_env.guards) == guards
    assert len(mode.shape_env.pending_fresh_unbacked_symbols) == pending
    assert all(node.meta.get("val") is value for node, value in zip(graph_module.graph.nodes, values, strict=True))


def test_ambient_autocast_and_default_dtype_do_not_matter() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        verify(gpt2().graph_module)


def spoil_dtype(node: Node) -> None:
    node.meta["val"] = node.meta["val"].to(torch.bfloat16)


def spoil_shape(node: Node) -> None:
    with node.meta["val"].fake_mode:
        node.meta["val"] = torch.empty(3, 3)


def spoil_stride(node: Node) -> None:
    with node.meta["val"].fake_mode:
        node.meta["val"] = torch.empty(3, 2).t()


def spoil_device(node: Node) -> None:
    node.meta["val"] = torch.empty(2, 3, device="meta")


def spoil_kind(node: Node) -> None:
    node.meta["val"] = (node.meta["val"],)


def test_stale_metadata_is_found_and_named() -> None:
    messages = []
    for spoil in (spoil_dtype, spoil_shape, spoil_stride, spoil_device, spoil_kind):
        graph_module = two_layers()
        spoil(named(graph_module, "relu"))
        graph_module.graph.lint()
        with pytest.raises(VerifyError) as caught:
            verify(graph_module)
        assert caught.value.node == "relu"
        messages.append(str(caught.value))
    assert_expected_inline(
        "\n".join(messages),
        """\
node relu: meta['val'] says dtype bf16, its operator returns f32; set meta["val"] to what the operator returns
node relu: meta['val'] says shape [3, 3], its operator returns [2, 3]; set meta["val"] to what the operator returns
node relu: meta['val'] says stride [1, 2], its operator returns [3, 1]; set meta["val"] to what the operator returns
node relu: meta['val'] says device meta, its operator returns cpu; set meta["val"] to what the operator returns
node relu: meta['val'] says (f32[2, 3]), its operator returns f32[2, 3]; \
set meta["val"] to what the operator returns""",
    )


def test_the_stride_of_a_dimension_of_size_1_means_nothing() -> None:
    sketch = Sketch()
    relu = sketch.call(aten.relu.default, sketch.input("primals_1", 2, 1, 3))
    graph_module = sketch.returns(relu)
    with relu.meta["val"].fake_mode:
        relu.meta["val"] = torch.empty_strided((2, 1, 3), (3, 7, 1))
        verify(graph_module)
        relu.meta["val"] = torch.empty_strided((2, 1, 3), (1, 3, 2))
    with pytest.raises(VerifyError, match=r"meta\['val'\] says stride \[1, 3, 2\]"):
        verify(graph_module)


def test_a_call_that_cannot_run_is_named() -> None:
    graph_module = two_layers()
    named(graph_module, "mm").args = (named(graph_module, "primals_2"), named(graph_module, "primals_1"))
    with pytest.raises(VerifyError, match="node mm: the operator cannot run on the fake tensors"):
        verify(graph_module)


def test_missing_metadata_is_named() -> None:
    graph_module = two_layers()
    del named(graph_module, "mm").meta["val"]
    with pytest.raises(
        VerifyError, match=r'node mm: it has no meta\["val"\]; set node.meta\["val"\] to its fake value'
    ):
        verify(graph_module)


def test_a_use_before_the_definition_is_found() -> None:
    graph_module = two_layers()
    named(graph_module, "primals_2").append(named(graph_module, "relu"))
    with pytest.raises(VerifyError, match=r"graph.lint\(\) says"):
        verify(graph_module)


def test_one_wrong_element_of_a_tuple_is_named() -> None:
    sketch = Sketch()
    dropout = sketch.call(aten.native_dropout.default, sketch.input("primals_1", 4), 0.5, True)
    graph_module = sketch.returns(sketch.call(operator.getitem, dropout, 0))
    first, mask = dropout.meta["val"]
    dropout.meta["val"] = (first, mask.float())
    with pytest.raises(VerifyError, match=r"native_dropout: output 1: meta\['val'\] says dtype f32"):
        verify(graph_module)
    dropout.meta["val"] = (first,)
    with pytest.raises(VerifyError, match="says 1 outputs, its operator returns 2"):
        verify(graph_module)


def test_a_wrong_symbol_is_found_and_a_fresh_one_is_not_compared() -> None:
    graph_module = copy_graph_module(dynamic_mlp().graph_module)
    size = next(node for node in graph_module.graph.nodes if node.target is operator.mul)
    size.meta["val"] = size.meta["val"] + 1
    with pytest.raises(VerifyError, match=rf"node {size.name}: .* says .*\+ 1, its operator returns"):
        verify(graph_module)
    verify(rows_above_zero().graph_module)


def test_random_states_of_higher_order_operators_are_checked() -> None:
    sketch = Sketch()
    x = sketch.input("primals_1", 4)
    drawn = sketch.call(torch.ops.higher_order.run_and_save_rng_state, aten.native_dropout.default, x, 0.5, True)
    state, pair = sketch.call(operator.getitem, drawn, 0), sketch.call(operator.getitem, drawn, 1)
    again = sketch.call(torch.ops.higher_order.run_with_rng_state, state, aten.native_dropout.default, x, 0.5, True)
    graph_module = sketch.returns(pair and sketch.call(operator.getitem, again, 0))
    before = torch.get_rng_state()
    verify(graph_module)
    assert torch.equal(before, torch.get_rng_state())
    again.meta["val"] = again.meta["val"][:1]
    with pytest.raises(VerifyError, match="node run_with_rng_state"):
        verify(graph_module)


def test_writing_in_place_spares_the_stored_values() -> None:
    sketch = Sketch()
    x = sketch.input("primals_1", 4)
    sketch.graph.call_function(aten.unsqueeze_.default, (x, 0)).meta["val"] = x.meta["val"].unsqueeze(0)
    graph_module = sketch.returns(x)
    verify(graph_module)
    assert tuple(x.meta["val"].shape) == (4,)


def test_a_result_over_rows_that_depend_on_data_is_checked() -> None:
    sketch = Sketch()
    rows = sketch.call(aten.nonzero.default, sketch.input("x", 6, 2))
    wide = sketch.call(aten._to_copy.default, rows, dtype=torch.float32)
    column = sketch.call(aten.sum.dim_IntList, wide, [1], True)
    mul = sketch.call(aten.mul.Tensor, column, sketch.call(aten.neg.default, wide))
    module = sketch.returns(mul)
    mul.target, mul.kwargs = aten.mul.out, {"out": mul.args[1]}
    verify(module)
    mul.meta["val"] = mul.meta["val"].double()
    with pytest.raises(VerifyError, match=r"node mul: .*float64|node mul: .*f64"):
        verify(module)


def test_only_what_changed_is_checked_beside_the_graph_before() -> None:
    before = two_layers()
    spoil_dtype(named(before, "mm"))
    after = copy_graph_module(before)
    assert changed_nodes(before.graph, after.graph) == []
    verify(after, before=before)
    named(after, "relu").target = aten.sin.default
    assert changed_nodes(before.graph, after.graph) == [named(after, "relu")]


def test_a_number_of_another_type_is_a_change() -> None:
    sketch = Sketch()
    before = sketch.returns(sketch.call(aten.mul.Tensor, sketch.input("primals_1", 2, dtype=torch.int64), 1))
    after = copy_graph_module(before)
    named(after, "mul").args = (named(after, "primals_1"), 1.0)
    with pytest.raises(VerifyError, match=r"node mul: meta\['val'\] says dtype i64, its operator returns f32"):
        verify(after, before=before)


def test_users_of_a_changed_value_are_checked() -> None:
    before = two_layers()
    after = copy_graph_module(before)
    spoil_dtype(named(after, "primals_1"))
    with pytest.raises(VerifyError, match=r"node mm: meta\['val'\] says dtype f32"):
        verify(after, before=before)


def test_a_lost_input_or_output_is_found() -> None:
    before, after = two_layers(), two_layers()
    output = after.graph.output_node()
    output.args = ((named(after, "relu"), named(after, "mm")),)
    with pytest.raises(VerifyError, match="1 outputs became 2"):
        check_signature(before, after)
    output.args = ((None,),)
    with pytest.raises(VerifyError, match=r"output 0 changed from f32\[2, 3\] to None"):
        check_signature(before, after)
    named(after, "primals_1").target = "other"
    with pytest.raises(VerifyError, match="the inputs changed"):
        check_signature(before, after)


def test_equal_calls_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[str] = []
    check = verify_module._check_node
    monkeypatch.setattr(verify_module, "_check_node", lambda node: (run.append(node.name), check(node)))
    verify(gpt2().graph_module)
    calls = [node for node in gpt2().graph_module.graph.nodes if node.op == "call_function"]
    assert len(run) < 0.7 * len(calls)


@pytest.mark.parametrize("spoil", [spoil_dtype, spoil_shape, spoil_stride, spoil_device, spoil_kind])
def test_a_stale_value_among_equal_calls_is_found(spoil: Callable[[Node], None]) -> None:
    for place in range(3):
        sketch = Sketch()
        x = sketch.input("primals_1", 2, 3)
        calls = [sketch.call(aten.relu.default, x) for _ in range(3)]
        graph_module = sketch.returns(*calls)
        spoil(calls[place])
        with pytest.raises(VerifyError, match=calls[place].name):
            verify(graph_module)


def test_calls_that_read_other_places_are_no_equal_ones() -> None:
    sketch = Sketch()
    one, other = sketch.input("primals_1", 2, 3), sketch.input("primals_2", 3, 3)
    first = sketch.call(aten.addmm.default, one, one, other)
    second = sketch.call(aten.addmm.default, one, one, other)
    graph_module = sketch.returns(first, second)
    second.args = (one, other, other)
    with pytest.raises(VerifyError, match=second.name):
        verify(graph_module)


def test_numbers_of_other_types_make_no_equal_calls() -> None:
    sketch = Sketch()
    x = sketch.input("primals_1", 2, dtype=torch.int64)
    first = sketch.call(aten.add.Tensor, x, 1)
    second = sketch.call(aten.add.Tensor, x, 1)
    graph_module = sketch.returns(first, second)
    second.args = (x, 1.0)
    with pytest.raises(VerifyError, match=second.name):
        verify(graph_module)
