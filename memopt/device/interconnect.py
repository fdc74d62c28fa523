"""Rates of the links between cards, within a node and between nodes: a table from their makers' figures, by name."""

from __future__ import annotations

from dataclasses import dataclass, field

from memopt.device.cuda_cards import PCIE

CARDS_PER_NODE = 8
_MICRO = 1e-6


@dataclass(frozen=True)
class LinkRate:
    """One kind of link, as the rates of one card that sends and receives at the same time."""

    bytes_per_second: float
    """In one direction."""
    step_seconds: float
    """The latency of one step of a ring through this link."""
    efficiency: float
    """The share of the rate that large collectives reach."""
    source: str

    @property
    def reached_bytes_per_second(self) -> float:
        """The rate that large collectives reach."""
        return self.bytes_per_second * self.efficiency


# Steps of a ring with the protocol "Simple", the one for large messages: NCCL's own model of its times, `hwLat` in its
# src/graph/tuning.cc.
_NVLINK_STEP, _PCIE_STEP, _NETWORK_STEP = 3.4 * _MICRO, 5.7 * _MICRO, 9.6 * _MICRO
BEGIN_SECONDS = 8.4 * _MICRO
"""What a collective takes beside the steps of its ring: `baseLat` of the same table."""
# A bus bandwidth of 230 to 250 GB/s of 300 is reported for all-reduce on eight A100 with NVSwitch, and 350 to 390 of
# 450 on eight H100 without reductions in the switch: about 0.8. On a network what is left is the frames' overhead and
# what switches lose: an assumption.
_SWITCHED, _ON_NETWORK, _ON_BUS = 0.8, 0.85, 0.7


def _nvlink(total_gigabytes: float, card: str) -> LinkRate:
    source = f"NVIDIA {card} datasheet: {total_gigabytes:,.0f} GB/s in both directions together, half in each"
    return LinkRate(total_gigabytes / 2 * 1e9, _NVLINK_STEP, _SWITCHED, source)


def _network(gigabits: float, name: str) -> LinkRate:
    source = f"{name}: {gigabits:.0f} Gb/s in each direction, one adapter for each card"
    return LinkRate(gigabits / 8 * 1e9, _NETWORK_STEP, _ON_NETWORK, source)


def _pcie(generation: int) -> LinkRate:
    source = f"PCIe {generation}.0, 16 lanes"
    return LinkRate(PCIE[generation], _PCIE_STEP, _ON_BUS, source)


WITHIN_NODES = {
    "nvlink3": _nvlink(600, "A100"),
    "nvlink4": _nvlink(900, "H100"),
    "nvlink5": _nvlink(1800, "B200"),
    "pcie4": _pcie(4),
    "pcie5": _pcie(5),
}
BETWEEN_NODES = {
    "ib-hdr": _network(200, "InfiniBand HDR"),
    "ib-ndr": _network(400, "InfiniBand NDR"),
    "ib-xdr": _network(800, "InfiniBand XDR"),
    "roce-200": _network(200, "Ethernet with RoCE"),
    "roce-400": _network(400, "Ethernet with RoCE"),
}


@dataclass(frozen=True)
class Interconnect:
    """How cards are joined: links within a node, and the network between nodes (None for a single node)."""

    name: str
    within: LinkRate
    between: LinkRate | None
    cards_per_node: int = field(default=CARDS_PER_NODE)


def interconnect_named(name: str) -> Interconnect:
    """The interconnect of a name such as "nvlink4+ib-ndr", or "nvlink4" for a single node.

    Raises `TypeError`, and `ValueError` for an unknown name.
    """
    if not isinstance(name, str):
        raise TypeError(f"interconnect must be a name such as 'nvlink4+ib-ndr', not {name!r}")
    within, plus, between = name.partition("+")
    if within not in WITHIN_NODES:
        raise ValueError(
            f"unknown interconnect {within!r} within a node in {name!r}; known are {', '.join(WITHIN_NODES)}"
        )
    if plus and between not in BETWEEN_NODES:
        raise ValueError(
            f"unknown interconnect {between!r} between nodes in {name!r}; known are {', '.join(BETWEEN_NODES)}"
        )
    return Interconnect(name, WITHIN_NODES[within], BETWEEN_NODES[between] if plus else None)
