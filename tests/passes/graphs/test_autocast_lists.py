"""The lists against torch's header and against what its dispatcher has registered."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from memopt.compat.dispatch import cuda_autocast_names
from passes.graphs.op_kinds import FP32, FP32_SET_DTYPE, LOWER_PRECISION, PROMOTE

ELSEWHERE = {"cudnn_convolution", "cudnn_convolution_transpose", "binary_cross_entropy", "norm"}
"""Registered one by one: two that models do not call, one that autocast refuses, one whose dtype it appends."""


SINCE_2_13 = {"rms_norm"} if torch.__version__ < "2.13" else set()
"""Listed by torch 2.13 and by some or none of the versions before it."""

OUTSIDE = {"linalg_matrix_sqrth"}
"""Registered with fp32 by torch 2.15, which does not list them; earlier versions do not have these operators."""


def listed(name: str) -> set[str]:
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    body = re.split(r"\n\n", header.partition(f"#define {name}(_)")[2])[0]
    return set(re.findall(r"_\((\w+)", body))


def test_lists_are_those_of_the_header() -> None:
    assert listed("AT_FORALL_LOWER_PRECISION_FP") == LOWER_PRECISION
    assert listed("AT_FORALL_FP32") | SINCE_2_13 | OUTSIDE == FP32
    assert listed("AT_FORALL_FP32_SET_OPT_DTYPE") == FP32_SET_DTYPE
    assert listed("AT_FORALL_PROMOTE") == PROMOTE


def test_the_dispatcher_has_a_kernel_for_each_and_for_no_other() -> None:
    with_cuda = {"_cudnn_rnn"} if torch.version.cuda else set()
    fp32 = listed("AT_FORALL_FP32") | {name for name in OUTSIDE if hasattr(torch.ops.aten, name)}
    assert cuda_autocast_names() == LOWER_PRECISION | fp32 | FP32_SET_DTYPE | PROMOTE | ELSEWHERE | with_cuda
