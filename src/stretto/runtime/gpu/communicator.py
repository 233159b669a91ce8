# SPDX-License-Identifier: Apache-2.0
"""`GpuCommunicator`: the ranks of one host that run programs on each other's GPU memory."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...errors import InvalidInput, StrettoError, unknown
from ...programs.fused import IN, OUT, PACKET, Fused, fuse
from ...programs.ir import Program
from ...programs.lowered import Lowered
from .compile import EndParams, GpuKernel, GpuLimits, GpuParams, KernelParams, PacketParams, compiled
from .encode import (
    ELEMENT_BYTES,
    H_DONE,
    H_PENDING,
    H_READY,
    H_STEPS,
    H_TELL_DONE,
    H_TELL_READY,
    HEADER_WORDS,
    INLINE_WORDS,
    MAX_RANKS,
    STATE_WORDS,
    EncodedProgram,
    encode,
    kernel_shapes,
)
from .symmetric import SymmetricMemory

SLOT_BYTES = 64 << 20
PACKET_BYTES = 8 << 20
MAX_BLOCKS = 32
LL_BYTES = 2 << 20
"""This many bytes, divided by the number of ranks, is the size up to which `load` chooses packets by itself."""
BLOCKS_PER_SM = 1
"""The blocks that fit on a multiprocessor: 512 threads with 128 registers each, as the kernel is compiled."""
FLAG_BYTES = 4 * MAX_RANKS


@dataclass(frozen=True, kw_only=True, eq=False)
class GpuProgram:
    """A program as loaded by a `GpuCommunicator` for one size, type and operation; equal on all ranks."""

    fused: Fused
    encoded: EncodedProgram
    dtype: str
    reduce: str
    count: int
    """The elements of the larger buffer."""
    number: int
    kernel: GpuKernel
    stream: torch.Tensor
    params: KernelParams
    program: Program | Lowered
    """Kept, since its identity is part of the key that finds this."""

    def describe(self) -> str:
        """One line: the program, the protocol, memory, blocks and rounds."""
        f, e = self.fused, self.encoded
        memory = "symmetric" if f.symmetric else "staged"
        return f"{f.name} {f.protocol} {memory}, {e.blocks} blocks, {e.rounds} rounds"


class GpuCommunicator:
    """Runs programs among the ranks of a process group that can map each other's GPU memory.

    Making one is collective. All ranks load and launch the same programs in the same order; launches go to the current
    CUDA stream, are ordered behind each other also where the streams differ, and are captured by CUDA graphs (which
    must not be replayed side by side). Staged programs touch only slots of other ranks; symmetric ones need `input` and
    `output` in memory that `empty` made or `register` knows, at the same place on all ranks.

    Args:
        group: The process group; its own backend carries only the rendezvous.
        device: This rank's GPU; the current one when not given.
        slot_bytes: The memory for slots that this rank holds for others.
        packet_bytes: The same for packets of small calls.
        max_blocks: The most blocks, and so at most SMs, that a call takes; fewer where ranks share a GPU.
        limit_s: After so long a wait in a kernel gives up, and the communicator is lost.
        delays: Compile random waits into the kernel, from the seed `seed`; to shake out races.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        device: torch.device | int | None = None,
        slot_bytes: int = SLOT_BYTES,
        packet_bytes: int = PACKET_BYTES,
        max_blocks: int = MAX_BLOCKS,
        limit_s: float = 300.0,
        delays: bool = False,
        seed: int = 0,
    ) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        if self.size > MAX_RANKS:
            raise InvalidInput(f"ranks: at most {MAX_RANKS} of one host, not {self.size}")
        index = torch.cuda.current_device() if device is None else torch.device(device).index or 0
        self.device = torch.device("cuda", index)
        self.limit_s, self.seed, self._delays = limit_s, seed, delays
        self._programs: dict[tuple[Any, ...], GpuProgram] = {}
        self._by_number: list[GpuProgram] = []
        self._kernels: dict[tuple[str, str, int], GpuKernel] = {}
        self._why = ""
        self._last: torch.cuda.Stream | None = None
        self.one_gpu = False
        """Whether all ranks are on the same GPU."""
        with torch.cuda.device(self.device):
            self._symmetric = SymmetricMemory(group, self.device)
            self.max_blocks = max(1, min(max_blocks, self._resident()))
            self._block_slots = slot_bytes // self.max_blocks // 256 * 256
            self._block_packets = packet_bytes // self.max_blocks // 256 * 256
            flags = FLAG_BYTES * self.max_blocks
            self._packets_at = -(-flags // 256) * 256
            self._slots_at = self._packets_at + self._block_packets * self.max_blocks
            self._buffer = self._symmetric.empty(self._slots_at + self._block_slots * self.max_blocks, torch.uint8)
            self._buffer.zero_()
            self._state = torch.zeros(self.max_blocks * STATE_WORDS, dtype=torch.int32, device=self.device)
            self._abort = torch.zeros(1, dtype=torch.int32, device=self.device)
            self._host = torch.zeros(16, dtype=torch.int32).pin_memory()
            torch.cuda.synchronize()
        # Nobody may signal before all flags are zero.
        self._symmetric.barrier()

    def _resident(self) -> int:
        """The blocks that fit beside those of other ranks on the same GPU: all of them wait for each other."""
        properties = torch.cuda.get_device_properties(self.device)
        mine = str(getattr(properties, "uuid", self.device.index))
        # Ranks of other groups may share the GPU, too: as many as a launcher says that there are.
        local = -(-int(os.environ.get("LOCAL_WORLD_SIZE", 1)) // torch.cuda.device_count())
        gpus = self._symmetric.gather(mine)
        self.one_gpu = set(gpus) == {mine}
        sharing = max(gpus.count(mine), local)
        return int(properties.multi_processor_count) * BLOCKS_PER_SM // sharing

    @property
    def held_bytes(self) -> int:
        """The GPU memory that this communicator holds, programs among it."""
        programs = sum(p.stream.nbytes for p in self._by_number)
        return self._buffer.nbytes + self._state.nbytes + self._abort.nbytes + programs

    def load(
        self,
        program: Program | Lowered,
        *,
        dtype: torch.dtype | str,
        reduce: str = "sum",
        nbytes: int,
        symmetric: bool = False,
        protocol: str = "auto",
        in_place: bool | None = None,
        max_blocks: int | None = None,
        anchored: bool = False,
    ) -> GpuProgram:
        """Make a program ready for calls of one size; pure, equal on all ranks, and kept.

        Args:
            program: A program or lowered streams of this group's ranks.
            dtype: The element type. For collectives that only copy, any type can go as "uint8".
            reduce: "sum", "prod", "min", "max" or "avg".
            nbytes: The bytes of the larger of one rank's input and output.
            symmetric: Whether tensors of calls lie in symmetric memory, so that nothing is staged.
            protocol: "simple", "ll", or "auto": packets for small calls that are not symmetric.
            in_place: Whether input and output share memory; what the collective says when not given.
            max_blocks: Fewer blocks than the communicator's.
            anchored: Whether a rank without an input or an output gives an empty slice of symmetric memory for it, by
                which those of others are found.

        Returns:
            The program, for `launch`.

        Raises:
            InvalidInput: The program has other ranks, or does not fit the size, the type or the slots.
            VerificationError: The program is wrong.
        """
        name = str(dtype).removeprefix("torch.")
        most = min(max_blocks or self.max_blocks, self.max_blocks)
        key = (id(program), name, reduce, nbytes, symmetric, protocol, in_place, most)
        found = self._programs.get(key)
        if found is None:
            found = self._programs[key] = self._load(
                program, name, reduce, nbytes, symmetric, protocol, in_place, most, anchored
            )
        return found

    def _load(
        self, program: Program | Lowered, dtype: str, reduce: str, nbytes: int, symmetric: bool, protocol: str,
        in_place: bool | None, most: int, anchored: bool,
    ) -> GpuProgram:  # fmt: skip
        c = program.collective
        if c.num_ranks != self.size:
            raise InvalidInput(f"program: {program.name} is for {c.num_ranks} ranks, not {self.size}")
        if dtype not in ELEMENT_BYTES:
            raise unknown("dtype", dtype, ELEMENT_BYTES)
        count, rest = divmod(nbytes, ELEMENT_BYTES[dtype])
        if rest:
            raise InvalidInput(f"nbytes: {nbytes} is no whole number of {dtype}")
        if protocol == "auto":
            protocol = "ll" if nbytes * self.size <= LL_BYTES and not symmetric else "simple"
        fused = fuse(program, protocol=protocol, symmetric=symmetric, in_place=in_place)
        encoded = encode(
            fused, count=count, element=ELEMENT_BYTES[dtype], blocks=most,
            block_slots=self._block_slots, block_packets=self._block_packets,
        )  # fmt: skip
        for space, sizes in ((IN, encoded.inputs), (OUT, encoded.outputs)):
            if symmetric and not anchored and fused.touched(space) and any(sizes) and not all(sizes):
                what = "input" if space == IN else "output"
                raise InvalidInput(f"symmetric: rank {sizes.index(0)} has no {what} by which to find those of others")
        kernel = self._kernel(dtype, reduce, kernel_shapes(fused))
        words = torch.from_numpy(encoded.streams[self.rank].copy()).to(self.device)
        params = self._params(encoded, words, len(self._by_number))
        loaded = GpuProgram(
            fused=fused, encoded=encoded, dtype=dtype, reduce=reduce, count=count, number=len(self._by_number),
            kernel=kernel, stream=words, params=params, program=program,
        )  # fmt: skip
        self._by_number.append(loaded)
        return loaded

    def _kernel(self, dtype: str, reduce: str, shapes: int) -> GpuKernel:
        key = (dtype, reduce, shapes)
        if key not in self._kernels:
            capability = torch.cuda.get_device_capability(self.device)
            with torch.cuda.device(self.device):
                self._kernels[key] = GpuKernel(compiled(dtype, reduce, shapes, capability, delays=self._delays))
        return self._kernels[key]

    def _params(self, encoded: EncodedProgram, words: torch.Tensor, number: int) -> KernelParams:
        limits = GpuLimits(
            abort=self._abort.data_ptr(), host_abort=self._host.data_ptr() + 32, report=self._host.data_ptr(),
            limit_ns=int(self.limit_s * 1e9), number=number, seed=self.seed,
        )  # fmt: skip
        all_have = {"limits": limits, "state": self._state.data_ptr(), "slot_bytes": encoded.slot_bytes}
        both = {
            "packets_at": self._packets_at, "block_packets": self._block_packets, "packet_bytes": encoded.packet_bytes,
            **all_have,
        }  # fmt: skip
        header, stream = encoded.headers[self.rank].tolist(), encoded.streams[self.rank].tolist()
        p: KernelParams
        if encoded.ends:
            p = EndParams(
                **all_have, rank=self.rank, ranks=self.size, steps=header[H_STEPS], ready=header[H_READY],
                tell_ready=header[H_TELL_READY], done=header[H_DONE], tell_done=header[H_TELL_DONE],
            )  # fmt: skip
            p.stream[: len(stream)] = stream
        elif encoded.quiet:
            p = PacketParams(
                **both, rank=self.rank, ranks=self.size, rounds=encoded.rounds, steps=header[H_STEPS],
                pending=header[H_PENDING],
            )  # fmt: skip
            p.stream[: len(stream)] = stream
        else:
            p = GpuParams(
                **both, stream=words.data_ptr(), slots_at=self._slots_at, block_slots=self._block_slots,
                words=words.numel(),
            )  # fmt: skip
            p.header[:], p.heard[:] = header[:HEADER_WORDS], header[HEADER_WORDS:]
            if len(stream) <= INLINE_WORDS:
                p.inlined[: len(stream)] = stream
        for rank, pointer in enumerate(self._symmetric.pointers(self._buffer)):
            p.memory[rank] = pointer
        return p

    def launch(self, loaded: GpuProgram, input: torch.Tensor, output: torch.Tensor, *, ordered: bool = False) -> None:
        """Run a loaded program on the current stream; returns at once.

        Args:
            loaded: What `load` made.
            input: This rank's input; contiguous, as many bytes as the program asks for.
            output: This rank's output; in place, where the input lies in it.
            ordered: Whether the caller has put the current stream behind the launch before; else it waits for all of
                the stream that had it.

        Raises:
            InvalidInput: A tensor does not fit the program.
            StrettoError: The communicator was aborted.
        """
        if self._why:
            raise StrettoError(self._why)
        size = ELEMENT_BYTES[loaded.dtype]
        for what, tensor, elements in (
            ("input", input, loaded.encoded.inputs[self.rank]),
            ("output", output, loaded.encoded.outputs[self.rank]),
        ):
            if tensor.nbytes != elements * size or not tensor.is_contiguous() or tensor.device != self.device:
                raise InvalidInput(
                    f"{what}: must be {elements * size} contiguous bytes on {self.device}, not {tensor.nbytes} on "
                    f"{tensor.device}"
                )
        params = type(loaded.params).from_buffer_copy(loaded.params)
        if isinstance(params, PacketParams):
            params.input, params.output = input.data_ptr(), output.data_ptr()
        else:
            self._set(params.input, input, loaded.fused.symmetric and loaded.fused.touched(IN))
            self._set(params.output, output, loaded.fused.symmetric and loaded.fused.touched(OUT))
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream()
            capturing = torch.cuda.is_current_stream_capturing()
            if not ordered and self._last is not None and self._last != stream and not capturing:
                stream.wait_stream(self._last)
            e = loaded.encoded
            loaded.kernel.launch(params, blocks=e.blocks, threads=e.threads, stream=stream.cuda_stream)
            if not capturing:
                self._last = stream

    def _set(self, pointers: ctypes.Array[ctypes.c_uint64], tensor: torch.Tensor, shared: bool) -> None:
        pointers[self.rank] = tensor.data_ptr()
        # An empty slice of symmetric memory says where the others have theirs.
        if shared and (tensor.numel() or tensor.untyped_storage().nbytes()):
            for rank, pointer in enumerate(self._symmetric.pointers(tensor)):
                pointers[rank] = pointer

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A one-dimensional tensor in symmetric memory; collective."""
        with torch.cuda.device(self.device):
            return self._symmetric.empty(count, dtype)

    def addresses(self, tensor: torch.Tensor) -> list[int]:
        """Where a tensor in symmetric memory, and those at the same place on other ranks, are for this rank."""
        return self._symmetric.pointers(tensor)

    def register(self, tensor: torch.Tensor) -> None:
        """Make a tensor's memory known, which PyTorch's symmetric memory allocated on all ranks; collective."""
        self._symmetric.register(tensor)

    def abort(self, why: str) -> None:
        """Make all waits in kernels of this rank end at once; the communicator cannot be used afterwards."""
        self._why = self._why or why
        self._host[8] = 1

    def lost(self) -> tuple[int, int] | None:
        """The (rank, step) that a kernel of this rank gave up waiting for, or None.

        The step is -1 where the rank had not begun the call, -2 where it had not begun the round, -3 where it had not
        ended the call.
        """
        if not int(self._host[0]):
            return None
        peer, step, _, number = (int(word) for word in self._host[1:5])
        self._why = self._why or f"rank {self.rank} waited too long in a kernel"
        return self._writer(number, peer - MAX_RANKS) if peer >= MAX_RANKS else peer, step

    def _writer(self, number: int, slot: int) -> int:
        """The rank that sends the packets of one of this rank's slots."""
        streams = self._by_number[number].fused.steps
        return next(
            rank for rank, stream in enumerate(streams) for step in stream for item in step.items
            if (self.rank, PACKET, slot) in item.targets
        )  # fmt: skip

    def close(self) -> None:
        """Wait for the GPU and give the memory back; collective."""
        torch.cuda.synchronize(self.device)
        if not self._why:
            self._symmetric.barrier()
        self._why = self._why or "the communicator is closed"
        self._programs.clear()
        self._symmetric.close()
