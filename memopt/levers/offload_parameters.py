"""The lever that holds frozen parameters in host memory; the solver chooses which, and when the device gets them."""

from __future__ import annotations

from memopt.levers.lever import Lever

OFFLOAD_PARAMETERS = Lever(
    "offload_parameters",
    "Frozen parameters are held in pinned host memory, and copied to the device before each use.",
    "bitwise",
    "host memory, and waiting for copies that compute does not hide; for forwards without graph breaks and backend "
    "'aten'; not on a CPU",
    tried_by="the solver",
)
