# SPDX-License-Identifier: Apache-2.0
"""verl's checkpoint engine through ours: importing this registers the backend ``stretto``.

In verl's options ``actor_rollout_ref.rollout.checkpoint_engine``: ``backend=stretto`` and
``custom_backend_module=stretto.plugins.verl_engine``.

Every actor has every tensor while verl iterates, so each sends a part of every bucket, and a bucket leaves the actors
once however many rollout workers there are: they pass it on. verl's workers load buckets as they come, so that a
version is whole on a worker only when all of its buckets are.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry, TensorMeta, merge_weight_chunks
from verl.workers.rollout.utils import ensure_async_iterator

from ..errors import InvalidInput
from ..resharding.tensors.describe import TensorPart, dtype_of
from ..resharding.tensors.weights import WeightSync
from ..resharding.tensors.world import SyncWorld

Base: Any = CheckpointEngine
BUCKET = "bucket"
ALIGN = 64
"""Chunks begin at multiples of so many bytes, so that any element type can be seen there."""


@CheckpointEngineRegistry.register("stretto")
class StrettoCheckpointEngine(Base):  # type: ignore[misc]
    """One worker's side; `senders` is "all" actors or the "first" alone, where only that one has all tensors."""

    def __init__(
        self, bucket_size: int, is_master: bool = False, senders: str = "all", device: str | None = None,
        timeout_s: float = 300.0, rollout_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        if senders not in ("all", "first"):
            raise InvalidInput(f"senders: must be all or first, not {senders!r}")
        self.bucket_size, self.is_master, self.rollout_dtype = bucket_size, is_master, rollout_dtype
        self._all, self._timeout_s = senders == "all", timeout_s
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._server: Any = None
        self._prepared = 0
        self._group: tuple[Any, ...] = ()
        self._world: SyncWorld | None = None
        self.sync: WeightSync | None = None

    def prepare(self) -> dict[str, Any]:
        """What this worker says of itself before each update; actor 0 serves the store."""
        self._prepared += 1
        address = ""
        if self.is_master:
            if self._server is None:
                self._server = c10d.TCPStore(
                    "0.0.0.0", 0, is_master=True, timeout=timedelta(seconds=self._timeout_s), wait_for_workers=False
                )
            address = f"{_here()}:{self._server.port}"
        return {"address": address, "number": self._prepared, "group": self._group}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Where each worker's place is: actors first. A group that is as it was is kept.

        Args:
            actor_wg_world_size: the number of actors.
            rollout_world_size: the number of rollout workers.
            metadata: what `prepare` has returned on each, actors first.

        Returns:
            The arguments of `init_process_group` for actors and for rollout workers.
        """
        address, size = metadata[0]["address"], actor_wg_world_size + rollout_world_size
        name = f"group {metadata[0]['number']}"
        old = metadata[0]["group"]
        same = old and all(
            m["group"] == (old[0], address, rank, size, actor_wg_world_size) for rank, m in enumerate(metadata)
        )
        places = [(old[0] if same else name, address, rank, size, actor_wg_world_size) for rank in range(size)]
        return {"group": places[:actor_wg_world_size]}, {"group": places[actor_wg_world_size:]}

    def init_process_group(self, group: tuple[str, str, int, int, int]) -> None:
        """Meet the others and plan how a bucket moves; nothing where the group is as it was."""
        if self.sync is not None and group == self._group:
            return
        self.close()
        name, address, rank, size, actors = group
        self._world = SyncWorld.join(address, rank, timeout_s=self._timeout_s, name=name)
        memory = torch.empty(self.bucket_size, dtype=torch.uint8, device=self._device)
        senders = range(actors if self._all else 1)
        part = TensorPart.of(memory, ranks=senders, placements=["R"]) if rank in senders else None
        self._memory, self._first, self._sends = memory, rank == 0, part is not None
        ranks = [*senders, *range(actors, size)]
        self._group = group
        if rank in ranks:
            self.sync = WeightSync(
                {BUCKET: part} if part is not None else None, {BUCKET: memory} if part is None else None, ranks=ranks,
                world=self._world, staging_bytes=2 * self.bucket_size,
            )  # fmt: skip

    def finalize(self) -> None:
        """After each update; the group stays for the next one."""

    def close(self) -> None:
        """Leave the group."""
        if self.sync is not None:
            self.sync.close()
        self.sync, self._world, self._group = None, None, ()

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        """Send all tensors, bucket after bucket; actors that do not send walk through the tensors with the others."""
        offset = 0
        listed: list[list[Any]] = []
        async for name, given in ensure_async_iterator(weights):
            if self.sync is None:
                continue
            wanted = given.to(self.rollout_dtype) if self.rollout_dtype and given.is_floating_point() else given
            flat = wanted.detach().contiguous().view(-1).view(torch.uint8)
            for begin, end in _chunks(len(flat), self.bucket_size):
                if offset + end - begin > self.bucket_size:
                    await self._send(listed, last=False)
                    offset, listed = 0, []
                self._memory[offset : offset + end - begin].copy_(flat[begin:end])
                dtype = str(wanted.dtype).removeprefix("torch.")
                listed.append([name, list(wanted.shape), dtype, begin, end - begin, offset])
                offset += -(-(end - begin) // ALIGN) * ALIGN
        if self.sync is not None:
            await self._send(listed, last=True)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """All tensors of one update, whole, in the order in which they are sent."""
        async for pair in merge_weight_chunks(self._received(), self.bucket_size):
            yield pair

    async def _send(self, listed: list[list[Any]], *, last: bool) -> None:
        assert self.sync is not None and self._world is not None
        if self._first:
            number = self.sync.number + 1
            self._world.store.set(f"buckets/{number}", json.dumps({"chunks": listed, "last": last}))
        await asyncio.to_thread(self.sync.update)

    async def _received(self) -> AsyncIterator[tuple[TensorMeta, torch.Tensor]]:
        assert self.sync is not None and self._world is not None
        version = await asyncio.to_thread(self.sync.update)
        while True:
            said = json.loads(self._world.store.get(f"buckets/{version}"))
            # The next bucket comes into other memory while this one is loaded.
            more = None if said["last"] else asyncio.create_task(asyncio.to_thread(self.sync.update))
            with self.sync.read(version) as held:
                for name, shape, dtype, begin, nbytes, offset in said["chunks"]:
                    meta = TensorMeta(
                        name=name, shape=torch.Size(shape), dtype=dtype_of(dtype), chunk_offset=begin,
                        chunk_size=nbytes, offset=offset,
                    )  # fmt: skip
                    yield meta, held[BUCKET][offset : offset + nbytes]
            if more is None:
                return
            version = await more


def _chunks(nbytes: int, most: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, nbytes, most):
        yield begin, min(nbytes, begin + most)


def _here() -> str:
    """This host's address, as Ray knows it."""
    import ray

    if ray.is_initialized():
        known: Any = ray.util
        return str(known.get_node_ip_address()).strip("[]")
    return socket.gethostbyname(socket.gethostname())
