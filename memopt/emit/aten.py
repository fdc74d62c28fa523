"""Halves run operator by operator, as they stand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from memopt.compat import aot_autograd, boxed
from memopt.emit.lowering import Lowered, Lowering, PartitionTraced


@dataclass(frozen=True)
class AtenLowering:
    """Plain ATen operators: bitwise the plain model's numbers, and the memory that the plan says."""

    fuses: bool = False

    def compile(self, graph_module: fx.GraphModule, inputs: Sequence[Any], partition: PartitionTraced) -> Lowered:
        def compiler(module: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
            return boxed(module)

        compile_region = aot_autograd(
            fw_compiler=compiler,
            bw_compiler=compiler,
            inference_compiler=compiler,
            partition_fn=partition,
            keep_inference_input_mutations=True,
        )
        return Lowered(compile_region(graph_module, list(inputs)))


ATEN: Lowering = AtenLowering()
