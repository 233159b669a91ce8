# SPDX-License-Identifier: Apache-2.0
"""Builders: each makes a whole strategy by one rule, as known systems do.

>>> from stretto.strategy import zoo
>>> build("parallax", zoo.model("ncf_sparse", scale=0.01), 4).is_lossless
True

A builder is one function, ``builder(model, there, option=default, ...)``, that returns one `NodeConfig` per variable of
the model, in any order; ours are entries of `_MAKERS`, others are made known by `register_builder`. `build` calls it
once per strategy, in the process that asks (the command line, the search, or every rank of a job that calls
`distribute` without a strategy), so equal arguments must give equal results.

* It may assume a valid `ModelSpec` and `Resources` with at least one device; it needs no cluster and no running job.
* Options come after the first two parameters and have defaults: a bool, int or float default fixes the type that is
  accepted.
  The builder checks ranges and raises `InvalidInput` that begins with the option's name.
* It names devices by ``there.devices``, and gives servers only to ``there.servers``: those that were asked to serve
  alone (``serve=``), else all. It sets no encoder and no staleness: `build` adds these to all nodes
  afterwards.
* The first line of its docstring is what the command line shows. `build` checks the result against the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

from ...errors import InvalidInput, unknown
from ...registry import Registry
from ...units import is_number
from ..model import ModelSpec, Variable
from ..representation import NodeConfig, Strategy, Sync
from ..resources import Resources, Where, resources
from . import all_reduce, hybrid, parameter_server, sharded

Builder = Callable[..., tuple[NodeConfig, ...]]


@dataclass(frozen=True, kw_only=True)
class Info:
    """A registered builder: its function, and one line that describes it."""

    make: Builder
    about: str

    @property
    def options(self) -> tuple[str, ...]:
        """The names of the builder's own options."""
        return tuple(signature(self.make).parameters)[2:]


_MAKERS: dict[str, Builder] = {
    "all_reduce": all_reduce.all_reduce,
    "partitioned_all_reduce": all_reduce.partitioned_all_reduce,
    "random_axis": all_reduce.random_axis,
    "ps": parameter_server.ps,
    "ps_balanced": parameter_server.ps_balanced,
    "partitioned_ps": parameter_server.partitioned_ps,
    "uneven_partitioned_ps": parameter_server.uneven_partitioned_ps,
    "parallax": hybrid.parallax,
    "zero1": sharded.zero1,
    "zero2": sharded.zero2,
}
BUILDERS = Registry[Info]("builder")
"""All builders by name: ours, then those that others have registered."""


def register_builder(name: str, make: Builder, *, replace: bool = False) -> None:
    """Make a builder known by a name: to `build` and to searches; to the command line where `STRETTO_PLUGINS` names it.

    Args:
        name: the name.
        make: the builder; see the contract above.
        replace: whether a builder that has the name gives way.

    Raises:
        InvalidInput: another builder has this name.
    """
    BUILDERS.register(name, Info(make=make, about=(make.__doc__ or "").partition("\n")[0]), replace=replace)


for _name, _make in _MAKERS.items():
    register_builder(_name, _make)


def build(
    name: str, model: ModelSpec, where: Where, *, encoder: str = "none", staleness: int = 0,
    serve: Sequence[str] = (), **options: Any,
) -> Strategy:  # fmt: skip
    """The strategy that a builder makes for a model on a cluster, on named devices, or on a number of ranks.

    >>> from stretto.strategy import zoo
    >>> build("all_reduce", zoo.model("vgg16", scale=0.05), 2, chunk=8).node("features.0.weight").sync.group
    0

    Args:
        name: one of `BUILDERS`.
        model: the model.
        where: a cluster, resources, names of devices, or a number of ranks.
        encoder: encoder of every dense gradient, such as "float16" or "topk:0.01".
        staleness: staleness of every parameter server, -1..16.
        serve: devices that do not train, but only serve; whatever the builder gives to servers is placed on these.
        **options: options of the builder, see ``BUILDERS[name].options``.

    Returns:
        The checked strategy.

    Raises:
        InvalidInput: a name or option is unknown, out of range, or does not fit the model.
    """
    if name not in BUILDERS:
        raise unknown("builder", name, BUILDERS)
    info = BUILDERS[name]
    for option in options:
        if option not in info.options:
            raise unknown(f"option of builder {name}", option, (*info.options, "encoder", "staleness", "serve"))
        _check_kind(option, options[option], signature(info.make).parameters[option].default)
    _check_kind("staleness", staleness, 0)
    there = replace(resources(where), serving=tuple(serve))
    for device in serve:
        if device not in there.devices:
            raise InvalidInput(f"serve: {unknown('device', device, there.devices)}")
    try:
        nodes = info.make(model, there, **options)
    except TypeError as error:
        raise InvalidInput(f"builder {name}: {error}") from None
    _check_servers(name, nodes, there)
    nodes = tuple(_adjusted(node, model.variable(node.variable), encoder, staleness) for node in nodes)
    if staleness and not any(sync.staleness for node in nodes for sync in (node.sync, *node.parts)):
        raise InvalidInput(f"staleness: {name} has no parameter server for {model.name}; the rest is synchronous")
    given = dict(options)
    given |= {"encoder": encoder} if encoder != "none" else {}
    given |= {"staleness": staleness} if staleness else {}
    given |= {"serve": "+".join(serve)} if serve else {}
    made = Strategy(
        name=name, model=model.name, model_digest=model.digest, devices=there.devices, nodes=nodes,
        servers=tuple(serve),
        made_by=f"builder {name}({', '.join(f'{key}={value}' for key, value in given.items())})",
    )  # fmt: skip
    made.check(model)
    return made


def _check_kind(option: str, value: object, usual: object) -> None:
    """Raise `InvalidInput` if a value is no bool, or no number, of the kind that the option's default is of."""
    if isinstance(usual, bool) and not isinstance(value, bool):
        raise InvalidInput(f"{option}: must be true or false, not {value!r}")
    if type(usual) is int and (not isinstance(value, int) or isinstance(value, bool)):
        raise InvalidInput(f"{option}: must be a whole number, not {value!r}")
    if type(usual) is float and not is_number(value):
        raise InvalidInput(f"{option}: must be a number, not {value!r}")


def _check_servers(name: str, nodes: Sequence[NodeConfig], there: Resources) -> None:
    """Raise `InvalidInput` where a builder has placed something on a server that is not one of those asked for."""
    for node in nodes:
        for sync in (node.sync, *node.parts):
            outside = [device for device in sync.placement if there.serving and device not in there.serving]
            if outside:
                raise InvalidInput(
                    f"serve: builder {name} places {node.variable} on {outside[0]}, which is not one of "
                    f"{', '.join(there.serving)}"
                )


def _adjusted(node: NodeConfig, variable: Variable, encoder: str, staleness: int) -> NodeConfig:
    by_factors = variable.factors > 0 and all(cut == 1 for cut in node.partition)

    def one(sync: Sync) -> Sync:
        late = staleness if sync.kind == "parameter_server" else 0
        if late:
            # A stale rank does not wait for others, so it cannot meet them at a station.
            sync = replace(sync, transfer=())
        fits = not variable.sparse and sync.kind != "sharded"
        fits &= encoder != "sufficient_factors" or (by_factors and len(variable.shape) == 2)
        return replace(sync, encoder=encoder if fits else "none", staleness=late)

    return replace(node, sync=one(node.sync), parts=tuple(one(part) for part in node.parts))


__all__ = ["BUILDERS", "Info", "Resources", "build", "register_builder"]
