# SPDX-License-Identifier: Apache-2.0
"""Collectives on GPU tensors of a group with ranks on several hosts: one program in stages (`runtime.gpu.hosts`)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import InvalidInput, PeerLost, StrettoError
from ...programs import Program
from ...programs.stages import cut
from ..gpu.hosts_programs import program_for
from .buffers import CollectiveCall
from .cuda_clock import cuda
from .gpu_engine import ERRORS, MARGIN_S, MAX_READY, GpuEngine, Ready, _timed_event
from .gpu_hosts_join import HostsSite, join_hosts
from .gpu_layout import GpuBuffers
from .gpu_selection import IN_PLACE
from .gpu_work import GpuFlight
from .launch_queue import Launch, on_stream
from .recording import current
from .selection import ProgramPick

ASK = "ranks on several hosts, which STRETTO_GPU=hosts would run as programs"
CAPTURED = "a group over several hosts inside the capture of a graph"
VERDICT_S = 2.0
"""How long to wait for the words of the rank that was the first to give up."""
SURE_S = 1.0
"""A rank may leave when it is done; who still waits for it after this long waits in vain."""
BEHIND_S = 5.0
"""How much longer than the call itself its part on the network may take: who looks after the call names the rank."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MarkedLaunch(Launch):
    """A launch that any thread may ask about without a call to CUDA."""

    mark: Any

    @property
    def ended(self) -> bool:
        """Whether the GPU is done with it."""
        return bool(self.mark.query())


class HostsGpuEngine(GpuEngine):
    """One communicator's programs on the GPUs of several hosts."""

    takes_pools = False

    def refusal(self, call: CollectiveCall) -> str:
        """Why a call goes to NCCL; empty where it runs as a program. The same on all ranks."""
        # Programs between hosts must be asked for by name, since not all runs on GPUs ended (docs/gpu.md).
        return super().refusal(call) if self._options.between_hosts else ASK

    def _refusal_of(self, given: torch.device) -> str:
        if cuda.is_current_stream_capturing():
            return self._why or CAPTURED
        return super()._refusal_of(given)

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Refused: ranks of other hosts cannot address each other's memory.

        Args:
            count: Elements.
            dtype: Their type.
            device: This rank's GPU.

        Returns:
            Never.

        Raises:
            InvalidInput: Always.
        """
        raise InvalidInput("symmetric memory: the ranks of the group are on several hosts")

    def _join(self, device: torch.device) -> None:
        self._suspect: tuple[str, int, float] = "", 0, 0.0
        made = join_hosts(
            self._group(), self.engine, self.cards, self._store, device, self._options,
            limit_s=self.engine.timeout_s + MARGIN_S, failed=self.fail, look=self._look,
        )  # fmt: skip
        if isinstance(made, str):
            self._why = made
        else:
            self.site = made
            made.watch.add(self)

    def _prepared(self, call: CollectiveCall, buffers: GpuBuffers) -> Ready:
        dtype = str(buffers.source.dtype).removeprefix("torch.")
        key = (call.op, buffers.nbytes, dtype, call.root, buffers.reduce)
        found = self._ready.get(key)
        if found is not None:
            return found
        site = self.site
        assert isinstance(site, HostsSite)
        pick = self._pick(site, call.op, buffers.nbytes, call.root)
        loaded = site.communicator.load(
            pick.program, dtype=dtype, reduce=buffers.reduce or "sum", nbytes=buffers.nbytes
        )
        choice = call.choice(self.engine.name, backend="gpu", why=pick.why, nbytes=buffers.nbytes, pick=pick)
        how = f" {buffers.reduce} {dtype}" if buffers.reduce else ""
        root = f" root {call.root}" if call.op in ("broadcast", "reduce") else ""
        text = f"{call.op}{how} of {buffers.nbytes} bytes{root} as {pick.program.name}"
        if len(self._ready) >= MAX_READY:
            self._ready.clear()
        self._ready[key] = found = (loaded, choice, text)
        return found

    def _pick(self, site: HostsSite, op: str, nbytes: int, root: int) -> ProgramPick:
        """A program of the table that can be cut at hosts, or the one for these hosts; kept by what decides."""
        kind = "all_reduce" if op == "barrier" else op
        key = kind, max(nbytes - 1, 0).bit_length(), root
        if key in site.picks:
            return site.picks[key]
        hosts = [card.host for card in self.cards]
        made, rejected = self.engine.selector.from_table(kind, 1 << key[1], root=root, in_place=kind in IN_PLACE)
        if made is not None:
            try:
                if not isinstance(made.program, Program):
                    raise InvalidInput("streams cannot be cut at hosts")
                cut(made.program, [hosts.index(host) for host in hosts])
            except StrettoError as error:
                rejected.append((made.program.name, str(error)))
                made = None
        if made is None:
            if (kind, root) not in site.programs:
                site.programs[kind, root] = program_for(kind, hosts, root)
            why = f"{len(hosts)} ranks on {len(set(hosts))} hosts: GPU memory inside, the network between"
            why += f"; {site.note}" if site.note else ""
            made = ProgramPick(program=site.programs[kind, root], why=why, rejected=tuple(rejected))
        site.picks[key] = made
        return made

    def _launch(
        self, site: Any, parts: Sequence[tuple[CollectiveCall, GpuBuffers]], prepared: Sequence[Ready], opts: Any
    ) -> GpuFlight:
        """Queue all stages of everything: on the current stream, or the group's own where the call is asynchronous."""
        limit_s = self.engine.limit_s(opts)
        submitted_on = cuda.current_stream(site.device)
        stream = site.stream if getattr(opts, "asyncOp", True) else submitted_on
        blocks = max(int(loaded.blocks) for loaded, _, _ in prepared)
        with site.queue.lock:
            if stream != submitted_on:
                stream.wait_stream(submitted_on)
            # Calls of a group share staging memory.
            if self._last is not None and self._last.stream != stream:
                stream.wait_event(self._last.end)
            site.queue.make_room(stream, blocks, 0)
            recording = current()
            with on_stream(stream):
                for (call, buffers), (loaded, choice, text) in zip(parts, prepared, strict=True):
                    self._post(site.board, text)
                    began = _timed_event(stream) if recording else None
                    site.communicator.launch(loaded, buffers.source, buffers.target, stream, limit_s + BEHIND_S)
                    if buffers.finish is not None:
                        buffers.finish()
                    if recording is not None:
                        ended = recording.expect(f"{call.op} {choice.program}", self.engine.name, buffers.nbytes)
                        site.clock.note(began, _timed_event(stream), ended, None)
                end = cuda.Event()
                end.record(stream)
                mark = site.communicator.mark(stream)
            launch = MarkedLaunch(stream=stream, end=end, blocks=blocks, capture=0, mark=mark)
            site.queue.add(launch)
            self._last = launch
        flight = GpuFlight(
            op=parts[0][0].op, number=self.posted, launch=launch, submitted_on=submitted_on, limit_s=limit_s
        )
        self.flights.append(flight)
        site.watch.wake()
        return flight

    def fail(self, error: Exception, *, tell: bool = True) -> None:
        """End all calls; of all ranks the first to say why is the one that all of them quote."""
        if tell and self.broken is None and isinstance(self.site, HostsSite):
            error = self._verdict(self.site, error)
        super().fail(error, tell=tell)

    def _verdict(self, site: HostsSite, error: Exception) -> Exception:
        # Where the store is gone, too, everybody has words of their own.
        with contextlib.suppress(Exception):
            if site.store.add("failures", 1) == 1:
                site.store.set("failed", f"{type(error).__name__}\n{error}")
                return error
            deadline = time.monotonic() + VERDICT_S
            while time.monotonic() < deadline:
                found = self._told(site)
                if found is not None:
                    return found
                time.sleep(0.01)
        return error

    def _told(self, site: HostsSite) -> Exception | None:
        """What the first rank that gave up has said."""
        if not site.store.check(["failed"]):
            return None
        kind, _, why = site.store.get("failed").decode(errors="replace").partition("\n")
        return ERRORS.get(kind, StrettoError)(why)

    def _look(self) -> None:
        """While the network has something: raise where a rank has given up, or is gone for good."""
        site = self.site
        if not isinstance(site, HostsSite) or self.broken is not None:
            return
        with contextlib.suppress(RuntimeError):
            told = self._told(site)
            if told is not None:
                raise told
        lost = self.engine.job.lost(self.engine.selector.devices)
        text, at, since = self._suspect
        through = site.proxy.through
        if not lost or (lost, through) != (text, at):
            self._suspect = lost, through, time.monotonic()
        elif time.monotonic() - since > SURE_S:
            oldest = self.flights[0].op if self.flights else "a call"
            raise PeerLost(f"{lost} (in {oldest} of group {self.engine.name})")
