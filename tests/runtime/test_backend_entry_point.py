# SPDX-License-Identifier: Apache-2.0
"""The entry point by which PyTorch, from 2.14 on, finds the backend, loaded as PyTorch does."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

GROUP = "torch.distributed.backends"
LOAD = f"""
from importlib.metadata import EntryPoint
import torch.distributed as dist
assert "STRETTO" not in dist.Backend._plugins
EntryPoint("stretto", VALUE, "{GROUP}").load()()
assert "STRETTO" in dist.Backend._plugins
"""


def declared() -> EntryPoint:
    """As pyproject.toml has it."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"][GROUP].items()
    return EntryPoint(name, value, GROUP)


def test_entry_point_registers_the_backend() -> None:
    found = declared()
    assert found.name == "stretto"
    subprocess.run([sys.executable, "-c", LOAD.replace("VALUE", repr(found.value))], check=True, timeout=600)


def test_installed_entry_point_is_the_declared_one() -> None:
    # An installation from before has none.
    assert {entry.value for entry in entry_points(group=GROUP, name="stretto")} <= {declared().value}
