# SPDX-License-Identifier: Apache-2.0
"""The data that a collective must move, in the form that bounds use: equal chunks merged into bundles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...collectives import ALL_PARTS, Collective
from ...errors import InvalidInput
from ...programs.ir import take_rows

MAX_PAIRS = 1 << 27


@dataclass(frozen=True, kw_only=True, eq=False)
class Demand:
    """The bundles of data that a collective must move.

    Bundle k is ``share[k]`` of nbytes, made of one part from each of ``source[source_ptr[k]:source_ptr[k+1]]``, wanted
    by each device of ``wanter[wanter_ptr[k]:wanter_ptr[k+1]]``. A source below `num_nodes` is the one device that holds
    a part; source ``num_nodes + j`` stands for the devices ``shared[j]``, which all hold it. Bundles with the same
    `payload` belong to one chunk that may be combined on the way: as little as one bundle may cross a cut for all.
    """

    num_nodes: int
    share: NDArray[np.float64]
    payload: NDArray[np.int64]
    source_ptr: NDArray[np.int64]
    source: NDArray[np.int32]
    wanter_ptr: NDArray[np.int64]
    wanter: NDArray[np.int32]
    shared: tuple[tuple[int, ...], ...] = ()

    @property
    def num_bundles(self) -> int:
        """The number of bundles; they differ in their parts or in the devices that want them."""
        return len(self.share)

    @cached_property
    def num_sources(self) -> NDArray[np.int64]:
        """The number of parts that each bundle is made of."""
        return np.diff(self.source_ptr)

    @cached_property
    def num_wanters(self) -> NDArray[np.int64]:
        """The number of devices that want each bundle."""
        return np.diff(self.wanter_ptr)

    @cached_property
    def combining(self) -> bool:
        """Whether any bundle is made of several parts."""
        return bool(np.any(self.num_sources > 1))

    @cached_property
    def distinct(self) -> bool:
        """Whether no two bundles belong to one payload."""
        return int(np.bincount(self.payload).max(initial=0)) <= 1

    @cached_property
    def same_sources(self) -> bool:
        """Whether all bundles are made of parts from the same places."""
        return _rows_equal(self.num_sources, self.source)

    @cached_property
    def same_wanters(self) -> bool:
        """Whether all bundles are wanted by the same devices."""
        return _rows_equal(self.num_wanters, self.wanter)

    def holders(self, source: int) -> tuple[int, ...]:
        """The devices that hold a source's part."""
        return (source,) if source < self.num_nodes else self.shared[source - self.num_nodes]

    def extent(self, value: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each source the lowest and the highest ``value[device]`` of its holders."""
        unused = np.zeros(self.num_nodes - len(value), np.int64)
        least, most = ([f(value[list(s)]) for s in self.shared] for f in (np.min, np.max))
        lowest, highest = (np.concatenate([value, unused, ends]).astype(np.int64) for ends in (least, most))
        return lowest, highest

    @cached_property
    def pairs(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
        """Every (source, wanter, bundle) whose wanter does not hold the part itself, ordered by source."""
        bundle = np.repeat(np.arange(self.num_bundles), self.num_sources)
        fan = self.num_wanters[bundle]
        if fan.sum() > MAX_PAIRS:
            raise InvalidInput(f"ranks: a bound looks at every pair of ranks, here {fan.sum()}; at most {MAX_PAIRS}")
        first = np.repeat(self.wanter_ptr[bundle] - (np.cumsum(fan) - fan), fan)
        source, wanter = np.repeat(self.source, fan), self.wanter[first + np.arange(len(first))]
        bundle = np.repeat(bundle, fan)
        away = source != wanter
        for j, devices in enumerate(self.shared):
            away &= (source != self.num_nodes + j) | ~np.isin(wanter, devices)
        source, wanter, bundle = source[away], wanter[away], bundle[away]
        order = np.argsort(source, kind="stable")
        return source[order], wanter[order], bundle[order]


def demand_of(collective: Collective, num_nodes: int) -> Demand:
    """The demand of a collective on a cluster with `num_nodes` nodes."""
    c = collective
    device = np.array(c.ranks, np.int64)
    in_rank = np.repeat(np.arange(c.num_ranks), np.diff(c.in_ptr))
    out_rank = np.repeat(np.arange(c.num_ranks), np.diff(c.out_ptr))
    kind, first = _kinds(c, in_rank, out_rank)

    keep = first[kind[c.in_chunk]] == c.in_chunk
    item_kind, item_part, holder = kind[c.in_chunk[keep]], c.in_part[keep], device[in_rank[keep]]
    order = np.lexsort((holder, item_part, item_kind))
    item_kind, item_part, holder = item_kind[order], item_part[order], holder[order]
    begins = np.flatnonzero(_changes(item_kind, item_part))
    source, shared = _sources(begins, holder, num_nodes)
    item_kind, item_part = item_kind[begins], item_part[begins]
    item_ptr = np.searchsorted(item_kind, np.arange(len(first) + 1))

    keep = first[kind[c.out_chunk]] == c.out_chunk
    want_kind, wanter = kind[c.out_chunk[keep]], device[out_rank[keep]]
    want_set = c.out_set[keep].astype(np.int64)
    if c.part_sets:
        want_set = _named_once(c, first, want_kind, want_set, item_ptr, item_part)
    order = np.lexsort((wanter, want_set, want_kind))
    want_kind, want_set, wanter = want_kind[order], want_set[order], wanter[order]
    begins = np.flatnonzero(_changes(want_kind, want_set))
    bundle_kind, bundle_set = want_kind[begins], want_set[begins]
    ptr, item = _members(c, first, np.stack([bundle_kind, bundle_set]), item_ptr, item_part)
    part = source[item]
    part = part[np.lexsort((part, np.repeat(np.arange(len(bundle_kind)), np.diff(ptr))))]
    combined = np.zeros(len(first), np.bool_)
    combined[bundle_kind[np.diff(ptr) > 1]] = True
    apart = len(first) + np.arange(len(bundle_kind))
    return Demand(
        num_nodes=num_nodes,
        share=np.bincount(kind, c.chunk_share, len(first))[bundle_kind],
        payload=np.where(combined[bundle_kind], bundle_kind, apart),
        source_ptr=ptr,
        source=part,
        wanter_ptr=np.append(begins, len(wanter)).astype(np.int64),
        wanter=wanter.astype(np.int32),
        shared=shared,
    )


def _kinds(
    c: Collective, in_rank: NDArray[np.int64], out_rank: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The kind of each chunk, and one chunk of each kind; chunks of one kind start and end at the same places.

    Places are compared by two 64-bit sums of scrambled entries; sums do not depend on the order.
    """
    sums = []
    for seed in (1, 2):
        total = np.zeros(c.num_chunks, np.uint64)
        np.add.at(total, c.in_chunk, _scramble(in_rank, c.in_part, 2 * seed))
        np.add.at(total, c.out_chunk, _scramble(out_rank, c.out_set, 2 * seed + 1))
        sums.append(total)
    order = np.lexsort(sums)
    new = _changes(sums[0][order], sums[1][order])
    kind = np.empty(c.num_chunks, np.int64)
    kind[order] = np.cumsum(new) - 1
    return kind, order[new]


def _scramble(rank: NDArray[np.int64], other: NDArray[np.int32], seed: int) -> NDArray[np.uint64]:
    """The mixing function of splitmix64, over the two numbers and a seed."""
    with np.errstate(over="ignore"):
        x = (rank.astype(np.uint64) << np.uint64(32)) ^ (other.astype(np.int64) + 1).astype(np.uint64)
        x += np.uint64(seed * 0x9E3779B97F4A7C15 % (1 << 64))
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        return x ^ (x >> np.uint64(31))


def _sources(
    begins: NDArray[np.int64], holder: NDArray[np.int64], num_nodes: int
) -> tuple[NDArray[np.int32], tuple[tuple[int, ...], ...]]:
    """The source of each item (a run of holders), and the sets of several holders that have a common source."""
    source = holder[begins].astype(np.int32)
    ends = np.append(begins[1:], len(holder))
    shared: dict[tuple[int, ...], int] = {}
    for item in np.flatnonzero(ends - begins > 1).tolist():
        devices = tuple(holder[begins[item] : ends[item]].tolist())
        source[item] = num_nodes + shared.setdefault(devices, len(shared))
    return source, tuple(shared)


def _named_once(
    c: Collective,
    first: NDArray[np.int64],
    kind: NDArray[np.int64],
    which: NDArray[np.int64],
    item_ptr: NDArray[np.int64],
    item_part: NDArray[np.int32],
) -> NDArray[np.int64]:
    """Renumber wanted sets: equal sets get one number, and a set that lists every part becomes ALL_PARTS."""
    numbers: dict[frozenset[int], int] = {}
    names = [numbers.setdefault(frozenset(parts), at) for at, parts in enumerate(c.part_sets)]
    which = np.array([*names, ALL_PARTS])[which]
    listed = np.unique(np.stack([kind, which]), axis=1)
    ptr, _ = _members(c, first, listed, item_ptr, item_part)
    whole = listed[:, np.diff(ptr) == np.diff(item_ptr)[listed[0]]]
    return np.where(np.isin(_key(kind, which), _key(*whole)), ALL_PARTS, which)


def _members(
    c: Collective,
    first: NDArray[np.int64],
    bundles: NDArray[np.int64],
    item_ptr: NDArray[np.int64],
    item_part: NDArray[np.int32],
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """The items of each bundle (kind, set): the items of that kind whose part is in the set."""
    kind, which = bundles
    ptr, item = take_rows(item_ptr, np.arange(len(item_part), dtype=np.int32), kind)
    if np.all(which == ALL_PARTS):
        return ptr, item
    listed = [_key(np.int64(s), np.int64(p)) for s, parts in enumerate(c.part_sets) for p in parts]
    bundle = np.repeat(np.arange(len(which)), np.diff(ptr))
    kept = (which[bundle] == ALL_PARTS) | np.isin(_key(which[bundle], item_part[item]), listed)
    found = np.bincount(bundle[kept], minlength=len(which))
    sizes = np.array([len(set(parts)) for parts in c.part_sets])
    short = np.flatnonzero((which != ALL_PARTS) & (found < sizes[which]))
    if len(short):
        at = short[0]
        missing = set(c.part_sets[which[at]]) - set(item_part[item[ptr[at] : ptr[at + 1]]].tolist())
        what = f"part {min(missing)} of chunk {first[kind[at]]}"
        raise InvalidInput(f"outputs: {what} is wanted but no rank has it at the start")
    return np.concatenate([[0], np.cumsum(found)]), item[kept]


def _key(high: NDArray[np.int64] | np.int64, low: NDArray[Any] | np.int64) -> NDArray[np.int64]:
    return np.asarray((high << 32) + low)


def _changes(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether either of two sorted columns differs from the row before; True in the first row."""
    return np.concatenate([np.ones(min(len(a), 1), np.bool_), (a[1:] != a[:-1]) | (b[1:] != b[:-1])])


def _rows_equal(lengths: NDArray[np.int64], values: NDArray[np.int32]) -> bool:
    if len(lengths) == 0 or np.any(lengths != lengths[0]):
        return len(lengths) == 0
    return bool(np.all(values.reshape(len(lengths), -1) == values[: lengths[0]]))
