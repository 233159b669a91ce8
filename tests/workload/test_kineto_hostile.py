# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import InvalidInput
from stretto.workload import kineto, kineto_events, trace_files

DATA = Path(__file__).parent / "data"
Change = Callable[[dict[str, Any]], None]


def _kernel(trace: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(e for e in trace["traceEvents"] if e["name"].startswith("ncclDevKernel_AllReduce"))
    return found


def _without_group(trace: dict[str, Any]) -> None:
    trace["distributedInfo"]["pg_config"] = []
    _kernel(trace)["args"]["Process Group Ranks"] = ""


def _set(key: str, value: Any) -> Change:
    return lambda trace: _kernel(trace)["args"].__setitem__(key, value)


def _field(key: str, value: Any) -> Change:
    return lambda trace: _kernel(trace).__setitem__(key, value)


def _about(key: str, value: Any) -> Change:
    return lambda trace: trace["distributedInfo"].__setitem__(key, value)


def _error(path: Path, *peers: Path) -> str:
    with pytest.raises(InvalidInput) as caught:
        kineto.read(path, peers=peers)
    text = str(caught.value)
    assert "\n" not in text
    return text


CASES: list[tuple[str, Change, str]] = [
    ("events are no list", lambda t: t.__setitem__("traceEvents", {"a": 1}), r"$.traceEvents: must be a list"),
    ("no events at all", lambda t: t.pop("traceEvents"), "traceEvents"),
    ("an event is a number", lambda t: t["traceEvents"].append(5), "must be a mapping"),
    ("negative duration", _field("dur", -5.0), ".dur: must be a number of us >= 0, not -5"),
    ("time out of this world", _field("ts", 1e30), ".ts: must be a number of us"),
    ("time is text", _field("ts", "soon"), "must be a number"),
    ("stream is a list", _set("stream", [1]), "stream"),
    ("size is text", _set("In msg nelems", "3000000"), "In msg nelems: must be a whole number >= 0, not '3000000'"),
    ("size is negative", _set("Out msg nelems", -1), "Out msg nelems: must be a whole number >= 0, not -1"),
    ("size is missing", _set("In msg nelems", None), "In msg nelems: must be a whole number"),
    ("size is a fraction", _set("In msg nelems", 1.5), "In msg nelems: must be a whole number"),
    ("type is not known", _set("dtype", "Float128"), "unknown dtype 'Float128'; choose from: Float, "),
    ("collective is not known", _set("Collective name", "allshuffle"), "unknown collective 'allshuffle'"),
    ("group is missing", _without_group, "its group is missing"),
    ("group is of another size", _set("Group size", 3), "its group is missing"),
    ("group size is text", _set("Group size", "2"), "Group size: must be a whole number"),
    ("group has a rank too many", _set("Process Group Ranks", "[0, 9]"), "names rank 9; there are 4"),
    ("group has a rank twice", _set("Process Group Ranks", "[0, 0]"), "names a rank of its group twice"),
    ("group is nonsense", _set("Process Group Ranks", [0, "x"]), "must be a list of ranks"),
    ("a billion ranks", _about("world_size", 10**9), "distributedInfo.world_size: must be 1..1048576, not 1000000000"),
    ("rank out of range", _about("rank", 4), "distributedInfo.rank: must be 0..3, not 4"),
    ("groups are text", _about("pg_config", "nonsense"), "distributedInfo.pg_config"),
    ("nothing in it", lambda t: t.__setitem__("traceEvents", []), "no kernels, CPU ops or collectives"),
    ("steps without work", lambda t: _only_steps(t), "no work inside its ProfilerStep"),
]


def _only_steps(trace: dict[str, Any]) -> None:
    for event in trace["traceEvents"]:
        if event["name"].startswith("ProfilerStep"):
            event["ts"] += 1e9


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_broken_gpu_trace_is_one_clear_line(change: Change, message: str, tmp_path: Path) -> None:
    trace = json.loads((DATA / "gpu_nccl.0.json").read_text())
    change(trace)
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(trace))
    assert message in _error(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"traceEvents": [{"ph": "X", "name": "a"', "not valid JSON: Input data was truncated"),
        (b'{"traceEvents": [{"ph": "X", "ts": NaN}]}', "not valid JSON"),
        (b'{"traceEvents": [{"ph": "X", "ts": 1e999}]}', "Number out of range"),
        (b"[1, 2, 3]", "not a profiler trace"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"", "not valid JSON"),
        (b'{"traceEvents": ' + b"[" * 5000, ""),
        (b"\x1f\x8b\x08garbage", "not a whole gzip file"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9], "not a whole gzip file"),
    ],
)
def test_what_is_no_trace_is_one_clear_line(text: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    path.write_bytes(text)
    assert message in _error(path)


def test_a_small_file_that_unpacks_to_gigabytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_files, "MAX_TRACE_BYTES", 1 << 20)
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(b" " * (64 << 20)))
    assert path.stat().st_size < 1 << 20
    assert "unpacks to more than the limit of 1048576 bytes" in _error(path)


def test_a_file_over_the_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_files, "MAX_TRACE_BYTES", 10)
    path = tmp_path / "rank0.json"
    path.write_bytes(b" " * 11)
    assert "11 bytes is more than the limit of 10" in _error(path)


def test_more_events_than_fit_in_memory_are_refused_before_any_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kineto_events, "MAX_BRACES", 100)
    path = tmp_path / "rank0.json"
    path.write_text('{"traceEvents": [' + '{"ph":""},' * 200 + "]}")
    assert "more than 100 objects" in _error(path)


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    gpu = [DATA / f"gpu_nccl.{rank}.json" for rank in range(4)]
    assert "give each rank once" in _error(gpu[0], gpu[0])
    assert "No such file" in _error(tmp_path / "none.json")
    assert "no file in it ends with .json" in _error(tmp_path)
    assert "is a directory, which already holds the files of all ranks" in _error(tmp_path, gpu[0])
    assert "different jobs" in _error(gpu[2], DATA / "ddp_gloo.0.json")
    trace = json.loads(gpu[2].read_text())
    for event in trace["traceEvents"]:
        if "Seq" in event["args"]:
            event["args"]["Seq"] += 1
    (tmp_path / "later.json").write_text(json.dumps(trace))
    assert "not of the same steps" in _error(gpu[0], tmp_path / "later.json")


def test_ranks_that_differ_need_the_traces_of_all(tmp_path: Path) -> None:
    trace = json.loads((DATA / "gpu_nccl.1.json").read_text())
    trace["traceEvents"] = [e for e in trace["traceEvents"] if "AllGather" not in e["name"]]
    (tmp_path / "rank1.json").write_text(json.dumps(trace))
    assert "only 2 of 4 are here; give the traces of all" in _error(DATA / "gpu_nccl.0.json", tmp_path / "rank1.json")


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 68),
    st.sampled_from(["ts", "dur", "name", "tid", "cat", "args", "Seq", "stream", "dtype", "Process Group Ranks"]),
    st.none() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9) | st.lists(st.integers(), max_size=3),
)
def test_random_damage_never_ends_in_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, at: int, key: str, value: object
) -> None:
    trace = json.loads((DATA / "gpu_nccl.0.json").read_text())
    event = trace["traceEvents"][at]
    (event if key in event else event["args"])[key] = value
    path = tmp_path_factory.mktemp("damage") / "rank0.json"
    path.write_text(json.dumps(trace))
    try:
        kineto.read(path)
    except InvalidInput as error:
        assert "\n" not in str(error)


def _gloo(tmp_path: Path, change: Change) -> Path:
    trace = json.loads((DATA / "ddp_gloo.0.json").read_text())
    change(trace)
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(trace))
    return path


def _calls(key: str, value: Any) -> Change:
    def change(trace: dict[str, Any]) -> None:
        for event in trace["traceEvents"]:
            if event["name"].startswith(("c10d::", "gloo:")):
                event["args"][key] = value

    return change


def test_broken_gloo_traces(tmp_path: Path) -> None:
    assert "record_shapes=True" in _error(_gloo(tmp_path, _calls("Input Dims", None)))
    assert "must be a whole number >= 0, not 'x'" in _error(_gloo(tmp_path, _calls("Input Dims", [[["x"]]])))
    huge = [[1 << 40, 1 << 40]]
    assert "more bytes than any machine has" in _error(_gloo(tmp_path, _calls("Input Dims", huge)))
    two = [{"pg_name": "0", "ranks": [0, 1]}, {"pg_name": "1", "ranks": [1, 0]}]
    assert "2 groups are possible" in _error(_gloo(tmp_path, _about("pg_config", two)))


def test_a_root_of_another_script_is_no_number(tmp_path: Path) -> None:
    text = (DATA / "ddp_gloo.0.json").read_text().replace("c10d::allreduce_", "c10d::broadcast_")
    trace = json.loads(text.replace("gloo:all_reduce", "gloo:broadcast"))
    calls = [event for event in trace["traceEvents"] if event.get("name") == "c10d::broadcast_"]
    for event in calls:
        event["args"]["Concrete Inputs"] = ["", "", "\N{SUPERSCRIPT TWO}", "", "", ""]
    path = tmp_path / "t.0.json"
    path.write_text(json.dumps(trace))
    roots = [op.root for op in kineto.read(path).ops if op.kind == "broadcast"]
    assert roots == [0] * len(roots) != []
