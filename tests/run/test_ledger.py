from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn

import memopt
from memopt.account.account import account_of
from memopt.account.eager_bytes import allocated_bytes
from memopt.account.elsewhere import Elsewhere, in_steps
from memopt.account.optimizer_trial import GivenOptimizer
from memopt.compat.host import LEGACY_PROFILER
from memopt.compat.tensors import weak_storages
from memopt.device import hardware
from memopt.run.entry import Entry
from memopt.run.ledger import Ledger, Moment
from tests.elsewhere import counted
from tests.run.pieces import moment_of

__all__ = ["counted"]

pytestmark = pytest.mark.usefixtures("counted")
MB = 2**20


def now(moment: Moment) -> Elsewhere:
    return moment.ledger.now(moment)


def at_most(moment: Moment, enough: int = 0) -> Elsewhere | None:
    return moment.ledger.at_most(moment, enough)


def about(moment: Moment) -> int:
    return moment.ledger.latest_elsewhere(moment)


def test_what_belongs_to_the_model_and_its_call_is_not_elsewhere() -> None:
    model, inputs, held = nn.Linear(1000, 1000), torch.zeros(1000, 1000), torch.zeros(500, 1000)
    optimizer = torch.optim.AdamW(model.parameters())
    model(inputs).sum().backward()
    optimizer.step()
    entry = Entry(model, 100 * MB, given_optimizer=GivenOptimizer.of(optimizer))
    addresses = frozenset(storage.address for storage in weak_storages([held]))
    found = now(moment_of(entry, inputs=(inputs,), addresses=lambda: addresses))
    assert found.other < 100_000
    assert found.state == pytest.approx(2 * 1001 * 1000 * 4, abs=100)
    assert found.gradients == pytest.approx(1001 * 1000 * 4, abs=100)
    account = account_of(model, [inputs], optimizer, hardware("cpu"))
    assert found.beside(account) == found.other * (found.other > 16384)


def test_another_model_its_gradients_and_its_optimizer_are_elsewhere() -> None:
    model, other = nn.Linear(10, 10), nn.Linear(1000, 1000)
    optimizer = torch.optim.AdamW(other.parameters())
    other(torch.zeros(1, 1000)).sum().backward()
    optimizer.step()
    found = now(moment_of(Entry(model, 100 * MB)))
    assert found.other == pytest.approx(4 * 1001 * 1000 * 4, rel=0.01)
    assert found.largest[0].startswith("float32 [1000, 1000] of ")


def test_gradients_of_parameters_that_a_step_does_not_train_are_beside_it() -> None:
    model, inputs = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 500)), torch.zeros(10, 1000)
    model(inputs).sum().backward()
    found = now(moment_of(Entry(model, 100 * MB), inputs=(inputs,)))
    whole = account_of(model, [inputs], None, hardware("cpu"))
    model[0].requires_grad_(False)  # as a critic is while an actor trains through it: its gradients stay
    part = account_of(model, [inputs], None, hardware("cpu"))
    assert found.beside(replace(part, optimizer_state=0)) - found.beside(whole) == pytest.approx(
        1001 * 1000 * 4, rel=0.02
    )


def test_growth_is_known_without_a_look() -> None:
    model = nn.Linear(10, 10)
    entry = Entry(model, 100 * MB)
    assert at_most(moment_of(entry)) is None, "nothing is known before the first look"
    before = now(moment_of(entry)).other
    if allocated_bytes(torch.device("cpu")) is None:
        pytest.skip("the C library does not say what is allocated")
    most = at_most(moment_of(entry))
    assert most is not None
    assert most.other < before + 100_000
    cached = torch.zeros(10 * MB)
    most = at_most(moment_of(entry))
    assert most is not None
    assert most.other >= before + cached.nbytes
    assert now(moment_of(entry)).other == pytest.approx(before + cached.nbytes, abs=100_000)
    del cached
    assert about(moment_of(entry)) < before + 100_000


@pytest.mark.skipif(allocated_bytes(torch.device("cpu")) is None, reason="allocated bytes are not known here")
def test_a_limit_is_enough_where_there_is_much_room(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # what earlier tests left would lower the limit if it were freed meanwhile
    entry = Entry(nn.Linear(10, 10), 100 * MB)
    before = now(moment_of(entry)).other
    limit = at_most(moment_of(entry), 2**40)
    assert limit is not None
    assert limit.other >= before
    cached = torch.zeros(10 * MB)
    exact, most = at_most(moment_of(entry), 1), at_most(moment_of(entry), 2**40)
    assert exact is not None
    assert most is not None
    # The limit counts what `malloc` holds free, such as the block that `cached` may have been cut from.
    assert before + cached.nbytes <= exact.other <= most.other
    monkeypatch.setattr("memopt.run.ledger.allocated_bytes", lambda _: pytest.fail("blocks were counted"))
    assert at_most(moment_of(entry), 2**40) is not None


@pytest.mark.skipif(allocated_bytes(torch.device("cpu")) is None, reason="allocated bytes are not known here")
def test_a_limit_is_known_without_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts shared memory, too, which `malloc` does not know."""
    monkeypatch.setattr("memopt.account.elsewhere.live_objects", lambda *_: pytest.fail("objects were looked at"))
    entry = Entry(nn.Linear(10, 10), 100 * MB)
    before = at_most(moment_of(entry), 2**40)
    assert not entry.has_looked
    assert before is not None
    batch = torch.ones(64 * MB // 4).share_memory_()
    after = at_most(moment_of(entry), 2**40)
    assert after is not None
    assert after.other >= before.other + batch.nbytes - MB


@pytest.mark.skipif(allocated_bytes(torch.device("cpu")) is None, reason="allocated bytes are not known here")
def test_growth_before_a_moment_of_another_kind_is_found_at_once() -> None:
    """Also right after a look, when nothing that was allocated at such a moment is known."""
    model = nn.Linear(16, 16)
    entry = Entry(model, 2**24)
    before = now(moment_of(entry, kind="no gradients")).other
    average = torch.zeros(2**20)
    assert now(moment_of(entry, kind="gradients held")).other >= before + average.nbytes


@pytest.mark.skipif(allocated_bytes(torch.device("cpu")) is None, reason="allocated bytes are not known here")
def test_what_lies_elsewhere_in_a_forward_still_does_after_a_backward_in_which_it_does_not() -> None:
    """A step's outputs are its own in its backward, and elsewhere in the next forward where the caller holds them."""
    entry = Entry(nn.Linear(16, 16), 2**24)
    outputs = torch.zeros(8 * MB // 4)
    forward, backward = moment_of(entry, kind="forward"), moment_of(entry, kind="backward", inputs=(outputs,))
    before = now(forward).other
    assert before >= outputs.nbytes
    assert now(backward).other <= before - outputs.nbytes
    found = at_most(forward)
    assert found is None or found.other >= outputs.nbytes
    assert about(forward) >= outputs.nbytes
    assert now(forward).other >= outputs.nbytes


def test_what_is_freed_hides_no_growth() -> None:
    """Memory that a look does not see, as of planning, is freed after it, and as much is allocated elsewhere."""
    passing = bytearray(8 * MB)
    entry = Entry(nn.Linear(16, 16), 2**24)
    before = now(moment_of(entry)).other
    del passing
    average = torch.zeros(MB)
    assert at_most(moment_of(entry)) is None
    assert now(moment_of(entry)).other >= before + average.nbytes


def test_smaller_outputs_that_the_caller_keeps_hide_no_growth() -> None:
    """The outputs of a smaller batch are kept, and the loop holds as many bytes more of its own: as much as before is
    allocated."""
    model = nn.Linear(10, 10)
    entry, held = Entry(model, 100 * MB), [torch.zeros(3 * MB // 4), torch.zeros(MB // 4)]

    def beginning() -> Moment:
        entry.latest_outputs = list(weak_storages(held[:1]))
        addresses = frozenset(storage.address for storage in entry.latest_outputs)
        return moment_of(entry, addresses=lambda: addresses, kept_outputs=entry.kept_outputs((), entry.device))

    assert now(beginning()).other == pytest.approx(MB, abs=100_000)
    held[:] = [torch.zeros(MB // 4), torch.zeros(3 * MB // 4)]
    assert now(beginning()).other == pytest.approx(3 * MB, abs=100_000)


def test_bytes_that_the_user_gives_take_the_place_of_those_found() -> None:
    entry = Entry(nn.Linear(10, 10), 100 * MB, 5 * MB)
    cached = torch.zeros(MB)
    assert now(moment_of(entry)) == at_most(moment_of(entry)) == Elsewhere(5 * MB)
    assert cached.nbytes == 4 * MB


def test_copies_made_while_it_is_held_still_are_not_counted() -> None:
    entry = Entry(nn.Linear(10, 10), 100 * MB)
    with Ledger.of(entry).held_still(moment_of(entry)):
        before = now(moment_of(entry))
        copies = torch.zeros(10 * MB)
        assert now(moment_of(entry)) == at_most(moment_of(entry)) == before
    assert now(moment_of(entry)).other >= before.other + copies.nbytes


def test_steps() -> None:
    assert in_steps(0, 6400) == 0
    assert in_steps(1, 6400) == 50
    assert in_steps(50, 6400) == 50


def test_a_profiler_is_not_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its records lie in the memory of `malloc`."""
    entry = Entry(nn.Linear(16, 16), 2**24)
    before = now(moment_of(entry)).other
    with torch.profiler.profile(profile_memory=True):
        for _ in range(2000):
            torch.ones(10) + 1
        monkeypatch.setattr("memopt.account.elsewhere.live_objects", lambda *_: pytest.fail("objects were looked at"))
        ledger = Ledger.of(entry)
        monkeypatch.setattr(ledger, "look_seconds", 1e9)  # looks have taken all the time that they may
        assert now(moment_of(entry)).other == before


@pytest.mark.skipif(not LEGACY_PROFILER, reason="kineto tells of its events at the end only")
def test_what_appears_within_a_metered_block_is_growth() -> None:
    """Sharpness-aware minimisation keeps a copy of the gradients from the first forward of a step to the second."""
    entry = Entry(nn.Linear(16, 16), 2**24)
    before = now(moment_of(entry)).other
    for _ in range(2):
        with memopt.measure_peak():
            assert now(moment_of(entry)).other == before
            held = torch.zeros(MB)
            assert now(moment_of(entry)).other == before + held.nbytes
            del held


@pytest.mark.skipif(allocated_bytes(torch.device("cpu")) is None, reason="allocated bytes are not known here")
def test_looks_take_a_hundredth_of_the_time_unless_more_is_allocated_than_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Entry(nn.Linear(16, 16), 2**24)
    ledger = Ledger.of(entry)
    batch = torch.zeros(MB)
    before = now(moment_of(entry)).other
    monkeypatch.setattr(ledger, "look_seconds", 1e9)
    del batch
    now(moment_of(entry, closely=True))
    monkeypatch.setattr("memopt.account.elsewhere.live_objects", lambda *_: pytest.fail("objects were looked at"))
    for size in (MB // 2, MB // 4, MB // 3):
        batch = torch.zeros(size)
        assert now(moment_of(entry)).other >= before - 4 * MB + batch.nbytes - 100_000
        del batch


@pytest.mark.skipif(allocated_bytes(torch.device("cpu")) is None, reason="allocated bytes are not known here")
def test_noise_of_malloc_is_not_looked_for_once_looks_have_taken_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in a small budget with next to no room looked at each growth of some kilobytes, as nothing is refused
    without a look."""
    entry = Entry(nn.Linear(16, 16), 2**22)
    before = now(moment_of(entry, closely=True)).other
    with monkeypatch.context() as patched:
        patched.setattr(Ledger.of(entry), "look_seconds", 1e9)
        patched.setattr("memopt.account.elsewhere.live_objects", lambda *_: pytest.fail("objects were looked at"))
        noise = bytearray(40_000)
        assert now(moment_of(entry, closely=True)).other == before
    del noise
    tensor = torch.zeros(100_000)
    assert now(moment_of(entry, closely=True)).other >= before + tensor.nbytes
