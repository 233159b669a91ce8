# SPDX-License-Identifier: Apache-2.0
"""Names, hosts and size ranges of exported files: whatever runtimes choose, cache and connect by."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from stretto import KB, MB, AllGather, AllReduce, Cluster
from stretto.algorithms.registry import algorithm, algorithms
from stretto.cli import run
from stretto.errors import InvalidInput, StrettoError
from stretto.programs.formats import load_program, mscclpp_reader, save_program
from stretto.programs.formats.msccl_xml import dumps as to_xml
from stretto.programs.formats.msccl_xml import loads as from_xml
from stretto.programs.formats.mscclpp_json import NO_LIMIT, dumps
from stretto.synthesis import select, synthesize

TWO_HOSTS = "p3_8xlarge:2"
QUICK: dict[str, Any] = {"makers": ["library:ring"], "cache": False, "budget_s": 1.0}


def drawn_plans(count: int, seed: int = 3) -> Iterator[dict[str, Any]]:
    """Plans of library algorithms, with everything drawn that a caller can choose."""
    draw = random.Random(seed)
    kinds = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter", "broadcast")
    made = 0
    while made < count:
        kind, ranks = draw.choice(kinds), draw.randint(2, 4)
        name = draw.choice([entry.name for entry in algorithms(kind)])
        options: dict[str, Any] = {"root": draw.randrange(ranks)} if kind == "broadcast" else {}
        options |= {"chunks": draw.choice([1, 2, 4]), "in_place": draw.random() < 0.5}
        try:
            program = algorithm(name, kind, ranks, **options)
            lowered = program.lower(instances=draw.choice([1, 2]), fifo_depth=draw.choice([1, 2]))
            low = draw.choice([0, 1000])
            text = dumps(
                lowered, hosts=draw.choice([None, [r % 2 for r in range(ranks)], list(range(ranks))]),
                fifo_depth=draw.choice([2, 3]), zero_copy=draw.random() < 0.5, min_bytes=low,
                max_bytes=draw.choice([0, 1 << 20]),
            )  # fmt: skip
        except StrettoError:
            continue
        made += 1
        yield json.loads(text)


def test_plans_have_the_same_name_only_if_they_are_the_same() -> None:
    by_name: dict[str, dict[str, Any]] = {}
    by_content: dict[str, str] = {}
    for plan in drawn_plans(200):
        name = plan.pop("name")
        assert by_name.setdefault(name, plan) == plan
        content = json.dumps(plan, sort_keys=True)
        # Two algorithms may come to one and the same plan; then only the label differs.
        digest = name.rsplit("-", 1)[1]
        assert by_content.setdefault(content, digest) == digest
        assert f"-{plan['collective']}-{len(plan['gpus'])}ranks-" in name
    assert len(set(by_content.values())) == len(by_content) > 100


@pytest.mark.parametrize("seed", range(6))
def test_any_change_of_streams_changes_the_name_of_their_plan(seed: int) -> None:
    """Of streams with one label: a range, the instances, a scratch chunk, hosts, or the order of ranks."""
    draw = random.Random(seed)
    lowered = algorithm("ring", "all_gather", 4, chunks=2).lower()
    order = [0, *draw.sample([1, 2, 3], 3)]
    variants = [
        lowered,
        replace(lowered, min_bytes=draw.randint(1, 99)),
        replace(lowered, max_bytes=draw.randint(100, 999)),
        replace(lowered, instances=draw.randint(2, 9)),
        algorithm("ring", "all_gather", 4, chunks=2).lower(instances=2),
        replace(algorithm("ring", "all_gather", 4, chunks=2, order=order).lower(), name=lowered.name),
    ]
    seen: dict[str, tuple[int, str]] = {}
    for one in variants:
        for hosts in (None, [0, 0, 1, 1], [0, 1, 0, 1]):
            plan = json.loads(dumps(one, hosts=hosts))
            name = plan.pop("name")
            content = one.instances, json.dumps(plan)
            assert seen.setdefault(name, content) == content
            assert sum(content == other for other in seen.values()) == 1
    assert len(seen) >= 3 * (len(variants) - 1)


def test_names_are_the_same_in_every_process() -> None:
    script = (
        "import json; from stretto.algorithms.registry import algorithm; "
        "from stretto.programs.formats.mscclpp_json import dumps; "
        "print([json.loads(dumps(algorithm(n, k, 4).lower(instances=2), hosts=[0, 0, 1, 1], zero_copy=z))['name'] "
        "for n, k in (('ring', 'all_reduce'), ('direct', 'all_to_all'), ('bruck', 'all_gather')) for z in (0, 1)])"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": hash_seed}, capture_output=True,
            text=True, check=True, timeout=120,
        ).stdout
        for hash_seed in ("0", "1", "77")
    }  # fmt: skip
    assert len(said) == 1
    assert said.pop().count("2x-") == 6


def test_a_runtime_that_caches_plans_by_name_runs_the_right_one() -> None:
    """As MSCCL++ does: what was set up for the first plan of a name is used for every later one."""
    texts = [
        dumps(algorithm(name, "all_reduce", 4, chunks=chunks).lower(instances=copies))
        for name, chunks in (("ring", 4), ("ring", 8), ("recursive_doubling", 4))
        for copies in (1, 2)
    ]
    texts.append(dumps(algorithm("pairwise", "all_to_all", 4).lower()))
    cached: dict[str, mscclpp_reader.ExecutionPlan] = {}
    for text in texts:
        plan = mscclpp_reader.loads(text)
        used = cached.setdefault(plan.name, plan)
        chunks = plan.gpus[0].input_chunks
        inputs = [np.full((chunks, 2), 10.0**rank) for rank in range(4)]
        for output in mscclpp_reader.execute(used, inputs):
            assert output.shape[0] == plan.gpus[0].output_chunks
            if plan.collective == "allreduce":
                assert np.array_equal(output, np.full((chunks, 2), 1111.0))
            else:
                assert np.array_equal(output[:, 0], np.repeat(10.0 ** np.arange(4), chunks // 4))
    assert len(cached) == len(texts)


def channel_kinds(path: Path) -> dict[tuple[int, int], set[str]]:
    """The kinds of channel between every two ranks of a plan."""
    found: dict[tuple[int, int], set[str]] = {}
    for gpu in json.loads(path.read_text())["gpus"]:
        for channels in gpu["channels"]:
            for peer in channels["connected_to"]:
                found.setdefault((gpu["id"], peer), set()).add(channels["channel_type"])
    return found


def test_every_door_uses_ports_between_hosts_and_memory_inside(tmp_path: Path) -> None:
    cluster = Cluster.load(TWO_HOSTS)
    files = {name: tmp_path / f"{name}.json" for name in ("synth", "table", "save", "convert", "hosts", "simulate")}
    quick = ("--makers", "library:ring", "--budget", "1", "--no-cache")
    where = ("--cluster", TWO_HOSTS)
    text = tmp_path / "ring.txt"
    save_program(algorithm("ring", "all_gather", 8), text)
    commands = (
        ("synth", "allgather", *where, *quick, "-o", files["synth"]),
        ("synth", "allgather", *where, *quick, "--bytes", "1K,1M", "--format", "json", "-o", tmp_path / "table"),
        ("program", "convert", text, files["convert"], *where),
        ("program", "convert", text, files["hosts"], "--hosts", "0,0,0,0,1,1,1,1"),
        ("simulate", "ring", "--collective", "all_gather", *where, "-o", files["simulate"]),
    )
    for command in commands:
        assert run([str(part) for part in command]) == 0
    synthesize(AllGather(8), cluster, MB, **QUICK).save(files["save"])
    (tmp_path / "table" / "all_gather-0.json").rename(files["table"])
    for path in files.values():
        kinds = channel_kinds(path)
        assert kinds
        for (a, b), found in kinds.items():
            assert found == ({"memory"} if a // 4 == b // 4 else {"port"}), path
        plan = load_program(path)
        assert isinstance(plan, mscclpp_reader.ExecutionPlan)
        mscclpp_reader.check(plan, AllGather(8, chunks=plan.gpus[0].input_chunks), seeds=(0,))


def test_devices_that_take_part_keep_their_hosts(tmp_path: Path) -> None:
    """Ranks may be any devices, in any order."""
    cluster = Cluster.load(TWO_HOSTS)
    devices = [6, 1, 0, 5]
    found = synthesize(AllGather(devices), cluster, MB, **QUICK)
    assert found.hosts == (1, 0, 0, 1)
    found.save(tmp_path / "x.json")
    for (a, b), kinds in channel_kinds(tmp_path / "x.json").items():
        assert kinds == ({"memory"} if devices[a] // 4 == devices[b] // 4 else {"port"})


def test_devices_without_a_host_are_hosts_of_their_own(tmp_path: Path) -> None:
    synthesize(AllGather(4), Cluster.load("ring:4"), MB, **QUICK).save(tmp_path / "x.json")
    assert set().union(*channel_kinds(tmp_path / "x.json").values()) == {"port"}


def sizes_of(path: Path) -> tuple[int, int]:
    """The range in a file, read without our readers."""
    if path.suffix == ".json":
        plan = json.loads(path.read_text())
        return plan["min_message_size"], plan["max_message_size"]
    head = ElementTree.parse(path).getroot().attrib
    return int(head["minBytes"]), int(head["maxBytes"])


@pytest.mark.parametrize("suffix", [".xml", ".json"])
def test_a_program_for_one_size_is_for_half_to_twice_of_it(suffix: str, tmp_path: Path) -> None:
    found = synthesize(AllReduce(4), Cluster.load("ring:4"), 16 * MB, lower=True, **QUICK)
    path = tmp_path / f"x{suffix}"
    found.save(path)
    assert sizes_of(path) == (8 * MB, 32 * MB - 1)
    found.save(path, min_bytes=0, max_bytes=0)
    assert sizes_of(path) == (0, 0 if suffix == ".xml" else NO_LIMIT)
    command = ["synth", "allreduce", "-c", "ring:4", "-b", "16M", "--makers", "library:ring", "--no-cache"]
    assert run([*command, "-o", str(path)]) == 0
    assert sizes_of(path) == (8 * MB, 32 * MB - 1)
    assert run([*command, "-o", str(path), "--min-bytes", "1K", "--max-bytes", "1G"]) == 0
    assert sizes_of(path) == (KB, 10**9)


def test_the_old_dialect_has_the_range_too(tmp_path: Path) -> None:
    found = synthesize(AllReduce(4), Cluster.load("ring:4"), 16 * MB, lower=True, **QUICK)
    found.save(tmp_path / "x.xml", dialect="old")
    assert sizes_of(tmp_path / "x.xml") == (8 * MB, 32 * MB - 1)


@pytest.mark.parametrize(("suffix", "form"), [(".xml", "msccl"), (".json", "mscclpp")])
def test_a_table_divides_all_sizes_among_its_files(suffix: str, form: str, tmp_path: Path) -> None:
    options = QUICK | {"makers": ["library"]}
    table = select(AllReduce(8), Cluster.load("dgx_a100"), [KB, 100 * KB, 10 * MB, 1000 * MB], lower=form, **options)
    saved = [path for path in table.save(tmp_path, suffix=suffix) if path.name.startswith("all_reduce")]
    written = [path for path in saved if path.suffix == suffix]
    assert len(written) > 1
    # Beside a plan for MSCCL++ stands the program that our backend runs.
    programs = {path.stem for path in saved if path.suffix == ".txt"}
    assert programs == ({path.stem for path in written} if form == "mscclpp" else set())
    ranges = [sizes_of(path) for path in written]
    ends = [high or NO_LIMIT for _, high in ranges]
    assert [low for low, _ in ranges] == [0, *(end + 1 for end in ends[:-1])]
    assert ends[-1] == NO_LIMIT
    for choice, (low, _), high in zip(table.choices, ranges, ends, strict=True):
        assert all(low <= nbytes <= high for nbytes, _, _ in choice.points)


def test_a_range_is_kept_by_reading_and_converting(tmp_path: Path) -> None:
    lowered = replace(algorithm("ring", "all_gather", 4).lower(), min_bytes=1000, max_bytes=5000)
    for dialect in ("new", "old"):
        read = from_xml(to_xml(lowered, dialect=dialect))
        assert (read.min_bytes, read.max_bytes) == (1000, 5000)
    save_program(lowered, tmp_path / "a.xml")
    assert run(["program", "convert", str(tmp_path / "a.xml"), str(tmp_path / "a.json"), "--hosts", "0,0,1,1"]) == 0
    assert sizes_of(tmp_path / "a.json") == (1000, 5000)
    with pytest.raises(InvalidInput, match="min_bytes 6000, max_bytes 5000"):
        to_xml(lowered, min_bytes=6000)


def test_a_plan_for_ranks_whose_hosts_nobody_named_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_program(algorithm("ring", "all_gather", 4), tmp_path / "a.txt")
    assert run(["program", "convert", str(tmp_path / "a.txt"), str(tmp_path / "a.json")]) == 0
    assert "all ranks are taken to share one host; --hosts or --cluster says otherwise" in capsys.readouterr().out
    assert run(["program", "convert", str(tmp_path / "a.txt"), str(tmp_path / "a.xml"), "-c", "ring:4"]) == 2
    assert "--cluster: only an MSCCL++ plan (.json) has it" in capsys.readouterr().err
