# SPDX-License-Identifier: Apache-2.0
"""Each algorithm's closed form in alpha and beta, against the simulator on networks without contention."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product

import pytest

from stretto import MB, Cluster, Link, Node, Program, algorithm, lower_bound, simulate

SIZE = 3.7 * MB
ALPHA, GB_PER_S = 2.5, 20.0
BETA = 1 / (GB_PER_S * 1e3)
ALPHA_OUT, GB_PER_S_OUT = 9.0, 6.25
BETA_OUT = 1 / (GB_PER_S_OUT * 1e3)


def message(share: float) -> float:
    """One message with that share of everything."""
    return ALPHA + BETA * SIZE * share


def message_out(share: float) -> float:
    """The same between hosts."""
    return ALPHA_OUT + BETA_OUT * SIZE * share


@cache
def links_per_pair(count: int, parallel: int = 1) -> Cluster:
    """Every pair of ranks has links of its own."""
    pairs = [(a, b) for a, b in product(range(count), repeat=2) if a != b]
    return Cluster.build(
        "pairs",
        nodes=[Node(name=f"r{i}", host=0) for i in range(count)],
        links=[Link(src=a, dst=b, alpha_us=ALPHA, gb_per_s=GB_PER_S) for a, b in pairs for _ in range(parallel)],
    )


@cache
def port_per_rank(count: int, receiver_pays: bool = False) -> Cluster:
    """Every rank has one port on a switch, where it sends (or receives) one message after the other."""
    alphas = (0.0, ALPHA) if receiver_pays else (ALPHA, 0.0)
    up = [Link(src=i, dst=count, alpha_us=alphas[0], gb_per_s=GB_PER_S) for i in range(count)]
    down = [Link(src=count, dst=i, alpha_us=alphas[1], gb_per_s=GB_PER_S) for i in range(count)]
    nodes = [Node(name=f"r{i}", host=0) for i in range(count)] + [Node(name="sw", kind="switch")]
    return Cluster.build("ports", nodes=nodes, links=[*up, *down])


@cache
def hosts_on_rails(hosts: int, local: int) -> Cluster:
    """Links for every pair inside a host, and between ranks with the same local number."""
    inside = [
        Link(src=h * local + a, dst=h * local + b, alpha_us=ALPHA, gb_per_s=GB_PER_S)
        for h in range(hosts)
        for a, b in product(range(local), repeat=2)
        if a != b
    ]
    rails = [
        Link(src=g * local + a, dst=h * local + a, alpha_us=ALPHA_OUT, gb_per_s=GB_PER_S_OUT)
        for g, h in product(range(hosts), repeat=2)
        if g != h
        for a in range(local)
    ]
    nodes = [Node(name=f"h{h}r{a}", host=h) for h in range(hosts) for a in range(local)]
    return Cluster.build("rails", nodes=nodes, links=inside + rails)


def time_us(program: Program, cluster: Cluster, alpha: str = "blocking") -> float:
    return simulate(program, cluster, nbytes=SIZE, contention="fifo", alpha=alpha).total_us


def exactly(expected: float) -> object:
    return pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("n", [2, 3, 5, 8, 16])
@pytest.mark.parametrize("network", [links_per_pair, port_per_rank])
@pytest.mark.parametrize("chunks", [1, 3])
def test_ring_takes_n_minus_one_hops_each_way(n: int, network: Callable[[int], Cluster], chunks: int) -> None:
    hop = chunks * ALPHA + BETA * SIZE / n
    for kind, phases in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
        program = algorithm("ring", kind, n, chunks=chunks)
        assert time_us(program, network(n)) == exactly(phases * (n - 1) * hop)


@pytest.mark.parametrize("n", [3, 4, 7, 8])
def test_ring_in_two_directions_halves_hops_and_bytes(n: int) -> None:
    one_way = (n // 2) * ALPHA + BETA * SIZE * (n - 1) / (2 * n)
    for kind, phases in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
        assert time_us(algorithm("ring", kind, n, directions=2), links_per_pair(n)) == exactly(phases * one_way)


@pytest.mark.parametrize(("n", "rings"), [(5, 2), (7, 3), (8, 4)])
def test_rings_on_different_links_share_the_bytes(n: int, rings: int) -> None:
    program = algorithm("ring", "all_reduce", n, rings=rings)
    assert time_us(program, links_per_pair(n)) == exactly(2 * (n - 1) * message(1 / (n * rings)))


@pytest.mark.parametrize("n", [2, 4, 8, 16])
@pytest.mark.parametrize("largest", ["near", "far"])
@pytest.mark.parametrize("network", [links_per_pair, port_per_rank])
def test_halving_doubling_takes_log_n_messages_and_the_least_bytes(
    n: int, largest: str, network: Callable[[int], Cluster]
) -> None:
    rounds = n.bit_length() - 1
    phase = rounds * ALPHA + BETA * SIZE * (n - 1) / n
    for kind, phases in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
        program = algorithm("halving_doubling", kind, n, largest=largest)
        assert time_us(program, network(n)) == exactly(phases * phase)


@pytest.mark.parametrize(("n", "dims"), [(2, None), (8, None), (16, (4, 4)), (16, (2, 8))])
@pytest.mark.parametrize("network", [links_per_pair, port_per_rank])
def test_swing_takes_the_time_of_halving_doubling_where_every_pair_is_equally_near(
    n: int, dims: tuple[int, ...] | None, network: Callable[[int], Cluster]
) -> None:
    phase = (n.bit_length() - 1) * ALPHA + BETA * SIZE * (n - 1) / n
    for kind, phases in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
        program = algorithm("swing", kind, n, dims=dims)
        assert time_us(program, network(n)) == exactly(phases * phase)


def test_swing_keeps_all_links_of_a_torus_busy() -> None:
    cluster = Cluster.load("torus:4x4")
    program = algorithm("swing", "all_reduce", 16, cluster=cluster)
    assert program.name == "swing(dims=4.4,ports=4)"
    bound = lower_bound(program.collective, cluster, nbytes=1e9).total_us
    others = (
        algorithm(name, "all_reduce", 16, cluster=cluster) for name in ("ring", "halving_doubling", "hierarchical")
    )
    took = simulate(program, cluster, nbytes=1e9).total_us
    assert took <= 1.01 * bound
    assert all(simulate(other, cluster, nbytes=1e9).total_us > 1.5 * took for other in others)


@pytest.mark.parametrize("n", [3, 5, 6, 12])
def test_halving_doubling_folds_what_is_beyond_a_power_of_two(n: int) -> None:
    power = 1 << n.bit_length() - 1
    phase = (power.bit_length() - 1) * ALPHA + BETA * SIZE * (power - 1) / power
    program = algorithm("halving_doubling", "all_reduce", n)
    assert time_us(program, links_per_pair(n)) == exactly(2 * message(1) + 2 * phase)


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_recursive_doubling_takes_log_n_exchanges(n: int) -> None:
    rounds = n.bit_length() - 1
    gather = rounds * ALPHA + BETA * SIZE * (n - 1) / n
    assert time_us(algorithm("recursive_doubling", "all_gather", n), port_per_rank(n)) == exactly(gather)
    reduce = algorithm("recursive_doubling", "all_reduce", n)
    assert time_us(reduce, port_per_rank(n)) == exactly(rounds * message(1))
    pipelined = algorithm("recursive_doubling", "all_reduce", n, chunks=5)
    assert time_us(pipelined, links_per_pair(n)) == exactly((rounds + 4) * message(1 / 5))


@pytest.mark.parametrize(("n", "rounds"), [(3, 3), (6, 4), (12, 5)])
def test_recursive_doubling_folds_with_two_steps_more(n: int, rounds: int) -> None:
    program = algorithm("recursive_doubling", "all_reduce", n)
    assert time_us(program, links_per_pair(n)) == exactly(rounds * message(1))


@pytest.mark.parametrize("n", [2, 3, 5, 7, 8, 12])
def test_bruck_takes_log_n_steps_for_any_n(n: int) -> None:
    steps = (n - 1).bit_length()
    gather = steps * ALPHA + BETA * SIZE * (n - 1) / n
    assert time_us(algorithm("bruck", "all_gather", n), port_per_rank(n)) == exactly(gather)
    # On links per pair a last step that only sends the rank's own data need not wait for the others.
    assert time_us(algorithm("bruck", "all_gather", n), links_per_pair(n)) <= gather * (1 + 1e-9)
    hops = sum(distance.bit_count() for distance in range(n))
    everything = steps * ALPHA + BETA * SIZE / n * hops
    assert time_us(algorithm("bruck", "all_to_all", n), port_per_rank(n)) == exactly(everything)


@pytest.mark.parametrize("n", [2, 5, 8])
def test_direct_takes_one_message_on_links_of_its_own(n: int) -> None:
    for kind, share in (
        ("all_gather", 1 / n),
        ("reduce_scatter", 1 / n),
        ("all_to_all", 1 / n),
        ("all_to_all_v", 1 / n),
        ("gather", 1 / n),
        ("scatter", 1 / n),
        ("permute", 1.0),
        ("broadcast", 1.0),
        ("reduce", 1.0),
    ):
        assert time_us(algorithm("direct", kind, n), links_per_pair(n)) == exactly(message(share))
    one = algorithm("direct", "all_reduce", n, steps=1)
    two = algorithm("direct", "all_reduce", n)
    assert time_us(one, links_per_pair(n)) == exactly(message(1))
    assert time_us(two, links_per_pair(n)) == exactly(2 * message(1 / n))
    for kind in ("all_gather", "reduce_scatter", "all_to_all"):
        assert time_us(algorithm("direct", kind, n), port_per_rank(n)) == exactly((n - 1) * message(1 / n))


@pytest.mark.parametrize(("n", "pattern"), [(2, "xor"), (8, "xor"), (3, "shift"), (5, "shift"), (8, "shift")])
@pytest.mark.parametrize("network", [links_per_pair, port_per_rank])
@pytest.mark.parametrize("chunks", [1, 2])
def test_pairwise_takes_one_message_at_a_time(
    n: int, pattern: str, network: Callable[[int], Cluster], chunks: int
) -> None:
    program = algorithm("pairwise", "all_to_all", n, pattern=pattern, chunks=chunks)
    assert time_us(program, network(n)) == exactly((n - 1) * (chunks * ALPHA + BETA * SIZE / n))


@pytest.mark.parametrize("n", [2, 3, 5, 8, 13, 16])
def test_binomial_doubles_what_is_served(n: int) -> None:
    rounds = (n - 1).bit_length()
    for kind in ("broadcast", "reduce"):
        for root in (0, n - 1):
            program = algorithm("binomial", kind, n, root=root)
            network = port_per_rank(n, receiver_pays=kind == "reduce")
            assert time_us(program, network) == exactly(rounds * message(1))


@pytest.mark.parametrize("n", [2, 4, 16])
def test_binomial_gather_and_scatter_take_log_n_messages(n: int) -> None:
    rounds = n.bit_length() - 1
    least = rounds * ALPHA + BETA * SIZE * (n - 1) / n
    for kind in ("gather", "scatter"):
        program = algorithm("binomial", kind, n, root=1)
        assert time_us(program, port_per_rank(n, receiver_pays=kind == "gather")) == exactly(least)


@pytest.mark.parametrize("n", [2, 3, 8, 13])
@pytest.mark.parametrize("k", [1, 4, 9])
@pytest.mark.parametrize("network", [links_per_pair, port_per_rank])
def test_chain_fills_and_drains(n: int, k: int, network: Callable[[int], Cluster]) -> None:
    for kind in ("broadcast", "reduce"):
        program = algorithm("chain", kind, n, chunks=k, root=n // 2)
        assert time_us(program, network(n)) == exactly((n - 2 + k) * message(1 / k))


def test_latency_that_does_not_block_is_paid_once_per_hop() -> None:
    program = algorithm("chain", "broadcast", 6, chunks=4)
    expected = 5 * message(1 / 4) + 3 * BETA * SIZE / 4
    assert time_us(program, links_per_pair(6), alpha="pipelined") == exactly(expected)


@pytest.mark.parametrize("n", [2, 3, 7, 8, 16])
@pytest.mark.parametrize("k", [1, 5])
def test_binary_tree_takes_its_depth_and_the_pieces(n: int, k: int) -> None:
    depth = n.bit_length() - 1
    for kind, levels in (("broadcast", depth), ("reduce", depth), ("all_reduce", 2 * depth)):
        program = algorithm("binary_tree", kind, n, chunks=k)
        assert time_us(program, links_per_pair(n)) == exactly((levels + k - 1) * message(1 / k))


@pytest.mark.parametrize("n", [3, 4, 7, 8, 12, 16])
@pytest.mark.parametrize("k", [1, 4])
def test_double_binary_tree_carries_half_in_each_tree(n: int, k: int) -> None:
    depth = (n - 1).bit_length()
    for kind, levels in (("broadcast", depth), ("reduce", depth), ("all_reduce", 2 * depth)):
        program = algorithm("double_binary_tree", kind, n, chunks=k)
        expected = (levels + k - 1) * message(1 / (2 * k))
        assert time_us(program, links_per_pair(n, parallel=2)) == exactly(expected)


def test_double_binary_tree_reaches_full_bandwidth_on_one_port_where_one_tree_reaches_half() -> None:
    n, whole = 16, BETA * SIZE
    single = algorithm("binary_tree", "broadcast", n, chunks=256)
    double = algorithm("double_binary_tree", "broadcast", n, chunks=256)
    assert time_us(single, port_per_rank(n), alpha="pipelined") > 1.95 * whole
    assert time_us(double, port_per_rank(n), alpha="pipelined") < 1.2 * whole


@pytest.mark.parametrize(("hosts", "local"), [(2, 4), (4, 2), (3, 3)])
def test_two_step_pays_one_latency_inside_and_one_outside(hosts: int, local: int) -> None:
    n = hosts * local
    program = algorithm("two_step", "all_to_all", n, local=local)
    expected = message(hosts / n) + message_out(local / n)
    assert time_us(program, hosts_on_rails(hosts, local)) == exactly(expected)


@pytest.mark.parametrize(("hosts", "local"), [(2, 4), (2, 8), (3, 3)])
def test_three_step_pays_two_latencies_inside_and_one_outside(hosts: int, local: int) -> None:
    n = hosts * local
    program = algorithm("three_step", "all_to_all", n, local=local)
    expected = message((local + 1) / n) + message_out(local * local / n) + message(local / n)
    assert time_us(program, hosts_on_rails(hosts, local)) == exactly(expected)


def test_hierarchical_on_two_hosts_of_eight() -> None:
    inside = {
        "ring": 7 * message(1 / 8),
        "direct": message(1 / 8),
        "halving_doubling": 3 * ALPHA + BETA * SIZE * 7 / 8,
    }
    for scheme, first in inside.items():
        for kind, phases in (("reduce_scatter", 1), ("all_gather", 1), ("all_reduce", 2)):
            program = algorithm("hierarchical", kind, 16, dims=(8, 2), inside=scheme)
            assert time_us(program, hosts_on_rails(2, 8)) == exactly(phases * (first + message_out(1 / 16)))


def test_hierarchical_over_three_dimensions_sums_them_up() -> None:
    program = algorithm("hierarchical", "all_reduce", 24, dims=(4, 3, 2))
    expected = 2 * (3 * message(1 / 4) + 2 * message(1 / 12) + message(1 / 24))
    assert time_us(program, links_per_pair(24)) == exactly(expected)
