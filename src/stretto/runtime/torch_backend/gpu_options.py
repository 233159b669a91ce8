# SPDX-License-Identifier: Apache-2.0
"""What the environment says about collectives on GPU memory. Loads no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import InvalidInput, unknown
from ...units import parse_bytes

GIB = 1 << 30
MAX_BLOCKS = 1024
STATES = ("on", "hosts", "off")


@dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """Whether programs run on GPU memory, and what they may take there."""

    enabled: bool = True
    max_blocks: int | None = None
    """Thread blocks, and so SMs, that the calls of one rank may take at a time; None leaves it to the executor."""
    between_hosts: bool = False
    """Whether groups over several hosts run programs, too."""
    max_bytes: int = GIB
    """GPU memory that the groups of one process may hold together."""

    pool: bool = False
    """Whether DDP's buckets are put into symmetric memory."""

    @property
    def text(self) -> str:
        """The options as text that must be the same on all ranks."""
        more = ", hosts" * self.between_hosts + ", pool" * self.pool
        return f"enabled={self.enabled}, blocks={self.max_blocks}, bytes={self.max_bytes}{more}"


def asked_for_programs(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the user has asked for programs, and not only not refused them: jobs on NCCL stay on it otherwise."""
    return environment.get("STRETTO_GPU", "") in ("on", "hosts")


def gpu_options(environment: Mapping[str, str] = os.environ) -> GpuOptions:
    """Read STRETTO_GPU, STRETTO_GPU_BLOCKS, STRETTO_GPU_MEMORY and STRETTO_GPU_POOL; raises `InvalidInput`.

    >>> gpu_options({"STRETTO_GPU": "on", "STRETTO_GPU_BLOCKS": "16", "STRETTO_GPU_MEMORY": "64MiB"}).text
    'enabled=True, blocks=16, bytes=67108864'
    >>> gpu_options({"STRETTO_GPU": "no"})
    Traceback (most recent call last):
    stretto.errors.InvalidInput: unknown STRETTO_GPU 'no'; choose from: on, hosts, off
    """
    state = environment.get("STRETTO_GPU", "") or "on"
    if state not in STATES:
        raise unknown("STRETTO_GPU", state, STATES)
    blocks = environment.get("STRETTO_GPU_BLOCKS", "")
    if blocks and not (blocks.isascii() and blocks.isdigit() and 1 <= int(blocks) <= MAX_BLOCKS):
        raise InvalidInput(f"STRETTO_GPU_BLOCKS: must be a number from 1 to {MAX_BLOCKS}, not {blocks!r}")
    memory = environment.get("STRETTO_GPU_MEMORY", "")
    try:
        max_bytes = parse_bytes(memory) if memory else GIB
    except InvalidInput as error:
        raise InvalidInput(f"STRETTO_GPU_MEMORY: {error}") from None
    pool = environment.get("STRETTO_GPU_POOL", "") or "off"
    if pool not in ("on", "off"):
        raise unknown("STRETTO_GPU_POOL", pool, ("on", "off"))
    return GpuOptions(
        enabled=state != "off", pool=pool == "on", between_hosts=state == "hosts", max_bytes=max_bytes,
        max_blocks=int(blocks) if blocks else None,
    )  # fmt: skip
