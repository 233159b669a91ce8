# SPDX-License-Identifier: Apache-2.0
"""Two trainers (FSDP2) and a server of two ranks, which are jobs of their own, behind vLLM's and verl's interfaces.

The model is a small transformer of ours: unfused and cut by rows at the trainers, fused and tensor parallel at the
servers, with a loader as vLLM's models have one.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import vllm_standin
from capture_scenarios import _start, store_port
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import stretto
import stretto.torch

TRAINERS, SERVERS, STEPS = 2, 2, 2
WIDTH, HEADS, INNER, VOCABULARY, LAYERS = 16, 4, 24, 32, 2
Pairs = Iterable[tuple[str, torch.Tensor]]


class TrainedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=name != "o_proj"))
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, own = self.norm(x), vars(self)["_modules"]
        x = x + own["o_proj"](attend(own["q_proj"](y), own["k_proj"](y), own["v_proj"](y), HEADS))
        found: torch.Tensor = x + self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return found


class TrainedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(TrainedLayer() for _ in range(LAYERS))
        self.turned = nn.Linear(WIDTH, WIDTH, bias=False)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        found: torch.Tensor = self.lm_head(self.turned(x))
        return found


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int) -> torch.Tensor:
    q, k, v = (t.view(*t.shape[:-1], heads, -1).transpose(-3, -2) for t in (q, k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v).transpose(-3, -2).flatten(-2)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape), requires_grad=False)


class ServedModel(nn.Module):
    """Tensor parallel over `ways` ranks; `turned` is stored transposed, so that its loader does more than cut."""

    packed_modules_mapping = {"qkv": ["q_proj", "k_proj", "v_proj"], "gate_up": ["gate_proj", "up_proj"]}  # noqa: RUF012

    def __init__(self, at: int, ways: int) -> None:
        super().__init__()
        self.at, self.ways = at, ways
        self.embed: Any = nn.Module()
        self.embed.weight = weight(VOCABULARY, WIDTH)
        self.layers: Any = nn.ModuleList(nn.Module() for _ in range(LAYERS))
        layer: Any
        for layer in self.layers:
            for name, shape in {
                "qkv": (3 * WIDTH // ways, WIDTH), "o_proj": (WIDTH, WIDTH // ways),
                "gate_up": (2 * INNER // ways, WIDTH), "down_proj": (WIDTH, INNER // ways), "norm": (WIDTH,),
            }.items():  # fmt: skip
                inside: Any = nn.Module()
                inside.weight = weight(*shape)
                setattr(layer, name, inside)
            layer.qkv.bias = weight(3 * WIDTH // ways)
        self.turned: Any = nn.Module()
        self.turned.weight = weight(WIDTH, WIDTH)
        self.lm_head: Any = nn.Module()
        self.lm_head.weight = weight(VOCABULARY // ways, WIDTH)
        self.loaded: list[str] = []

    def load_weights(self, pairs: Pairs) -> None:
        """As vLLM's: takes whole checkpoint tensors, each into its place."""
        own = dict(self.named_parameters())
        for name, tensor in pairs:
            self.loaded.append(name)
            for fused, pieces in self.packed_modules_mapping.items():
                for number, piece in enumerate(pieces):
                    if f".{piece}." in name:
                        goal = own[name.replace(piece, fused)].chunk(len(pieces))[number]
                        goal.copy_(tensor.chunk(self.ways)[self.at])
                        break
            if name in own:
                goal = own[name]
                cut = 1 if ".o_proj." in name or ".down_proj." in name else 0
                whole = goal.shape == tensor.shape
                goal.copy_(tensor.t() if name == "turned.weight" else tensor if whole
                           else tensor.chunk(self.ways, cut)[self.at])  # fmt: skip

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = nn.functional.embedding(tokens, self.embed.weight)
        for layer in self.layers:
            y = nn.functional.rms_norm(x, (WIDTH,), layer.norm.weight)
            q, k, v = nn.functional.linear(y, layer.qkv.weight, layer.qkv.bias).chunk(3, -1)
            x = x + total(nn.functional.linear(attend(q, k, v, HEADS // self.ways), layer.o_proj.weight))
            gate, up = nn.functional.linear(x, layer.gate_up.weight).chunk(2, -1)
            x = x + total(nn.functional.linear(nn.functional.silu(gate) * up, layer.down_proj.weight))
        parts = [torch.empty(*x.shape[:-1], VOCABULARY // self.ways) for _ in range(self.ways)]
        dist.all_gather(parts, nn.functional.linear(x @ self.turned.weight, self.lm_head.weight))
        return torch.cat(parts, -1)


def total(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x


class StoreClient:
    """vLLM's four calls to all workers, through a store."""

    def __init__(self, store: Any) -> None:
        self._store, self._number = store, 0

    def _call(self, method: str, *args: Any) -> None:
        self._number += 1
        self._store.set(f"call/{self._number}", json.dumps([method, args]))
        for rank in range(SERVERS):
            said = self._store.get(f"done/{self._number}/{rank}").decode()
            if said:
                raise RuntimeError(f"worker {rank}: {said}")

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init", init_info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update")


def trained(rank: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = TrainedModel()
    full = TrainedModel()
    full.load_state_dict(model.state_dict())
    for layer in model.layers:
        fully_shard(layer, mesh=DeviceMesh("cpu", list(range(TRAINERS))))
    fully_shard(model, mesh=DeviceMesh("cpu", list(range(TRAINERS))))
    return model, full


def train(rank: int, store: Any) -> Any:
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from stretto.plugins.vllm_engine import StrettoTrainerInitInfo

    model, full = trained(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    info = StrettoTrainerInitInfo(
        rank=rank, address=f"127.0.0.1:{store_number(store, rank)}", world_size=TRAINERS + SERVERS,
        num_trainers=TRAINERS, timeout_s=400.0, staging_bytes=4096,
    )  # fmt: skip
    engine = WeightTransferTrainerFactory.trainer_init(
        info, client=StoreClient(PrefixStore("rpc", store)), source=ModuleSource(model)
    )
    tokens = torch.arange(VOCABULARY).view(2, -1)
    for step in range(STEPS):
        torch.autograd.backward(model(tokens).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        # What the servers must have: the full weights, and what the whole model answers with them.
        whole = {name: t.full_tensor() for name, t in model.state_dict().items()}
        if rank == 0:
            full.load_state_dict(whole)
            torch.save((whole, full(tokens).detach()), Path(sys.argv[1]) / f"step{step}.pt")
            store.set(f"step/{step}", b"1")
        engine.send_weights()
    if rank == 0:
        engine.client._call("end")
    engine.shutdown()
    return engine.version


def store_number(store: Any, rank: int) -> int:
    """A free port, which trainer 0 finds and tells."""
    if rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            store.set("port", str(free.getsockname()[1]))
    return int(store.get("port"))


def serve(rank: int, store: Any) -> Any:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    model = ServedModel(rank, SERVERS)
    parallel = SimpleNamespace(rank=rank, world_size=SERVERS, tensor_parallel_size=SERVERS, data_parallel_index=0)
    config = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(quantization=None))
    engine = WeightTransferEngineFactory.create_engine(
        SimpleNamespace(backend="stretto"), config, torch.device("cpu"), model
    )
    rpc, number = PrefixStore("rpc", store), 0
    found: list[Any] = []
    before: list[Any] = []
    tokens = torch.arange(VOCABULARY).view(2, -1)
    while True:
        number += 1
        method, args = json.loads(rpc.get(f"call/{number}"))
        if method == "init":
            engine.init_transfer_engine(engine.parse_init_info(*args))
            before.append([all(not p.any() for p in model.parameters()), sorted(engine.layout.direct)])
            model.loaded.clear()
        elif method == "update_weights":
            old = {name: p.clone() for name, p in model.named_parameters()}
            engine.update_weights(*args)
            # While bytes arrive the model serves the version before.
            before.append(all(torch.equal(old[name], p) for name, p in model.named_parameters()))
        elif method != "end":
            getattr(engine, method)()
        if method == "finish_weight_update":
            whole, answer = torch.load(Path(sys.argv[1]) / f"step{len(found)}.pt")
            loaded, wanted = list(model.loaded), ServedModel(rank, SERVERS)
            model.loaded.clear()
            wanted.load_weights(whole.items())
            own = dict(model.named_parameters())
            same = all(torch.equal(own[name], p) for name, p in wanted.named_parameters())
            found.append([same, bool(torch.allclose(model(tokens), answer, atol=1e-5)), loaded])
        rpc.set(f"done/{number}/{rank}", "")
        if method == "end":
            engine.shutdown()
            return [before, found]


def verl(rank: int, store: Any) -> Any:
    """Four workers, two of them actors, twice with the same group and once with one rollout worker less."""
    from verl.checkpoint_engine.base import CheckpointEngineRegistry

    from stretto.plugins import register_verl

    register_verl()
    actor = rank < TRAINERS
    engine = CheckpointEngineRegistry.new(
        "stretto", bucket_size=600, is_master=rank == 0, device="cpu", timeout_s=400.0
    )
    torch.manual_seed(0)
    found, groups = [], set()
    for step, size in enumerate((4, 4, 3)):
        if rank >= size:
            continue
        state = {name: (t * (step + 1)) for name, t in TrainedModel().state_dict().items()}
        state["half"] = torch.arange(7, dtype=torch.bfloat16) + step
        store.set(f"said/{step}/{rank}", json.dumps(engine.prepare()))
        said = [json.loads(store.get(f"said/{step}/{other}")) for other in range(size)]
        for one in said:
            one["group"] = tuple(one["group"])
        actors, rollouts = type(engine).build_topology(TRAINERS, size - TRAINERS, said)
        engine.init_process_group(**{key: [*actors[key], *rollouts[key]][rank] for key in actors})
        groups.add(engine._group[0])
        if actor:
            asyncio.run(engine.send_weights(iter(state.items()), global_steps=step))
        else:
            found.append(asyncio.run(received(engine, state)))
        engine.finalize()
        dist.barrier() if size == 4 else None
    engine.close()
    return [found, len(groups)]


async def received(engine: Any, state: dict[str, torch.Tensor]) -> bool:
    # In the order of the state, and only until the next is asked for: a loader copies.
    got = [(name, tensor.clone()) async for name, tensor in engine.receive_weights()]
    return [name for name, _ in got] == list(state) and all(torch.equal(t, state[name]) for name, t in got)


def run(rank: int) -> Any:
    """`stretto weights run` as a function: layouts in which two axes cut a dimension, and all three systems."""
    from stretto.weights import small_model

    made = stretto.torch.run_weights(
        small_model(64, layers=1), trainer="fsdp=2", server="tp=2", runs=1, staging_bytes=40_000
    )
    twice = stretto.torch.run_weights(
        small_model(64, layers=1), trainer="fsdp=2,tp=2", server="dp=2,tp=2@0-3", runs=1, systems=["stretto"]
    )
    fits = made.bound_us <= made.predicted_us
    return [[[s.system, s.exact, len(s.times_s)] for s in (*made.systems, *twice.systems)], fits, made.slowdown > 0]


def elastic(rank: int, port: int) -> Any:
    """A trainer, a server, and one that comes later with a number that nobody had; then the first server leaves."""
    number = (0, 1, 7, 9)[rank]
    world = stretto.torch.SyncWorld.join(f"127.0.0.1:{port}", number, name="elastic", timeout_s=400.0)
    weights = {"w": torch.arange(6.0), "b": torch.ones(3)} if rank == 0 else None
    goal = {"w": torch.zeros(6), "b": torch.zeros(3)} if rank else None
    sync: Any = None
    seen: list[Any] = []
    for step, ranks in enumerate(([0, 1], [0, 1, 7], [0, 7])):
        if number not in ranks:
            continue
        more: dict[str, Any] = {"ranks": ranks, "world": world}
        sync = sync.reform(ranks) if sync is not None else stretto.torch.WeightSync(weights, goal, **more)
        if weights is not None:
            weights["w"].add_(step)
        version = sync.update(checksums=step > 0)
        with sync.read() as held:
            seen.append([version, held["w"].sum().item() if rank else None])
    return [seen, damaged(sync) if number in ranks else ""]


def damaged(sync: Any) -> str:
    """A byte that changes on its way: found by the rank that has it, and no rank takes the version."""
    move = sync._state.move

    def broken(sources: Any, to: int, key: str, **more: Any) -> None:
        move(sources, to, key, **more)
        if "b" in sync._state.sets[to]:
            sync._state.sets[to]["b"][1] += 1

    sync._state.move = broken
    try:
        sync.update(checksums=True)
    except stretto.StrettoError as error:
        return f"{sync.version} {error}"
    return "nothing was noticed"


def main() -> None:
    folder = Path(sys.argv[1])
    port = store_port()
    real = {}
    for package, module in (("vllm", "vllm.distributed.weight_transfer"), ("verl", "verl.checkpoint_engine.base")):
        try:
            __import__(module)
            real[package] = True
        except ImportError:
            real[package] = False
            vllm_standin.install(package)
    from stretto.plugins import register_vllm

    register_vllm()
    register_vllm()

    def rank_main(rank: int) -> None:
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=400))
        side, at, size = ("train", rank, TRAINERS) if rank < TRAINERS else ("serve", rank - TRAINERS, SERVERS)
        dist.init_process_group("gloo", store=PrefixStore(side, store), rank=at, world_size=size)
        told = train(at, store) if side == "train" else serve(at, store)
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=PrefixStore("verl", store), rank=rank, world_size=4)
        told = {"vllm": told, "verl": verl(rank, PrefixStore("verl engine", store)), "real": real}
        told["run"] = run(rank)
        told["elastic"] = elastic(rank, port)
        (folder / f"{rank}.json").write_text(json.dumps(told))
        dist.barrier()
        dist.destroy_process_group()

    waiting = {_start(rank, rank_main): rank for rank in range(TRAINERS + SERVERS)}
    while waiting:
        process, status = os.wait()
        if status:
            sys.exit(f"rank {waiting[process]} failed")
        waiting.pop(process)


if __name__ == "__main__":
    main()
