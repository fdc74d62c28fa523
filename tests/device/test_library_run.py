from __future__ import annotations

from memopt.device.cuda_libraries import from_events
from memopt.solver.problem import BlockCall

MB = 1024**2


def test_results_are_what_is_left_and_everything_else_is_workspace() -> None:
    """The backward of a convolution: a copy of the gradient, the weight's gradient (6 MB), the bias's (2 kB), and the
    blocks of the bias's sum, the second of which is too small to be listed."""
    events = [24 * MB, 6 * MB, -24 * MB, 2048, 98 * MB, 512, -512, -98 * MB]
    found = from_events(events, [6 * MB, 2000])
    assert [(call.allocates, call.block, call.bytes) for call in found.calls] == [
        (True, 2, 24 * MB),
        (True, 0, 6 * MB),
        (False, 2, 24 * MB),
        (True, 1, 2048),
        (True, 6, 98 * MB),
        (False, 6, 98 * MB),
    ]
    assert found.workspace_bytes == 98 * MB + 512


def test_of_blocks_of_one_size_the_latest_is_freed() -> None:
    found = from_events([4 * MB, 4 * MB, -4 * MB], [4 * MB])
    assert found.calls == (BlockCall(True, 0, 4 * MB), BlockCall(True, 2, 4 * MB), BlockCall(False, 2, 4 * MB))
    assert found.workspace_bytes == 4 * MB
