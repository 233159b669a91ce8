# SPDX-License-Identifier: Apache-2.0
"""Communication sketches: a person's knowledge of a good algorithm, as limits on the search for one.

A `Sketch` says which links may be used (also chunk by chunk), which GPUs relay between hosts, how many connections a
switch should carry, which rotations leave the algorithm unchanged, and how finely the data is cut. `LogicalTopology`
(logical.py) is a sketch applied to a cluster and a collective.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import InvalidInput, unknown
from ..late import LateFunction

STRATEGIES = ("uc-min", "uc-max", "none")
BALANCE = ("none", "minmax", "maxmin")
PATTERNS = ("fully-connected", "direct-map")
CHANNEL_WORDS = ("auto", "all")
MAX_CHUNKUP = 1 << 12

Connections = str | Mapping[int, tuple[int, ...]]

LOAD: LateFunction[[str | Path], Sketch] = LateFunction("synthesis.sketch_files.load")
SAVE: LateFunction[[Sketch, str | Path], None] = LateFunction("synthesis.sketch_files.save")


@dataclass(frozen=True, kw_only=True)
class LinkRule:
    """A rule for hops from a device of `src` to one of `dst` (names or numbers) with `chunks`; empty means any."""

    src: tuple[int | str, ...] = ()
    dst: tuple[int | str, ...] = ()
    chunks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Hyperedge:
    """The GPUs of every host that one switch joins, and whether few or many connections over it are wanted."""

    gpus: tuple[int, ...]
    strategy: str = "none"


@dataclass(frozen=True, kw_only=True)
class Sketch:
    """Limits on a search. GPUs of `switches` and of the relay fields are numbered within their host.

    >>> Sketch(symmetry_offsets=((8, 16),)).vary(input_chunkup=2).input_chunkup
    2
    """

    name: str = "sketch"
    nodes: int | None = None
    """How many hosts the sketch is written for; checked against the cluster."""
    channels: str | tuple[str, ...] = "auto"
    """The channels of links between GPUs of one host, or ``all``, or ``auto`` (the widest channel if it joins them)."""
    keep: tuple[LinkRule, ...] = ()
    """The rules of which at least one must match a hop; no restriction where there are none."""
    drop: tuple[LinkRule, ...] = ()
    switches: tuple[Hyperedge, ...] = ()
    balance: str = "none"
    internode_conn: Connections = "fully-connected"
    """A pattern, or a table: GPU i of a host sends only to GPUs ``internode_conn[i]`` of other hosts."""
    beta_split: Mapping[int, float] = field(default_factory=dict)
    """For GPU i the number n: its sends between hosts are planned with 1/n-th of the bandwidth."""
    chunk_to_relay_map: tuple[int, int] | None = None
    """(r1, r2): a chunk of GPU p leaves its host through GPU ``p // r1 * r1 + r2``."""
    gpus_to_sender: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """For each sending GPU the GPUs whose chunks leave their host through it."""
    own_first: bool = False
    """Whether a relay sends its own chunks to other hosts before those of other GPUs."""
    symmetry_offsets: tuple[tuple[int, int], ...] = ()
    """Pairs (o, g): rotating ranks by o within groups of g leaves the algorithm unchanged."""
    input_chunkup: int = 1
    input_bytes: float | None = None

    def __post_init__(self) -> None:
        _validate(self)

    @classmethod
    def load(cls, path: str | Path) -> Sketch:
        """Load a sketch from Stretto's YAML form or from one of TACCL's JSON files."""
        return LOAD(path)

    def save(self, path: str | Path) -> None:
        """Write the versioned YAML form."""
        SAVE(self, path)

    def vary(self, **changes: object) -> Sketch:
        """A copy with some fields changed, as an ablation needs it."""
        known = [f.name for f in dataclasses.fields(self)]
        for key in changes:
            if key not in known:
                raise unknown("field of a sketch", key, known)
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def with_connections(self, count: int, gpus: int) -> Sketch:
        """Each GPU of a host of `gpus` sends to `count` GPUs of another host: the paper's first ablation."""
        if not 1 <= count <= gpus:
            raise InvalidInput(f"internode_conn: a GPU has 1 to {gpus} connections, not {count}")
        conn = {i: tuple((i + j) % gpus for j in range(count)) for i in range(gpus)}
        return self.vary(internode_conn=conn, beta_split={}, chunk_to_relay_map=None, gpus_to_sender={})

    def with_strategy(self, strategy: str) -> Sketch:
        """The sketch with this policy for every switch: ``uc-min``, ``uc-max`` or ``none``."""
        return self.vary(switches=tuple(dataclasses.replace(s, strategy=strategy) for s in self.switches))


def _validate(sketch: Sketch) -> None:
    for at, edge in enumerate(sketch.switches):
        if edge.strategy not in STRATEGIES:
            raise InvalidInput(f"switches[{at}].strategy: {unknown('strategy', edge.strategy, STRATEGIES)}")
        if len(set(edge.gpus)) < max(2, len(edge.gpus)):
            raise InvalidInput(f"switches[{at}].gpus: a switch joins at least two different GPUs")
    if sketch.balance not in BALANCE:
        raise InvalidInput(f"balance: {unknown('strategy', sketch.balance, BALANCE)}")
    if isinstance(sketch.internode_conn, str) and sketch.internode_conn not in PATTERNS:
        choices = (*PATTERNS, "a table of GPUs")
        raise InvalidInput(f"internode_conn: {unknown('pattern', sketch.internode_conn, choices)}")
    if isinstance(sketch.channels, str) and sketch.channels not in CHANNEL_WORDS:
        choices = (*CHANNEL_WORDS, "a list of channels")
        raise InvalidInput(f"links.channels: {unknown('choice', sketch.channels, choices)}")
    for gpu, n in sketch.beta_split.items():
        if not 1 <= n < float("inf"):
            raise InvalidInput(f"beta_split.{gpu}: must be >= 1, not {n:g}")
    if sketch.chunk_to_relay_map is not None:
        r1, r2 = sketch.chunk_to_relay_map
        if r1 < 1 or r2 < 0:
            raise InvalidInput(f"chunk_to_relay_map: needs r1 >= 1 and r2 >= 0, not [{r1}, {r2}]")
    for at, (offset, group) in enumerate(sketch.symmetry_offsets):
        if not 1 <= offset < group:
            raise InvalidInput(f"symmetry_offsets[{at}]: needs 1 <= offset < group size, not [{offset}, {group}]")
    if not 1 <= sketch.input_chunkup <= MAX_CHUNKUP:
        raise InvalidInput(f"input_chunkup: must be 1..{MAX_CHUNKUP}, not {sketch.input_chunkup}")
    if sketch.nodes is not None and sketch.nodes < 1:
        raise InvalidInput(f"nodes: must be >= 1, not {sketch.nodes}")
    if sketch.input_bytes is not None and not 1 <= sketch.input_bytes <= 1 << 50:
        raise InvalidInput(f"input_size: must be 1 byte to 1 PiB, not {sketch.input_bytes}")
