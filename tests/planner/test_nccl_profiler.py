# SPDX-License-Identifier: Apache-2.0
"""Our profiler plugin, called as NCCL calls it in every version of the interface; what it writes is read as costs."""

from __future__ import annotations

import ctypes
import random
import threading
from collections import defaultdict
from ctypes import CFUNCTYPE, POINTER, byref, c_char_p, c_int, c_size_t, c_uint8, c_uint64, c_ulong, c_void_p
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from stretto.errors import InvalidInput
from stretto.planner.costs.measured import read_measurements
from stretto.planner.tuner_csv import profiler_library

LOGGER = CFUNCTYPE(None, c_int, c_ulong, c_char_p, c_int, c_char_p)
INIT_4 = CFUNCTYPE(c_int, POINTER(c_void_p), POINTER(c_int), c_char_p, c_uint64, c_int, c_int, c_int, LOGGER)
INIT_5 = CFUNCTYPE(c_int, POINTER(c_void_p), c_uint64, POINTER(c_int), c_char_p, c_int, c_int, c_int, LOGGER)
START = CFUNCTYPE(c_int, c_void_p, POINTER(c_void_p), c_void_p)
ONE = CFUNCTYPE(c_int, c_void_p)
STATE = CFUNCTYPE(c_int, c_void_p, c_int, c_void_p)
GROUP, COLLECTIVE, KERNEL, STOPPED = 1, 2, 64, 22
NAMES = {
    "AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter", "Broadcast": "broadcast",
    "Reduce": "reduce",
}  # fmt: skip
TYPES = {b"ncclFloat32": 4, b"ncclFloat16": 2, b"ncclBfloat16": 2, b"ncclInt8": 1, b"ncclUint64": 8, b"ncclFloat64": 8}


class Collective(ctypes.Structure):
    """As in NCCL's headers; v4 has no parentGroup, which stands last."""

    _fields_ = (
        ("seqNumber", c_uint64), ("func", c_char_p), ("sendBuff", c_void_p), ("recvBuff", c_void_p),
        ("count", c_size_t), ("root", c_int), ("datatype", c_char_p), ("nChannels", c_uint8), ("nWarps", c_uint8),
        ("algo", c_char_p), ("proto", c_char_p), ("parentGroup", c_void_p),
    )  # fmt: skip


class Kernel(ctypes.Structure):
    """One channel of a collective's kernel."""

    _fields_ = (("channelId", c_uint8), ("pTimer", c_uint64))


class Rest(ctypes.Union):
    """What depends on the type."""

    _fields_ = (("coll", Collective), ("kernel", Kernel))


class Event(ctypes.Structure):
    """From v5 on."""

    _fields_ = (("type", c_uint64), ("parent", c_void_p), ("rank", c_int), ("rest", Rest))


class Event4(ctypes.Structure):
    """The type is one byte; what follows it in its word is anything."""

    _fields_ = (("type", c_uint8), ("rubbish", c_uint8 * 7), ("parent", c_void_p), ("rank", c_int), ("rest", Rest))


class NcclSide:
    """What NCCL does with a profiler of one version."""

    def __init__(self, version: int, ranks: int, rank: int = 0, nodes: int = 1, communicator: int = 7) -> None:
        self.version = version
        self.said: list[bytes] = []
        self._log = LOGGER(lambda level, flags, file, line, text: self.said.append(text))
        fields = [
            ("name", c_char_p), ("init", INIT_4 if version == 4 else INIT_5), ("start", START), ("stop", ONE),
            ("state", STATE), ("finalize", ONE),
        ]  # fmt: skip
        shape: Any = type("Profiler", (ctypes.Structure,), {"_fields_": fields})
        self.plugin = shape.in_dll(ctypes.CDLL(str(profiler_library())), f"ncclProfiler_v{version}")
        self.context, mask = c_void_p(), c_int(-1)
        rest = (b"world", nodes, ranks, rank, self._log)
        if version == 4:
            code = self.plugin.init(byref(self.context), byref(mask), b"world", communicator, *rest[1:])
        else:
            code = self.plugin.init(byref(self.context), communicator, byref(mask), *rest)
        assert code == 0
        self.mask = mask.value

    def start(self, kind: int, parent: c_void_p | None, **fields: Any) -> c_void_p:
        """A handle of the plugin's."""
        event: Any = Event4() if self.version == 4 else Event()
        event.type, event.parent = kind, parent
        if self.version == 4:
            event.rubbish = (c_uint8 * 7)(*[0xAB] * 7)
        for name, value in fields.items():
            setattr(event.rest.coll if kind == COLLECTIVE else event.rest.kernel, name, value)
        handle = c_void_p()
        assert self.plugin.start(self.context, byref(handle), byref(event)) == 0
        return handle

    def collective(self, func: str, count: int, datatype: bytes, channels: int, algo: str, proto: str) -> c_void_p:
        """A collective is enqueued, which NCCL then calls stopped."""
        handle = self.start(
            COLLECTIVE, None, func=func.encode(), count=count, datatype=datatype, nChannels=channels,
            algo=algo.encode(), proto=proto.encode(),
        )  # fmt: skip
        self.plugin.stop(handle)
        return handle

    def kernel(self, parent: c_void_p, channel: int, begin: int, end: int) -> None:
        """A channel's part of it, by the GPU's clock."""
        handle = self.start(KERNEL, parent, channelId=channel, pTimer=begin)
        timer = c_uint64(end)
        assert self.plugin.state(handle, STOPPED, byref(timer)) == 0
        assert self.plugin.stop(handle) == 0

    def end(self) -> None:
        """Take the communicator down."""
        assert self.plugin.finalize(self.context) == 0


@pytest.fixture(params=[4, 5, 6])
def version(request: pytest.FixtureRequest) -> int:
    """Each version of the interface."""
    found: int = request.param
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where tables are written."""
    monkeypatch.setenv("STRETTO_PROFILE", str(tmp_path))
    return tmp_path


def test_drawn_calls_are_written_as_medians_and_read_as_costs(version: int, folder: Path) -> None:
    draw, ranks = random.Random(version), 4
    nccl = NcclSide(version, ranks)
    assert nccl.mask == COLLECTIVE | KERNEL
    kinds = [
        (func, draw.randrange(1, 1 << 20), draw.choice(list(TYPES)), draw.randrange(1, 9), algo, proto)
        for func in NAMES for algo, proto in (("RING", "SIMPLE"), ("TREE", "LL"))
    ]  # fmt: skip
    want: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for _ in range(200):
        kind = draw.choice(kinds)
        func, count, datatype, channels, algo, _ = kind
        call = nccl.collective(*kind)
        begin = draw.randrange(1 << 40)
        spans = [(begin + draw.randrange(1000), begin + 2000 + draw.randrange(90000)) for _ in range(channels)]
        for channel, (first, last) in enumerate(spans):
            nccl.kernel(call, channel, first, last)
        nbytes = count * TYPES[datatype] * (ranks if func in ("AllGather", "ReduceScatter") else 1)
        took = max(last for _, last in spans) - min(first for first, _ in spans)
        want[NAMES[func], f"nccl_{algo.lower()}", nbytes].append(took / 1000)
    nccl.end()
    (path,) = folder.glob("*.csv")
    found = {(row.collective, row.algorithm, int(row.nbytes)): row for row in read_measurements(path)}
    assert set(found) == set(want)
    for key, times in want.items():
        # The latest 64 of each kind count.
        assert found[key].time_us == pytest.approx(median(times[-64:]), abs=1e-3)
        assert found[key].nranks == ranks


def test_table_says_what_nccl_chose(folder: Path) -> None:
    nccl = NcclSide(5, 2, nodes=2)
    for _ in range(3):
        call = nccl.collective("AllReduce", 1000, b"ncclFloat32", 2, "RING", "LL128")
        nccl.kernel(call, 0, 100, 5100)
        nccl.kernel(call, 1, 1100, 6100)
    nccl.end()
    (path,) = folder.glob("*.csv")
    header, row = path.read_text().splitlines()
    assert header == "collective,algorithm,channels,nranks,nbytes,time_us,protocol,nccl_channels,nodes,calls"
    assert row == "all_reduce,nccl_ring,,2,4000,6.000,ll128,2,2,3"


def test_ranks_in_one_folder_count_by_the_one_that_came_last(folder: Path) -> None:
    for rank, took in enumerate((9000, 3000, 7000)):
        nccl = NcclSide(5, 3, rank=rank)
        nccl.kernel(nccl.collective("Broadcast", 64, b"ncclInt8", 1, "RING", "LL"), 0, 50, 50 + took)
        nccl.end()
    assert [row.time_us for row in read_measurements(folder)] == [3.0]
    (folder / "empty").mkdir()
    with pytest.raises(InvalidInput, match="holds no tables"):
        read_measurements(folder / "empty")


def test_without_a_folder_no_event_is_asked_for(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STRETTO_PROFILE", raising=False)
    nccl = NcclSide(version, 2)
    assert nccl.mask == 0
    assert nccl.start(COLLECTIVE, None, func=b"AllReduce").value is None
    nccl.end()


def test_what_is_not_measured_does_no_harm(version: int, folder: Path) -> None:
    nccl = NcclSide(version, 2)
    assert nccl.start(COLLECTIVE, None, func=b"AllToAll", count=5).value is None
    assert nccl.start(GROUP, None).value is None
    assert nccl.start(KERNEL, None, pTimer=5).value is None
    # Calls whose kernels never end, more of them than there is room for.
    for _ in range(5000):
        call = nccl.collective("AllReduce", 10, b"ncclFloat32", 2, "RING", "LL")
        nccl.kernel(call, 0, 100, 200)
    assert nccl.plugin.stop(None) == nccl.plugin.state(None, STOPPED, None) == 0
    nccl.end()
    assert list(folder.iterdir()) == []


def test_threads_may_call_at_once(folder: Path) -> None:
    nccl = NcclSide(6, 2)

    def many() -> None:
        for _ in range(300):
            call = nccl.collective("AllReduce", 10, b"ncclFloat32", 2, "RING", "LL")
            nccl.kernel(call, 0, 1000, 2000)
            nccl.kernel(call, 1, 1000, 3000)

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    nccl.end()
    (path,) = folder.glob("*.csv")
    assert path.read_text().splitlines()[1].endswith(",2.000,ll,2,1,1200")
