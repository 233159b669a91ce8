# SPDX-License-Identifier: Apache-2.0
"""Counting in time: an all-reduce enters groups of devices so and so often, and deep inside them lie ranks.

As in `partition`, every byte enters the H groups of a partition at least 2 (H - 1) times. That holds already for the
sum over one rank of each group. If these lie far from the links between groups, a message between groups carries
nothing of theirs at first, and is too late to serve any of them at last. `docs/bounds.md` has the proof.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from .cuts import Cut
from .net import ArcNetwork
from .relays import MessageTimes, TimedProof, Worths, by_time


def counted_in_time(
    net: ArcNetwork, times: MessageTimes, group: NDArray[np.int64], ranks: NDArray[np.int32]
) -> Iterator[TimedProof]:
    """The proof by the rank of each group that is deepest inside it; none where some group has no rank.

    Args:
        net: The links.
        times: The least alphas on them.
        group: The group of each device, 0, 1, ...
        ranks: The devices whose parts are added up, and which want the sum.

    Yields:
        At most one proof.
    """
    count = int(group.max()) + 1
    if count < 2 or len(np.unique(group[ranks])) < count:
        return
    deepest = np.zeros(count, np.int64)
    for number in range(count):
        inside = group == number
        mine = ranks[group[ranks] == number]
        depth = times.known[np.ix_(mine, ~inside)].min(axis=1) + times.known[np.ix_(~inside, mine)].min(axis=0)
        deepest[number] = mine[depth.argmax()]
    starts, serves = times.known[deepest].min(axis=0), times.known[:, deepest].min(axis=1)
    late: list[Worths] = []
    early: list[Worths] = []
    rate = 0.0
    for number in range(count):
        inside = group == number
        cut = Cut.into(net, net.narrowest_entry(inside), 0.0)
        rate += cut.rate
        for arc in np.flatnonzero(cut.arcs).tolist():
            before, after = times.before[~inside, arc], times.after[arc, inside]
            if not np.isfinite(before).any() or not np.isfinite(after).any():
                continue
            first, last, alpha = starts[~inside], serves[inside], float(net.alpha_us[arc])
            speed = np.array([float(net.rate[arc])])
            # A byte is on the link as soon as its message starts and long before that is done, or the other way round.
            began = first[np.isfinite(before)].min()
            late.append((speed, np.array([began + before.min() + alpha + (after + last).min()])))
            ended = last[np.isfinite(after)].min()
            early.append((speed, np.array([(first + before).min() + alpha + after.min() + ended])))
    if late:
        yield TimedProof(
            need=2.0 * (count - 1), worths=(by_time(late), by_time(early)), share=1.0, inside=group == 0, rate=rate,
            groups=count,
        )  # fmt: skip
