# SPDX-License-Identifier: Apache-2.0
"""Results kept on disk, addressed by a hash of everything that they depend on.

An entry is two files: the program in its text form, and its certificate as JSON with a checksum of the program. Both
are written to a temporary name and moved into place. An entry that cannot be read, does not verify, or no longer gives
the time it promises is ignored with a warning.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import InvalidInput, StrettoError
from ..files import MAX_BYTES, cache_directory, parse_json, read_text
from ..programs import Program, SymmetricProgram
from ..programs.formats import sniff, symmetric_text
from ..programs.formats import text as text_form
from ..simulator import simulate
from . import certificate as certificates
from .certificate import Synthesis
from .matching import serves

if TYPE_CHECKING:
    from .problem import SynthesisProblem

ROOMS = ("algorithms", "programs", "simulator", "synthesis")
MAX_TRANSFERS = 1 << 18
"""The largest program that is cached: larger ones take longer to read back than to make again."""
CLOSE = 1e-9

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Cache:
    """The entry of one result in the cache."""

    key: str
    folder: Path

    @classmethod
    def of(cls, problem: SynthesisProblem, options: Mapping[str, Any]) -> Cache:
        """The entry for the result of a search for this problem with these options."""
        sketch = problem.sketch
        asked = {
            "collective": problem.collective.digest,
            "cluster": problem.cluster.digest,
            "nbytes": float(problem.nbytes),
            "alpha": problem.alpha,
            "contention": problem.contention,
            "seed": problem.seed,
            "lower": problem.lower,
            "runtime": repr(problem.runtime),
            "helpers": problem.helpers,
            "sketch": None if sketch is None else repr(sketch),
            "code": code_digest(),
            **options,
        }
        text = msgspec.json.encode(asked, order="deterministic")
        return cls(key=hashlib.sha256(text).hexdigest()[:32], folder=cache_directory() / "synthesis")

    @property
    def program_file(self) -> Path:
        """The path of the program's text form."""
        return self.folder / f"{self.key}.prog"

    @property
    def certificate_file(self) -> Path:
        """The path of the file that holds the certificate and the checksum of the program's file."""
        return self.folder / f"{self.key}.json"

    def load(self, problem: SynthesisProblem) -> Synthesis | None:
        """The result, proved and simulated anew; None if there is none that can be trusted."""
        if not self.certificate_file.exists():
            return None
        try:
            return self._read(problem)
        except StrettoError as error:
            log.warning("cache entry ignored: %s", error)
            return None

    def _read(self, problem: SynthesisProblem) -> Synthesis:
        where = str(self.certificate_file)
        data = parse_json(read_text(self.certificate_file), where=where)
        if not isinstance(data, dict) or not isinstance(data.get("result"), str):
            raise InvalidInput(f"{where}: not a cache entry")
        certificate, candidates = certificates.loads(data["result"], where=where)
        text = read_text(self.program_file)
        if hashlib.sha256(text.encode()).hexdigest() != data.get("sha256"):
            raise InvalidInput(f"{self.program_file}: not the program that its certificate is for")
        form = symmetric_text if sniff(text) == "symmetric" else text_form
        program = form.loads(text, where=str(self.program_file))
        self._check(program, problem, certificate.time_us)
        return Synthesis(program=program, certificate=certificate, candidates=candidates, cached=True)

    def _check(self, program: Program | SymmetricProgram, problem: SynthesisProblem, time_us: float) -> None:
        program.verify()
        if not serves(program.collective, problem):
            raise InvalidInput(f"{self.program_file}: does {program.collective!r}, not {problem.collective!r}")
        again = simulate(
            program, problem.cluster, nbytes=problem.nbytes, alpha=problem.alpha, contention=problem.contention
        ).total_us
        if abs(again - time_us) > CLOSE * max(again, time_us):
            raise InvalidInput(f"{self.program_file}: takes {again:.6g} us, not {time_us:.6g}")

    def save(self, found: Synthesis) -> None:
        """Write a result to the cache; where the disk is full or read-only, only a warning is logged."""
        program = found.program
        count = len(program.dst)
        if count > MAX_TRANSFERS:
            log.info("not cached: %d transfers are more than %d", count, MAX_TRANSFERS)
            return
        text = symmetric_text.dumps(program) if isinstance(program, SymmetricProgram) else text_form.dumps(program)
        if len(text) > MAX_BYTES:
            return
        result = certificates.dumps(found.certificate, found.candidates).decode()
        entry = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "result": result}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _write(self.program_file, text.encode())
            _write(self.certificate_file, msgspec.json.encode(entry))
        except OSError as error:
            log.warning("not cached: %s: %s", error.filename or self.folder, error.strerror or error)


def _write(path: Path, content: bytes) -> None:
    """Write a file so that readers see either the old or the new content."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


@cache
def code_digest() -> str:
    """A hash of the code that a result depends on: another version searches anew."""
    root = Path(__file__).parents[1]
    state = hashlib.sha256()
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            state.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return state.hexdigest()[:16]
