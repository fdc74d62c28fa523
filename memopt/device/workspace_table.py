"""Estimates workspaces by rule, for operators that are not run to be measured."""

from __future__ import annotations

import torch

from memopt.compat.operators import schema_of
from memopt.device.chip import LARGE, Chip
from memopt.device.op_call import OpCall
from memopt.device.workspace_cpu import CPU, converted, promoted
from memopt.device.workspace_cuda import CUDA, CUDA_BY_CHIP
from memopt.device.workspace_reductions import reduction_bytes
from memopt.device.workspace_rules import COMMON, MB, SCALARS, all_bytes


def estimate_workspace(call: OpCall, device_type: str, chip: Chip = LARGE) -> int:
    """Temporary bytes that the kernel of a call holds at most, beyond inputs and outputs.

    `device_type` is "cuda", a card with that `chip`; any other is the CPU. An op without a rule is assumed to copy all
    its tensors once. Views and pointwise ops hold nothing, except on the CPU copies of arguments whose dtype must
    change.
    """
    cuda = device_type == "cuda"
    name = schema_of(call.op).name.split("::")[-1].removesuffix("_")
    if cuda and name in CUDA_BY_CHIP:
        return CUDA_BY_CHIP[name](call, chip)
    rule = (CUDA if cuda else CPU).get(name) or COMMON.get(name)
    if rule is not None:
        return rule(call)
    if name.startswith("_foreach") or _returns_alias(call) or not call.inputs:
        return 0
    if torch.Tag.pointwise in call.op.tags:
        return 0 if cuda else promoted(call) + SCALARS
    if torch.Tag.reduction in call.op.tags:
        return max(4 * MB, reduction_bytes(call, chip)) if cuda else converted(call)
    return all_bytes(call)


def _returns_alias(call: OpCall) -> bool:
    returns = schema_of(call.op).returns
    return bool(returns) and all(result.alias_info is not None and not result.alias_info.is_write for result in returns)
