# SPDX-License-Identifier: Apache-2.0
"""MSCCL XML, the algorithm files of MSCCL and RCCL, in both dialects.

``old`` is what the original MSCCL runtime (NCCL 2.8 to 2.12) reads, ``new`` what its successor in NCCL 2.2x
and in RCCL reads. They differ in a few attributes and in how they spell some collectives.
"""

from __future__ import annotations

from dataclasses import replace
from xml.sax.saxutils import quoteattr

import numpy as np
from numpy.typing import NDArray

from ...collectives import Collective
from ...errors import InvalidInput, unknown
from ..lowered import BUFFERS, NOP, OPS, Lowered
from .msccl_rules import (
    DIALECTS,
    MAX_BLOCKS,
    MAX_BLOCKS_PER_CHANNEL,
    MAX_CHANNELS,
    MAX_COUNT,
    MAX_NAME,
    MAX_STEPS,
    NEW_NAMES,
    OLD_MAX_BYTES,
    OLD_NAMES,
    PROTOCOLS,
)
from .msccl_xml_read import loads
from .named import NamedCollective, name_of, refuse_helpers
from .sizes import size_range

__all__ = ["DIALECTS", "dumps", "loads"]


def dumps(
    lowered: Lowered,
    *,
    dialect: str = "new",
    min_bytes: int | None = None,
    max_bytes: int | None = None,
    max_steps: int = MAX_STEPS,
) -> str:
    """Write instruction streams as an MSCCL XML file; they are verified first, and the runtimes' limits are enforced.

    Args:
        lowered: The instruction streams.
        dialect: "new" (NCCL 2.2x, RCCL) or "old" (NCCL 2.8 to 2.12).
        min_bytes: The smallest call that the runtime uses the file for; by default that of the streams.
        max_bytes: The largest such call, 0 for no limit; by default that of the streams.
        max_steps: The most steps of a threadblock; some builds of the new runtime allow fewer than 256.

    Returns:
        The text of the file.

    Raises:
        VerificationError: The streams do not do what their collective asks.
        InvalidInput: The dialect has no name for the collective, or a limit is exceeded.
    """
    if dialect not in DIALECTS:
        raise unknown("dialect", dialect, DIALECTS)
    low, high = size_range(lowered, min_bytes, max_bytes)
    lowered.verify()
    x, c = lowered, lowered.collective
    first = np.searchsorted(x.tb_rank, np.arange(c.num_ranks + 1))
    flags = _depended_on(x, first)
    _check_limits(x, flags, dialect, max_steps)
    inputs, outputs = np.diff(c.in_ptr).tolist(), np.diff(c.out_ptr).tolist()
    head: dict[str, object] = {
        "name": x.name,
        "nchannels": x.num_channels,
        "nchunksperloop": max(*inputs, *outputs),
        "proto": x.protocol,
        "coll": _spelling(c, dialect),
        "ngpus": c.num_ranks,
        "inplace": int(c.in_place),
    }
    if dialect == "new":
        head |= {"outofplace": int(not c.in_place), "minBytes": low, "maxBytes": high}
    else:
        head["redop"] = "sum" if c.combining else "nop"
        if low or high:
            head |= {"minBytes": low, "maxBytes": high or max(low, OLD_MAX_BYTES)}
    lines = [f"<algo {_attributes(head)}>"]
    columns = [
        column.tolist()
        for column in (x.op, x.src_buf, x.src_off, x.dst_buf, x.dst_off, x.count, x.dep_tb, x.dep_step, flags)
    ]
    ptr, send, recv, channel = (a.tolist() for a in (x.tb_ptr, x.tb_send, x.tb_recv, x.tb_channel))
    for rank in range(c.num_ranks):
        lines.append(
            f'  <gpu id="{rank}" i_chunks="{inputs[rank]}" o_chunks="{outputs[rank]}" s_chunks="{x.scratch[rank]}">'
        )
        for b in range(first[rank], first[rank + 1]):
            lines.append(f'    <tb id="{b - first[rank]}" send="{send[b]}" recv="{recv[b]}" chan="{channel[b]}">')
            rows = zip(*(column[ptr[b] : ptr[b + 1]] for column in columns), strict=True)
            for s, (op, sb, so, db, do, count, dep, step, flag) in enumerate(rows):
                if op == NOP:
                    sb, so, db, do, count = 0, -1, 1, -1, 0
                lines.append(
                    f'      <step s="{s}" type="{OPS[op]}" srcbuf="{BUFFERS[sb]}" srcoff="{so}" '
                    f'dstbuf="{BUFFERS[db]}" dstoff="{do}" cnt="{count}" depid="{dep}" deps="{step}" '
                    f'hasdep="{flag}"/>'
                )
            lines.append("    </tb>")
        lines.append("  </gpu>")
    return "\n".join([*lines, "</algo>", ""])


def unfit_for_old(lowered: Lowered) -> str:
    """Why the original MSCCL runtime cannot load the streams in either dialect; empty where it can in its own."""
    first = np.searchsorted(lowered.tb_rank, np.arange(lowered.collective.num_ranks + 1))
    try:
        _check_limits(lowered, _depended_on(lowered, first), "old", MAX_STEPS)
    except InvalidInput as error:
        return str(error)
    return ""


def _attributes(values: dict[str, object]) -> str:
    return " ".join(f"{key}={quoteattr(str(value))}" for key, value in values.items())


def _spelling(c: Collective, dialect: str) -> str:
    """The collective's name in the file; the old dialect calls a collective without a name `custom`."""
    refuse_helpers(c, "MSCCL")
    named = name_of(replace(c, ranks=tuple(range(c.num_ranks))))
    names = NEW_NAMES if dialect == "new" else OLD_NAMES
    if named is not None:
        if named.kind in names:
            return names[named.kind]
        if dialect == "new" and _is_send(named):
            return "send"
    if dialect == "old":
        return "custom"
    raise InvalidInput(
        f"collective: {c.kind} with this layout has no name in the new dialect; "
        "choose dialect 'old', which calls it custom"
    )


def _is_send(named: NamedCollective) -> bool:
    return named.kind == "permute" and len(named.pairs) == 1


def _depended_on(x: Lowered, first: NDArray[np.int64]) -> NDArray[np.int64]:
    """A flag per instruction: 1 where another instruction waits for it."""
    owner = np.repeat(np.arange(len(x.tb_rank)), np.diff(x.tb_ptr))
    waits = np.flatnonzero(x.dep_tb >= 0)
    target = first[x.tb_rank[owner[waits]]] + x.dep_tb[waits]
    flags = np.zeros(x.num_instructions, np.int64)
    flags[x.tb_ptr[target] + x.dep_step[waits]] = 1
    return flags


def _check_limits(x: Lowered, flags: NDArray[np.int64], dialect: str, max_steps: int) -> None:
    """Refuse whatever the runtimes would refuse, with a message that names the limit."""
    if dialect == "old" and len(x.name.encode()) > MAX_NAME:
        raise InvalidInput(f"name: {x.name!r} is longer than {MAX_NAME} characters")
    if x.protocol not in PROTOCOLS:
        raise unknown("protocol", x.protocol, PROTOCOLS)
    share = x.collective.chunk_share
    if not np.allclose(share, share[0], rtol=1e-9):
        raise InvalidInput("chunk_share: MSCCL files need chunks of equal size; these differ")
    if x.num_channels > MAX_CHANNELS:
        raise InvalidInput(f"channels: {x.num_channels} are more than the {MAX_CHANNELS} the runtimes have")
    if x.tb_channel.min(initial=0) < 0:
        raise InvalidInput("channels: must be >= 0")
    per_rank = np.bincount(x.tb_rank, minlength=1)
    rank = int(per_rank.argmax())
    if per_rank[rank] > MAX_BLOCKS[dialect]:
        raise InvalidInput(
            f"gpu {rank}: {per_rank[rank]} threadblocks are more than the {MAX_BLOCKS[dialect]} of the "
            f"{dialect} runtime"
        )
    at_channel = np.bincount(x.tb_rank * MAX_CHANNELS + x.tb_channel, minlength=1)
    where = int(at_channel.argmax())
    if at_channel[where] > MAX_BLOCKS_PER_CHANNEL:
        raise InvalidInput(
            f"gpu {where // MAX_CHANNELS}: {at_channel[where]} threadblocks on channel "
            f"{where % MAX_CHANNELS} are more than {MAX_BLOCKS_PER_CHANNEL}"
        )
    steps = np.diff(x.tb_ptr)
    if steps.max(initial=0) > max_steps:
        b = int(steps.argmax())
        local = b - int(np.searchsorted(x.tb_rank, x.tb_rank[b]))
        raise InvalidInput(
            f"gpu {x.tb_rank[b]} tb {local}: {steps[b]} steps are more than the {max_steps} of the runtimes"
        )
    if x.count.max(initial=0) > MAX_COUNT:
        raise InvalidInput(f"cnt: {x.count.max()} chunks in one step are more than {MAX_COUNT}")
    last = np.zeros(x.num_instructions, np.bool_)
    last[x.tb_ptr[1:][steps > 0] - 1] = True
    closed = ~last & np.append(x.dep_tb[1:] >= 0, False)
    open_nops = np.flatnonzero((x.op == NOP) & ~closed)
    if len(open_nops):
        raise InvalidInput(f"instruction {open_nops[0]}: a nop must stand before a step with a dependency")
    if np.any((x.op == NOP) & (flags > 0)):
        raise InvalidInput("dependencies: no step may wait for a nop")
