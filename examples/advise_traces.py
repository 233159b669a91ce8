# SPDX-License-Identifier: Apache-2.0
"""How much of a recorded step waits for communication, and what each change would gain.

python examples/advise_traces.py traces/ "hosts: 2, gpus: 8 x h100, network: 8 x 400gbit"
"""

from __future__ import annotations

import argparse

import stretto as st


def main() -> None:
    """Print the answer in a few lines; `stretto advise` prints the whole page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="+", help="profiler traces: a directory, or one file per rank")
    parser.add_argument("cluster", help="a preset, a file, or three lines")
    parser.add_argument("--steps", type=int, help="search steps of the plan; default: by time")
    options = parser.parse_args()
    step = options.traces if len(options.traces) > 1 else options.traces[0]
    found = st.advise(step, options.cluster, steps=options.steps)
    print(f"waits for communication: {found.waits_share:.1%} of {found.step_us / 1e3:.3g} ms")
    print(f"at best: {found.bound_us / 1e3:.3g} of {found.step_us / 1e3:.3g} ms ({found.confidence})")
    for change in found.changes:
        print(f"{change.gain:6.2f}x  {'advised' if change.worthwhile else '-':8} {change.name}")


if __name__ == "__main__":
    main()
