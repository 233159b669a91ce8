# SPDX-License-Identifier: Apache-2.0
"""The messages of a Chakra execution trace, described by field number, and the file form: each message follows its
length.

Only fields that are read or written here are described; the protobuf library skips the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import InvalidInput
from .trace_files import read_bytes

MAX_NODES = 2_000_000
COMP, SEND, RECV, COLLECTIVE = 4, 5, 6, 7
NODE_TYPES = {
    0: "INVALID_NODE", 1: "METADATA_NODE", 2: "MEM_LOAD_NODE", 3: "MEM_STORE_NODE", COMP: "COMP_NODE",
    SEND: "COMM_SEND_NODE", RECV: "COMM_RECV_NODE", COLLECTIVE: "COMM_COLL_NODE", 8: "STORAGE_NODE", 9: "BATCH_NODE",
    10: "CHECKPOINT_NODE",
}  # fmt: skip
COMM_TYPES = (
    "all_reduce", "reduce", "all_gather", "gather", "scatter", "broadcast", "all_to_all", "reduce_scatter",
    "reduce_scatter_block", "barrier",
)  # fmt: skip
PART = ("all_gather", "gather")
"""Collectives of which Chakra counts the send buffer of a rank, which is the smaller of its two buffers."""
GROUPS_FILE = "comm_groups.json"
"""The file beside the traces with the groups by name; ASTRA-sim takes it as communicator group configuration."""
OURS = "stretto_workload"
"""The attribute that marks files written by Stretto, in which an op has the same node id on all ranks."""
RANKS, SAMPLES, UNIT = "stretto_ranks", "stretto_samples", "stretto_unit"
"""Further attributes in the metadata of files written by Stretto."""
_INT32 = ("comm_src", "comm_dst", "comm_tag")
"""The attributes that Chakra's feeder reads from ``int32_val``; all other numbers are ``int64_val`` there."""

_SCALARS = (
    "double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32", "fixed64", "sfixed32",
    "sfixed64", "bool", "string",
)  # fmt: skip
"""Types of an attribute, which holds one value (field 3, 5, ...) or a list (field 4, 6, ...) of its type."""


@cache
def _messages() -> dict[str, Any]:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="chakra.proto", package="chakra", syntax="proto3")

    def message(name: str, fields: list[tuple[str, int, str, bool]]) -> None:
        found = file.message_type.add(name=name)
        for field, number, kind, repeated in fields:
            entry = found.field.add(name=field, number=number)
            entry.label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            if kind in _SCALARS:
                entry.type = getattr(kinds, f"TYPE_{kind.upper()}")
            else:
                entry.type, entry.type_name = kinds.TYPE_MESSAGE, f".chakra.{kind}"

    attribute: list[tuple[str, int, str, bool]] = [("name", 1, "string", False)]
    for at, kind in enumerate(_SCALARS):
        message(f"{kind}s", [("values", 1, kind, True)])
        attribute += [(f"{kind}_val", 3 + 2 * at, kind, False), (f"{kind}_list", 4 + 2 * at, f"{kind}s", False)]
    message("Attribute", attribute)
    value = file.message_type[-1]
    value.oneof_decl.add(name="value")
    for field in value.field[1:]:
        field.oneof_index = 0
    message("Metadata", [("version", 1, "string", False), ("attr", 2, "Attribute", True)])
    message("Node", [
        ("id", 1, "uint64", False), ("name", 2, "string", False), ("type", 3, "int32", False),
        ("ctrl_deps", 4, "uint64", True), ("data_deps", 5, "uint64", True), ("duration_micros", 7, "uint64", False),
        ("attr", 10, "Attribute", True),
    ])  # fmt: skip
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = ("Metadata", "Node")
    return {n: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"chakra.{n}")) for n in names}


def decode(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """The attributes of a file, and its nodes."""
    from google.protobuf.message import DecodeError

    kinds = _messages()
    about: dict[str, Any] = {}
    nodes: list[Any] = []
    for number, (at, body) in enumerate(_bodies(read_bytes(path), path)):
        if number > MAX_NODES:
            raise InvalidInput(f"{path}: more than {MAX_NODES} nodes")
        message = kinds["Node" if number else "Metadata"]()
        try:
            message.ParseFromString(body)
        except DecodeError as error:
            what = f"node {number - 1}" if number else "its metadata"
            raise InvalidInput(f"{path}: not a Chakra trace: {what} (at byte {at}) cannot be read: {error}") from None
        if number:
            nodes.append(message)
        else:
            about = attributes(message)
    if not nodes and OURS not in about:
        raise InvalidInput(f"{path}: no nodes in it")
    return about, nodes


def encode(about: dict[str, Any], nodes: list[dict[str, Any]]) -> bytes:
    """A file from its attributes and its nodes (fields by name, attributes under ``attr``)."""
    kinds = _messages()
    out = bytearray()
    for number, fields in enumerate([{"version": "0.0.4", "attr": about}, *nodes]):
        message = kinds["Node" if number else "Metadata"]()
        for name, value in fields.items():
            if name == "attr":
                for key, held in value.items():
                    _set(message.attr.add(name=key), key, held)
            elif isinstance(value, list):
                getattr(message, name).extend(value)
            else:
                setattr(message, name, value)
        body = message.SerializeToString(deterministic=True)
        out += _varint(len(body)) + body
    return bytes(out)


def attributes(message: Any) -> dict[str, Any]:
    """The attributes of a message as plain values and lists."""
    out = {}
    for attr in message.attr:
        field = attr.WhichOneof("value")
        if field is not None:
            value = getattr(attr, field)
            out[attr.name] = list(value.values) if field.endswith("_list") else value
    return out


def _set(attr: Any, name: str, value: Any) -> None:
    """Store a number in the field from which Chakra's feeder reads it; the feeder would read 0 from any other field."""
    if isinstance(value, list):
        kind = {bool: "bool", str: "string"}.get(type(value[0]) if value else int, "uint64")
        getattr(attr, f"{kind}_list").values.extend(value)
    elif name in _INT32 and type(value) is int:
        attr.int32_val = value
    else:
        kind = {bool: "bool", int: "int64", float: "double", str: "string"}[type(value)]
        setattr(attr, f"{kind}_val", value)


def _bodies(data: bytes, path: Path) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        start, length, shift = at, 0, 0
        while True:
            if at >= len(data) or shift > 28:
                problem = "the file ends inside a length" if at >= len(data) else "a length has no end"
                raise InvalidInput(f"{path}: not a whole Chakra trace: {problem} (at byte {start})")
            byte = data[at]
            length |= (byte & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if byte < 0x80:
                break
        if length > len(data) - at:
            raise InvalidInput(
                f"{path}: not a whole Chakra trace: a message of {length} bytes at byte {start}, "
                f"but only {len(data) - at} follow"
            )
        yield start, data[at : at + length]
        at += length


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
