"""Input-gradient hooks: forward hooks that make the output of frozen embeddings require a gradient.

PEFT and transformers add them (`enable_input_require_grads`) for reentrant `torch.utils.checkpoint`, which
differentiates a block only where one of its inputs requires a gradient. A planned step needs no gradient of such a
value.
"""

from __future__ import annotations

from torch import fx

from memopt.capture.dynamo import GraphBreak


def drop_requires_grad(graph_module: fx.GraphModule) -> None:
    """Remove the calls of `value.requires_grad_()` on intermediate values whose results nothing reads.

    Edits the graph. Gradients of parameters do not depend on these calls. Raises `GraphBreak` where the region returns
    such a value, since its `.grad` can be read after the backward.
    """
    for inner in [module for module in graph_module.modules() if isinstance(module, fx.GraphModule)]:
        graph = inner.graph
        calls = [node for node in graph.find_nodes(op="call_method", target="requires_grad_") if not node.users]
        returned = set(graph.output_node().all_input_nodes)
        for call in calls:
            if call.args[0] in returned:
                raise GraphBreak("a value that requires_grad_() was called on is returned or kept by the model")
            graph.erase_node(call)
        if calls:
            inner.recompile()
