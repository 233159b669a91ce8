# SPDX-License-Identifier: Apache-2.0
"""Tensors between meshes with real bytes: hosts behind shaped uplinks (the lab), three systems in one run.

Cases of the cross-mesh paper's Table 2 with a smaller tensor (one rank per device, four on each host), and a state dict
from FSDP2 over four ranks on one host or two to two tensor-parallel replicas of two ranks, each on a host of its own.

`stretto` is `stretto.torch.reshard` (or `WeightSync.update`), with everything that it does: agreeing on the arguments,
packing, moving, unpacking, and for the state dict the commit on all ranks. `send_recv` sends every piece from its least
loaded holder to everyone who lacks it, in one batch of isend and irecv; `gather_broadcast` brings everything to one
rank, which broadcasts it. Both run on gloo. `ratio` is a system's time over ours. `bound_us` is what the shaped links
allow at best (TCP/IP headers counted, the shaper's burst taken off), `over_bound` how far above it a time is;
`predicted_us` is the simulation of the program that ran, `error` how far the measured time is from it. Times are
medians; a run begins on all ranks at one moment and ends when the last has its part.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median, pstdev
from typing import Any

from common import Row, print_markdown, save, show

from stretto.lab import Lab, unavailable
from stretto.lab.layout import wire_bytes
from stretto.lab.network import burst_bytes
from stretto.resharding import place

JOB = Path(__file__).with_name("reshard_real_rank.py")
HOSTS, WIDTH = 4, 4
UPLINK = "100mbit"
CASES = {
    "case2": ("(2,4) RRR", "(2,4) S0RR"),
    "case3": ("(2,4) RS0R", "(2,4) S0RR"),
    "case4": ("(2,4) RS01R", "(2,4) S01RR"),
    "case5": ("(2,4) S1RR", "(2,4) S0RR"),
    "case7": ("(1,4) S1RR", "(2,4) RRR"),
    "case9": ("(2,4) RS0R", "(2,4) RRS0"),
}
QUICK = ("case4", "case7")
STATE_DICTS = "state_dicts"
SHAPE = (128, 128, 128)
SYSTEMS = ("stretto", "send_recv", "gather_broadcast")
RUNS, QUICK_RUNS = 5, 1


def cases(lab: Lab, args: argparse.Namespace) -> list[Row]:
    """What the ranks are to do."""
    systems = SYSTEMS[:1] if args.ours else SYSTEMS
    common: Row = {"runs": QUICK_RUNS if args.quick else RUNS, "systems": systems}
    found: list[Row] = []
    for name in args.case or (QUICK if args.quick else CASES):
        if name == STATE_DICTS:
            continue
        src, dst = ((s.mesh.shape, s.mesh.devices, str(s.spec)) for s in place(*CASES[name], lab.cluster()))
        found.append({"kind": "tensor", "name": name, "shape": SHAPE, "src": src, "dst": dst, **common})
    if args.case and STATE_DICTS not in args.case:
        return found
    replicas = [[2 * WIDTH, 2 * WIDTH + 1], [3 * WIDTH, 3 * WIDTH + 1]]
    for where, trainers in (("1 host", [0, 1, 2, 3]), ("2 hosts", [0, 1, WIDTH, WIDTH + 1])):
        found.append({
            "kind": "state_dict", "name": f"FSDP2 on {where} to 2 x TP2", "width": 128 if args.quick else 256,
            "layers": 4, "trainers": trainers, "replicas": replicas, **common,
        })  # fmt: skip
    return found[:-1] if args.quick else found


def rows(args: argparse.Namespace) -> list[Row]:
    """All measurements; none where no lab can be built (one line says why)."""
    if reason := unavailable():
        print(f"real bytes: skipped, {reason}", file=sys.stderr)
        return []
    share = wire_bytes(1 << 20) / (1 << 20)
    with (
        tempfile.NamedTemporaryFile(suffix=".yaml") as truth,
        Lab(hosts=HOSTS, ranks_per_host=WIDTH, uplinks={"eth": args.uplink}, tcp=args.tcp) as lab,
    ):
        lab.cluster().save(truth.name)
        what = json.dumps([cases(lab, args), args.urgent])
        done = lab.run(
            [sys.executable, str(JOB), what, repr(share)], env={"STRETTO_CLUSTER": truth.name}, timeout_s=1200
        )
        rate = lab.layout.channels[0].bits_per_s[0]
    if done.exit_code:
        sys.exit(done.why)
    lines = [json.loads(line) for line in done.outputs[0].splitlines() if line.startswith("{")]
    return [row(line, lines, share, burst_bytes(rate) * 8e6 / rate) for line in lines]


def row(line: Row, among: list[Row], share: float, burst_us: float) -> Row:
    """One system in one case."""
    ours = next(o for o in among if o["case"] == line["case"] and o["system"] == "stretto")
    time_us, bound_us = median(line["times_us"]), ours["bound_us"] * share - burst_us
    found: dict[str, Any] = {
        "case": line["case"], "system": line["system"], "exact": line["exact"], "time_us": time_us,
        "deviation": pstdev(line["times_us"]) / time_us,
        "ratio": time_us / median(ours["times_us"]), "bound_us": bound_us, "over_bound": time_us / bound_us - 1,
        "uplink_mb": line["uplink_bytes"] / 1e6, "cpu": line["cpu"], "machine_cpu": line["machine_cpu"],
    }  # fmt: skip
    if line is ours:
        if not line["executor"]:
            sys.exit(f"{line['case']}: did not run on the executor")
        found |= {"predicted_us": line["predicted_us"], "error": time_us / line["predicted_us"] - 1}
    return found


def beside(rows: list[Row]) -> list[Row]:
    """Our rows alone, with how many times as long the other systems take."""
    found = []
    for own in rows:
        if own["system"] == "stretto":
            others = {r["system"]: r["ratio"] for r in rows if r["case"] == own["case"] and r is not own}
            kept = ("case", "exact", "time_us", "deviation", "predicted_us", "error", "over_bound", "cpu")
            found.append({column: own[column] for column in kept} | others)
    return found


def main() -> None:
    """One lab, all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="end within a minute on two cores")
    parser.add_argument("--urgent", action="store_true", help="ranks go before all other work of the machine")
    parser.add_argument("--case", action="append", default=[], choices=(*CASES, STATE_DICTS), help="only this")
    parser.add_argument("--uplink", default=UPLINK, help="rate of every host's uplink")
    parser.add_argument("--ours", action="store_true", help="leave the other systems out")
    parser.add_argument("--tcp", default="reno", help="congestion control of the hosts")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--markdown", action="store_true", help="print the table as docs/results.md has it")
    args = parser.parse_args()
    found = rows(args)
    if args.markdown:
        print_markdown(beside(found))
    else:
        show(found, title=f"Tensors between meshes, real bytes ({HOSTS} hosts x {WIDTH} ranks, {args.uplink} uplinks)")
    if args.json:
        save(found, args.json)


if __name__ == "__main__":
    main()
