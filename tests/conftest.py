"""Settings of the whole suite."""

from __future__ import annotations

import os

import torch

# Plans that an earlier run kept would hide what planning does now; the tests of the cache switch it on.
os.environ["MEMOPT_CACHE"] = "0"

# `make test` runs a worker a core: more threads would only wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
