"""Calls that could not be captured, so that the next such call is refused without trying again."""

from __future__ import annotations

from torch import nn

from memopt.capture.inputs import Call, call_signature
from memopt.errors import CaptureError
from memopt.recent import Recent
from memopt.run.settings import Settings

_MOST = 64
"""The number of errors that are remembered."""


class Uncapturable:
    """The capture errors of one model's calls, by the call's signature and the state of the model's code."""

    def __init__(self, model: nn.Module) -> None:
        self._settings = Settings(model)
        self._texts: Recent[tuple[str, int], str] = Recent(_MOST)

    def check(self, call: Call) -> None:
        """Raise `CaptureError` once more where such a call could not be captured, unless the model has changed."""
        if len(self._texts) and (text := self._texts.get(self._key(call))):
            raise CaptureError(text)

    def note(self, call: Call, error: CaptureError) -> None:
        """Remember the error of a call: its text alone, since its traceback holds the inputs."""
        self._texts[self._key(call)] = str(error)

    def _key(self, call: Call) -> tuple[str, int]:
        return call_signature(call), self._settings.number()
