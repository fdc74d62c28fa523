"""A refusal under FSDP2 runs no forward of the plain model: that would gather parameters, while the other ranks wait in
another exchange."""

from collections.abc import Iterator

import pytest
from torch import distributed
from torch.compiler import is_compiling
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import memopt
from examples.models.ddp import VOCABULARY, gpt2_of
from examples.models.families import integers


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of one rank, this process."""
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    yield
    distributed.destroy_process_group()


@pytest.mark.slow  # the ranks of test_sharded_ranks.py would wait for each other without end
@pytest.mark.filterwarnings("ignore")
def test_a_refused_call_gathers_nothing(alone: None) -> None:
    model, mesh = gpt2_of(64, 1, 4)(), init_device_mesh("cpu", (1,))
    for part in (*model.transformer.h, model):
        fully_shard(part, mesh=mesh)
    memopt.optimize(model, 0.02, precision="fp32", allow={"recompute", "reinplace"})
    ran = []
    model.transformer.h[0].register_forward_pre_hook(lambda *_: None if is_compiling() else ran.append(True))
    tokens = integers(VOCABULARY, 256, 32, seed=0)
    with pytest.raises(memopt.BudgetError):
        model(input_ids=tokens, labels=tokens)
    assert not ran
