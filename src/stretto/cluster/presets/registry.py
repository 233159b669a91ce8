# SPDX-License-Identifier: Apache-2.0
"""The registry of presets, and the checks that all of them share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...errors import InvalidInput, unknown
from ...registry import Registry
from ...units import is_number
from ..model import Cluster
from ..wiring import MAX_DEVICES

Build = Callable[..., Cluster]


class PresetInfo(NamedTuple):
    """The name, description and default size of a preset: one line of ``stretto cluster list``."""

    name: str
    description: str
    default_nodes: int


@dataclass(frozen=True, kw_only=True)
class _Preset:
    info: PresetInfo
    build: Build
    max_nodes: int
    options: tuple[str, ...]


_PRESETS = Registry[_Preset]("preset")


def register(
    name: str,
    description: str,
    *,
    default_nodes: int,
    devices_per_node: int = 1,
    max_nodes: int | None = None,
    replace: bool = False,
) -> Callable[[Build], Build]:
    """Register a preset: a decorator for its builder ``build(name, nodes, *, option=default, ...) -> Cluster``.

    `preset` calls the builder each time a user asks for the name, with the registered name and a checked number of
    nodes. The builder's keyword-only arguments are the preset's options; they need defaults. An option called ``dims``
    is a sequence of whole numbers >= 1, options that end in ``_us`` are numbers >= 0, all others numbers > 0: values
    are checked before the call. The builder checks further limits itself (it raises `InvalidInput` that names the
    option) and returns a new cluster called ``f"{name}:{nodes}"``, usually made with `Wiring` or `grid.regular`, whose
    notes list what was assumed. One builder may be registered under several names. A preset of a third party is known
    once the module that registers it has been imported; `STRETTO_PLUGINS` names such modules (docs/plugins.md).

    Args:
        name: The name that users write.
        description: What ``stretto cluster list`` shows, in at most about 60 characters.
        default_nodes: The number of nodes when the user gives none.
        devices_per_node: The most devices of a node, >= 1.
        max_nodes: The largest number of nodes; as many as make `MAX_DEVICES` devices when not given.
        replace: Whether a preset that has the name gives way.

    Returns:
        A decorator that registers the builder and returns it unchanged; it raises `InvalidInput` for a name that is
        taken.

    >>> from stretto.cluster.wiring import Wiring, numbered
    >>> @register("example_star", "devices around one switch", default_nodes=4)
    ... def star(name: str, nodes: int, *, gb_per_s: float = 25.0) -> Cluster:
    ...     wiring = Wiring(numbered("gpu", nodes), hosts=range(nodes))
    ...     hub = wiring.add(["hub"], kind="switch")
    ...     wiring.duplex(wiring.devices, hub, gb_per_s=gb_per_s, alpha_us=1.0, back_us=0.0, channel="ethernet")
    ...     return wiring.cluster(f"{name}:{nodes}", notes=["assumed: 1 us for a message"])
    >>> preset("example_star", gb_per_s=12.5)
    <Cluster example_star:4: 4 devices on 4 hosts, 8 links over ethernet>
    >>> _PRESETS.forget("example_star")
    """

    def keep(build: Build) -> Build:
        parameters = inspect.signature(build).parameters.values()
        made = _Preset(
            info=PresetInfo(name, description, default_nodes),
            build=build,
            max_nodes=max_nodes or MAX_DEVICES // devices_per_node,
            options=tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY),
        )
        _PRESETS.register(name, made, replace=replace)
        return build

    return keep


def preset(name: str, *, nodes: int | None = None, **options: Any) -> Cluster:
    """Make a cluster by name.

    Args:
        name: The name of a registered preset.
        nodes: Hosts for machines, devices for regular networks; 1 to the preset's largest, its default when not given.
        **options: Options of that preset.

    Returns:
        The cluster.

    Raises:
        InvalidInput: The name, an option or the number of nodes is not valid; the message lists the choices.

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
    """Every preset as ``(name, description, default_nodes)``, in the order of registration (family by family)."""
    return [entry.info for entry in _PRESETS.values()]


def check_nodes(what: str, nodes: Any, most: int) -> None:
    """Refuse a node count that is not a whole number in range.

    Args:
        what: The preset or file form, as the message shall call it.
        nodes: The value that the user gave.
        most: The largest valid count.

    Raises:
        InvalidInput: The count is not a whole number 1..most.
    """
    if not isinstance(nodes, int) or isinstance(nodes, bool) or not 1 <= nodes <= most:
        raise InvalidInput(f"nodes: {what} takes 1 to {most} nodes, not {nodes!r}")


def check_options(what: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse unknown options and invalid values: ``dims`` takes sides, ``*_us`` numbers >= 0, all others numbers > 0.

    Args:
        what: The preset or file form, as the message shall call it.
        options: The options that the user gave.
        known: The names that are valid.

    Raises:
        InvalidInput: An option is unknown or its value is out of range.
    """
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
