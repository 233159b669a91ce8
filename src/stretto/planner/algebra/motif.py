# SPDX-License-Identifier: Apache-2.0
"""The terms of the motif algebra: `Motif`, and `Par` and `Seq` of them (Syndicate, section 4.2 and appendix A.1).

A motif is a collective over some of the processes and some of the payload. An expression says how a collective is
carried out by motifs: some at the same time (``||``), some one after the other (``->``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise

from ...errors import InvalidInput, unknown
from ...late import LateFunction
from .spans import Spans, cut, joined, measure, overlap

KINDS = {
    "AR": "all_reduce", "AA": "all_to_all", "AG": "all_gather", "RS": "reduce_scatter", "BC": "broadcast",
    "RE": "reduce", "GA": "gather", "SC": "scatter", "SD": "send",
}  # fmt: skip
"""The motifs by their letters in the notation, and the comm-op that each is."""
CODES = {kind: code for code, kind in KINDS.items()}
COMM_CODES = {**CODES, "collective_permute": "SD"}
"""The motif of each kind of comm-op: a collective-permute is a send in each of its pairs."""
ROOTED = ("BC", "RE", "GA", "SC")
SHARDED = ("RS", "AG", "GA", "SC")
MAX_SIZE = 1 << 60
MAX_RANK = 1 << 20
MAX_LEAVES = 1 << 16

Path = tuple[int, ...]
Groups = tuple[tuple[int, ...], ...]

SHOW: LateFunction[[Expr], str] = LateFunction("planner.algebra.notation.show")


class Expr:
    """An expression of the motif algebra: a motif, or motifs composed in parallel or in sequence."""

    @property
    def children(self) -> tuple[Expr, ...]:
        """The expressions that this one is composed of; empty for a motif."""
        return ()

    def walk(self) -> Iterator[tuple[Path, Motif]]:
        """Every motif with its path (positions of children from the top), from left to right."""
        if isinstance(self, Motif):
            yield (), self
        for number, child in enumerate(self.children):
            for path, motif in child.walk():
                yield (number, *path), motif

    @property
    def leaves(self) -> tuple[Motif, ...]:
        """The motifs of the expression, from left to right."""
        return tuple(motif for _, motif in self.walk())

    @property
    def depth(self) -> int:
        """The depth of nesting; 0 for a motif."""
        return 1 + max(child.depth for child in self.children) if self.children else 0

    def at(self, path: Sequence[int]) -> Expr:
        """The expression at a path."""
        here: Expr = self
        for number, position in enumerate(path):
            if not 0 <= position < len(here.children):
                raise InvalidInput(
                    f"path {_dotted(path)}: there is no child {position} at {_dotted(path[:number]) or 'the top'}, "
                    f"which has {len(here.children)}"
                )
            here = here.children[position]
        return here

    def map(self, change: Callable[[Expr], Expr], at: Sequence[int] = ()) -> Expr:
        """This expression with the part at a path replaced by ``change(part)``."""
        if not at:
            return change(self)
        self.at(at)
        first, *rest = at
        kids = [child.map(change, rest) if number == first else child for number, child in enumerate(self.children)]
        return par(kids) if isinstance(self, Par) else seq(kids)

    def flatten(self) -> Expr:
        """The same expression with ``||`` inside ``||``, and ``->`` inside ``->``, merged."""
        if not self.children:
            return self
        make = par if isinstance(self, Par) else seq
        flat = [child.flatten() for child in self.children]
        return make(chain.from_iterable(kid.children if type(kid) is type(self) else (kid,) for kid in flat))

    @property
    def after(self) -> tuple[tuple[int, ...], ...]:
        """For each motif the motifs that must have ended before it: the last ones that use any of its ranks.

        >>> from stretto.planner.algebra.notation import parse
        >>> parse("RS(T[0:8], PG[0:2]) -> AG(T[0:4], PG[0:2]) || AG(T[4:8], PG[0:2])").after
        ((), (0,), (0,))
        """
        found: list[tuple[int, ...]] = []
        _order(self, {}, found)
        return tuple(found)

    def __str__(self) -> str:
        return SHOW(self)


@dataclass(frozen=True, kw_only=True, repr=False)
class Motif(Expr):
    """One collective over `ranks` and a part of the payload.

    In ``AR(T[lo:hi], PG[ranks])`` `spans` are the intervals of the op's buffer that the motif works on. RS, AG, GA and
    SC also have `shards`, one set of intervals per rank (even pieces in rank order unless given): the part that each
    rank ends with or starts with. BC, RE, GA and SC have a `root`, one of the ranks. SD sends from its first rank to
    its second.

    In an all-to-all ``T_i[j, lo:hi]`` is the block that process i has for process j, so the span is a part of every
    block. The rank at position i sends to the positions ``(i+a) % n .. (i+b-1) % n`` of `ranks`, where ``(a, b)`` is
    the `window`. Rank p sends to rank q the blocks from the processes ``held[p]`` to the processes ``bound[q]``: just p
    and q, unless blocks are relayed on the way (as in a two-step all-to-all).

    >>> whole = Motif(kind="RS", ranks=(0, 1, 2), spans=((0, 7),))
    >>> whole.shards, whole.nbytes
    ((((0, 3),), ((3, 5),), ((5, 7),)), 7)
    """

    kind: str
    ranks: tuple[int, ...]
    spans: Spans = ()
    shards: tuple[Spans, ...] = ()
    root: int = -1
    window: tuple[int, int] = (0, 0)
    held: Groups = ()
    bound: Groups = ()

    def __post_init__(self) -> None:
        _complete(self)

    @property
    def size(self) -> int:
        """The bytes of the buffer that the motif works on; for an all-to-all, of each block."""
        return measure(self.spans)

    @cached_property
    def nbytes(self) -> int:
        """The bytes of the motif's own collective: the larger of one rank's send and receive buffer."""
        if self.kind != "AA":
            return self.size
        count, (first, last) = len(self.ranks), self.window
        held, bound = [len(h) for h in self.held], [len(b) for b in self.bound]

        def reached(sizes: list[int], begin: int) -> list[int]:
            """For each position the sum of `sizes` over the window that begins `begin` positions after it."""
            sums = [0]
            for size in sizes * 3:
                sums.append(sums[-1] + size)
            starts = [count + (i + begin) % count for i in range(count)]
            return [sums[start + last - first] - sums[start] for start in starts]

        sent = max(h * b for h, b in zip(held, reached(bound, first), strict=True))
        received = max(b * h for b, h in zip(bound, reached(held, 1 - last), strict=True))
        return max(sent, received) * self.size

    @property
    def collective_kind(self) -> str:
        """The kind of comm-op that the motif is."""
        return KINDS[self.kind]

    @property
    def whole(self) -> bool:
        """For an all-to-all: whether every rank sends to every rank."""
        return self.window[1] - self.window[0] == len(self.ranks)

    @property
    def relays(self) -> bool:
        """For an all-to-all: whether it moves blocks from or for processes other than its own ranks."""
        alone = tuple((rank,) for rank in self.ranks)
        return self.held != alone or self.bound != alone

    def __repr__(self) -> str:
        return f"<Motif {self}>"


@dataclass(frozen=True, repr=False)
class _Several(Expr):
    parts: tuple[Expr, ...]

    def __post_init__(self) -> None:
        if len(self.parts) < 2:
            raise InvalidInput(f"{type(self).__name__}: needs at least 2 children, not {len(self.parts)}")

    @property
    def children(self) -> tuple[Expr, ...]:
        return self.parts

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}>"


@dataclass(frozen=True, repr=False)
class Par(_Several):
    """Expressions that run at the same time, if resources permit; none may read or write data that another writes."""


@dataclass(frozen=True, repr=False)
class Seq(_Several):
    """Expressions that run one after the other."""


def par(children: Iterable[Expr | None]) -> Expr:
    """Children in parallel; motifs of one rank are left out, and a single child stands for itself."""
    return _several(Par, children)


def seq(children: Iterable[Expr | None]) -> Expr:
    """Children in sequence; motifs of one rank are left out, and a single child stands for itself."""
    return _several(Seq, children)


def motif(kind: str, ranks: int | Sequence[int], size: int, *, root: int | None = None) -> Motif:
    """The motif that is a whole collective.

    >>> print(motif("all_reduce", 8, 1024))
    AR(T[0:1024], PG[0:8])
    >>> print(motif("BC", [4, 5, 6, 9], 100, root=9))
    BC_9(T[0:100], PG[4:7,9])

    Args:
        kind: letters of the motif such as "AR", or name of the collective such as "all_reduce".
        ranks: the ranks, or their number (then 0, 1, ...).
        size: D of the notation: bytes of the whole buffer, or for an all-to-all of the block of each pair.
        root: one of the ranks, for rooted kinds; None takes the first.

    Returns:
        The motif.

    Raises:
        InvalidInput: the kind is unknown, or ranks, size or root are invalid.
    """
    code = kind if kind in KINDS else CODES.get(kind)
    if code is None:
        raise unknown("motif", kind, [f"{code} ({name})" for code, name in KINDS.items()])
    if isinstance(ranks, int) and not 1 <= ranks <= MAX_RANK:
        raise InvalidInput(f"ranks: must be 1..{MAX_RANK}, not {ranks}")
    members = tuple(range(ranks)) if isinstance(ranks, int) else tuple(ranks)
    at = members[0] if root is None and code in ROOTED and members else -1 if root is None else root
    return Motif(kind=code, ranks=members, spans=((0, size),), root=at)


def motif_of(kind: str, ranks: Sequence[int], nbytes: float, root: int = 0) -> Motif:
    """The motif of a comm-op of a workload.

    Args:
        kind: kind of the comm-op.
        ranks: the ranks of one group.
        nbytes: bytes as a `Collective` counts them; a non-integer size is rounded.
        root: position of the root in `ranks`, for rooted kinds.

    Returns:
        The motif.

    Raises:
        InvalidInput: the kind is unknown or the ranks invalid.
    """
    code = COMM_CODES.get(kind, kind)
    per_block = len(ranks) if code == "AA" else 1
    at = ranks[root] if code in ROOTED else None
    return motif(code, ranks, max(1, round(nbytes / per_block)), root=at)


def _several(make: type[Par] | type[Seq], children: Iterable[Expr | None]) -> Expr:
    kids = [child for child in children if child is not None]
    if not kids:
        raise InvalidInput("expression: has no motifs")
    moving = tuple(kid for kid in kids if not (isinstance(kid, Motif) and len(kid.ranks) == 1)) or (kids[0],)
    if len(moving) > MAX_LEAVES:
        raise InvalidInput(f"expression: at most {MAX_LEAVES} motifs, not {len(moving)}")
    return make(moving) if len(moving) > 1 else moving[0]


def _order(expr: Expr, last: dict[int, tuple[int, ...]], found: list[tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """Append the motifs that each motif waits for; return the last motifs of each rank after the expression."""
    if isinstance(expr, Motif):
        found.append(tuple(sorted(set(chain.from_iterable(last.get(rank, ()) for rank in expr.ranks)))))
        return last | dict.fromkeys(expr.ranks, (len(found) - 1,))
    if isinstance(expr, Seq):
        for child in expr.children:
            last = _order(child, last, found)
        return last
    ends: dict[int, tuple[int, ...]] = {}
    for child in expr.children:
        for rank, numbers in _order(child, last, found).items():
            if numbers is not last.get(rank):
                ends[rank] = (*ends.get(rank, ()), *numbers)
    return last | ends


def _complete(m: Motif) -> None:
    """Check a motif and fill in the fields that follow from others, so that equal motifs have equal fields."""

    def put(name: str, value: object) -> None:
        object.__setattr__(m, name, value)

    if m.kind not in KINDS:
        raise unknown("motif", m.kind, KINDS)
    count = len(m.ranks)
    _check_ranks(m.kind, m.ranks, "ranks")
    if m.kind == "SD" and count != 2:
        raise InvalidInput(f"SD: needs 2 ranks, the sender and the receiver, not {count}")
    if (m.kind in ROOTED) != (m.root >= 0) or (m.root >= 0 and m.root not in m.ranks):
        wanted = "one of its ranks" if m.kind in ROOTED else "none"
        raise InvalidInput(f"{m.kind}: its root must be {wanted}, not {m.root if m.root >= 0 else 'missing'}")
    if m.shards and (m.kind not in SHARDED or len(m.shards) != count):
        wanted = f"{count} shards, one per rank" if m.kind in SHARDED else "no shards"
        raise InvalidInput(f"{m.kind}: needs {wanted}, not {len(m.shards)}")
    if m.shards:
        put("shards", tuple(joined(shard) for shard in m.shards))
    spans = tuple(sorted(span for shard in m.shards for span in shard)) if m.shards else tuple(sorted(m.spans))
    twice = overlap(spans)
    if twice is not None:
        raise InvalidInput(f"{m.kind}: its payload holds {twice[0]}:{twice[1]} twice")
    put("spans", joined(spans))
    if not m.spans:
        raise InvalidInput(f"{m.kind}: its payload is empty")
    if m.spans[0][0] < 0 or m.spans[-1][1] > MAX_SIZE:
        raise InvalidInput(f"{m.kind}: its payload must lie within 0:{MAX_SIZE}")
    if m.kind in SHARDED and not m.shards:
        put("shards", cut(m.spans, count))
    if m.kind == "AA":
        _complete_all_to_all(m, put)
    elif m.held or m.bound or m.window != (0, 0):
        raise InvalidInput(f"{m.kind}: window, held and bound are for AA only")


def _complete_all_to_all(m: Motif, put: Callable[[str, object], None]) -> None:
    count = len(m.ranks)
    if len(m.spans) != 1:
        raise InvalidInput(f"AA: its payload must be one interval of each block, not {len(m.spans)}")
    if m.window == (0, 0):
        put("window", (0, count))
    first, last = m.window
    if not (0 <= first < last <= count):
        raise InvalidInput(f"AA: its window must lie within (i+0):(i+{count}), not (i+{first}):(i+{last})")
    alone = tuple((rank,) for rank in m.ranks)
    for name in ("held", "bound"):
        groups: Groups = getattr(m, name) or alone
        if len(groups) != count:
            raise InvalidInput(f"AA: {name} needs {count} sets of processes, one per rank, not {len(groups)}")
        _check_ranks("AA", tuple(chain.from_iterable(groups)), name)
        put(name, tuple(tuple(sorted(group)) for group in groups))


def _check_ranks(kind: str, ranks: tuple[int, ...], what: str) -> None:
    if not 1 <= len(ranks) <= MAX_RANK:
        raise InvalidInput(f"{kind}: {what}: must be 1..{MAX_RANK} of them, not {len(ranks)}")
    if min(ranks) < 0 or max(ranks) >= MAX_RANK:
        raise InvalidInput(f"{kind}: {what}: must be 0..{MAX_RANK - 1}")
    if len(set(ranks)) != len(ranks):
        again = next(a for a, b in pairwise(sorted(ranks)) if a == b)
        raise InvalidInput(f"{kind}: {what}: names {again} twice")


def _dotted(path: Sequence[int]) -> str:
    return ".".join(str(number) for number in path)
