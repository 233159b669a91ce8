# SPDX-License-Identifier: Apache-2.0
"""Strategies: real steps in the lab, how well the search ranks, and the paper's clusters in simulation.

`--only real`, or one of its cases, runs strategy_real.py: what the search finds against PyTorch DDP and every builder.
`--only ranking` runs strategy_ranking.py (Figs. 4 and 9), `--only clusters` strategy_sim.py (Figs. 5 to 8, and the
whole table of clusters). Each can be run by itself, with more options. `--json FILE` writes a file for each.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from strategy_real import CASES

PARTS = {"real": "strategy_real.py", "ranking": "strategy_ranking.py", "clusters": "strategy_sim.py"}


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="each part within a minute on two cores")
    parser.add_argument("--json", type=Path, help="also write the rows: FILE_real.json, FILE_ranking.json, ...")
    parser.add_argument("--markdown", action="store_true", help="print the tables as docs/results.md has them")
    parser.add_argument("--only", action="append", choices=[*PARTS, *CASES], help="one part of it; repeatable")
    args = parser.parse_args(argv)
    cases = [case for case in CASES if case in (args.only or [])]
    for part, script in PARTS.items():
        chosen = [word for case in cases for word in ("--only", case)] if part == "real" else []
        if args.only and part not in args.only and not chosen:
            continue
        words = [sys.executable, str(Path(__file__).with_name(script)), *chosen]
        words += ["--quick"] * args.quick + ["--markdown"] * args.markdown
        if args.json is not None:
            words += ["--json", str(args.json.with_name(f"{args.json.stem}_{part}.json"))]
        subprocess.run(words, check=True)


if __name__ == "__main__":
    main()
