# SPDX-License-Identifier: Apache-2.0
"""How the command line that is being carried out was asked to talk."""

from __future__ import annotations

import logging

from ..process_state import STATE, ProcessPart

INTERRUPTED = 130
"""The exit code after Ctrl-C."""


class CommandSession(ProcessPart):
    """Whether the command is to be quiet or verbose, and whether standard output belongs to JSON alone."""

    def __init__(self) -> None:
        self.quiet = False
        """Only results and errors: no progress bar, no word about written files, no next step."""
        self.json_alone = False
        """``--json -``: standard output gets the JSON and nothing else."""

    def begin(self) -> None:
        """Forget what an earlier command line of this process asked for."""
        self.quiet = self.json_alone = False

    def be_verbose(self) -> None:
        """Send what the library logs to standard error."""
        logging.basicConfig(level=logging.INFO, format="stretto: %(name)s: %(message)s")
        logging.getLogger("stretto").setLevel(logging.INFO)


SESSION = STATE.part(CommandSession)
