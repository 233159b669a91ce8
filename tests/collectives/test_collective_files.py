# SPDX-License-Identifier: Apache-2.0
"""Collectives in files: exact round trips, custom ones, and hostile input."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto import (
    AllGather,
    AllReduce,
    AllToAll,
    AllToAllV,
    Broadcast,
    Collective,
    Gather,
    InvalidInput,
    Permute,
    Reduce,
    ReduceScatter,
    Scatter,
)
from stretto.collectives.files import load_collective, read, save_collective


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
@pytest.mark.parametrize(
    "collective",
    [
        AllGather(4, chunks=2, in_place=True),
        AllGather([5, 3, 8]),
        ReduceScatter(3, chunks=2),
        ReduceScatter(4, in_place=True),
        AllReduce(5),
        AllReduce([9, 1], chunks=3, in_place=True),
        AllToAll(3, chunks=2),
        AllToAll(2, in_place=True),
        AllToAllV(3, [[0, 1, 1 / 3], [2, 0, 0.1], [0, 0, 7]], chunks=2),
        Broadcast(4, root=2, chunks=3),
        Reduce(4, root=1, in_place=True),
        Gather(3, root=2, chunks=2, in_place=True),
        Scatter(3, root=1),
        Permute(4, [(0, 1), (1, 0), (3, 2)], chunks=2),
        AllGather(1),
    ],
    ids=lambda value: value.kind if isinstance(value, Collective) else str(value),
)
def test_every_constructor_survives_the_file_exactly(collective: Collective, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"collective{suffix}"
    save_collective(collective, path)
    assert load_collective(path) == collective


def test_the_file_reads_like_this(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    save_collective(Gather(3, root=1, chunks=2), path)
    assert path.read_text() == (
        "stretto: collective\n"
        "version: 1\n"
        "kind: gather\n"
        "ranks: 3\n"
        "num_chunks: 6\n"
        "chunks_per_shard: 2\n"
        "root: 1\n"
        "place: [0, 2, 0]\n"
        "share: 0.16666666666666666\n"
        "start:\n"
        "- [0..1]\n"
        "- [2..3]\n"
        "- [4..5]\n"
        "end:\n"
        "- []\n"
        "- [0..5]\n"
        "- []\n"
    )


CUSTOM = """
stretto: collective
version: 1
ranks: [4, 5, 6]
num_chunks: 4
sizes: [2, 1, 1, 1]
start:
- [0, 1]
- [0, 2..3]
- [{chunks: 3, part: 0}]
end:
- [0..3]
- []
- [{chunks: 0, parts: [1]}, {chunks: 3, parts: [1, 0]}]
"""


def test_a_custom_collective_has_parts_sizes_and_partial_results(tmp_path: Path) -> None:
    path = tmp_path / "custom.yaml"
    path.write_text(CUSTOM)
    collective = load_collective(path)
    assert collective.kind == "custom"
    assert collective.ranks == (4, 5, 6)
    assert collective.chunk_bytes(500).tolist() == [200, 100, 100, 100]
    assert [collective.parts_of(at) for at in range(6)] == [(0, 1), (0,), (1,), (0, 1), (1,), (1, 0)]
    assert collective.combining
    again = tmp_path / "again.json"
    save_collective(collective, again)
    assert load_collective(again) == collective


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("version: 1", "version: 2", "$.version: must be 1, not 2"),
        ("stretto: collective", "stretto: cluster", "$.stretto: must be 'collective'"),
        ("[4, 5, 6]", "[4, 5]", "$.start: needs one entry for each of 2 ranks, not 3"),
        ("[4, 5, 6]", "1000000000", "ranks: must be 1..131072, not 1000000000"),
        ("[4, 5, 6]", "[4, 4, 6]", "ranks: must be distinct devices"),
        ("num_chunks: 4", "num_chunks: 1000000000", "$.num_chunks: must be a whole number <= 4194304"),
        ("num_chunks: 4", "num_chunks: four", "$.num_chunks: must be a whole number, not "),
        ("2..3", "2..9", "$.start[1][1]: chunks must be 0..3 and rise, not 2..9"),
        ("2..3", "3..2", "$.start[1][1]: chunks must be 0..3 and rise, not 3..2"),
        ("2..3", "all", "$.start[1][1]: must be a chunk or a run such as 0..3, not 'all'"),
        ("2..3", "2..3, 0", "inputs: a rank holds one chunk twice"),
        ("[0, 1]", "[0]", "outputs: chunk 1 is wanted but no rank has it at the start"),
        ("parts: [1]", "parts: [7]", "$.end[2][0].parts: no rank starts with part 7 of chunk 0"),
        ("parts: [1]", "parts: []", "$.end[2][0].parts: must be at least one part, each once"),
        ("parts: [1]", "parts: [1, 1]", "$.end[2][0].parts: must be at least one part, each once"),
        ("part: 0", "part: 999999", "$.start[2][0].part: must be 0..131071, not 999999"),
        ("part: 0", "portion: 0", "$.start[2][0]: unknown field 'portion'; choose from: chunks, part"),
        ("sizes: [2, 1, 1, 1]", "sizes: [2, 1]", "$.sizes: needs one number for each of 4 chunks, not 2"),
        ("sizes: [2, 1, 1, 1]", "sizes: [2, 1, -1, 1]", "$.sizes[2]: must be > 0, not -1"),
        ("sizes: [2, 1, 1, 1]", "sizes: [2, 1, .nan, 1]", "$.sizes[2]: must be > 0, not nan"),
        ("sizes: [2, 1, 1, 1]", "share: .inf", "$.share[0]: must be > 0, not inf"),
        ("sizes: [2, 1, 1, 1]", "share: 1.0\nsizes: [2, 1, 1, 1]", "$.share: give share or sizes, not both"),
        ("sizes:", "place: [0, 0]\nsizes:", "$.place: needs one entry for each of 3 ranks, not 2"),
        ("sizes:", "place: [0, 0, 99999999999999999999]\nsizes:", "$.place"),
        ("sizes:", "kind: all_gather\nsizes:", "$.kind: start and end are not those of all_gather; call it custom"),
        ("sizes:", "colour: red\nsizes:", "unknown field 'colour'"),
    ],
)
def test_bad_fields_are_named_by_their_path(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert CUSTOM.count(old) >= 1
    path = tmp_path / "bad.yaml"
    path.write_text(CUSTOM.replace(old, new, 1))
    with pytest.raises(InvalidInput) as error:
        load_collective(path)
    text = str(error.value)
    assert text.startswith(f"{path}: ")
    assert message in text
    assert "\n" not in text


def test_runs_cannot_stand_for_more_than_a_file_may_hold() -> None:
    rows = [["0..4194303"] for _ in range(64)]
    with pytest.raises(InvalidInput, match=r"start and end hold over 16777216 chunks"):
        read({"stretto": "collective", "version": 1, "ranks": 64, "num_chunks": 1 << 22, "start": rows, "end": rows})


def test_yaml_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "long.yaml"
    path.write_text("- 1\n" * 600_000)
    with pytest.raises(InvalidInput, match="YAML of more than 2097152 bytes"):
        load_collective(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="No such file"):
        load_collective(tmp_path / "missing.yaml")
    with pytest.raises(InvalidInput, match="No such file"):
        save_collective(AllGather(2), tmp_path / "missing" / "x.yaml")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_mutilated_files_never_raise_anything_but_invalid_input(data: st.DataObject) -> None:
    junk = st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
        lambda x: st.one_of(st.lists(x, max_size=3), st.dictionaries(st.text(max_size=5), x, max_size=3)),
        max_leaves=6,
    )
    plain = {
        "stretto": "collective",
        "version": 1,
        "ranks": 2,
        "num_chunks": 2,
        "start": [[0], [1]],
        "end": [[0, 1], [0, 1]],
    }
    for key in data.draw(st.lists(st.sampled_from([*plain, "place", "share", "sizes", "root", "kind"]), max_size=2)):
        plain[key] = data.draw(junk)
    try:
        read(plain)
    except InvalidInput as error:
        assert "\n" not in str(error)
