# SPDX-License-Identifier: Apache-2.0
"""Plans and measured costs on disk: the next start of a job begins with what the last one ended with.

One file for each step of a job, named by what has to be the same for it to be of use: versions, script, ranks and their
hosts, and the calls of an iteration. Nothing in a file is trusted: it is checked as any file from outside, its plan has
to fit its step, ranks compare the step with their own calls, and vote on the plan as on any other.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..errors import InvalidInput, StrettoError
from ..files import cache_directory, convert, parse_json, read_text, typed, write_file
from .messages import MAX_MESSAGE_BYTES, CapturedStep, Identity, Name, decode_captured, decode_plan
from .recall import SCRIPT, difference
from .refine import LEAST, MOST
from .transport import private_folder
from .worker import PlanReply

LOG = logging.getLogger("stretto.control")
VARIABLE = "STRETTO_PLANS"
OFF = "off"
MAX_KEPT = 64
"""Files of a folder; the ones that were written longest ago go first."""
MAX_FILE_BYTES = 2 * MAX_MESSAGE_BYTES
ENDING = ".plan.json"
MAX_NAMED = 3
"""Differences that are named."""


class KeptPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a job leaves for its next start."""

    stretto: Literal["kept plan"] = "kept plan"
    version: Literal[1] = 1
    key: Name
    digest: Name
    """The digest of the recorded step."""
    captured: CapturedStep
    answer: PlanReply
    factors: dict[str, Annotated[float, Meta(ge=LEAST, le=MOST)]] = {}
    """What was learnt of channels beside what was probed."""
    on_own: bool = False
    """Whether the job's own backend, not ours, was the faster one without a plan."""


def plans_folder(given: str = "") -> Path | None:
    """Where plans are kept: what is given, else ``$STRETTO_PLANS``, else in the user's cache; None for ``off``."""
    chosen = given or os.environ.get(VARIABLE, "")
    if chosen == OFF:
        return None
    return Path(chosen) if chosen else cache_directory() / "plans"


class _Heading(msgspec.Struct, frozen=True, kw_only=True):
    """What a kept plan is for; the rest of its file is passed over."""

    class Step(msgspec.Struct, frozen=True, kw_only=True):
        """The part of a kept plan's file about the recorded step."""

        identity: Identity = {}

    captured: Step


class KeptPlans:
    """The files of one folder, which need not be there yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._complained: set[str] = set()

    def load(self, key: str) -> KeptPlan | None:
        """What was kept under a key; None where nothing was. A file that cannot be used is said to be, once."""
        path = self._path(key)
        try:
            if not path.is_file():
                return None
            private_folder(self.folder)
            kept = convert(parse_json(read_text(path, max_bytes=MAX_FILE_BYTES), where="file"), KeptPlan, where="file")
            if kept.key != key:
                raise InvalidInput(f"key: is {kept.key}")
            workload, cluster = decode_captured(kept.captured)
            decode_plan(kept.answer.body, kept.answer.hash).check(workload, cluster)
            if workload.digest != kept.digest:
                raise InvalidInput(f"digest: the step's is {workload.digest}, not {kept.digest}")
        except (OSError, StrettoError) as error:
            self._complain(f"the kept plan {path.name} is ignored: {error}")
            return None
        return kept

    def why_none(self, key: str, identity: Mapping[str, str]) -> str:
        """Why `load` had nothing for a key: what the plan that comes next to it was made with, in words."""
        script = identity.get(SCRIPT, "")
        if self._path(key).is_file():
            return f"the kept plan {self._path(key).name} cannot be used"
        others = [found for found in self._identities() if found.get(SCRIPT) == script]
        if not others:
            return f"no plan is kept for {script or 'the job'}"
        differs = min((difference(found, identity) for found in others), key=len)
        more = f" and {len(differs) - MAX_NAMED} more" if len(differs) > MAX_NAMED else ""
        return f"the plan that is kept for {script} was made with other {', '.join(differs[:MAX_NAMED])}{more}"

    def _identities(self) -> list[Mapping[str, str]]:
        found: list[Mapping[str, str]] = []
        for path in sorted(self.folder.glob(f"*{ENDING}"))[:MAX_KEPT]:
            with contextlib.suppress(OSError, StrettoError, msgspec.MsgspecError):
                heading = msgspec.json.decode(read_text(path, max_bytes=MAX_FILE_BYTES), type=typed(_Heading))
                found.append(heading.captured.identity)
        return found

    def save(self, kept: KeptPlan) -> None:
        """Keep a plan; a folder that cannot be written is said to be, once."""
        try:
            private_folder(self.folder)
            write_file(self._path(kept.key), msgspec.json.encode(kept) + b"\n")
            self._prune()
        except (OSError, StrettoError) as error:
            self._complain(f"the plan is not kept in {self.folder}: {error}")

    def forget(self, key: str) -> None:
        """The plan was slower than none, or the job does something else now."""
        with contextlib.suppress(OSError):
            self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{ENDING}"

    def _prune(self) -> None:
        files = sorted(self.folder.glob(f"*{ENDING}"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in files[MAX_KEPT:]:
            path.unlink(missing_ok=True)

    def _complain(self, text: str) -> None:
        if text not in self._complained:
            self._complained.add(text)
            LOG.warning("stretto: %s", " ".join(text.split()))


class ReadyPlan:
    """A plan that need not be made: it answers like a planner."""

    def __init__(self, answer: PlanReply) -> None:
        self._answer = answer

    def poll(self) -> PlanReply | None:
        """The kept plan: it is there at once."""
        return self._answer

    def cancel(self) -> None:
        """Do nothing: no planner runs."""
        return
