# SPDX-License-Identifier: Apache-2.0
"""The checks of `stretto doctor`: each looks at one thing, changes nothing, and says what to do where it is missing.

Whatever could end a process (a library of a vendor, say) is tried in another one, with a limit on its time.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

from ..errors import StrettoError

State = Literal["works", "absent", "broken"]
LIMIT_S = 60.0
"""How long a check in another process may take."""
_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)\s*([^;]*?)\s*(?:;\s*extra == \"([a-z]+)\")?$")
_CLAUSE = re.compile(r"(>=|<)\s*([0-9.]+)")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    area: Literal["base", "jobs", "hardware", "tools"]
    name: str
    state: State
    about: str
    """What was found, or what is missing."""
    remedy: str = ""
    """What to do; empty where nothing needs to be done."""

    @property
    def needed(self) -> bool:
        """Whether nothing works without it."""
        return self.area == "base"


def examine() -> tuple[Finding, ...]:
    """Look at this machine and this Python.

    Returns:
        What was found, the base first. Only a finding of the area ``base`` that does not work keeps Stretto itself from
        working; all others name what a part of it would need.
    """
    return tuple(finding for check in CHECKS for finding in check())


def _python() -> Iterator[Finding]:
    found = ".".join(map(str, sys.version_info[:3]))
    fine = sys.version_info >= (3, 11)
    remedy = "" if fine else "use Python 3.11 or newer"
    yield Finding(area="base", name="python", state="works" if fine else "broken", about=found, remedy=remedy)


def _packages() -> Iterator[Finding]:
    """Packages that the base needs, and those of the extras, with the versions that pyproject.toml asks for."""
    lines = requires("stretto") or []
    for line in lines:
        match = _REQUIREMENT.match(line)
        if match is None or match[3] not in (None, "torch", "runtime", "solvers", "ray"):
            continue
        name, wanted, extra = match[1], match[2], match[3] or ""
        area: Literal["base", "jobs"] = "jobs" if extra else "base"
        get = f"pip install 'stretto[{extra}]'" if extra else f"pip install '{name}{wanted}'"
        uses = {"torch": "stretto run, tune, probe, the backend", "runtime": "running jobs: the executor, controllers"}
        uses |= {"solvers": "exact synthesis and scheduling by CP-SAT", "ray": "synthesis and tuning on a Ray cluster"}
        try:
            found = version(name)
        except PackageNotFoundError:
            about = f"not installed; for {uses[extra]}" if extra else "not installed"
            yield Finding(area=area, name=name, state="absent" if extra else "broken", about=about, remedy=get)
            continue
        fits = version_fits(found, wanted)
        about = found if fits else f"{found}, but {wanted} is supported"
        yield Finding(
            area=area, name=name, state="works" if fits else "broken", about=about, remedy="" if fits else get
        )


def version_fits(found: str, wanted: str) -> bool:
    """Whether a version satisfies clauses such as ``<2.16,>=2.8``.

    >>> version_fits("2.13.0+cpu", "<2.16,>=2.8"), version_fits("2.7.1", ">=2.8"), version_fits("2.16", "<2.16")
    (True, False, False)
    """
    parts = _numbers(found)
    for sign, limit in _CLAUSE.findall(wanted):
        bound = _numbers(limit)
        size = max(len(parts), len(bound))
        one, other = (tuple(each) + (0,) * (size - len(each)) for each in (parts, bound))
        if (one < other) if sign == ">=" else (one >= other):
            return False
    return True


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.match(r"[0-9.]*", text)[0].split(".") if part)  # type: ignore[index]


def _core() -> Iterator[Finding]:
    """The native module, by a small job: a program that is proved and simulated."""
    try:
        from ..algorithms import algorithm
        from ..cluster import Cluster
        from ..simulator import simulate

        took = simulate(algorithm("ring", "all_reduce", 4), Cluster.preset("ring", nodes=4), nbytes=1e6).total_us
    except (ImportError, StrettoError) as error:
        remedy = "install stretto again; from source that needs a C++20 compiler"
        yield Finding(area="base", name="native module", state="broken", about=str(error), remedy=remedy)
        return
    about = f"proved and simulated a ring of four ranks ({took:.0f} us)"
    yield Finding(area="base", name="native module", state="works", about=about)


def _executor() -> Iterator[Finding]:
    """The C++ executor and UCX, which move real bytes on CPUs."""
    code = "from stretto.runtime.executor.executor import load_native; load_native(); print('fine')"
    done, said = _tried([sys.executable, "-c", code])
    if done:
        yield Finding(area="jobs", name="executor, UCX", state="works", about="the C++ module and UCX load")
        return
    last = said.strip().splitlines()[-1].removeprefix("stretto.errors.StrettoError: ") if said.strip() else "no answer"
    remedy = "pip install 'stretto[runtime]'; from source install libucx-cu12 first, then stretto again"
    yield Finding(area="jobs", name="executor, UCX", state="absent", about=last[-200:], remedy=remedy)


def _gpus() -> Iterator[Finding]:
    if shutil.which("nvidia-smi") is None:
        about = "no nvidia-smi: planning, simulation and jobs on CPUs work; NCCL does not"
        yield Finding(area="hardware", name="GPUs", state="absent", about=about)
        return
    done, said = _tried(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])
    lines = [line for line in said.splitlines() if line.strip()]
    if not done or not lines:
        yield Finding(
            area="hardware", name="GPUs", state="broken", about=(lines or ["nvidia-smi does not answer"])[0][-200:],
            remedy="nvidia-smi must list the GPUs: check the driver, or the container's --gpus",
        )  # fmt: skip
        return
    yield Finding(area="hardware", name="GPUs", state="works", about=f"{len(lines)} x {lines[0]} (driver)")
    yield from _nccl()


def _nccl() -> Iterator[Finding]:
    code = "import torch; print(torch.version.cuda, torch.cuda.is_available(), *torch.cuda.nccl.version())"
    done, said = _tried([sys.executable, "-c", code])
    words = said.split()
    if not done or len(words) < 3:
        remedy = "install a PyTorch with CUDA; stretto takes the one that is there"
        yield Finding(area="hardware", name="NCCL", state="absent", about="PyTorch here has no NCCL", remedy=remedy)
        return
    fine = words[1] == "True"
    about = f"{'.'.join(words[2:])} of PyTorch, CUDA {words[0]}"
    remedy = "" if fine else "torch.cuda.is_available() must be true: the driver may be older than this CUDA"
    yield Finding(area="hardware", name="NCCL", state="works" if fine else "broken", about=about, remedy=remedy)


def _rdma(root: Path = Path("/sys/class/infiniband")) -> Iterator[Finding]:
    ports = sorted(root.glob("*/ports/*/state")) if root.is_dir() else []
    up = [path for path in ports if "ACTIVE" in _text(path)]
    if not ports:
        about = "no InfiniBand or RoCE device; UCX uses TCP and shared memory"
        yield Finding(area="hardware", name="RDMA", state="absent", about=about)
        return
    devices = ", ".join(dict.fromkeys(path.parts[-4] for path in up)) or "none"
    remedy = "" if up else "bring a port up (ibstat), and give the container /dev/infiniband"
    about = f"{len(up)} of {len(ports)} ports active: {devices}"
    yield Finding(area="hardware", name="RDMA", state="works" if up else "broken", about=about, remedy=remedy)


def _shared_memory() -> Iterator[Finding]:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        about = "there is no /dev/shm"
        yield Finding(area="hardware", name="shared memory", state="absent", about=about, remedy="mount a tmpfs there")
        return
    small = free < 256 << 20
    remedy = "docker run --shm-size=2g, or a larger tmpfs" if small else ""
    state: State = "broken" if small else "works"
    about = f"{free / 1e9:.1f} GB free in /dev/shm"
    yield Finding(area="hardware", name="shared memory", state=state, about=about, remedy=remedy)


def _cores() -> Iterator[Finding]:
    count = len(os.sched_getaffinity(0))
    yield Finding(area="hardware", name="cores", state="works", about=f"{count} for this process")


def _lab() -> Iterator[Finding]:
    from ..lab import unavailable

    why = unavailable()
    if why is None:
        yield Finding(area="tools", name="lab", state="works", about="network namespaces and shaped links can be made")
        return
    remedy = "install iproute2; run as root, or allow user namespaces (docker run --privileged)"
    yield Finding(area="tools", name="lab", state="absent", about=why[:200], remedy=remedy)


def _compilers() -> Iterator[Finding]:
    compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if compiler is None:
        about = "none; only an installation from source needs one"
        yield Finding(area="tools", name="C++ compiler", state="absent", about=about)
        return
    done, said = _tried([compiler, "--version"])
    line = said.splitlines()[0] if done and said else compiler
    yield Finding(area="tools", name="C++ compiler", state="works", about=f"{line[:100]}")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _tried(command: list[str]) -> tuple[bool, str]:
    """Whether a command succeeds, and what it says."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    return done.returncode == 0, done.stdout if done.returncode == 0 else done.stderr or done.stdout


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _python, _core, _packages, _executor, _gpus, _rdma, _shared_memory, _cores, _lab, _compilers,
)  # fmt: skip
