"""The names of the presets, and the checks that all of them share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...errors import InvalidInput, unknown
from ...units import is_number
from ..model import Cluster
from ..wiring import MAX_DEVICES

Build = Callable[..., Cluster]


class PresetInfo(NamedTuple):
    """One line of ``stretto cluster list``."""

    name: str
    description: str
    default_nodes: int


@dataclass(frozen=True, kw_only=True)
class _Preset:
    info: PresetInfo
    build: Build
    max_nodes: int
    options: tuple[str, ...]


_PRESETS: dict[str, _Preset] = {}


def register(
    name: str,
    description: str,
    *,
    default_nodes: int,
    devices_per_node: int = 1,
    max_nodes: int | None = None,
) -> Callable[[Build], Build]:
    """Register a builder ``build(name, nodes, *, option=...)``; keyword-only arguments are its options."""

    def keep(build: Build) -> Build:
        parameters = inspect.signature(build).parameters.values()
        _PRESETS[name] = _Preset(
            info=PresetInfo(name, description, default_nodes),
            build=build,
            max_nodes=max_nodes or MAX_DEVICES // devices_per_node,
            options=tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY),
        )
        return build

    return keep


def preset(name: str, *, nodes: int | None = None, **options: Any) -> Cluster:
    """A cluster by name; `nodes` counts hosts for machines, devices for regular networks.

    >>> preset("torus", nodes=12)
    <Cluster torus:12: 12 devices on 12 hosts, 48 links over dim0, dim1, dimensions 3x4>
    """
    if name not in _PRESETS:
        raise unknown("preset", name, _PRESETS)
    chosen = _PRESETS[name]
    check_options(f"preset {name}", options, chosen.options)
    if nodes is None:
        return chosen.build(name, chosen.info.default_nodes, **options)
    check_nodes(f"preset {name}", nodes, chosen.max_nodes)
    return chosen.build(name, nodes, **options)


def presets() -> list[PresetInfo]:
    """Every preset as ``(name, description, default_nodes)``, family by family."""
    return [entry.info for entry in _PRESETS.values()]


def check_nodes(what: str, nodes: Any, most: int) -> None:
    """Refuse a node count that is no whole number in range."""
    if not isinstance(nodes, int) or isinstance(nodes, bool) or not 1 <= nodes <= most:
        raise InvalidInput(f"nodes: {what} takes 1 to {most} nodes, not {nodes!r}")


def check_options(what: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse unknown options, and values that are not a number in range or a list of sides."""
    for option, value in options.items():
        if option not in known:
            raise unknown(f"option of {what}", option, dict.fromkeys(("nodes", *known)))
        if option == "dims":
            if not isinstance(value, Sequence) or not all(isinstance(x, int) and x >= 1 for x in value):
                raise InvalidInput(f"dims: must be whole numbers >= 1 such as 4x4, not {value!r}")
            continue
        zero = option.endswith("_us")
        if not is_number(value) or value < 0 or (value == 0 and not zero):
            raise InvalidInput(f"{option}: must be a number {'>= 0' if zero else '> 0'}, not {value!r}")
