# SPDX-License-Identifier: Apache-2.0
"""The registry of the library: the names of its algorithms, and building a program by name."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..collectives import ROOTED
from ..collectives.conditions import as_ranks
from ..errors import InvalidInput, unknown
from ..programs.ir import Program
from ..registry import Registry
from .base import Algorithm, collective_kind
from .options import checked

if TYPE_CHECKING:
    from ..cluster import Cluster

NAMES = (
    "ring",
    "recursive_doubling",
    "halving_doubling",
    "swing",
    "double_binary_tree",
    "binary_tree",
    "binomial",
    "chain",
    "bruck",
    "direct",
    "pairwise",
    "two_step",
    "three_step",
    "hierarchical",
    "nccl_ring",
    "nccl_tree",
)
"""The modules of this package that each hold an `ALGORITHM`, in the order in which lists show them."""
FOR_COMPARISON = ("nccl_ring", "nccl_tree")
"""Algorithms as another library lays them out; a job's own choice of algorithms leaves them out."""


_OTHERS = Registry[Algorithm]("algorithm", reserved=NAMES)


def register_algorithm(entry: Algorithm, *, replace: bool = False) -> None:
    """Make an algorithm of somebody else's known by its name, behind ours.

    The portfolio, the planner, the command line (`STRETTO_PLUGINS`, docs/plugins.md) and the backend's own choice know
    it from then on. In a job all ranks have to register the same algorithms.

    Args:
        entry: The algorithm; its docstring is the contract.
        replace: Whether an algorithm that has the name gives way.

    Raises:
        InvalidInput: The name is taken, or a collective unknown.
    """
    for kind in entry.collectives:
        collective_kind(kind)
    _OTHERS.register(entry.name, entry, replace=replace)


def names() -> tuple[str, ...]:
    """The names of all algorithms: ours, then those that others have registered.

    >>> names()[:2]
    ('ring', 'recursive_doubling')
    """
    return tuple(dict.fromkeys((*NAMES, *_OTHERS)))


def entry(name: str) -> Algorithm:
    """The registry's entry for a name; `InvalidInput` lists the names where it is unknown."""
    if name in _OTHERS:
        return _OTHERS[name]
    if name not in NAMES:
        raise unknown("algorithm", name, names())
    found = import_module(f".{name}", __package__).ALGORITHM
    assert isinstance(found, Algorithm)
    return found


def algorithms(collective: str | None = None) -> list[Algorithm]:
    """All algorithms, or those that serve a collective.

    >>> [a.name for a in algorithms("broadcast")]
    ['double_binary_tree', 'binary_tree', 'binomial', 'chain', 'direct']
    """
    entries = [entry(name) for name in names()]
    if collective is None:
        return entries
    kind = collective_kind(collective)
    return [a for a in entries if kind in a.collectives]


def defined_for(collective: str, count: int) -> list[str]:
    """The names of the algorithms that serve a collective over that many ranks with their default options.

    >>> defined_for("all_gather", 7)
    ['ring', 'halving_doubling', 'bruck', 'direct', 'nccl_ring']
    """
    kind = collective_kind(collective)
    return [a.name for a in algorithms(kind) if a.refusal(kind, count) is None]


def algorithm(
    name: str,
    collective: str,
    ranks: int | Sequence[int],
    *,
    cluster: Cluster | None = None,
    chunks: int | None = None,
    root: int | None = None,
    in_place: bool = False,
    **options: Any,
) -> Program:
    """Build a program by name.

    With a `cluster`, options that are not given are taken from it where it suggests any: the dimensions or hosts for
    the hierarchical algorithms, an order along the fastest links for rings and chains; the program's name says so.

    Args:
        name: An algorithm, one of `names()`.
        collective: The kind of collective in any usual spelling.
        ranks: A rank count, or the device of each rank.
        cluster: The cluster that the program is meant for, or None.
        chunks: How many pieces flow through the algorithm one behind the other, >= 1; its own default when not given.
        root: The root's rank, for rooted collectives only.
        in_place: Whether input and output share memory.
        **options: Options of the algorithm, as values or as the texts of a command line.

    Returns:
        The program, not verified yet.

    Raises:
        InvalidInput: The algorithm does not serve the collective or these ranks, or an option is not valid.

    >>> algorithm("ring", "allreduce", 4, chunks=2).num_transfers
    48
    """
    found = entry(name)
    kind = collective_kind(collective)
    if kind not in found.collectives:
        raise InvalidInput(
            f"{name} does not do {kind}; it does {', '.join(found.collectives)}; "
            f"{kind} is done by {', '.join(a.name for a in algorithms(kind))}"
        )
    for option in options:
        if option not in found.options:
            raise unknown(f"option of {name}", option, found.options)
    if root is not None and kind not in ROOTED:
        raise InvalidInput(f"root: {kind} has no root; rooted are {', '.join(ROOTED)}")
    given = checked(found.build, options)
    devices = as_ranks(ranks)
    if cluster is not None:
        if max(devices, default=0) >= cluster.num_devices:
            raise InvalidInput(f"ranks: cluster {cluster.name} has only devices 0..{cluster.num_devices - 1}")
        if found.from_cluster is not None:
            given |= found.from_cluster(cluster, devices, given)
    if root is not None:
        given["root"] = root
    given["chunks"] = found.chunks if chunks is None else chunks
    return found.build(kind, devices, in_place=in_place, **given)
