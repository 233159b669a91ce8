# SPDX-License-Identifier: Apache-2.0
"""`PricedCosts`: simulated costs with what a runtime asks for the instructions of a motif's program."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...cluster import Cluster
from ...errors import Infeasible, StrettoError
from ...programs import Program
from ...programs.formats.mscclpp_json import check_collective
from ...simulator import Runtime, simulate
from ...simulator.priced_wide import wide_time_us
from ...simulator.runtimes import runtime_of
from ...synthesis.plan_search import forms_for
from ...synthesis.problem import MAX_WIDE
from ..algebra.recipes import Provider
from .channels import default_binding
from .costs import Cost, Motion, SimulatedCosts

MAX_STREAMED = 100_000
"""The most transfers of a program that is priced as instruction streams."""


class PricedCosts(SimulatedCosts):
    """Simulated costs, to which the price of a runtime is added: the planner then chooses with it.

    The price of a motif is how much longer its program takes on the runtime than on the links, alone: as a plan of
    wide steps where the runtime has prices for them and the group is inside a host, else as instruction streams; on
    our own executor on GPU memory as its fused steps. Bindings that host code drives have no price, nor have groups
    across hosts on that executor.

    >>> cluster = Cluster.preset("dgx_h200")
    >>> motion = Motion(kind="all_reduce", groups=(tuple(range(8)),), channels=("nvlink",))
    >>> on_links, priced = SimulatedCosts(cluster), PricedCosts(cluster, "mscclpp:h200")
    >>> [min(model.algorithms(motion, 4096), key=lambda name: model.cost(motion, 4096, name).us)
    ...     for model in (on_links, priced)]
    ['direct', 'recursive_doubling']
    """

    def __init__(self, cluster: Cluster, runtime: Runtime | str | Path, *, providers: Sequence[Provider] = ()) -> None:
        super().__init__(cluster, providers=providers)
        self.runtime = runtime_of(runtime)

    def cost(self, motion: Motion, nbytes: float, algorithm: str, *, exact: bool = False) -> Cost:
        """The simulated time with the price of the runtime; see `SimulatedCosts.cost`."""
        found = super().cost(motion, nbytes, algorithm, exact=exact)
        return Cost(us=found.us, source=f"{found.source}, on {self.runtime.name}")

    def _simulate(self, motion: Motion, algorithm: str, nbytes: float) -> float:
        took_us = super()._simulate(motion, algorithm, nbytes)
        if self.runtime.name == "network" or not set(motion.channels) <= set(default_binding(self.cluster).channels):
            return took_us
        # Groups that lie on their hosts as the first one does have its price.
        others = [at for at in range(len(motion.groups)) if not at or not self._alike(motion, at)]
        part = self.part(motion)
        programs = [self.program(motion, nbytes, algorithm, at) for at in others]
        return took_us + max(self._price_us(program, part, nbytes) for program in programs)

    def _price_us(self, program: Program, part: Cluster, nbytes: float) -> float:
        """What a program costs beside the links."""
        on_links_us = simulate(program, part, nbytes=nbytes).total_us
        if not self.runtime.knows_streams:
            return max(0.0, _stepped_us(program, part, nbytes, self.runtime) - on_links_us)
        took_us = _wide_us(program, part, nbytes, self.runtime)
        if took_us is None:
            took_us = _streamed_us(program, part, nbytes, self.runtime)
        return max(0.0, took_us - on_links_us)


def _wide_us(program: Program, cluster: Cluster, nbytes: float, runtime: Runtime) -> float | None:
    """The time as a plan of wide steps, of a few forms the best; None where there is no such plan."""
    c = program.collective
    inside = len(set(cluster.hosts_of(c.ranks).tolist())) == 1
    if not runtime.knows_wide or not inside or len(program.chunk) > MAX_WIDE:
        return None
    times = []
    try:
        check_collective(c)
        forms = [form for form in forms_for(program, nbytes, runtime, cluster) if not form.loop_bytes]
    except StrettoError:
        return None
    # Of each kind the form with the fewest threadblocks and that with most.
    ends = [
        {(form.protocol, form.apart): form for form in order if not form.loop_bytes} for order in (forms, forms[::-1])
    ]
    for form in dict.fromkeys(form for end in ends for form in end.values()):
        try:
            times.append(wide_time_us(program, cluster, nbytes=nbytes, form=form, runtime=runtime))
        except StrettoError:
            continue
    return min(times, default=None)


def _stepped_us(program: Program, cluster: Cluster, nbytes: float, runtime: Runtime) -> float:
    """The time as fused steps, nothing between hosts; raises `Infeasible` where the runtime does not run them."""
    if len(set(cluster.hosts_of(program.collective.ranks).tolist())) > 1:
        return 0.0
    try:
        return simulate(program, cluster, nbytes=nbytes, runtime=runtime).total_us
    except StrettoError as error:
        raise Infeasible(f"{program.name} on {runtime.name}: {error}") from None


def _streamed_us(program: Program, cluster: Cluster, nbytes: float, runtime: Runtime) -> float:
    """The time as instruction streams; raises `Infeasible` where the runtime does not run them."""
    if len(program.chunk) > MAX_STREAMED:
        raise Infeasible(f"{program.name}: {len(program.chunk)} transfers are too many for the price of {runtime.name}")
    try:
        return simulate(program.lower(fifo_depth=2), cluster, nbytes=nbytes, runtime=runtime).total_us
    except StrettoError as error:
        raise Infeasible(f"{program.name} on {runtime.name}: {error}") from None
