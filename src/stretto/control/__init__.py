# SPDX-License-Identifier: Apache-2.0
"""The control plane: a controller outside the job, an agent in each rank, and the protocol between them."""

from __future__ import annotations

from pathlib import Path


def inject_folder() -> Path:
    """The folder that makes every Python which has it on its path look for a controller (see `sitecustomize` there)."""
    return Path(__file__).parent / "inject"
