# SPDX-License-Identifier: Apache-2.0
"""Programs from paths: messages from rank to rank, in an order that keeps the busiest links busy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .. import _native
from ..cluster import Cluster
from ..collectives import Collective
from ..programs import Program
from ..programs.ir import take_rows
from .flow_routes import Floats, Ints, Nodes, Paths, Traffic
from .pacing import paced

BUSY = 0.9
"""The share of the busiest link's load from which a link counts as busy."""
MAX_STAGES = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class MessageOrder:
    """A plan: when each message starts and ends, and the name of the rule that made it."""

    rule: str
    start_us: Floats
    end_us: Floats

    @property
    def total_us(self) -> float:
        """The planned total time in microseconds."""
        return float(self.end_us.max(initial=0.0))


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutedMessages:
    """Messages with their routes and dependencies, in arrays.

    Message m goes from rank ``src[m]`` to ``dst[m]`` over ``routes[route[m]]`` with the chunks
    ``chunk[chunk_ptr[m]:chunk_ptr[m+1]]``, once the messages ``after[after_ptr[m]:after_ptr[m+1]]`` have arrived.
    """

    cluster: Cluster
    collective: Collective
    src: Nodes
    dst: Nodes
    route: Nodes
    routes: tuple[tuple[int, ...], ...]
    chunk_ptr: Ints
    chunk: Nodes
    nbytes: Floats
    after_ptr: Ints
    after: Nodes

    def program(self, name: str, plan: MessageOrder, *, slack_us: float | None = None) -> Program:
        """The program that sends the messages in the order of a plan.

        A link serves whichever message asks first, so data that a rank has from the start overtakes data that it
        relays.

        Args:
            name: The program's name.
            plan: The plan.
            slack_us: The time by which arrivals may be behind the plan before they hold back a send (see `paced`); no
                send waits for the plan when not given.

        Returns:
            The program, not verified yet.
        """
        order = np.lexsort((np.arange(len(self.src)), plan.start_us))
        ptr, chunk = take_rows(self.chunk_ptr, self.chunk, order)
        program = Program.from_steps(
            name,
            self.collective,
            src=self.src[order],
            dst=self.dst[order],
            chunk=chunk,
            chunk_ptr=ptr,
            step=np.arange(len(order)),
            route=self.route[order],
            routes=self.routes,
            routes_digest=self.cluster.digest,
        )
        if slack_us is None:
            return program
        return paced(program, plan.start_us[order] - slack_us, plan.end_us[order])


def messages_of(
    collective: Collective, cluster: Cluster, traffic: Traffic, paths: Paths, *, nbytes: float, merge: str | None = None
) -> RoutedMessages:
    """Turn paths into messages: one per chunk and hop, where a hop ends at the next rank on the path.

    Args:
        collective: The collective, cut as the paths are.
        cluster: The cluster.
        traffic: Its traffic, from `traffic_of`.
        paths: The path of each chunk.
        nbytes: The size in bytes, > 0.
        merge: Which chunks of one hop share a message: those equally far from their "source" or "destination", or only
            those that the paths put together when None.

    Returns:
        The messages.
    """
    rank_of = np.full(cluster.num_nodes, -1, np.int32)
    rank_of[list(collective.ranks)] = np.arange(collective.num_ranks)
    ends = np.flatnonzero(rank_of[cluster.link_dst[paths.link]] >= 0)
    begins = np.concatenate([[0], ends[:-1] + 1])
    item = np.searchsorted(paths.ptr, begins, side="right") - 1
    table: dict[bytes, int] = {}
    links = np.ascontiguousarray(paths.link)
    route = np.array(
        [
            table.setdefault(links[a : b + 1].tobytes(), len(table))
            for a, b in zip(begins.tolist(), ends.tolist(), strict=True)
        ],
        np.int64,
    )
    routes = tuple(tuple(np.frombuffer(key, np.int32).tolist()) for key in table)
    first = np.searchsorted(item, np.arange(len(traffic.chunk)))
    stage = np.arange(len(item)) - first[item]
    before = np.where(stage > 0, np.arange(len(item)) - 1, -1)
    group = np.arange(len(item))
    if merge is not None or paths.turn is not None:
        level = stage if merge == "source" else stage - np.bincount(item, minlength=len(first))[item]
        level = level if paths.turn is None else paths.turn[begins]
        _, group = np.unique(route * (1 << 20) + level + (1 << 19), return_inverse=True)
    order = np.argsort(group, kind="stable")
    counts = np.bincount(group)
    head = order[np.concatenate([[0], np.cumsum(counts)[:-1]])]
    needs = np.flatnonzero(before >= 0)
    pairs = np.unique(group[needs].astype(np.int64) * len(counts) + group[before[needs]])
    waiter, waited = np.divmod(pairs, len(counts))
    return RoutedMessages(
        cluster=cluster,
        collective=collective,
        src=rank_of[cluster.link_src[links[begins[head]]]],
        dst=rank_of[cluster.link_dst[links[ends[head]]]],
        route=route[head].astype(np.int32),
        routes=routes,
        chunk_ptr=np.concatenate([[0], np.cumsum(counts)]),
        chunk=traffic.chunk[item[order]],
        nbytes=np.bincount(group, traffic.share[item] * nbytes).astype(np.float64),
        after_ptr=np.searchsorted(waiter, np.arange(len(counts) + 1)),
        after=waited.astype(np.int32),
    )


class Planner:
    """A maker of plans in which links serve messages by priority; the program's order then follows the plan."""

    def __init__(self, messages: RoutedMessages, *, blocking: bool) -> None:
        self._forth, self._back = _Network(messages, blocking, False), _Network(messages, blocking, True)
        turn = (messages.dst - messages.src) % messages.collective.num_ranks
        place = np.argsort(np.argsort(turn, kind="stable"), kind="stable")
        self._spread = 1e-6 * place / max(1, len(place))

    def rules(self) -> Iterator[MessageOrder]:
        """The first plans: by turns without conflicts on busy links, by the longest remaining way, and by the busiest
        remaining links."""
        colors = self._forth.colors(self._back)
        if colors is not None:
            yield self._plan("colour", colors)
        yield self._plan("far", -self._forth.remaining())
        yield self._plan("crowd", -self._forth.remaining(self._forth.crowd()))

    def turn(self, plan: MessageOrder, shake: Floats | None = None) -> MessageOrder:
        """Make a plan from another by planning the reverse traffic in the reverse order, and then forwards again.

        This tightens both ends of a plan; with `shake` (times that are added to its ends) it leads to other plans.
        """
        end = plan.end_us if shake is None else plan.end_us + shake
        _, back = self._back.times(-end)
        start, end = self._forth.times(-back)
        return MessageOrder(rule=plan.rule, start_us=start, end_us=end)

    def _plan(self, rule: str, key: Floats) -> MessageOrder:
        scale = float(np.abs(key).max(initial=0.0)) or 1.0
        start, end = self._forth.times(key / scale + self._spread)
        return MessageOrder(rule=rule, start_us=start, end_us=end)


class _Network:
    """The messages as arrays for the native planner; with `reverse` every path begins at its end."""

    def __init__(self, messages: RoutedMessages, blocking: bool, reverse: bool) -> None:
        m, cluster = messages, messages.cluster
        self.blocking = blocking
        self.count = len(m.src)
        self.route = m.route
        lengths = [len(route) for route in m.routes]
        self.route_ptr = np.cumsum([0, *lengths]).astype(np.int64)
        turn = -1 if reverse else 1
        self.links = np.array([link for route in m.routes for link in route[::turn]], np.int32)
        self.bytes, self.alpha_us, self.rate = m.nbytes, cluster.link_alpha_us, cluster.link_gb_per_s * 1e3
        waiter = np.repeat(np.arange(self.count), np.diff(m.after_ptr))
        waited = m.after.astype(np.int64)
        if reverse:
            order = np.lexsort((waiter, waited))
            waiter, waited = waited[order], waiter[order]
        self.after_ptr = np.searchsorted(waiter, np.arange(self.count + 1)).astype(np.int64)
        self.after = waited.astype(np.int32)

    def times(self, key: Floats) -> tuple[Floats, Floats]:
        """The start and end of each message when links serve the lowest key first."""
        return _native.plan_messages(
            after_ptr=self.after_ptr,
            after=self.after,
            route=self.route,
            route_ptr=self.route_ptr,
            route_links=self.links,
            bytes=self.bytes,
            alpha_us=self.alpha_us,
            bytes_per_us=self.rate,
            key=np.ascontiguousarray(key, np.float64),
            alpha_blocks=self.blocking,
        )

    def crowd(self) -> Floats:
        """The total time that each link is busy."""
        ptr, links = take_rows(self.route_ptr, self.links, self.route.astype(np.intp))
        moved = np.bincount(links, np.repeat(self.bytes, np.diff(ptr)), len(self.rate))
        busy: Floats = moved / self.rate + self.blocking * self.alpha_us * np.bincount(links, minlength=len(self.rate))
        return busy

    def colors(self, back: _Network) -> Floats | None:
        """Assign turns in which no two messages meet on a busy link; None where few messages pass two busy links.

        Turns whose messages wait for others come late, and turns whose messages others wait for come early; a message
        that passes no busy link takes the turn of a message that waits for it, or that it waits for.
        """
        crowd = self.crowd()
        ptr, links = take_rows(self.route_ptr, self.links, self.route.astype(np.intp))
        busy = crowd[links] >= BUSY * crowd.max(initial=0.0)
        message = np.repeat(np.arange(self.count), np.diff(ptr))[busy]
        links = links[busy]
        number = np.bincount(message, minlength=self.count)
        if 2 * np.count_nonzero(number > 1) < np.count_nonzero(number):
            return None
        edges, first = np.unique(message, return_index=True)
        last = len(message) - 1 - np.unique(message[::-1], return_index=True)[1]
        ahead, behind = self.remaining(), back.remaining()
        order = np.argsort((behind - ahead)[edges], kind="stable")
        edges, left, right = edges[order], links[first][order], links[last][order]
        # A message over one busy link gets a second end of its own, where it meets no other.
        right = np.where(left == right, len(crowd) + np.arange(len(right)), right)
        color = _native.colour_edges(left.astype(np.int32), right.astype(np.int32), len(crowd), len(crowd) + len(right))
        late = np.bincount(color, (behind - ahead)[edges]) / np.bincount(color)
        turn = np.argsort(np.argsort(late, kind="stable"), kind="stable")
        key = np.full(self.count, np.inf)
        key[edges] = turn[color]
        for network in (self, back):
            waiter = np.repeat(np.arange(self.count), np.diff(network.after_ptr))
            for _ in range(MAX_STAGES):
                open_ends = np.isinf(key[network.after]) & np.isfinite(key[waiter])
                if not open_ends.any():
                    break
                np.minimum.at(key, network.after[open_ends], key[waiter[open_ends]])
        return np.where(np.isinf(key), len(late), key)

    def remaining(self, weight: Floats | None = None) -> Floats:
        """For each message the time from its start to the last arrival of its chunks, without contention.

        With a weight per link, the largest sum of weights on that way instead.
        """
        ptr, links = take_rows(self.route_ptr, self.links, self.route.astype(np.intp))
        if weight is None:
            slowest = np.maximum.reduceat(np.repeat(self.bytes, np.diff(ptr)) / self.rate[links], ptr[:-1])
            own = np.add.reduceat(self.alpha_us[links], ptr[:-1]) + slowest
        else:
            own = np.maximum.reduceat(weight[links], ptr[:-1])
        total: Floats = own.copy()
        waiter = np.repeat(np.arange(self.count), np.diff(self.after_ptr))
        while True:
            # Each pass takes one more hop into account; paths are short.
            longer = own.copy()
            np.maximum.at(longer, self.after, own[self.after] + total[waiter])
            if np.array_equal(longer, total):
                return total
            total = longer
