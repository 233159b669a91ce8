# SPDX-License-Identifier: Apache-2.0
"""The cases of benchmarks/enforcer.py that train models, each in a lab of two hosts with two uplinks.

`idle_percent` is the part of an iteration in which a rank does not compute; `loss_off` is how far the losses are from
gloo's at most, and `spread` how far gloo's own are when the same data is dealt to the ranks in another order.
`predicted_off_percent` compares the plan's promise with what was measured.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import Row

from stretto.lab import Lab

HERE = Path(__file__).parent
LIMIT_S = 240.0
# After a pause a shaper of the lab lets 32 KiB through at once, which no plan counts on: ops are many times as large.
MODELS: dict[str, dict[str, Any]] = {
    "dlrm": {
        "shape": {"tables": 4, "rows": 1000, "width": 64, "hidden": 384, "batch": 64},
        "uplinks": {"rdma": "50mbit", "eth": "25mbit"},
    },
    "gpt": {
        "shape": {"vocabulary": 128, "context": 16, "width": 192, "layers": 2, "batch": 2},
        "uplinks": {"rdma": "200mbit", "eth": "100mbit"},
    },
    "cnn": {
        "shape": {"side": 16, "width": 16, "stages": 3, "batch": 4},
        "uplinks": {"rdma": "50mbit", "eth": "25mbit"},
    },
    "dlrm_uneven": {
        "shape": {"tables": 2, "rows": 1000, "width": 64, "hidden": 384, "batch": 64},
        "uplinks": {"rdma": "50mbit", "eth": "25mbit"},
    },
    "moe": {
        "shape": {"width": 128, "hidden": 1024, "tokens": 160},
        "uplinks": {"rdma": "50mbit", "eth": "25mbit"},
    },
    "cnn_compute": {
        "shape": {"side": 16, "width": 16, "stages": 3, "batch": 256},
        "uplinks": {"rdma": "200mbit", "eth": "100mbit"},
    },
}


def in_lab(lab: Lab, rank: str, asked: dict[str, Any]) -> dict[str, Any]:
    """What the first rank of a job has found."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lab.cluster().save(folder / "truth.yaml")
        (folder / "asked.json").write_text(json.dumps(asked))
        done = lab.run([sys.executable, str(HERE / rank), name], timeout_s=LIMIT_S)
        if done.failed is not None or done.timed_out:
            sys.exit(f"{asked['case']}: {done.why}")
        found: dict[str, Any] = json.loads((folder / "found.json").read_text())
        return found


def model(case: str, quick: bool) -> list[Row]:
    """One model under the three systems."""
    about = MODELS[case]
    asked = {
        "case": case, "shape": about["shape"], "budget_s": 5.0, "rounds": 1 if quick else 2, "times": 5,
        "compared": 8,
    }  # fmt: skip
    with Lab(hosts=2, ranks_per_host=2, uplinks=about["uplinks"]) as lab:
        found = in_lab(lab, "enforcer_models_rank.py", asked)
    rows: list[Row] = []
    for system, us in found["times"].items():
        ours = system == "stretto"
        rows.append(
            {
                "case": case,
                "system": system,
                "iteration_us": us,
                "gain": found["times"]["gloo"] / us,
                "plan": found["plan"] if ours else None,
                "idle_percent": 100 * max(1 - found["compute_us"] / us, 0.0),
                "loss_off": found["losses_off"][system],
                "spread": found["spread"],
                "predicted_us": found["predicted_us"] if ours else None,
                "predicted_off_percent": 100 * (found["predicted_us"] / us - 1) if ours else None,
            }
        )
    return rows


def dlrm(quick: bool) -> list[Row]:
    """Tables spread over the ranks, perceptrons copied."""
    return model("dlrm", quick)


def dlrm_uneven(quick: bool) -> list[Row]:
    """The same with twice as many tables on every second rank: all-to-alls with splits."""
    return model("dlrm_uneven", quick)


def moe(quick: bool) -> list[Row]:
    """A mixture of experts, one on every rank: splits that change with every batch."""
    return model("moe", quick)


def gpt(quick: bool) -> list[Row]:
    """FSDP2."""
    return model("gpt", quick)


def cnn(quick: bool) -> list[Row]:
    """DDP."""
    return model("cnn", quick)


def cnn_compute(quick: bool) -> list[Row]:
    """The same where compute dominates, so that there is next to nothing to gain."""
    return model("cnn_compute", quick)


CASES = {"dlrm": dlrm, "dlrm_uneven": dlrm_uneven, "moe": moe, "gpt": gpt, "cnn": cnn, "cnn_compute": cnn_compute}
