# SPDX-License-Identifier: Apache-2.0
"""The links on which motifs of different places meet, reduced to the few that matter.

On a link that only motifs with a common end use, one motif runs at a time anyway. Of all other links those are kept
that are not always less loaded than a kept one: ten thousand links of a large cluster become a handful of resources.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from ...workload import Workload
from ..costs.costs import LinkLoads
from .problem import MotifTask, Option
from .resources import op_ends

MAX_LINKS = 256
"""The largest number of links that are kept, the busiest first; re-timing has them all."""

Options = tuple[Option, ...]
Loads = Callable[[MotifTask], LinkLoads | None]


def with_shared_links(workload: Workload, options: dict[str, Options], loads: Loads) -> dict[str, Options]:
    """The options of every comm-op, with the time that each task takes of links where it can meet other places' tasks.

    Args:
        workload: the training step.
        options: the options of every comm-op by name; equal comm-ops may share them.
        loads: gives the load of a task on links, or None where that is not known.

    Returns:
        Options with `MotifTask.shared`; the same object where nothing is shared.
    """
    ends = op_ends(workload)
    sets: dict[tuple[int, frozenset[int]], tuple[Options, list[str]]] = {}
    for op in workload.comm_ops:
        mine = options[op.name]
        sets.setdefault((id(mine), frozenset(ends[workload.index[op.name]])), (mine, []))[1].append(op.name)
    held = [ends_of for _, ends_of in sets]
    apart = _apart(held)
    if not apart.any():
        return options
    each = [made for made, _ in sets.values()]
    tasks = _Tasks(each, [bool(row.any()) for row in apart], loads)
    kept = _kept_links(tasks, apart)
    if not kept.size:
        return options
    found = dict(options)
    for number, (made, names) in enumerate(sets.values()):
        now = tuple(
            replace(option, tasks=tuple(replace(task, shared=tasks.on(number, task, kept)) for task in option.tasks))
            for option in made
        )
        found.update(dict.fromkeys(names, now))
    return found


def _apart(held: Sequence[frozenset[int]]) -> NDArray[np.bool_]:
    """For each pair of sets of ends whether they have none in common, so that both may run at once."""
    apart = np.zeros((len(held), len(held)), np.bool_)
    for a, b in combinations(range(len(held)), 2):
        apart[a, b] = apart[b, a] = held[a].isdisjoint(held[b])
    return apart


class _Tasks:
    """The distinct tasks of all sets of options, each with its time per link."""

    def __init__(self, each: Sequence[Options], wanted: Sequence[bool], loads: Loads) -> None:
        self.set_of: list[int] = []
        self._row: dict[tuple[int, object, float, str], int] = {}
        found: list[tuple[NDArray[np.int32], NDArray[np.float64]]] = []
        for number, options in enumerate(each):
            for task in (task for option in options for task in option.tasks) if wanted[number] else ():
                key = self._key(number, task)
                if key in self._row:
                    continue
                load = loads(task) if task.motion is not None else None
                if load is None:
                    continue
                self._row[key] = len(found)
                self.set_of.append(number)
                # A link cannot take longer than the task: costs between two sizes of the grid may say so.
                found.append((load.links, np.minimum(load.us_per_byte * task.nbytes, task.duration_us)))
        self.links = np.unique(np.concatenate([links for links, _ in found])) if found else np.zeros(0, np.int32)
        self.us = np.zeros((len(found), len(self.links)))
        for row, (links, us) in zip(self.us, found, strict=True):
            row[np.searchsorted(self.links, links)] = us

    @staticmethod
    def _key(number: int, task: MotifTask) -> tuple[int, object, float, str]:
        return number, task.motion, task.nbytes, task.algorithm

    def on(self, number: int, task: MotifTask, kept: NDArray[np.int64]) -> tuple[tuple[int, float], ...]:
        """The kept links that a task uses, by their position among them, and its time on each."""
        row = self._row.get(self._key(number, task))
        if row is None:
            return ()
        us = self.us[row, kept]
        return tuple((int(at), float(us[at])) for at in np.flatnonzero(us))


def _kept_links(tasks: _Tasks, apart: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The columns of `tasks.us` that matter, the busiest first."""
    used = np.zeros((len(apart), len(tasks.links)), np.bool_)
    for number, row in zip(tasks.set_of, tasks.us, strict=True):
        used[number] |= row > 0
    meets = np.flatnonzero((used & ((apart.astype(np.int64) @ used.astype(np.int64)) > 0)).any(axis=0))
    if not meets.size:
        return meets
    # Links with equal loads are one resource.
    meets = meets[np.sort(np.unique(tasks.us[:, meets], axis=1, return_index=True)[1])]
    busiest = meets[np.argsort(-tasks.us[:, meets].sum(axis=0), kind="stable")]
    kept: list[int] = []
    for link in busiest.tolist():
        column = tasks.us[:, [link]]
        if not (tasks.us[:, kept] >= column * (1 - 1e-12)).all(axis=0).any() and len(kept) < MAX_LINKS:
            kept.append(link)
    return np.array(kept, np.int64)
