# SPDX-License-Identifier: Apache-2.0
"""One training step of a transformer as ops: stages in 1F1B order, layers, shards, replicas and experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ..dag import Workload
from ..roofline import Accelerator
from .common import Groups, OpCollector, blocks_of_buckets, buckets
from .parallel import Replicas
from .transformer_shape import TransformerShape

HALF = 2
"""Bytes of one FP16 number."""
ADAM_BYTES = 28
"""Bytes that Adam moves per parameter: it reads the gradient (2), a master copy and two moments (12), and writes these
and the parameter (14)."""
ATTENTION_KERNELS = 5
MLP_KERNELS = 3

Action = tuple[str, int]


class TransformerStep:
    """Builds the ops of one training iteration."""

    def __init__(self, shape: TransformerShape, replicas: int, device: Accelerator) -> None:
        self.shape, self.replicas, self.device = shape, replicas, device
        self.steps = OpCollector(replicas * shape.tensor * shape.pipeline)
        self.activation_bytes = float(HALF * shape.tokens * shape.hidden)
        self.stages = [StageLayers(self, at) for at in range(shape.pipeline)]

    def workload(self, name: str, *, unit: str) -> Workload:
        """The whole step: each stage in its 1F1B order, and ops of different stages by their start times."""
        shape = self.shape
        orders = (one_f_one_b(at, shape.pipeline, shape.micro_batches) for at in range(shape.pipeline))
        queues = [list(reversed(list(order))) for order in orders]
        done: set[tuple[int, str, int]] = set()
        while any(queues):
            for at, queue in enumerate(queues):
                while queue and self._ready(at, queue[-1], done):
                    what, micro = queue.pop()
                    (self.stages[at].forward if what == "F" else self.stages[at].backward)(micro)
                    done.add((at, what, micro))
        words = shape.tokens * shape.micro_batches * self.replicas
        notes = (
            f"{shape.parameters / 1e9:.4g} G parameters; {self.replicas} replicas ({shape.mode}) of {shape.pipeline} "
            f"stages x {shape.tensor} shards; {shape.micro_batches} micro-batches of {shape.batch} x {shape.seq} words",
            f"compute: {self.device.name} at {self.device.efficiency:.3g} of its roofline, FP16",
        )
        step = self.steps.workload(name, samples=words, unit=unit, notes=notes)
        return by_time(step) if shape.pipeline > 1 else step

    def _ready(self, stage: int, action: Action, done: set[tuple[int, str, int]]) -> bool:
        what, micro = action
        if what == "F":
            return stage == 0 or (stage - 1, "F", micro) in done
        return stage == self.shape.pipeline - 1 or (stage + 1, "B", micro) in done


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> Iterator[Action]:
    """The order of a stage: ``stages - stage`` forward passes, then backward and forward passes in turn.

    >>> " ".join(f"{what}{micro}" for what, micro in one_f_one_b(1, 3, 3))
    'F0 F1 B0 F2 B1 B2'

    Args:
        stage: index of the stage, 0..stages-1.
        stages: number of stages.
        micro_batches: micro-batches of an iteration, >= 1.

    Returns:
        Pairs of "F" or "B" and the index of the micro-batch.
    """
    warm = min(stages - stage, micro_batches)
    yield from (("F", micro) for micro in range(warm))
    for micro in range(micro_batches):
        yield ("B", micro)
        if micro + warm < micro_batches:
            yield ("F", micro + warm)


def by_time(step: Workload) -> Workload:
    """The same ops sorted by when they would start if communication took no time; the order of every rank is kept.

    So a receive from a neighbor stage stands in the list where the stage uses it, not where the neighbor was listed.
    """
    end: dict[str, float] = {}
    free: dict[tuple[int, str], float] = {}
    starts = []
    for op, places, each_us in zip(step.ops, step.op_places, step.op_durations_us, strict=True):
        held = [] if op.is_comm else [(place, op.stream) for place in places]
        start = max([0.0, *(end[dep.op] for dep in op.after if dep.lag == 0), *(free.get(at, 0.0) for at in held)])
        end[op.name] = start + max(each_us, default=0.0)
        free.update(dict.fromkeys(held, end[op.name]))
        starts.append(start)
    order = sorted(range(len(starts)), key=lambda at: starts[at])
    return replace(step, ops=tuple(step.ops[at] for at in order))


class StageLayers:
    """The layers of one pipeline stage."""

    def __init__(self, step: TransformerStep, at: int) -> None:
        self.step, self.at, self.shape, self.steps = step, at, step.shape, step.steps
        shape, replicas = self.shape, step.replicas
        base = at * replicas * shape.tensor
        self.ranks = tuple(range(base, base + replicas * shape.tensor))
        self.tensor_groups: Groups = tuple(
            self.ranks[d * shape.tensor : (d + 1) * shape.tensor] for d in range(replicas)
        )
        each = shape.layers // shape.pipeline
        self.layers = range(at * each, (at + 1) * each)
        self.first, self.last = at == 0, at == shape.pipeline - 1
        self.pairs: dict[int, Groups] = {}
        """The groups of sends to each neighbor; ops of all micro-batches share them."""
        self.dense = self._dense()
        self.experts = self._experts() if any(shape.is_moe(layer) for layer in self.layers) else None

    def _dense(self) -> Replicas:
        """All parameters but the experts; block 0 is the embedding of the first stage, the block after the layers is
        the
        head.
        """
        shape = self.shape
        table = shape.vocab * shape.hidden / shape.tensor
        params = [table if self.first else 0.0]
        params += [(4 if shape.is_moe(at) else 12) * shape.hidden**2 / shape.tensor for at in self.layers]
        params += [table if self.last and not self.first else 0.0]
        replicas = self.step.replicas
        groups = tuple(self.ranks[t :: shape.tensor] for t in range(shape.tensor))
        return self._replicas("", params, replicas, groups)

    def _experts(self) -> Replicas:
        shape, replicas = self.shape, self.step.replicas
        mine = shape.experts // shape.expert_parallel * 8 * shape.hidden**2 / shape.tensor
        params = [0.0, *(mine if shape.is_moe(at) else 0.0 for at in self.layers), 0.0]
        stride = shape.expert_parallel * shape.tensor
        groups = tuple(self.ranks[t::stride] for t in range(stride))
        return self._replicas("experts", params, replicas // shape.expert_parallel, groups)

    def _replicas(self, what: str, params: list[float], members: int, groups: Groups) -> Replicas:
        shape = self.shape
        held = [at for at, count in enumerate(params) if count]
        if shape.mode == "zero3":
            layers = [at for at in held if 0 < at <= len(self.layers)]
            units = [layers[at : at + shape.unit_layers] for at in range(0, len(layers), shape.unit_layers)]
            units = [*([[0]] if params[0] else []), *units, *([[len(params) - 1]] if params[-1] else [])]
        else:
            sizes = [params[at] * HALF for at in held]
            units = [[held[at] for at in unit] for unit in blocks_of_buckets(buckets(sizes, shape.bucket_bytes))]
        stage = f"s{self.at}" if shape.pipeline > 1 else ""
        return Replicas(
            self.steps,
            self.step.device,
            what="-".join(part for part in (what or "params", stage) if part),
            params=params,
            units=units,
            mode=shape.mode,
            members=members,
            groups=groups if members > 1 else ((0,),),
            ranks=self.ranks,
            param_bytes=HALF,
            grad_bytes=HALF,
            optimizer_bytes=ADAM_BYTES,
            dtype="fp16",
            micro_batches=shape.micro_batches,
            # The output layer uses the embedding's matrix, so that unit stays gathered between forward and backward.
            resident=[0] if params[0] else [],
        )

    def forward(self, micro: int) -> None:
        """Add one forward pass of a micro-batch, and the send of its result."""
        after = [] if self.first else [self._name("send-fwd", self.at - 1, micro, "s")]
        if self.first:
            after = self._enter("forward", 0, micro)
            nbytes = 2 * self.step.activation_bytes
            after = [self._compute(self._name("fwd-emb", None, micro), 0.0, nbytes, after, "forward")]
            self._leave("forward", 0, after[0], micro)
            after = [self._shards_reduce(self._name("tp-fwd-emb", None, micro), after, "forward")]
        for number, layer in enumerate(self.layers, start=1):
            after = [*after, *self._enter("forward", number, micro)]
            after, end = self._layer(layer, micro, after, "forward")
            self._leave("forward", number, end, micro)
        if self.last:
            self._head(micro, after, "forward")
        else:
            self._send("send-fwd", self.at, self.at + 1, micro, after, "forward")

    def backward(self, micro: int) -> None:
        """Add one backward pass of a micro-batch, and the send of its gradient."""
        if self.last:
            after = self._head(micro, [self._name("fwd-head", None, micro)], "backward")
        else:
            after = [self._name("send-bwd", self.at + 1, micro, "s")]
        for number, layer in reversed(list(enumerate(self.layers, start=1))):
            after = [*after, *self._enter("backward", number, micro)]
            after, end = self._layer(layer, micro, after, "backward")
            self._leave("backward", number, end, micro)
        if not self.first:
            self._send("send-bwd", self.at, self.at - 1, micro, after, "backward")
            return
        after = [*after, *self._enter("backward", 0, micro)]
        nbytes = 2 * self.step.activation_bytes
        end = self._compute(self._name("bwd-emb", None, micro), 0.0, nbytes, after, "backward")
        self._leave("backward", 0, end, micro)

    def _head(self, micro: int, after: list[str], phase: str) -> list[str]:
        shape, passes, verb = self.shape, *_passes(phase)
        block = 0 if self.first else len(self.layers) + 1
        own = block != 0
        needs = [*after, *(self._enter(phase, block, micro) if own else [])]
        flops = passes * 2 * shape.tokens * shape.hidden * shape.vocab / shape.tensor
        logits = HALF * shape.tokens * shape.vocab / shape.tensor
        nbytes = passes * (HALF * shape.hidden * shape.vocab / shape.tensor + self.step.activation_bytes + 2 * logits)
        name = self._compute(self._name(f"{verb}-head", None, micro), flops, nbytes, needs, phase)
        if own:
            self._leave(phase, block, name, micro)
        if phase == "forward":
            return [name]
        return [self._shards_reduce(self._name(f"tp-{verb}-head", None, micro), [name], phase)]

    def _layer(self, layer: int, micro: int, after: list[str], phase: str) -> tuple[list[str], str]:
        """Add attention and MLP (or experts), each between its collectives; return the ops to wait for, and the last
        op.
        """
        shape, (_, verb) = self.shape, _passes(phase)
        if shape.tensor == 1 and not shape.is_moe(layer):
            attention, mlp = self._attention_us(phase), self._mlp_us(phase)
            name = self.steps.compute(
                self._name(f"{verb}-layer", layer, micro), attention + mlp, after, phase=phase, ranks=self.ranks
            )
            return [name], name
        halves: list[tuple[str, Callable[[str], float]]] = [("attn", self._attention_us)]
        halves.append(("experts", self._experts_us) if shape.is_moe(layer) else ("mlp", self._mlp_us))
        end = ""
        for what, duration in halves if phase == "forward" else reversed(halves):
            name = self._name(f"{verb}-{what}", layer, micro)
            if what == "experts":
                after = [self._exchange(f"a2a-in-{name}", after, phase)]
            after = [*after, *self._shards_gather(f"tp-in-{name}", after, phase)]
            end = self.steps.compute(name, duration(phase), after, phase=phase, ranks=self.ranks)
            after = [self._shards_reduce(f"tp-{name}", [name], phase)]
            if what == "experts":
                after = [self._exchange(f"a2a-out-{name}", after, phase)]
        return after, end

    def _attention_us(self, phase: str) -> float:
        shape, (passes, _) = self.shape, _passes(phase)
        tokens, hidden = shape.tokens, shape.hidden
        flops = (8 * tokens * hidden**2 + 4 * tokens * shape.seq * hidden) / shape.tensor
        scores = 4 * shape.batch * shape.heads * shape.seq**2 / shape.tensor
        nbytes = HALF * (4 * hidden**2 / shape.tensor + tokens * hidden * (2 + 5 / shape.tensor) + scores)
        return self.step.device.compute_us(passes * flops, passes * nbytes, kernels=passes * ATTENTION_KERNELS)

    def _mlp_us(self, phase: str) -> float:
        return self._ffn_us(phase, self.shape.tokens, 1)

    def _experts_us(self, phase: str) -> float:
        shape = self.shape
        return self._ffn_us(phase, shape.tokens * shape.top_k, shape.experts // shape.expert_parallel)

    def _ffn_us(self, phase: str, tokens: int, matrices: int) -> float:
        shape, (passes, _) = self.shape, _passes(phase)
        flops = 16 * tokens * shape.hidden**2 / shape.tensor
        weights = matrices * 8 * shape.hidden**2 / shape.tensor
        nbytes = HALF * (weights + tokens * shape.hidden * (2 + 8 / shape.tensor))
        kernels = passes * MLP_KERNELS * matrices
        return self.step.device.compute_us(passes * flops, passes * nbytes, kernels=kernels)

    def _shards_gather(self, name: str, after: list[str], phase: str) -> list[str]:
        """Gather the activations that sequence parallelism keeps in shards between the halves of a layer."""
        if not self.shape.sequence_parallel:
            return []
        return [self._shards(name, "all_gather", after, phase)]

    def _shards_reduce(self, name: str, after: list[str], phase: str) -> str:
        return self._shards(name, "reduce_scatter" if self.shape.sequence_parallel else "all_reduce", after, phase)

    def _shards(self, name: str, kind: str, after: list[str], phase: str) -> str:
        return self.steps.comm(
            name, kind, self.step.activation_bytes, after, phase=phase, groups=self.tensor_groups, encoding="fp16"
        )

    def _exchange(self, name: str, after: list[str], phase: str) -> str:
        """Send tokens to their experts, or back, between the replicas that share a set of experts."""
        shape = self.shape
        size = shape.expert_parallel * shape.tensor
        groups = tuple(
            self.ranks[start + t : start + size : shape.tensor]
            for start in range(0, len(self.ranks), size)
            for t in range(shape.tensor)
        )
        nbytes = self.step.activation_bytes * shape.top_k
        return self.steps.comm(name, "all_to_all", nbytes, after, phase=phase, groups=groups, encoding="fp16")

    def _send(self, what: str, source: int, target: int, micro: int, after: list[str], phase: str) -> None:
        if target not in self.pairs:
            self.pairs[target] = tuple(zip(self.ranks, self.step.stages[target].ranks, strict=True))
        nbytes = self.step.activation_bytes / (self.shape.tensor if self.shape.sequence_parallel else 1)
        self.steps.comm(
            self._name(what, source, micro, "s"),
            "send",
            nbytes,
            after,
            phase=phase,
            groups=self.pairs[target],
            encoding="fp16",
        )

    def _compute(self, name: str, flops: float, nbytes: float, after: list[str], phase: str) -> str:
        return self.steps.compute(
            name, self.step.device.compute_us(flops, nbytes), after, phase=phase, ranks=self.ranks
        )

    def _enter(self, phase: str, block: int, micro: int) -> list[str]:
        needs: list[str] = []
        for replicas in self._holders(block):
            needs += (replicas.enter_forward if phase == "forward" else replicas.enter_backward)(block, micro)
        return needs

    def _leave(self, phase: str, block: int, op: str, micro: int) -> None:
        for replicas in self._holders(block):
            if phase == "forward":
                replicas.leave_forward(block, op)
            else:
                replicas.leave_backward(block, op, micro)

    def _holders(self, block: int) -> list[Replicas]:
        return [held for held in (self.dense, self.experts) if held is not None and block in held.unit_of]

    def _name(self, what: str, number: int | None, micro: int, mark: str = "") -> str:
        name = what if number is None else f"{what}.{mark}{number}"
        return name if self.shape.micro_batches == 1 else f"{name}.m{micro}"


def _passes(phase: str) -> tuple[int, str]:
    return (1, "fwd") if phase == "forward" else (2, "bwd")
