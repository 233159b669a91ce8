# SPDX-License-Identifier: Apache-2.0
"""``stretto probe``: what network a job's ranks really have."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from ..cluster import Cluster
from ..errors import InvalidInput, unknown
from ..runtime.probe.join import joined, place
from ..runtime.probe.probe import probe as measure
from .common import out, progress, quoted
from .options import RankJsonOption
from .outputs import YAML, OutputFiles, output


def probe(
    target: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE.yaml",
            callback=output(*YAML, only_rank_0=True),
            help="Where rank 0 writes the cluster.",
        ),
    ],
    channel: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Measure this channel only; may be repeated.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(metavar="NAME:N|FILE", help="Compare with this cluster (else with all presets).")
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="The longest that one flow may take.")] = 30.0,
    library: Annotated[
        str | None, typer.Option(metavar="nccl|gloo", help="Measure by collectives of this library: nccl on GPUs.")
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv",
            callback=output(".csv", only_rank_0=True),
            help="With --library: also write what its collectives took.",
        ),
    ] = None,
    inside: Annotated[
        bool, typer.Option("--inside", help="Measure the GPUs of this host instead: one process, no job.")
    ] = False,
    rows: RankJsonOption = None,
) -> None:
    """Measure the network between a job's ranks and write it as a cluster. Every rank runs this command.

    \b
    It finds which ranks share a host and an uplink, the rate and latency of
    every channel, and the order of ranks in which rings are fastest. What it
    writes serves wherever a cluster is asked for.

    \b
    Examples:
      torchrun --nproc-per-node 4 -m stretto probe -o cluster.yaml
      stretto lab run --uplink rdma=400mbit --uplink eth=200mbit -- \\
          stretto probe -o cluster.yaml
      stretto synth allreduce -c cluster.yaml -b 16M -o ar.xml
      STRETTO_CLUSTER=cluster.yaml torchrun ... train.py
      torchrun --nproc-per-node 8 -m stretto probe --library nccl -o c.yaml --costs nccl.csv
      stretto probe --inside -o host.yaml
    """
    if inside:
        _inside(target, rows, alone=not (channel or preset or library or costs))
        return
    if not 0 < timeout < 1e6:
        raise InvalidInput(f"--timeout: must be more than 0 and less than 1e6 seconds, not {timeout:g}")
    rank, world = place()
    if library is not None or costs is not None:
        _by_library(library, target, costs, rows, rank, alone=not (channel or preset))
        return
    known = Cluster.load(preset) if preset is not None else None
    if known is not None and known.num_devices != world:
        raise InvalidInput(f"--preset: {known.name} has {known.num_devices} devices, the job {world} ranks")

    with ExitStack() as stack:
        executor = stack.enter_context(joined())
        steps = 2 + len(channel or executor.channels)
        advance = stack.enter_context(progress("probe", steps)) if rank == 0 else lambda label: None
        probed = measure(executor, channels=channel, known=known, timeout_s=timeout, name=target.stem, advance=advance)
    if rank == 0:
        files = OutputFiles()
        files.write(target, probed.cluster.save)
        files.json(rows, {"cluster": probed.cluster.name, "devices": world, "lines": list(probed.lines())})
        console = out()
        for line in probed.lines():
            console.print(line, markup=False, soft_wrap=True)
        name = quoted(target)
        files.tell(f"stretto plan -w WORKLOAD -c {name}, or STRETTO_CLUSTER={name} for a job on our backend")


def _inside(target: Path, rows: Path | None, *, alone: bool) -> None:
    """The PCIe tree and the NVLinks of this host."""
    from ..cluster.numbering import numbering, visible_devices
    from ..runtime.probe.host_copies import TorchHostMeter
    from ..runtime.probe.inside import find_inside

    if not alone:
        raise InvalidInput("--inside: goes without --channel, --preset, --library and --costs")
    found = find_inside(TorchHostMeter())
    cluster = found.cluster(target.stem)
    order = numbering(cluster)
    lines = [f"share a PCIe switch: {', '.join(group)}" for group in found.groups]
    lines += [f"note: {note}" for note in cluster.notes]
    if order is not None:
        lines.append(f"CUDA_VISIBLE_DEVICES={visible_devices(order)}")
    files = OutputFiles()
    files.write(target, cluster.save)
    files.json(rows, {"cluster": cluster.name, "devices": cluster.num_devices, "lines": lines})
    for line in lines:
        out().print(line, markup=False, soft_wrap=True)
    files.tell(f"stretto cluster renumber {quoted(target)} --like OTHER.yaml")


def _by_library(
    name: str | None, target: Path, costs: Path | None, rows: Path | None, rank: int, *, alone: bool
) -> None:
    """Measure the cluster by the collectives of a library."""
    from ..control.own_costs import LIBRARIES
    from ..control.probe_backend import joined_by, probe_backend
    from ..planner.costs.measured import write_measurements

    if name is None:
        raise InvalidInput("--costs: goes with --library; `stretto bench` times our own executor")
    library = next((known for known in LIBRARIES if known == name), None)
    if library is None:
        raise unknown("--library", name, LIBRARIES)
    if not alone:
        raise InvalidInput("--library: goes with neither --channel nor --preset")
    with joined_by(library, int(os.environ.get("LOCAL_RANK", "0"))):
        cluster, table = probe_backend(library)
    if rank == 0:
        files = OutputFiles()
        files.write(target, cluster.save)
        if costs is not None:
            files.write(costs, lambda path: write_measurements(path, table))
        lines = [f"{cluster.num_devices} ranks on {cluster.num_hosts} hosts, by {len(table)} times of {library}"]
        files.json(rows, {"cluster": cluster.name, "devices": cluster.num_devices, "lines": lines})
        out().print(lines[0], markup=False, soft_wrap=True)
        more = f" --costs {quoted(costs)}" if costs is not None else ""
        files.tell(f"stretto plan -w WORKLOAD -c {quoted(target)}{more}")
