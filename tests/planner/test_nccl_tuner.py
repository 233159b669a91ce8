# SPDX-License-Identifier: Apache-2.0
"""Our tuner plugin, called as NCCL calls it in every version of the interface, beside the table read in Python."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator, Sequence
from ctypes import CFUNCTYPE, POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint64, c_ulong, c_void_p
from pathlib import Path
from typing import Any

import pytest

from stretto import Cluster, plan
from stretto.planner.tuner_csv import (
    ALGORITHMS,
    ANY,
    MAX_BYTES,
    PROTOCOLS,
    TunerLine,
    read_tuner_csv,
    tuner_library,
    tuner_lines,
    write_tuner_csv,
)
from stretto.workload import Workload

FUNCTIONS = ("broadcast", "reduce", "allgather", "reducescatter", "allreduce", "sendrecv")
"""In the order of NCCL's enumeration."""
LOGGER = CFUNCTYPE(None, c_int, c_ulong, c_char_p, c_int, c_char_p)
"""The logger takes further arguments for its format, which a callback from Python cannot see."""
INIT_3 = CFUNCTYPE(c_int, c_size_t, c_size_t, LOGGER, POINTER(c_void_p))
INIT_5 = CFUNCTYPE(c_int, POINTER(c_void_p), c_uint64, c_size_t, c_size_t, LOGGER, c_void_p, c_void_p)
INFO_3 = CFUNCTYPE(c_int, c_void_p, c_int, c_size_t, c_int, c_void_p, c_int, c_int, POINTER(c_int))
INFO_4 = CFUNCTYPE(c_int, c_void_p, c_int, c_size_t, c_int, c_void_p, c_int, c_int, c_int, POINTER(c_int))
END = CFUNCTYPE(c_int, c_void_p)


class NcclSide:
    """What NCCL does with a tuner of one version: load, init, ask, end."""

    def __init__(self, version: int, ranks: int, nodes: int) -> None:
        self.version = version
        self.said: list[tuple[int, bytes]] = []
        self._log = LOGGER(lambda level, flags, file, line, text: self.said.append((level, text)))
        types = [c_char_p, INIT_3 if version < 5 else INIT_5, INFO_3 if version < 4 else INFO_4, END]
        fields = [("name", types[0]), ("init", types[1]), ("info", types[2]), ("end", types[3])]
        fields += [("chunk_size", c_void_p)] if version == 6 else []
        shape: Any = type("Plugin", (ctypes.Structure,), {"_fields_": fields})
        self.plugin = shape.in_dll(ctypes.CDLL(str(tuner_library())), f"ncclTunerPlugin_v{version}")
        self._context = c_void_p()
        if version < 5:
            code = self.plugin.init(ranks, nodes, self._log, byref(self._context))
        else:
            code = self.plugin.init(byref(self._context), 7, ranks, nodes, self._log, None, None)
        assert code == 0

    def ask(
        self, collective: int, nbytes: int, costs: Sequence[Sequence[float]], *, pipe_ops: int = 1, registered: int = 0
    ) -> tuple[list[list[float]], int]:
        """The table of costs and the number of channels after the call."""
        algorithms, protocols = len(costs), len(costs[0])
        table = (c_float * (algorithms * protocols))(*[cost for row in costs for cost in row])
        channels = c_int(0)
        given = [self._context, collective, nbytes, pipe_ops, ctypes.cast(table, c_void_p), algorithms, protocols]
        given += [registered] if self.version >= 4 else []
        assert self.plugin.info(*given, byref(channels)) == 0
        found = list(table)
        return [found[i * protocols : (i + 1) * protocols] for i in range(algorithms)], channels.value

    def end(self) -> None:
        """Take the communicator down."""
        assert self.plugin.end(self._context) == 0


@pytest.fixture(params=[3, 4, 5, 6])
def version(request: pytest.FixtureRequest) -> Iterator[int]:
    """Each version of the interface."""
    yield request.param


def drawn(seen: random.Random, count: int) -> list[TunerLine]:
    """Lines at random, some of which overlap."""
    lines = []
    for _ in range(count):
        low = seen.choice((0, seen.randrange(1 << 20)))
        lines.append(
            TunerLine(
                collective=seen.choice(FUNCTIONS[:5]), min_bytes=low,
                max_bytes=seen.choice((MAX_BYTES, low + seen.randrange(1 << 20))),
                algorithm=seen.choice(ALGORITHMS), protocol=seen.choice(PROTOCOLS),
                channels=seen.choice((-1, 1, 4, 32)), nodes=seen.choice((-1, 1, 2)), ranks=seen.choice((-1, 4, 16)),
            )
        )  # fmt: skip
    return lines


def expected(
    lines: Sequence[TunerLine], name: str, nbytes: int, ranks: int, nodes: int, costs: Sequence[Sequence[float]]
) -> tuple[list[list[float]], int]:
    """What the plugin should answer, from the rules of docs/planner.md."""
    after = [list(row) for row in costs]
    for line in lines:
        fits = line.min_bytes <= nbytes <= line.max_bytes and line.nodes in (-1, nodes) and line.ranks in (-1, ranks)
        row = ALGORITHMS.index(line.algorithm)
        if line.collective != name or not fits or row >= len(after):
            continue
        open_to = range(len(after[row])) if line.protocol == ANY else [PROTOCOLS.index(line.protocol)]
        can = [p for p in open_to if p < len(after[row]) and after[row][p] >= 0]
        if can:
            after[row][min(can, key=lambda p: after[row][p])] = 0.0
            return after, max(line.channels, 0)
    return after, 0


def test_every_version_answers_as_the_table_says(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = random.Random(version)
    path = tmp_path / "table.csv"
    monkeypatch.setenv("NCCL_TUNER_CONFIG_FILE", str(path))
    for _ in range(40):
        lines = drawn(seen, seen.randrange(0, 12))
        path.write_text("# a comment\n\n" + "".join(f"{line}\n" for line in lines))
        assert read_tuner_csv(path) == lines
        ranks, nodes = seen.choice((4, 8, 16)), seen.choice((1, 2))
        nccl = NcclSide(version, ranks, nodes)
        for _ in range(30):
            collective, nbytes = seen.randrange(6), seen.choice((0, 1, seen.randrange(1 << 22)))
            algorithms = seen.choice((5, 6, 7))
            costs = [[seen.choice((-1.0, float(seen.randrange(1, 99)))) for _ in range(3)] for _ in range(algorithms)]
            found = nccl.ask(collective, nbytes, costs)
            assert found == expected(lines, FUNCTIONS[collective], nbytes, ranks, nodes, costs)
        nccl.end()


@pytest.mark.parametrize(
    "text",
    [
        "allreduce,0,10,ring,ll,4,1\n",
        "allreduce,0,10,ring,fast,4,1,8\n",
        "allreduce,0,x,ring,ll,4,1,8\n",
        "allreduce,10,0,ring,ll,4,1,8\n",
        "allreduce,0,10,ring,ll,5000,1,8\n",
        "allreduce,0,10,ring,ll,4,1,8," + "9" * 300 + "\n",
        "allreduce,0,10,ring,ll,4,1,8,1,1,1\n",
        "\x00\xff\n",
    ],
)
def test_a_wrong_file_is_no_opinion_and_no_error(
    version: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wrong line, and the good ones before it are not used either: ranks must not differ."""
    path = tmp_path / "table.csv"
    path.write_bytes(b"allreduce,0,99,ring,simple,4,-1,-1\n" + text.encode("latin-1"))
    monkeypatch.setenv("NCCL_TUNER_CONFIG_FILE", str(path))
    nccl = NcclSide(version, 8, 1)
    costs = [[5.0, 6.0, 7.0]] * 7
    assert nccl.ask(4, 5, costs) == (costs, 0)
    nccl.end()


def test_without_a_file_nccl_decides(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for given in (None, str(tmp_path / "nosuch.csv"), str(tmp_path)):
        if given is None:
            monkeypatch.delenv("NCCL_TUNER_CONFIG_FILE", raising=False)
        else:
            monkeypatch.setenv("NCCL_TUNER_CONFIG_FILE", given)
        nccl = NcclSide(version, 8, 1)
        costs = [[5.0, 6.0, 7.0]] * 7
        assert nccl.ask(4, 5, costs) == (costs, 0)
        nccl.end()


def test_a_plan_s_table_for_our_plugin_holds_its_decisions_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload, cluster = Workload.load("gpt:125m,ranks=16"), Cluster.preset("dgx_a100", nodes=2)
    made = plan(workload, cluster, steps=20).plan
    path = tmp_path / "table.csv"
    write_tuner_csv(made, workload, cluster, path)
    lines = read_tuner_csv(path)
    assert lines == tuner_lines(made, workload, cluster)[0]
    assert all(line.protocol == ANY and line.channels == -1 and line.ranks > 0 for line in lines)
    monkeypatch.setenv("NCCL_TUNER_CONFIG_FILE", str(path))
    nccl = NcclSide(5, 3, 1)  # a group that the plan does not have
    costs = [[5.0, 6.0, 7.0]] * 7
    assert nccl.ask(4, 10**6, costs) == (costs, 0)
    nccl.end()
