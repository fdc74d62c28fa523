"""Costs on a device: bytes by storage, seconds by the device's rates, workspaces of kernels, and their measurement."""

from memopt.device.calibrate import measure_hardware
from memopt.device.calibration import calibrated_hardware
from memopt.device.hardware_table import Hardware, hardware, hardware_of, known_hardware
from memopt.device.time_model import node_bytes, node_flops, node_seconds, op_seconds

__all__ = [
    "Hardware",
    "calibrated_hardware",
    "hardware",
    "hardware_of",
    "known_hardware",
    "measure_hardware",
    "node_bytes",
    "node_flops",
    "node_seconds",
    "op_seconds",
]
