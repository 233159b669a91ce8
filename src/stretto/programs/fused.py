# SPDX-License-Identifier: Apache-2.0
"""`Fused`: a program as one stream of steps for each rank of a host, where ranks read and write each other's memory.

A step reads several sources, adds them in a fixed order and writes the sum to several targets, which may be memory of
other ranks. `fuse` makes them from a `Program` or a `Lowered`; `check_fused` proves them by another way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..collectives import Collective
from ..errors import InvalidInput, unknown
from .fused_steps import IN, OUT, PACKET, SLOT, FusedItem, FusedStep, MemoryPlace, build_steps, order_steps
from .fused_sync import connect
from .fused_values import Value, flattened, values_of
from .ir import Program
from .lowered import Lowered

__all__ = ["IN", "OUT", "PACKET", "PROTOCOLS", "SLOT", "Fused", "FusedItem", "FusedStep", "MemoryPlace", "fuse"]

PROTOCOLS = ("simple", "ll")
MAX_FUSED_RANKS = 32


class Shape(NamedTuple):
    """How much a rank's stream is: for messages and prices."""

    steps: int
    items: int
    waits: int
    signals: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Fused:
    """One stream of steps per rank.

    Every block of threads of a rank runs its whole stream on its slice of every chunk, and meets only the same block of
    other ranks. Signals between two ranks are counted: a wait (peer, n) lasts until that peer's n-th signal of this
    round has come. With `symmetric`, ranks read and write each other's user memory: they first wait until those of
    `ready` have begun, and end once those of `done` have ended; else only slots are ever touched from outside.
    A program whose data does not come by way of every rank in every round has `starts`: signals at the beginning of a
    round, which are waited for at the beginning of the next one, before slots are used again.
    """

    name: str
    collective: Collective
    protocol: str
    symmetric: bool
    in_place: bool
    steps: tuple[tuple[FusedStep, ...], ...]
    ready: tuple[tuple[int, ...], ...]
    """Per rank: whose user memory it touches."""
    done: tuple[tuple[int, ...], ...]
    """Per rank: who touches its user memory."""
    starts: tuple[tuple[int, ...], ...]
    slots: int
    """The most plain slots that any rank has, each for one chunk."""
    packets: int
    """The most packet slots."""

    @cached_property
    def depth(self) -> int:
        """How many levels of steps there are that wait for each other."""
        return 1 + max((step.level for stream in self.steps for step in stream), default=-1)

    @cached_property
    def hears_all(self) -> bool:
        """Whether in every round every rank hears from every other."""
        return not any(self.starts)

    @cached_property
    def touched_spaces(self) -> frozenset[int]:
        """Which buffers of others (IN, OUT, SLOT, PACKET) ranks touch."""
        return frozenset(
            place.space
            for rank, stream in enumerate(self.steps)
            for step in stream
            for item in step.items
            for place in (*item.sources, *item.targets)
            if place.rank != rank
        )

    def touched(self, space: int) -> bool:
        """Whether any rank touches another's input (IN) or output (OUT) buffer."""
        return space in self.touched_spaces

    def shape(self, rank: int) -> Shape:
        """The size of one rank's stream."""
        stream = self.steps[rank]
        return Shape(
            steps=len(stream),
            items=sum(len(step.items) for step in stream),
            waits=sum(len(step.waits) for step in stream) + len(self.ready[rank]) + len(self.done[rank]),
            signals=sum(len(step.signals) for step in stream),
        )

    def __repr__(self) -> str:
        sizes = [len(stream) for stream in self.steps]
        memory = "symmetric" if self.symmetric else "staged"
        return (
            f"<Fused {self.name}: {self.collective.kind} over {self.collective.num_ranks} ranks, {self.protocol}, "
            f"{memory}, at most {max(sizes, default=0)} steps and {self.slots + self.packets} slots a rank>"
        )


def fuse(
    program: Program | Lowered, *, protocol: str = "simple", symmetric: bool = False, in_place: bool | None = None
) -> Fused:
    """Make the steps of each rank from a program; the program is verified first.

    Args:
        program: A program or lowered streams, of up to 32 ranks on one host.
        protocol: "simple" (signals), or "ll" (packets that carry a flag beside the data; for small sizes).
        symmetric: Whether ranks may read and write each other's input and output; not with "ll".
        in_place: Whether input and output share memory; what the collective says when not given.

    Returns:
        The steps; `check_fused` proves them.

    Raises:
        InvalidInput: An argument is not valid, or there are too many ranks.
        VerificationError: The program is wrong.

    >>> from stretto.algorithms import algorithm
    >>> fuse(algorithm("direct", "all_reduce", 4), symmetric=True)
    <Fused direct: all_reduce over 4 ranks, simple, symmetric, at most 1 steps and 0 slots a rank>
    """
    c = program.collective
    if protocol not in PROTOCOLS:
        raise unknown("protocol", protocol, PROTOCOLS)
    if symmetric and protocol == "ll":
        raise InvalidInput("symmetric: packets are never read from user memory; leave it out with protocol ll")
    if c.num_ranks > MAX_FUSED_RANKS:
        raise InvalidInput(f"ranks: at most {MAX_FUSED_RANKS} ranks of one host, not {c.num_ranks}")
    shared = c.in_place if in_place is None else in_place
    raw, results = values_of(program)

    def pulled(value: Value) -> bool:
        return symmetric and not value.sources

    values, results = flattened(raw, results, pulled)
    for staged in (False, True):
        built = build_steps(c, values, results, protocol=protocol, symmetric=symmetric, in_place=shared, staged=staged)
        levels = order_steps(built)
        if levels is not None:
            break
    assert levels is not None, "outputs that go through slots cannot wait in a circle"
    return Fused(
        name=program.name,
        collective=c,
        protocol=protocol,
        symmetric=symmetric,
        in_place=shared,
        slots=built.slots,
        packets=built.packets,
        **connect(c, built, levels)._asdict(),
    )
