"""A pass of one's own, on GPT-2: 0.5 x (1 + tanh(u)) is x sigmoid(2 u), which keeps fewer values for the backward."""

from dataclasses import dataclass

import torch
from torch.fx import Node
from transformers import GPT2Config, GPT2LMHeadModel

import memopt
from passes import RewritePattern, new_call

ADD, MUL = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor
SIGMOID, TANH = torch.ops.aten.sigmoid.default, torch.ops.aten.tanh.default


@dataclass(frozen=True)
class TanhAsSigmoid(RewritePattern[tuple[Node, Node]]):
    """Writes 0.5 x (1 + tanh(u)) as x sigmoid(2 u); equal but for rounding."""

    def match(self, node: Node) -> tuple[Node, Node] | None:
        calls = [(call.target, *call.args[1:]) for call in (node, *node.all_input_nodes)]
        if len(calls) != 3 or calls[0][0] is not MUL or calls[1:] != [(MUL, 0.5), (ADD, 1.0)]:
            return None
        (x,), (bounded,) = (factor.all_input_nodes for factor in node.all_input_nodes)
        return (x, bounded.all_input_nodes[0]) if bounded.target is TANH else None

    def replace(self, node: Node, found: tuple[Node, Node]) -> Node:
        x, u = found
        return new_call(node, MUL, x, new_call(node, SIGMOID, new_call(node, MUL, u, 2.0)))


if __name__ == "__main__":
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=192, n_layer=4, n_head=4, use_cache=False)).train()
    tokens = torch.randint(0, 256, (4, 128))
    batch = {"input_ids": tokens, "labels": tokens}
    for passes in ([], [TanhAsSigmoid()]):
        plan = memopt.plan(model, 0.2, example_inputs=batch, optimizer=None, precision="fp32", passes=passes)
        print(plan, plan.diff("TanhAsSigmoid") if passes else "", sep="\n")
