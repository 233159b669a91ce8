# SPDX-License-Identifier: Apache-2.0
"""``stretto demo``: the whole path once, from a cluster to files that can be looked at."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..algorithms import algorithm, defined_for
from ..cluster import Cluster
from ..errors import Infeasible
from ..files import write_file
from ..planner import api
from ..programs import Lowered, Program
from ..programs.formats import load_program, mscclpp_reader, save_program
from ..programs.interpret import check
from ..report import html, write_perfetto
from ..report.cluster_drawing import picture
from ..report.cluster_svg import to_svg
from ..report.load_html import LOAD_SLOTS
from ..report.plan_html import write_plan_html
from ..report.plan_tables import systems_table
from ..report.plots import sweep_plot
from ..report.sweep import Sweep, parse_sizes
from ..report.table import ResultTable
from ..report.tables import sweep_table
from ..simulator import Timeline
from ..units import format_us
from ..workload import Workload
from . import demo_lab as real
from .common import about, out, plot_width, quoted
from .outputs import output
from .simulate import SimulationSetup

CLUSTER = "dgx2:2"
PROGRAMS = (("all_reduce", "hierarchical"), ("all_gather", "ring"), ("all_to_all", "two_step"))
SWEEP = "1K..1G"
STEP, STEP_CLUSTER = "dlrm:A2,ranks=64", "hgx2:8"
SEARCH_STEPS = 4000


def demo(
    folder: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", callback=output(folder=True), help="Where the files go.")
    ] = Path("stretto-demo"),
) -> None:
    """Run the whole path once: cluster, programs, proof, export, simulation, report, a planned step, a real run.

    Takes some seconds, needs neither a GPU nor a network (the last step makes
    its own, where the machine lets it), and leaves pictures and files in DIR.

    \b
    Examples:
      stretto demo
      stretto demo -o /tmp/look
    """
    folder.mkdir(parents=True, exist_ok=True)
    tour = _Tour(console=out(), folder=folder)
    cluster = tour.cluster()
    programs = tour.programs(cluster)
    lowered = tour.streams(programs)
    tour.exports(cluster, programs, lowered)
    sweep, fastest = tour.sweep(cluster)
    tour.report(cluster, sweep, fastest)
    tour.plan()
    tour.run()
    tour.farewell()


@dataclass
class _Tour:
    """The steps, each printing what it did and remembering the files it wrote."""

    console: Console
    folder: Path
    files: dict[str, str] = field(default_factory=dict)
    number: int = 0
    begun: float = field(default_factory=time.perf_counter)

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        self.number += 1
        self.console.print(f"\n{self.number}. {title}", style="bold")
        begun = time.perf_counter()
        yield
        self.console.print(f"({time.perf_counter() - begun:.1f} s)", style="dim")

    def path(self, name: str, what: str) -> Path:
        self.files[name] = what
        return self.folder / name

    def cluster(self) -> Cluster:
        with self.step("A cluster: two DGX-2 nodes, 32 GPUs, every link with its latency and rate"):
            cluster = Cluster.load(CLUSTER)
            self.console.print(picture(cluster))
            cluster.save(self.path("cluster.yaml", "the cluster, as a file you can edit"))
            drawing = self.path("cluster.svg", "the cluster, drawn")
            write_file(drawing, to_svg(cluster))
        return cluster

    def programs(self, cluster: Cluster) -> list[Program]:
        with self.step("Programs for three collectives, proved right before anything else"):
            programs = [algorithm(name, kind, cluster.num_devices, cluster=cluster) for kind, name in PROGRAMS]
            table = ResultTable("collective", "program", ">transfers", "proved without race or deadlock")
            for program in programs:
                report = program.verify()
                proof = f"with FIFO depth {report.fifo_depth}"
                table.add_row(program.collective.kind, program.name, f"{program.num_transfers:,}", proof)
            self.console.print(table)
        return programs

    def streams(self, programs: list[Program]) -> list[Lowered]:
        with self.step("Lowered to instruction streams, and run rank by rank on NumPy data"):
            lowered = [program.lower() for program in programs]
            for streams in lowered:
                check(streams, fifo_depth=2)
                self.console.print(
                    f"{streams.collective.kind}: {streams.num_instructions:,} instructions in "
                    f"{len(streams.tb_rank)} threadblocks; all outputs are right"
                )
        return lowered

    def exports(self, cluster: Cluster, programs: list[Program], lowered: list[Lowered]) -> None:
        with self.step("Written as text, for MSCCL (XML) and for MSCCL++ (JSON), and read again"):
            hosts = cluster.hosts_of(range(cluster.num_devices)).tolist()
            for program, streams in zip(programs, lowered, strict=True):
                kind = program.collective.kind
                text = self.path(f"{kind}.txt", f"{kind} as a program to read or edit")
                save_program(program, text)
                same = "equal" if load_program(text) == program else "NOT EQUAL"
                xml = self.path(f"{kind}.xml", f"{kind} for MSCCL")
                save_program(streams, xml)
                read = load_program(xml)
                assert isinstance(read, Lowered)
                proof = read.verify()
                plan = self.path(f"{kind}.json", f"{kind} for MSCCL++")
                save_program(streams, plan, hosts=hosts)
                written = load_program(plan)
                assert isinstance(written, mscclpp_reader.ExecutionPlan)
                mscclpp_reader.check(written, program.collective, seeds=(0,))
                self.console.print(
                    f"{kind}: text {same}, XML proved (FIFO depth {proof.fifo_depth}), JSON executed, right"
                )

    def sweep(self, cluster: Cluster) -> tuple[Sweep, Timeline]:
        with self.step("Every all-reduce of the library, simulated, against the lower bound"):
            ranks = cluster.num_devices
            programs = {
                name: algorithm(name, "all_reduce", ranks, cluster=cluster) for name in defined_for("all_reduce", ranks)
            }
            job = SimulationSetup(cluster=cluster)
            sweep, _ = job.sweep(programs, parse_sizes(SWEEP), {})
            last = len(sweep.sizes) - 1
            fastest = job.run(programs[sweep.best(last)], sweep.sizes[last], load_slots=LOAD_SLOTS)
            self.console.print(sweep_plot(sweep, width=plot_width(self.console)))
            self.console.print(sweep_table(sweep, width=self.console.width))
        return sweep, fastest

    def report(self, cluster: Cluster, sweep: Sweep, fastest: Timeline) -> None:
        with self.step("A report and a trace"):
            html.write_html(
                self.path("report.html", "the report: open it in a browser"),
                title=f"Stretto: all_reduce on {cluster.name}",
                sections=[
                    html.sweep_section(sweep),
                    html.sweep_table_section(sweep),
                    html.timeline_section(fastest, f"Link load of the fastest at {sweep.largest}"),
                    html.Section(heading="The cluster", note=about(cluster), body=to_svg(cluster)),
                ],
            )
            trace = self.path("fastest.pftrace", f"the fastest at {sweep.largest}: open it in ui.perfetto.dev")
            written = write_perfetto(fastest, trace)
            self.console.print(f"{written:,} transfers in the trace")

    def plan(self) -> None:
        with self.step(f"A training step ({STEP}) on {STEP_CLUSTER}: all its communication planned together"):
            found = api.plan(Workload.load(STEP), Cluster.load(STEP_CLUSTER), steps=SEARCH_STEPS)
            self.console.print(systems_table(found.for_tables()))
            found.plan.save(self.path("plan.json", "the plan of a training step"))
            write_plan_html(self.path("plan.html", "the same: timelines before and after, and why"), found)

    def run(self) -> None:
        where = f"{real.HOSTS} hosts x {real.RANKS} ranks, {real.ORDER}, behind uplinks of {real.RATE}"
        with self.step(f"For real: an all-reduce of {real.NBYTES >> 20} MB on {where}"):
            reason = real.missing()
            try:
                if reason is not None:
                    raise Infeasible(reason)
                done = real.real_run(self.folder / "lab.yaml", self.folder / "measured.pftrace")
            except Infeasible as error:
                self.console.print(f"left out: {error}", markup=False, soft_wrap=True)
                return
            self.files |= {"lab.yaml": "the lab as a cluster", "measured.pftrace": "what rank 0 did there"}
            measured = f"predicted {format_us(done.predicted_us)}, measured {format_us(done.stretto_us)}"
            self.console.print(f"{done.program}: {measured}", markup=False, soft_wrap=True)
            times = done.gloo_us / done.stretto_us
            self.console.print(f"gloo: measured {format_us(done.gloo_us)}, {times:.1f} times as long")

    def farewell(self) -> None:
        console = self.console
        console.print(f"\nDone in {time.perf_counter() - self.begun:.0f} s.", style="bold")
        console.print(f"Files in {self.folder}:", markup=False, soft_wrap=True)
        table = ResultTable("", "", header=False)
        for name, what in self.files.items():
            table.add_row(f"  {name}", what)
        console.print(table)
        console.print("\nNext", style="bold")
        for line in (
            "stretto simulate all -c hgx2:4 --collective all_to_all -b 1K..1G",
            "stretto simulate ring -c dgx_a100:2 -b 64M --trace ring.pftrace",
            f"stretto simulate {quoted(self.folder / 'all_to_all.txt')} -c {CLUSTER} -b 1M",
            f"stretto program show {quoted(self.folder / 'all_reduce.xml')}",
            f"stretto plan explain {quoted(self.folder / 'plan.json')} a2a-emb-fwd",
            "stretto cluster list",
        ):
            console.print(f"  {line}", markup=False, soft_wrap=True)
