# SPDX-License-Identifier: Apache-2.0
"""Collectives between hosts behind shaped uplinks (the lab): ours, gloo and OpenMPI side by side in one run.

`ratio` is gloo's time over ours, `target` what it should be. `bound_us` is the least time of the shaped links: the
collective's lower bound on the lab's cluster, TCP/IP headers counted and the shaper's burst taken off; `over_bound` how
far above it a time is. `predicted_us` is the simulation, on the same cluster, of the very program that ran; `error` how
far the measured time is from it. `cpu` is the share of all processors that the ranks took, `machine_cpu` that of
everything on the machine. `uplink_mb` is what the busiest host sent, headers included. Times are medians; a run begins
everywhere at one moment. OpenMPI runs behind the other two, up to 16 MB; its ranks poll, which costs it dearly where
they share few processors.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

import runtime_shaped_examples
import runtime_shaped_openmpi
from common import Row, print_markdown, save
from common import show as show_table

from stretto import Cluster, lower_bound
from stretto.lab import Lab, unavailable
from stretto.lab.layout import wire_bytes
from stretto.lab.network import burst_bytes
from stretto.programs import Program
from stretto.programs.lower import lower
from stretto.runtime.executor.executor import far_bytes
from stretto.runtime.torch_backend.prediction import predict
from stretto.runtime.torch_backend.selection import Selector

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
IN_PLACE = ("all_reduce", "all_gather")
LAYOUTS = ((2, 4), (4, 2))
ORDERS = ("host", "interleaved")
RUNS = {"100mbit": {1 << 20: 7, 1 << 22: 5}, "400mbit": {1 << 24: 3, 1 << 26: 1}}
"""Per rate of the uplinks the sizes and how often each is run. Small ones on slower links: there a run should also take
long against the milliseconds in which eight ranks get to run on two processors."""
QUICK_RUNS = {"100mbit": {1 << 20: 3}}
MPI_BYTES, MPI_RUNS = 1 << 24, 3
BUSY = 0.85
"""Where the ranks take more of the processors than this, the links do not decide the time."""
SHARE = 0.85
TARGETS = {
    "2x4 host": {"all_reduce": 1.6, "all_gather": 1.3, "reduce_scatter": 1.6, "all_to_all": 1.0},
    "2x4 interleaved": {"all_reduce": 5.0, "all_gather": 4.0, "reduce_scatter": 5.0, "all_to_all": 1.0},
    "4x2 host": {"all_reduce": SHARE * 7 / 6, "all_gather": SHARE * 7 / 6, "reduce_scatter": SHARE * 7 / 3},
    "4x2 interleaved": {"all_reduce": SHARE * 7 / 3, "all_gather": SHARE * 7 / 3, "reduce_scatter": SHARE * 14 / 3},
}
"""Of gloo's time over ours. On 4x2: 85 % of what gloo sends over an uplink above the least possible."""
JOB = Path(__file__).with_name("runtime_shaped_rank.py")


def rows(quick: bool, layouts: Sequence[tuple[int, int]] = LAYOUTS, *, urgent: bool = False) -> list[Row]:
    """All measurements; none where no lab can be built (one line says why)."""
    if reason := unavailable():
        print(f"shaped links: skipped, {reason}", file=sys.stderr)
        return []
    runs = QUICK_RUNS if quick else RUNS
    found: list[Row] = []
    for hosts, ranks in layouts[:1] if quick else layouts:
        for order in ORDERS[1:] if quick else ORDERS:
            for rate, sizes in runs.items():
                found += measured(hosts, ranks, order, rate, sizes, urgent)
    return found


def measured(hosts: int, ranks: int, order: str, uplink: str, sizes: dict[int, int], urgent: bool) -> list[Row]:
    """One lab: every collective at every size, both systems."""
    cases = [(kind, nbytes, times) for nbytes, times in sizes.items() for kind in COLLECTIVES]
    layout = f"{hosts}x{ranks} {order}"
    with (
        tempfile.NamedTemporaryFile(suffix=".yaml") as truth,
        Lab(hosts=hosts, ranks_per_host=ranks, uplinks={"eth": uplink}, order=order) as lab,
    ):
        cluster, rate = lab.cluster(), lab.layout.channels[0].bits_per_s[0]
        cluster.save(truth.name)
        done = lab.run(
            [sys.executable, str(JOB), json.dumps([cases, urgent])], env={"STRETTO_CLUSTER": truth.name}, timeout_s=1200
        )
        if done.exit_code:
            sys.exit(f"{layout}: {done.why}")
        short = {nbytes: min(times, MPI_RUNS) for nbytes, times in sizes.items() if nbytes <= MPI_BYTES}
        mpi = runtime_shaped_openmpi.measured(lab, short) if short and runtime_shaped_openmpi.available() else {}
        selector = Selector(range(hosts * ranks), [str(lab.host_of(r)) for r in range(hosts * ranks)], cluster=cluster)
    burst_us = burst_bytes(rate) * 8e6 / rate
    lines = [json.loads(line) for line in done.outputs[0].splitlines() if line.startswith("{")]
    for (kind, nbytes), time_us in mpi.items():
        if kind not in COLLECTIVES:
            continue
        lines.append({"system": "openmpi", "collective": kind, "nbytes": nbytes, "times_us": [time_us]})
    found = []
    for line in sorted(lines, key=lambda line: (line["nbytes"], COLLECTIVES.index(line["collective"]))):
        kind, nbytes = line["collective"], line["nbytes"]
        program = selector.pick(kind, nbytes, in_place=kind in IN_PLACE).program
        assert isinstance(program, Program)
        bound_us = lower_bound(program.collective, cluster, nbytes=wire_bytes(nbytes)).bandwidth_us - burst_us
        time_us = median(line["times_us"])
        row: Row = {
            "case": f"{layout} {kind} {nbytes >> 20} MB", "system": line["system"], "layout": layout, "uplink": uplink,
            "collective": kind, "nbytes": nbytes, "time_us": time_us, "bound_us": bound_us,
            "over_bound": time_us / bound_us - 1,
        }  # fmt: skip
        if line["system"] != "openmpi":
            row |= {"uplink_mb": line["uplink_bytes"] / 1e6} | {k: line[k] for k in ("cpu", "machine_cpu", "exact")}
        if line["system"] == "stretto":
            if line["program"] != program.name:
                sys.exit(f"{row['case']}: {line['program']} ran, but {program.name} would be predicted")
            row |= compared(program, cluster, nbytes, time_us)
        found.append(row)
    return [row | ratios(row, found) for row in found]


def compared(program: Program, cluster: Cluster, nbytes: int, time_us: float) -> Row:
    """The prediction for what ran."""
    lowered = lower(program)
    predicted_us = predict(
        lowered, cluster, nbytes=wire_bytes(nbytes), message_bytes=round(wire_bytes(far_bytes(lowered)))
    ).total_us
    return {"program": program.name, "predicted_us": predicted_us, "error": time_us / predicted_us - 1}


def ratios(row: Row, among: list[Row]) -> Row:
    """gloo's time over ours, beside the target."""
    if row["system"] != "stretto":
        return {}
    (gloo,) = (r for r in among if r["system"] == "gloo" and r["case"] == row["case"])
    target = TARGETS[row["layout"]].get(row["collective"])
    return {"ratio": gloo["time_us"] / row["time_us"], "target": target}


def summary(shaped: list[Row]) -> list[str]:
    """What the table says, in lines."""
    ours = [r for r in shaped if r["system"] == "stretto"]
    if not ours:
        return []
    aimed = [r for r in ours if r["target"] is not None]
    missed = [f"{r['case']} {r['ratio']:.2f} of {r['target']:.2f}" for r in aimed if r["ratio"] < r["target"]]
    far = [f"{r['case']} {r['over_bound']:.0%}" for r in ours if r["over_bound"] > 0.15]
    errors = [abs(r["error"]) for r in ours if r["cpu"] < BUSY]
    return [
        f"gloo's time over ours: {len(aimed) - len(missed)} of {len(aimed)} targets reached"
        + "".join(f"; {each}" for each in missed),
        f"over the lower bound: {mean(r['over_bound'] for r in ours):.1%} on average"
        + (f"; above 15 %: {', '.join(far)}" if far else ", all within 15 %"),
        f"measured against simulated: {mean(errors):.1%} mean absolute error over {len(errors)} rows with the ranks "
        f"below {BUSY:.0%} CPU, worst {max(errors):.1%}; {len(ours) - len(errors)} rows above",
        f"whole numbers bit for bit those of gloo: {all(r['exact'] for r in ours)}",
    ]


def show(shaped: list[Row]) -> None:
    """The table, and what it says."""
    if shaped:
        hidden = ("layout", "collective", "nbytes", "program", "exact")
        shown = [{k: v for k, v in r.items() if k not in hidden} for r in shaped]
        show_table(shown, title="Collectives behind shaped uplinks")
        print(*summary(shaped), sep="\n")


def plot(shaped: list[Row], path: Path) -> None:
    """Simulated against measured times, as a page that needs no network."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for layout in dict.fromkeys(r["layout"] for r in shaped):
        own = [r for r in shaped if r["layout"] == layout and r["system"] == "stretto"]
        figure.add_scatter(
            x=[r["predicted_us"] / 1e3 for r in own], y=[r["time_us"] / 1e3 for r in own], mode="markers", name=layout,
            text=[f"{r['case']}<br>{r['program']}<br>{r['uplink']}, CPU {r['cpu']:.0%}" for r in own],
            hoverinfo="text+x+y",
        )  # fmt: skip
    ends = [f(r["predicted_us"] for r in shaped if "predicted_us" in r) / 1e3 for f in (min, max)]
    for factor, dash in ((1.0, "solid"), (1.15, "dot"), (0.85, "dot")):
        figure.add_scatter(
            x=ends, y=[factor * end for end in ends], mode="lines", line={"dash": dash, "color": "grey"},
            name="equal" if factor == 1 else f"{factor - 1:+.0%}",
        )  # fmt: skip
    figure.update_xaxes(type="log", title="simulated, ms")
    figure.update_yaxes(type="log", title="measured, ms")
    figure.update_layout(title="Collectives behind shaped uplinks: simulated and measured", template="plotly_white")
    figure.write_html(path, include_plotlyjs=True)


def run(args: argparse.Namespace, layouts: Sequence[tuple[int, int]] = LAYOUTS, *, urgent: bool = False) -> list[Row]:
    """The parts that are asked for, measured and printed, the plot beside ``--json``. Quickly: without training."""
    shaped = rows(args.quick, layouts, urgent=urgent) if args.only in (None, "shaped") else []
    train = args.only == "examples" or (args.only is None and not args.quick)
    trained = runtime_shaped_examples.rows(args.quick, urgent=urgent) if train else []
    if args.markdown:
        print_markdown(shaped)
        print(*summary(shaped), sep="\n")
        print_markdown(trained)
    else:
        show(shaped)
        runtime_shaped_examples.show(trained)
    if args.json and shaped:
        plot(shaped, args.json.with_suffix(".html"))
    return shaped + trained


def main() -> None:
    """By itself; benchmarks/runtime.py runs it, too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="end within a minute on two cores")
    parser.add_argument("--only", choices=["shaped", "examples"], help="one of the two parts")
    parser.add_argument("--layout", choices=["2x4", "4x2"], help="one layout of the collectives")
    parser.add_argument("--urgent", action="store_true", help="ranks go before all other work of the machine")
    parser.add_argument("--json", type=Path, help="also write the rows to this file, and the plot beside it")
    parser.add_argument("--markdown", action="store_true", help="print tables as docs/results.md has them")
    args = parser.parse_args()
    found = run(args, [(h, r) for h, r in LAYOUTS if args.layout in (None, f"{h}x{r}")], urgent=args.urgent)
    if args.json:
        save(found, args.json)


if __name__ == "__main__":
    main()
