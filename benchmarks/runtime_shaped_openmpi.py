# SPDX-License-Identifier: Apache-2.0
"""OpenMPI in the lab: mpirun on the first host, started on the others by entering their namespaces instead of ssh."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from stretto.lab import Lab

TIMEOUT_S = 300.0
SETTINGS = {
    "btl": "self,vader,tcp", "pml": "ob1", "btl_tcp_if_include": "eth", "oob_tcp_if_include": "eth",
    "mpi_yield_when_idle": "1",
}  # fmt: skip
"""Shared memory inside a host, TCP between hosts; its ranks poll, so on few processors they should at least yield."""


def available() -> bool:
    """Whether it is installed."""
    return bool(shutil.which("mpicc") and shutil.which("mpirun"))


def measured(lab: Lab, runs: dict[int, int]) -> dict[tuple[str, int], float]:
    """Microseconds by collective and size; empty, with one line, where it does not run."""
    layout, source = lab.layout, Path(__file__).with_name("openmpi_collectives.c")
    slots = ",".join(f"h{host}:{layout.ranks_per_host}" for host in range(layout.hosts))
    with tempfile.TemporaryDirectory() as folder:
        program, agent = Path(folder) / "collectives", Path(folder) / "agent"
        subprocess.run(["mpicc", "-O2", "-o", str(program), str(source)], check=True)
        doors = "".join(f'h{host}) exec {shlex.join(lab.enter(host))} sh -c "$*";;\n' for host in range(layout.hosts))
        agent.write_text(f"#!/bin/sh\nhost=$1\nshift\ncase $host in\n{doors}esac\n")
        agent.chmod(0o755)
        command = [*lab.enter(0), "mpirun", *["--allow-run-as-root"] * (os.geteuid() == 0), "--oversubscribe"]
        for key, value in (SETTINGS | {"plm_rsh_agent": str(agent)}).items():
            command += ["--mca", key, value]
        command += ["--host", slots, "--map-by", "slot" if layout.order == "host" else "node"]
        command += ["-n", str(layout.world_size), str(program), *(str(n) for pair in runs.items() for n in pair)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"OpenMPI does not run here: {error}", file=sys.stderr)
            return {}
    lines = (line.split() for line in done.stdout.splitlines())
    return {(kind, int(nbytes)): float(taken) for kind, nbytes, taken in lines}
