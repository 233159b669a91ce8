# SPDX-License-Identifier: Apache-2.0
"""Which program runs for a collective on GPU memory: a pure function of what all ranks know.

The first source with an answer: a table made for this job (STRETTO_TABLE); the library's programs, simulated with the
price of the GPU executor's steps on the cluster (STRETTO_CLUSTER); without a cluster the straight way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...algorithms import algorithm
from ...algorithms.registry import FOR_COMPARISON, defined_for
from ...cluster import Cluster
from ...errors import StrettoError
from ...programs import Program
from ...simulator.priced_fused import usual_call
from ...simulator.runtimes import PRESETS
from ...units import format_us
from .gpu_layout import KINDS
from .selection import AS_FAST, ProgramPick, Selector

PRICE = "stretto-gpu:h200"
"""The runtime with whose prices programs are simulated; without such a runtime nothing is simulated."""
MAX_SIMULATED = 32
IN_PLACE = ("all_reduce", "broadcast", "reduce")
STRAIGHT = "every rank reaches every other one's memory"
ONE_TRIP_BYTES = 512 << 10
"""This, divided by the ranks, is the size up to which packets from all to all were fastest (docs/calibration.md)."""


IN_PLACE_BYTES = 256 << 10
"""This, divided by the ranks, is the size above which tensors in symmetric memory are used where they lie."""


def in_one_trip(nbytes: int, ranks: int) -> bool:
    """Whether a call is so small that every rank sends all it has to every other one, in packets."""
    return nbytes * ranks <= ONE_TRIP_BYTES


def gains_in_place(nbytes: int, ranks: int) -> bool:
    """Whether a call is large enough that ranks wait for each other rather than send packets."""
    return nbytes * ranks > IN_PLACE_BYTES


class GpuSelector:
    """The choices of one communicator whose ranks share a host."""

    def __init__(self, selector: Selector, price: Any = None) -> None:
        """`price` is the runtime to simulate with; None takes `PRICE`, where that is known."""
        self._selector = selector
        self._price: Any = PRESETS.get(PRICE) if price is None else price
        self._picks: dict[tuple[int, bool], ProgramPick] = {}

    def pick(self, op: str, nbytes: int, root: int = 0, *, in_place: bool = False) -> ProgramPick:
        """The program for a call; the same for all sizes between two powers of two.

        Args:
            op: The collective.
            nbytes: Its size.
            root: Its root, if it has one.
            in_place: Whether its tensors are used where they lie, in symmetric memory.

        Returns:
            The program and why.
        """
        kind = "all_reduce" if op == "barrier" else op
        assert kind in KINDS
        usual = self._selector.pick(kind, nbytes, root=root, in_place=kind in IN_PLACE)
        small = kind == "all_reduce" and not in_place and in_one_trip(nbytes, len(self._selector.devices))
        found = self._picks.get((id(usual), small))
        if found is None:
            found = self._picks[id(usual), small] = self._find(kind, usual, nbytes, root, small)
        return found

    def _find(self, kind: str, usual: ProgramPick, nbytes: int, root: int, small: bool) -> ProgramPick:
        cluster, ranks = self._selector.cluster, len(self._selector.devices)
        if usual.from_table:
            return usual
        if small:
            one_shot = algorithm("direct", kind, ranks, steps=1, in_place=True)
            return ProgramPick(program=one_shot, why="a small call: everything to everybody", rejected=usual.rejected)
        if self._price is None or cluster is None or not 2 < ranks <= MAX_SIMULATED:
            return ProgramPick(program=usual.program, why=STRAIGHT, rejected=usual.rejected)
        timed, rejected = self._timed(kind, cluster, nbytes, root)
        if not timed:
            return ProgramPick(program=usual.program, why=STRAIGHT, rejected=tuple(rejected))
        least_us = min(us for us, _ in timed)
        # Among programs that are about as fast, the direct one waits least for other ranks.
        best_us, best = min(
            (pair for pair in timed if pair[0] <= AS_FAST * least_us), key=lambda pair: pair[1].name != "direct"
        )
        rejected += [(one.name, f"predicted {format_us(us)}") for us, one in timed if one is not best]
        why = f"predicted {format_us(best_us)} on {cluster.name}"
        return ProgramPick(program=best, why=why, rejected=(*usual.rejected, *rejected))

    def _timed(
        self, kind: str, cluster: Cluster, nbytes: int, root: int
    ) -> tuple[list[tuple[float, Program]], list[tuple[str, str]]]:
        timed: list[tuple[float, Program]] = []
        rejected: list[tuple[str, str]] = []
        for name in self._names(kind):
            try:
                program = self._selector.build(name, kind, root=root, in_place=kind in IN_PLACE)
                timed.append((self._time_us(program, cluster, nbytes), program))
            except StrettoError as error:
                rejected.append((name, str(error)))
        return timed, rejected

    def _time_us(self, program: Program, cluster: Cluster, nbytes: int) -> float:
        """How long a call through slots takes with as many blocks as the communicator would give it."""
        return usual_call(program, cluster, nbytes=max(nbytes, 1), runtime=self._price).graph.total_us()

    def _names(self, kind: str) -> Iterable[str]:
        return (name for name in defined_for(kind, len(self._selector.devices)) if name not in FOR_COMPARISON)
