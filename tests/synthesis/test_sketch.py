# SPDX-License-Identifier: Apache-2.0
"""Sketches: both file forms, and what they leave of a cluster."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

import stretto as st
from stretto.cluster.presets.registry import presets
from stretto.errors import Infeasible, InvalidInput
from stretto.synthesis.logical import LogicalTopology, default_sketch
from stretto.synthesis.routing_problem import RoutingProblem
from stretto.synthesis.sketch import Hyperedge, LinkRule, Sketch
from stretto.synthesis.sketch_files import dumps, loads

DATA = Path(__file__).parent / "data"


def test_the_sketch_printed_in_the_paper_is_read_with_its_comments() -> None:
    sketch = Sketch.load(DATA / "taccl_listing1_dgx2_sk1.json")
    assert sketch.switches == (Hyperedge(gpus=tuple(range(16)), strategy="uc-min"),)
    assert sketch.internode_conn == {i: (i - 1,) for i in range(1, 16, 2)}
    assert set(sketch.beta_split.values()) == {1.0}
    assert sketch.chunk_to_relay_map == (2, 1)
    assert sketch.symmetry_offsets == ((2, 16), (16, 32))
    assert (sketch.input_chunkup, sketch.input_bytes) == (2, 1e6)


def test_the_repositorys_own_fields_are_read() -> None:
    sketch = Sketch.load(DATA / "taccl_repo_dgx2_n2.json")
    assert (sketch.nodes, sketch.own_first, sketch.switches[0].strategy) == (2, True, "uc-max")
    assert sketch.gpus_to_sender[3] == (2, 3)
    other = Sketch.load(DATA / "taccl_repo_ndv2_n2.json")
    assert (other.balance, other.internode_conn) == ("minmax", "direct-map")


def test_our_form_is_written_and_read_back() -> None:
    for file in sorted(DATA.iterdir()):
        sketch = Sketch.load(file)
        assert loads(dumps(sketch)) == sketch
        assert pickle.loads(pickle.dumps(sketch)) == sketch


def test_sketches_are_saved(tmp_path: Path) -> None:
    sketch = Sketch(name="x", drop=(LinkRule(src=(0,), chunks=(1, 2)),), input_bytes=5e5)
    sketch.save(tmp_path / "x.yaml")
    assert Sketch.load(tmp_path / "x.yaml") == sketch


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("intranode_sketch", "strategy"), "ring", "intranode_sketch.strategy: unknown strategy 'ring'; choose from"),
        (("intranode_sketch", "switch_hyperedge_strategy"), ["uc-mid"], "uc-min, uc-max, none"),
        (("intranode_sketch", "switch_hyperedge_strategy"), [], "needs one of uc-min, uc-max, none for each"),
        (("internode_sketch", "strategy"), "ring", "choose from: relay"),
        (("internode_sketch", "internode_conn"), "all", "fully-connected, direct-map"),
        (("internode_sketch", "beta_split"), {"1": 0.5}, "beta_split.1: must be >= 1"),
        (("internode_sketch", "beta_split"), {"one": 1}, "keys are the numbers of GPUs, not 'one'"),
        (("internode_sketch", "chunk_to_relay_map"), [0, 1], "chunk_to_relay_map: needs r1 >= 1"),
        (("internode_sketch", "typo"), 1, "typo"),
        (("symmetry_offsets",), [[16, 16]], r"symmetry_offsets\[0\]: needs 1 <= offset < group size"),
        (("hyperparameters", "input_chunkup"), 0, "input_chunkup: must be 1.."),
        (("hyperparameters", "input_size"), "lots", "hyperparameters.input_size: size 'lots'"),
        (("nnodes",), "two", "nnodes"),
    ],
)
def test_errors_name_the_field_and_the_choices(path: tuple[str, ...], value: object, says: str) -> None:
    data = json.loads((DATA / "taccl_repo_dgx2_n2.json").read_text())
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(InvalidInput, match=says):
        loads(json.dumps(data), where="sk.json")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stretto: sketch\nversion: 2\n", "version: must be 1"),
        ("stretto: sketch\nversion: 1\nrelay: {}\n", "relay"),
        ("stretto: sketch\nversion: 1\nlinks: {channels: some}\n", "auto, all, a list of channels"),
        ("- 1\n", "a sketch is a table"),
        ("stretto: sketch\nversion: 1\nbalance: most\n", "none, minmax, maxmin"),
    ],
)
def test_errors_in_our_form_name_the_field(text: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        loads(text)


def test_a_sketch_must_fit_the_cluster() -> None:
    one, two = st.Cluster.load("ndv2:1"), st.Cluster.load("ndv2:2")
    paper = Sketch.load(DATA / "taccl_listing1_dgx2_sk1.json")
    with pytest.raises(InvalidInput, match=r"switches\[0\].gpus: a host has GPUs 0..7, not 8"):
        LogicalTopology.of(paper, two, st.AllGather(16))
    with pytest.raises(InvalidInput, match="the sketch is for 2 hosts, ndv2:1 has 1"):
        LogicalTopology.of(Sketch.load(DATA / "ndv2_relay.yaml"), one, st.AllGather(8))
    with pytest.raises(InvalidInput, match=r"links.channels\[0\]: unknown channel 'bus'"):
        LogicalTopology.of(Sketch(channels=("bus",)), one, st.AllGather(8))
    with pytest.raises(InvalidInput, match=r"links.drop\[0\].src\[0\]: unknown device 'gpu9'"):
        _ = LogicalTopology.of(Sketch(drop=(LinkRule(src=("gpu9",)),)), one, st.AllGather(8)).allowed
    with pytest.raises(Infeasible, match="all_reduce combines chunks"):
        LogicalTopology.of(Sketch(), one, st.AllReduce(8))


def test_the_logical_topology_has_what_the_sketch_leaves() -> None:
    cluster = st.Cluster.load("ndv2:2")
    logical = LogicalTopology.of(Sketch.load(DATA / "ndv2_relay.yaml"), cluster, st.AllGather(16, chunks=2))
    allowed = logical.allowed
    crossing = {(int(logical.src[h]), int(logical.dst[h])) for h in np.flatnonzero(logical.crosses & allowed.any(0))}
    assert crossing == {(0, 9), (8, 1)}
    assert np.count_nonzero(~logical.crosses) == 2 * 32, "NVLink only inside a host"
    zero_to_one = logical.hops.between[0, 1]
    assert not allowed[3, zero_to_one] and allowed[0, zero_to_one]
    assert not allowed[4, np.flatnonzero(logical.dst == 2)].any(), "nothing is sent to who has it"


def test_relays_follow_the_map_of_the_sketch() -> None:
    cluster = st.Cluster.load("dgx2:2")
    for file in ("taccl_listing1_dgx2_sk1.json", "taccl_repo_dgx2_n2.json"):
        logical = LogicalTopology.of(Sketch.load(DATA / file), cluster, st.AllGather(32))
        for chunk in (0, 1, 6, 20):
            leaving = np.flatnonzero(logical.crosses & (logical.host[logical.src] == chunk // 16))
            senders = {int(logical.src[h]) for h in leaving if logical.allowed[chunk, h]}
            assert senders == {chunk // 2 * 2 + 1}


def test_keep_leaves_only_its_links() -> None:
    ring = st.Cluster.preset("ring", nodes=4)
    logical = LogicalTopology.of(Sketch(keep=(LinkRule(src=(0,), dst=(1,)), LinkRule(src=(1,)))), ring, st.AllGather(4))
    kept = {(int(logical.src[h]), int(logical.dst[h])) for h in np.flatnonzero(logical.allowed[3])}
    assert kept == {(0, 1), (1, 0), (1, 2)}


def test_the_default_sketch_sees_shared_nics_and_equal_hosts() -> None:
    ndv2 = default_sketch(st.Cluster.load("ndv2:2"))
    assert (ndv2.internode_conn, ndv2.symmetry_offsets) == ({1: (0,)}, ((8, 16),))
    dgx2 = default_sketch(st.Cluster.load("dgx2:2"))
    assert dgx2.internode_conn == {i: (i - 1,) for i in range(1, 16, 2)}
    assert default_sketch(st.Cluster.load("ndv2:1")).symmetry_offsets == ()


SMALL = [
    (info.name, nodes)
    for info in presets()
    for nodes in (1, 2)
    if not info.name.startswith(("themis_", "mesh", "torus"))
]
"""Themis's systems, meshes and tori have no variant of one or two nodes."""


@pytest.mark.parametrize(("name", "nodes"), SMALL)
def test_the_default_sketch_leaves_a_path_for_every_chunk(name: str, nodes: int) -> None:
    if (name, nodes) == ("hypercube", 1):
        nodes = 4
    if name == "gb200_nvl72":
        nodes = 1  # two racks have more pairs than the router of sketches takes
    cluster = st.Cluster.preset(name, nodes=nodes)
    gather = st.AllGather(cluster.num_devices)
    problem = RoutingProblem.of(LogicalTopology.of(default_sketch(cluster), cluster, gather), nbytes=st.MB)
    targets = [len(ranks) for ranks in problem.logical.targets]
    assert targets == [cluster.num_devices - 1] * gather.num_chunks
    everything = problem.routing(np.ones(problem.num_orbits, np.bool_), by="all")
    assert everything is not None


def test_the_default_relays_are_those_beside_the_nics() -> None:
    rails = default_sketch(st.Cluster.load("dgx_h100:2"))
    assert rails.internode_conn == "direct-map"
    paired = default_sketch(st.Cluster.load("dgx2_teccl:2"))
    assert paired.internode_conn == {i: (i - 1,) for i in range(1, 16, 2)}


def test_relays_that_other_hosts_do_not_have_are_not_asked_for() -> None:
    # The first two hosts are joined from GPU 0 to GPU 0; the third is reached at its GPU 1 only.
    nodes = [st.Node(name=f"h{h}.gpu{g}", host=h) for h in range(3) for g in range(2)]
    pairs = [(0, 1), (2, 3), (4, 5), (0, 2), (2, 5)]
    links = [
        st.Link(src=a, dst=b, alpha_us=1, gb_per_s=1) for one, other in pairs for a, b in ((one, other), (other, one))
    ]
    cluster = st.Cluster.build("uneven", nodes=nodes, links=links)
    assert default_sketch(cluster).internode_conn == "fully-connected"


def test_ablations_change_one_field_each() -> None:
    paper = Sketch.load(DATA / "taccl_listing1_dgx2_sk1.json")
    wide = paper.with_connections(4, 16)
    assert not isinstance(wide.internode_conn, str) and wide.internode_conn[15] == (15, 0, 1, 2)
    assert wide.chunk_to_relay_map is None
    assert paper.with_strategy("uc-max").switches[0].strategy == "uc-max"
    with pytest.raises(InvalidInput, match="unknown field of a sketch 'chunkup'; choose from: name"):
        paper.vary(chunkup=3)
    with pytest.raises(InvalidInput, match="1 to 16 connections"):
        paper.with_connections(17, 16)


@pytest.mark.parametrize("more", ["", "relays: {own_first: true}", "balance: minmax"])
def test_defaults_of_a_sketch_are_not_written(more: str, tmp_path: Path) -> None:
    sketch = loads(f"stretto: sketch\nversion: 1\n{more}")
    sketch.save(tmp_path / "x.yaml")
    assert Sketch.load(tmp_path / "x.yaml") == sketch
    spelled = sketch.vary(internode_conn="-".join(["fully", "connected"]))
    assert dumps(spelled) == dumps(sketch)
    assert "fully-connected" not in dumps(spelled)
