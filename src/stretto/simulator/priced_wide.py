# SPDX-License-Identifier: Apache-2.0
"""The time of a plan of wide steps: what its steps, signals and threadblocks cost beside what the links take."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..cluster import Cluster
from ..errors import InvalidInput
from ..programs import Program
from ..programs.formats.mscclpp_wide import MOST_THREADS, PlanForm
from ..programs.formats.mscclpp_wide_sync import StreamSync
from ..programs.wide import PACKET, WideProgram, WideStep, widen
from .network import routes_between, simulate_transfers
from .runtimes import Runtime, runtime_of

MOST_TURNS = 32
"""The most turns of a loop that are simulated; more of them are taken to be as many, each longer."""
SOFT = 4.0


def wide_time_us(
    program: Program | WideProgram,
    cluster: Cluster,
    *,
    nbytes: float,
    form: PlanForm | None = None,
    runtime: Runtime | str | Path,
) -> float:
    """Simulate a plan of wide steps as a runtime runs it.

    A step is ready when the one before it in its stream is done and the signals that it waits for have come. Its
    threadblocks then read and write, each its slice, while the data of peers travels over the links.

    Args:
        program: The program, or the wide steps that were made of it in the same form.
        cluster: The cluster.
        nbytes: The bytes that the collective moves, > 0.
        form: How the plan is carried out; by default in one threadblock.
        runtime: The runtime, its name or its file.

    Returns:
        The time until the last rank is done, in microseconds.

    Raises:
        InvalidInput: The runtime lacks the protocol, or runs fewer threadblocks.

    >>> from stretto.algorithms import algorithm
    >>> direct, cluster = algorithm("direct", "all_reduce", 8), Cluster.preset("dgx_h200")
    >>> small = {p: wide_time_us(direct, cluster, nbytes=1024, form=PlanForm(protocol=p, streams=8),
    ...     runtime="mscclpp:h200") for p in ("Simple", "LL")}
    >>> small["LL"] < small["Simple"]
    True
    """
    form, prices = form or PlanForm(), runtime_of(runtime)
    packets = form.protocol == "LL"
    wide = program if isinstance(program, WideProgram) else widen(program, packets=packets, streams=form.streams)
    blocks = wide.streams * form.slices
    if prices.max_blocks and blocks > prices.max_blocks:
        raise InvalidInput(f"form: {blocks} threadblocks are more than the {prices.max_blocks} that {prices.name} runs")
    return _Events(wide, cluster, nbytes, form, prices).total_us()


@dataclass
class _Events:
    """The events of a plan: those without links (launch, step, signal), and messages."""

    wide: WideProgram
    cluster: Cluster
    nbytes: float
    form: PlanForm
    prices: Runtime
    delay_us: list[float] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)
    message: list[tuple[int, int, int, float]] = field(default_factory=list)
    """The event, the ranks and the bytes of each message."""
    sharing: int = 1
    """How many ranks share one GPU, whose memory then is all of their links."""

    def total_us(self) -> float:
        ranks = self.wide.program.collective.num_ranks
        if self.prices.memory_gb_per_s and set(self.cluster.channels) == {"hbm"}:
            self.sharing = ranks
        blocks = self.wide.streams * self.form.slices
        begun_us = self.prices.launch_us + blocks * self.prices.block_us
        launch = [self._event(begun_us, []) for _ in range(ranks)]
        for stream in range(self.wide.streams):
            steps = [s for s in self.wide.steps if self.wide.stream[s.piece] == stream]
            if any(self.wide.slots):
                self._packets(steps, launch)
            else:
                self._signals(steps, launch, ranks)
        return self._simulate()

    def _event(self, delay_us: float, after: list[int]) -> int:
        self.delay_us.append(delay_us)
        self.after.append(after)
        return len(self.delay_us) - 1

    def _step(self, step: WideStep, after: list[int], turns: int, waits: int = 0) -> tuple[list[int], dict[int, int]]:
        """The events that mean that a step is done, and the event that brings its data to each peer."""
        share = float(self.wide.program.collective.chunk_share[0]) * self.nbytes * step.count / turns
        factor = self.prices.protocol(self.form.protocol).bytes_factor
        places = len(step.sources) + len(step.targets)
        # Nobody waits between the steps of packets, so that what they cost is in their places and their arrival.
        step_us = 0.0 if self.form.protocol == "LL" else self.prices.step_us
        ready = self._event(step_us + places * self.prices.place_us + waits * self.prices.peer_us, after)
        rates = [self.prices.us_per_byte(work) for work in ("read", "write")]
        per_byte = touched = 0.0
        for cells, rate in zip((step.sources, step.targets), rates, strict=True):
            moved = sum(factor if cell[1] == PACKET else 1.0 for cell in cells)
            per_byte, touched = per_byte + rate * moved, touched + moved
        work = share * per_byte / self.form.slices * MOST_THREADS / self.form.threads
        if self.prices.memory_gb_per_s:
            # Close to what memory can do, blocks already hinder each other: a soft maximum.
            memory = share * touched * self.sharing / (self.prices.memory_gb_per_s * 1e3)
            work = float((work**SOFT + memory**SOFT) ** (1 / SOFT))
        done, sent = [self._event(work, [ready])], {}
        for cells, inward in ((step.sources, True), (step.targets, False)):
            for peer in (cell[0] for cell in cells if cell[0] != step.rank):
                if self.sharing > 1:
                    sent[peer] = done[0]
                    continue
                event = self._event(0.0, [ready])
                ends = (peer, step.rank) if inward else (step.rank, peer)
                self.message.append((event, *ends, share * factor))
                done.append(event)
                if not inward:
                    sent[peer] = event
        return done, sent

    def _packets(self, steps: list[WideStep], launch: list[int]) -> None:
        signal_us = self.prices.protocol("LL").signal_us
        last = [[event] for event in launch]
        arrives: dict[tuple[int, str, int], list[int]] = {}
        for step in steps:
            after = list(last[step.rank])
            for cell in step.sources:
                if cell[1] == PACKET:
                    after.append(self._event(signal_us, arrives[cell]))
            done, sent = self._step(step, after, 1)
            last[step.rank] = done[:1]
            for cell in step.targets:
                if cell[1] == PACKET:
                    arrives[cell] = [done[0], sent[cell[0]]]

    def _signals(self, steps: list[WideStep], launch: list[int], ranks: int) -> None:
        sync = StreamSync(steps, ranks, packets=False)
        signal_us = self.prices.meet_us
        turns = self._turns(steps)
        last = [[event] for event in launch]
        begun = {(q, r): self._event(signal_us, [launch[q]]) for q in range(ranks) for r in sync.signals(q, 0)}
        for _ in range(turns):
            done: dict[tuple[int, int], list[int]] = {}
            at = [0] * ranks
            plan = [list(sync.schedule(r)) for r in range(ranks)]
            for step in steps:
                r = step.rank
                _, waits, _ = plan[r][at[r]]
                at[r] += 1
                after = list(last[r])
                for q, number in waits:
                    after.append(begun[q, r] if number == 0 else self._event(signal_us, done[q, number]))
                done[r, at[r]] = last[r] = self._step(step, after, turns, len(waits))[0]
        for r in range(ranks):
            heard = [self._event(signal_us, last[q]) for q in sync.last_waits(r)]
            if heard:
                self._event(len(heard) * self.prices.peer_us, [*heard, *last[r]])

    def _turns(self, steps: list[WideStep]) -> int:
        if not self.form.loop_bytes or not steps:
            return 1
        share = float(self.wide.program.collective.chunk_share[0]) * self.nbytes * steps[0].count / self.form.slices
        return int(np.clip(np.ceil(share / self.form.loop_bytes), 1, MOST_TURNS))

    def _simulate(self) -> float:
        """Run all events; messages are numbered behind those without links."""
        events, moved = len(self.delay_us), {event for event, *_ in self.message}
        quiet = [e for e in range(events) if e not in moved]
        number = {e: k for k, e in enumerate([*quiet, *(event for event, *_ in self.message)])}
        device = np.array(self.wide.program.collective.ranks, np.int32)
        src, dst = (np.array([m[k] for m in self.message], np.int32) for k in (1, 2))
        nbytes = np.array([m[3] for m in self.message], np.float64)
        _, route, ptr, links = routes_between(device[src], device[dst], nbytes, self.cluster)
        order = np.argsort([number[e] for e in range(events)])
        rows = [[number[a] for a in self.after[e]] for e in order.tolist()]
        after = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
        first = len(quiet)
        times = simulate_transfers(
            self.cluster,
            routes=(np.append(ptr, ptr[-1]), links),
            route=np.concatenate([np.full(first, len(ptr) - 1), route]).astype(np.int32),
            # Peers' slices travel side by side: every message has a connection of its own.
            connection=np.arange(events, dtype=np.int32),
            nbytes=np.concatenate([np.zeros(first), nbytes]),
            after=(after, np.array([a for row in rows for a in row], np.int32)),
            delay_us=np.array(self.delay_us)[order],
            contention=self.prices.contention,
        )
        return float(times.end_us.max(initial=0.0))
