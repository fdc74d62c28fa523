"""The lever that holds frozen parameters in host memory; the solver chooses which, and when they are brought."""

from __future__ import annotations

from memopt.levers.lever import Lever

OFFLOAD_PARAMETERS = Lever(
    "offload_parameters",
    "Frozen parameters lie in pinned host memory, and are brought to the device before each use.",
    "bitwise",
    "host memory, and waiting for copies that compute does not hide; of forwards in one piece, for backend 'aten'; not "
    "on a CPU",
    tried_by="the solver",
)
