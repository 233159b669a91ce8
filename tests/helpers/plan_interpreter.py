# SPDX-License-Identifier: Apache-2.0
"""A second interpreter of MSCCL++ plans, for tests: it reads the JSON and shares no code with Stretto's reader.

Threads of a threadblock take turns in drawn orders and meet only at a `nop`; some are left behind on purpose. Ranks
launch again as soon as they are through, on new data. Nothing is known of clocks: a plan is wrong where a result is.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Plan = dict[str, Any]
Values = list[list[int | None]]
Case = Callable[[int], tuple[Values, Values]]
"""The inputs of all ranks, and the outputs to expect, of each launch."""
End = tuple[int, int, str, int]
"""One end of a channel: the rank, its peer, the type, and which of those between the two."""
ELEMENT_BYTES = 16
PACKETS = {
    "ppkt": ("l", "k"), "rppkt": ("k", "k"), "upkt": ("k", "l"), "repkt": ("lk", "l"), "respkt": ("lk", "lk"),
}  # fmt: skip
"""Which sources and destinations of an operation are packets (k)."""
PAIRWISE = ("copy", "put", "get", "ppkt", "pws")


class WrongPlanError(Exception):
    """A result is wrong, or ranks wait for ever."""


class Cells(NamedTuple):
    """Places of one buffer; where they hold packets, `flags` has the launch that each is of."""

    memory: list[int | None]
    flags: list[int]
    at: list[int]
    packet: bool


class Thread:
    """One thread of a threadblock, at one of its operations."""

    def __init__(self, rank: int, block: int, number: int) -> None:
        self.rank, self.block, self.number, self.pc = rank, block, number, 0
        self.ticket: int | None = None


class PlanInterpreter:
    """A plan that is run once: so many launches on so many elements of a chunk, in the order of one seed."""

    def __init__(self, plan: Plan, elements: int, seed: int, *, launches: int = 4) -> None:
        self.plan, self.elements, self.launches = plan, elements, launches
        self.gpus: list[dict[str, Any]] = plan["gpus"]
        self.random = random.Random(seed)
        self.double = bool(plan["use_double_scratch_buffer"])
        self.signals: dict[End, int] = defaultdict(int)
        self.taken: dict[End, int] = defaultdict(int)
        self.ports: dict[End, list[list[tuple[Cells, Cells]]]] = defaultdict(list)
        self.semaphores = [[one["init_value"] for one in gpu.get("semaphores", [])] for gpu in self.gpus]
        self.launch = [-1] * len(self.gpus)
        self.met: dict[tuple[int, int, int], set[int]] = defaultdict(set)
        self.left: dict[tuple[int, int, int], int] = defaultdict(int)
        self._lay_out()
        self.ops = {
            (r, b): list(self._unrolled(tb["ops"]))
            for r, gpu in enumerate(self.gpus)
            for b, tb in enumerate(gpu["threadblocks"])
        }
        few = self.random.choice((2, 3))
        self.width = {
            key: max(
                [few, *(1 + max(len(op.get("channel_ids", [])), len(op.get("semaphore_ids", []))) for op, _ in ops)]
            )
            for key, ops in self.ops.items()
        }
        self.threads = [Thread(r, b, k) for (r, b), width in self.width.items() for k in range(width)]

    def _lay_out(self) -> None:
        self.buffers: list[dict[str, tuple[list[int | None], list[int], int]]] = []
        self.half = []
        self.end_of: list[dict[tuple[str, int], End]] = [{} for _ in self.gpus]
        seen: dict[tuple[int, int, str], int] = defaultdict(int)
        for r, gpu in enumerate(self.gpus):
            e, sizes = self.elements, (gpu["input_chunks"], gpu["output_chunks"])
            begins = [0, 0]
            if self.plan["inplace"]:
                # The smaller of the two is the rank's part of the other.
                begins[sizes[0] > sizes[1]] = r * min(sizes) * e if sizes[0] != sizes[1] else 0
                shared: list[int | None] = [None] * (max(sizes) * e)
                memories = [shared, shared]
            else:
                memories = [[None] * (size * e) for size in sizes]
            self.half.append(gpu["scratch_chunks"] * e * (2 if self.plan["protocol"] == "LL" else 1))
            scratch = self.half[r] * (2 if self.double else 1)
            self.buffers.append({
                "i": (memories[0], [], begins[0]), "o": (memories[1], [], begins[1]),
                "s": ([None] * scratch, [0] * scratch, 0),
            })  # fmt: skip
            for kind in ("memory", "port"):
                peers = [p for c in gpu["channels"] if c["channel_type"] == kind for p in c["connected_to"]]
                for number, peer in enumerate(peers):
                    self.end_of[r][kind, number] = (r, peer, kind, seen[r, peer, kind])
                    seen[r, peer, kind] += 1

    def _unrolled(self, ops: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], tuple[int, int] | None]]:
        """Operations, those of loops as often as their bytes say: (operation, (first element, elements) or None)."""
        for op in ops:
            if op["name"] != "pipeline":
                yield op, None
                continue
            unit = op["iter_context"]["unit_size"] // ELEMENT_BYTES
            for turn in range(-(-op["iter_context"]["num_chunks"] * self.elements // unit)):
                for inner in op["ops"]:
                    yield inner, (turn * unit, unit)

    def run(self, case: Case) -> None:
        """Run all launches; raises `WrongPlanError`."""
        self.case = case
        mine = [[t for t in self.threads if t.rank == r] for r in range(len(self.gpus))]
        behind = set(self.random.sample(self.threads, self.random.randrange(1 + len(self.threads) // 2)))
        for r in range(len(self.gpus)):
            self._begin(r)
        stuck = 0
        while any(launch < self.launches for launch in self.launch):
            moved = False
            self.random.shuffle(self.threads)
            for thread in self.threads:
                if thread in behind and stuck < 3 and self.random.random() < 0.95:
                    continue
                for _ in range(self.random.choice((1, 1, 3, 20))):
                    if thread.pc == len(self.ops[thread.rank, thread.block]) or not self._step(thread):
                        break
                    moved = True
            for end, queue in self.ports.items():
                while queue and (stuck > 1 or self.random.random() < 0.3):
                    moved = True
                    self._serve(end, queue.pop(0))
            for r, threads in enumerate(mine):
                if self.launch[r] < self.launches and all(t.pc == len(self.ops[r, t.block]) for t in threads):
                    moved = True
                    self._end(r)
                    self._begin(r)
                    for thread in threads:
                        thread.pc = 0 if self.launch[r] < self.launches else len(self.ops[r, thread.block])
            stuck = 0 if moved else stuck + 1
            if stuck > 5:
                raise WrongPlanError("ranks wait for ever")
        if any(count != self.taken[end] for end, count in self.signals.items()):
            raise WrongPlanError("signals are left")

    def _begin(self, rank: int) -> None:
        self.launch[rank] += 1
        if self.launch[rank] == self.launches:
            return
        for name, values in (("o", None), ("i", self.case(self.launch[rank])[0][rank])):
            memory, _, begin = self.buffers[rank][name]
            count = self.elements * self.gpus[rank]["input_chunks" if name == "i" else "output_chunks"]
            given = values or []  # In a broadcast only the root gives something.
            memory[begin : begin + count] = [*given, *[None] * (count - len(given))]

    def _end(self, rank: int) -> None:
        want = self.case(self.launch[rank])[1][rank]
        memory, _, begin = self.buffers[rank]["o"]
        if memory[begin : begin + len(want)] != want:
            raise WrongPlanError(f"the output of rank {rank} is wrong after launch {self.launch[rank]}")
        memory[begin : begin + len(want)] = [None] * len(want)

    def _cells(self, thread: Thread, op: dict[str, Any], part: dict[str, Any], packet: bool) -> list[Cells]:
        """The places of a source or destination that this thread serves."""
        gpu, places = self.gpus[thread.rank], []
        block = gpu["threadblocks"][thread.block]
        if "switch_channel_id" in part:
            used = [c for ref in block["channels"] if ref["channel_type"] == "switch" for c in ref["channel_ids"]]
            known = [
                (rank_group["ranks"], channels["buffer_type"])
                for channels in gpu["channels"] if channels["channel_type"] == "switch"
                for rank_group in channels["rank_groups"]
            ]  # fmt: skip
            ranks, name = known[used[part["switch_channel_id"]]]
            places = [(rank, name) for rank in ranks]
        elif "buffer_id" in part:
            refs = [ref for ref in block["remote_buffer_refs"] if ref["access_channel_type"] == op["channel_type"]]
            used = [number for ref in refs for number in ref["remote_buffer_ids"]]
            remote = gpu["remote_buffers"][used[part["buffer_id"]]]
            places = [(remote["rank"], remote["type"])]
        else:
            places = [(thread.rank, part["type"])]
        total = part["size"] * self.elements
        slice_, slices = op.get("tbg_info", {}).get("tb_id", 0), op.get("tbg_info", {}).get("tbg_size", 1)
        first, last = (k * (total // slices) + min(k, total % slices) for k in (slice_, slice_ + 1))
        _, turn = self.ops[thread.rank, thread.block][thread.pc]
        if turn is not None:
            first, last = min(first + turn[0], last), min(first + sum(turn), last)
        share = range(first, last)
        if op.get("channel_type") != "port":
            width = self.width[thread.rank, thread.block]
            share = share[(thread.number + thread.pc) % width :: width]
        found = []
        for rank, name in places:
            memory, flags, begin = self.buffers[rank][name]
            begin += part["index"] * self.elements * (2 if packet else 1)
            if name == "s" and self.double and self.launch[thread.rank] % 2:
                begin += self.half[rank]
            found.append(Cells(memory, flags, [begin + at * (2 if packet else 1) for at in share], packet))
        return found

    def _sides(self, thread: Thread, op: dict[str, Any]) -> list[list[Cells]]:
        sides = []
        for side, key in enumerate(("src_buff", "dst_buff")):
            shape = PACKETS.get(op["name"], ("l", "l"))[side]
            parts = enumerate(op.get(key, []))
            sides.append([
                cells for at, part in parts
                for cells in self._cells(thread, op, part, shape[min(at, len(shape) - 1)] == "k")
            ])  # fmt: skip
        return sides

    def _step(self, thread: Thread) -> bool:
        """One operation of a thread; False where it has to wait."""
        op, _ = self.ops[thread.rank, thread.block][thread.pc]
        name, number = op["name"], thread.number
        channels, semaphores = op.get("channel_ids", []), op.get("semaphore_ids", [])
        if name == "nop":
            return self._meet(thread)
        if name in ("wait", "rlxwait"):
            if number < len(channels) and not self._heard(thread, self._end_at(thread, op, channels[number])):
                return False
        elif name in ("signal", "rlxsignal"):
            if number < len(channels):
                end = self._end_at(thread, op, channels[number])
                self.ports[end].append([]) if end[2] == "port" else self._arrive(end)
        elif name == "sem_acquire":
            if number < len(semaphores):
                if not self.semaphores[thread.rank][semaphores[number]]:
                    return False
                self.semaphores[thread.rank][semaphores[number]] -= 1
        elif name == "sem_release":
            if number < len(semaphores):
                self.semaphores[thread.rank][semaphores[number]] += 1
        elif op.get("channel_type") == "port":
            if number < len(channels):
                source, target = (side[number] for side in self._sides(thread, op))
                queue = self.ports[self._end_at(thread, op, channels[number])]
                queue.append([(source, target)])
                queue += [[]] if name == "pws" else []
        elif not self._move(thread, op):
            return False
        thread.pc += 1
        return True

    def _meet(self, thread: Thread) -> bool:
        key = (thread.rank, thread.block, thread.pc)
        width = self.width[key[:2]]
        self.met[key].add(thread.number)
        if len(self.met[key]) < width:
            return False
        self.left[key] += 1
        if self.left[key] == width:
            del self.left[key], self.met[key]
        thread.pc += 1
        return True

    def _heard(self, thread: Thread, end: End) -> bool:
        if thread.ticket is None:
            thread.ticket = self.taken[end]
            self.taken[end] += 1
        if self.signals[end] <= thread.ticket:
            return False
        thread.ticket = None
        return True

    def _move(self, thread: Thread, op: dict[str, Any]) -> bool:
        sources, targets = self._sides(thread, op)
        now = self.launch[thread.rank] + 1
        if any(cells.flags[at] != now for cells in sources if cells.packet for at in cells.at):
            return False
        groups = (
            [([s], [t]) for s, t in zip(sources, targets, strict=True)]
            if op["name"] in PAIRWISE
            else [(sources, targets)]
        )
        for added, written in groups:
            for at in range(len(added[0].at)):
                values = [cells.memory[cells.at[at]] for cells in added]
                total = None if None in values else sum(value for value in values if value is not None)
                for cells in written:
                    cells.memory[cells.at[at]] = total
                    if cells.flags:
                        cells.flags[cells.at[at]] = now if cells.packet else -1
        return True

    def _end_at(self, thread: Thread, op: dict[str, Any], channel: int) -> End:
        refs = self.gpus[thread.rank]["threadblocks"][thread.block]["channels"]
        used = [c for ref in refs if ref["channel_type"] == op["channel_type"] for c in ref["channel_ids"]]
        return self.end_of[thread.rank][op["channel_type"], used[channel]]

    def _arrive(self, end: End) -> None:
        rank, peer, kind, number = end
        self.signals[peer, rank, kind, number] += 1

    def _serve(self, end: End, moves: list[tuple[Cells, Cells]]) -> None:
        """What a port was asked for: to move something, or to signal."""
        if not moves:
            self._arrive(end)
        for source, target in moves:
            for near, far in zip(source.at, target.at, strict=True):
                target.memory[far] = source.memory[near]
