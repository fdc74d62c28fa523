import dataclasses
import gc
from itertools import pairwise

import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_manager import PassManager, pass_result_wrapper

from passes import (
    CANONICAL,
    EliminateDeadCode,
    MergeCommonSubexpressions,
    Pass,
    PassError,
    Pipeline,
    RemoveDetach,
    copy_graph_module,
    diff_graphs,
    format_graph,
    passes_for,
)
from passes.graphs.verify import VerifyError
from tests.passes.capture import Sketch, aten, gpt2


@dataclasses.dataclass(frozen=True)
class ReturnsNothing(Pass):
    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        return None  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True)
class ErasesWhatIsUsed(Pass):
    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        (relu,) = graph_module.graph.find_nodes(op="call_function", target=aten.relu.default)
        graph_module.graph.erase_node(relu)
        return graph_module


@dataclasses.dataclass(frozen=True)
class ReluTwice(Pass):
    """Applies every relu twice; the options break it on purpose."""

    dtype: torch.dtype | None = None
    size: int | None = None
    misplace: bool = False
    drop_output: bool = False

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        graph = graph_module.graph
        for node in graph.find_nodes(op="call_function", target=aten.relu.default):
            with graph.inserting_before(node if self.misplace else node.next):
                again = graph.call_function(aten.relu.default, (node,))
            again.meta["val"] = node.meta["val"]
            if self.dtype is not None:
                again.meta["val"] = again.meta["val"].to(self.dtype)
            if self.size is not None:
                again.meta["val"] = again.meta["val"].new_empty(self.size)
            node.replace_all_uses_with(again, delete_user_cb=lambda user, again=again: user is not again)
        if self.drop_output:
            graph.output_node().args = ((),)
        return graph_module


def relu() -> GraphModule:
    sketch = Sketch()
    return sketch.returns(sketch.call(aten.relu.default, sketch.input("primals_1", 4)))


def test_a_pass_returns_a_new_graph_and_leaves_its_input() -> None:
    before = relu()
    text, code = format_graph(before), before.code
    after = ReluTwice()(before)
    assert (format_graph(before), before.code) == (text, code)
    assert diff_graphs(before, after).added == ("relu_default",)
    assert torch.equal(after(torch.ones(4))[0], torch.ones(4))


def test_the_copy_shares_values_and_constants_and_keeps_metadata() -> None:
    before = gpt2().graph_module
    after = copy_graph_module(before)
    assert not diff_graphs(before, after)
    for old, new in zip(before.graph.nodes, after.graph.nodes, strict=True):
        assert old is not new
        assert old.meta is not new.meta
        assert old.meta.keys() == new.meta.keys()
        assert all(old.meta[key] is new.meta[key] for key in old.meta)
    constant = before.graph.find_nodes(op="get_attr")[0].target
    assert getattr(after, constant) is getattr(before, constant)
    assert after.code == before.code


def test_nodes_that_a_pass_erases_are_freed() -> None:
    sketch = Sketch()
    given = sketch.input("primals_1", 4)
    sketch.call(aten.relu.default, given)
    before = sketch.returns(sketch.call(aten.relu.default, given))
    after = EliminateDeadCode()(before)
    gc.collect()
    alive = [found.name for found in gc.get_objects() if type(found) is Node and found.graph is after.graph]
    assert sorted(filter(None, alive)) == sorted(node.name for node in after.graph.nodes)
    assert len(before.graph.nodes) == len(after.graph.nodes) + 1


def test_the_check_after_the_pass_names_pass_node_and_mend() -> None:
    messages = []
    faults = ({"dtype": torch.bfloat16}, {"size": 5}, {"drop_output": True})
    for fault in faults:
        with pytest.raises(PassError) as caught:
            ReluTwice(**fault)(relu())
        assert caught.value.pass_name == "ReluTwice"
        messages.append(str(caught.value))
    assert_expected_inline(
        "\n".join(messages),
        """\
ReluTwice: node relu_default: meta['val'] says dtype bf16, its operator returns f32; \
set meta["val"] to what the operator returns
ReluTwice: node relu_default: meta['val'] says shape [5], its operator returns [4]; \
set meta["val"] to what the operator returns
ReluTwice: node output: 1 outputs became 0; restore inputs and outputs, or set keeps_signature = False in the pass""",
    )


def test_what_people_forget_gets_an_error_that_names_the_pass_and_the_mend() -> None:
    messages = []
    for mistaken in (ReturnsNothing(), ErasesWhatIsUsed()):
        with pytest.raises(PassError) as caught:
            mistaken(relu())
        messages.append(str(caught.value))
    assert_expected_inline(
        "\n".join(messages),
        """\
ReturnsNothing: rewrite returned None, not a graph module; end it with `return graph_module`
ErasesWhatIsUsed: node relu: rewrite erases this node, which others use; call passes.replace_node(node, by) instead""",
    )


def test_other_errors_of_a_rewrite_are_not_hidden() -> None:
    class Fails(Pass):
        def rewrite(self, graph_module: GraphModule) -> GraphModule:
            raise RuntimeError("a fault of its own")

    with pytest.raises(RuntimeError, match="a fault of its own"):
        Fails()(relu())


def test_passes_say_which_graphs_they_are_for() -> None:
    inside = Pipeline([RemoveDetach(), EliminateDeadCode()])
    assert passes_for("operators", [ReluTwice(), inside]) == (ReluTwice(), EliminateDeadCode())
    assert passes_for("joint", [ReluTwice(), inside]) == (RemoveDetach(),)
    with pytest.raises(TypeError, match="is no pass; give instances of Pass"):
        passes_for("joint", [ReluTwice])  # type: ignore[list-item]

    class Elsewhere(ReluTwice):
        graph = "backward"  # type: ignore[assignment]

    with pytest.raises(ValueError, match=r"Elsewhere.graph is 'backward'; set it to 'operators' or 'joint'"):
        passes_for("joint", [Elsewhere()])


def test_a_graph_out_of_order_is_refused_before_anything_runs_on_it() -> None:
    with pytest.raises(PassError, match=r"ReluTwice: graph.lint\(\) says: .*; define each node once, before its users"):
        ReluTwice(misplace=True)(relu())


def test_the_check_before_the_pass_refuses_a_graph_without_metadata() -> None:
    graph_module = relu()
    del graph_module.graph.find_nodes(op="placeholder")[0].meta["val"]
    with pytest.raises(PassError, match=r'ReluTwice: node primals_1: it has no meta\["val"\]'):
        ReluTwice()(graph_module)


def test_passes_are_values() -> None:
    assert repr(ReluTwice(size=3)) == "ReluTwice(dtype=None, size=3, misplace=False, drop_output=False)"
    assert ReluTwice(size=3) == ReluTwice(size=3)
    assert Pipeline([ReluTwice()]) == Pipeline((ReluTwice(),))
    with pytest.raises(dataclasses.FrozenInstanceError):
        ReluTwice().size = 4  # type: ignore[misc]


def test_a_pipeline_prints_as_a_list() -> None:
    pipeline = Pipeline([EliminateDeadCode(), Pipeline([RemoveDetach()]), MergeCommonSubexpressions(), Pipeline([])])
    assert len(pipeline) == 4
    assert_expected_inline(
        str(pipeline),
        """\
Pipeline([
    EliminateDeadCode(),
    Pipeline([
        RemoveDetach(),
    ]),
    MergeCommonSubexpressions(across_halves_bytes=65536),
    Pipeline([]),
])""",
    )


def test_a_pipeline_holds_passes_only() -> None:
    with pytest.raises(TypeError, match="is no pass; give instances of Pass"):
        Pipeline([EliminateDeadCode])  # type: ignore[list-item]


def test_stages_are_those_of_nested_pipelines() -> None:
    graphs = [relu(), *Pipeline([ReluTwice(), Pipeline([EliminateDeadCode()])]).stages(relu())]
    found = [diff_graphs(before, after).summary() for before, after in pairwise(graphs)]
    assert found == ["1 added, 1 changed", "no change"]
    assert Pipeline([]).stages(relu()) == []


def test_a_pipeline_makes_the_same_graph_of_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gpt2().graph_module
    text = format_graph(before)
    *_, observed = CANONICAL.stages(before)
    copies: list[GraphModule] = []

    def counted(module: GraphModule) -> GraphModule:
        copies.append(module)
        return copy_graph_module(module)

    monkeypatch.setattr("passes.graph_pass.copy_graph_module", counted)
    assert format_graph(CANONICAL(before)) == format_graph(observed)
    assert copies == [before]
    assert format_graph(before) == text


def test_the_error_of_a_pipeline_names_the_pass() -> None:
    with pytest.raises(PassError, match="ReluTwice: ") as info:
        Pipeline([EliminateDeadCode(), ReluTwice(drop_output=True), RemoveDetach()])(relu())
    assert info.value.pass_name == "ReluTwice"


def test_a_pass_with_checks_of_its_own_is_checked_in_every_pipeline() -> None:
    @dataclasses.dataclass(frozen=True)
    class Refusing(EliminateDeadCode):
        def requires(self, graph_module: GraphModule) -> None:
            raise VerifyError(None, "it takes no graph", "leave it out")

    with pytest.raises(PassError, match="Refusing: it takes no graph"):
        Pipeline([RemoveDetach(), Refusing()])(relu())


def test_torch_fx_runs_passes_and_pipelines() -> None:
    before = gpt2().graph_module
    manager = PassManager([ReluTwice().as_fx_pass(), CANONICAL.as_fx_pass()], steps=3)
    result = manager(before)
    assert result.modified
    assert format_graph(result.graph_module) == format_graph(CANONICAL(before))
    assert not PassManager([CANONICAL.as_fx_pass()])(result.graph_module).modified


def test_torch_fx_wrapper_takes_a_pass_as_it_is() -> None:
    result = PassManager([pass_result_wrapper(ReluTwice())])(relu())
    assert len(result.graph_module.graph.find_nodes(op="call_function", target=aten.relu.default)) == 2
