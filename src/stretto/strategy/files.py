# SPDX-License-Identifier: Apache-2.0
"""Strategies and models in files: versioned YAML, or JSON where the name ends so.

.. code-block:: yaml

    stretto: strategy
    version: 1
    name: parallax
    model: small
    model_digest: 0123456789abcdef       # the strategy is for this model only
    devices: [h0.gpu0, h0.gpu1, h1.gpu0] # one per rank, in the order of ranks
    nodes:
    - {variable: bias, sync: {group: 0}}
    - {variable: table, sync: {kind: parameter_server, placement: [h0.gpu0]}}
    - variable: weight
      partition: [[3, 1], 1]             # per axis a number of parts, or their sizes
      parts:                             # one for each part; without, all are as `sync` says
      - {kind: parameter_server, placement: [h1.gpu0]}
      - {group: 0}
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from ..errors import InvalidInput
from ..files import convert, naming_lines, parse_json, parse_yaml, plain, read_text, write_file
from .model import MAX_VARIABLES, ModelSpec, Variable
from .representation import MAX_PARTS, NodeConfig, Strategy, Sync

VERSION = 1
STRATEGY_VARIABLE = "STRETTO_STRATEGY"
"""The environment variable with the file of the strategy, for scripts that pass none to `distribute`."""
MAX_DEVICES = 1 << 16
MAX_ALL_PARTS = 1 << 20
MAX_YAML_BYTES = 8 << 20
"""Largest YAML file: reading YAML takes seconds per megabyte, reading the same as JSON does not."""

Text = Annotated[str, Meta(max_length=4096)]
Devices = Annotated[list[Text], Meta(max_length=MAX_DEVICES)]


class _Sync(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    kind: Text = "all_reduce"
    placement: Devices = []
    transfer: Devices = []
    sequence: Devices = []
    group: int = -1
    encoder: Text = "none"
    staleness: int = 0

    def sync(self) -> Sync:
        return Sync(
            kind=self.kind, placement=tuple(self.placement), transfer=tuple(self.transfer),
            sequence=tuple(self.sequence), group=self.group, encoder=self.encoder, staleness=self.staleness,
        )  # fmt: skip

    @classmethod
    def of(cls, sync: Sync) -> _Sync:
        return cls(
            kind=sync.kind, placement=list(sync.placement), transfer=list(sync.transfer),
            sequence=list(sync.sequence), group=sync.group, encoder=sync.encoder, staleness=sync.staleness,
        )  # fmt: skip


class _Node(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    variable: Text
    partition: Annotated[list[int | Annotated[list[int], Meta(max_length=MAX_PARTS)]], Meta(max_length=64)] = []
    sync: _Sync = msgspec.field(default_factory=_Sync)
    parts: Annotated[list[_Sync], Meta(max_length=MAX_PARTS)] = []


class _Strategy(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    stretto: Literal["strategy"]
    version: int
    name: Text
    model: Text
    model_digest: Text
    devices: Devices
    servers: Devices = []
    made_by: Text = ""
    notes: Annotated[list[Text], Meta(max_length=1024)] = []
    nodes: Annotated[list[_Node], Meta(max_length=MAX_VARIABLES)]


class _Variable(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: Text
    shape: Annotated[list[int], Meta(max_length=64)]
    dtype: Text = "float32"
    sparse: bool = False
    rows: int = 0
    forward_us: Annotated[float, Meta(ge=0, lt=1e15)] = 0.0
    backward_us: Annotated[float, Meta(ge=0, lt=1e15)] = 0.0
    also: Annotated[list[Text], Meta(max_length=1024)] = []
    factors: Annotated[int, Meta(ge=0)] = 0


class _Model(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    stretto: Literal["model"]
    version: int
    name: Text
    batch: Annotated[int, Meta(ge=0)] = 0
    runtime: Text = "graph"
    variables: Annotated[list[_Variable], Meta(max_length=MAX_VARIABLES)]


def strategy_text(strategy: Strategy, *, as_json: bool = False) -> str:
    """The file form of a strategy."""
    form = _Strategy(
        stretto="strategy", version=VERSION, name=strategy.name, model=strategy.model,
        model_digest=strategy.model_digest, devices=list(strategy.devices), servers=list(strategy.servers),
        made_by=strategy.made_by, notes=list(strategy.notes),
        nodes=[
            _Node(
                variable=node.variable,
                partition=[cut if isinstance(cut, int) else list(cut) for cut in node.partition],
                sync=_Sync.of(node.sync), parts=[_Sync.of(part) for part in node.parts],
            )
            for node in strategy.nodes
        ],
    )  # fmt: skip
    return _text(form, "nodes", as_json)


def read_strategy(text: str, *, where: str = "strategy", as_json: bool = False) -> Strategy:
    """A strategy from its file form.

    Args:
        text: the content of the file.
        where: name of the text in errors.
        as_json: whether the text is JSON; otherwise it is YAML.

    Returns:
        The strategy.

    Raises:
        InvalidInput: the text is not a strategy of this version; the error names the field.
    """
    data = _plain(text, where, as_json)
    with naming_lines(text, where=where):
        form = convert(data, _Strategy, where="")
    _check_version(form.version, where)
    if sum(max(len(node.parts), 1) for node in form.nodes) > MAX_ALL_PARTS:
        raise InvalidInput(f"{where}: $.nodes: at most {MAX_ALL_PARTS} parts in all")
    try:
        return Strategy(
            name=form.name, model=form.model, model_digest=form.model_digest, devices=tuple(form.devices),
            servers=tuple(form.servers), made_by=form.made_by, notes=tuple(form.notes),
            nodes=tuple(
                NodeConfig(
                    variable=node.variable,
                    partition=tuple(cut if isinstance(cut, int) else tuple(cut) for cut in node.partition),
                    sync=node.sync.sync(), parts=tuple(part.sync() for part in node.parts),
                )
                for node in form.nodes
            ),
        )  # fmt: skip
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from None


def load_strategy(path: str | Path) -> Strategy:
    """A strategy from a file: JSON if the name ends in ``.json``, else YAML."""
    return read_strategy(_read(path), where=str(path), as_json=_is_json(path))


def save_strategy(strategy: Strategy, path: str | Path) -> None:
    """Write a strategy to a file."""
    write_file(path, strategy_text(strategy, as_json=_is_json(path)))


def model_text(model: ModelSpec, *, as_json: bool = False) -> str:
    """The file form of a model."""
    form = _Model(
        stretto="model", version=VERSION, name=model.name, batch=model.batch, runtime=model.runtime,
        variables=[
            _Variable(
                name=v.name, shape=list(v.shape), dtype=v.dtype, sparse=v.sparse, rows=v.rows,
                forward_us=v.forward_us, backward_us=v.backward_us, also=list(v.also), factors=v.factors,
            )
            for v in model.variables
        ],
    )  # fmt: skip
    return _text(form, "variables", as_json)


def read_model(text: str, *, where: str = "model", as_json: bool = False) -> ModelSpec:
    """A model from its file form.

    Args:
        text: the content of the file.
        where: name of the text in errors.
        as_json: whether the text is JSON; otherwise it is YAML.

    Returns:
        The model.

    Raises:
        InvalidInput: the text is not a model of this version; the error names the field.
    """
    data = _plain(text, where, as_json)
    with naming_lines(text, where=where):
        form = convert(data, _Model, where="")
    _check_version(form.version, where)
    try:
        return ModelSpec(
            name=form.name, batch=form.batch, runtime=form.runtime,
            variables=tuple(
                Variable(
                    name=v.name, shape=tuple(v.shape), dtype=v.dtype, sparse=v.sparse, rows=v.rows,
                    forward_us=v.forward_us, backward_us=v.backward_us, also=tuple(v.also), factors=v.factors,
                )
                for v in form.variables
            ),
        )  # fmt: skip
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from None


def load_model(path: str | Path) -> ModelSpec:
    """A model from a file: JSON if the name ends in ``.json``, else YAML."""
    return read_model(_read(path), where=str(path), as_json=_is_json(path))


def save_model(model: ModelSpec, path: str | Path) -> None:
    """Write a model to a file."""
    write_file(path, model_text(model, as_json=_is_json(path)))


def _is_json(path: str | Path) -> bool:
    return Path(path).suffix == ".json"


def _read(path: str | Path) -> str:
    return read_text(path) if _is_json(path) else read_text(path, max_bytes=MAX_YAML_BYTES)


def _plain(text: str, where: str, as_json: bool) -> Any:
    return parse_json(text, where=where) if as_json else parse_yaml(text, where=where)


def _text(form: msgspec.Struct, listed: str, as_json: bool) -> str:
    """The file form with one line per variable."""
    data: dict[str, Any] = plain(form)
    if as_json:
        return msgspec.json.format(msgspec.json.encode(data), indent=1).decode() + "\n"
    rows = data.pop(listed)
    style: dict[str, Any] = {"sort_keys": False, "width": 10**9, "allow_unicode": True}
    # Each key is dumped as a mapping of its own, so that each list is on one line and each text is plain.
    head = (
        yaml.safe_dump({key: value}, default_flow_style=None if isinstance(value, list) else False, **style)
        for key, value in data.items()
    )
    lines = (yaml.safe_dump(row, default_flow_style=True, **style) for row in rows)
    return "".join(head) + f"{listed}:\n" + "".join(f"- {line}" for line in lines)


def _check_version(version: int, where: str) -> None:
    if version != VERSION:
        raise InvalidInput(f"{where}: version: this Stretto reads version {VERSION}, not {version}")
