# SPDX-License-Identifier: Apache-2.0
"""vLLM's weight transfer through ours: ``WeightTransferConfig(backend="stretto")``.

Trainers keep their shards: nothing is gathered. Workers receive the part of each tensor that they hold, fused ones
included, beside the model, while it goes on serving; ``finish_weight_update`` copies it in. Where anything fails before
that, workers keep the version that they have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from ..errors import InvalidInput, StrettoError
from ..resharding.tensors.describe import AnyTensor, TensorPart, dtype_of
from ..resharding.tensors.mapped import MappedSync
from ..resharding.tensors.weights import STAGING_BYTES
from ..resharding.tensors.world import SyncWorld
from ..weights.mapping import WeightMapping
from .vllm_layout import CheckpointTensor, WorkerLayout, guess, tried, without

WorkerBase: Any = WeightTransferEngine
TrainerBase: Any = TrainerWeightTransferEngine
InitBase: Any = WeightTransferInitInfo
UpdateBase: Any = WeightTransferUpdateInfo
TrainerInitBase: Any = TrainerInitInfo


@dataclass(kw_only=True)
class StrettoInitInfo(InitBase):  # type: ignore[misc]
    """What trainer rank 0 tells the workers when they meet; plain JSON."""

    address: str
    """Host and port of the store that trainer rank 0 serves."""
    rank_offset: int
    """The first worker's rank: the number of trainers."""
    world_size: int
    """Trainers and workers together."""
    tensors: list[dict[str, Any]]
    """Name, shape and dtype of all tensors of the trainer."""
    staging_bytes: int = STAGING_BYTES
    direct: bool = True
    timeout_s: float = 300.0


@dataclass(kw_only=True)
class StrettoUpdateInfo(UpdateBase):  # type: ignore[misc]
    """What trainer rank 0 tells the workers for each update."""

    version: int


class StrettoWeightTransferEngine(WorkerBase):  # type: ignore[misc]
    """Receives weights in a worker of vLLM."""

    init_info_cls = StrettoInitInfo
    update_info_cls = StrettoUpdateInfo
    # Layouts are those of the model that the engine was made for.
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.sync: MappedSync | None = None
        self.layout: WorkerLayout | None = None
        self._arrived = 0

    def init_transfer_engine(self, init_info: StrettoInitInfo) -> None:
        """Find out what this worker receives in which layout, and meet the trainers."""
        self.shutdown()
        tensors = [
            CheckpointTensor(name=t["name"], shape=tuple(t["shape"]), dtype=dtype_of(t["dtype"]))
            for t in init_info.tensors
        ]
        parallel = self.parallel_config
        number = parallel.data_parallel_index * parallel.world_size + parallel.rank
        rank, ways = init_info.rank_offset + number, parallel.tensor_parallel_size
        first = rank - parallel.rank % ways
        world = SyncWorld.join(init_info.address, rank, timeout_s=init_info.timeout_s)
        # A quantized model's loader computes, and a stage of a pipeline has only its layers.
        plain = getattr(self.model_config, "quantization", None) is None and parallel.world_size == ways
        layout = self._layout(tensors, range(first, first + ways), world, init_info, plain and init_info.direct)
        target: dict[str, AnyTensor] = dict(layout.direct)
        for t in layout.loaded:
            target[t.name] = torch.empty(t.shape, dtype=t.dtype, device=self.device)
        self.layout = layout
        self.sync = MappedSync(
            None, target, mapping=layout.mapping, ranks=range(init_info.world_size), world=world,
            staging_bytes=init_info.staging_bytes, copies=1,
        )  # fmt: skip

    def _layout(
        self, tensors: list[CheckpointTensor], ranks: range, world: SyncWorld, info: StrettoInitInfo, direct: bool
    ) -> WorkerLayout:
        """The layout that all workers have found to be right; parameters of one module go the same way."""
        layout = guess(self.model, tensors, ranks, direct=direct)
        try:
            wrong = tried(self.model, layout, tensors, world.rank) if layout.direct else []
        except Exception as error:
            print(f"stretto: all tensors go through load_weights: {type(error).__name__}: {error}", file=sys.stderr)
            wrong = list(layout.direct)
        workers = list(range(info.rank_offset, info.world_size))
        told = world.agreement.gather(workers, "vLLM layouts", "\n".join(sorted(wrong)))
        bad = {name for text in told for name in text.split("\n") if name}
        sources = {name for rule in layout.rules.values() for name in rule.sources}
        modules = {name.rpartition(".")[0] for name in (*bad, *(t.name for t in tensors if t.name not in sources))}
        bad |= {name for name in layout.direct if name.rpartition(".")[0] in modules}
        return without(layout, sorted(bad), tensors)

    def start_weight_update(self) -> None:
        """Nothing: the model is not touched before everything has arrived."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one version; the model stays as it is."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: StrettoUpdateInfo) -> None:
        """Receive one version beside the model: on all ranks or on none."""
        if self.sync is None:
            raise StrettoError("weights cannot be received before init_transfer_engine")
        self._arrived = 0
        self._arrived = self.sync.update()
        if self._arrived != update_info.version:
            raise StrettoError(f"version {update_info.version} was announced, {self._arrived} has arrived")

    def finish_weight_update(self) -> None:
        """Put the version that has arrived into the model."""
        if self.sync is None or self.layout is None or not self._arrived:
            raise StrettoError("no version has arrived since the last one was finished")
        with torch.no_grad():
            names = {t.name for t in self.layout.loaded}
            if names:
                self._load(self.sync, names)
            parameters = dict(self.model.named_parameters())
            self.sync.load({name: parameters[name] for name in self.layout.direct}, only=tuple(self.layout.direct))
        self._arrived = 0

    def _load(self, sync: MappedSync, names: set[str]) -> None:
        """Have the model's own loader take whole tensors; vLLM's models are loaded layer by layer."""
        with sync.read_pieces() as weights:
            pairs = ((name, tensor) for name, tensor in weights.items() if name in names)
            if not any(type(module).__module__.startswith("vllm.") for module in self.model.modules()):
                # No layers of vLLM's, whose kernels may want weights in other shapes than they are loaded in.
                self.model.load_weights(pairs)
                return
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

            initialize_layerwise_reload(self.model)
            self.model.load_weights(pairs)
            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the trainers; the model keeps its weights."""
        if self.sync is not None:
            self.sync.close()
        self.sync, self.layout, self._arrived = None, None, 0


@dataclass(kw_only=True)
class StrettoTrainerInitInfo(TrainerInitBase):  # type: ignore[misc]
    """What a trainer rank says; `rank` is its number among the trainers, and rank 0 serves the store."""

    backend: ClassVar[str] = "stretto"

    address: str
    world_size: int
    """Trainers and workers together."""
    num_trainers: int = 1
    staging_bytes: int = STAGING_BYTES
    direct: bool = True
    """Whether workers may receive straight into parameters whose layouts they find out."""
    timeout_s: float = 300.0
    mapping: WeightMapping = field(default_factory=WeightMapping)
    """Only its `ignore` is used here."""


class StrettoTrainerWeightTransferEngine(TrainerBase):  # type: ignore[misc]
    """A trainer's side; all trainer ranks make one and call `send_weights` together."""

    init_info_cls = StrettoTrainerInitInfo
    version: int
    sync: MappedSync

    @classmethod
    def trainer_init(
        cls, init_info: StrettoTrainerInitInfo, *, client: Any, source: Any = None
    ) -> StrettoTrainerWeightTransferEngine:
        """Meet the workers.

        Args:
            init_info: where to meet, and how many there are.
            client: drives the workers; only rank 0 calls it.
            source: the trainer's weights, a `WeightSource`.

        Returns:
            The engine, ready to send.

        Raises:
            InvalidInput: there is no source, or names, shapes or layouts do not fit.
            PeerLost: a rank does not come.
        """
        if source is None:
            raise InvalidInput("source: weights are sent from a WeightSource, and none is given")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)
        engine.version = 0
        engine._mapping = init_info.mapping
        engine._trainers = init_info.num_trainers
        engine._pool = ThreadPoolExecutor(1) if init_info.is_sender else None
        world = SyncWorld.join(
            init_info.address, init_info.rank, serve=init_info.is_sender, timeout_s=init_info.timeout_s
        )
        told = StrettoInitInfo(
            address=f"{init_info.address.rpartition(':')[0]}:{world.port}", rank_offset=init_info.num_trainers,
            world_size=init_info.world_size, staging_bytes=init_info.staging_bytes, direct=init_info.direct,
            timeout_s=init_info.timeout_s, tensors=engine._described(),
        )  # fmt: skip
        answer = engine._ask(lambda: client.init_weight_transfer_engine(vars(told)))
        engine.sync = engine._meet(world, init_info, answer)
        return engine

    def send_weights(self) -> None:
        """Send the trainers' present weights as the next version, and have the workers take it."""
        version = self.version + 1
        if self.is_sender:
            self.client.start_weight_update()
        answer = self._ask(lambda: self.client.update_weights({"version": version}))
        try:
            self.sync.update(self._parts())
        finally:
            # What a worker says of itself explains more than that it is gone.
            if answer is not None:
                answer.result()
        self.version = version
        if self.is_sender:
            self.client.finish_weight_update(str(version))

    def shutdown(self) -> None:
        """Leave the workers."""
        self.sync.close()
        if self._pool is not None:
            self._pool.shutdown()

    def _meet(self, world: SyncWorld, info: StrettoTrainerInitInfo, answer: Future[None] | None) -> MappedSync:
        try:
            made = MappedSync(
                self._parts(), None, mapping=info.mapping, ranks=range(info.world_size), world=world,
                staging_bytes=info.staging_bytes,
            )  # fmt: skip
        except StrettoError:
            if answer is not None and answer.done():
                answer.result()
            raise
        if answer is not None:
            answer.result()
        return made

    def _ask(self, call: Callable[[], None]) -> Future[None] | None:
        """Have rank 0 call the workers, who answer when the trainers have done their part."""
        return self._pool.submit(call) if self._pool is not None else None

    def _described(self) -> list[dict[str, Any]]:
        wanted = self._mapping.wanted(m.name for m in self.source.metadata)
        return [
            {"name": m.name, "shape": list(m.shape), "dtype": str(m.dtype).removeprefix("torch.")}
            for m in self.source.metadata
            if m.name in wanted
        ]

    def _parts(self) -> dict[str, AnyTensor]:
        """This rank's parts of the trainer's tensors, in the layouts that the source declares."""
        local = self.source.implements_iter_local()
        metas = {m.name: m for m in self.source.metadata}
        found: dict[str, AnyTensor] = {}
        for name, tensor in self.source.iter_local() if local else self.source.iter_full():
            meta = metas[name]
            owners = meta.owners if meta.owners is not None else tuple(range(self._trainers))
            cut = meta.placements if local and meta.placements is not None else None
            shards = [f"S({p.dim})" if hasattr(p, "dim") else "R" for p in cut or ()]
            grid = meta.mesh_shape if cut is not None else (len(owners),)
            found[name] = TensorPart.of(
                tensor.detach().contiguous(), ranks=owners, placements=shards or ["R"], mesh_shape=grid,
                shape=meta.shape,
            )  # fmt: skip
        return found
