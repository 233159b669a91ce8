"""What NCCL can express by itself: a plan's algorithms as the table of NCCL's example tuner plugin.

One line is ``collective,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks``; the first that fits wins and
-1 means any. The order of motifs, their pieces and their links have no place in it; a comment says what was left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, pairwise
from math import isqrt
from pathlib import Path

from ..cluster import Cluster
from ..errors import InvalidInput
from ..files import read_text
from ..workload import Workload
from .channels import hosts_of
from .plan import OpPlan, Plan

COLLECTIVES = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
PROTOCOLS = ("ll", "ll128", "simple")
MAX_LINE = 255
MAX_BYTES = (1 << 63) - 1

LL_UP_TO_BYTES = 64 << 10
LL128_UP_TO_BYTES = 4 << 20
"""Protocols are not part of our model: these are the usual sizes up to which the low-latency ones pay."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the table."""

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


def tuner_lines(plan: Plan, workload: Workload, cluster: Cluster) -> tuple[list[Line], list[str]]:
    """The table, and one sentence for each comm-op that NCCL cannot be told about."""
    plan.check(workload, cluster)
    told: dict[tuple[str, int, int], dict[int, tuple[str, str]]] = {}
    left_out = []
    for op in plan.ops:
        algorithm = _nccl_algorithm(op)
        if op.kind not in COLLECTIVES:
            left_out.append(f"{op.op}: NCCL's tuner does not know {op.kind}")
            continue
        if algorithm is None:
            left_out.append(f"{op.op}: NCCL has no {op.option}")
            continue
        groups = workload.groups_of(workload.op(op.op))
        shapes = [(len(set(hosts_of(cluster, group).tolist())), len(group)) for group in groups]
        for nodes, ranks in dict.fromkeys(shapes):
            sizes = told.setdefault((COLLECTIVES[op.kind], nodes, ranks), {})
            known, first = sizes.setdefault(round(op.nbytes), (algorithm, op.op))
            if known != algorithm:
                left_out.append(f"{op.op}: NCCL cannot tell it from {first}, which has {known}, not {algorithm}")
    lines = []
    for (collective, nodes, ranks), sizes in told.items():
        runs = [list(run) for _, run in groupby(sorted(sizes), key=lambda size: (sizes[size][0], _protocol(size)))]
        # Between two sizes with different answers the border is their geometric mean.
        borders = [isqrt(low[-1] * high[0]) for low, high in pairwise(runs)]
        for run, low, high in zip(runs, [-1, *borders], [*borders, MAX_BYTES], strict=True):
            lines.append(
                Line(
                    collective=collective, min_bytes=low + 1, max_bytes=high, algorithm=sizes[run[0]][0],
                    protocol=_protocol(run[0]), nodes=nodes, ranks=ranks,
                )
            )  # fmt: skip
    return lines, left_out


def write_tuner_csv(plan: Plan, workload: Workload, cluster: Cluster, path: str | Path) -> list[str]:
    """Write the table for ``NCCL_TUNER_CONFIG_FILE``; returns what was left out."""
    lines, left_out = tuner_lines(plan, workload, cluster)
    comments = [
        f"{plan.workload} on {plan.cluster}, plan {plan.hash}",
        "collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks",
    ]
    text = [*map(_comment, comments), *map(str, lines), *(_comment(f"left out: {why}") for why in left_out)]
    Path(path).write_text("\n".join(text) + "\n", encoding="ascii")
    return left_out


def _comment(text: str) -> str:
    """One line that NCCL's reader skips, whatever names are in it: a name may hold line breaks."""
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in f"# {text}")[:MAX_LINE]


def read_tuner_csv(path: str | Path) -> list[Line]:
    """Read such a table back, by its own rules, independent of what wrote it."""
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
        try:
            low, high, channels, nodes, ranks = (int(cells[at]) for at in (1, 2, 5, 6, 7))
        except ValueError:
            raise InvalidInput(f"{where}: min_bytes, max_bytes, channels, nNodes, nRanks: must be numbers") from None
        if not 0 <= low <= high <= MAX_BYTES:
            raise InvalidInput(f"{where}: min_bytes: must be 0..max_bytes, not {low}")
        lines.append(
            Line(
                collective=cells[0], min_bytes=low, max_bytes=high, algorithm=cells[3], protocol=cells[4],
                channels=channels, nodes=nodes, ranks=ranks,
            )
        )  # fmt: skip
    return lines


def _nccl_algorithm(op: OpPlan) -> str | None:
    """Ring or tree, where every motif of the op is one of the two."""
    names = {motif.algorithm for motif in op.motifs}
    if len(names) != 1:
        return None
    name = names.pop()
    if name.startswith("ring"):
        return "ring"
    return "tree" if "tree" in name and op.kind == "all_reduce" else None


def _protocol(nbytes: int) -> str:
    if nbytes <= LL_UP_TO_BYTES:
        return "ll"
    return "ll128" if nbytes <= LL128_UP_TO_BYTES else "simple"
