# SPDX-License-Identifier: Apache-2.0
"""A training step written down by hand, planned for a cluster, beside plain order and the bound.

python examples/plan_step.py --output plan.json
"""

from __future__ import annotations

import argparse

import stretto as st
from stretto.workload import Dep, Op


def step(ranks: int) -> st.Workload:
    """Two layers, data parallel; the second layer's gradients are there first."""
    ops = (
        Op(name="forward", phase="forward", duration_us=2000.0, after=(Dep(op="update", lag=1),)),
        Op(name="backward.1", phase="backward", duration_us=2000.0, after=(Dep(op="forward"),)),
        Op(name="sum.1", kind="all_reduce", nbytes=200 * st.MB, after=(Dep(op="backward.1"),)),
        Op(name="backward.0", phase="backward", duration_us=2000.0, after=(Dep(op="backward.1"),)),
        Op(name="sum.0", kind="all_reduce", nbytes=100 * st.MB, after=(Dep(op="backward.0"),)),
        Op(name="update", phase="optimizer", duration_us=200.0, after=(Dep(op="sum.0"), Dep(op="sum.1"))),
    )
    return st.Workload(name="two layers", num_ranks=ranks, ops=ops)


def main() -> None:
    """Plan, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", default="hosts: 2, gpus: 4 x a100, network: 2 x 100gbit")
    parser.add_argument("--output", help="the plan, for stretto.torch.enforce")
    parser.add_argument("--steps", type=int, default=2000, help="search steps")
    options = parser.parse_args()
    cluster = st.Cluster.load(options.cluster)
    found = st.plan(step(cluster.num_devices), cluster, steps=options.steps)
    print(f"plain order {found.baselines_us['fifo']:.0f} us, plan {found.iteration_us:.0f}, bound {found.bound_us:.0f}")
    if options.output:
        found.save(options.output)


if __name__ == "__main__":
    main()
