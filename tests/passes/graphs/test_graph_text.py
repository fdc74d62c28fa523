import itertools
import operator

import torch
from expecttest import assert_expected_inline
from torch.fx import Graph

from passes import format_graph
from passes.graphs.graph_text import format_argument, format_dtype, format_value
from passes.graphs.node_facts import module_path
from tests.passes.capture import Sketch, aten, dynamic_mlp, gpt2


def test_every_kind_of_node_takes_one_line() -> None:
    sketch = Sketch()
    x = sketch.input("primals_1", 2, 6)
    constant = sketch.constant("table", torch.zeros(3, dtype=torch.int64))
    split = sketch.call(aten.split_with_sizes.default, x, [2, 4], 1)
    left = sketch.call(operator.getitem, split, 0)
    cast = sketch.call(aten.to.dtype, left, torch.bfloat16, copy=True)
    joined = sketch.call(aten.cat.default, [cast, cast], -1)
    full = sketch.call(aten.full.default, [2], float("inf"), device=torch.device("cpu"), pin_memory=False)
    graph_module = sketch.returns(joined, None, full, constant)
    assert_expected_inline(
        format_graph(graph_module),
        """\
input primals_1: f32[2, 6]
table: i64[3] = self.table
split_with_sizes: (f32[2, 2], f32[2, 4]) = aten.split_with_sizes(primals_1, [2, 4], 1)
getitem: f32[2, 2] = split_with_sizes[0]
to: bf16[2, 2] = aten.to.dtype(getitem, bf16, copy=True)
cat: bf16[2, 4] = aten.cat([to, to], -1)
full: f32[2] = aten.full([2], inf, device=cpu, pin_memory=False)
return (cat, None, full, table)""",
    )


def test_higher_order_operators_name_the_operator_they_run() -> None:
    sketch = Sketch()
    x = sketch.input("primals_1", 4)
    drawn = sketch.call(torch.ops.higher_order.run_and_save_rng_state, aten.native_dropout.default, x, 0.5, True)
    state = sketch.call(operator.getitem, drawn, 0)
    sketch.call(torch.ops.higher_order.run_with_rng_state, state, aten.native_dropout.default, x, 0.5, True)
    assert_expected_inline(
        format_graph(sketch.returns(x)),
        """\
input primals_1: f32[4]
run_and_save_rng_state: (u8[5056], (f32[4], b8[4])) = run_and_save_rng_state(aten.native_dropout, primals_1, 0.5, True)
getitem: u8[5056] = run_and_save_rng_state[0]
run_with_rng_state: (f32[4], b8[4]) = run_with_rng_state(getitem, aten.native_dropout, primals_1, 0.5, True)
return (primals_1,)""",
    )


def test_a_graph_without_metadata_prints_too() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_method("reshape", (x, slice(1, None), {"a": 1.0})))
    assert_expected_inline(
        format_graph(graph),
        """\
input x
reshape = call_method.reshape(x, 1:, {a: 1.0})
return reshape""",
    )


def test_sizes_that_are_symbols_print_as_expressions() -> None:
    lines = format_graph(dynamic_mlp().graph_module).splitlines()
    batch, width = (line.partition("Sym(")[2].rstrip(")") for line in lines if "input" in line and "Sym" in line)
    assert f"input primals_5: f32[{batch}, {width}, 4]" in lines
    assert any(line.startswith(f"mul_6: Sym({batch}*{width}) = operator.mul(primals_3, primals_4)") for line in lines)


def test_module_paths_stand_as_comments_where_they_change() -> None:
    text = format_graph(gpt2().graph_module, module_paths=True)
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert "# transformer.h.1.mlp.c_fc" in comments
    assert "# backward of transformer.h.1.mlp.c_fc" in comments
    assert all(one != other for one, other in itertools.pairwise(comments))
    assert "#" not in format_graph(gpt2().graph_module)


def test_a_node_without_a_module_has_no_path() -> None:
    graph = Graph()
    assert module_path(graph.placeholder("x")) == ""


def test_dtypes_are_short() -> None:
    names = "float32 float64 bfloat16 float16 int64 int8 uint8 uint16 bool complex64 float8_e4m3fn float8_e5m2"
    short = " ".join(format_dtype(getattr(torch, name)) for name in names.split())
    assert_expected_inline(short, """f32 f64 bf16 f16 i64 i8 u8 u16 b8 c64 f8_e4m3fn f8_e5m2""")


def test_values_and_arguments() -> None:
    assert format_value((torch.zeros(2), None, 3, [True])) == "(f32[2], None, 3, (True))"
    assert format_value(object()) == "object"
    assert format_argument((1,)) == "(1,)"
    assert format_argument([1.0, -0.0, "a", None]) == "[1.0, -0.0, 'a', None]"
    assert format_argument(slice(0, 4, 2)) == "0:4:2"
    assert format_argument(torch.strided) == "strided"
    assert format_argument(operator.add) == "operator.add"


def test_printing_is_deterministic() -> None:
    assert format_graph(gpt2().graph_module) == format_graph(gpt2().graph_module.graph)
