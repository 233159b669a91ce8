# SPDX-License-Identifier: Apache-2.0
"""Groups with helpers: packings against linear programs over all trees there are, and the programs made from them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest

import stretto as st
from stretto.cluster.model import Link, Node
from stretto.collectives.files import load_collective, save_collective
from stretto.errors import Infeasible, InvalidInput
from stretto.planner.algebra.recipes import MotifRequest
from stretto.planner.costs.costs import Motion, SimulatedCosts
from stretto.programs.formats import load_program, save_program
from stretto.programs.interpret import check as interpret_and_check
from stretto.simulator import lower_bound
from stretto.solvers.linear import LinearProgram
from stretto.synthesis import steiner
from stretto.synthesis.helpers import duties, resolve
from stretto.synthesis.steiner_packing import pack_shards, shards_of

MB = 1_000_000
KINDS = {"all_gather": st.AllGather, "reduce_scatter": st.ReduceScatter, "all_reduce": st.AllReduce}


def digraph(seed: int, count: int = 5) -> st.Cluster:
    """Devices on a circle of random order, and some more links, of random rates."""
    rng = np.random.default_rng(seed)
    circle = rng.permutation(count)
    ends = {(int(a), int(b)) for a, b in zip(circle, np.roll(circle, 1), strict=True)}
    ends |= {(int(a), int(b)) for a, b in rng.integers(0, count, (count + 2, 2)) if a != b}
    return st.Cluster.build(
        f"digraph{seed}",
        nodes=[Node(name=f"d{i}") for i in range(count)],
        links=[
            Link(src=a, dst=b, alpha_us=float(rng.uniform(0.3, 3)), gb_per_s=float(rng.integers(4, 50)))
            for a, b in sorted(ends)
        ],
    )


def all_trees(cluster: st.Cluster, root: int, ends: list[int], inward: bool) -> list[tuple[int, ...]]:
    """The links of every tree from the root to all ends (or from them to it), found by trying all parents."""
    links = list(zip(cluster.link_src.tolist(), cluster.link_dst.tolist(), strict=True))
    near, away = (1, 0) if inward else (0, 1)
    others = [v for v in range(cluster.num_devices) if v != root]
    free = [v for v in others if v not in ends]
    found = []
    for size in range(len(free) + 1):
        for more in combinations(free, size):
            inside = [v for v in others if v in ends or v in more]
            choices = [
                [k for k, link in enumerate(links) if link[away] == v and link[near] in (root, *inside)] for v in inside
            ]
            for picked in product(*choices):
                parent = dict(zip(inside, (links[k][near] for k in picked), strict=True))
                if all(_leads_to(parent, v, root) for v in inside):
                    found.append(picked)
    return found


def _leads_to(parent: dict[int, int], v: int, root: int) -> bool:
    for _ in range(len(parent) + 1):
        if v == root:
            return True
        v = parent[v]
    return False


def best_rate(cluster: st.Cluster, group: list[int], kind: str) -> float:
    """The rate of a shard, from a linear program over all trees: no column generation, no prices."""
    model = LinearProgram(maximize=True)
    for rate in cluster.link_gb_per_s.tolist():
        model.row((), (), upper=rate)
    links, rows = cluster.num_links, 0
    root_of: list[int] = []
    whole = kind == "all_reduce"
    roots = list(range(cluster.num_devices)) if whole else group
    balance: dict[tuple[int, bool], int] = {}
    for root in roots:
        for inward in (True, False) if whole else (kind == "reduce_scatter",):
            model.row((), (), lower=0.0)
            balance[root, inward] = links + rows
            rows += 1
    for root in roots:
        share = list(balance[root, inward] for inward in (True, False) if (root, inward) in balance)
        root_of.append(model.column(cost=1.0, index=share, value=[-1.0] * len(share)))
    if not whole:  # All shards at one rate: the columns above are one.
        for a, b in combinations(root_of, 2):
            model.row([a, b], [1.0, -1.0], lower=0.0, upper=0.0)
    for (root, inward), row in balance.items():
        for tree in all_trees(cluster, root, [v for v in group if v != root], inward):
            used, count = np.unique(tree, return_counts=True)
            model.column(index=[*used.tolist(), row], value=[*count.tolist(), 1.0])
    found = model.solve()
    return float(found.objective) / (1 if whole else len(group))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_packings_are_as_good_as_all_trees_together(kind: str, seed: int) -> None:
    cluster, group = digraph(seed), [0, 1, 3]
    collective = KINDS[kind](group, chunks=1)
    packing = pack_shards(cluster, [*group, 2, 4], shards_of(collective), close=1e-4)
    wanted = best_rate(cluster, group, kind)
    assert packing.gb_per_s == pytest.approx(wanted, rel=2e-3)
    assert packing.limit_gb_per_s >= wanted * (1 - 1e-6)
    shards = len(shards_of(collective))
    bound_us = lower_bound(collective, cluster, MB).bandwidth_us
    assert MB / shards / wanted / 1e3 >= bound_us * (1 - 1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_all_to_all_is_a_flow_of_many_commodities(seed: int) -> None:
    cluster, group = digraph(seed, 6), [0, 2, 5]
    pairs = [(a, b) for a in group for b in group if a != b]
    model = LinearProgram(maximize=True)
    for rate in cluster.link_gb_per_s.tolist():
        model.row((), (), upper=rate)
    for _ in pairs:
        for _ in range(cluster.num_devices):
            model.row((), (), lower=0.0, upper=0.0)
    links, n = cluster.num_links, cluster.num_devices
    supply = [(links + p * n + v, (v == a) - (v == b)) for p, (a, b) in enumerate(pairs) for v in range(n)]
    model.column(cost=1.0, index=[row for row, s in supply if s], value=[float(s) for _, s in supply if s])
    for p in range(len(pairs)):
        for k, (a, b) in enumerate(zip(cluster.link_src.tolist(), cluster.link_dst.tolist(), strict=True)):
            model.column(index=[k, links + p * n + a, links + p * n + b], value=[1.0, -1.0, 1.0])
    packing = pack_shards(cluster, [*group, 1, 3, 4], shards_of(st.AllToAll(group)), close=1e-4)
    assert packing.gb_per_s == pytest.approx(model.solve().objective, rel=2e-3)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce"])
def test_programs_with_helpers_are_right_on_data(kind: str) -> None:
    torus, group = st.Cluster.load("torus:3x3"), (0, 4, 8)
    builders = KINDS | {"all_to_all": st.AllToAll, "broadcast": st.Broadcast, "reduce": st.Reduce}
    collective = builders[kind](group)
    program = steiner.synthesize(
        collective, torus, helpers=resolve(torus, group, "all"), nbytes=MB, budget_s=2.0, max_transfers=400
    )
    assert program.collective.members == group
    assert program.collective.helpers > 0
    program.verify()
    interpret_and_check(program.lower())
    asked = duties(program, torus, MB)
    assert [duty.device for duty in asked] == list(program.collective.ranks[3:])
    assert all(duty.receives > 0 and duty.sends > 0 for duty in asked)
    assert st.simulate(program, torus, nbytes=MB).total_us >= lower_bound(collective, torus, MB).total_us


def test_files_keep_helpers_or_refuse_them(tmp_path: Path) -> None:
    folder = tmp_path
    torus = st.Cluster.load("torus:3x3")
    program = steiner.synthesize(
        st.AllReduce((0, 4)), torus, helpers=(1, 3, 5, 7), nbytes=MB, budget_s=1.0, max_transfers=100
    )
    save_program(program, folder / "p.txt")
    assert load_program(folder / "p.txt") == program
    for name in ("c.yaml", "c.json"):
        save_collective(program.collective, folder / name)
        assert load_collective(folder / name) == program.collective
    for name, runtime in (("p.xml", "MSCCL"), ("p.json", "MSCCL")):
        with pytest.raises(InvalidInput, match=f"helpers: devices .*{runtime}.*helpers 'none'"):
            save_program(program, folder / name)


def rails() -> st.Cluster:
    """Two hosts of two GPUs; each GPU's NIC is on a rail of its own, and rails do not meet."""
    nodes = [Node(name=f"h{h}g{g}", host=h) for h in range(2) for g in range(2)]
    nodes += [Node(name=f"nvs{h}", kind="switch", host=h) for h in range(2)]
    nodes += [Node(name=f"rail{g}", kind="switch") for g in range(2)]
    ends = [(2 * h + g, 4 + h, 300.0) for h in range(2) for g in range(2)]
    ends += [(2 * h + g, 6 + g, 50.0) for h in range(2) for g in range(2)]
    links = [Link(src=a, dst=b, alpha_us=1.0, gb_per_s=rate) for x, y, rate in ends for a, b in ((x, y), (y, x))]
    return st.Cluster.build("rails", nodes=nodes, links=links)


def test_peers_forward_between_rails_by_default_and_the_error_names_the_option() -> None:
    cluster, collective = rails(), st.AllGather([0, 3])
    found = st.synthesize(collective, cluster, 4 * MB, cache=False, budget_s=60.0, makers=["library:ring", "steiner"])
    assert found.certificate.gap < 0.1
    assert [duty.name for duty in found.certificate.helpers] == ["h0g1", "h1g0"]
    assert "2 devices outside the group must run it too (h0g1, h1g0)" in str(found.certificate)
    assert len(found.hosts or ()) == 4
    with pytest.raises(Infeasible, match="with helpers 'host' or 'all' those may forward"):
        st.synthesize(collective, cluster, MB, cache=False, helpers="none", makers=["library:ring"])


def test_who_may_help() -> None:
    cluster = rails()
    assert resolve(cluster, [0, 2], None) == ()
    assert resolve(cluster, [0, 3], "auto") == (1, 2)
    assert resolve(cluster, [0], "host") == (1,)
    assert resolve(cluster, [0], "all") == (1, 2, 3)
    assert resolve(cluster, [0], [3]) == (3,)
    for wrong, message in (
        ("near", "choose from"),
        ([9], "does not exist"),
        ([0], "is in the group"),
        ([1, 1], "twice"),
    ):
        with pytest.raises(InvalidInput, match=message):
            resolve(cluster, [0], wrong)
    with pytest.raises(InvalidInput, match="no ranks without buffers"):
        st.synthesize(st.AllGather([0, 2]), cluster, MB, helpers="host", lower=True, cache=False)


def test_one_gpu_per_host_uses_all_rails() -> None:
    cluster, group = st.Cluster.preset("dgx_h100", nodes=4), [0, 8, 16, 24]
    alone = st.synthesize(st.AllGather(group), cluster, 64 * MB, cache=False, budget_s=2.0, makers=["library"])
    found = st.synthesize(
        st.AllGather(group), cluster, 64 * MB, cache=False, budget_s=60.0, helpers="host", makers=["steiner"]
    )
    assert alone.certificate.gap > 5.0
    assert found.certificate.gap < 0.2


def test_the_planner_counts_the_links_of_helpers() -> None:
    cluster, group = st.Cluster.preset("dgx_h100", nodes=2), (0, 8)
    program = steiner.synthesize(
        st.AllGather(group), cluster, helpers=(1, 9), nbytes=MB, budget_s=60.0, max_transfers=200
    )

    def provider(ask: MotifRequest, part: st.Cluster, nbytes: float) -> dict[str, Callable[[], st.Program]]:
        return {"helped": lambda: program}

    costs = SimulatedCosts(cluster, providers=[provider])
    loads = costs.link_loads(Motion(kind="all_gather", groups=(group,), channels=cluster.channels), MB, "helped")
    used = dict(zip(loads.links.tolist(), loads.us_per_byte.tolist(), strict=True))
    assert {1, 9} <= {int(cluster.link_src[link]) for link in used}
    for link in range(cluster.num_links):
        bytes_over = sum(
            float(size)
            for size, route in zip(program.transfer_bytes(MB), program.route.tolist(), strict=True)
            if link in program.routes[route]
        )
        assert used.get(link, 0.0) == pytest.approx(bytes_over / MB / cluster.link_gb_per_s[link] / 1e3)
