# SPDX-License-Identifier: Apache-2.0
"""Tests that build a lab do so for real; where the machine gives no right to, they check how that is said instead.

Whether it gives the right is found out here by hand, not by the code under test.
"""

from __future__ import annotations

import shutil
import subprocess
from functools import cache

import pytest

from stretto.errors import Infeasible
from stretto.lab import Lab, unavailable

PROBE = """
set -e
ip link add br0 type bridge
ip link add veth0 type veth peer name veth1
tc qdisc add dev veth0 root tbf rate 1mbit burst 32768 limit 100000
mount -t tmpfs tmpfs /dev/shm
mount -t sysfs sysfs /sys
"""


@cache
def allowed(*user: str) -> bool:
    """Whether namespaces can be made and filled, with these options of unshare."""
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", *user, "--net", "--mount", "--uts", "--ipc", "sh", "-c", PROBE]
    return subprocess.run(command, capture_output=True, timeout=30).returncode == 0


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "real_lab: builds a lab; checks the refusal where none can be built")


@pytest.fixture(scope="session")
def as_root() -> bool:
    return allowed()


@pytest.fixture(scope="session")
def rootless() -> bool:
    return allowed("--user", "--map-root-user")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if pyfuncitem.get_closest_marker("real_lab") is None or allowed() or allowed("--user", "--map-root-user"):
        return None
    with pytest.raises(Infeasible, match=r"^lab: ") as caught:
        Lab().__enter__()
    assert "\n" not in str(caught.value)
    assert unavailable() == str(caught.value)
    return True
