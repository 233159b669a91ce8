# SPDX-License-Identifier: Apache-2.0
"""The linear order that every instruction stream is sorted by, so that no bounded FIFO can deadlock."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from .ir import Program

Edges = tuple[NDArray[np.int64], NDArray[np.int64]]


def event_order(program: Program, depth: int) -> NDArray[np.int64] | None:
    """Positions of all events (start of t: t, finish of t: num_transfers + t) with FIFOs of `depth` messages.

    None where the events wait for each other in a circle.
    """
    count = program.num_transfers
    each = np.arange(count, dtype=np.int64)
    waits = np.repeat(each, np.diff(program.after_ptr))
    gated = np.repeat(each, np.diff(program.gate_ptr))
    gate = program.gate.astype(np.int64)
    reads_there = program.src[gate] == program.dst[gated]
    edges: list[Edges] = [
        (each, count + each),
        (count + program.after.astype(np.int64), waits),
        (np.where(reads_there, gate, count + gate), count + gated),
        *fifo_edges(connections(program)[0], each, count + each, depth),
    ]
    return linear_order(edges, np.concatenate([program.src, program.dst]), eager=count)


def connections(program: Program) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The connection of each transfer, numbered densely, and the first transfer on each connection."""
    ranks, lanes = program.collective.num_ranks, program.num_lanes
    key = (program.src.astype(np.int64) * ranks + program.dst) * lanes + program.lane
    _, first, number = np.unique(key, return_index=True, return_inverse=True)
    return number.reshape(-1), first


def fifo_edges(
    connection: NDArray[np.int64], send: NDArray[np.int64], receive: NDArray[np.int64], depth: int
) -> list[Edges]:
    """The order that FIFO connections impose: messages stay in order, and at most `depth` are under way.

    Args:
        connection: The connection of each message; messages are in program order.
        send: The node that sends each message.
        receive: The node that receives it.
        depth: The FIFO depth, >= 1.

    Returns:
        Arrays (before, after) of nodes.
    """
    order = np.argsort(connection, kind="stable")
    sends, receives, owner = send[order], receive[order], connection[order]
    follows = owner[1:] == owner[:-1]
    room = owner[depth:] == owner[:-depth]
    return [
        (sends[:-1][follows], sends[1:][follows]),
        (receives[:-1][follows], receives[1:][follows]),
        (receives[:-depth][room], sends[depth:][room]),
    ]


def linear_order(edges: list[Edges], rank: NDArray[np.int32], *, eager: int) -> NDArray[np.int64] | None:
    """Sort nodes topologically.

    Nodes below `eager` (sends) go as soon as they can; then receives that are the last thing that a send of the same
    rank waits for (so that the send follows at once and can be fused); then the rest; lower numbers first.

    Args:
        edges: Arrays (before, after) of nodes.
        rank: The rank of each node.
        eager: The number of nodes, from 0 on, that are sends.

    Returns:
        The position of each node, or None where the edges close a circle.
    """
    num_nodes, where = len(rank), rank.tolist()
    pairs = np.sort(np.concatenate([a * num_nodes + b for a, b in edges]))
    pairs = pairs[np.diff(pairs, prepend=-1) > 0]
    heads, tails = pairs // num_nodes, pairs % num_nodes
    waiting: list[int] = np.bincount(tails, minlength=num_nodes).tolist()
    successors: list[int] = tails.tolist()
    ptr: list[int] = np.concatenate([[0], np.cumsum(np.bincount(heads, minlength=num_nodes))]).tolist()
    # The xor of the nodes that a node still waits for is the last of them once only one is left.
    left = np.zeros(num_nodes, np.int64)
    np.bitwise_xor.at(left, tails, heads)
    missing: list[int] = left.tolist()
    position = [-1] * num_nodes
    wanted = [False] * num_nodes
    for node in range(eager):
        if waiting[node] == 1 and where[missing[node]] == where[node]:
            wanted[missing[node]] = True
    urgent: list[int] = []
    hot: list[int] = []
    rest: list[int] = []
    for node in range(num_nodes):
        if waiting[node] == 0:
            (urgent if node < eager else hot if wanted[node] else rest).append(node)
    done = 0
    while True:
        if urgent:
            node = heappop(urgent)
        elif hot:
            node = heappop(hot)
        elif rest:
            node = heappop(rest)
        else:
            break
        if position[node] >= 0:  # a node that became wanted while it was ready is listed twice
            continue
        position[node] = done
        done += 1
        for after in successors[ptr[node] : ptr[node + 1]]:
            waiting[after] -= 1
            missing[after] ^= node
            if waiting[after] == 0:
                heappush(urgent if after < eager else hot if wanted[after] else rest, after)
            elif waiting[after] == 1 and after < eager:
                last = missing[after]
                if last >= eager and where[last] == where[after]:
                    wanted[last] = True
                    if waiting[last] == 0:
                        heappush(hot, last)
    return np.array(position, np.int64) if done == num_nodes else None
