# SPDX-License-Identifier: Apache-2.0
"""Sketches in files: Stretto's versioned YAML, and TACCL's JSON (as in its paper, or as in its repository)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from ..errors import InvalidInput, unknown
from ..files import convert, naming_lines, parse_json, parse_yaml, plain, read_text, write_file
from ..units import parse_bytes
from .sketch import BALANCE, PATTERNS, STRATEGIES, Connections, Hyperedge, LinkRule, Sketch

VERSION = 1
MAX_FILE_BYTES = 1 << 20
INTRANODE = ("switch", "none", *BALANCE[1:])

GpuNumber = Annotated[int, Meta(ge=0, le=1 << 16)]
Size = int | str
_COMMENT = re.compile(r'("(?:[^"\\]|\\.)*")|//[^\n]*')


class _Rule(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    src: list[int | str] = []
    dst: list[int | str] = []
    chunks: list[int] = []


class _Links(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    channels: str | list[str] = "auto"
    keep: list[_Rule] = []
    drop: list[_Rule] = []


class _Switch(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    gpus: list[GpuNumber]
    strategy: str = "none"


class _Relays(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    internode_conn: str | dict[str | int, list[GpuNumber]] = "fully-connected"
    beta_split: dict[str | int, float] = {}
    chunk_to_relay_map: tuple[int, int] | None = None
    gpus_to_sender: dict[str | int, list[GpuNumber]] = {}
    own_first: bool = False


class _File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    stretto: Literal["sketch"]
    version: int
    name: str = "sketch"
    nodes: int | None = None
    links: _Links = msgspec.field(default_factory=_Links)
    switches: list[_Switch] = []
    balance: str = "none"
    relays: _Relays = msgspec.field(default_factory=_Relays)
    symmetry_offsets: list[tuple[int, int]] = []
    input_chunkup: int = 1
    input_size: Size | None = None


class _Intranode(msgspec.Struct, forbid_unknown_fields=True):
    strategy: str = "none"
    switches: list[list[GpuNumber]] = []
    switch_hyperedge_strategy: list[str] = []


class _Internode(msgspec.Struct, forbid_unknown_fields=True):
    strategy: str = "relay"
    internode_conn: str | dict[str, list[GpuNumber]] = "fully-connected"
    beta_split: dict[str, float] = {}
    chunk_to_relay_map: tuple[int, int] | None = None
    gpus_to_sender_rev_map: dict[str, list[GpuNumber]] | None = None
    enforce_ordering: bool = False


class _Hyper(msgspec.Struct, forbid_unknown_fields=True):
    input_chunkup: int = 1
    input_size: Size | None = None


class _Taccl(msgspec.Struct, forbid_unknown_fields=True):
    intranode_sketch: _Intranode
    internode_sketch: _Internode | None = None
    nnodes: int | None = None
    symmetry_offsets: list[tuple[int, int]] = []
    hyperparameters: _Hyper = msgspec.field(default_factory=_Hyper)


def load(path: str | Path) -> Sketch:
    """Load a sketch from a file of either form."""
    return loads(read_text(path, max_bytes=MAX_FILE_BYTES), where=str(path), name=Path(path).stem)


def loads(text: str, *, where: str = "<text>", name: str = "sketch") -> Sketch:
    """Read a sketch from the text of a file of either form.

    Args:
        text: The text of the file.
        where: What errors start with, usually the path.
        name: The sketch's name, for TACCL's form, which holds none.

    Returns:
        The sketch.

    Raises:
        InvalidInput: A field is wrong; the message carries its path.
    """
    if text.lstrip().startswith(("{", "//")):
        # TACCL's paper prints its sketch with // comments, which are not valid JSON.
        data = parse_json(_COMMENT.sub(lambda found: found[1] or "", text), where=where)
    else:
        data = parse_yaml(text, where=where)
    if not isinstance(data, dict):
        raise InvalidInput(f"{where}: a sketch is a table of fields")
    with naming_lines(text, where=where):
        return _ours(data) if "stretto" in data else _theirs(data, name)


def dumps(sketch: Sketch) -> str:
    """The text of a sketch's YAML file.

    >>> print(dumps(Sketch(name="pairs", symmetry_offsets=((2, 8),))), end="")
    stretto: sketch
    version: 1
    name: pairs
    symmetry_offsets:
    - [2, 8]
    """
    conn = sketch.internode_conn
    form = _File(
        stretto="sketch",
        version=VERSION,
        name=sketch.name,
        nodes=sketch.nodes,
        links=_Links(
            channels=sketch.channels if isinstance(sketch.channels, str) else list(sketch.channels),
            keep=[_Rule(src=list(r.src), dst=list(r.dst), chunks=list(r.chunks)) for r in sketch.keep],
            drop=[_Rule(src=list(r.src), dst=list(r.dst), chunks=list(r.chunks)) for r in sketch.drop],
        ),
        switches=[_Switch(gpus=list(s.gpus), strategy=s.strategy) for s in sketch.switches],
        balance=sketch.balance,
        relays=_Relays(
            internode_conn=conn if isinstance(conn, str) else {k: list(v) for k, v in conn.items()},
            beta_split={k: n for k, n in sketch.beta_split.items()},
            chunk_to_relay_map=sketch.chunk_to_relay_map,
            gpus_to_sender={k: list(v) for k, v in sketch.gpus_to_sender.items()},
            own_first=sketch.own_first,
        ),
        symmetry_offsets=list(sketch.symmetry_offsets),
        input_chunkup=sketch.input_chunkup,
        input_size=None if sketch.input_bytes is None else round(sketch.input_bytes),
    )
    # Keys are written one by one: a whole mapping without lists would be written in braces, and be read as JSON.
    parts = (
        yaml.safe_dump({key: value}, sort_keys=False, width=100, default_flow_style=None if nested else False)
        for key, value in plain(form).items()
        for nested in (isinstance(value, dict | list),)
    )
    return "".join(parts)


def save(sketch: Sketch, path: str | Path) -> None:
    """Write the versioned YAML form of a sketch."""
    write_file(path, dumps(sketch))


def _ours(data: dict[str, Any]) -> Sketch:
    if data.get("version") != VERSION:
        raise InvalidInput(f"$.version: must be {VERSION}, not {data.get('version')!r}")
    form = convert(data, _File, where="")
    links, relays = form.links, form.relays
    return Sketch(
        name=form.name,
        nodes=form.nodes,
        channels=links.channels if isinstance(links.channels, str) else tuple(links.channels),
        keep=tuple(LinkRule(src=tuple(r.src), dst=tuple(r.dst), chunks=tuple(r.chunks)) for r in links.keep),
        drop=tuple(LinkRule(src=tuple(r.src), dst=tuple(r.dst), chunks=tuple(r.chunks)) for r in links.drop),
        switches=tuple(Hyperedge(gpus=tuple(s.gpus), strategy=s.strategy) for s in form.switches),
        balance=form.balance,
        internode_conn=_connections(relays.internode_conn, "$.relays.internode_conn"),
        beta_split=_by_gpu(relays.beta_split, "$.relays.beta_split"),
        chunk_to_relay_map=relays.chunk_to_relay_map,
        gpus_to_sender=_lists_by_gpu(relays.gpus_to_sender, "$.relays.gpus_to_sender"),
        own_first=relays.own_first,
        symmetry_offsets=tuple(form.symmetry_offsets),
        input_chunkup=form.input_chunkup,
        input_bytes=_size(form.input_size, "$.input_size"),
    )


def _theirs(data: dict[str, Any], name: str) -> Sketch:
    form = convert(data, _Taccl, where="")
    inner, hyper = form.intranode_sketch, form.hyperparameters
    outer = form.internode_sketch or _Internode()
    if inner.strategy not in INTRANODE:
        raise InvalidInput(f"$.intranode_sketch.strategy: {unknown('strategy', inner.strategy, INTRANODE)}")
    if outer.strategy != "relay":
        raise InvalidInput(f"$.internode_sketch.strategy: {unknown('strategy', outer.strategy, ['relay'])}")
    switches: list[Hyperedge] = []
    if inner.strategy == "switch":
        if not inner.switches or len(inner.switches) != len(inner.switch_hyperedge_strategy):
            raise InvalidInput(
                f"$.intranode_sketch.switch_hyperedge_strategy: needs one of {', '.join(STRATEGIES)} for each of the "
                f"{len(inner.switches)} switches (at least one), not {len(inner.switch_hyperedge_strategy)}"
            )
        # Repeated switches are TACCL's way to write the planes of one NVSwitch; the cluster's ports carry their sum.
        planes = dict(zip(map(tuple, inner.switches), inner.switch_hyperedge_strategy, strict=True))
        switches = [Hyperedge(gpus=gpus, strategy=strategy) for gpus, strategy in planes.items()]
    return Sketch(
        name=name,
        nodes=form.nnodes,
        switches=tuple(switches),
        balance=inner.strategy if inner.strategy in BALANCE else "none",
        internode_conn=_connections(outer.internode_conn, "$.internode_sketch.internode_conn"),
        beta_split=_by_gpu(outer.beta_split, "$.internode_sketch.beta_split"),
        chunk_to_relay_map=outer.chunk_to_relay_map,
        gpus_to_sender=_lists_by_gpu(outer.gpus_to_sender_rev_map or {}, "$.internode_sketch.gpus_to_sender_rev_map"),
        own_first=outer.enforce_ordering,
        symmetry_offsets=tuple(form.symmetry_offsets),
        input_chunkup=hyper.input_chunkup,
        input_bytes=_size(hyper.input_size, "$.hyperparameters.input_size"),
    )


def _connections(given: str | Mapping[Any, list[int]], where: str) -> Connections:
    if isinstance(given, str):
        if given not in PATTERNS:
            raise InvalidInput(f"{where}: {unknown('pattern', given, (*PATTERNS, 'a table of GPUs'))}")
        return given
    return _lists_by_gpu(given, where)


def _lists_by_gpu(given: Mapping[Any, list[int]], where: str) -> dict[int, tuple[int, ...]]:
    return {gpu: tuple(values) for gpu, values in _by_gpu(given, where).items()}


def _by_gpu(given: Mapping[Any, Any], where: str) -> dict[int, Any]:
    found = {}
    for key, value in given.items():
        if not (isinstance(key, int) or re.fullmatch(r"[0-9]{1,6}", key)):
            raise InvalidInput(f"{where}: keys are the numbers of GPUs, not {key!r}")
        found[int(key)] = value
    return found


def _size(given: Size | None, where: str) -> float | None:
    if given is None:
        return None
    try:
        return float(parse_bytes(str(given)))
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from None
