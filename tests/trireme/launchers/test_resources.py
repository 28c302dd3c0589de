from __future__ import annotations

import pytest

from trireme.launchers.launcher import Resources
from trireme_shared.protocol.errors import InvalidArgument


def test_amounts_of_a_process_for_its_actor_and_its_bundle() -> None:
    found = Resources.parse("CPU=2, GPU=0.5,memory=8GiB,spot=1", "--trainer-resources")
    assert found.bundle() == {"CPU": 2.0, "GPU": 0.5, "memory": float(8 << 30), "spot": 1.0}
    assert found.options() == {
        "num_cpus": 2.0,
        "num_gpus": 0.5,
        "memory": float(8 << 30),
        "resources": {"spot": 1.0},
    }
    assert found.cores == 2
    assert Resources.parse("GPU=1", "-").options() == {"num_cpus": 0, "num_gpus": 1.0, "resources": {}}
    assert Resources().bundle() == {"CPU": 1.0}


@pytest.mark.parametrize(
    "text", ["", "CPU", "CPU=", "CPU=two", "CPU=-1", "CPU=1GiB", "memory=1GB", "=1", "CPU=1,,", "CPU=0"]
)
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^--trainer-resources "):
        Resources.parse(text, "--trainer-resources")
