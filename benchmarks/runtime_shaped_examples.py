# SPDX-License-Identifier: Apache-2.0
"""The training examples in the lab: iteration time with gloo and with ours, and whether the losses agree.

`loss_difference` is the largest difference between ours and gloo over all iterations, `gloo_spread` the largest among
runs of gloo itself that deal the same data out to the ranks in other orders, and so add in other orders.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from common import Row
from common import show as show_table

from stretto.lab import Lab, unavailable

RATE = "200mbit"
EXAMPLES = {
    "ddp": ["--width", "192", "--batch", "2"],
    "fsdp": ["--width", "192", "--batch", "2"],
    "hybrid": ["--width", "256", "--batch", "256"],
}
FOLDER = Path(__file__).resolve().parent.parent / "examples"
SHUFFLES = (1, 2, 3)
Run = tuple[str, str, int]
"""(example, backend, shuffle)"""


def rows(quick: bool, *, urgent: bool = False) -> list[Row]:
    """Both orders of the ranks; gloo's spread is measured in the quicker one."""
    if reason := unavailable():
        print(f"examples: skipped, {reason}", file=sys.stderr)
        return []
    found: list[Row] = []
    spread: dict[str, float] = {}
    for order in ("host",) if quick else ("host", "interleaved"):
        shuffles = (0, *(SHUFFLES[:1] if quick else SHUFFLES)) if order == "host" else (0,)
        runs: list[Run] = [(name, "gloo", shuffle) for name in EXAMPLES for shuffle in shuffles]
        runs += [(name, "stretto", 0) for name in EXAMPLES]
        printed = trained(order, runs, iterations=4 if quick else 7, urgent=urgent)
        losses = {run: numbers(printed[run], "loss") for run in runs}
        for name in EXAMPLES:
            if order == "host":
                pairs = itertools.combinations([losses[name, "gloo", shuffle] for shuffle in shuffles], 2)
                spread[name] = max(apart(a, b) for a, b in pairs)
            ours, gloo = losses[name, "stretto", 0], losses[name, "gloo", 0]
            times = {b: numbers(printed[name, b, 0], "iteration")[0] * 1e3 for b in ("gloo", "stretto")}
            case = f"2x4 {order} {name}"
            found.append({"case": case, "system": "gloo", "iteration_us": times["gloo"]})
            found.append({
                "case": case, "system": "stretto", "iteration_us": times["stretto"],
                "ratio": times["gloo"] / times["stretto"], "loss_difference": f"{apart(ours, gloo):.1e}",
                "gloo_spread": f"{spread[name]:.1e}", "within": apart(ours, gloo) <= spread[name],
                "last_loss": ours[-1],
            })  # fmt: skip
    return found


def trained(order: str, runs: list[Run], *, iterations: int, urgent: bool) -> dict[Run, str]:
    """What rank 0 of each run printed."""
    with Lab(hosts=2, ranks_per_host=4, uplinks={"eth": RATE}, order=order) as lab:
        done = lab.run([sys.executable, __file__, json.dumps([runs, iterations, urgent])], timeout_s=1200)
    if done.exit_code:
        sys.exit(f"examples: {done.why}")
    (line,) = (line for line in done.outputs[0].splitlines() if line.startswith("["))
    return dict(zip(runs, json.loads(line), strict=True))


def numbers(printed: str, word: str) -> list[float]:
    """The numbers behind a word at the beginning of a line."""
    (line,) = (line for line in printed.splitlines() if line.startswith(f"{word} "))
    return [float(text) for text in line.partition(" ms")[0].split()[1:]]


def apart(one: list[float], other: list[float]) -> float:
    """The largest difference."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def show(trained: list[Row]) -> None:
    """The table."""
    if trained:
        show_table(trained, title=f"Training in the lab, 2 hosts x 4 ranks, uplinks of {RATE}")


def rank_main(runs: list[Any], iterations: int, urgent: bool) -> None:
    """One rank: the examples one after the other, each as a job of its own."""
    from runtime_shaped_rank import hurry

    if urgent:
        hurry()
    sys.path.insert(0, str(FOLDER))
    port, texts = int(os.environ["MASTER_PORT"]), []
    for at, (name, backend, shuffle) in enumerate(runs):
        os.environ["MASTER_PORT"] = str(port + 1 + at)
        sys.argv = [name, "--backend", backend, "--shuffle", str(shuffle), "--iterations", str(iterations)]
        sys.argv += EXAMPLES[name]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(FOLDER / f"train_{name}.py"), run_name="__main__")
        texts.append(printed.getvalue())
    if os.environ["RANK"] == "0":
        print(json.dumps(texts), flush=True)


if __name__ == "__main__":
    rank_main(*json.loads(sys.argv[1]))
