# SPDX-License-Identifier: Apache-2.0
"""The controller of one `stretto run`, in a process of its own: whatever ends it, the job goes on with its exit code.

``python -m stretto.control.controller_process FOLDER BUDGET_S PLANS`` serves at the socket in a folder until its
standard input ends, which it also does when `stretto run` is killed. What it knows is in a file of the folder, as the
process that starts it has no gRPC, and no threads of gRPC's, itself.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from ..children import Child
from ..errors import InvalidInput, StrettoError
from .messages import CapturedStep, Status, decode, encode
from .transport import make_token, read_token

STATUS_EVERY_S = 2.0
END_S = 15.0
"""How long a controller may take for its last status."""
RESTART_S = 0.5
MAX_RESTARTS = 5
READY = "ready"
ENDS = b"a signal is to end the job\n"
"""The line on the controller's standard input by which its parent says so."""


class ControllerProcess:
    """Starts the process, starts it again when a signal or an error has ended it, and has its last status."""

    def __init__(self, folder: Path, budget_s: float, say: Callable[[str], None], plans: Path | None = None) -> None:
        self.address = f"unix:{folder}/socket"
        self.token_path = folder / "token"
        make_token(self.token_path)
        self._folder, self._budget_s, self._say = folder, budget_s, say
        self._plans = str(plans.absolute()) if plans is not None else ""
        self._known: list[Status] = []
        self._restarts = 0
        self._hushed = False
        self._ending = threading.Event()
        here, there = os.pipe()
        try:
            self._process = self._spawn(there)
        finally:
            os.close(there)
        with open(here, "rb") as words:
            said = words.read().decode(errors="replace")
        if said not in (READY, ""):
            self._process.wait()
            raise InvalidInput(said)
        self._thread = threading.Thread(target=self._watch, name="stretto-controller", daemon=True)
        self._thread.start()

    def job_ends(self) -> None:
        """A signal is to end the job: ranks that go from here on are no hang. May be called by a handler of signals."""
        self._hushed = True
        self._pass_on()

    def _pass_on(self) -> None:
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                # The line is written past the pipe's buffer, which close() may be using.
                os.write(self._process.stdin.fileno(), ENDS)

    def close(self) -> list[Status]:
        """End the process.

        Returns:
            What each of its lives said last, in order; empty where none has said anything.
        """
        self._ending.set()
        # A controller that has just ended may be started again once more before this.
        self._thread.join(END_S)
        process = self._process
        if process.poll() and self._restarts <= MAX_RESTARTS:
            self._say(f"the controller ended by {_name(process.returncode)} just before the job did")
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            self._say("the controller did not answer at the end and was killed; what it said last counts")
        self._remember()
        return self._known

    def captured(self) -> CapturedStep | None:
        """The training step that the job recorded, after `close`; None if it recorded none."""
        with contextlib.suppress(OSError, StrettoError):
            return decode((self._folder / "captured").read_bytes(), CapturedStep)
        return None

    def _spawn(self, first_words: int | None = None) -> Child:
        """Start the process; it says whether it listens to the descriptor `first_words`, and closes that."""
        # Standard output is the job's; what a `sitecustomize` of the user's prints there has been printed once already.
        given = [] if first_words is None else [first_words]
        return Child(
            [sys.executable, "-m", __name__, str(self._folder), str(self._budget_s), self._plans, *map(str, given)],
            stdin=subprocess.PIPE, stderr=None, keep=given,
        )  # fmt: skip

    def _watch(self) -> None:
        """Thread: looks after the process until `close`."""
        while not self._ending.wait(RESTART_S):
            code = self._process.poll()
            if code is None:
                continue
            self._restarts += 1
            again = self._restarts <= MAX_RESTARTS
            then = "it is started again, and training goes on" if again else "training goes on without it"
            self._say(f"the controller ended by {_name(code)}; {then}")
            if not again:
                return
            self._remember()
            self._process = self._spawn()
            if self._hushed:
                self._pass_on()

    def _remember(self) -> None:
        path = self._folder / "status"
        with contextlib.suppress(OSError, StrettoError):
            self._known.append(decode(path.read_bytes(), Status))
            path.unlink()


def _name(code: int) -> str:
    if code >= 0:
        return f"itself with exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def main(folder: Path, budget_s: float, plans: str = "", first_words: int | None = None) -> None:
    """What the other process does.

    Args:
        folder: Where its socket, token, and what it says are.
        budget_s: How long to search for a plan.
        plans: The folder of plans that are kept; empty: none are.
        first_words: The descriptor that is told whether it listens.
    """
    # gRPC would print lines of its own.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from .controller import Controller

    try:
        kept = Path(plans) if plans else None
        controller = Controller(memory=folder / "state.json", budget_s=budget_s, plans=kept)
        server = controller.serve(f"unix:{folder}/socket", token=read_token(folder / "token"))
    except StrettoError as error:
        _tell(first_words, str(error))
        raise
    _tell(first_words, READY)
    try:
        while True:
            if select.select([sys.stdin], [], [], STATUS_EVERY_S)[0]:
                if not os.read(sys.stdin.fileno(), len(ENDS)):
                    break
                controller.hush()
            _write(folder, "status", controller.status())
    finally:
        server.close()
    _write(folder, "status", controller.status())
    captured = controller.captured()
    if captured is not None:
        _write(folder, "captured", captured)
    controller.close()


def _tell(first_words: int | None, text: str) -> None:
    if first_words is not None:
        with open(first_words, "w") as words:
            words.write(text)


def _write(folder: Path, name: str, message: Status | CapturedStep) -> None:
    part = folder / f"{name}.part"
    # The folder is gone with a `stretto run` that was killed.
    with contextlib.suppress(OSError):
        part.write_bytes(encode(message))
        part.rename(folder / name)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:5]))
    except StrettoError:
        # The process that started this one has been told why.
        sys.exit(2)
