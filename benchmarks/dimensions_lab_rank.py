# SPDX-License-Identifier: Apache-2.0
"""One rank of benchmarks/dimensions_lab.py: programs of dimension schedules on the executor, in turn.

All ranks of a lab are processes of one machine and share its clock: a run takes from the first rank's start to the last
rank's end.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from stretto.algorithms import algorithm
from stretto.programs.formats.text import loads
from stretto.runtime.probe.join import joined


def main() -> None:
    folder = Path(sys.argv[1])
    asked = json.loads((folder / "asked.json").read_text())
    networks = {(int(src), int(dst)): name for src, dst, name in asked["networks"]}
    found: dict[str, list[tuple[float, float]]] = {}
    with joined() as executor:
        world = executor.world_size
        fence = executor.load(algorithm("direct", "all_reduce", world, in_place=True), communicator=1)
        flag = np.zeros(world, np.float32)
        rows = np.arange(asked["count"], dtype=np.float32) % 97
        handles = {
            system: executor.load(loads(text), communicator=2 + number, networks=networks)
            for number, (system, text) in enumerate(asked["programs"].items())
        }
        given, taken = np.empty_like(rows), np.empty_like(rows)
        # One round measures every system once, so that what else the machine does falls on all of them alike.
        for _ in range(1 + asked["times"]):
            for system, handle in handles.items():
                given[:] = rows + executor.rank
                executor.start(fence, flag.ctypes.data, flag.ctypes.data, world).wait()
                begin = time.monotonic()
                executor.start(handle, given.ctypes.data, taken.ctypes.data, len(rows)).wait()
                found.setdefault(system, []).append((begin, time.monotonic()))
                if not np.array_equal(taken, world * rows + sum(range(world))):
                    sys.exit(f"{system}: the sums are wrong on rank {executor.rank}")
        (folder / f"{executor.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
