# SPDX-License-Identifier: Apache-2.0
"""Clusters in files: Stretto's own YAML (or the same as JSON), and the foreign forms of `FORMS`.

A reader of `READERS` is called as ``read(data, name=..., **options)`` by `loads`, once its form has been recognised;
`data` is the parsed file, and its parameters with defaults are the options that users may give. It returns a
`Cluster`, or raises `InvalidInput` with the path of the bad field, before which `loads` puts the file's name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import InvalidInput, unknown
from ..files import exists, naming_lines, parse_text, read_text, write_file, yaml_text
from ..units import parse_number
from . import astra, description, nccl_xml, nvidia_smi, taccl_json, yaml_form
from .model import MULTICAST, Cluster
from .presets import preset, presets
from .presets.registry import check_nodes, check_options
from .wiring import MAX_DEVICES

MAX_FILE_BYTES = 32 << 20
"""YAML takes many seconds per megabyte to read; the same structure as JSON does not."""


def load(source: str | Path, *, nodes: int | None = None, **options: Any) -> Cluster:
    """Load a cluster from ``preset``, ``preset:nodes``, ``preset:nodes,key=value,...``, a file or a description.

    A file may carry the same tail (``topo.xml:4``): a file of one host is then repeated behind a switch. The suffix
    ``+multicast`` behind a preset or a file says that all switches multicast. A description is ``hosts: 2, gpus: 8 x
    h100, network: 8 x 400gbit``, on one line or three.

    Args:
        source: The preset or the path.
        nodes: How many hosts or devices, >= 1; overrides the number in `source`.
        **options: Options of the preset or of the reader; they override those in `source`.

    Returns:
        The cluster.

    Raises:
        InvalidInput: The preset, an option or a field of the file is not valid.

    >>> load("torus:4x2,alpha_us=1")
    <Cluster torus:4x2: 8 devices on 8 hosts, 24 links over dim0, dim1, dimensions 4x2>
    """
    if isinstance(source, str) and source.endswith(MULTICAST) and not exists(source):
        return load(source.removesuffix(MULTICAST), nodes=nodes, **options).with_multicast()
    if isinstance(source, str) and description.looks_like(source):
        check_options(FORMS["description"], options if nodes is None else {**options, "nodes": nodes}, [])
        return description.read(description.parse(source))
    head, tail = _split(source)
    given = _parse_tail(tail)
    if nodes is not None:
        given["nodes"] = nodes
    given.update(options)
    if not isinstance(head, Path):
        return preset(head, nodes=given.pop("nodes", None), **given)
    return loads(read_text(head, max_bytes=MAX_FILE_BYTES), where=str(head), name=head.stem, **given)


def loads(text: str, *, where: str = "<text>", name: str = "cluster", **options: Any) -> Cluster:
    """Read a cluster from the text of a file of any known form, which is recognised by its content.

    Args:
        text: The text of the file.
        where: What errors start with, usually the path.
        name: The cluster's name, for forms that hold none.
        **options: `nodes` and the other options of the form's reader.

    Returns:
        The cluster.

    Raises:
        InvalidInput: The form is unknown, a field is wrong or the form has no such option.
    """
    form, data = _sniff(text, where)
    reader = READERS[form]
    known = [p.name for p in inspect.signature(reader).parameters.values() if p.default is not p.empty]
    if "nodes" in options and "nodes" not in known:
        raise InvalidInput(f"nodes: {where} is {FORMS[form]}, which already describes the whole cluster")
    if "nodes" in options:
        check_nodes(FORMS[form], options["nodes"], MAX_DEVICES)
    check_options(FORMS[form], {k: v for k, v in options.items() if k != "nodes"}, known)
    with naming_lines(text, where=where):
        return reader(data, name=name, **options)


def save(cluster: Cluster, path: str | Path) -> None:
    """Write the versioned form: JSON where the name ends in ``.json``, YAML otherwise."""
    json = Path(path).suffix == ".json"
    text = yaml_form.dumps(cluster, json=json)
    write_file(path, text if json else yaml_text(text, path))


READERS: dict[str, Callable[..., Cluster]] = {
    "stretto": yaml_form.read,
    "nccl": nccl_xml.read,
    "nvidia_smi": nvidia_smi.read,
    "astra": astra.read,
    "taccl": taccl_json.read,
    "description": description.read,
}
FORMS = {
    "stretto": "a Stretto cluster file",
    "nccl": "an NCCL topology XML",
    "nvidia_smi": "an nvidia-smi topology",
    "astra": "an ASTRA-sim network YAML",
    "taccl": "a TACCL topology JSON",
    "description": "a description such as hosts: 2, gpus: 8 x h100, network: 8 x 400gbit",
}


def _sniff(text: str, where: str) -> tuple[str, Any]:
    start = text.lstrip("\ufeff \t\r\n")
    if start.startswith("<"):
        return "nccl", nccl_xml.parse(text, where=where)
    if nvidia_smi.looks_like(text):
        return "nvidia_smi", text
    if description.looks_like(text):
        return "description", description.parse(text)
    data = parse_text(text, where=where)
    if isinstance(data, dict):
        if "stretto" in data:
            return "stretto", data
        if "gpus_per_node" in data:
            return "taccl", data
        if "topology" in data or "npus_count" in data:
            return "astra", data
        if "gpus" in data:
            return "description", data
    raise InvalidInput(f"{where}: not a cluster: expected {', '.join(FORMS.values())}")


def _split(source: str | Path) -> tuple[str | Path, str]:
    if isinstance(source, Path):
        return source, ""
    known = {entry.name for entry in presets()}
    head, _, tail = source.partition(":")
    if head in known:
        return head, tail
    if source and exists(source):
        return Path(source), ""
    head, _, tail = source.rpartition(":") if ":" in source else (source, "", "")
    if head and (exists(head) or "/" in head or Path(head).suffix):
        return Path(head), tail
    raise InvalidInput(
        f"{unknown('preset', head, sorted(known))} (or give the path of a file, or {FORMS['description']})"
    )


def _parse_tail(tail: str) -> dict[str, Any]:
    """The options that the tail of a source (``4,key=value`` or ``4x4``) stands for."""
    options: dict[str, Any] = {}
    for at, item in enumerate(tail.split(",") if tail else []):
        key, equals, text = item.partition("=")
        try:
            value = _value(text if equals else key)
        except InvalidInput as error:
            raise InvalidInput(f"{key.strip() if equals else 'nodes'}: {error}") from None
        if equals:
            options[key.strip()] = value
        elif at == 0 and isinstance(value, tuple):
            options["dims"] = value
        elif at == 0 and isinstance(value, int):
            options["nodes"] = value
        else:
            raise InvalidInput(f"{item!r}: expected preset:nodes,key=value,... such as torus:16,gb_per_s=25")
    return options


def _value(text: str) -> int | float | tuple[int, ...] | str:
    text = text.strip()
    if re.fullmatch(r"\d{1,9}(x\d{1,9})+", text, re.ASCII):
        return tuple(int(side) for side in text.split("x"))
    number = parse_number(text)
    return text if number is None else number
