# SPDX-License-Identifier: Apache-2.0
"""What collectives cost on a cluster, for the scheduler of `torch.compile` that overlaps them with compute.

Inductor's overlap scheduler asks ``custom_runtime_estimation(node, override_size)`` for the milliseconds of each node
of a graph. Here every collective is answered from measured or simulated costs of this cluster; of everything else, and
where nothing is known, Inductor's own estimate stays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...cluster import Cluster
from ...errors import Infeasible, InvalidInput, StrettoError
from ...planner.costs.channels import bindings_for
from ...planner.costs.costs import CostModel, Motion, SimulatedCosts, launch_us
from ...planner.costs.measured import LayeredCosts, MeasuredCosts, read_measurements

FIRST = "2.10"
"""The version of PyTorch from which Inductor takes costs."""
NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd")
KINDS = {
    "all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all", "broadcast": "broadcast",
}  # fmt: skip
ENDINGS = ("_", "_out", "_coalesced", "_coalesced_")
OPTIONS = "aten_distributed_optimizations"
OPTION = "custom_runtime_estimation"


class InductorCosts:
    """An estimator for Inductor: call it with a node of a graph, and get milliseconds, or None where it knows nothing.

    The same on all ranks: it depends on the graph, the ranks of groups, the cluster and the measurements alone.
    """

    def __init__(self, cluster: Cluster, costs: CostModel, digest: str) -> None:
        self.cluster, self.costs = cluster, costs
        self._digest = digest
        self._known: dict[tuple[str, tuple[tuple[int, ...], ...], float], float | None] = {}
        self._before: Any = None

    def __call__(self, node: Any, override_size: int | None = None) -> float | None:
        """The milliseconds of a collective; with `override_size` as if its result had so many bytes."""
        kind = collective_of(node)
        if kind is None:
            return None
        group = _ranks_of(node)
        sent, received = _bytes_of(node.args[0]), _bytes_of(node)
        if len(group) < 2 or max(group) >= self.cluster.num_devices or not sent or not received:
            return None
        nbytes = float(max(sent, received))
        if override_size is not None:
            nbytes *= override_size / received
        found = self.time_us(kind, group, max(nbytes, 1.0))
        return None if found is None else found / 1000.0

    def uuid(self) -> str:
        """What Inductor's caches know it by: other costs are another key."""
        return self._digest

    def time_us(self, kind: str, group: tuple[int, ...], nbytes: float) -> float | None:
        """What a collective of a group takes.

        Args:
            kind: As a workload names it, "all_reduce" say.
            group: The job's ranks.
            nbytes: The larger of a rank's send and receive buffer.

        Returns:
            Microseconds of the fastest algorithm that is known, with its launch; None where none serves.
        """
        groups = siblings(group, self.cluster.num_devices)
        key = (kind, groups, nbytes)
        if key not in self._known:
            self._known[key] = self._fastest(kind, groups, nbytes)
        return self._known[key]

    def _fastest(self, kind: str, groups: tuple[tuple[int, ...], ...], nbytes: float) -> float | None:
        try:
            binding = bindings_for(self.cluster, groups)[0]
        except StrettoError:
            return None
        motion = Motion(kind=kind, groups=groups, channels=binding.channels)
        times = []
        for algorithm in self.costs.algorithms(motion, nbytes):
            try:
                cost = self.costs.cost(motion, nbytes, algorithm)
            except Infeasible:
                continue
            times.append(cost.us + launch_us(binding, cost))
        return min(times, default=None)

    def install(self) -> None:
        """Let Inductor ask this one, until `remove`."""
        options = _options()
        if options is None:
            raise InvalidInput(f"torch.compile of PyTorch {torch.__version__} takes no costs; from {FIRST} on it does")
        self._before = getattr(options, OPTION)
        setattr(options, OPTION, self)

    def remove(self) -> None:
        """Let Inductor ask as it did before."""
        options = _options()
        if options is not None and getattr(options, OPTION) is self:
            setattr(options, OPTION, self._before)


def inductor_costs(
    cluster: Cluster | str, *, costs: CostModel | str | Path | None = None, install: bool = True
) -> InductorCosts:
    """Give Inductor's overlap scheduler the costs of collectives on a cluster; all ranks call it alike.

    ::

        torch._inductor.config.aten_distributed_optimizations.enable_overlap_scheduling = True
        stretto.torch.inductor_costs("dgx_h100:4")
        step = torch.compile(train_step)

    Args:
        cluster: The cluster, whose devices are the job's ranks in their order; a preset's spec, or a file.
        costs: Measured costs: a table of `stretto bench`, of nccl-tests or of our NCCL profiler, or a model of costs.
            What was not measured is simulated; None simulates everything.
        install: Whether Inductor is to use it at once; else call `install` of what is returned.

    Returns:
        The estimator.

    Raises:
        InvalidInput: the cluster or the table is not valid, or this PyTorch's Inductor takes no costs.
    """
    known = Cluster.load(cluster) if isinstance(cluster, str) else cluster
    simulated = SimulatedCosts(known)
    said = ""
    model: CostModel = simulated
    if isinstance(costs, str | Path):
        rows = read_measurements(costs)
        said = "\n".join(map(str, rows))
        model = LayeredCosts(MeasuredCosts(known, rows), simulated)
    elif costs is not None:
        model = costs
        said = f"{type(costs).__module__}.{type(costs).__qualname__} {id(costs)}"
    digest = hashlib.sha256(f"{known.digest}\n{said}".encode()).hexdigest()
    made = _estimator_class()(known, model, digest)
    if install:
        made.install()
    return made


def _estimator_class() -> Callable[[Cluster, CostModel, str], InductorCosts]:
    """`InductorCosts`, of Inductor's own base class where it has one: then its caches ask for `uuid`."""
    try:
        from torch._inductor.custom_graph_pass import CustomRuntimeEstimator
    except ImportError:
        return InductorCosts
    made: Any = type("InductorCosts", (InductorCosts, CustomRuntimeEstimator), {"__doc__": InductorCosts.__doc__})
    return made  # type: ignore[no-any-return]


def _options() -> Any:
    import torch._inductor.config as config

    return getattr(config, OPTIONS, None)


def collective_of(node: Any) -> str | None:
    """The kind of collective that a node of a graph starts; None for every other node."""
    target = getattr(node, "target", None)
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in NAMESPACES:
        return None
    name = target._schema.name.split("::")[-1]
    for ending in sorted(ENDINGS, key=len, reverse=True):
        if name.endswith(ending) and name.removesuffix(ending) in KINDS:
            return KINDS[name.removesuffix(ending)]
    return KINDS.get(name)


def siblings(group: tuple[int, ...], size: int) -> tuple[tuple[int, ...], ...]:
    """The groups that do the same at the same time: those of the same dimension of a mesh over all ranks.

    >>> siblings((1, 3), 8)
    ((0, 2), (1, 3), (4, 6), (5, 7))
    >>> siblings((0, 1, 5), 8)
    ((0, 1, 5),)
    """
    ranks = sorted(group)
    stride = ranks[1] - ranks[0]
    block = stride * len(ranks)
    even = all(b - a == stride for a, b in pairwise(ranks))
    if not even or size % block or ranks[0] % block >= stride:
        return (tuple(ranks),)
    return tuple(
        tuple(range(begin + place, begin + block, stride)) for begin in range(0, size, block) for place in range(stride)
    )


def _ranks_of(node: Any) -> tuple[int, ...]:
    """The job's ranks in a collective's group; none where that cannot be found out."""
    names = [argument.name for argument in node.target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    try:
        group = torch._C._distributed_c10d._resolve_process_group(given["group_name"])
        return tuple(dist.get_process_group_ranks(group))
    except (KeyError, RuntimeError, ValueError, TypeError):
        return ()


def _bytes_of(value: Any) -> int:
    """The bytes of a node, or of a list of nodes; 0 where a size is not known."""
    if isinstance(value, list | tuple):
        return sum(_bytes_of(part) for part in value)
    found = getattr(value, "meta", {}).get("val")
    tensors = found if isinstance(found, list | tuple) else [found]
    total = 0
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            return 0
        elements = 1
        for extent in tensor.shape:
            known = extent if isinstance(extent, int) else extent.node.hint
            if known is None:
                return 0
            elements *= int(known)
        total += elements * tensor.element_size()
    return total
