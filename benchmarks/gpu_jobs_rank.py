# SPDX-License-Identifier: Apache-2.0
"""One rank of benchmarks/gpu_jobs.py: ``gpu_jobs_rank.py MODEL FOLDER STEPS``, a training script as users write them.

MODELS names what it can train; several, separated by commas, are trained one after the other. BACKEND is nccl (tensors
on the GPU), gloo (the same tensors) or cpu (gloo, small models on the CPU, to try the script without a GPU). Every rank
writes its losses and the time of each iteration to the folder. With PAIRS=N, under `stretto run`, one model is trained
and measured in turns (gpu_jobs_turns.py), and what ran each iteration is written, too; nothing else here knows of
Stretto. With HOLD=FILE everything is imported, and then the file is waited for, which says when to end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_jobs_turns import HALF, Turns, recorded_step
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

REFERENCE = HALF + 1
"""Iterations that are repeated with NCCL itself, to compare losses: the first ones under the plan, and one more. Later
ones differ by themselves: a ResNet's losses are 2 % apart after 24 iterations where only the order of a sum differs."""
GLOO_STEPS, TRACED = 12, 5
"""Iterations with gloo, and under PyTorch's profiler."""
LITTLE = os.environ.get("BACKEND") == "cpu"
WIDTH, LAYERS, BATCH, SEQUENCE, VOCABULARY = (128, 2, 1, 16, 512) if LITTLE else (256, 4, 8, 128, 2048)
TABLES, ROWS, EMBEDDED, SAMPLES, DENSE = (10, 100, 16, 256, 256) if LITTLE else (10, 1000, 64, 2048, 1024)


class Attention(nn.Module):
    """A layer of a small GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Causal attention with four heads, then a perceptron."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, length, 12, width // 4).transpose(1, 2).chunk(3, dim=1)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        added: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return added


class Gpt(nn.Module):
    """Tokens in, logits out; `keep` recomputes activations in the backward pass."""

    def __init__(self, width: int, layers: int, *, keep: bool = True) -> None:
        super().__init__()
        self.embedded, self.keep = nn.Embedding(VOCABULARY, width), keep
        self.layers = nn.ModuleList(Attention(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits of the next token."""
        x = self.embedded(tokens)
        for layer in self.layers:
            x = layer(x) if self.keep else checkpoint(layer, x, use_reentrant=False)
        logits: torch.Tensor = self.head(x)
        return logits


class Residual(nn.Module):
    """Two convolutions and a way past them."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))
        self.past = nn.Conv2d(before, width, 1, stride, bias=False) if before != width else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As in ResNet-18."""
        inner = self.norms[1](self.two(torch.relu(self.norms[0](self.one(x)))))
        return torch.relu(self.past(x) + inner)


def resnet(width: int) -> nn.Module:
    """ResNet-18 with half its channels."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU()]
    before = width
    for stage in range(4):
        for block in range(2):
            layers.append(Residual(before, width << stage, 2 if stage and not block else 1))
            before = width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 100))


class Exchange(torch.autograd.Function):
    """An all-to-all with splits, and back again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, sent: torch.Tensor, gives: list[int], takes: list[int]) -> torch.Tensor:
        """Rows to the ranks that need them."""
        ctx.splits = gives, takes
        taken = sent.new_empty((sum(takes), *sent.shape[1:]))
        dist.all_to_all_single(taken, sent.contiguous(), takes, gives)
        return taken

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Gradients to the ranks that have the tables."""
        gives, takes = ctx.splits
        back = gradient.new_empty((sum(gives), *gradient.shape[1:]))
        dist.all_to_all_single(back, gradient.contiguous(), gives, takes)
        return back, None, None


class Dlrm(nn.Module):
    """Tables dealt out over ranks, unequally, and a perceptron that every rank has."""

    def __init__(self) -> None:
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        whole = size * (size + 1) // 2
        ends = [round(TABLES * (at * (at + 1) // 2) / whole) for at in range(size + 1)]
        self.counts = [max(b - a, 0) for a, b in pairwise(ends)]
        draw = torch.Generator().manual_seed(100 + rank)
        self.tables = nn.Parameter(0.01 * torch.randn(self.counts[rank], ROWS, EMBEDDED, generator=draw))
        torch.manual_seed(1)
        self.dense: Any = nn.Sequential(
            nn.Linear(TABLES * EMBEDDED, DENSE), nn.ReLU(), nn.Linear(DENSE, DENSE), nn.ReLU(), nn.Linear(DENSE, 1)
        )

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """Look up this rank's tables for all samples, exchange, and go through the perceptron."""
        rank, size = dist.get_rank(), dist.get_world_size()
        share = indices.shape[0] // size
        first = sum(self.counts[:rank])
        mine = [self.tables[at][indices[:, first + at]] for at in range(self.counts[rank])]
        rows = torch.stack(mine, dim=1) if mine else self.tables.new_zeros(indices.shape[0], 0, EMBEDDED)
        flat = torch.cat([part.reshape(-1, EMBEDDED) for part in rows.chunk(size)])
        gives, takes = [share * self.counts[rank]] * size, [share * count for count in self.counts]
        taken = Exchange.apply(flat, gives, takes)  # type: ignore[no-untyped-call]
        parts = [part.view(share, -1) for part in taken.split(takes)]
        logits: torch.Tensor = self.dense(torch.cat(parts, dim=1))
        return logits


Step = Callable[[int], torch.Tensor]


class Job:
    """A model with its optimizer: `step` trains one iteration and returns its loss."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device, self.rank, self.size = name, device, dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.kind = name.partition("-")[0]
        net: Any
        if self.kind == "gpt":
            net = Gpt(WIDTH, LAYERS, keep=name != "gpt-loop")
        else:
            net = Dlrm() if self.kind == "dlrm" else resnet(WIDTH // 8)
        net = net.to(device)
        if name.startswith("gpt-fsdp2"):
            from torch.distributed.fsdp import fully_shard

            for layer in net.layers:
                fully_shard(layer)
            fully_shard(net)
        elif self.kind == "dlrm":
            net.dense = self._replicated(net.dense)
        else:
            net = self._replicated(net)
        if name == "gpt-compiled":
            net = torch.compile(net)
        self.net = net
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.05)

    def _replicated(self, net: nn.Module) -> nn.Module:
        ids = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(net, device_ids=ids, bucket_cap_mb=4)

    def tensors(self) -> list[torch.Tensor]:
        """This rank's part of all parameters and buffers."""
        found = [one.detach() for one in (*self.net.parameters(), *self.net.buffers())]
        return [one.to_local() if hasattr(one, "to_local") else one for one in found]

    def step(self, number: int) -> torch.Tensor:
        """Two micro-batches, the first without a sum, and an evaluation now and then, where the name ends in loop."""
        parts = 2 if self.name == "gpt-loop" else 1
        for part in range(parts):
            with self.net.no_sync() if part < parts - 1 else nullcontext():
                loss = self._loss(parts * number + part)
                loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.name == "gpt-loop" and number % 25 == 24:
            with torch.no_grad():
                loss = self._loss(number)
                dist.all_reduce(loss)
        return loss.detach()

    def _loss(self, number: int) -> torch.Tensor:
        own = 0 if self.kind == "dlrm" else self.rank
        draw = torch.Generator().manual_seed(1000 * own + number)
        if self.kind == "dlrm":
            indices = torch.randint(ROWS, (SAMPLES, TABLES), generator=draw).to(self.device)
            share = indices[self.rank * SAMPLES // self.size : (self.rank + 1) * SAMPLES // self.size]
            return nn.functional.mse_loss(self.net(indices).squeeze(1), (share.sum(1) % 7).float() / 7)
        if self.kind == "resnet":
            images = torch.randn(BATCH * 4, 3, 32, 32, generator=draw).to(self.device)
            return nn.functional.cross_entropy(
                self.net(images), torch.randint(100, (BATCH * 4,), generator=draw).to(self.device)
            )
        tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=draw).to(self.device)
        logits = self.net(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    """Train, and write what it took: under `stretto run` one model, else several, on one backend after the other."""
    names, folder, steps = sys.argv[1].split(","), Path(sys.argv[2]), int(sys.argv[3])
    backends = os.environ.get("BACKEND", "nccl").split(",")
    torch.set_num_threads(1)
    # Several ranks on one GPU work with NCCL when each believes to be on a host of its own.
    os.environ.setdefault("NCCL_HOSTID", f"rank{os.environ['RANK']}")
    device = torch.device("cpu" if "cpu" in backends else "cuda:0")
    if device.type == "cuda":
        torch.zeros(1, device=device)
    deadline_s = _released()
    if "PAIRS" in os.environ:
        under(names[0], folder, steps, device, deadline_s)
        return
    several = len(names) * len(backends) > 1
    for backend in backends:
        where = folder / backend if several else folder
        where.mkdir(parents=True, exist_ok=True)
        # What gloo may not be able to do on a GPU comes last.
        for name in sorted(names, key=lambda name: "fsdp" in name) if backend == "gloo" else names:
            try:
                if time.time() < deadline_s:
                    alone(name, where, backend, GLOO_STEPS if backend == "gloo" else steps, device)
            except (RuntimeError, ValueError) as error:
                # One that a backend cannot train leaves a line, and the next one begins.
                if not several:
                    raise
                print(f"{name} with {backend}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
                dist.destroy_process_group()


def _meet(backend: str, **options: Any) -> None:
    """Make the default process group, each time at another port: who is early would find the last one."""
    dist.init_process_group(backend, **options)
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)


def alone(name: str, folder: Path, backend: str, steps: int, device: torch.device) -> None:
    """Train a model as a user would."""
    _meet("gloo" if backend == "cpu" else backend)
    job = Job(name, device)
    _write(folder, name, train(job, steps))
    if "TRACES" in os.environ and backend != "gloo":
        profiled(job, folder / f"{name}.traces", steps)
    job.net = None
    dist.destroy_process_group()


def profiled(job: Job, folder: Path, first: int) -> None:
    """Some more iterations under PyTorch's profiler, to compare a recording of ours with."""
    from torch.profiler import ProfilerActivity, profile, schedule

    folder.mkdir(exist_ok=True)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (job.device.type == "cuda")
    file = str(folder / f"rank{job.rank}.json.gz")
    with profile(
        activities=activities, schedule=schedule(wait=1, warmup=2, active=TRACED, repeat=1), record_shapes=True,
        on_trace_ready=lambda made: made.export_chrome_trace(file),
    ) as profiler:  # fmt: skip
        for step in range(3 + TRACED):
            job.step(first + step)
            profiler.step()


def under(name: str, folder: Path, steps: int, device: torch.device, deadline_s: float) -> None:
    """Train a model under `stretto run`, measuring in turns; what was measured so far is written after each pair."""
    begun_s = time.time()
    _meet("gloo" if device.type == "cpu" else "nccl")
    job, turns = Job(name, device), Turns(int(os.environ["PAIRS"]), deadline_s)
    told = train(job, steps, turns, folder)
    told |= {"first": turns.first, "predicted_us": turns.predicted_us, "trained_s": time.time() - begun_s}
    step = recorded_step()
    if step is not None and job.rank == 0:
        step.save(folder / f"{name}.step.yaml")
    _write(folder, name, told)
    job.net = turns.store = None
    dist.destroy_process_group()
    if turns.kept:
        told["reference"] = reference(name, device, turns.first, turns.kept)
        _write(folder, name, told | {"whole_s": time.time() - begun_s})


def _write(folder: Path, name: str, told: dict[str, Any]) -> None:
    path = folder / f"{name}-{os.environ['RANK']}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(told))
    part.rename(path)


def train(job: Job, steps: int, turns: Turns | None = None, folder: Path | None = None) -> dict[str, Any]:
    """One model: losses, the times of iterations and, with turns, what ran each of them."""
    losses: list[torch.Tensor] = []
    runs: list[str] = []
    ends: list[Any] = []
    for step in range(steps):
        if turns is not None and folder is not None:
            label = turns.label(step)
            if turns.pair_ended:
                # The run may be cut off before its end.
                told = {"losses": [], "times_ms": _times_ms(ends), "runs": runs, "predicted_us": turns.predicted_us}
                _write(folder, job.name, told)
            if turns.first == step:
                turns.kept = [tensor.clone() for tensor in job.tensors()]
            if not label:
                break
            runs.append(label)
        losses.append(job.step(step))
        ends.append(_moment(job.device))
    return {"losses": [float(loss) for loss in losses], "times_ms": _times_ms(ends), "runs": runs}


def _times_ms(ends: list[Any]) -> list[float]:
    if not ends or isinstance(ends[0], float):
        return [0.0, *(1e3 * (b - a) for a, b in pairwise(ends))]
    ends[-1].synchronize()
    return [0.0, *(a.elapsed_time(b) for a, b in pairwise(ends))]


def reference(name: str, device: torch.device, first: int, kept: list[torch.Tensor]) -> list[float]:
    """The losses from where the plan became active on, with NCCL itself: with options of its own it is left alone."""
    if device.type == "cpu":
        _meet("gloo")
    else:
        _meet("nccl", pg_options=dist.ProcessGroupNCCL.Options())
    job = Job(name, device)
    with torch.no_grad():
        for tensor, value in zip(job.tensors(), kept, strict=True):
            tensor.copy_(value)
    losses = [float(job.step(first + step)) for step in range(REFERENCE)]
    job.net = None
    dist.destroy_process_group()
    return losses


def _released() -> float:
    """When the run has to end: as HOLD's file says, which comes when it is this run's turn."""
    if "HOLD" not in os.environ:
        return float(os.environ.get("DEADLINE", "inf"))
    file = Path(os.environ["HOLD"])
    while not file.exists():
        time.sleep(0.02)
    return float(file.read_text())


def _moment(device: torch.device) -> Any:
    """An end of an iteration, by the device's clock."""
    if device.type == "cpu":
        return time.perf_counter()
    cuda: Any = torch.cuda
    event = cuda.Event(enable_timing=True)
    event.record()
    return event


MODELS = ("gpt-fsdp2", "dlrm", "resnet-ddp", "gpt-ddp", "gpt-compiled", "gpt-fsdp2-early", "gpt-loop")

if __name__ == "__main__":
    main()
