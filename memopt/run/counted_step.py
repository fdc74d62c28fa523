"""A step of the plain model with its counted bytes, and whether it fits beside all else on the device."""

from __future__ import annotations

from dataclasses import dataclass

from memopt.account.account import Account
from memopt.account.plain_count import PlainStep
from memopt.capture.inputs import Call
from memopt.run.entry import Entry
from memopt.run.ledger import Moment
from memopt.run.until_backward import LARGE_LOSS_OUTSIDE
from memopt.units import size


@dataclass(frozen=True)
class CountedStep:
    """A step that fits the budget without a plan, with the bytes that it was counted to hold."""

    step: PlainStep
    room_bytes: int
    """The bytes of the budget that it leaves free."""
    account: Account
    """The bytes of the step other than activations."""
    call: Call | None
    """The call that was counted, without its values; None where its count depends on them."""

    @property
    def reason(self) -> str:
        """Why the call runs plain, as a clause that begins with "since"."""
        if self.room_bytes < 0:
            return f"since an error would end the training: its step needs {size(-self.room_bytes)} beyond the budget"
        return f"since its step fits the budget with {size(self.room_bytes)} to spare"

    def fits(self, moment: Moment, further: int = 0) -> bool:
        """Whether the step fits the budget together with waiting forwards, everything else on the device, and `further`
        bytes."""
        held = 0 if self.step.graph.derived else self.step.held_bytes  # other forwards hold no graphs of gradients
        kept = moment.kept_outputs
        if moment.appears and not moment.entry.latest_outputs:  # the first step: the next one is to run so, too
            kept = self.step.output_bytes
        room = self.room_bytes - further - callers_code_bytes(self.step, moment.entry, kept)
        fits = moment.leaves(room - moment.reserved_bytes(held), self.account)
        return fits and moment.may_hold(held)


def callers_code_bytes(step: PlainStep, entry: Entry, kept_outputs: int) -> int:
    """The bytes by which the caller's own code raises a step above its own peak: a loss outside of the model, as seen
    or as guessed; or the outputs of the step before, of `kept_outputs` bytes, which stay alive during the forward."""
    seen = entry.until_backward(step.tangent_bytes)
    callers_code = LARGE_LOSS_OUTSIDE * step.tangent_bytes if seen is None else seen
    until_backward = step.held_bytes + step.tangent_bytes + callers_code
    return max(0, until_backward - step.peak_bytes, step.forward_bytes + kept_outputs - step.peak_bytes)


def bytes_beside(moment: Moment, account: Account) -> int:
    """The bytes on the device now outside of the step of a call with this account: elsewhere, in forwards that wait,
    and in outputs that the caller still holds."""
    return moment.elsewhere_beside(account) + moment.waiting_bytes + moment.kept_outputs
