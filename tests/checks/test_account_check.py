from __future__ import annotations

import math

import pytest
from expecttest import assert_expected_inline

from memopt.checks.check import AccountCheck, AccountRow

FOUND = AccountCheck(
    "Model",
    "AdamW",
    "cpu",
    (
        AccountRow("parameters", 1 << 20, 1 << 20),
        AccountRow("buffers", 0, 0),
        AccountRow("optimizer temporaries", 64, 0),
        AccountRow("gradients", 900 << 10, 1 << 20),
    ),
    AccountRow("peak of the step", 3 << 20, 2 << 20),
)


def test_golden() -> None:
    assert_expected_inline(
        str(FOUND),
        """\
Model with AdamW on cpu: predicted, and measured in a step
┏━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━┳━━━━━━━━━━┳━━━━━━━━━━━━┳━━━━━━━━━┓
┃ row                   ┃ predicted ┃ measured ┃ difference ┃         ┃
┡━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━╇━━━━━━━━━━╇━━━━━━━━━━━━╇━━━━━━━━━┩
│ parameters            │      1 MB │     1 MB │          – │         │
│ buffers               │         – │        – │          – │         │
│ optimizer temporaries │      64 B │        – │      +64 B │         │
│ gradients             │    900 kB │     1 MB │    -124 kB │ -12.11% │
├───────────────────────┼───────────┼──────────┼────────────┼─────────┤
│ peak of the step      │      3 MB │     2 MB │      +1 MB │ +50.00% │
└───────────────────────┴───────────┴──────────┴────────────┴─────────┘""",
    )


def test_differences() -> None:
    assert FOUND.row("gradients").difference_bytes == -124 * 1024
    assert FOUND.row("peak of the step") is FOUND.total
    assert FOUND.row("buffers").difference == 0.0
    assert math.isinf(FOUND.row("optimizer temporaries").difference)
    assert FOUND.worst is FOUND.total
    with pytest.raises(KeyError):
        FOUND.row("nothing")


def test_under_is_said_of_the_total() -> None:
    assert not FOUND.under
    assert AccountCheck("Model", "SGD", "cpu", (), AccountRow("peak of the step", 9, 10)).under
