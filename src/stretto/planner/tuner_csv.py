# SPDX-License-Identifier: Apache-2.0
"""The part of a plan that NCCL can express by itself: algorithms, as the table of a tuner plugin.

One line is ``collective,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks``. The first line that fits, and
whose algorithm and protocol NCCL can run there, wins; -1 means any. Our own plugin (``native/nccl/tuner.c``) leaves to
NCCL what no line serves, the number of channels where a line has -1, and the protocol where it says ``any``: the table
then holds the plan's decisions and nothing else. NCCL's example plugin gives one channel to every call that no line
serves, and to lines with -1 channels. So a table for that one has a line with a protocol and a number of channels for
every call: for all sizes of the planned ops, and rings for everything else. The order of motifs, their pieces and their
links have no place in the table; a comment says what was left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, isqrt
from pathlib import Path

import numpy as np

from .. import _native
from ..cluster import Cluster
from ..errors import Infeasible, InvalidInput, unknown
from ..files import read_text, write_file
from ..workload import Workload
from .algebra.motif import CODES
from .algebra.notation_read import parse
from .costs.channels import bindings_for, default_binding
from .costs.costs import CostModel, Motion, simulated_costs
from .costs.measured import NCCL
from .plan import OpPlan, Plan

COLLECTIVES = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
NCCL_NAMES = {
    "ring": ("ring", "chain", "chain:1", "chain:64"),
    "tree": (
        "nccl_tree",
        "nccl_tree:1",
        "nccl_tree:64",
        "double_binary_tree",
        "double_binary_tree:1",
        "binary_tree",
        "binary_tree:1",
    ),
}
"""The library's equivalents of NCCL's algorithms; its rings broadcast and reduce as chains. Trees only all-reduce."""
FIELDS = (
    "collective_type", "min_bytes", "max_bytes", "algorithm", "protocol", "channels", "nNodes", "nRanks", "numPipeOps",
    "regBuff",
)  # fmt: skip
"""The columns of the table; the last two may be left out."""
LIMITS = {5: (1, 1 << 10), 6: (1, 1 << 20), 7: (1, 1 << 20), 8: (0, 1 << 20), 9: (0, 1 << 20)}
"""Smallest and largest number in a column, beside -1."""
ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
ANY = "any"
PROTOCOLS = ("ll", "ll128", "simple", ANY)
PLUGINS = ("stretto", "example")
"""The plugins that a table can be for: our own, or the one that comes with NCCL as an example."""
MAX_LINE = 255
MAX_BYTES = (1 << 63) - 1

CHANNEL_GB_PER_S = 20.0
"""Assumed rate of a channel: NCCL's own figure for a ring (LL128) on Volta and Ampere; for Hopper NCCL has 36.7."""
LEAST_CHANNELS, MOST_CHANNELS = 2, 32
CHANNEL_BYTES = 32 << 10
"""The least bytes for which one more channel pays: 512 threads times 64 bytes, as in NCCL's own rule for Simple."""

LL_UP_TO_BYTES = 64 << 10
LL128_UP_TO_BYTES = 4 << 20
"""The usual sizes up to which the low-latency protocols pay; protocols are not part of Stretto's model."""


@dataclass(frozen=True, kw_only=True)
class TunerLine:
    """One line of the tuner's table."""

    collective: str
    min_bytes: int
    max_bytes: int
    algorithm: str
    protocol: str
    channels: int = -1
    nodes: int = -1
    ranks: int = -1

    def __str__(self) -> str:
        return (
            f"{self.collective},{self.min_bytes},{self.max_bytes},{self.algorithm},{self.protocol},"
            f"{self.channels},{self.nodes},{self.ranks}"
        )


def tuner_lines(
    plan: Plan, workload: Workload, cluster: Cluster, costs: CostModel | None = None, *, plugin: str = "stretto"
) -> tuple[list[TunerLine], list[str]]:
    """The tuner's table of a plan, and one sentence for each decision that NCCL cannot be told.

    An all-reduce that the plan moves in a way that NCCL does not have gets the cheaper of ring and tree. Between two
    planned sizes of a collective the border is their geometric mean; the smallest and the largest size reach to the
    ends. Calls that the plan does not have (another collective, other groups) are left to NCCL, or run as rings where
    the table is for the example plugin.

    Args:
        plan: the plan.
        workload: the step that it was made for.
        cluster: the cluster on which the step runs.
        costs: the cost model; None simulates.
        plugin: "stretto" or "example", the plugin that is to read the table.

    Returns:
        The lines in the order in which the plugin tries them, and the sentences.

    Raises:
        PlanMismatch: the plan is for another workload or cluster.
        InvalidInput: there is no such plugin.
    """
    if plugin not in PLUGINS:
        raise unknown("tuner plugin", plugin, PLUGINS)
    plan.check(workload, cluster)
    model = costs if costs is not None else simulated_costs(cluster)
    planned: dict[tuple[str, int, int], dict[int, tuple[str, str]]] = {}
    most: dict[tuple[str, int, int], int] = {}
    left_out = []
    for op in plan.ops:
        if op.kind not in COLLECTIVES:
            left_out.append(f"{op.op}: NCCL's tuner does not know {op.kind}")
            continue
        groups = workload.groups_of(workload.op(op.op))
        algorithm, why = _nccl_algorithm(op, groups, cluster, model)
        if why:
            left_out.append(f"{op.op}: {why}")
        if algorithm is None:
            continue
        usual = bindings_for(cluster, groups)[0].channels
        for group in groups:
            shape = (COLLECTIVES[op.kind], *shape_of(cluster, group))
            most[shape] = max(most.get(shape, 0), most_channels(cluster, group, usual))
        for shape in dict.fromkeys((COLLECTIVES[op.kind], *shape_of(cluster, group)) for group in groups):
            sizes = planned.setdefault(shape, {})
            known, first = sizes.setdefault(round(op.nbytes), (algorithm, op.op))
            if known != algorithm:
                left_out.append(f"{op.op}: NCCL cannot tell it from {first}, which has {known}, not {algorithm}")
    lines: list[TunerLine] = []
    for (collective, nodes, ranks), sizes in planned.items():
        every = sorted(sizes)
        borders = [isqrt(low * high) for low, high in pairwise(every)]
        ranges = zip(every, [-1, *borders], [*borders, MAX_BYTES], strict=True)
        parts = [(low + 1, high, sizes[size][0]) for size, low, high in ranges]
        if plugin == "stretto":
            lines += _joined(
                TunerLine(
                    collective=collective, min_bytes=low, max_bytes=high, algorithm=algorithm, protocol=ANY,
                    nodes=nodes, ranks=ranks,
                )
                for low, high, algorithm in parts
            )  # fmt: skip
        else:
            lines += _covering(collective, nodes, ranks, parts, most[collective, nodes, ranks])
    if plugin == "stretto":
        return lines, left_out
    everyone = most_channels(cluster, range(cluster.num_devices), default_binding(cluster).channels)
    for collective in COLLECTIVES.values():
        lines += _covering(collective, -1, -1, [(0, MAX_BYTES, "ring")], everyone)
    return lines, left_out


def shape_of(cluster: Cluster, group: Sequence[int]) -> tuple[int, int]:
    """The number of hosts and of ranks of a group, which is all that NCCL's tuner knows of it."""
    return len(set(cluster.hosts_of(group).tolist())), len(group)


def most_channels(cluster: Cluster, group: Iterable[int], channels: Sequence[str]) -> int:
    """The number of NCCL channels for the links of a group's ranks.

    This is an assumption: enough channels for all of a rank's links at `CHANNEL_GB_PER_S` each, from `LEAST_CHANNELS`
    to `MOST_CHANNELS`. NCCL takes the number as the most, and never uses more channels than it has set up.

    Args:
        cluster: the cluster.
        group: the ranks.
        channels: names of the cluster's channels whose links count.

    Returns:
        The number of channels, 2..32.
    """
    held = [cluster.channels.index(name) for name in channels if name in cluster.channels]
    counted = np.isin(cluster.link_channel, held)
    rates = np.bincount(cluster.link_src[counted], weights=cluster.link_gb_per_s[counted], minlength=cluster.num_nodes)
    rate = max((float(rates[rank]) for rank in group), default=0.0)
    return min(max(ceil(rate / CHANNEL_GB_PER_S), LEAST_CHANNELS), MOST_CHANNELS)


def told(lines: Iterable[TunerLine], collective: str, nbytes: float, nodes: int, ranks: int) -> TunerLine | None:
    """The line that NCCL's example plugin would take for a call, if NCCL can run everything that lines name.

    Args:
        lines: the table.
        collective: NCCL's name of the collective, such as "allreduce".
        nbytes: size of the call in bytes.
        nodes: number of hosts of the group.
        ranks: number of ranks of the group.

    Returns:
        The first line that fits; None if there is none.
    """
    for line in lines:
        fits = line.min_bytes <= nbytes <= line.max_bytes and line.nodes in (-1, nodes) and line.ranks in (-1, ranks)
        if line.collective == collective and fits:
            return line
    return None


def _covering(
    collective: str, nodes: int, ranks: int, parts: Iterable[tuple[int, int, str]], most: int
) -> list[TunerLine]:
    """Lines for (from, to, algorithm), cut where protocol or number of channels change.

    If NCCL cannot run a low-latency protocol, it goes on to the next line that fits, so a line with Simple follows.
    """
    cuts = {LL_UP_TO_BYTES, LL128_UP_TO_BYTES}
    cuts |= {CHANNEL_BYTES << doubled for doubled in range(1, most.bit_length()) if 1 << doubled < most}
    preferred: list[TunerLine] = []
    for first, last, algorithm in parts:
        ends = sorted(cut for cut in cuts if first <= cut < last)
        for low, high in zip([first, *(end + 1 for end in ends)], [*ends, last], strict=True):
            preferred.append(
                TunerLine(
                    collective=collective, min_bytes=low, max_bytes=high, algorithm=algorithm,
                    protocol=_protocol(high), channels=min(most, max(LEAST_CHANNELS, high // CHANNEL_BYTES)),
                    nodes=nodes, ranks=ranks,
                )
            )  # fmt: skip
    behind = [replace(line, protocol="simple") for line in preferred if line.protocol != "simple"]
    return [*_joined(preferred), *_joined(behind)]


def _joined(lines: Iterable[TunerLine]) -> list[TunerLine]:
    """The same table with neighboring ranges of equal lines merged."""
    found: list[TunerLine] = []
    for line in lines:
        before = found[-1] if found else line
        joins = before is not line and before.max_bytes + 1 == line.min_bytes
        if joins and replace(before, min_bytes=line.min_bytes, max_bytes=line.max_bytes) == line:
            found[-1] = replace(line, min_bytes=before.min_bytes)
        else:
            found.append(line)
    return found


def write_tuner_csv(
    plan: Plan, workload: Workload, cluster: Cluster, path: str | Path, costs: CostModel | None = None,
    *, plugin: str = "stretto",
) -> list[str]:  # fmt: skip
    """Write the table for ``NCCL_TUNER_CONFIG_FILE``.

    Args:
        plan: the plan.
        workload: the step that it was made for.
        cluster: the cluster on which the step runs.
        path: file to write.
        costs: the cost model; None simulates.
        plugin: "stretto" or "example", the plugin that is to read the table.

    Returns:
        One sentence for each decision that NCCL cannot be told.

    Raises:
        PlanMismatch: the plan is for another workload or cluster.
        InvalidInput: the file cannot be written.
    """
    lines, left_out = tuner_lines(plan, workload, cluster, costs, plugin=plugin)
    comments = [
        f"{plan.workload} on {plan.cluster}, plan {plan.hash}",
        "for libnccl-tuner-stretto.so: what no line serves is left to NCCL"
        if plugin == "stretto"
        else "NCCL's example plugin gives one channel to what no line serves: all calls have one, the last lines any",
        ",".join(FIELDS[:8]),
    ]
    text = [*map(_comment, comments), *map(str, lines), *(_comment(f"left out: {why}") for why in left_out)]
    write_file(path, "\n".join(text) + "\n")
    return left_out


def _comment(text: str) -> str:
    """A comment line that NCCL's reader skips; line breaks and other special characters in names are replaced."""
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in f"# {text}")[:MAX_LINE]


def tuner_library() -> Path:
    """The path of our own tuner plugin, for ``NCCL_TUNER_PLUGIN``; raises `InvalidInput` where it was not built."""
    return _plugin("tuner")


def profiler_library() -> Path:
    """The path of our own profiler plugin, for ``NCCL_PROFILER_PLUGIN``; raises `InvalidInput` where it was not built.

    It writes what collectives cost into the folder STRETTO_PROFILE, which `read_measurements` reads.
    """
    return _plugin("profiler")


def _plugin(kind: str) -> Path:
    path = Path(_native.__file__).parent / "nccl" / f"libnccl-{kind}-stretto.so"
    if not path.exists():
        raise InvalidInput(f"{path}: the plugin was not built; install stretto again")
    return path


def read_tuner_csv(path: str | Path) -> list[TunerLine]:
    """Read a tuner's table by the plugin's own rules, independently of the writer.

    Channels, nodes and ranks are at least 1, or -1: any number of nodes and ranks, and for channels the plugin's
    default (NCCL's example: one).
    """
    lines = []
    for number, text in enumerate(read_text(path, max_bytes=1 << 20).splitlines(), 1):
        if not text.strip() or text.startswith("#"):
            continue
        cells = [cell.strip() for cell in text.split(",")]
        where = f"{path}:{number}"
        if len(text) > MAX_LINE or not 8 <= len(cells) <= 10:
            raise InvalidInput(f"{where}: must be 8 to 10 fields in at most {MAX_LINE} characters")
        for name, value, choices in (
            ("collective_type", cells[0], tuple(COLLECTIVES.values())),
            ("algorithm", cells[3], ALGORITHMS),
            ("protocol", cells[4], PROTOCOLS),
        ):
            if value not in choices:
                raise InvalidInput(f"{where}: {name}: must be one of {', '.join(choices)}, not {value!r}")
        low, high, channels, nodes, ranks = (_number(cells[at], FIELDS[at], where) for at in (1, 2, 5, 6, 7))
        if not 0 <= low <= high <= MAX_BYTES:
            raise InvalidInput(f"{where}: min_bytes: must be 0..max_bytes, not {low}")
        for at, (least, most) in LIMITS.items():
            number = _number(cells[at], FIELDS[at], where) if at < len(cells) else -1
            if number != -1 and not least <= number <= most:
                raise InvalidInput(f"{where}: {FIELDS[at]}: must be {least}..{most}, or -1 for any, not {number}")
        if 0 < ranks < nodes:
            raise InvalidInput(f"{where}: nRanks: {ranks} ranks cannot be on {nodes} nodes")
        lines.append(
            TunerLine(
                collective=cells[0], min_bytes=low, max_bytes=high, algorithm=cells[3], protocol=cells[4],
                channels=channels, nodes=nodes, ranks=ranks,
            )
        )  # fmt: skip
    return lines


def _number(text: str, name: str, where: str) -> int:
    if not re.fullmatch("-?[0-9]{1,20}", text):
        raise InvalidInput(f"{where}: {name}: must be a number, not {text[:40]!r}")
    return int(text)


def _nccl_algorithm(
    op: OpPlan, groups: tuple[tuple[int, ...], ...], cluster: Cluster, costs: CostModel
) -> tuple[str | None, str]:
    """The algorithm that NCCL is told for an op (None: nothing), and the decisions of the plan that this leaves out."""
    usual = bindings_for(cluster, groups)[0].channels
    names = {motif.algorithm for motif in op.motifs}
    if NCCL in names:
        return None, "measured as NCCL runs it by itself, which cannot be told; a ring is"
    own = [
        nccl
        for nccl, known in NCCL_NAMES.items()
        if names <= set(known) and (nccl == "ring" or op.kind == "all_reduce")
    ]
    if own and _whole_groups(op, groups) and all(motif.channels == usual for motif in op.motifs):
        pieces = len(op.motifs)
        return own[0], f"its {pieces} pieces; NCCL runs it whole" if pieces > 1 else ""
    if op.kind != "all_reduce":
        return None, f"NCCL has no {op.option}"
    motion = Motion(kind=op.kind, groups=groups, channels=usual)
    found: dict[str, float] = {}
    for nccl, known in NCCL_NAMES.items():
        for name in set(known) & set(costs.algorithms(motion, op.nbytes)):
            try:
                us = costs.cost(motion, op.nbytes, name).us
            except Infeasible:
                continue
            found[nccl] = min(us, found.get(nccl, us))
    if not found:
        return None, f"NCCL has no {op.option}"
    best = min(found, key=lambda nccl: found[nccl])
    both = ", ".join(f"{nccl} {us:.0f} us" for nccl, us in found.items())
    return best, f"NCCL has no {op.option}; it gets {best}, the cheapest there is ({both})"


def _whole_groups(op: OpPlan, groups: tuple[tuple[int, ...], ...]) -> bool:
    """Whether every motif covers a whole group: the op itself, or the two halves of a ring, perhaps in segments."""
    kinds = {CODES[op.kind], *(("RS", "AG") if op.kind == "all_reduce" else ())}
    whole = {frozenset(group) for group in groups}
    return all(
        leaf.kind in kinds and frozenset(leaf.ranks) in whole and all(leaf.shards)
        for leaf in parse(op.expression).leaves
    )


def _protocol(nbytes: int) -> str:
    if nbytes <= LL_UP_TO_BYTES:
        return "ll"
    return "ll128" if nbytes <= LL128_UP_TO_BYTES else "simple"
