# SPDX-License-Identifier: Apache-2.0
"""`stretto weights run`: the weights of a model between real processes, beside what they cost without a plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ...errors import InvalidInput, unknown
from ...weights.models import ModelShapes
from ...weights.parallel import ParallelDegrees
from .. import Tensor
from .describe import AnyTensor, TensorPart
from .plain import GatherBroadcast, Locals, PlainMessages, SymmetricPull
from .weight_tensors import empty, exact, filled, parts, placed_model, tile
from .weights import STAGING_BYTES, WeightSync

SYSTEMS = ("stretto", "send_recv", "gather_broadcast")
GPU_SYSTEMS = ("passed_on", "gather_direct", "symmetric_pull", "nccl_send_recv", "nccl_gather_broadcast")
"""On GPUs the first three run on our executor, with their own plans: the last with the best broadcast that we find,
`gather_direct` with plain messages; `passed_on` is the plan that lets servers pass weights on, also where all ranks are
on one GPU. `symmetric_pull` is by hand on PyTorch's symmetric memory, the others by NCCL."""
LEAD_S = 0.05
"""Between agreeing on the beginning of a run and the beginning."""
TRAINED = {"cpu": 256, "cuda": 4096}
"""The width of the matrices that a trainer multiplies while weights are sent."""
STEPS = 8
"""The steps of a trainer that are timed alone."""


@dataclass(frozen=True, kw_only=True)
class WeightTimes:
    """What one system took."""

    system: str
    exact: bool
    """Whether every server had exactly the trainers' bits."""
    times_s: tuple[float, ...]
    """From the agreed beginning until the last rank's end, of each run."""
    stopped_s: float
    """How long a server cannot serve: while its memory is written."""

    @property
    def time_s(self) -> float:
        """The median."""
        return median(self.times_s)


@dataclass(frozen=True, kw_only=True)
class TrainingTimes:
    """What sending costs a trainer, whose step is a matrix product; of the rank that suffers most."""

    alone_s: float
    """The time of a step while nothing is sent."""
    slowdown: float
    """The time of a step while weights are sent over that of one alone."""
    update_s: float
    """From the beginning of an update until its end."""
    lost_s: float
    """Training time that an update costs: what it takes less the steps that were done meanwhile."""
    steps: int


@dataclass(frozen=True, kw_only=True)
class WeightRun:
    """What `run_weights` has measured."""

    model: ModelShapes
    nbytes: int
    bound_us: float
    predicted_us: float
    systems: tuple[WeightTimes, ...]
    slowdown: float
    """The time of a trainer's step while weights are sent over that of one alone."""
    route: str = "executor"
    """How ours moved the bytes: by the executor, on GPU memory, through pinned memory, or by messages."""
    copied_us: float = 0.0
    """How long one copy of what servers get takes on a GPU, on all of them at the same time; 0 on CPUs."""


def run_weights(
    model: ModelShapes, *, trainer: ParallelDegrees | str, server: ParallelDegrees | str, runs: int = 3,
    systems: Sequence[str] = SYSTEMS, staging_bytes: int = STAGING_BYTES, device: str = "cpu",
) -> WeightRun:  # fmt: skip
    """Move a model's weights, in bf16, between the ranks of the default process group; all of them call this.

    Args:
        model: the tensors.
        trainer: the trainers' degrees; they are the first ranks, unless they say which.
        server: the servers' degrees; they are the next ranks.
        runs: how often each system runs for the clock, after one run whose bits are compared.
        systems: which of `SYSTEMS`.
        staging_bytes: the most bytes that a rank packs at a time.
        device: "cpu" or "cuda", where every rank uses its current GPU.

    Returns:
        The measurements, the same on all ranks.

    Raises:
        InvalidInput: there are too few ranks, or degrees that do not fit.
    """
    runner = WeightRunner(model, trainer=trainer, server=server, staging_bytes=staging_bytes, device=device)
    runner.check(systems)
    found = [runner.measure(name, runs) for name in systems]
    made = WeightRun(
        model=model, nbytes=runner.nbytes, bound_us=runner.sync.bound_us, predicted_us=runner.sync.predicted_us,
        systems=tuple(found), slowdown=runner.train().slowdown, route=runner.sync.route,
        copied_us=runner.copy_us() if device == "cuda" else 0.0,
    )  # fmt: skip
    runner.close()
    return made


class WeightRunner:
    """The weights of a model on the ranks of the default process group, ready to be moved in one way or another.

    All ranks construct it, and call its methods, together.
    """

    def __init__(
        self, model: ModelShapes, *, trainer: ParallelDegrees | str, server: ParallelDegrees | str,
        staging_bytes: int = STAGING_BYTES, device: str = "cpu",
    ) -> None:  # fmt: skip
        """Make the tensors and plan.

        Args:
            model: the tensors.
            trainer: the trainers' degrees.
            server: the servers' degrees.
            staging_bytes: the most bytes that a rank packs at a time.
            device: "cpu" or "cuda".

        Raises:
            InvalidInput: there are too few ranks, or degrees that do not fit.
        """
        if device not in TRAINED:
            raise unknown("device", device, TRAINED)
        self.device, self.staging_bytes, self.me = device, staging_bytes, dist.get_rank()
        self.tensors = placed_model(model, trainer, server, dist.get_world_size())
        self.nbytes = sum(t.nbytes for t in self.tensors)
        self.sources = [filled(t, t.src, self.me, device) for t in self.tensors]
        self.targets = [empty(t, t.dst, self.me, device) for t in self.tensors]
        self.sync = WeightSync(*self.parts(), staging_bytes=staging_bytes)
        if device == "cuda":
            torch.cuda.empty_cache()

    @property
    def trains(self) -> bool:
        """Whether this rank is a trainer."""
        return any(source is not None for source in self.sources)

    def parts(self) -> tuple[dict[str, AnyTensor] | None, dict[str, AnyTensor] | None]:
        """What this rank gives to a `WeightSync`."""
        given, wanted = parts(self.tensors, self.sources, 0), parts(self.tensors, self.targets, 1)
        return given or None, wanted or None

    def check(self, systems: Sequence[str]) -> None:
        """Raise `InvalidInput` if one of these systems does not run on this device."""
        known = SYSTEMS + (GPU_SYSTEMS if self.device == "cuda" else ())
        for name in systems:
            if name not in known:
                raise InvalidInput(f"systems: {name!r} is none of {', '.join(known)}")

    def measure(self, name: str, runs: int) -> WeightTimes:
        """Move everything in one way, once for the bits and so often for the clock.

        Args:
            name: the system.
            runs: how often it runs for the clock.

        Returns:
            Its times, the same on all ranks.
        """
        self.check([name])
        for target in self.targets:
            if target is not None:
                target.zero_()
        run, close = _way(name, self.sync, self.tensors, self.sources, self.targets, self.staging_bytes)
        run()
        stopped = 0.0
        if name == "stretto":
            with self.sync.read() as weights:
                held = [weights.get(t.name) for t in self.tensors]
                fine = exact(self.tensors, held, self.me, self.device)
                stopped = _copied(held, self.targets)
        else:
            fine = exact(self.tensors, self.targets, self.me, self.device)
        times = [_timed(run) for _ in range(runs)]
        close()
        stopped = stopped if name == "stretto" else median(times) if times else 0.0
        return WeightTimes(system=name, exact=fine, times_s=tuple(times), stopped_s=stopped)

    def train(self, updates: int = 1, beside: str = "update", max_blocks: int | None = None) -> TrainingTimes:
        """How a trainer's steps (a matrix product each) go on while weights are sent.

        Args:
            updates: how many updates are sent, one behind the other.
            beside: "update" for `update_async`, or "copy", where servers only copy what they have meanwhile: what a GPU
                that trainers and servers share costs anyhow.
            max_blocks: as for `update_async`.

        Returns:
            The times, the same on all ranks: of the rank whose steps suffer most.
        """
        size = TRAINED[self.device] if self.trains else 1
        x = torch.ones(size, size, device=self.device)

        def steps(until: Callable[[int], bool]) -> tuple[int, float]:
            count, start = 0, time.monotonic()
            while self.trains and not until(count):
                x @ x
                if x.is_cuda:
                    # Only this stream is waited for: on the whole GPU, kernels of the update wait for other ranks.
                    torch.cuda.current_stream().synchronize()
                count += 1
            return count, time.monotonic() - start

        steps(lambda count: count >= 2)
        _latest(0.0)
        alone = steps(lambda count: count >= STEPS)[1] / STEPS
        longest = _latest(alone)
        began = _latest(time.monotonic())
        if beside == "copy":
            count, during = self._beside_copies(steps, began + max(0.2, 2 * STEPS * longest))
        else:
            count, during = 0, 0.0
            for _ in range(updates):
                done, spent = self._beside_update(steps, max_blocks)
                count, during = count + done, during + spent
        took = time.monotonic() - began
        slower = during / count / alone if count else 1.0
        return TrainingTimes(
            alone_s=longest, slowdown=_latest(slower), update_s=_latest(took) / updates,
            lost_s=_latest(max(0.0, took - count * alone) / updates if count else 0.0), steps=int(_latest(count)),
        )  # fmt: skip

    def _beside_update(self, steps: Callable[..., tuple[int, float]], max_blocks: int | None) -> tuple[int, float]:
        pending = self.sync.update_async(max_blocks=max_blocks)
        found = steps(lambda count: pending.done and count > 0)
        pending.wait()
        return found

    def _beside_copies(self, steps: Callable[..., tuple[int, float]], end: float) -> tuple[int, float]:
        mine = [t for t in self.targets if t is not None]
        goals = [torch.empty_like(t) for t in mine]
        while mine and time.monotonic() < end:
            for goal, target in zip(goals, mine, strict=True):
                goal.copy_(target)
            _sync_device(mine)
        return steps(lambda count: time.monotonic() >= end and count > 0)

    def copy_us(self) -> float:
        """Microseconds to copy what servers get once, all of them at the same time."""
        return _copy_us(self.targets)

    def close(self) -> None:
        """End the process group of the sync."""
        self.sync.close()


def _way(
    name: str, sync: WeightSync, tensors: Sequence[Tensor], sources: Locals, targets: Locals, staging_bytes: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """A function that moves everything once, and one that ends what it used."""
    if name == "stretto":
        return sync.update, lambda: None
    on_gpu = any(t is not None and t.is_cuda for t in (*sources, *targets))
    on_gpu = bool(_latest(float(on_gpu)))
    if name == "symmetric_pull":
        return SymmetricPull(tensors, sources, targets), lambda: None
    if on_gpu and (name in SYSTEMS or name in GPU_SYSTEMS[:2]):
        planned = PlannedBaseline(name, tensors, sources, targets, staging_bytes)
        return planned, planned.close
    if name.endswith("send_recv"):
        return PlainMessages(tensors, sources, targets), lambda: None
    root, wanting = tensors[0].src.mesh.devices[0], {d for t in tensors for d in t.dst.mesh.devices}
    group = dist.new_group(sorted({root, *wanting}), backend="nccl" if on_gpu else "gloo")
    return GatherBroadcast(tensors, sources, targets, group), lambda: dist.destroy_process_group(group)


class PlannedBaseline:
    """Plain messages, or gather and broadcast, on the executor that ours runs on: only the plan is another."""

    def __init__(
        self, name: str, tensors: Sequence[Tensor], sources: Locals, targets: Locals, staging_bytes: int
    ) -> None:
        self._tensors, self._targets, self._me = tensors, targets, dist.get_rank()
        given, wanted = parts(tensors, sources, 0) or None, parts(tensors, targets, 1) or None
        self._full: dict[str, torch.Tensor] = {}
        if name in ("send_recv", "passed_on"):
            plan = "stretto" if name == "passed_on" else name
            self._syncs = [WeightSync(given, wanted, staging_bytes=staging_bytes, copies=1, _strategy=plan)]
            return
        root = tensors[0].src.mesh.devices[0]
        servers = sorted({d for t in tensors for d in t.dst.mesh.devices})
        mine: Any = next((t for t in (*sources, *targets) if t is not None), None)
        if self._me == root or self._me in servers:
            where = mine.device if mine is not None else None
            self._full = {t.name: torch.empty(t.shape, dtype=torch.bfloat16, device=where) for t in tensors}
        whole: dict[str, AnyTensor] | None = dict(self._full) or None
        how: dict[str, Any] = {"staging_bytes": staging_bytes, "copies": 1, "_strategy": "stretto"}
        if name == "gather_direct":
            how["_strategy"] = "send_recv"
        first = WeightSync(given, whole if self._me == root else None, **how)
        copies = {
            name: TensorPart.of(full, ranks=servers, placements=["R"]) for name, full in self._full.items()
        } if self._me in servers else None  # fmt: skip
        second = WeightSync(whole if self._me == root else None, copies, **how)
        self._syncs = [first, second]

    def __call__(self) -> None:
        """Move everything once; all ranks call this."""
        for sync in self._syncs:
            sync.update()
        for tensor, target in zip(self._tensors, self._targets, strict=True):
            if self._full and target is not None:
                where = tile(tensor, tensor.dst, self._me)
                assert where is not None
                target.copy_(self._full[tensor.name][tuple(slice(a, b) for a, b in where)])
        _sync_device(self._targets)

    def close(self) -> None:
        """End the process groups."""
        for sync in self._syncs:
            sync.close()


def _copied(held: Locals, targets: Locals) -> float:
    """Seconds to copy a version into a server's memory: the longest of all ranks."""
    _sync_device(targets)
    start = time.monotonic()
    for mine, target in zip(held, targets, strict=True):
        if mine is not None and target is not None:
            target.copy_(mine)
    _sync_device(targets)
    return _latest(time.monotonic() - start)


def _copy_us(targets: Locals) -> float:
    """Microseconds to copy what servers get once, all of them at the same time; the least of three."""
    mine = [t for t in targets if t is not None]
    goals = [torch.empty_like(t) for t in mine]

    def copy() -> None:
        for goal, target in zip(goals, mine, strict=True):
            goal.copy_(target)
        _sync_device(targets)

    copy()
    return 1e6 * min(_timed(copy) for _ in range(3))


def _sync_device(tensors: Locals) -> None:
    if any(t is not None and t.is_cuda for t in tensors):
        torch.cuda.synchronize()


def _timed(run: Callable[[], object]) -> float:
    """Seconds from a beginning that all ranks agree on until the last has ended; ranks share a clock."""
    start = _latest(time.monotonic() + LEAD_S)
    time.sleep(max(0.0, start - time.monotonic()))
    run()
    return _latest(time.monotonic()) - start


def _latest(value: float) -> float:
    word = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(word, dist.ReduceOp.MAX)
    return float(word)
