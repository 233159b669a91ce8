# SPDX-License-Identifier: Apache-2.0
"""Describes the decisions of a strategy in words, and the differences between two strategies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from ..errors import InvalidInput
from ..units import format_bytes
from .model import ModelSpec, Variable
from .representation import ASYNCHRONOUS, NodeConfig, Strategy, Sync

SHOWN = 6


@dataclass(frozen=True, kw_only=True)
class StrategyChange:
    """One decision in which two strategies differ; `part` is -1 if it concerns the whole variable."""

    variable: str
    part: int
    what: str
    before: str
    after: str


def diff(before: Strategy, after: Strategy) -> list[StrategyChange]:
    """Every decision that changed; strategies of different models raise `InvalidInput`."""
    if before.model_digest != after.model_digest:
        raise InvalidInput(
            f"{before.name} is for {before.model} ({before.model_digest}), "
            f"{after.name} for {after.model} ({after.model_digest})"
        )
    changes = []
    if before.devices != after.devices:
        changes.append(_change("", -1, "devices", before.devices, after.devices))
    if before.servers != after.servers:
        changes.append(_change("", -1, "servers", before.servers, after.servers))
    for old in before.nodes:
        changes += _node(old, after.node(old.variable))
    return changes


def _node(old: NodeConfig, new: NodeConfig) -> Iterator[StrategyChange]:
    if _cut(old) != _cut(new):
        yield _change(old.variable, -1, "partition", _cut(old), _cut(new))
        if bool(old.parts) or bool(new.parts):
            # Parts of different cuts cannot be compared one by one.
            yield _change(old.variable, -1, "parts", _kinds(old), _kinds(new))
            return
    count = max(len(old.parts), len(new.parts))
    for part in range(count or 1):
        a, b = (node.parts[part] if node.parts else node.sync for node in (old, new))
        for field in fields(Sync):
            was, now = getattr(a, field.name), getattr(b, field.name)
            if was != now:
                yield _change(old.variable, part if count else -1, field.name, was, now)


def _cut(node: NodeConfig) -> tuple[object, ...]:
    return () if all(cut == 1 for cut in node.partition) else node.partition


def _kinds(node: NodeConfig) -> str:
    return _counted([sync.kind for sync in node.parts or (node.sync,)])


def _change(variable: str, part: int, what: str, before: object, after: object) -> StrategyChange:
    return StrategyChange(variable=variable, part=part, what=what, before=_said(before), after=_said(after))


def _said(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(str(list(one)) if isinstance(one, tuple) else str(one) for one in value) or "none"
    return str(value)


def explain(strategy: Strategy, model: ModelSpec, *, variable: str | None = None) -> str:
    """A description of what happens to each variable, or to one; variables with equal decisions share a line.

    >>> from stretto.strategy import zoo
    >>> from stretto.strategy.builders import build
    >>> model = zoo.model("ncf_sparse", scale=0.01)
    >>> print(explain(build("parallax", model, 2, part_mb=0.001), model, variable="factor.items.weight"))
    factor.items.weight (267x3, 3.2 KB, sparse): cut 2 along axis 0; rows to 2 servers (rank1, rank0) and back

    Args:
        strategy: the strategy.
        model: the model that it is for.
        variable: name of one variable; None describes all.

    Returns:
        One or more lines of text.

    Raises:
        InvalidInput: the strategy is for another model, or the variable unknown.
    """
    strategy.check(model)
    if variable is not None:
        found = model.variable(variable)
        return f"{_title(found)}: {words(strategy.node(variable), found)}"
    alike: dict[str, list[Variable]] = {}
    for v in model.variables:
        alike.setdefault(words(strategy.node(v.name), v), []).append(v)
    lines = [
        f"{strategy.name} for {strategy.model} on {len(strategy.replicas)} devices"
        + (f" and {len(strategy.servers)} that only serve" if strategy.servers else "")
        + f" ({'trains as one process would' if strategy.is_lossless else 'not exact: encoded or stale'})"
    ]
    for said, group in alike.items():
        names = ", ".join(v.name for v in group[:SHOWN]) + (f" and {len(group) - SHOWN} more" if group[SHOWN:] else "")
        total = format_bytes(sum(v.nbytes for v in group))
        lines.append(f"{names} ({total}): {said}" if len(group) > 1 else f"{_title(group[0])}: {said}")
    return "\n".join(lines)


def words(node: NodeConfig, variable: Variable) -> str:
    """The decision for a variable, in one line."""
    cuts = [
        f"{cut if isinstance(cut, int) else len(cut)} along axis {axis}"
        + ("" if isinstance(cut, int) else f" unevenly ({_sizes(cut)})")
        for axis, cut in enumerate(node.partition)
        if cut != 1
    ]
    syncs = node.parts or (node.sync,)
    text = f"cut {' and '.join(cuts)}; " if cuts else ""
    return text + _synced(list(syncs), variable)


def _synced(syncs: list[Sync], variable: Variable) -> str:
    groups = [sync for sync in syncs if sync.kind == "parameter_server"]
    said = []
    if groups:
        servers = list(dict.fromkeys(sync.placement[0] for sync in groups))
        what = "rows" if variable.sparse else "sums"
        where = f"server {servers[0]}" if len(servers) == 1 else f"{len(servers)} servers ({_few(servers)})"
        said.append(f"{what} to {where} and back")
    for kind, name in (
        ("all_reduce", "all-reduce"), ("sparse_all_gather", "rows of all gathered everywhere"),
        ("sharded", "reduce-scatter, each rank updates its share, all-gather"),
    ):  # fmt: skip
        alike = [sync for sync in syncs if sync.kind == kind]
        if alike:
            merged = sorted({sync.group for sync in alike if sync.group >= 0})
            said.append(name + (f" with group {_few([str(number) for number in merged])}" if merged else ""))
    first = syncs[0]
    if any(sync.transfer for sync in syncs):
        said.append("through a station on each host")
    if any(sync.sequence for sync in syncs):
        said.append(f"in the order {_few(list(first.sequence))}" if first.sequence else "in an order of its own")
    encoders = sorted({sync.encoder for sync in syncs} - {"none"})
    said += [f"encoded as {_few(encoders)}"] if encoders else []
    late = {sync.staleness for sync in syncs} - {0}
    if late:
        said.append("asynchronous" if ASYNCHRONOUS in late else f"up to {max(late)} steps stale")
    return ", ".join(said)


def _title(variable: Variable) -> str:
    shape = "x".join(str(size) for size in variable.shape) or "scalar"
    return f"{variable.name} ({shape}, {format_bytes(variable.nbytes)}{', sparse' if variable.sparse else ''})"


def _sizes(cut: tuple[int, ...]) -> str:
    return _few([str(size) for size in cut])


def _few(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _counted(kinds: list[str]) -> str:
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
