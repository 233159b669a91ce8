# SPDX-License-Identifier: Apache-2.0
"""Writes several schedules of one step as one trace for Perfetto, each with processes of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..simulator import Timeline
from .perfetto import write_perfetto


def write_plan_trace(timelines: Mapping[str, Timeline], path: str | Path) -> None:
    """Write timelines one below the other on the same clock; a process is named after its timeline and its rank."""
    streams = list(dict.fromkeys(stream for one in timelines.values() for stream in one.streams))
    names = list(dict.fromkeys(name for one in timelines.values() for name in one.names))
    number = {name: at for at, name in enumerate(names)}
    lane = {stream: at for at, stream in enumerate(streams)}
    each = list(timelines.values())
    ranks = 1 + max(int(one.rank.max(initial=0)) for one in each)
    facts = [(f"{title}: {key}", value) for title, one in timelines.items() for key, value in one.facts]
    whole = Timeline(
        total_us=max(one.total_us for one in each),
        rank=np.concatenate([one.rank + at * ranks for at, one in enumerate(each)]),
        stream=np.concatenate([np.array([lane[s] for s in one.streams], np.int32)[one.stream] for one in each]),
        name=np.concatenate([np.array([number[n] for n in one.names], np.int32)[one.name] for one in each]),
        start_us=np.concatenate([one.start_us for one in each]),
        end_us=np.concatenate([one.end_us for one in each]),
        nbytes=np.concatenate([one.nbytes for one in each]),
        streams=tuple(streams),
        names=tuple(names),
        facts=tuple(facts),
    )
    titles = {
        at * ranks + rank: f"{title}, rank {rank}"
        for at, (title, one) in enumerate(timelines.items())
        for rank in np.unique(one.rank).tolist()
    }
    write_perfetto(whole, path, processes=titles)
