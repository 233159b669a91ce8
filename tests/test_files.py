# SPDX-License-Identifier: Apache-2.0
"""Plain data from files: what is wrong with a field, and what would have been right."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

import stretto as st
from stretto.collectives.files import load_collective, save_collective
from stretto.control.transport import make_token
from stretto.errors import InvalidInput
from stretto.files import convert, naming_lines
from stretto.planner.costs.measured import read_measurements
from stretto.planner.plan import Plan
from stretto.planner.tuner_csv import read_tuner_csv
from stretto.programs.formats import load_program, save_program
from stretto.report.chrome import write_chrome_json
from stretto.report.perfetto import write_perfetto
from stretto.report.timeline_file import load_timeline, save_timeline
from stretto.resharding.files import load_plan
from stretto.simulator.runtimes import Runtime
from stretto.strategy.files import load_model, load_strategy, save_model, save_strategy
from stretto.strategy.model import ModelSpec, Variable
from stretto.synthesis.sketch import Sketch
from stretto.workload import chakra, kineto
from stretto.workload.dag import Op

SOURCES = Path(__file__).parents[1] / "src" / "stretto"


class _Inner(msgspec.Struct, forbid_unknown_fields=True):
    kind: Literal["ring", "tree"] = "ring"
    size: int = 0


class _Outer(msgspec.Struct, forbid_unknown_fields=True):
    stretto: Literal["thing"]
    many: Annotated[list[_Inner | int], Meta(max_length=4)] = []
    named: dict[str, _Inner] = {}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"stretto": "plan"}, "f: $.stretto: unknown value 'plan'; choose from: thing"),
        ({"stretto": "thing", "x": 1}, "f: unknown field 'x'; choose from: stretto, many, named"),
        (
            {"stretto": "thing", "many": [3, {"colour": 1}]},
            "f: $.many[1]: unknown field 'colour'; choose from: kind, size",
        ),
        (
            {"stretto": "thing", "named": {"a": {"kind": "star"}}},
            "f: $.named[...].kind: unknown value 'star'; choose from: ring, tree",
        ),
        ({"stretto": "thing", "many": [{"size": "x"}]}, "f: $.many[0].size: must be a whole number, not 'x'"),
        ({"stretto": "thing", "many": [{"size": 1.5}]}, "f: $.many[0].size: must be a whole number, not 1.5"),
        ({"stretto": "thing", "many": [{"size": "x" * 99}]}, "f: $.many[0].size: must be a whole number, not text"),
        ({"stretto": "thing", "many": [{"size": [1]}]}, "f: $.many[0].size: must be a whole number, not a list"),
        ({"stretto": "thing", "many": ["x"]}, "f: $.many[0]: must be a whole number or a mapping, not 'x'"),
        ({"stretto": "thing", "many": 9}, "f: $.many: must be a list, not 9"),
        ({"stretto": "thing", "many": [1] * 5}, "f: $.many: must be a list of length <= 4"),
        ({"stretto": "thing", "named": {"a": {"size": "x"}}}, "f: $.named[...].size: must be a whole number, not text"),
        ({"stretto": "thing", "named": {7: {}}}, "f: $.named: a key must be text, not a whole number"),
        ({}, "f: the field 'stretto' is missing"),
        (None, "f: must be a mapping, not null"),
    ],
)
def test_what_is_wrong_is_said_with_its_place_and_the_choices(value: object, said: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        convert(value, _Outer, where="f")
    assert str(refused.value) == said


def test_first_messages_of_a_type_may_come_in_many_threads_at_once() -> None:
    # msgspec alone lets threads see a type that it has not finished to analyze: 16 of 100 such processes crashed.
    code = """if True:
        import os, sys, threading
        from stretto.control.messages import PLAIN, RankState, decode, encode
        from stretto.runtime.enforcer.report import EnforcerReport, MotifReport
        report = EnforcerReport(motifs=(MotifReport(op="a", motif=0, duration_us=1.0, wait_us=1.0),))
        sent = encode(RankState(
            job="j", epoch=1, rank=0, size=2, beat=1, digest="", ballot=None, committed=PLAIN, active=PLAIN, barred=0,
            report=report,
        ))
        ended = []
        for _ in range(60):
            child = os.fork()
            if not child:
                sys.setswitchinterval(1e-6)
                together = threading.Barrier(8)
                got = []
                def receive():
                    together.wait()
                    got.append(decode(sent, RankState))
                threads = [threading.Thread(target=receive) for _ in range(8)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                os._exit(len(got) != 8)
            ended.append(os.waitpid(child, 0)[1])
        print(ended.count(0), set(ended))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout.split() == ["60", "{0}"], done.stdout + done.stderr


def test_every_type_that_msgspec_decodes_is_analyzed_by_one_thread() -> None:
    decodes = re.compile(
        r"msgspec\.(?:json|msgpack|yaml)\.(?:decode|Decoder)\(.*\btype=(?!typed\()|msgspec\.convert\((?!.*\btyped\()"
    )
    found = [
        f"{path.relative_to(SOURCES)}: {line.strip()}"
        for path in sorted(SOURCES.rglob("*.py"))
        for line in path.read_text().splitlines()
        if decodes.search(line)
    ]
    assert not found


def test_a_path_with_a_nul_is_refused_by_readers_and_writers(tmp_path: Path) -> None:
    path = f"{tmp_path}/a\0b.json"
    cluster = st.Cluster.preset("ring", nodes=4)
    step = st.Workload(name="x", num_ranks=4, ops=(Op(name="sum", kind="all_reduce", nbytes=1e6),))
    program = st.algorithm("ring", "all_gather", 4)
    model = ModelSpec(name="m", variables=(Variable(name="v", shape=(4, 4)),))
    strategy = st.strategy.build("all_reduce", model, 4)
    timeline = st.simulate(program, cluster, nbytes=1e6)
    calls: list[Callable[[], object]] = [
        lambda: st.Cluster.load(path), lambda: st.Cluster.load(Path(path)), lambda: cluster.save(path),
        lambda: st.Workload.load(path), lambda: st.Workload.load(path.replace("json", "et")),
        lambda: st.Workload.load(path + ".gz"), lambda: step.save(path), lambda: chakra.write(step, path),
        lambda: st.Plan.load(path), lambda: load_program(path), lambda: save_program(program, path),
        lambda: Sketch.load(path), lambda: Sketch().save(path), lambda: load_strategy(path),
        lambda: save_strategy(strategy, path), lambda: load_model(path), lambda: save_model(model, path),
        lambda: load_timeline(path), lambda: save_timeline(timeline, path), lambda: write_perfetto(timeline, path),
        lambda: write_chrome_json(timeline, path), lambda: read_tuner_csv(path),
        lambda: load_collective(path), lambda: save_collective(st.AllGather(4), path),
        lambda: make_token(Path(path)),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(InvalidInput, match=r"NUL|null"):
            call()


@pytest.mark.parametrize("path", ["x" * 5000, "\ud800.json", "hosts" * 60 + "+multicast"])
def test_what_can_be_no_path_is_refused_by_every_reader(path: str) -> None:
    readers = [
        st.Cluster.load, st.Workload.load, Plan.load, load_program, load_collective, load_timeline, load_plan,
        chakra.read, kineto.read, Runtime.load, load_model, read_measurements,
    ]  # fmt: skip
    for read in readers:
        with pytest.raises(InvalidInput):
            read(path)


@pytest.mark.parametrize(
    ("text", "path", "line"),
    [
        ("a: 1\nb:\n- x\n- {c: 2,\n   d: 3}\n", "$.b[1].d", 5),
        ("a: 1\nb:\n- x\n", "$.b[7]", 2),
        ("a: 1\nb: 2\n", "$.c", 0),
        ('{\n "a": [\n  1,\n  2]}', "$.a[1]", 4),
        ('{"a": [1, 2]}', "$.a[1]", 0),
        ("a: [\n", "$.a", 0),
    ],
)
def test_errors_name_the_line_of_their_field(text: str, path: str, line: int) -> None:
    with pytest.raises(InvalidInput) as told, naming_lines(text, where="f"):
        raise InvalidInput(f"{path}: is wrong")
    assert str(told.value) == f"f: {path}: is wrong" + (f" (line {line})" if line else "")
