# SPDX-License-Identifier: Apache-2.0
"""The results of a synthesis: the program, a certificate of how good it is, and all candidates."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from ..collectives import Collective
from ..files import convert, parse_json, write_file
from ..programs import Lowered, Program, SymmetricProgram
from ..programs.formats.mscclpp_wide import PlanForm
from ..units import format_bytes, format_us
from .helpers import HelperDuty, in_words

PACKAGES = ("stretto", "numpy", "highspy", "ortools")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One program that was tried, with its simulated time; or the reason why there is none.

    A candidate with a time *and* a reason cannot be turned into a file that the runtimes take (`lowering.too_long`).
    """

    maker: str
    name: str = ""
    time_us: float | None = None
    seconds: float = 0.0
    """The time from the start of the maker until the program was made."""
    reason: str = ""

    def __str__(self) -> str:
        if self.time_us is None:
            return f"{self.maker}: {self.reason}"
        return f"{self.maker}: {self.name} {format_us(self.time_us)}"


@dataclass(frozen=True, kw_only=True, eq=False)
class ProvedProgram:
    """A program that was proved and simulated, with its maker and time."""

    maker: str
    program: Program | SymmetricProgram
    time_us: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """A certificate of how good a program is: its simulated time beside a lower bound for all algorithms.

    `maker` made the program in `seconds`; the whole search took `search_s`. `bound_reason` says in words what no
    algorithm can avoid. Both hold for `nbytes` on the cluster with `cluster_digest` under `alpha` and `contention`.
    """

    program: str
    maker: str
    time_us: float
    bound_us: float
    bound_reason: str
    bound_method: str
    seconds: float
    search_s: float
    collective: str
    collective_digest: str
    cluster: str
    cluster_digest: str
    nbytes: float
    alpha: str
    contention: str
    seed: int
    budget_s: float
    lowered_us: float | None = None
    """The time of the instruction streams, where lowering was searched too."""
    runtime: str = ""
    """The runtime whose prices `lowered_us` includes; empty: links alone."""
    form: str = ""
    """How the wide steps of an MSCCL++ plan are carried out; empty for instruction streams."""
    steps: str = ""
    """How the GPU executor carries the program out as fused steps; empty for other runtimes."""
    cut: str = ""
    """Why a search for a plan with more time might find another one; empty where every candidate was tried."""
    unfit_for_old: str = ""
    """Why the original MSCCL runtime (NCCL 2.8 to 2.12) cannot load the instruction streams; empty where it can."""
    versions: dict[str, str] = field(default_factory=dict)
    helpers: tuple[HelperDuty, ...] = ()
    """What the program asks of devices outside the group."""

    @property
    def gap(self) -> float:
        """The relative distance of the time to the bound: 0.02 is two per cent above it."""
        return self.time_us / self.bound_us - 1 if self.bound_us > 0 else 0.0

    def __str__(self) -> str:
        return (
            f"{self.collective} of {format_bytes(self.nbytes)} on {self.cluster}: {format_us(self.time_us)}, "
            f"{100 * self.gap:.2f} % above the bound of {format_us(self.bound_us)} ({self.bound_reason}); "
            f"{self.program} by {self.maker} in {self.seconds:.2f} s{'; ' * bool(self.helpers)}{in_words(self.helpers)}"
        ) + self._price()

    def _price(self) -> str:
        if not self.runtime or self.lowered_us is None:
            return ""
        price_us = self.lowered_us - self.time_us
        gap = f", {self.runtime_gap_text}" if self.bound_us > 0 else ""
        form = f" ({self.form or self.steps})" if self.form or self.steps else ""
        # A plan that loops can be faster than its program piece by piece: then there is no price to tell.
        price = f": instructions cost {format_us(price_us)}" if price_us >= 0 else ""
        return f"; {format_us(self.lowered_us)} on {self.runtime}{form}{gap}{price}"

    @property
    def runtime_gap_text(self) -> str:
        """That distance in words."""
        if self.runtime_gap < -1e-9 and self.by_switch:
            return "faster than the bound, which knows no switch that adds up"
        if self.runtime_gap < -1e-9:
            # The price list has the memory of a GPU that ranks share instead of the cluster's links.
            return "faster than the cluster's links, for which this runtime has the memory that ranks share"
        return f"{100 * self.runtime_gap:.2f} % above the bound"

    @property
    def by_switch(self) -> bool:
        """Whether a switch adds up and copies (NVLink SHARP), which has not been run on a GPU."""
        return "multicast=1" in self.form.split(",")

    @property
    def runtime_gap(self) -> float:
        """The relative distance of the time on the runtime to the bound of the links."""
        took = self.time_us if self.lowered_us is None else self.lowered_us
        return took / self.bound_us - 1 if self.bound_us > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Lowering:
    """The instruction streams that ran fastest, and how they were made from the program."""

    lowered: Lowered
    time_us: float
    instances: int
    fifo_depth: int
    tried: tuple[Candidate, ...] = ()
    form: PlanForm | None = None
    """How an MSCCL++ plan of wide steps is carried out; None for instruction streams."""
    steps: str = ""
    """How the GPU executor carries the program out as fused steps; empty for instruction streams and plans."""
    cut: str = ""
    """How many programs were not tried as plans for want of time; empty where all were."""

    @property
    def unfit_for_old(self) -> str:
        """Why the original MSCCL runtime (NCCL 2.8 to 2.12) cannot load the streams; empty where it can."""
        from ..programs.formats.msccl_xml import unfit_for_old

        return unfit_for_old(self.lowered)


@dataclass(frozen=True, kw_only=True, eq=False)
class Synthesis:
    """The best `program` that was found, its `certificate`, and all `candidates` (fastest first, then the refusals).

    For more than 256 ranks the program may be a `SymmetricProgram`, in which one group of ranks stands for all.

    Where ``lower`` was asked for, `lowering` holds the best instruction streams. `cached` says that the result was read
    from the cache. `hosts` gives the host of each rank on the cluster that the program was made for.
    """

    program: Program | SymmetricProgram
    certificate: Certificate
    candidates: tuple[Candidate, ...] = ()
    lowering: Lowering | None = None
    cached: bool = False
    hosts: tuple[int, ...] | None = None

    @property
    def time_us(self) -> float:
        """The simulated time of the program in microseconds."""
        return self.certificate.time_us

    @property
    def plain(self) -> Program:
        """The program with the transfers of all ranks; a `SymmetricProgram` is written out."""
        return self.program.expand() if isinstance(self.program, SymmetricProgram) else self.program

    @property
    def runnable(self) -> Program | SymmetricProgram | Lowered:
        """The instruction streams where there are some, else the program."""
        return self.program if self.lowering is None else self.lowering.lowered

    @property
    def collective(self) -> Collective:
        """The collective of the program, with the chunks that its maker chose."""
        return self.program.collective

    def save(self, path: str | Path, **options: Any) -> Path:
        """Write the program (.txt, .prog, .xml, .json) and its certificate beside it (``NAME.certificate.json``).

        Files for MSCCL and MSCCL++ say that they are for sizes from half of the one that was asked for to just below
        twice that; `min_bytes` and `max_bytes` among the `options` (of `save_program`) say otherwise. MSCCL++ plans
        use port channels between the hosts of the cluster. Returns the path of the certificate.
        """
        from ..programs.formats.sizes import range_around

        path = Path(path)
        low, high = range_around(self.certificate.nbytes)
        options = {"hosts": self.hosts, "min_bytes": low, "max_bytes": high} | options
        self.write(path, **options)
        beside = certificate_path(path)
        write_file(beside, msgspec.json.format(dumps(self.certificate, self.candidates), indent=2) + b"\n")
        return beside

    def write(self, path: Path, **options: Any) -> None:
        """Write the program alone, as wide steps where these are faster; `options` are those of `save_program`."""
        from ..programs.formats import format_of, save_program

        kind = format_of(path)
        form = None if self.lowering is None else self.lowering.form
        if kind == "mscclpp" and form is not None and set(options) <= {"hosts", "min_bytes", "max_bytes"}:
            save_program(self.program, path, form=form, **options)
        else:
            save_program(self.program if kind == "text" else self.runnable, path, **options)

    def __repr__(self) -> str:
        return f"<Synthesis {self.certificate}>"


def certificate_path(path: Path) -> Path:
    """The path of the certificate that belongs to a program file."""
    return path.with_name(path.stem + ".certificate.json")


@dataclass(frozen=True, kw_only=True)
class _File:
    certificate: Certificate
    candidates: tuple[Candidate, ...] = ()


def dumps(certificate: Certificate, candidates: tuple[Candidate, ...] = ()) -> bytes:
    """The JSON form of a certificate."""
    return msgspec.json.encode(_File(certificate=certificate, candidates=candidates))


def loads(text: str, *, where: str = "certificate") -> tuple[Certificate, tuple[Candidate, ...]]:
    """Read the JSON form; errors name the field."""
    form = convert(parse_json(text, where=where), _File, where=where)
    return form.certificate, form.candidates


@cache
def versions() -> dict[str, str]:
    """The versions of Python and of the packages that the search depends on, without importing them."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
