from __future__ import annotations

import pytest
import torch

from memopt.compat.host import MemoryEvents, profiler_is_active


@pytest.mark.parametrize("legacy", [True, False])
def test_allocations_and_frees_in_order(legacy: bool) -> None:
    events = MemoryEvents(legacy=legacy)
    assert not profiler_is_active()
    events.start()
    assert profiler_is_active()
    one = torch.empty(1000, dtype=torch.uint8)
    other = torch.empty(3000, dtype=torch.uint8)
    del one, other
    seen = events.stop()
    assert not profiler_is_active()
    assert seen == [1000, 3000, -1000, -3000]


def test_a_declared_block_is_seen_when_it_is_freed() -> None:
    tensor = torch.empty(5000, dtype=torch.uint8)
    events = MemoryEvents()
    events.start()
    events.declare(tensor.data_ptr(), tensor.nbytes)
    del tensor
    assert events.stop() == [5000, -5000]


def test_a_second_recording_is_refused() -> None:
    events = MemoryEvents()
    events.start()
    try:
        with pytest.raises(RuntimeError, match="a torch profiler or another memopt meter is already active"):
            MemoryEvents().start()
    finally:
        events.stop()
