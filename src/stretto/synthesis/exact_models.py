# SPDX-License-Identifier: Apache-2.0
"""The time-indexed models of exact mode, and the two solvers for them."""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..collectives import Collective
from ..errors import Infeasible
from ..solvers import cp_sat
from ..solvers.linear import LinearProgram, ProgramArrays
from .exact_grid import Grid, HopNetwork, Move

MAX_VARIABLES = 60_000


@dataclass(eq=False)
class SlotModel(ABC):
    """A model with binary variables "stage j of hop h begins to send chunk c in slot t", and rows over them.

    Rows are ``sum(positive) - sum(negative) <= bound``, or equal to it.
    """

    collective: Collective
    net: HopNetwork
    grid: Grid
    slots: int = 0
    rigid: bool = False
    """Whether a message crosses all links of its route without waiting on the way."""
    rows: list[cp_sat.Row] = field(default_factory=list)
    keys: list[tuple[int, int, int, int]] = field(default_factory=list)
    taken: dict[tuple[int, int], list[int]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        if self.slots:
            self.build()

    @abstractmethod
    def build(self) -> None:
        """Add all variables and rows to the model; called once, when the number of slots is known."""

    def at_most(self, positive: list[int], negative: list[int], bound: int = 0) -> None:
        """Add the row ``sum(positive) - sum(negative) <= bound``, unless it always holds.

        Args:
            positive: Variables with factor 1.
            negative: Variables with factor -1.
            bound: The bound.
        """
        if len(positive) > bound:
            self.rows.append((positive, negative, bound, False))

    def exactly(self, positive: list[int], bound: int = 1) -> None:
        """Add the row ``sum(positive) == bound``."""
        self.rows.append((positive, [], bound, True))

    def hop_variables(self, chunk: int, hop: int, first: float, last: float, tag: int = 0) -> HopVariables:
        """Add the variables of one chunk on one hop.

        Args:
            chunk: The chunk (or whatever the model numbers).
            hop: The hop.
            first: The first slot in which the hop may begin.
            last: The last slot in which it may begin, if it is not delayed on the way.
            tag: 1 for the way out of an all-reduce's root, which has variables of its own.

        Returns:
            The variables of starts and of arrivals.

        Raises:
            Infeasible: The model has too many variables.
        """
        lead = 0
        begins: list[tuple[int, int]] = []
        before: list[tuple[int, int]] = []
        slots = range(int(max(first, 0)), int(min(last, self.slots)) + 1)
        for stage, gap in enumerate(self.grid.leads[hop]):
            if stage == 0 or not self.rigid:
                made = [(t + lead, len(self.keys) + at) for at, t in enumerate(slots)]
                self.keys += [(chunk, hop + tag * len(self.net.src), stage, t) for t, _ in made]
            else:
                made = [(t + lead, v) for t, v in begins]
            if len(self.keys) > MAX_VARIABLES:
                raise Infeasible(f"exact: needs more than {MAX_VARIABLES} variables; this mode is for small cases")
            for t, variable in made:
                for slot in range(t, t + self.grid.busy[hop][stage]):
                    self.taken[self.net.routes[hop][stage], slot].append(variable)
            if stage == 0:
                begins = made
            elif not self.rigid:
                self.follow(made, before)
            before = [(t + gap, v) for t, v in made]
            lead += gap
        return HopVariables(begins=begins, arrivals=before)

    def follow(self, later: Sequence[tuple[int, int]], earlier: Sequence[tuple[int, int]], held: int = 0) -> None:
        """Add rows: by any slot, no more begins than has arrived by then, plus what was held from the start.

        Args:
            later: (slot, variable) of the sends that begin.
            earlier: (slot, variable) of the arrivals.
            held: How many chunks the rank holds from the start.
        """
        for t in sorted({t for t, _ in later}):
            self.at_most([v for s, v in later if s <= t], [v for s, v in earlier if s <= t], held)

    def close(self) -> None:
        """Add the rows that let every link send one chunk at a time; called after all variables exist."""
        rows = {tuple(sorted(variables)) for variables in self.taken.values()}
        for row in sorted(rows):
            self.at_most(list(row), [], 1)

    def moves(self, values: Sequence[bool]) -> list[Move]:
        """The sends of a solution, without those that no rank needs."""
        count = len(self.net.src)
        last = [0 if self.rigid else len(leads) - 1 for leads in self.grid.leads]
        begun: dict[tuple[int, int], int] = {}
        for (c, h, stage, t), on in zip(self.keys, values, strict=True):
            if on and stage == 0:
                begun[c, h] = min(t, begun.get((c, h), t))
        sent = [
            (c, h, begun[c, h]) for (c, h, stage, _), on in zip(self.keys, values, strict=True)
            if on and stage == last[h % count]
        ]  # fmt: skip
        return self.needed(sorted(sent, key=lambda move: (move[2], move[1], move[0])))

    def needed(self, moves: list[Move]) -> list[Move]:
        """The moves that help to bring a chunk to a rank that wants it; all of them by default."""
        return moves

    def most(self, slots: int, ranks: Iterable[int], *, last: bool) -> float:
        """The most chunks that ranks can receive (or send) in a number of slots.

        Args:
            slots: The number of slots.
            ranks: The ranks.
            last: True for what they receive over the last links of hops, False for what they send over the first.

        Returns:
            The number of chunks, possibly infinite.
        """
        net, at, chosen = self.net, -1 if last else 0, set(ranks)
        ends = net.dst if last else net.src
        links = {net.routes[h][at]: self.grid.busy[h][at] for h, end in enumerate(ends) if end in chosen}
        return sum(slots // busy if busy else math.inf for busy in links.values())

    def solve(self, solver: str, limit_s: float, seed: int) -> tuple[str, list[bool] | None]:
        """Decide whether a schedule exists.

        Args:
            solver: "highs" or "cp-sat".
            limit_s: The seconds that the solver may take.
            seed: The seed of the solver.

        Returns:
            ``feasible`` with the values of the variables, or ``infeasible`` or ``unknown`` with None.
        """
        if any(equal and bound > len(positive) for positive, _, bound, equal in self.rows):
            return "infeasible", None
        return _SOLVE[solver](self, max(limit_s, 0.1), seed)


@dataclass(frozen=True, kw_only=True)
class HopVariables:
    """The variables of one chunk on one hop: (slot, variable) of its starts, and of its arrivals."""

    begins: list[tuple[int, int]]
    arrivals: list[tuple[int, int]]


class CopyModel(SlotModel):
    """The model of copying: chunks go from ranks that have them to ranks that want them; any rank may relay."""

    def wants(self) -> tuple[list[set[int]], list[set[int]]]:
        """For each chunk, the ranks that have it, and the other ranks that want it."""
        c = self.collective
        has: list[set[int]] = [set() for _ in range(c.num_chunks)]
        wants: list[set[int]] = [set() for _ in range(c.num_chunks)]
        for rank in range(c.num_ranks):
            for chunk in c.inputs(rank).tolist():
                has[chunk].add(rank)
            for chunk in c.outputs(rank).tolist():
                wants[chunk].add(rank)
        return has, [want - have for want, have in zip(wants, has, strict=True)]

    def single(self) -> bool:
        """Whether each chunk goes from one rank to at most one other."""
        has, wants = self.wants()
        return all(len(want) <= 1 and len(have) == 1 for have, want in zip(has, wants, strict=True))

    def least_slots(self) -> int:
        """A lower bound on the slots: by distance, by what each rank must receive, and by what all ranks must send."""
        has, wants = self.wants()
        far = self.net.distances(self.grid)
        least = 1
        need = [0] * self.collective.num_ranks
        for chunk, want in enumerate(wants):
            for rank in want:
                distance = min(far[a, rank] for a in has[chunk])
                if not math.isfinite(distance):
                    raise Infeasible(f"exact: no route brings chunk {chunk} to rank {rank} on {self.net.cluster.name}")
                least = max(least, int(distance))
                need[rank] += 1
        for rank, count in enumerate(need):
            while self.most(least, [rank], last=True) < count:
                least += 1
        while self.most(least, range(len(need)), last=False) < sum(need):
            least += 1
        return least

    def build(self) -> None:
        """Add rows: a rank that wants a chunk receives it once, others at most once, and no rank sends a chunk before
        it has arrived."""
        net, grid = self.net, self.grid
        has, wants = self.wants()
        far = net.distances(grid)
        for chunk, (have, want) in enumerate(zip(has, wants, strict=True)):
            if not want:
                continue
            soonest = far[sorted(have)].min(axis=0)
            to_go = far[:, sorted(want)].min(axis=1)
            into: list[list[HopVariables]] = [[] for _ in range(self.collective.num_ranks)]
            starts: list[tuple[int, HopVariables]] = []
            for h, (a, b) in enumerate(zip(net.src, net.dst, strict=True)):
                last = self.slots - grid.arrives[h] - to_go[b]
                if b in have or soonest[a] > last:
                    continue
                made = self.hop_variables(chunk, h, soonest[a], last)
                into[b].append(made)
                starts.append((a, made))
            for rank, ways in enumerate(into):
                once = [v for way in ways for _, v in way.arrivals]
                if rank in want:
                    self.exactly(once)
                else:
                    self.at_most(once, [], 1)
            for a, made in starts:
                if a not in have:
                    self.follow(made.begins, [pair for way in into[a] for pair in way.arrivals])
        self.close()

    def needed(self, moves: list[Move]) -> list[Move]:
        """The moves without relaying to ranks that neither want a chunk nor pass it on."""
        _, wants = self.wants()
        used = {(c, r) for c, want in enumerate(wants) for r in want}
        kept = []
        for c, h, t in reversed(moves):
            if (c, self.net.dst[h]) in used:
                used.add((c, self.net.src[h]))
                kept.append((c, h, t))
        return kept[::-1]


class SingleDestination(CopyModel):
    """The model of collectives in which every chunk goes to one rank only.

    Chunks for the same rank are interchangeable on the way, so variables say "some chunk for rank d", and chunks are
    assigned afterwards.
    """

    def supply(self) -> dict[int, dict[int, list[int]]]:
        """For each destination, the chunks that each rank has for it."""
        found: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for chunk, (have, want) in enumerate(zip(*self.wants(), strict=True)):
            for rank in want:
                found[rank][min(have)].append(chunk)
        return found

    def build(self) -> None:
        """Add rows: no rank sends more than it had and received, and the destination receives all its chunks."""
        net, grid = self.net, self.grid
        far = net.distances(grid)
        for goal, given in sorted(self.supply().items()):
            soonest = far[sorted(given)].min(axis=0)
            into: list[list[tuple[int, int]]] = [[] for _ in range(self.collective.num_ranks)]
            out: list[list[tuple[int, int]]] = [[] for _ in range(self.collective.num_ranks)]
            for h, (a, b) in enumerate(zip(net.src, net.dst, strict=True)):
                if a == goal:
                    continue
                made = self.hop_variables(goal, h, soonest[a], self.slots - grid.arrives[h] - far[b, goal])
                into[b] += made.arrivals
                out[a] += made.begins
            self.exactly([v for _, v in into[goal]], sum(map(len, given.values())))
            for rank in range(self.collective.num_ranks):
                self.follow(out[rank], into[rank], len(given.get(rank, [])))
        self.close()

    def moves(self, values: Sequence[bool]) -> list[Move]:
        """The sends of a solution: a rank sends the chunk that it has had longest."""
        stages: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for (goal, hop, stage, t), on in zip(self.keys, values, strict=True):
            if on:
                stages[goal, hop, stage].append(t)
        sent = []
        for (goal, hop, stage), times in stages.items():
            leads = self.grid.leads[hop][stage:]
            if self.rigid or len(leads) == 1:
                begun = sorted(stages[goal, hop, 0])
                sent += [(a, b + sum(leads), hop, goal) for a, b in zip(begun, sorted(times), strict=False)]
        held = {(goal, r): [(0, c) for c in chunks] for goal, at in self.supply().items() for r, chunks in at.items()}
        ways: dict[int, list[Move]] = defaultdict(list)
        for begins, arrives, hop, goal in sorted(sent):
            here = held.get((goal, self.net.src[hop]))
            if not here or here[0][0] > begins:
                continue
            _, chunk = heapq.heappop(here)
            ways[chunk].append((chunk, hop, begins))
            heapq.heappush(held.setdefault((goal, self.net.dst[hop]), []), (arrives, chunk))
        return sorted((m for way in ways.values() for m in self.straight(way)), key=lambda move: (move[2], move[1]))

    def straight(self, way: list[Move]) -> list[Move]:
        """A chunk's path without loops that come back to a rank where it was before."""
        kept: list[Move] = []
        for move in way:
            at = next((i for i, (_, hop, _) in enumerate(kept) if self.net.src[hop] == self.net.dst[move[1]]), None)
            if at is None:
                kept.append(move)
            else:
                del kept[at:]
        return kept


class AllReduceModel(SlotModel):
    """The model of all-reduce: chunk c is reduced to rank ``c // (chunks per rank)`` by a tree, then sent to all."""

    def least_slots(self) -> int:
        """A lower bound on the slots: ranks receive each chunk 2 (n - 1) times in all, whatever the algorithm."""
        c, net = self.collective, self.net
        far = net.distances(self.grid)
        if not np.isfinite(far).all():
            a, b = np.argwhere(~np.isfinite(far))[0]
            raise Infeasible(f"exact: no route from rank {a} to rank {b} on {net.cluster.name}")
        least = max(1, int(far.max()))
        ranks = range(c.num_ranks)
        needed = 2 * (c.num_ranks - 1) * c.num_chunks
        while min(self.most(least, ranks, last=True), self.most(least, ranks, last=False)) < needed:
            least += 1
        return least

    def build(self) -> None:
        """Add the variables and rows of all chunks, which interact on links only."""
        far = self.net.distances(self.grid)
        each = self.collective.num_chunks // self.collective.num_ranks
        for chunk in range(self.collective.num_chunks):
            self.reduce_and_send(chunk, chunk // each, far)
        self.close()

    def reduce_and_send(self, chunk: int, root: int, far: NDArray[np.float64]) -> None:
        """Add rows: every rank but the root sends its sum once, when it is whole, and receives the result once.

        Args:
            chunk: The chunk.
            root: The rank that it is reduced to.
            far: The least slots from rank to rank, from `HopNetwork.distances`.
        """
        net, grid, n = self.net, self.grid, self.collective.num_ranks
        gathered, spread = far[:, root].max(), far[root].max()
        up_in: list[list[HopVariables]] = [[] for _ in range(n)]
        up_out: list[list[HopVariables]] = [[] for _ in range(n)]
        down_in: list[list[HopVariables]] = [[] for _ in range(n)]
        down_out: list[list[HopVariables]] = [[] for _ in range(n)]
        for h, (a, b) in enumerate(zip(net.src, net.dst, strict=True)):
            if a != root:
                last = self.slots - spread - far[b, root] - grid.arrives[h]
                made = self.hop_variables(chunk, h, 0, last)
                up_in[b].append(made)
                up_out[a].append(made)
            if b != root:
                made = self.hop_variables(chunk, h, gathered + far[root, a], self.slots - grid.arrives[h], tag=1)
                down_in[b].append(made)
                down_out[a].append(made)
        for rank in range(n):
            if rank != root:
                self.exactly([v for way in up_out[rank] for _, v in way.begins])
                self.exactly([v for way in down_in[rank] for _, v in way.arrivals])
                self.whole(up_in[rank], [pair for way in up_out[rank] for pair in way.begins])
            for way in down_out[rank]:
                if rank == root:
                    self.whole(up_in[rank], way.begins)
                else:
                    self.follow(way.begins, [pair for come in down_in[rank] for pair in come.arrivals])

    def whole(self, come: list[HopVariables], go: list[tuple[int, int]]) -> None:
        """Add rows: no summand arrives after the sum has been sent on."""
        for way in come:
            for t in sorted({t for t, _ in go}):
                late = [v for s, v in way.arrivals if s > t]
                if late:
                    self.at_most(late + [v for s, v in go if s <= t], [], 1)


def _solve_cp_sat(model: SlotModel, limit_s: float, seed: int) -> tuple[str, list[bool] | None]:
    return cp_sat.decide(len(model.keys), model.rows, limit_s=limit_s, seed=seed)


def _solve_highs(model: SlotModel, limit_s: float, seed: int) -> tuple[str, list[bool] | None]:
    count = len(model.keys)
    program = LinearProgram(random_seed=seed, time_limit=limit_s)
    program.load(
        ProgramArrays(
            cost=np.zeros(count),
            lower=np.zeros(count),
            upper=np.ones(count),
            integer=[True] * count,
            row_lower=np.array([bound if equal else -math.inf for _, _, bound, equal in model.rows], np.float64),
            row_upper=np.array([bound for _, _, bound, _ in model.rows], np.float64),
            start=np.cumsum([0, *(len(p) + len(m) for p, m, _, _ in model.rows)]),
            index=[v for p, m, _, _ in model.rows for v in (*p, *m)],
            value=[s for p, m, _, _ in model.rows for s in [1.0] * len(p) + [-1.0] * len(m)],
        )
    )
    found = program.solve()
    if found.status == "infeasible":
        return "infeasible", None
    return ("feasible", [value > 0.5 for value in found.values.tolist()]) if found.has_values else ("unknown", None)


_SOLVE = {"cp-sat": _solve_cp_sat, "highs": _solve_highs}
