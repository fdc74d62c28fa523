"""Costs on a device: bytes by storage, seconds by the device's rates, workspaces of kernels, and their measurement."""

from memopt.device.calibration import calibrated_hardware, measure_hardware
from memopt.device.cpu import CPU
from memopt.device.cuda import CUDA
from memopt.device.device import Device
from memopt.device.devices import DEVICES, device_here, device_of, hardware, hardware_of, known_hardware
from memopt.device.hardware import Hardware
from memopt.device.time_model import node_bytes, node_flops, node_seconds, op_seconds

__all__ = [
    "CPU",
    "CUDA",
    "DEVICES",
    "Device",
    "Hardware",
    "calibrated_hardware",
    "device_here",
    "device_of",
    "hardware",
    "hardware_of",
    "known_hardware",
    "measure_hardware",
    "node_bytes",
    "node_flops",
    "node_seconds",
    "op_seconds",
]
