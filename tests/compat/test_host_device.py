"""The device of a graph is that of its tensors, not of a scalar on the host that stands before them."""

from __future__ import annotations

import torch

from memopt.compat.host import HOST, device_among


def test_a_scalar_on_the_host_does_not_say_where_a_graph_runs() -> None:
    accelerator = torch.empty(2, device="meta")
    assert device_among([3, torch.tensor(1.0), accelerator]).type == "meta"
    assert device_among([torch.tensor(1.0), torch.ones(2)]) == HOST
    assert device_among([3, "text"]) == HOST
