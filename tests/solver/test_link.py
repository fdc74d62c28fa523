import math

import pytest

from memopt.solver.link import Link


def test_transfers_take_latency_and_bytes_over_bandwidth() -> None:
    assert Link(25e9).transfer_seconds(50_000_000) == 0.002
    assert Link(10.0, latency_seconds=0.5).transfer_seconds(20) == 2.5
    assert Link(math.inf, latency_seconds=0.5).transfer_seconds(20) == 0.5
    assert Link(0.0).transfer_seconds(20) == math.inf


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"bytes_per_second": -1.0}, "bytes_per_second is 0 or more, not -1"),
        ({"bytes_per_second": math.nan}, "bytes_per_second is 0 or more, not nan"),
        ({"bytes_per_second": 1.0, "latency_seconds": -2.0}, "latency_seconds is 0 or more, not -2"),
        ({"bytes_per_second": 1.0, "host_bytes": -3}, "host_bytes is 0 or more, or None for no limit, not -3"),
    ],
)
def test_refuses_negative_figures(fields: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Link(**fields)  # type: ignore[arg-type]
