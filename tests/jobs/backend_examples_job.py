# SPDX-License-Identifier: Apache-2.0
"""The training examples as torchrun would start them, each with both backends."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import train_ddp
import train_fsdp
import train_hybrid
from capture_scenarios import fork, store_port

EXAMPLES = {"ddp": train_ddp.main, "fsdp": train_fsdp.main, "hybrid": train_hybrid.main}


def main() -> None:
    """Rank 0 reports what it prints."""
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    runs = [(name, backend) for name in EXAMPLES for backend in ("gloo", "stretto")]
    ports = [store_port() for _ in runs]

    def rank_main(rank: int) -> None:
        found: dict[str, Any] = {name: {} for name in EXAMPLES}
        for (name, backend), port in zip(runs, ports, strict=True):
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(True)
            sys.argv = [name, "--backend", backend, "--iterations", "4", "--width", "32", "--batch", "2", "--choices"]
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                EXAMPLES[name]()
            found[name][backend] = printed.getvalue()
        (folder / f"{rank}.json").write_text(json.dumps(found))

    fork(ranks, rank_main)


if __name__ == "__main__":
    main()
