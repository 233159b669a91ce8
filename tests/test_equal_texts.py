# SPDX-License-Identifier: Apache-2.0
"""Equal objects have equal texts and digests, also where one of them went through pickle to another process."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto import AllGather, Cluster
from stretto.cluster import yaml_form
from stretto.collectives.files import save_collective
from stretto.dimensions import dims_of, themis
from stretto.files import plain
from stretto.strategy import zoo
from stretto.strategy.builders import BUILDERS, build
from stretto.strategy.files import model_text, read_strategy, strategy_text
from stretto.synthesis.sketch import Sketch
from stretto.synthesis.sketch_files import dumps as sketch_text
from stretto.workload import files as workload_files

MODEL = zoo.model("ncf_sparse", scale=0.01)


class _Inner(msgspec.Struct, kw_only=True):
    word: str = "none"
    number: float = 0.0
    many: list[int] = []


class _Form(msgspec.Struct, kw_only=True):
    name: str
    count: int = 1000
    inner: _Inner = msgspec.field(default_factory=_Inner)
    named: dict[str, _Inner] = {}
    maybe: str | None = None


INNER = st.builds(
    _Inner, word=st.sampled_from(["none", "some"]), number=st.sampled_from([0.0, 1.5]), many=st.lists(st.integers())
)


@given(
    st.builds(
        _Form, name=st.text(), count=st.sampled_from([1000, 0]), inner=INNER,
        named=st.dictionaries(st.text(), INNER), maybe=st.sampled_from([None, "", "none"]),
    )
)  # fmt: skip
def test_plain_data_is_the_same_for_equal_forms_and_reads_back(form: _Form) -> None:
    other = pickle.loads(pickle.dumps(form))
    for keep_floats in (False, True):
        data = plain(form, keep_floats=keep_floats)
        assert data == plain(other, keep_floats=keep_floats)
        assert msgspec.convert(data, _Form) == form
    assert ("maybe" in plain(form)) == (form.maybe is not None)
    assert "number" in plain(form, keep_floats=True).get("inner", {"number"})


CASES: dict[str, tuple[Any, Callable[[Any], object]]] = {
    **{
        f"strategy {name}": (
            build(name, MODEL, 3), lambda one: [strategy_text(one, as_json=as_json) for as_json in (False, True)],
        )
        for name in BUILDERS
    },
    "model": (MODEL, lambda model: [model_text(model), model_text(model, as_json=True), model.digest]),
    **{
        name: (workload_files.load(name), lambda made: [workload_files.dumps(made), workload_files.digest(made)])
        for name in ("dlrm:A2", "xlmr:xl")
    },
    "cluster": (Cluster.load("hgx2:2"), lambda made: [yaml_form.dumps(made), made.digest]),
    "sketch": (Sketch(name="pairs", symmetry_offsets=((2, 8),)), sketch_text),
    "dimension schedule": (
        themis(dims_of(Cluster.load("themis_3d_fc_ring_sw")), "all_reduce", 1e6), lambda made: made.digest
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_went_through_pickle_is_written_alike(name: str) -> None:
    made, written = CASES[name]
    other = pickle.loads(pickle.dumps(made))
    assert other == made
    assert written(other) == written(made)


def test_a_collective_is_written_alike(tmp_path: Path) -> None:
    made = AllGather(4, chunks=2)
    for number, one in enumerate((made, pickle.loads(pickle.dumps(made)))):
        save_collective(one, tmp_path / f"{number}.json")
    assert (tmp_path / "0.json").read_text() == (tmp_path / "1.json").read_text()


@pytest.mark.parametrize("name", BUILDERS)
def test_a_strategy_is_the_same_after_pickle_and_after_a_file(name: str) -> None:
    made = build(name, MODEL, 3)
    by_pickle = pickle.loads(pickle.dumps(made))
    by_file = read_strategy(strategy_text(by_pickle))
    assert made == by_pickle == by_file
    assert hash(made) == hash(by_pickle) == hash(by_file)
    assert len({strategy_text(one, as_json=True) for one in (made, by_pickle, by_file)}) == 1


def test_no_form_leaves_defaults_out_by_identity() -> None:
    source = Path(plain.__code__.co_filename).parent
    assert [str(path) for path in source.rglob("*.py") if "omit_defaults=True" in path.read_text()] == []
