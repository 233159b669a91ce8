"""What NCCL can express by itself: a plan's algorithms as the table of NCCL's example tuner plugin.

One line is ``collective,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks``; the first that fits wins and
-1 means any. The order of motifs, their pieces and their links have no place in it; a comment says what was left out.
Only sizes near those of the plan get a line: of all others NCCL knows more than the plan does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import isqrt
from pathlib import Path

from ..cluster import Cluster
from ..errors import Infeasible, InvalidInput
from ..files import read_text, write_file
from ..workload import Workload
from .channels import bindings_for
from .costs import CostModel, Motion, simulated_costs
from .measured import NCCL
from .motif import CODES
from .notation_read import parse
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
    "tree": ("double_binary_tree", "double_binary_tree:1", "binary_tree", "binary_tree:1"),
}
"""What of the library NCCL's two algorithms are; its rings broadcast and reduce as chains. Trees only all-reduce."""
NEAR = 2
"""A line reaches from 1/NEAR of a planned size to NEAR times it, or to the geometric mean with the next one."""
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


def tuner_lines(
    plan: Plan, workload: Workload, cluster: Cluster, costs: CostModel | None = None
) -> tuple[list[Line], list[str]]:
    """The table, and one sentence for all of a plan that NCCL cannot be told.

    An all-reduce that the plan moves in a way that NCCL does not have gets the cheaper of ring and tree, by `costs`
    (by default the simulator's).
    """
    plan.check(workload, cluster)
    model = costs if costs is not None else simulated_costs(cluster)
    told: dict[tuple[str, int, int], dict[int, tuple[str, str]]] = {}
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
        shapes = [(len(set(cluster.hosts_of(group).tolist())), len(group)) for group in groups]
        for nodes, ranks in dict.fromkeys(shapes):
            sizes = told.setdefault((COLLECTIVES[op.kind], nodes, ranks), {})
            known, first = sizes.setdefault(round(op.nbytes), (algorithm, op.op))
            if known != algorithm:
                left_out.append(f"{op.op}: NCCL cannot tell it from {first}, which has {known}, not {algorithm}")
    lines: list[Line] = []
    for (collective, nodes, ranks), sizes in told.items():
        mine: list[Line] = []
        every = sorted(sizes)
        borders = [isqrt(low * high) for low, high in pairwise(every)]
        for size, low, high in zip(every, [-1, *borders], [*borders, MAX_BYTES], strict=True):
            line = Line(
                collective=collective, min_bytes=max(low + 1, -(-size // NEAR)), max_bytes=min(high, size * NEAR),
                algorithm=sizes[size][0], protocol=_protocol(size), nodes=nodes, ranks=ranks,
            )  # fmt: skip
            joins = mine and mine[-1].max_bytes + 1 == line.min_bytes
            if joins and replace(mine[-1], min_bytes=line.min_bytes, max_bytes=line.max_bytes) == line:
                line = replace(line, min_bytes=mine.pop().min_bytes)
            mine.append(line)
        lines += mine
    return lines, left_out


def write_tuner_csv(
    plan: Plan, workload: Workload, cluster: Cluster, path: str | Path, costs: CostModel | None = None
) -> list[str]:
    """Write the table for ``NCCL_TUNER_CONFIG_FILE``; returns what was left out."""
    lines, left_out = tuner_lines(plan, workload, cluster, costs)
    comments = [
        f"{plan.workload} on {plan.cluster}, plan {plan.hash}",
        "collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks",
    ]
    text = [*map(_comment, comments), *map(str, lines), *(_comment(f"left out: {why}") for why in left_out)]
    write_file(path, "\n".join(text) + "\n")
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
            low, high, channels, nodes, ranks = (int(cells[at][:20]) for at in (1, 2, 5, 6, 7))
        except ValueError:
            raise InvalidInput(f"{where}: min_bytes, max_bytes, channels, nNodes, nRanks: must be numbers") from None
        if not 0 <= low <= high <= MAX_BYTES:
            raise InvalidInput(f"{where}: min_bytes: must be 0..max_bytes, not {low}")
        limits = (("channels", channels, 1 << 10), ("nNodes", nodes, 1 << 20), ("nRanks", ranks, 1 << 20))
        for key, count, most in limits:
            if count != -1 and not 1 <= count <= most:
                raise InvalidInput(f"{where}: {key}: must be 1..{most}, or -1 for any, not {count}")
        lines.append(
            Line(
                collective=cells[0], min_bytes=low, max_bytes=high, algorithm=cells[3], protocol=cells[4],
                channels=channels, nodes=nodes, ranks=ranks,
            )
        )  # fmt: skip
    return lines


def _nccl_algorithm(
    op: OpPlan, groups: tuple[tuple[int, ...], ...], cluster: Cluster, costs: CostModel
) -> tuple[str | None, str]:
    """What NCCL is told to do with an op (None: nothing), and what of the plan that leaves out."""
    usual = bindings_for(cluster, groups)[0].channels
    names = {motif.algorithm for motif in op.motifs}
    if NCCL in names:
        return None, "measured as NCCL runs it by itself, so nothing is set"
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
    """Whether every motif is of a whole group: the op itself, or the two halves of a ring, maybe in segments."""
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
