"""Costs from measurements: a microbenchmark's CSV table, or what nccl-tests prints.

The CSV has a header and the columns ``collective, algorithm, channels, nranks, nbytes, time_us``: the collective's name
(``all_reduce``), the algorithm's (of the library, or any other), the channels it held joined by ``+`` (empty: those the
cluster's own routes take), the number of ranks, the bytes as a `Collective` counts them, and the time of one call.
"""

from __future__ import annotations

import csv
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from ..algorithms import collective_kind
from ..cluster import Cluster
from ..errors import Infeasible, InvalidInput, unknown
from ..files import read_text
from ..workload import COMM_KINDS
from .channels import bindings_for, scope_of
from .costs import Bounding, Cost, CostModel, Motion

COLUMNS = ("collective", "algorithm", "channels", "nranks", "nbytes", "time_us")
MAX_ROWS = 1_000_000
MAX_RANKS = 1 << 20
MAX_VALUE = 1e18
NCCL = "nccl"
"""The algorithm's name where nccl-tests does not say which one NCCL chose."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One call that was timed; without `channels`, on those the cluster's own routes take."""

    collective: str
    algorithm: str
    nranks: int
    nbytes: float
    time_us: float
    channels: tuple[str, ...] = ()
    file: str = ""


def read_measurements(
    path: str | Path, *, collective: str | None = None, algorithm: str | None = None, nranks: int | None = None,
    channels: Iterable[str] = (),
) -> tuple[Measurement, ...]:  # fmt: skip
    """The measurements of a CSV table or of nccl-tests' text, told apart by content.

    The options say what an nccl-tests text leaves open; a CSV table says all of it itself.
    """
    text = read_text(path)
    where = str(path)
    first = next((line for line in text.splitlines() if line.strip()), "")
    if set(COLUMNS) <= {cell.strip() for cell in first.split(",")}:
        found = list(_csv_rows(text, where))
    elif re.search(r"^#.*\bsize\b.*\btime\b", text, re.MULTILINE):
        found = list(_nccl_rows(text, where, collective, algorithm or NCCL, nranks, tuple(channels)))
    else:
        raise InvalidInput(f"{where}: neither a table with the columns {', '.join(COLUMNS)} nor nccl-tests output")
    if not found:
        raise InvalidInput(f"{where}: holds no measurements")
    return tuple(found)


class MeasuredCosts:
    """Costs of motifs that were measured; between two measured sizes on a straight line, never falling with the size.

    Beyond the largest size the line goes on, and the source says so. A measurement holds for one group, or for groups
    that each stay inside a host and so do not meet.
    """

    def __init__(self, cluster: Cluster, measurements: Iterable[Measurement]) -> None:
        self.cluster = cluster
        measurements = tuple(measurements)
        self.files = tuple(dict.fromkeys(Path(row.file).name for row in measurements if row.file)) or ("given",)
        """The names of the files that they come from."""
        rows: dict[tuple[str, str, tuple[str, ...], int], list[Measurement]] = {}
        for row in measurements:
            for channel in row.channels:
                if channel not in cluster.channels:
                    raise unknown(f"channel in {row.file or 'the table'}", channel, cluster.channels)
            held = tuple(channel for channel in cluster.channels if channel in row.channels)
            rows.setdefault((row.collective, row.algorithm, held, row.nranks), []).append(row)
        self._curves = {key: _curve(each) for key, each in rows.items()}

    def algorithms(self, motion: Motion, nbytes: float) -> list[str]:
        """The algorithms that were measured for this motif."""
        named = dict.fromkeys(algorithm for kind, algorithm, _, _ in self._curves if kind == motion.kind)
        return [algorithm for algorithm in named if self.has(motion, algorithm)]

    def has(self, motion: Motion, algorithm: str) -> bool:
        """Whether there is a measurement."""
        return self._find(motion, algorithm) is not None

    def cost(self, motion: Motion, nbytes: float, algorithm: str, *, exact: bool = False) -> Cost:
        """The measured time; raises `Infeasible` where nobody measured."""
        curve = self._find(motion, algorithm)
        if curve is None:
            held = "+".join(motion.channels)
            raise Infeasible(f"{motion.kind} by {algorithm} on {held}, {len(motion.groups[0])} ranks: not measured")
        us, beyond = curve.at(nbytes)
        how = ", extrapolated" if beyond else ""
        source = f"measured: {curve.files} ({algorithm} on {'+'.join(motion.channels)}{how})"
        return Cost(us=us, source=source, with_launch=True)

    def _find(self, motion: Motion, algorithm: str) -> _Curve | None:
        groups = motion.groups
        if motion.window is not None or len({len(group) for group in groups}) > 1:
            return None
        if len(groups) > 1 and scope_of(self.cluster, groups) != "intra":
            return None
        key = (motion.kind, algorithm, motion.channels, len(groups[0]))
        found = self._curves.get(key)
        if found is None and (motion.kind, algorithm, (), len(groups[0])) in self._curves:
            usual = bindings_for(self.cluster, groups)[0].channels
            found = self._curves[motion.kind, algorithm, (), len(groups[0])] if usual == motion.channels else None
        return found


class LayeredCosts:
    """Measured costs of the motifs that were measured, another model's of all others; each cost says which.

    For a motif (a collective, so many ranks, these channels) that was measured only the measured algorithms are
    offered: beside them a simulated one would win or lose by the simulator's error.
    """

    def __init__(self, measured: MeasuredCosts, otherwise: CostModel) -> None:
        self.cluster, self.files = otherwise.cluster, measured.files
        self._measured, self._otherwise = measured, otherwise

    def algorithms(self, motion: Motion, nbytes: float) -> list[str]:
        """What was measured, or where nothing was, what the other model knows."""
        return self._measured.algorithms(motion, nbytes) or self._otherwise.algorithms(motion, nbytes)

    def cost(self, motion: Motion, nbytes: float, algorithm: str, *, exact: bool = False) -> Cost:
        """The measured time, or the other model's."""
        return self._model(motion, algorithm).cost(motion, nbytes, algorithm, exact=exact)

    def at_least_us(self, motion: Motion, nbytes: float, algorithm: str) -> float:
        """What the other model says, where it answers."""
        model = self._model(motion, algorithm)
        return model.at_least_us(motion, nbytes, algorithm) if isinstance(model, Bounding) else 0.0

    def _model(self, motion: Motion, algorithm: str) -> CostModel:
        return self._measured if self._measured.has(motion, algorithm) else self._otherwise


@dataclass(frozen=True, kw_only=True)
class _Curve:
    sizes: tuple[float, ...]
    times: tuple[float, ...]
    files: str

    def at(self, nbytes: float) -> tuple[float, bool]:
        """The time, and whether the size lies beyond what was measured."""
        at = bisect_right(self.sizes, nbytes)
        if at == 0 or len(self.sizes) == 1:
            # Less than the least measured size is mostly latency; one size alone gives a rate, not a latency.
            return self.times[0] * max(1.0, nbytes / self.sizes[0]), at > 0 and nbytes > self.sizes[-1]
        low = min(at, len(self.sizes) - 1) - 1
        run, rise = self.sizes[low + 1] - self.sizes[low], self.times[low + 1] - self.times[low]
        return self.times[low] + rise / run * (nbytes - self.sizes[low]), nbytes > self.sizes[-1]


def _curve(rows: Sequence[Measurement]) -> _Curve:
    """One time per size (the least of several), raised where noise would let a larger size be faster."""
    best: dict[float, float] = {}
    for row in rows:
        best[row.nbytes] = min(row.time_us, best.get(row.nbytes, math.inf))
    sizes = sorted(best)
    times, highest = [], 0.0
    for size in sizes:
        highest = max(highest, best[size])
        times.append(highest)
    files = ", ".join(dict.fromkeys(Path(row.file).name for row in rows if row.file)) or "given"
    return _Curve(sizes=tuple(sizes), times=tuple(times), files=files)


def _csv_rows(text: str, where: str) -> Iterator[Measurement]:
    reader = csv.reader(StringIO(text), skipinitialspace=True)
    try:
        header = [cell.strip() for cell in next(line for line in reader if line)]
        place = {name: header.index(name) for name in COLUMNS}
        for line in reader:
            if not line or line[0].startswith("#"):
                continue
            at = f"{where}:{reader.line_num}"
            if reader.line_num > MAX_ROWS:
                raise InvalidInput(f"{where}: more than {MAX_ROWS} lines")
            if len(line) != len(header):
                raise InvalidInput(f"{at}: {len(line)} cells, not {len(header)}")
            cell = {name: line[place[name]].strip() for name in COLUMNS}
            if not cell["algorithm"]:
                raise InvalidInput(f"{at}: algorithm: must not be empty")
            yield Measurement(
                collective=_kind(cell["collective"], f"{at}: collective"),
                algorithm=cell["algorithm"],
                channels=tuple(part.strip() for part in cell["channels"].split("+") if part.strip()),
                nranks=_ranks(cell["nranks"], f"{at}: nranks"),
                nbytes=_positive(cell["nbytes"], f"{at}: nbytes"),
                time_us=_positive(cell["time_us"], f"{at}: time_us"),
                file=where,
            )
    except csv.Error as error:
        raise InvalidInput(f"{where}:{reader.line_num}: not CSV: {error}") from None


def _nccl_rows(
    text: str, where: str, collective: str | None, algorithm: str, nranks: int | None, channels: tuple[str, ...]
) -> Iterator[Measurement]:
    lines = text.splitlines()
    if len(lines) > MAX_ROWS:
        raise InvalidInput(f"{where}: more than {MAX_ROWS} lines")
    kind = _kind(collective, "collective") if collective else _nccl_collective(text, where)
    ranks = nranks if nranks is not None else len(re.findall(r"^#\s+Rank\s+\d+\s", text, re.MULTILINE))
    if not 2 <= ranks <= MAX_RANKS:
        raise InvalidInput(
            f"{where}: nranks: names {ranks} ranks; say how many there were (at least 2), as in "
            f"--costs {Path(where).name},nranks=8"
        )
    behind = 0
    for number, line in enumerate(lines, 1):
        cells = line.lstrip("# ").split()
        if line.startswith("#"):
            if cells[:1] == ["size"] and "time" in cells:
                # Some versions leave redop and root out of the rows, so columns are counted from the end.
                behind = len(cells) - cells.index("time")
            continue
        if not behind or not cells or not cells[0].isdigit():
            continue
        if len(cells) <= behind:
            raise InvalidInput(f"{where}:{number}: {len(cells)} columns; the header has more")
        if float(_number(cells[0], f"{where}:{number}: size")) == 0:
            continue
        yield Measurement(
            collective=kind, algorithm=algorithm, nranks=ranks, channels=channels, file=where,
            nbytes=_positive(cells[0], f"{where}:{number}: size"),
            time_us=_positive(cells[-behind], f"{where}:{number}: time"),
        )  # fmt: skip


def _nccl_collective(text: str, where: str) -> str:
    named = re.search(r"\b(\w+)_perf\b", text)
    if named is None:
        raise InvalidInput(
            f"{where}: collective: the text does not say which; say it, as in "
            f"--costs {Path(where).name},collective=all_reduce"
        )
    aliases = {"sendrecv": "send"}
    return aliases.get(named[1]) or _kind(named[1], f"{where}: collective")


def _kind(text: str, where: str) -> str:
    if text == "send":
        return text
    try:
        kind = collective_kind(text)
    except InvalidInput:
        kind = ""
    if kind not in COMM_KINDS:
        raise InvalidInput(f"{where}: {unknown('collective', text, COMM_KINDS)}")
    return kind


def _ranks(text: str, where: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 2 <= int(text) <= MAX_RANKS:
        raise InvalidInput(f"{where}: must be 2..{MAX_RANKS}, not {text[:40]!r}")
    return int(text)


def _positive(text: str, where: str) -> float:
    value = _number(text, where)
    if not 0 < value <= MAX_VALUE:
        raise InvalidInput(f"{where}: must be > 0 and at most {MAX_VALUE:g}, not {text[:40]!r}")
    return value


def _number(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(f"{where}: must be a number, not {text[:40]!r}") from None
