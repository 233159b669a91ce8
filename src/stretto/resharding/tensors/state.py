# SPDX-License-Identifier: Apache-2.0
"""The ranks, tensors and memory behind a `WeightSync`: ranks find out together which has what, and
plan one transfer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch

from ...errors import InvalidInput, StrettoError
from ...files import typed
from ...runtime.torch_backend.cuda_clock import cuda
from ..plan import OURS
from .carrier import ReshardGroup, default_world, gpu_state
from .deltas import Said
from .describe import AnyTensor, PlacedTensor, TensorPart, like, local_of, placed_tensor
from .pending import SourceGuard
from .transfer import Move, Transfer
from .world import SyncWorld

Dict = Mapping[str, AnyTensor]
MAX_TENSORS = 1 << 16
ROUNDS = 16
"""Rounds of a full update where parts of the tensors are sent, too, so that a delta follows what has changed; and on
CPUs, where the first is packed and the last unpacked while nothing is sent."""


class _Sides(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of one rank: descriptions of its tensors on both sides, and its memory limit."""

    source: dict[str, PlacedTensor]
    target: dict[str, PlacedTensor]
    staging_bytes: int
    gpu: str


class ReshardState:
    """One rank's side of a `WeightSync`; all ranks construct it together."""

    def __init__(
        self, source: Dict | None, target: Dict | None, ranks: Any, staging_bytes: int, *,
        world: SyncWorld | None = None, copies: int = 2, deltas: bool = False, strategy: str = "",
    ) -> None:  # fmt: skip
        self.world = world or default_world()
        self._agreement = self.world.agreement
        self.rank = self.world.rank
        self.ranks, why = _ranks(ranks, self.world)
        mine = _Sides(source={}, target={}, staging_bytes=0, gpu="")
        try:
            if not isinstance(staging_bytes, int) or staging_bytes < 1:
                raise InvalidInput(f"staging_bytes: must be >= 1, not {staging_bytes}")
            mine = _Sides(
                source=_described("source", source, self.rank), target=_described("target", target, self.rank),
                staging_bytes=staging_bytes, gpu=gpu_state(),
            )  # fmt: skip
        except InvalidInput as error:
            why = why or str(error)
        label = "WeightSync"
        texts = self._agreement.gather(self.ranks, label, msgspec.json.encode(mine).decode(), why)
        everyone = dict(zip(self.ranks, (msgspec.json.decode(text, type=typed(_Sides)) for text in texts), strict=True))
        moves = _moves(everyone)
        self._described = mine.source
        self.source: Dict = source or {}
        self.staging_limit = staging_bytes
        self._target: Dict = target or {}
        self._names = [move.name for move in moves]
        self._moves = moves
        name = f"weights {','.join(map(str, self.ranks))}"
        number = self.world.number(name)
        self.name = f"{name} {number}"
        self._carrier = ReshardGroup(self.ranks, self.world)
        why = ""
        try:
            gpu = self._carrier.gpu() if moves[0].dst.device == "cuda" else None
            self._gpu = gpu
            # Where all ranks write to the memory of one GPU, passing on saves nothing and makes chunks wait.
            pull = not strategy and gpu is not None and self._carrier.one_gpu
            self.transfer = Transfer(
                self._carrier, moves, staging_bytes=staging_bytes, keep=True, gpu=gpu,
                strategy=strategy or ("send_recv" if pull else OURS), pull=pull,
                least_rounds=ROUNDS if deltas or gpu is None else 1,
            )  # fmt: skip
            detached = {name: like(t, local_of(t)) for name, t in self._target.items()}
            second = detached
            if copies > 1:
                second = {name: like(t, torch.empty_like(local_of(t))) for name, t in self._target.items()}
            self.sets: list[dict[str, torch.Tensor]] = [detached, second]
        except (StrettoError, MemoryError, RuntimeError) as error:
            why = str(error) or type(error).__name__
        try:
            self.agree(label, "ready", why)
        except StrettoError:
            self.close()
            raise

    def agree(self, label: str, text: str, why: str) -> None:
        """Check that all ranks are at the same point and none has a reason not to go on; otherwise all ranks raise.

        Args:
            label: name of the operation, for errors.
            text: this rank's point, which must be equal on all ranks.
            why: this rank's reason not to go on; empty if there is none.

        Raises:
            InvalidInput: a rank has a reason, or is at another point.
            PeerLost: a rank has died or does not come.
        """
        for rank, said in zip(self.ranks, self._agreement.gather(self.ranks, label, text, why), strict=True):
            if said != text:
                raise InvalidInput(f"{label}: rank {rank} is at {said}, rank {self.rank} at {text}")

    def newest(self, version: int) -> int:
        """The largest of the versions that the ranks begin with."""
        texts = self._agreement.gather(self.ranks, "WeightSync", str(version))
        return max(int(text) for text in texts)

    def moments(self) -> list[Any]:
        """Where the caller's stream of the GPU is now: an event, or none without a GPU."""
        if not self._names or self._moves[0].dst.device != "cuda":
            return []
        moment = cuda.Event()
        moment.record()
        return [moment]

    def told(self, mine: Said) -> list[Said]:
        """What every rank says about the tensors that have changed."""
        text = msgspec.json.encode(mine).decode()
        texts = self._agreement.gather(self.ranks, "WeightSync.update", text)
        return [msgspec.json.decode(each, type=typed(Said)) for each in texts]

    def begin(self, number: int, why: str, checksums: bool = False, changed: bool = False) -> None:
        """Check that all ranks are about to update to this version; otherwise all ranks raise.

        Args:
            number: the version.
            why: this rank's objection; empty if it has none.
            checksums: whether what arrives is compared with what is sent.
            changed: whether only tensors that have changed are sent.

        Raises:
            InvalidInput: a rank objects, or is about to do something else.
            PeerLost: a rank has died or does not come.
        """
        # All ranks have come to the last version, so all know the result of the vote on the version before it.
        if number > 2:
            self._agreement.forget(f"{self.name}/{number - 2}", self.ranks)
            if checksums:
                self._agreement.forget(f"{self.name}/{number - 2}/checksums", self.ranks)
        how = (" with checksums" if checksums else "") + (" of what has changed" if changed else "")
        self.agree(f"WeightSync.update to version {number}", f"{number}{how}", why)

    def vote(self, key: str, failed: StrettoError | None) -> StrettoError | None:
        """Commit on all ranks or on none; returns None for a commit, else the reason against it."""
        return self._agreement.vote(key, self.ranks, failed)

    def checked_sources(self, source: Dict | None) -> tuple[list[torch.Tensor | None], str]:
        """The local parts of the tensors to send, and an error text if they differ from the planned ones."""
        given = self.source if source is None else source
        try:
            if source is not None:
                _same(_described("source", source, self.rank), self._described)
        except InvalidInput as error:
            return [], str(error)
        return self._locals(given, [move.src_meshes for move in self._moves]), ""

    def move(
        self, sources: Sequence[torch.Tensor | None], to: int, key: str, *, names: Collection[str] | None = None,
        guard: SourceGuard | None = None, blocks: int | None = None,
    ) -> None:  # fmt: skip
        """Move tensors into one of the two sets of targets.

        Args:
            sources: this rank's local part of each tensor; None where it has none.
            to: the set that is written, 0 or 1.
            key: name of the vote on this version, which is watched for an early failure.
            names: the tensors to move; None for all.
            guard: is told what has been read of the sources, where these may change meanwhile.
            blocks: where servers pull, the most thread blocks of a rank's copies; None for all.

        Raises:
            StrettoError: the vote has failed on another rank.
            PeerLost: a rank has died while bytes moved.
        """
        targets = self._locals(self.sets[to], [move.dst_meshes for move in self._moves])

        def check() -> None:
            self._agreement.beat()
            failed = self._agreement.decided(key)
            if failed is not None:
                raise failed

        rounds = self.transfer.rounds if names is None else self.transfer.rounds_for(names)
        self.transfer.run(sources, targets, check, rounds=rounds, guard=guard, blocks=blocks)

    def compared(
        self, sources: Sequence[torch.Tensor | None], to: int, held_here: dict[str, int] | None = None
    ) -> StrettoError | None:
        """Compare what has arrived with what the trainers hold, box by box; all ranks call this.

        Args:
            sources: this rank's local part of each tensor; None where it has none.
            to: the set that was written.
            held_here: the checksums of this rank's sources, where these may have changed since.

        Returns:
            What is wrong here, or with the comparison; None if nothing is.
        """
        try:
            targets = self._locals(self.sets[to], [move.dst_meshes for move in self._moves])
            sums = held_here if held_here is not None else self.transfer.checksums(0, sources)
            mine = msgspec.json.encode(sums).decode()
            held: dict[str, int] = {}
            for text in self._agreement.gather(self.ranks, "checksums", mine):
                held |= msgspec.json.decode(text, type=typed(dict[str, int]))
            for box, got in self.transfer.checksums(1, targets).items():
                if held.get(box) != got:
                    at, _, where = box.partition(" ")
                    name = self._names[int(at)]
                    return StrettoError(f"rank {self.rank}: {name!r} has not arrived as sent, in {where}")
        except StrettoError as error:
            return error
        return None

    def target(self, at: int) -> dict[str, AnyTensor]:
        """The targets as they were given, with one of the two sets as their memory."""
        return {
            name: replace(t, local=self.sets[at][name]) if isinstance(t, TensorPart) else self.sets[at][name]
            for name, t in self._target.items()
        }

    def close(self) -> None:
        """End this rank's process group."""
        self._carrier.close()

    def _locals(self, tensors: Dict, meshes: Sequence[Sequence[tuple[int, ...]]]) -> list[torch.Tensor | None]:
        return [
            local_of(tensors[name]) if any(self.rank in mesh for mesh in those) else None
            for name, those in zip(self._names, meshes, strict=True)
        ]


def _ranks(ranks: Any, world: SyncWorld) -> tuple[list[int], str]:
    size = world.size
    if ranks is None:
        if size is None:
            raise InvalidInput("ranks: must be given in a world of its own, which has no fixed size")
        return list(range(size)), ""
    found = sorted({int(r) for r in ranks})
    if world.rank not in found or found[0] < 0 or (size is not None and found[-1] >= size):
        limit = f"0..{size - 1}" if size is not None else "0 and more"
        raise InvalidInput(f"ranks: must be of {limit} with {world.rank} among them, not {found}")
    return found, ""


def _described(side: str, tensors: Dict | None, rank: int) -> dict[str, PlacedTensor]:
    if tensors is not None and not isinstance(tensors, Mapping):
        raise InvalidInput(f"{side}: must be a dict of tensors, not {type(tensors).__name__}")
    if len(tensors or ()) > MAX_TENSORS:
        raise InvalidInput(f"{side}: has {len(tensors or ())} tensors; at most {MAX_TENSORS}")
    found = {str(name): placed_tensor(f"{side}[{name!r}]", t, rank) for name, t in (tensors or {}).items()}
    # A rank outside of a tensor's mesh holds no part of the tensor.
    return {name: where for name, where in found.items() if rank in where.ranks}


def _same(given: dict[str, PlacedTensor], planned: dict[str, PlacedTensor]) -> None:
    for name in (*planned, *given):
        if given.get(name) != planned.get(name):
            said = [str(x) if x else "nothing" for x in (given.get(name), planned.get(name))]
            raise InvalidInput(f"source[{name!r}]: is {said[0]}, but {said[1]} was planned")


def _moves(everyone: dict[int, _Sides]) -> list[Move]:
    """One move for each tensor and target layout; raises the same `InvalidInput` on all ranks."""
    limits = {rank: sides.staging_bytes for rank, sides in everyone.items()}
    first = next(iter(everyone))
    for rank, sides in everyone.items():
        if sides.gpu != everyone[first].gpu:
            raise InvalidInput(f"STRETTO_GPU: is {sides.gpu} on rank {rank}, {everyone[first].gpu} on rank {first}")
    for rank, limit in limits.items():
        if limit != limits[first]:
            raise InvalidInput(f"staging_bytes: is {limit} on rank {rank}, {limits[first]} on rank {first}")
    sources = _layouts("source", {rank: sides.source for rank, sides in everyone.items()})
    targets = _layouts("target", {rank: sides.target for rank, sides in everyone.items()})
    _compare_keys(sources, targets)
    found = []
    for name, ways in sources.items():
        if len(ways) > 1:
            said = " and ".join(str(where) for where in list(ways)[:2])
            raise InvalidInput(f"source[{name!r}]: lies in two ways, {said}")
        ((src, meshes),) = ways.items()
        for dst, theirs in targets[name].items():
            if src.shape != dst.shape:
                raise InvalidInput(f"{name!r}: source has shape {src.shape}, target {dst.shape}")
            if src.device != dst.device:
                raise InvalidInput(f"{name!r}: source is on {src.device}, target on {dst.device}")
            if any(p.startswith("P") for p in dst.placements):
                raise InvalidInput(f"target[{name!r}]: nothing can be brought into a pending sum")
            found.append(Move(name=name, src=src, dst=dst, src_meshes=tuple(meshes), dst_meshes=tuple(theirs)))
    if not found:
        raise InvalidInput("source, target: no rank gives a tensor")
    devices = {move.dst.device for move in found}
    if len(devices) > 1:
        raise InvalidInput(f"target: tensors must be on one kind of device, not {', '.join(sorted(devices))}")
    return found


def _layouts(
    side: str, given: dict[int, dict[str, PlacedTensor]]
) -> dict[str, dict[PlacedTensor, list[tuple[int, ...]]]]:
    """For each name the descriptions of its tensor, each with the meshes that hold a copy of it in that way."""
    found: dict[str, dict[PlacedTensor, list[tuple[int, ...]]]] = {}
    for rank, tensors in given.items():
        for name, where in tensors.items():
            for peer in where.ranks:
                theirs = given.get(peer, {}).get(name)
                if theirs != where:
                    has = f"has {theirs}" if theirs else "has none" if peer in given else "does not take part"
                    raise InvalidInput(f"{side}[{name!r}]: rank {rank} has {where}, but rank {peer} {has}")
            ways = found.setdefault(name, {})
            if not any(where.ranks in meshes for meshes in ways.values()):
                alike = (w for w in ways if _kind(w) == _kind(where) and _apart(where.ranks, ways[w]))
                ways.setdefault(next(alike, where), []).append(where.ranks)
    return found


def _kind(where: PlacedTensor) -> tuple[Any, ...]:
    return where.shape, where.dtype, where.mesh_shape, where.placements, where.device


def _apart(ranks: Sequence[int], meshes: Sequence[Sequence[int]]) -> bool:
    return not set(ranks) & {rank for mesh in meshes for rank in mesh}


def _compare_keys(sources: Mapping[str, object], targets: Mapping[str, object]) -> None:
    lacking = [f"{name!r} (not in target)" for name in sources if name not in targets]
    lacking += [f"{name!r} (not in source)" for name in targets if name not in sources]
    if lacking:
        more = f" and {len(lacking) - 4} more" if len(lacking) > 4 else ""
        raise InvalidInput(f"source, target: names must be the same; differ in {', '.join(lacking[:4])}{more}")
