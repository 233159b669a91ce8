# SPDX-License-Identifier: Apache-2.0
"""Which ranks of a job are lost, asked through the job's store after a call of gloo's has failed.

gloo says that a connection has ended or that nothing came in time, but not from which rank. So every rank whose call
failed answers a roll call, and the ranks that do not answer are the lost ones. The first rank to find out writes the
answer down: it leaves soon, and the ranks whose calls fail because of that must not take it for the lost one.
"""

from __future__ import annotations

import contextlib
import time

from .meeting import Store

PATIENCE_S = 5.0
"""How long a rank that fails later than another is waited for: calls of one iteration time out at different moments."""
PAUSE_S = 0.02
ANSWER = "answer"
STORE_GONE = "the process that holds the job's store is gone (rank 0, where no launcher such as torchrun holds it)"
"""All that can be known when nobody can be asked any more."""


class GlooRollCall:
    """One for each group of gloo's communicators; after its first failure no call on them can succeed."""

    def __init__(
        self, store: Store, rank: int, size: int, patience_s: float = PATIENCE_S, *, failed: str = "a call of gloo's"
    ) -> None:
        self._store, self._rank, self._size, self._patience_s = store, rank, size, patience_s
        self._failed = failed
        """What has failed when ranks are asked, for the message."""

    def tell(self, text: str) -> None:
        """Write down which rank is lost, for ranks whose calls fail later."""
        # The store may be gone with the lost rank.
        with contextlib.suppress(Exception):
            if not self._store.check([ANSWER]):
                self._store.set(ANSWER, text)

    def told(self) -> str:
        """What another rank has written down; empty when nothing has been, or when the store is gone."""
        with contextlib.suppress(Exception):
            if self._store.check([ANSWER]):
                return self._store.get(ANSWER).decode(errors="replace")
        return ""

    def lost(self) -> str:
        """Which ranks do not answer, or that the store is gone, too, in words; empty when all ranks answer."""
        try:
            return self._ask()
        except Exception:
            return STORE_GONE

    def _ask(self) -> str:
        self._store.set(f"here/{self._rank}", "")
        missing = list(range(self._size))
        deadline = time.monotonic() + self._patience_s
        while True:
            told = self.told()
            if told:
                return told
            missing = [rank for rank in missing if not self._store.check([f"here/{rank}"])]
            if not missing:
                return ""
            if time.monotonic() > deadline:
                break
            time.sleep(PAUSE_S)
        names = f"rank {missing[0]} does" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} do"
        text = f"{names} not answer: {self._failed} has failed"
        self.tell(text)
        return text
