# SPDX-License-Identifier: Apache-2.0
"""`SynthesisProblem`: what a program is made for; `MakerTask`: one call of a maker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..cluster import Cluster
from ..collectives import Collective
from ..programs import Program
from ..simulator import Runtime
from .sketch import Sketch

Progress = Callable[[str, float], None]
"""Takes a line of text for people, and the fraction of the work that is done, 0..1."""


MAX_WIDE = 4096
"""The most chunk moves of a program that is tried as wide steps."""


@dataclass(frozen=True, kw_only=True)
class SynthesisProblem:
    """The collective, the cluster and the size that a program is made for, and the physics by which it is judged."""

    collective: Collective
    cluster: Cluster
    nbytes: float
    alpha: str = "pipelined"
    contention: str | None = None
    seed: int = 0
    sketch: Sketch | None = None
    helpers: tuple[int, ...] = ()
    """The devices outside the group that may forward, copy and add for it."""
    base: Program | None = None
    """A program of the cluster as it was, to begin with."""
    lower: str = ""
    """The file format (``msccl``, ``mscclpp``) whose runtimes the program must fit; empty for none."""
    runtime: Runtime | None = None
    """The price list by which instruction streams are judged; None: the links alone."""

    @property
    def ranks(self) -> int:
        """The number of ranks that take part."""
        return self.collective.num_ranks

    @property
    def hosts(self) -> tuple[int, ...]:
        """The host of each rank."""
        return tuple(self.cluster.hosts_of(self.collective.ranks).tolist())

    @property
    def takes_plans(self) -> bool:
        """Whether programs become plans of wide steps: the runtime has prices for them, and all ranks are on a host."""
        wide = self.lower == "mscclpp" and self.runtime is not None and self.runtime.knows_wide
        return wide and not self.takes_steps and len(set(self.hosts)) == 1

    @property
    def takes_steps(self) -> bool:
        """Whether programs run as fused steps: the runtime has prices for steps, and none for instruction streams."""
        return self.runtime is not None and not self.runtime.knows_streams


@dataclass(frozen=True, kw_only=True)
class MakerTask:
    """One call of one maker, with the options of that call."""

    maker: str
    label: str
    weight: float
    """The task's share of the time that is left, relative to the other tasks."""
    options: Mapping[str, Any] = field(default_factory=dict)
