# SPDX-License-Identifier: Apache-2.0
"""Steps and clusters on which the planner is judged beside every baseline, link by link: 16 ranks each.

The steps are small, but of every kind: mixtures of experts, sharded data parallelism, pipelines whose stages are hosts
or are strided over hosts, three kinds of parallelism at once, many small collectives, hardly any communication, groups
of different sizes. The clusters differ in what groups share: a NIC per host, hosts of different sizes, nothing but
neighbors, a rail per device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import stretto as st
from stretto.workload import Dep, Op, Workload

RANKS = 16
Groups = tuple[tuple[int, ...], ...]


def _compute(name: str, us: float, *after: Dep, ranks: Sequence[int] = ()) -> Op:
    return Op(name=name, duration_us=us, after=after, ranks=tuple(ranks))


def _comm(name: str, kind: str, nbytes: float, *after: Dep, groups: Groups = ()) -> Op:
    return Op(name=name, kind=kind, nbytes=nbytes, after=after, groups=groups)


def _step(name: str, ops: Iterable[Op]) -> Workload:
    return Workload(name=name, num_ranks=RANKS, ops=tuple(ops))


def moe(layers: int = 4) -> Workload:
    """Four all-to-alls a layer: to the experts and back, forward and backward; dense gradients are all-reduced."""
    ops, before = [], [Dep(op=f"grad{k}", lag=1) for k in range(layers)]
    for k in range(layers):
        ops += [
            _compute(f"attention{k}", 600.0, *before), _comm(f"to{k}", "all_to_all", 24e6, Dep(op=f"attention{k}")),
            _compute(f"experts{k}", 800.0, Dep(op=f"to{k}")),
            _comm(f"from{k}", "all_to_all", 24e6, Dep(op=f"experts{k}")),
        ]  # fmt: skip
        before = [Dep(op=f"from{k}")]
    for k in reversed(range(layers)):
        ops += [
            _comm(f"back_to{k}", "all_to_all", 24e6, *before),
            _compute(f"back_experts{k}", 1600.0, Dep(op=f"back_to{k}")),
            _comm(f"back_from{k}", "all_to_all", 24e6, Dep(op=f"back_experts{k}")),
            _compute(f"back_attention{k}", 1200.0, Dep(op=f"back_from{k}")),
            _comm(f"grad{k}", "all_reduce", 40e6, Dep(op=f"back_attention{k}")),
        ]
        before = [Dep(op=f"back_attention{k}")]
    return _step("moe", ops)


def fsdp(layers: int = 6) -> Workload:
    """Parameters are gathered before each layer, forward and backward, as early as links allow; gradients scattered."""
    ops = []
    for k in range(layers):
        ops += [
            _comm(f"gather{k}", "all_gather", 80e6, Dep(op=f"scatter{k}", lag=1)),
            _compute(f"forward{k}", 1500.0, Dep(op=f"gather{k}")),
        ]
    for k in reversed(range(layers)):
        ops += [
            _comm(f"again{k}", "all_gather", 80e6, Dep(op=f"forward{min(k + 2, layers - 1)}")),
            _compute(f"backward{k}", 3000.0, Dep(op=f"again{k}")),
            _comm(f"scatter{k}", "reduce_scatter", 80e6, Dep(op=f"backward{k}")),
        ]
    return _step("fsdp", ops)


def _one_forward_one_backward(stage: int, stages: int, batches: int) -> list[tuple[str, int]]:
    """The order of a stage: some forward passes, then one backward pass after each further one."""
    first = min(batches, stages - stage)
    order = [("f", k) for k in range(first)]
    for k in range(batches):
        order.append(("b", k))
        if first + k < batches:
            order.append(("f", first + k))
    return order


def pipeline(
    name: str, stages: Sequence[Sequence[int]], *, batches: int = 6, sent: float = 12e6, grads: float = 60e6,
    tensor: int = 1,
) -> Workload:  # fmt: skip
    """1F1B over `stages`, each of the same number of ranks; the ranks of a stage are data-parallel.

    Args:
        name: name of the step.
        stages: the ranks of each stage; rank i of a stage sends to rank i of the next.
        batches: number of micro-batches.
        sent: bytes from stage to stage.
        grads: bytes of gradients of a stage.
        tensor: ranks of a stage that share a layer and all-reduce its output in every pass.

    Returns:
        The step.
    """
    last = len(stages) - 1
    ops: list[Op] = []
    for at, ranks in enumerate(stages):
        pairs = tuple(tuple(ranks[k : k + tensor]) for k in range(0, len(ranks), tensor))
        begun = False
        for way, k in _one_forward_one_backward(at, len(stages), batches):
            other = at - 1 if way == "f" else at + 1
            needs = [Dep(op=f"{way}send{other}.{k}")] if 0 <= other <= last else []
            needs += [] if begun else [Dep(op=f"grad{at}", lag=1)]
            begun = True
            ops.append(_compute(f"{way}{at}.{k}", 900.0 if way == "f" else 1800.0, *needs, ranks=ranks))
            done = f"{way}{at}.{k}"
            if tensor > 1:
                ops.append(_comm(f"{way}sum{at}.{k}", "all_reduce", sent, Dep(op=done), groups=pairs))
                ops.append(_compute(f"{way}rest{at}.{k}", 300.0, Dep(op=f"{way}sum{at}.{k}"), ranks=ranks))
                done = f"{way}rest{at}.{k}"
            to = at + 1 if way == "f" else at - 1
            if 0 <= to <= last:
                groups = tuple(zip(ranks, stages[to], strict=True))
                ops.append(_comm(f"{way}send{at}.{k}", "send", sent, Dep(op=done), groups=groups))
        same = tuple(tuple(ranks[k::tensor]) for k in range(tensor))
        ops.append(_comm(f"grad{at}", "all_reduce", grads, Dep(op=done), groups=same))
    return _step(name, ops)


def small(count: int = 120) -> Workload:
    """Gradients that nobody has put into buckets."""
    ops = [_compute("forward", 2000.0, *(Dep(op=f"grad{k}", lag=1) for k in range(count)))]
    for k in range(count):
        ops += [
            _compute(f"backward{k}", 30.0), _comm(f"grad{k}", "all_reduce", 256e3, Dep(op=f"backward{k}")),
        ]  # fmt: skip
    return _step("small", ops)


def compute_bound(layers: int = 8) -> Workload:
    """Enough compute to hide all communication."""
    ops = [_compute("forward", 20_000.0, *(Dep(op=f"grad{k}", lag=1) for k in range(layers)))]
    for k in range(layers):
        ops += [
            _compute(f"backward{k}", 5000.0), _comm(f"grad{k}", "all_reduce", 20e6, Dep(op=f"backward{k}")),
        ]  # fmt: skip
    return _step("compute", ops)


def uneven_groups() -> Workload:
    """Collectives over groups of 8, 6 and 2 ranks, and over other groups of 4, in one step."""
    large: Groups = (tuple(range(8)), tuple(range(8, 14)), (14, 15))
    strided: Groups = tuple(tuple(range(k, RANKS, 4)) for k in range(4))
    ops = [_compute("forward", 800.0, Dep(op="share", lag=1), Dep(op="grad", lag=1))]
    ops += [
        _comm("mix", "all_gather", 16e6, Dep(op="forward"), groups=large), _compute("middle", 700.0, Dep(op="mix")),
        _comm("turn", "all_to_all", 16e6, Dep(op="middle"), groups=strided), _compute("end", 900.0, Dep(op="turn")),
        _comm("share", "all_reduce", 30e6, Dep(op="middle"), groups=large),
        _comm("grad", "all_reduce", 30e6, Dep(op="end"), groups=strided),
    ]  # fmt: skip
    return _step("groups", ops)


HOSTS = [range(4 * k, 4 * k + 4) for k in range(4)]
STRIDED = [range(k, RANKS, 4) for k in range(4)]
STEPS: dict[str, Callable[[], Workload]] = {
    "moe": moe, "fsdp": fsdp, "pp": lambda: pipeline("pp", HOSTS), "ppx": lambda: pipeline("ppx", STRIDED),
    "tp+pp+dp": lambda: pipeline("tp+pp+dp", [range(8), range(8, 16)], tensor=2),
    "tp+pp+dp, strided": lambda: pipeline(
        "tp+pp+dp, strided", [[r for r in range(16) if r // 2 % 2 == k] for k in range(2)], tensor=2
    ),
    "small": small, "compute": compute_bound, "groups": uneven_groups,
    **{
        f"A{k}": lambda spec=spec: Workload.load(f"{spec},ranks={RANKS}")  # type: ignore[misc]
        for k, spec in enumerate(("dlrm:A1", "dlrm:A2", "dlrm:A3", "dlrm:A4", "xlmr:xl", "regnetz:4gf"), start=1)
    },
}  # fmt: skip


class _Wiring:
    def __init__(self) -> None:
        self.nodes: list[st.Node] = []
        self.links: list[st.Link] = []

    def node(self, name: str, kind: str = "device", host: int = -1) -> int:
        self.nodes.append(st.Node(name=name, kind=kind, host=host))
        return len(self.nodes) - 1

    def join(self, a: int, b: int, channel: str, gb_per_s: float, alpha_us: float) -> None:
        """A link each way."""
        for src, dst in ((a, b), (b, a)):
            self.links.append(st.Link(src=src, dst=dst, alpha_us=alpha_us, gb_per_s=gb_per_s, channel=channel))


def _hosts(wiring: _Wiring, sizes: Sequence[int]) -> list[list[int]]:
    """Devices of every host behind a switch of 200 GB/s each."""
    hosts = [[wiring.node(f"h{h}.gpu{k}", host=h) for k in range(size)] for h, size in enumerate(sizes)]
    for h, devices in enumerate(hosts):
        switch = wiring.node(f"h{h}.nvs", "switch", h)
        for device in devices:
            wiring.join(device, switch, "nvlink", 200.0, 0.2)
    return hosts


def leaf_spine() -> st.Cluster:
    """Four hosts of four behind one 25 GB/s NIC each, two leaves with 30 GB/s between them, slow Ethernet beside."""
    wiring = _Wiring()
    hosts = _hosts(wiring, (4, 4, 4, 4))
    leaves = [wiring.node(f"leaf{k}", "switch") for k in range(2)]
    ethernet = wiring.node("ethernet", "switch")
    wiring.join(leaves[0], leaves[1], "ib", 30.0, 0.5)
    for h, devices in enumerate(hosts):
        for channel, gb_per_s, to in (("ib", 25.0, leaves[h // 2]), ("eth", 6.0, ethernet)):
            nic = wiring.node(f"h{h}.{channel}", "nic", h)
            wiring.join(nic, to, channel, gb_per_s, 1.0)
            for device in devices:
                wiring.join(device, nic, channel, 50.0, 0.3)
    return st.Cluster.build("leafspine", nodes=wiring.nodes, links=wiring.links)


def uneven_hosts() -> st.Cluster:
    """Hosts of 8, 4 and 4 devices with two, one and one NIC of 20, 10 and 10 GB/s at one switch."""
    wiring = _Wiring()
    hosts = _hosts(wiring, (8, 4, 4))
    fabric = wiring.node("fabric", "switch")
    for h, (devices, rate) in enumerate(zip(hosts, ((20.0, 20.0), (10.0,), (10.0,)), strict=True)):
        for k, gb_per_s in enumerate(rate):
            nic = wiring.node(f"h{h}.nic{k}", "nic", h)
            wiring.join(nic, fabric, "ib", gb_per_s, 1.0)
            for device in devices[k :: len(rate)]:
                wiring.join(device, nic, "ib", 50.0, 0.3)
    return st.Cluster.build("uneven", nodes=wiring.nodes, links=wiring.links)


def rails() -> st.Cluster:
    """Four hosts of four; every device has a NIC of 25 GB/s on the rail of its number; a core joins the rails."""
    wiring = _Wiring()
    hosts = _hosts(wiring, (4, 4, 4, 4))
    switches = [wiring.node(f"rail{k}", "switch") for k in range(4)]
    core = wiring.node("core", "switch")
    for switch in switches:
        wiring.join(switch, core, "rdma", 50.0, 0.5)
    for devices in hosts:
        for device, switch in zip(devices, switches, strict=True):
            wiring.join(device, switch, "rdma", 25.0, 1.2)
    return st.Cluster.build("rails", nodes=wiring.nodes, links=wiring.links)


CLUSTERS: dict[str, Callable[[], st.Cluster]] = {
    "leafspine": leaf_spine, "uneven": uneven_hosts, "torus": lambda: st.Cluster.load("torus:4x4"), "rails": rails,
}  # fmt: skip
