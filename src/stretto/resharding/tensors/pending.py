# SPDX-License-Identifier: Apache-2.0
"""Updates that go on while a trainer computes its next step, and what happens when it changes weights meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...errors import InvalidInput, PeerLost, unknown
from ...runtime.torch_backend.cuda_clock import cuda
from .packing import finish_stream

if TYPE_CHECKING:
    from .packing import Tensors
    from .transfer import Round, Transfer

SNAPSHOTS = ("on_write", "now", "wait")


@dataclass(frozen=True, kw_only=True)
class SnapshotPrice:
    """What it costs a trainer to change its weights now, while a version of them is being sent."""

    nbytes: int
    """The bytes of this rank that have not been read yet."""
    copy_s: float
    """Seconds to copy them."""
    wait_s: float
    """Seconds until they have been read."""

    @property
    def cheaper(self) -> str:
        """Which of the two is."""
        return "copy" if self.copy_s <= self.wait_s else "wait"


class SourceGuard:
    """Which rounds have read the trainer's tensors, and early copies of those that have not.

    The thread that sends asks `reading` for every round; the thread that trains calls `before_write` before it changes
    anything. Copies are the packed inputs of rounds to come, so only what is sent is copied, and only once.
    """

    def __init__(
        self, transfer: Transfer, rounds: Sequence[Round], sources: Tensors, *, most_bytes: int | None = None
    ) -> None:
        self._transfer, self._rounds, self._sources, self._most = transfer, list(rounds), sources, most_bytes
        self._lock = threading.Condition()
        self._early: dict[int, torch.Tensor] = {}
        self._next = 0
        self._began = time.monotonic()
        self._packing_s = 0.0
        self._packed_bytes = 0
        self._over = False
        self._here: list[torch.Tensor] | None = None
        self._here_read = False
        self.checksums: dict[str, int] | None = None
        """The checksums of the source tensors at the start of the update; None unless they are wanted."""
        self.refused = ""
        """Why this rank cannot take part in the update; empty where it can."""
        self.copied_bytes = 0
        """The bytes that were copied so far because the weights changed."""

    @contextmanager
    def reading(self, at: int) -> Iterator[torch.Tensor | None]:
        """While the sender packs a round; gives the packed input if it was copied before."""
        with self._lock:
            if at == 0:
                self._began = time.monotonic()
            begin = time.monotonic()
            yield self._early.pop(at, None)
            self._packing_s += time.monotonic() - begin
            self._packed_bytes += self._rounds[at].in_bytes
            self._next = at + 1
            self._lock.notify_all()

    @contextmanager
    def reading_here(self) -> Iterator[list[torch.Tensor] | None]:
        """While the parts that stay on this rank are copied; gives early copies of them, if there are any."""
        with self._lock:
            yield self._here
            if self._transfer.held_here(self._sources):
                # The trainer may be on another stream, and copies were made on that one.
                finish_stream(self._sources)
            self._here, self._here_read = None, True
            self._lock.notify_all()

    def end(self) -> None:
        """The update is over, well or not: nothing is read any more."""
        with self._lock:
            self._over = True
            self._early.clear()
            self._lock.notify_all()

    def price(self) -> SnapshotPrice:
        """What changing the weights would cost now, by the rates of this update so far."""
        with self._lock:
            return self._price()

    def before_write(self, how: str = "cheaper") -> str:
        """Return once the tensors may change: after a copy of what has not been read, or after it has been.

        Args:
            how: "copy", "wait", or "cheaper" for the one that takes less time by `price`.

        Returns:
            What was done: "copy", "wait", or "nothing" if everything had been read already.

        Raises:
            InvalidInput: `how` is none of these words.
        """
        if how not in ("copy", "wait", "cheaper"):
            raise unknown("how", how, ("copy", "wait", "cheaper"))
        done = "nothing"
        with self._lock:
            if not self._over and not self._here_read and self._here is None:
                self._here = [box.clone() for box in self._transfer.held_here(self._sources)]
                finish_stream(self._here)
            while not self._over and (self._left() or (self._here is None and not self._here_read)):
                price = self._price()
                room = self._most is None or price.nbytes <= self._most - self.copied_bytes
                if self._left() and room and (how == "copy" or (how == "cheaper" and price.cheaper == "copy")):
                    self._copy()
                    done = "copy"
                    break
                done = "wait"
                self._lock.wait(0.05)
            self._transfer.finish_packing()
        return done

    def _left(self) -> list[int]:
        return [at for at in range(self._next, len(self._rounds)) if at not in self._early]

    def _price(self) -> SnapshotPrice:
        nbytes = sum(self._rounds[at].in_bytes for at in self._left())
        rate = self._packed_bytes / self._packing_s if self._packing_s > 0 else 0.0
        elapsed = time.monotonic() - self._began
        each = elapsed / self._next if self._next else 0.0
        return SnapshotPrice(
            nbytes=nbytes, copy_s=nbytes / rate if rate else 0.0, wait_s=each * len(self._left()) if each else 1e9
        )

    def _copy(self) -> None:
        device = next((t.device for t in self._sources if t is not None), None)
        for at in self._left():
            self._early[at] = self._transfer.pack_round(self._rounds[at], self._sources, device)
            self.copied_bytes += self._rounds[at].in_bytes
        if device is not None and device.type == "cuda":
            # The stream that sends these copies must see them whole.
            cuda.current_stream(device).synchronize()


class PendingUpdate:
    """An update that another thread of this rank carries out; `wait` returns its version."""

    def __init__(self, run: Callable[[], int], guard: SourceGuard | None) -> None:
        self._guard = guard
        self._version: int | None = None
        self._error: BaseException | None = None
        stream: Any = None
        if torch.cuda.is_available() and cuda.is_initialized():
            # After what the caller has put onto its stream so far, and beside what it will.
            stream = cuda.Stream()
            stream.wait_stream(cuda.current_stream())

        def work() -> None:
            try:
                with cuda.stream(stream) if stream is not None else nullcontext():
                    self._version = run()
            except BaseException as error:
                self._error = error
            finally:
                if guard is not None:
                    guard.end()

        self._thread = threading.Thread(target=work, name="stretto-weights", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the update has ended, well or not."""
        return not self._thread.is_alive()

    @property
    def copied_bytes(self) -> int:
        """The bytes that this rank has copied because its weights changed while they were sent."""
        return self._guard.copied_bytes if self._guard is not None else 0

    def before_write(self, how: str = "cheaper") -> str:
        """Call this before the source tensors change; see `SourceGuard.before_write`. Servers need not."""
        return self._guard.before_write(how) if self._guard is not None else "nothing"

    def price(self) -> SnapshotPrice | None:
        """What changing the weights would cost now; None on a rank that sends nothing."""
        return self._guard.price() if self._guard is not None else None

    def protect(self, optimizer: Any) -> Any:
        """Let an optimizer call `before_write` before its next steps; returns the hook's handle, to remove it."""
        if not hasattr(optimizer, "register_step_pre_hook"):
            raise InvalidInput(f"optimizer: must be one of PyTorch's, not {type(optimizer).__name__}")

        def hook(*_: object) -> None:
            self.before_write()

        return optimizer.register_step_pre_hook(hook)

    def wait(self, timeout_s: float | None = None) -> int:
        """The version, once it is current on all ranks; raises what went wrong instead.

        Args:
            timeout_s: seconds to wait; None for as long as it takes.

        Returns:
            The number of the version.

        Raises:
            PeerLost: a rank was lost, or the update has not ended within `timeout_s`.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise PeerLost(f"timeout_s: the update has not ended within {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        assert self._version is not None
        return self._version
