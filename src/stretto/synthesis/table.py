# SPDX-License-Identifier: Apache-2.0
"""Tables of programs by size: which program to use for which number of bytes."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from ..cluster import Cluster
from ..collectives import Collective
from ..errors import InvalidInput
from ..files import write_file
from ..programs import Program, SymmetricProgram
from ..simulator import lower_bound, simulate
from ..simulator.priced_wide import wide_time_us
from .certificate import Synthesis
from .portfolio import SearchStopped, synthesize
from .problem import Progress

COLUMNS = ("file", "program", "maker", "min_bytes", "max_bytes", "nbytes", "time_us", "bound_us", "gap", "form", "cut")
MAX_SIZES = 64


@dataclass(frozen=True, kw_only=True)
class SizeChoice:
    """The program for a range of sizes, `min_bytes` to `max_bytes` (0: without limit).

    `synthesis` was made for a size in the range; `points` are the sizes that were simulated, each with
    (nbytes, time_us, bound_us).
    """

    synthesis: Synthesis
    min_bytes: int
    max_bytes: int
    points: tuple[tuple[int, float, float], ...]

    @property
    def program(self) -> Program | SymmetricProgram:
        """The program to run."""
        return self.synthesis.program


@dataclass(frozen=True, kw_only=True, eq=False)
class Selection:
    """The choices, by rising size; together they cover every size."""

    collective: str
    cluster: str
    choices: tuple[SizeChoice, ...]

    def best(self, nbytes: float) -> Program | SymmetricProgram:
        """The program for a size in bytes."""
        for choice in self.choices:
            if not choice.max_bytes or nbytes <= choice.max_bytes:
                return choice.program
        raise AssertionError("the last choice has no limit")

    def rows(self) -> list[dict[str, Any]]:
        """The table as dictionaries, one per simulated size."""
        return [
            {
                "program": choice.program.name,
                "maker": choice.synthesis.certificate.maker,
                "min_bytes": choice.min_bytes,
                "max_bytes": choice.max_bytes,
                "nbytes": nbytes,
                "time_us": took,
                "bound_us": bound,
                "gap": took / bound - 1 if bound > 0 else 0.0,
                "form": str(choice.synthesis.certificate.form or ""),
                "cut": choice.synthesis.certificate.cut,
            }
            for choice in self.choices
            for nbytes, took, bound in choice.points
        ]

    def save(self, folder: str | Path, *, suffix: str = ".xml") -> list[Path]:
        """Write one program file per choice, ``index.json`` and ``index.csv``; return their paths.

        Files for MSCCL and MSCCL++ carry their size range themselves, so that the runtime picks the right one; no two
        ranges overlap. Beside a plan for MSCCL++ (.json) its program stands as ``NAME.txt``, which our backend runs.
        `suffix` chooses the format (.xml, .json, .txt, .prog).
        """
        from ..programs.formats import SUFFIXES

        if suffix not in SUFFIXES:
            raise InvalidInput(f"suffix {suffix!r}: choose from: {', '.join(SUFFIXES)}")
        folder = Path(folder)
        names = [f"{self.collective}-{at}{suffix}" for at in range(len(self.choices))]
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput(f"{error.filename or folder}: {error.strerror or error}") from None
        for name, choice in zip(names, self.choices, strict=True):
            limits = {"min_bytes": choice.min_bytes, "max_bytes": choice.max_bytes}
            choice.synthesis.write(folder / name, hosts=choice.synthesis.hosts, **limits)
        programs = [folder / Path(name).with_suffix(".txt") for name in names] if suffix == ".json" else []
        for path, choice in zip(programs, self.choices, strict=False):
            choice.synthesis.write(path)
        rows = [
            {"file": name, **row}
            for name, choice in zip(names, self.choices, strict=True)
            for row in self.rows()
            if row["min_bytes"] == choice.min_bytes
        ]
        index = {"collective": self.collective, "cluster": self.cluster, "rows": rows}
        write_file(folder / "index.json", msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n")
        table = io.StringIO()
        writer = csv.DictWriter(table, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
        write_file(folder / "index.csv", table.getvalue())
        return [*(folder / name for name in names), *programs, folder / "index.json", folder / "index.csv"]


def select(
    collective: Collective,
    cluster: Cluster,
    sizes: Sequence[int],
    *,
    progress: Progress | None = None,
    **options: Any,
) -> Selection:
    """Synthesise for every size, try each program at every other size too, and divide the sizes among the best.

    Where the best program changes between two sizes, the border is where both take the same time. Plans of wide steps
    stay with the size that they were chosen for, so that a table has the same plans as a search for each size alone;
    neighboring sizes share one where both chose it.

    Args:
        collective: The collective.
        cluster: The cluster.
        sizes: 1..64 different sizes in bytes.
        progress: Called with a line of text and the fraction done, 0..1.
        **options: Options of `synthesize` (its budget is for one size); with `lower` instruction streams are compared.

    Returns:
        The table, which covers every size.

    Raises:
        Infeasible: No maker found a program for some size.
        InvalidInput: There are no or too many sizes, or an option is not valid.
        SearchStopped: Ctrl-C ended the search; the exception holds the table of the sizes that have a program so far.

    >>> from stretto import AllGather, KB, MB
    >>> ring = Cluster.preset("ring", nodes=8)
    >>> table = select(AllGather(8), ring, [KB, MB], makers=["library"], cache=False)
    >>> [len(table.choices) >= 1, table.choices[0].min_bytes, table.choices[-1].max_bytes]
    [True, 0, 0]
    """
    ordered = sorted(set(sizes))
    if not 1 <= len(ordered) <= MAX_SIZES:
        raise InvalidInput(f"sizes: must be 1..{MAX_SIZES} different ones, not {len(ordered)}")
    found: list[Synthesis] = []
    for at, nbytes in enumerate(ordered):

        def step(message: str, fraction: float, at: int = at) -> None:
            if progress is not None:
                progress(message, (at + fraction) / len(ordered))

        try:
            found.append(synthesize(collective, cluster, nbytes, progress=step, **options))
        except KeyboardInterrupt as stop:
            found += [stop.found] if isinstance(stop, SearchStopped) else []
            if not found:
                raise
            raise SearchStopped(_divided(collective, cluster, ordered[: len(found)], found, options)) from None
    return _divided(collective, cluster, ordered, found, options)


def _divided(
    collective: Collective,
    cluster: Cluster,
    ordered: Sequence[int],
    found: Sequence[Synthesis],
    options: dict[str, Any],
) -> Selection:
    """The sizes, divided among the programs that were found for them."""
    physics = {key: options[key] for key in ("alpha", "contention", "runtime") if key in options}

    def time_us(one: Synthesis, nbytes: int) -> float:
        form = None if one.lowering is None else one.lowering.form
        if form is not None:
            return wide_time_us(one.plain, cluster, nbytes=nbytes, form=form, runtime=physics["runtime"])
        stepwise = one.lowering is not None and one.lowering.steps
        return simulate(one.plain if stepwise else one.runnable, cluster, nbytes=nbytes, **physics).total_us

    programs = [s for at, s in enumerate(found) if all(not _same(s, other) for other in found[:at])]
    chosen: list[tuple[Synthesis, list[tuple[int, float, float]]]] = []
    for nbytes, own in zip(ordered, found, strict=True):
        rivals = [own] if own.certificate.form else programs
        took, at = min((time_us(s, nbytes), at) for at, s in enumerate(programs) if any(_same(s, r) for r in rivals))
        point = (nbytes, took, lower_bound(collective, cluster, nbytes).total_us)
        if chosen and chosen[-1][0] is programs[at]:
            chosen[-1][1].append(point)
        else:
            chosen.append((programs[at], [point]))
    borders = [
        _border(lambda n, a=a, b=b: time_us(a, n) - time_us(b, n), before[-1][0], after[0][0])
        for (a, before), (b, after) in pairwise(chosen)
    ]
    lows, highs = [0, *(b + 1 for b in borders)], [*borders, 0]
    return Selection(
        collective=collective.kind,
        cluster=cluster.name,
        choices=tuple(
            SizeChoice(synthesis=s, min_bytes=low, max_bytes=high, points=tuple(points))
            for (s, points), low, high in zip(chosen, lows, highs, strict=True)
        ),
    )


def _same(a: Synthesis, b: Synthesis) -> bool:
    """Whether two results run the same: the same program, lowered alike where it is lowered."""
    ways = [(x.lowering.instances, x.lowering.fifo_depth, x.lowering.form) if x.lowering else None for x in (a, b)]
    return ways[0] == ways[1] and a.program == b.program


def _border(difference: Any, low: int, high: int, steps: int = 10) -> int:
    """The last size at which the first of two programs wins, by bisection: it wins at `low` and loses at `high`."""
    for _ in range(steps):
        middle = round(math.sqrt(low * high))
        if middle in (low, high):
            break
        low, high = (middle, high) if difference(middle) <= 0 else (low, middle)
    return low
