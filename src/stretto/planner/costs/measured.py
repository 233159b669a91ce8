# SPDX-License-Identifier: Apache-2.0
"""Costs from measurements: a microbenchmark's CSV table, or what nccl-tests prints.

The CSV has a header and the columns ``collective, algorithm, channels, nranks, nbytes, time_us``: the collective's name
(``all_reduce``), the algorithm's (of the library, or any other), the channels it held joined by ``+`` (empty: those the
cluster's own routes take), the number of ranks, the bytes as a `Collective` counts them, and the time of one call.
Two more columns may follow: ``groups``, how many groups of so many ranks did it at the same time (else one), and
``beside``, what else ran on the same ranks meanwhile, as ``all_to_all/direct/eth/1048576``.
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

from ...algorithms import collective_kind
from ...cluster import Cluster
from ...errors import Infeasible, InvalidInput, unknown
from ...files import is_folder, read_text, write_file
from ...workload import COMM_KINDS
from .channels import bindings_for, scope_of
from .costs import Bounding, Cost, CostModel, Motion

COLUMNS = ("collective", "algorithm", "channels", "nranks", "nbytes", "time_us")
MORE_COLUMNS = ("groups", "beside")
MAX_ROWS = 1_000_000
MAX_RANKS = 1 << 20
MAX_VALUE = 1e18
NCCL = "nccl"
"""The algorithm's name for nccl-tests output, which does not say which algorithm NCCL chose."""
STRAIGHT = ("direct", NCCL)
"""Algorithms that send an all-to-all directly from each rank to each, so that its pieces may differ."""


@dataclass(frozen=True, kw_only=True)
class OverlapPartner:
    """The other motif of two that were measured while both ran.

    >>> str(OverlapPartner(collective="all_to_all", algorithm="direct", channels=("shm", "eth"), nbytes=1048576))
    'all_to_all/direct/shm+eth/1048576'
    """

    collective: str
    algorithm: str
    channels: tuple[str, ...]
    nbytes: float

    def __str__(self) -> str:
        return f"{self.collective}/{self.algorithm}/{'+'.join(self.channels)}/{self.nbytes:.12g}"


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """A motif that was measured by itself and at the same time as another one."""

    alone: Measurement
    together: Measurement

    @property
    def slowdown(self) -> float:
        """The ratio of its time beside the other motif to its time alone."""
        return self.together.time_us / self.alone.time_us


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One timed call; empty `channels` are those that the cluster's own routes take."""

    collective: str
    algorithm: str
    nranks: int
    nbytes: float
    time_us: float
    channels: tuple[str, ...] = ()
    groups: int = 1
    """The number of groups of `nranks` each that ran the same at once."""
    beside: OverlapPartner | None = None
    """The motif that ran at the same time on the same ranks; None if there was none."""
    file: str = ""


def read_measurements(
    path: str | Path, *, collective: str | None = None, algorithm: str | None = None, nranks: int | None = None,
    channels: Iterable[str] = (),
) -> tuple[Measurement, ...]:  # fmt: skip
    """The measurements of a CSV table or of nccl-tests' text; the content tells which it is.

    Of a folder all tables (``*.csv``) are read, as our NCCL profiler writes one for each rank: of the same call the
    shortest time counts, as the other ranks had come early and waited. The options apply to nccl-tests only; a CSV
    table has these columns itself.

    Args:
        path: the file, or a folder.
        collective: name of the collective; None reads it from the text.
        algorithm: name of the algorithm; None takes "nccl".
        nranks: number of ranks, 2..2^20; None counts them in the text.
        channels: channels that the calls used; empty means those of the cluster's own routes.

    Returns:
        The measurements, at least one.

    Raises:
        InvalidInput: the file has neither form, holds no measurements, or a field is invalid.
    """
    if is_folder(path):
        return _shortest(row for file in sorted(Path(path).glob("*.csv")) for row in read_measurements(file))
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


def _shortest(rows: Iterable[Measurement]) -> tuple[Measurement, ...]:
    """One row for each kind of call."""
    best: dict[tuple[object, ...], Measurement] = {}
    for row in rows:
        key = (row.collective, row.algorithm, row.nranks, row.nbytes, row.channels, row.groups, row.beside)
        if key not in best or row.time_us < best[key].time_us:
            best[key] = row
    if not best:
        raise InvalidInput("costs: the folder holds no tables (*.csv)")
    return tuple(best.values())


def write_measurements(path: str | Path, rows: Iterable[Measurement]) -> None:
    """Write the CSV table that `read_measurements` reads."""
    text = StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow([*COLUMNS, *MORE_COLUMNS])
    for row in rows:
        beside = "" if row.beside is None else str(row.beside)
        out.writerow([
            row.collective, row.algorithm, "+".join(row.channels), row.nranks, f"{row.nbytes:.12g}",
            f"{row.time_us:.6g}", row.groups, beside,
        ])  # fmt: skip
    write_file(path, text.getvalue())


class MeasuredCosts:
    """Costs of measured motifs; linear between two measured sizes, never falling with the size.

    Beyond the largest size the line is extrapolated, and the source says so. A measurement is valid for the number of
    groups that was measured; one of a single group also for groups that each stay inside a host and so do not share
    links. Measurements beside another motif are in `overlaps` and are not used as costs: motifs on disjoint channels
    are planned as if they did not slow each other.
    """

    def __init__(self, cluster: Cluster, measurements: Iterable[Measurement]) -> None:
        self.cluster = cluster
        measurements = tuple(measurements)
        self.files = tuple(dict.fromkeys(Path(row.file).name for row in measurements if row.file)) or ("given",)
        """The names of the files with the measurements."""
        rows: dict[_Key, list[Measurement]] = {}
        for row in measurements:
            for channel in row.channels:
                if channel not in cluster.channels:
                    raise unknown(f"channel in {row.file or 'the table'}", channel, cluster.channels)
            held = tuple(channel for channel in cluster.channels if channel in row.channels)
            if row.beside is None:
                rows.setdefault((row.collective, row.algorithm, held, row.nranks, row.groups), []).append(row)
        self._curves = {key: _curve(each) for key, each in rows.items()}
        self.overlaps = overlaps(measurements)
        """Every motif that was also measured beside another one."""

    def algorithms(self, motion: Motion, nbytes: float) -> list[str]:
        """The algorithms that were measured for this motif."""
        named = dict.fromkeys(algorithm for kind, algorithm, *_ in self._curves if kind == motion.kind)
        return [algorithm for algorithm in named if self.has(motion, algorithm)]

    def has(self, motion: Motion, algorithm: str) -> bool:
        """Whether the motif was measured with this algorithm."""
        return self._find(motion, algorithm) is not None

    def cost(self, motion: Motion, nbytes: float, algorithm: str, *, exact: bool = False) -> Cost:
        """The measured time, interpolated between measured sizes.

        Args:
            motion: the motif, its groups and its channels.
            nbytes: bytes as the group's `Collective` counts them, > 0.
            algorithm: name of a measured algorithm.
            exact: not used: there is no time but the measured ones.

        Returns:
            The time in microseconds, with the launch.

        Raises:
            Infeasible: this motif was not measured.
        """
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
        if len({len(group) for group in groups}) > 1:
            return None
        if motion.window is not None and (motion.window != (0, len(groups[0])) or algorithm not in STRAIGHT):
            return None
        apart = len(groups) == 1 or scope_of(self.cluster, groups) == "intra"
        for count in dict.fromkeys((len(groups), 1) if apart else (len(groups),)):
            found = self._curves.get((motion.kind, algorithm, motion.channels, len(groups[0]), count))
            if found is not None:
                return found
            unnamed = self._curves.get((motion.kind, algorithm, (), len(groups[0]), count))
            if unnamed is not None and bindings_for(self.cluster, groups)[0].channels == motion.channels:
                return unnamed
        return None


class LayeredCosts:
    """Measured costs of the motifs that were measured, another model's costs of all others; each cost says which.

    For a measured motif (a collective, a number of ranks, a set of channels) only the measured algorithms are offered:
    a simulated one beside them would win or lose by the simulator's error.
    """

    def __init__(self, measured: MeasuredCosts, otherwise: CostModel) -> None:
        self.cluster, self.files, self.overlaps = otherwise.cluster, measured.files, measured.overlaps
        self._measured, self._otherwise = measured, otherwise

    def algorithms(self, motion: Motion, nbytes: float) -> list[str]:
        """The measured algorithms or, if the motif was not measured, those of the other model."""
        return self._measured.algorithms(motion, nbytes) or self._otherwise.algorithms(motion, nbytes)

    def cost(self, motion: Motion, nbytes: float, algorithm: str, *, exact: bool = False) -> Cost:
        """The measured time, or the other model's.

        Args:
            motion: the motif, its groups and its channels.
            nbytes: bytes as the group's `Collective` counts them, > 0.
            algorithm: one of the names that `algorithms` returned.
            exact: passed on to the other model.

        Returns:
            The time in microseconds.

        Raises:
            Infeasible: the channels or the algorithm cannot carry the motif.
        """
        return self._model(motion, algorithm).cost(motion, nbytes, algorithm, exact=exact)

    def at_least_us(self, motion: Motion, nbytes: float, algorithm: str) -> float:
        """The lower bound of the model that answers for this motif.

        Args:
            motion: the motif, its groups and its channels.
            nbytes: bytes as the group's `Collective` counts them.
            algorithm: one of the names that `algorithms` returned.

        Returns:
            Microseconds; 0 if that model gives no bound.
        """
        model = self._model(motion, algorithm)
        return model.at_least_us(motion, nbytes, algorithm) if isinstance(model, Bounding) else 0.0

    def _model(self, motion: Motion, algorithm: str) -> CostModel:
        return self._measured if self._measured.has(motion, algorithm) else self._otherwise


def overlaps(measurements: Iterable[Measurement]) -> tuple[Overlap, ...]:
    """Every measurement beside another motif, paired with the same measurement alone where there is one."""
    rows = tuple(measurements)

    def same(row: Measurement) -> tuple[str, str, frozenset[str], int, float, int]:
        return row.collective, row.algorithm, frozenset(row.channels), row.nranks, row.nbytes, row.groups

    alone: dict[tuple[str, str, frozenset[str], int, float, int], Measurement] = {}
    for row in rows:
        known = alone.get(same(row))
        if row.beside is None and (known is None or row.time_us < known.time_us):
            alone[same(row)] = row
    return tuple(
        Overlap(alone=alone[same(row)], together=row) for row in rows if row.beside is not None and same(row) in alone
    )


_Key = tuple[str, str, tuple[str, ...], int, int]
"""Collective, algorithm, channels, ranks of a group, groups."""


@dataclass(frozen=True, kw_only=True)
class _Curve:
    sizes: tuple[float, ...]
    times: tuple[float, ...]
    files: str

    def at(self, nbytes: float) -> tuple[float, bool]:
        """The time at a size, and whether the size lies beyond the measured ones."""
        at = bisect_right(self.sizes, nbytes)
        if at == 0 or len(self.sizes) == 1:
            # Below the smallest measured size the time is mostly latency; a single size gives a rate, not a latency.
            return self.times[0] * max(1.0, nbytes / self.sizes[0]), at > 0 and nbytes > self.sizes[-1]
        low = min(at, len(self.sizes) - 1) - 1
        run, rise = self.sizes[low + 1] - self.sizes[low], self.times[low + 1] - self.times[low]
        return self.times[low] + rise / run * (nbytes - self.sizes[low]), nbytes > self.sizes[-1]


def _curve(rows: Sequence[Measurement]) -> _Curve:
    """One time per size (the least of several), raised where noise would make a larger size faster."""
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
        place = {name: header.index(name) for name in (*COLUMNS, *MORE_COLUMNS) if name in header}
        for line in reader:
            if not line or line[0].startswith("#"):
                continue
            at = f"{where}:{reader.line_num}"
            if reader.line_num > MAX_ROWS:
                raise InvalidInput(f"{where}: more than {MAX_ROWS} lines")
            if len(line) != len(header):
                raise InvalidInput(f"{at}: {len(line)} cells, not {len(header)}")
            cell = {name: line[at_column].strip() for name, at_column in place.items()}
            if not cell["algorithm"]:
                raise InvalidInput(f"{at}: algorithm: must not be empty")
            yield Measurement(
                collective=_kind(cell["collective"], f"{at}: collective"),
                algorithm=cell["algorithm"],
                channels=_channels(cell["channels"]),
                groups=_ranks(cell.get("groups") or "1", f"{at}: groups", least=1),
                beside=_beside(cell.get("beside", ""), f"{at}: beside"),
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
                # Some versions of nccl-tests omit redop and root in the rows, so columns are counted from the end.
                behind = len(cells) - cells.index("time")
            continue
        if not behind or not cells or not (cells[0].isascii() and cells[0].isdigit()):
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


def _beside(text: str, where: str) -> OverlapPartner | None:
    if not text:
        return None
    parts = text.split("/")
    if len(parts) != 4 or not parts[1]:
        raise InvalidInput(f"{where}: must be COLLECTIVE/ALGORITHM/CHANNELS/BYTES, not {text[:80]!r}")
    kind, algorithm, channels, nbytes = parts
    return OverlapPartner(
        collective=_kind(kind, where), algorithm=algorithm, channels=_channels(channels),
        nbytes=_positive(nbytes, where),
    )  # fmt: skip


def _channels(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split("+") if part.strip())


def _ranks(text: str, where: str, least: int = 2) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= MAX_RANKS:
        raise InvalidInput(f"{where}: must be {least}..{MAX_RANKS}, not {text[:40]!r}")
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
