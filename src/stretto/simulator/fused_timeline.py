# SPDX-License-Identifier: Apache-2.0
"""A program as the GPU executor runs it, step by step, as a timeline."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..cluster import Cluster
from ..errors import InvalidInput
from ..programs import Program
from ..programs.lowered import Lowered
from ..units import format_bytes
from .priced_fused import usual_call
from .runtimes import Runtime
from .timeline import Timeline

NAMES = ("copy", "add")


def simulate_fused(
    program: Program | Lowered,
    cluster: Cluster,
    nbytes: float,
    prices: Runtime,
    contention: str | None,
    alpha: str,
    channels: Iterable[str] | None,
    load_slots: int = 0,
) -> Timeline:
    """What `simulate` does for a runtime that has prices for steps and none for instructions.

    Args:
        program: The program.
        cluster: The cluster.
        nbytes: The bytes that the collective moves, > 0.
        prices: The runtime.
        contention: How messages share links; None: as the runtime says.
        alpha: "pipelined" or "blocking".
        channels: Must be None: the memory of a GPU has one route to each peer.
        load_slots: As in `simulate`.

    Returns:
        The timeline: a span for each step.

    Raises:
        InvalidInput: The ranks are on several hosts, or channels are given.
        VerificationError: The program is wrong.
    """
    if channels is not None:
        raise InvalidInput(f"channels: {prices.name} reaches the memory of peers by one route; leave them out")
    if len(set(cluster.hosts_of(program.collective.ranks).tolist())) > 1:
        raise InvalidInput(f"runtime: {prices.name} has prices for ranks on one host; these are on several")
    call = usual_call(program, cluster, nbytes=nbytes, runtime=prices)
    modes = {"contention": contention or prices.contention, "alpha": alpha, "load_slots": load_slots}
    times, place = call.graph.times(prices, **modes)
    steps = call.graph.steps
    owner = np.full(len(place), -1, np.int32)
    for at, (_, events) in enumerate(steps):
        owner[place[[events.begun, *events.done]]] = at
    path = owner[times.critical_path]
    path = path[path >= 0]
    keep = np.append(np.ones(min(len(path), 1), np.bool_), path[1:] != path[:-1])
    facts = {
        "program": program.name,
        "cluster": cluster.name,
        "bytes": format_bytes(nbytes),
        "runtime": prices.name,
        "steps": call.form,
        "alpha": alpha,
    }
    return Timeline(
        total_us=float(times.end_us.max(initial=0.0)),
        rank=np.array([step.rank for step, _ in steps], np.int32),
        stream=np.zeros(len(steps), np.int32),
        name=np.array([step.adds for step, _ in steps], np.int32),
        start_us=times.start_us[place[[events.begun for _, events in steps]]] if steps else np.zeros(0),
        end_us=np.array([times.end_us[place[list(events.done)]].max() for _, events in steps], np.float64),
        nbytes=np.array([sum(part for _, part in (*step.inward, *step.outward)) for step, _ in steps], np.float64),
        streams=("steps",),
        names=NAMES,
        link_names=tuple(cluster.link_name(i) for i in range(cluster.num_links)),
        link_busy_us=times.link_busy_us,
        link_bytes=times.link_bytes,
        link_load=times.link_load,
        critical_path=path[keep],
        facts=tuple(facts.items()),
    )
