"""Settings of the whole suite."""

from __future__ import annotations

import os

import torch

# `make test` runs a worker a core: more threads would only wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
