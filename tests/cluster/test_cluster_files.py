# SPDX-License-Identifier: Apache-2.0
"""The file form: exact round trips, everything that `load` understands, and hostile input."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto import Cluster, Dimension, InvalidInput, Link, Node
from stretto.cluster import yaml_form
from stretto.cluster.files import load, loads, save
from stretto.cluster.presets import presets


def same(a: Cluster, b: Cluster) -> bool:
    """Equal in everything, notes included."""
    return a == b and a.notes == b.notes


SMALLER = {"themis_4d_ring_fc_ring_sw": 256, "themis_3d_fc_ring_sw": 256}


@pytest.mark.parametrize("entry", presets(), ids=lambda e: e.name)
@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_every_preset_survives_the_file_exactly(entry: Any, suffix: str, tmp_path: Path) -> None:
    nodes = SMALLER.get(entry.name, max(2, entry.default_nodes))
    cluster = Cluster.preset(entry.name, nodes=4 if entry.name in ("mesh", "torus") else nodes)
    path = tmp_path / f"cluster{suffix}"
    cluster.save(path)
    assert same(Cluster.load(path), cluster)
    assert same(Cluster.load(str(path)), cluster)


names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1, max_size=12)
numbers = st.floats(min_value=1e-6, max_value=1e6)


@st.composite
def odd_clusters(draw: st.DrawFn) -> Cluster:
    """Clusters with unpleasant names, repeated and one-way links, caps and incast curves."""
    labels = draw(st.lists(names, min_size=2, max_size=8, unique=True))
    kinds = ["device", *(draw(st.sampled_from(["device", "switch", "nic"])) for _ in labels[1:])]
    nodes = [Node(name=n, kind=k, host=draw(st.integers(-1, 3))) for n, k in zip(labels, kinds, strict=True)]
    links: list[Link] = []
    for _ in range(draw(st.integers(0, 12))):
        a, b = draw(st.permutations(range(len(labels))))[:2]
        shared: dict[str, Any] = {
            "gb_per_s": draw(st.one_of(numbers, st.just(1000 / 23))),
            "channel": draw(st.one_of(st.sampled_from(["nvlink", "link"]), names)),
            "flow_gb_per_s": draw(st.one_of(st.just(math.inf), numbers)),
            "incast": draw(st.sampled_from([(), ((2, 0.75),), ((2, 0.75), (9, 1 / 3))])),
        }
        links.append(Link(src=a, dst=b, alpha_us=draw(numbers), **shared))
        if draw(st.booleans()):
            links.append(Link(src=b, dst=a, alpha_us=draw(st.sampled_from([0.0, links[-1].alpha_us])), **shared))
    devices = kinds.count("device")
    return Cluster.build(
        draw(names),
        nodes=nodes,
        links=links,
        devices_forward=draw(st.booleans()),
        reduce_us_per_mb=draw(st.sampled_from([0.0, 0.125])),
        notes=tuple(draw(st.lists(names, max_size=2))),
        dimensions=draw(st.sampled_from([(), (Dimension(kind="ring", size=devices, gb_per_s=1 / 3, alpha_us=0.1),)])),
    )


@settings(max_examples=120, deadline=None)
@given(cluster=odd_clusters(), json=st.booleans())
def test_random_clusters_survive_the_file_exactly(cluster: Cluster, json: bool) -> None:
    assert same(loads(yaml_form.dumps(cluster, json=json)), cluster)


def test_the_file_reads_like_this() -> None:
    cluster = Cluster.build(
        "box",
        nodes=[*(Node(name=f"gpu{i}", host=0) for i in range(3)), Node(name="hub", kind="switch", host=0)],
        links=[
            link
            for i in range(3)
            for link in (
                Link(src=i, dst=3, alpha_us=0.3, gb_per_s=125.0, channel="nvlink"),
                Link(src=3, dst=i, alpha_us=0.0, gb_per_s=125.0, channel="nvlink"),
            )
        ]
        + [Link(src=0, dst=1, alpha_us=1.0, gb_per_s=2.5, channel="pcie")],
        notes=("assumed: nothing",),
    )
    assert yaml_form.dumps(cluster) == (
        "stretto: cluster\n"
        "version: 1\n"
        "name: box\n"
        "channels: [nvlink, pcie]\n"
        "notes:\n"
        "- 'assumed: nothing'\n"
        "nodes:\n"
        "- {kind: device, host: 0, names: 'gpu[0..2]'}\n"
        "- {kind: switch, host: 0, names: hub}\n"
        "links:\n"
        "- channel: nvlink\n"
        "  gb_per_s: 125.0\n"
        "  alpha_us: [0.3, 0.0]\n"
        "  between:\n"
        "  - [gpu0, hub]\n"
        "  - [gpu1, hub]\n"
        "  - [gpu2, hub]\n"
        "- channel: pcie\n"
        "  gb_per_s: 2.5\n"
        "  alpha_us: 1.0\n"
        "  one_way:\n"
        "  - [gpu0, gpu1]\n"
    )


@pytest.mark.parametrize(
    ("source", "preset", "options"),
    [
        ("dgx2", "dgx2", {}),
        ("dgx2:3", "dgx2", {"nodes": 3}),
        ("torus:16,gb_per_s=12.5,alpha_us=2", "torus", {"nodes": 16, "gb_per_s": 12.5, "alpha_us": 2}),
        ("torus:2x4", "torus", {"dims": (2, 4)}),
        ("mesh:8,dims=2x2x2", "mesh", {"nodes": 8, "dims": (2, 2, 2)}),
        ("ring:alpha_us=3", "ring", {"alpha_us": 3}),
    ],
)
def test_load_understands_presets_with_counts_and_options(source: str, preset: str, options: dict[str, Any]) -> None:
    assert same(load(source), Cluster.preset(preset, **options))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("dgx9", f"unknown preset 'dgx9'; choose from: {min(known.name for known in presets())}"),
        ("dgx9:4", "unknown preset 'dgx9'"),
        ("dgx2:many", "'many': expected preset:nodes,key=value"),
        ("dgx2:1000000000", "nodes: preset dgx2 takes 1 to 4096 nodes, not 1000000000"),
        ("dgx2:99999999999999999999999999", "nodes: 99999999999999999999999999: must be a number up to"),
        ("dgx2:2,gb_per_s=3", "unknown option of preset dgx2 'gb_per_s'; choose from: nodes"),
        ("torus:4,gb_per_s=fast", "gb_per_s: must be a number > 0, not 'fast'"),
        ("torus:4,4", "'4': expected preset:nodes,key=value"),
        ("missing.yaml", "missing.yaml: No such file"),
        ("missing.yaml:4", "missing.yaml: No such file"),
        ("/", "/: Is a directory"),
    ],
)
def test_load_refuses_what_it_does_not_understand(source: str, message: str) -> None:
    with pytest.raises(InvalidInput) as error:
        load(source)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


GOOD = """
stretto: cluster
version: 1
name: pair
nodes:
- {kind: device, names: 'gpu[0..1]'}
links:
- {gb_per_s: 10, alpha_us: 1, between: [[gpu0, gpu1]]}
"""


def test_the_good_example_is_good() -> None:
    assert loads(GOOD).routes(0, 1) == [(0,)]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("gb_per_s: 10", "gb_per_s: -10", "$.links[0].gb_per_s: must be > 0, not -10"),
        ("gb_per_s: 10", "gb_per_s: .nan", "$.links[0].gb_per_s: must be > 0, not nan"),
        ("gb_per_s: 10", "gb_per_s: .inf", "$.links[0].gb_per_s: must be > 0, not inf"),
        ("gb_per_s: 10", "gb_per_s: 1.0e-308", "$.links[0].gb_per_s: must be 1e-09 to 1e+09, not 1e-308"),
        ("alpha_us: 1", "alpha_us: 1.0e+308", "$.links[0].alpha_us: must be at most 1e+09, not 1e+308"),
        ("gb_per_s: 10", "gb_per_s: ten", "$.links[0].gb_per_s: must be a number, not "),
        ("gb_per_s: 10", "gb_per_s: 10, speed: 3", "$.links[0]: unknown field 'speed'"),
        ("alpha_us: 1", "alpha_us: [1, -1]", "$.links[0].alpha_us: must be >= 0, not -1"),
        ("alpha_us: 1", "alpha_us: [1, 2, 3]", "$.links[0].alpha_us: must be a list of length 2"),
        ("[gpu0, gpu1]", "[gpu0, gpu7]", "$.links[0].between[0]: no node named 'gpu7'"),
        ("[gpu0, gpu1]", "[gpu0, gpu0]", "$.links[0].between[0]: a link must not lead to its own source"),
        ("[[gpu0, gpu1]]", "gpu0", "$.links[0].between: must be a list or null, not "),
        ("between", "one_way: [[gpu0, gpu1]], between", "$.links[0]: needs exactly one of between and one_way"),
        ("kind: device", "kind: toaster", "$.nodes[0].kind: unknown value 'toaster'"),
        ("gpu[0..1]", "gpu[0..999999999]", "$.nodes[0].names: a range holds 1 to 1048576 names"),
        ("gpu[0..1]", "gpu[5..1]", "$.nodes[0].names: a range holds 1 to 1048576 names"),
        ("names: 'gpu[0..1]'", "names: [gpu0, gpu1, gpu0]", "$.nodes: names must differ; 'gpu0' is used twice"),
        ("names: 'gpu[0..1]'", "host: 99999999999, names: a", "$.nodes[0].host: must be a whole number <= 2147483647"),
        ("version: 1", "version: 7", "$.version: must be 1, not 7"),
        ("version: 1", "", "$.version: must be 1, not None"),
        ("stretto: cluster", "stretto: collective", "$.stretto: unknown value 'collective'"),
        ("name: pair", "", "the field 'name' is missing"),
        ("name: pair", "name: pair\nincast_curves: [[[2, 7.0]]]", "incast[0]: pairs need rising flows"),
        (
            "name: pair",
            "name: pair\ndimensions: [{kind: ring, size: 3, gb_per_s: 1, alpha_us: 1}]",
            "dimensions: sizes multiply to 3",
        ),
        (
            "name: pair",
            "name: pair\ndimensions: [{kind: cone, size: 2, gb_per_s: 1, alpha_us: 1}]",
            "dimensions[0].kind: unknown kind 'cone'; choose from: ring, fully_connected, switch",
        ),
    ],
)
def test_bad_fields_are_named_by_their_path(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(InvalidInput) as error:
        load(path)
    text = str(error.value)
    assert "\n" not in text
    assert text.removeprefix(f"{path}: ").startswith(message) or message in text


ENTITY_BOMB = (
    '<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "aaaaaaaaaa">'
    + "".join(f'<!ENTITY {chr(98 + i)} "{f"&{chr(97 + i)};" * 10}">' for i in range(9))
    + "]><system><cpu>&j;</cpu></system>"
)
ALIAS_BOMB = "a: &a [x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ENTITY_BOMB, "DOCTYPE is not accepted"),
        (ALIAS_BOMB, "aliases (*name) are not allowed"),
        ("", "not a cluster: expected a Stretto cluster file"),
        ("just words", "not a cluster"),
        ("[1, 2, 3]", "not a cluster"),
        ("{", "not valid JSON"),
        ("{}", "not a cluster"),
        ("stretto: [", "not valid YAML: while parsing a flow node did not find expected node content in line"),
        ("stretto: !!python/object/apply:os.system [ls]", "not valid YAML"),
        ("a: " + "[" * 500, "nested deeper than 100"),
        ('{"stretto": "cluster", "version": 1' + ', "name": "x"' * 3, "not valid JSON"),
        ("<system", "not valid XML"),
        ("<system><cpu>", "not valid XML"),
        ("<algo/>", "expected an NCCL topology, <system> with <cpu> inside, not <algo>"),
        ("<system>" + "<pci>" * 200, "nested deeper than 100"),
        ("<system/>", "no <gpu> in the file"),
        ("\x00\x01", ""),
    ],
)
def test_hostile_text_is_refused_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile"
    path.write_text(text)
    with pytest.raises(InvalidInput) as error:
        load(path)
    assert message in str(error.value)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_files_that_are_no_text_or_too_large_are_refused(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInput, match="not a UTF-8 text file"):
        load(binary)
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(InvalidInput, match="more than the limit"):
        load(large)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_mutilated_files_never_raise_anything_but_invalid_input(data: st.DataObject) -> None:
    plain = yaml.safe_load(GOOD)
    keys = data.draw(st.lists(st.sampled_from(["nodes", "links", "name", "version", "channels"]), max_size=2))
    junk = st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
        lambda x: st.one_of(st.lists(x, max_size=3), st.dictionaries(st.text(max_size=5), x, max_size=3)),
        max_leaves=6,
    )
    for key in keys:
        plain[key] = data.draw(junk)
    try:
        loads(yaml.safe_dump(plain))
    except InvalidInput as error:
        assert "\n" not in str(error)


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 1200))
def test_truncated_files_are_refused_or_still_valid(cut: int) -> None:
    text = yaml_form.dumps(Cluster.preset("ndv2"))[:cut]
    try:
        assert loads(text).num_devices == 8
    except InvalidInput as error:
        assert "\n" not in str(error)


def test_yaml_is_bounded_and_json_takes_what_is_larger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster.preset("fully_connected", nodes=64)
    monkeypatch.setattr("stretto.files.MAX_YAML_BYTES", 20_000)
    with pytest.raises(InvalidInput, match=r"too large for YAML \(\d+ bytes\); give a name that ends in .json"):
        cluster.save(tmp_path / "x.yaml")
    cluster.save(tmp_path / "x.json")
    assert Cluster.load(tmp_path / "x.json") == cluster
    (tmp_path / "long.yaml").write_text("- 1\n" * 10_000)
    with pytest.raises(InvalidInput, match="YAML of more than 20000 bytes"):
        load(tmp_path / "long.yaml")


def test_nodes_cannot_repeat_a_file_that_is_already_whole(tmp_path: Path) -> None:
    path = tmp_path / "pair.yaml"
    path.write_text(GOOD)
    with pytest.raises(InvalidInput, match="already describes the whole cluster"):
        load(f"{path}:4")


def test_saving_where_nothing_can_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="No such file or directory"):
        save(Cluster.preset("ring"), tmp_path / "missing" / "x.yaml")


def test_device_order_follows_the_file_even_where_switches_stand_between() -> None:
    text = GOOD.replace(
        "- {kind: device, names: 'gpu[0..1]'}", "- {kind: switch, names: s}\n- {kind: device, names: [gpu1, gpu0]}"
    )
    cluster = loads(text)
    assert cluster.node_names == ("gpu1", "gpu0", "s")
    assert np.array_equal(cluster.link_src, [1, 0])
