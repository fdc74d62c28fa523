"""The counting mode by itself, on real tensors: what it counts, until when, and what its subclasses may add."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from memopt.device.live_bytes import BlockCalls, LiveBytes


def test_a_storage_counts_once_until_its_last_view_is_freed() -> None:
    with LiveBytes() as count:
        x = torch.zeros(1000)
        view = x[10:].view(-1, 9)
        x.add_(1)
        assert count.live_bytes == 4000
        y = x * 2
        assert count.live_bytes == 8000
        del y, x
        assert count.live_bytes == 4000, "the view holds it"
        del view
    assert count.live_bytes == 0
    assert count.peak_bytes == 8000


def test_what_was_there_before_does_not_count() -> None:
    x = torch.zeros(100)
    with LiveBytes() as count:
        same = x.view(10, 10)
        y = x + 1
    assert count.live_bytes == y.nbytes
    assert same.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_what_is_excluded_or_counted_by_hand() -> None:
    x, y = torch.zeros(100), torch.zeros(10)
    count = LiveBytes()
    count.exclude([x])
    count.count((x, [y]))
    assert count.live_bytes == y.nbytes
    count.count(y)
    assert count.live_bytes == y.nbytes, "only once"


def test_blocks_and_devices() -> None:
    with LiveBytes(block_bytes=512, device_type="cpu") as count:
        here = torch.zeros(1)
        there = torch.zeros(100, device="meta")
    assert count.live_bytes == 512
    assert (here.device.type, there.device.type) == ("cpu", "meta")


def test_a_peak_that_is_set_back_begins_a_new_phase() -> None:
    with LiveBytes() as count:
        x = torch.zeros(100)
        del x
        count.peak_bytes = 0
        y = torch.zeros(10)
    assert count.peak_bytes == y.nbytes


def test_no_garbage_is_collected_meanwhile() -> None:
    count = LiveBytes()
    with count:
        with LiveBytes():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


class WithWorkspace(LiveBytes):
    def workspace_bytes(self, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        return 7


def test_a_subclass_says_what_kernels_hold_beside_their_tensors() -> None:
    with WithWorkspace() as count:
        x = torch.zeros(10)
    assert count.peak_bytes == x.nbytes + 7
    assert count.live_bytes == x.nbytes


def test_a_storage_that_is_resized_counts_as_it_is_when_it_is_counted_again() -> None:
    before = torch.zeros(50)
    with LiveBytes() as count:
        x = torch.zeros(100)
        x.untyped_storage().resize_(0)
        count.recount([x, before])
        assert count.live_bytes == 200, "what was there before is counted from now on"
        x.untyped_storage().resize_(400)
        before.untyped_storage().resize_(0)
        count.recount([x, before])
        assert count.live_bytes == 400
        del x
        assert count.live_bytes == 0
    assert count.peak_bytes == 400


def test_states_of_the_random_generator_count_while_they_are_held() -> None:
    """No operator makes them. `torch.utils.checkpoint` holds one for each block in the forward, and one more in its
    backward."""
    nbytes = torch.get_rng_state().nbytes
    generator = torch.random.default_generator
    x = torch.ones(8, requires_grad=True)
    with LiveBytes() as count:
        state = torch.get_rng_state()
        assert count.live_bytes == nbytes
        y = checkpoint(torch.sin, x, use_reentrant=False)
        assert count.live_bytes == 2 * nbytes + y.nbytes
        y.sum().backward()
        assert count.peak_bytes > 3 * nbytes
        del y, state
        count.peak_bytes = 0
        again = x * 2
    assert count.live_bytes == again.nbytes + x.nbytes  # its gradient
    assert count.peak_bytes < nbytes
    assert torch.random.default_generator is generator


def test_a_tensor_made_of_numbers_counts() -> None:
    with LiveBytes() as count:
        x = torch.tensor([1.0] * 100)
        y = torch.tensor([1] * 100, dtype=torch.int32)
    assert count.live_bytes == x.nbytes + y.nbytes


def test_a_tensor_that_lives_on_does_not_keep_its_count_alive() -> None:
    """A count of a model's step refers to the model, and some tensors that a step makes are cached for ever."""
    for make in (LiveBytes, BlockCalls):
        with make() as count:
            kept = torch.ones(8)
        reference = weakref.ref(count)
        del count
        gc.collect()
        assert reference() is None
        del kept
