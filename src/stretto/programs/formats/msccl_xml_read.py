# SPDX-License-Identifier: Apache-2.0
"""The reader of MSCCL XML: it refuses what a runtime would stumble over, and is lenient where both runtimes are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from xml.etree.ElementTree import Element

import numpy as np

from ...collectives import Collective
from ...errors import CannotJudge, InvalidInput, unknown
from ...files import parse_xml
from ..lowered import (
    BUFFERS,
    INPUT,
    MAX_BYTES,
    NOP,
    OPS,
    OUTPUT,
    READS_SRC,
    RECEIVES,
    SCRATCH,
    SENDS,
    WRITES_DST,
    Lowered,
)
from .msccl_rules import (
    MAX_BLOCKS,
    MAX_BLOCKS_PER_CHANNEL,
    MAX_CHANNELS,
    MAX_COUNT,
    MAX_NAME,
    MAX_STEPS,
    NEW_NAMES,
    OLD_NAMES,
    PROTOCOLS,
)
from .named import MAX_ENTRIES, NamedCollective, entries_for

MAX_INT = (1 << 31) - 1
KINDS = {spelling: kind for names in (OLD_NAMES, NEW_NAMES) for kind, spelling in names.items()}
LOADED = ("all_reduce", "all_gather", "reduce", "broadcast", "all_to_all", "reduce_scatter")
"""The collectives that MSCCL's loader knows besides custom."""
SHARDED = ("all_gather", "reduce_scatter", "all_to_all", "all_to_all_v", "gather", "scatter")


@dataclass(frozen=True, kw_only=True)
class _Block:
    gpu: int
    id: int
    send: int
    recv: int
    channel: int
    rows: list[tuple[int, ...]]
    """The steps: op, src_buf, src_off, dst_buf, dst_off, count, dep_tb, dep_step, hasdep."""

    def where(self, step: int) -> str:
        return f"gpu {self.gpu} tb {self.id} step {step}"


@dataclass(frozen=True, kw_only=True)
class _Gpu:
    id: int
    sizes: tuple[int, int, int]
    """The declared sizes of input, output and scratch, in chunks."""
    blocks: list[_Block]


def loads(
    text: str, *, collective: Collective | None = None, in_place: bool | None = None, where: str = "MSCCL XML"
) -> Lowered:
    """Read a file of either dialect; the result is not verified yet.

    The format does not name a root: the root is the rank that alone has input (broadcast, scatter) or output (reduce,
    gather).

    Args:
        text: The text of the file.
        collective: The collective, for files that call it ``custom``; otherwise it follows from the file.
        in_place: The kind of call to read the file for where it serves both; out of place when not given.
        where: What errors in the XML start with, usually the path.

    Returns:
        The instruction streams.

    Raises:
        InvalidInput: The file is malformed or inconsistent; the message names the element.
    """
    root = parse_xml(text, where=where)
    if root.tag != "algo":
        raise InvalidInput(f"{where}: the root element must be <algo>, not <{root.tag}>")
    dialect = "new" if "outofplace" in root.attrib else "old"
    name = root.get("name", "msccl")
    if dialect == "old" and len(name.encode()) > MAX_NAME:
        raise InvalidInput(f"algo name: longer than {MAX_NAME} characters")
    num_gpus = _integer(root, "ngpus", "algo", 1, MAX_INT)
    channels = _integer(root, "nchannels", "algo", 1, MAX_CHANNELS)
    num_chunks = _integer(root, "nchunksperloop", "algo", 1, MAX_ENTRIES)
    protocol = _text(root, "proto", "algo")
    if protocol not in PROTOCOLS:
        raise unknown("algo proto", protocol, PROTOCOLS)
    # The old runtime takes a file without a range for all sizes; in the new one the two attributes are required.
    low, high = (
        _integer(root, key, "algo", 0, MAX_BYTES) if dialect == "new" or key in root.attrib else 0
        for key in ("minBytes", "maxBytes")
    )
    elements = _dense(root, "gpu", "algo")
    if len(elements) != num_gpus:
        raise InvalidInput(f"algo ngpus: says {num_gpus}, but there are {len(elements)} <gpu> elements")
    gpus = [_gpu(element, num_gpus, channels, dialect) for element in elements]
    _check_sizes(root, num_gpus, num_chunks, gpus)
    _check_bounds(gpus)
    _check_connections(gpus)
    if collective is None:
        collective = _collective(root, num_gpus, num_chunks, gpus, _aliased(root, dialect, in_place), entries_for(text))
    elif collective.num_ranks != num_gpus:
        raise InvalidInput(f"algo ngpus: is {num_gpus}, but the collective has {collective.num_ranks} ranks")
    else:
        wanted = collective.in_place if in_place is None else in_place
        collective = replace(collective, in_place=_aliased(root, dialect, wanted))
    return replace(_lowered(name, collective, protocol, gpus), min_bytes=low, max_bytes=high)


def _aliased(root: Element, dialect: str, in_place: bool | None) -> bool:
    """Whether the file is read as one whose input and output share memory."""
    inside = _integer(root, "inplace", "algo", 0, 1)
    outside = _integer(root, "outofplace", "algo", 0, 1) if dialect == "new" else 1 - inside
    if not inside and not outside:
        raise InvalidInput("algo inplace, outofplace: one of them must be 1")
    if in_place is None:
        return not outside
    if not (inside if in_place else outside):
        raise InvalidInput(f"algo: the file is not for {'in-place' if in_place else 'out-of-place'} calls")
    return in_place


def _collective(root: Element, n: int, chunks: int, gpus: list[_Gpu], in_place: bool, entries: int) -> Collective:
    """The collective that the file claims to implement, unless it has more than `entries` buffer positions."""
    coll = _text(root, "coll", "algo")
    if coll == "custom":
        raise CannotJudge("algo coll: custom does not say what must be true afterwards; give the collective")
    if coll in ("send", "recv"):
        source, target = _only(gpus, INPUT, coll), _only(gpus, OUTPUT, coll)
        return NamedCollective(kind="permute", ranks=tuple(range(n)), chunks=chunks, pairs=((source, target),)).build(
            entries
        )
    if coll not in KINDS:
        raise unknown("algo coll", coll, sorted({*KINDS, "custom", "send", "recv"}))
    kind = KINDS[coll]
    if kind in SHARDED:
        if chunks % n:
            raise InvalidInput(f"algo nchunksperloop: {coll} needs a multiple of ngpus = {n}, not {chunks}")
        chunks //= n
    side = {"broadcast": INPUT, "scatter": INPUT, "reduce": OUTPUT, "gather": OUTPUT}.get(kind)
    counts: tuple[tuple[float, ...], ...] = ()
    if kind == "all_to_all_v":
        if any(gpu.sizes[:2] != (n * chunks, n * chunks) for gpu in gpus):
            raise InvalidInput(
                "algo coll: alltoallv with unequal buffers does not say who sends what; give the collective"
            )
        counts = tuple((1.0,) * n for _ in range(n))
    return NamedCollective(
        kind=kind,
        ranks=tuple(range(n)),
        chunks=chunks,
        root=-1 if side is None else _only(gpus, side, coll),
        in_place=in_place and kind != "all_to_all_v",
        counts=counts,
    ).build(entries)


def _only(gpus: list[_Gpu], side: int, coll: str) -> int:
    """The only rank that has chunks in a buffer, else the only rank that never receives (or never sends)."""
    holders = [g.id for g in gpus if g.sizes[side]]
    if len(holders) == 1:
        return holders[0]
    moves = RECEIVES if side == INPUT else SENDS
    still = [g.id for g in gpus if not any(moves[row[0]] for b in g.blocks for row in b.rows)]
    if len(still) == 1:
        return still[0]
    what = "i_chunks" if side == INPUT else "o_chunks"
    raise InvalidInput(f"algo coll: cannot tell the root of {coll}; it alone should have {what} > 0")


def _gpu(element: Element, num_gpus: int, channels: int, dialect: str) -> _Gpu:
    where = f"gpu {element.get('id')}"
    i, o, s = (_integer(element, f"{buffer}_chunks", where, 0, MAX_ENTRIES) for buffer in BUFFERS)
    children = _dense(element, "tb", where, ignored=("copy",))
    if len(children) > MAX_BLOCKS[dialect]:
        raise InvalidInput(f"{where}: {len(children)} threadblocks are more than {MAX_BLOCKS[dialect]}")
    rank = int(element.attrib["id"])
    blocks = [_block(child, rank, num_gpus, channels, dialect) for child in children]
    return _Gpu(id=rank, sizes=(i, o, s), blocks=blocks)


def _block(element: Element, gpu: int, num_gpus: int, channels: int, dialect: str) -> _Block:
    tb = int(element.attrib["id"])
    where = f"gpu {gpu} tb {tb}"
    send, recv = (_integer(element, key, where, -1, num_gpus - 1) for key in ("send", "recv"))
    for key, peer in (("send", send), ("recv", recv)):
        if peer == gpu:
            raise InvalidInput(f"{where} {key}: a rank cannot be its own peer")
    local = send < 0 and recv < 0 and dialect == "old"
    channel = max(0, _integer(element, "chan", where, -1 if local else 0, channels - 1))
    children = _dense(element, "step", where, key="s")
    if len(children) > MAX_STEPS:
        raise InvalidInput(f"{where}: {len(children)} steps are more than {MAX_STEPS}")
    block = _Block(gpu=gpu, id=tb, send=send, recv=recv, channel=channel, rows=[])
    for s, child in enumerate(children):
        block.rows.append(_step(child, block.where(s)))
    _check_nops(block)
    return block


def _step(element: Element, where: str) -> tuple[int, ...]:
    kind = _text(element, "type", where)
    if kind not in OPS:
        raise unknown(f"{where} type", kind, OPS)
    op = OPS.index(kind)
    buffers = []
    for key in ("srcbuf", "dstbuf"):
        buffer = _text(element, key, where)
        if buffer not in BUFFERS:
            raise unknown(f"{where} {key}", buffer, BUFFERS)
        buffers.append(BUFFERS.index(buffer))
    lowest = -1 if op == NOP else 0
    src, dst = (_integer(element, key, where, lowest, MAX_INT) for key in ("srcoff", "dstoff"))
    count = _integer(element, "cnt", where, 0 if op == NOP else 1, MAX_COUNT)
    dep, dep_step = (_integer(element, key, where, -1, MAX_INT) for key in ("depid", "deps"))
    if (dep < 0) != (dep_step < 0):
        raise InvalidInput(f"{where}: depid {dep} and deps {dep_step} must both be given or both be -1")
    marked = _integer(element, "hasdep", where, 0, 1)
    return op, buffers[0], src, buffers[1], dst, count, dep, dep_step, marked


def _check_nops(block: _Block) -> None:
    for s, row in enumerate(block.rows):
        if row[0] == NOP and (s + 1 == len(block.rows) or block.rows[s + 1][6] < 0):
            raise InvalidInput(f"{block.where(s)}: a nop must be followed by a step that has a dependency")


def _check_connections(gpus: list[_Gpu]) -> None:
    """Check that a connection has one owner at each end and equal messages at both, and that waits can end."""
    sent: dict[tuple[int, int, int], list[tuple[int, str]]] = {}
    received: dict[tuple[int, int, int], list[tuple[int, str]]] = {}
    for gpu in gpus:
        owners: dict[tuple[str, int, int], int] = {}
        on_channel: dict[int, int] = {}
        for b in gpu.blocks:
            on_channel[b.channel] = on_channel.get(b.channel, 0) + 1
            if on_channel[b.channel] > MAX_BLOCKS_PER_CHANNEL:
                raise InvalidInput(
                    f"gpu {gpu.id}: more than {MAX_BLOCKS_PER_CHANNEL} threadblocks on channel {b.channel}"
                )
            for end, peer in (("send", b.send), ("recv", b.recv)):
                other = owners.setdefault((end, peer, b.channel), b.id)
                if peer >= 0 and other != b.id:
                    raise InvalidInput(
                        f"gpu {gpu.id} tb {b.id} {end}: tb {other} already owns peer {peer} on channel {b.channel}"
                    )
            for s, row in enumerate(b.rows):
                for moves, peer, table, key in (
                    (SENDS, b.send, sent, (gpu.id, b.send, b.channel)),
                    (RECEIVES, b.recv, received, (b.recv, gpu.id, b.channel)),
                ):
                    if not moves[row[0]]:
                        continue
                    if peer < 0:
                        raise InvalidInput(f"{b.where(s)}: {OPS[row[0]]} needs a peer, but its tb has none")
                    table.setdefault(key, []).append((row[5], b.where(s)))
                if row[6] >= 0:
                    _check_wait(gpu, b, s, row)
    for key in sorted({*sent, *received}):
        _check_fifo(key, sent.get(key, []), received.get(key, []))


def _check_wait(gpu: _Gpu, block: _Block, s: int, row: tuple[int, ...]) -> None:
    dep, step = row[6], row[7]
    if dep >= len(gpu.blocks) or step >= len(gpu.blocks[dep].rows):
        raise InvalidInput(f"{block.where(s)}: waits for tb {dep} step {step}, which does not exist")
    target = gpu.blocks[dep].rows[step]
    if target[0] == NOP or target[8] != 1:
        why = "a nop" if target[0] == NOP else "not marked hasdep=1"
        raise InvalidInput(f"{block.where(s)}: waits for tb {dep} step {step}, which is {why}")
    if dep == block.id and step >= s:
        raise InvalidInput(f"{block.where(s)}: waits for its own step {step}")


def _check_fifo(key: tuple[int, int, int], sent: Sequence[tuple[int, str]], got: Sequence[tuple[int, str]]) -> None:
    name = f"connection {key[0]}->{key[1]} on channel {key[2]}"
    for j, ((a, sender), (b, receiver)) in enumerate(zip(sent, got, strict=False)):
        if a != b:
            raise InvalidInput(f"{name}: message {j} has cnt {a} at {sender} but {b} at {receiver}")
    if len(sent) != len(got):
        verb, (_, at) = ("sent", sent[len(got)]) if len(sent) > len(got) else ("received", got[len(sent)])
        raise InvalidInput(
            f"{name}: {len(sent)} messages are sent and {len(got)} received; {at} has no partner ({verb} only)"
        )


def _check_sizes(root: Element, n: int, chunks: int, gpus: list[_Gpu]) -> None:
    """Check that buffers are as large as the chunks of a loop, or empty; MSCCL loads no other file."""
    kind = KINDS.get(_text(root, "coll", "algo"), "")
    if kind not in LOADED:
        return
    shares = (n if kind == "all_gather" else 1, n if kind == "reduce_scatter" else 1)
    for gpu in gpus:
        for buffer, share in zip((INPUT, OUTPUT), shares, strict=True):
            size = gpu.sizes[buffer]
            if size and size * share != chunks:
                wanted = f"{chunks // share}" if chunks % share == 0 else f"{chunks}/{share}"
                what = f"must be 0 or {wanted}, since nchunksperloop is {chunks}, not {size}"
                raise InvalidInput(f"gpu {gpu.id} {BUFFERS[buffer]}_chunks: {what}")


def _check_bounds(gpus: list[_Gpu]) -> None:
    """Check that every step stays inside the buffers that the file declares; MSCCL loads no other file."""
    if sum(g.sizes[SCRATCH] for g in gpus) > MAX_ENTRIES:
        raise InvalidInput(f"gpu s_chunks: more than {MAX_ENTRIES} in all")
    for gpu in gpus:
        for b in gpu.blocks:
            for s, row in enumerate(b.rows):
                for uses, buffer, offset in ((READS_SRC, row[1], row[2]), (WRITES_DST, row[3], row[4])):
                    if uses[row[0]] and offset + row[5] > gpu.sizes[buffer]:
                        raise InvalidInput(
                            f"{b.where(s)}: uses {BUFFERS[buffer]}[{offset}..{offset + row[5] - 1}], "
                            f"but gpu {gpu.id} declares {BUFFERS[buffer]}_chunks {gpu.sizes[buffer]}"
                        )


def _lowered(name: str, collective: Collective, protocol: str, gpus: list[_Gpu]) -> Lowered:
    blocks = [b for gpu in gpus for b in gpu.blocks]
    table = np.array([row for b in blocks for row in b.rows], np.int32).reshape(-1, 9).T
    lengths = np.array([len(b.rows) for b in blocks], np.int64)
    return Lowered(
        name=name,
        collective=collective,
        scratch=np.array([g.sizes[SCRATCH] for g in gpus], np.int32),
        tb_rank=np.array([b.gpu for b in blocks], np.int32),
        tb_send=np.array([b.send for b in blocks], np.int32),
        tb_recv=np.array([b.recv for b in blocks], np.int32),
        tb_channel=np.array([b.channel for b in blocks], np.int32),
        tb_ptr=np.concatenate([[0], np.cumsum(lengths)]),
        op=table[0].astype(np.uint8),
        src_buf=table[1].astype(np.int8),
        src_off=table[2],
        dst_buf=table[3].astype(np.int8),
        dst_off=table[4],
        count=table[5],
        dep_tb=table[6],
        dep_step=table[7],
        protocol=protocol,
    )


def _dense(parent: Element, tag: str, where: str, *, key: str = "id", ignored: tuple[str, ...] = ()) -> list[Element]:
    """The child elements sorted by their number; the numbers must be 0, 1, 2, ..."""
    children = []
    for child in parent:
        if child.tag == tag:
            children.append((_integer(child, key, f"{where} <{tag}>", 0, MAX_INT), child))
        elif child.tag not in ignored:
            raise InvalidInput(f"{where}: expected <{tag}>, not <{child.tag}>")
    children.sort(key=lambda pair: pair[0])
    for index, (number, _) in enumerate(children):
        if number != index:
            raise InvalidInput(f"{where}: <{tag}> {key} must be 0, 1, 2, ...; {index} is missing or repeated")
    return [child for _, child in children]


def _text(element: Element, key: str, where: str) -> str:
    value = element.get(key)
    if value is None:
        raise InvalidInput(f"{where}: attribute {key} is missing")
    return value


def _integer(element: Element, key: str, where: str, low: int, high: int) -> int:
    text = _text(element, key, where)
    try:
        if len(text) > 20:
            raise ValueError
        value = int(text)
    except ValueError:
        raise InvalidInput(f"{where} {key}: expected a whole number, not {text[:40]!r}") from None
    if not low <= value <= high:
        raise InvalidInput(f"{where} {key}: must be {low}..{high}, not {value}")
    return value
