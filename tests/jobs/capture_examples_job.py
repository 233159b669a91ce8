# SPDX-License-Identifier: Apache-2.0
"""The examples as torchrun would start them, on two ranks."""

from __future__ import annotations

import json
import os
import runpy
import sys
from functools import partial
from pathlib import Path

from capture_scenarios import fork, store_port

from stretto.workload import Workload

EXAMPLES = Path(__file__).parents[2] / "examples"
RANKS = 2


def main() -> None:
    """Each example, a job of its own, writes its workload; what can then be read from the file is reported."""
    folder = Path(sys.argv[1])
    found = {}
    for name in ("capture_dlrm", "capture_gpt"):
        output = folder / f"{name}.yaml"
        fork(RANKS, partial(example, EXAMPLES / f"{name}.py", output, store_port()))
        found[name] = [op.kind for op in Workload.load(output).comm_ops]
    (folder / "0.json").write_text(json.dumps(found))


def example(script: Path, output: Path, port: int, rank: int) -> None:
    """One rank of an example; its store is there already, as it is under torchrun."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(True)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(RANKS))
    sys.argv = [script.name, str(output), "--iterations", "2"]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
