# SPDX-License-Identifier: Apache-2.0
"""`Timeline`: the spans of a predicted or measured run per rank and stream, and how busy each link was."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Timeline:
    """The spans of a run in arrays.

    Span k runs on stream ``stream[k]`` (an index into `streams`) of rank ``rank[k]``, is called ``names[name[k]]``,
    and moves ``nbytes[k]`` from ``start_us[k]`` to ``end_us[k]``. Links are listed with the bytes that they carried;
    `link_load` (links x slots of time) is the share of each slot in which each link was busy, where that was asked for;
    `critical_path` holds the spans (in order) whose delays add up to the total. `facts` says how the timeline came
    about (program, cluster, contention, alpha, ...).
    """

    total_us: float
    rank: NDArray[np.int32]
    stream: NDArray[np.int32]
    name: NDArray[np.int32]
    start_us: NDArray[np.float64]
    end_us: NDArray[np.float64]
    nbytes: NDArray[np.float64]
    streams: tuple[str, ...]
    names: tuple[str, ...]
    link_names: tuple[str, ...] = ()
    link_busy_us: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    link_bytes: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    link_load: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))
    critical_path: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    facts: tuple[tuple[str, str], ...] = ()

    @property
    def num_spans(self) -> int:
        """The number of spans in the timeline."""
        return len(self.rank)

    @cached_property
    def link_utilization(self) -> NDArray[np.float64]:
        """The share of the total time that each link spent sending, 0..1."""
        return self.link_busy_us / self.total_us if self.total_us > 0 else np.zeros_like(self.link_busy_us)

    def __repr__(self) -> str:
        from ..units import format_us

        used = self.link_bytes > 0
        busy = f", used links {100 * self.link_utilization[used].mean():.1f} % busy" if used.any() else ""
        facts = ", ".join(f"{key} {value}" for key, value in self.facts)
        return f"<Timeline {format_us(self.total_us)}: {self.num_spans} spans{busy}{f' ({facts})' if facts else ''}>"
