# SPDX-License-Identifier: Apache-2.0
"""`Runtime`: what a runtime asks for each instruction of a lowered program, beside what the links take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from ..cluster import Cluster
from ..errors import InvalidInput, unknown
from ..files import convert, exists, naming_lines, parse_yaml, plain, read_text, write_file
from ..programs.lowered import OPS
from ..units import is_number

VERSION = 1
MAX_FILE_BYTES = 1 << 20
WORK = ("copy", "reduce", "put", "receive", "read", "add", "write")
"""What one block does with bytes: copy inside a rank, add to what is there, write to a peer, take out of a slot; and
each place that a wide step reads (``add``: packets that it adds up) or writes."""

WIDE_PRICES = (
    "step_us", "meet_us", "peer_us", "place_us", "block_us", "thread_us", "rank_us", "memory_gb_per_s",
    "cache_gb_per_s", "cache_mb",
)  # fmt: skip
"""The fields of a runtime that are about steps that read and write several ranks' memory."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How messages of one protocol travel.

    `bytes_factor` is what a byte of data takes on the wire (2 where every word carries a flag), `signal_us` the time
    from the last byte's arrival until the receiver goes on. Where packets carry flags, a wide step costs `step_us`,
    `poll_us` for each place whose packets it reads, and `send_us` for each to which it sends some.
    """

    bytes_factor: float = 1.0
    signal_us: float = 0.0
    step_us: float = 0.0
    poll_us: float = 0.0
    send_us: float = 0.0

    def __post_init__(self) -> None:
        _number("bytes_factor", self.bytes_factor, least=1.0)
        for key in ("signal_us", "step_us", "poll_us", "send_us"):
            _number(key, getattr(self, key))


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The price list of a runtime: what instructions, hand-overs and signals cost, and what one block moves.

    Links are the cluster's. A runtime adds what happens between them: a program of a thousand pieces can be optimal on
    the links and slow on the machine. `simulate(..., runtime=)` times a lowered program with it, threadblock by
    threadblock. All prices default to nothing, so that ``Runtime(name="network")`` is the links alone.
    """

    name: str
    launch_us: float = 0.0
    """From the call until the first instruction of every threadblock runs."""
    instruction_us: Mapping[str, float] = field(default_factory=dict)
    """What an instruction of each kind costs whatever its size; kinds as in `Lowered`, such as ``s`` and ``rrc``."""
    step_us: float = 0.0
    """What a wide step of protocol Simple costs whatever its size."""
    meet_us: float = 0.0
    """From a wide step's end until a step of another rank that waits for its signal goes on (protocol Simple)."""
    peer_us: float = 0.0
    """What a wide step costs in addition for one signal that it waits for; twice that for 3, three times for 7."""
    place_us: float = 0.0
    """What a wide step costs for each plain place that it reads or writes, whatever its size."""
    block_us: float = 0.0
    """What every threadblock on a GPU adds to the launch of a plan of wide steps."""
    thread_us: float = 0.0
    """What threadblocks of 1024 threads add to that launch; half of it for 512."""
    rank_us: float = 0.0
    """What two ranks that share a GPU add to that launch; twice that for four, three times for eight."""
    memory_gb_per_s: float = 0.0
    """What a GPU's memory reads and writes for all threadblocks together; 0: no limit."""
    cache_gb_per_s: float = 0.0
    """What a GPU reads and writes for all threadblocks together within its cache; 0: no cache."""
    cache_mb: float = 0.0
    """What its cache holds."""
    handover_us: float = 0.0
    """What an instruction costs in addition where it waits for another threadblock of its rank."""
    block_gb_per_s: Mapping[str, float] = field(default_factory=dict)
    """What one threadblock moves: copy, reduce, put, receive; ``reduce:float16`` for one type. Left out: no limit."""
    holds_block: bool = False
    """Whether a threadblock goes on only once its message has left (it moves the bytes itself)."""
    window: int = 0
    """How many messages of a connection may be under way before the first of them has been used; 0: no limit."""
    slice_bytes: int = 0
    """Longer messages are cut, and the whole streams run slice behind slice; 0: they are not."""
    max_blocks: int = 0
    """The most threadblocks of a rank that run side by side; 0: no limit."""
    gpu_blocks: int = 0
    """The most threadblocks that a GPU runs side by side, of all ranks that share it; 0: no limit."""
    contention: Literal["fifo", "fair"] | None = None
    """How its messages share links, where that is the runtime's doing; None: the cluster's default."""
    protocols: Mapping[str, Protocol] = field(default_factory=lambda: {"Simple": Protocol()})
    notes: tuple[str, ...] = ()
    """Where the figures are from."""

    def __post_init__(self) -> None:
        for key in ("launch_us", "handover_us", *WIDE_PRICES):
            _number(key, getattr(self, key))
        for key in ("window", "slice_bytes", "max_blocks", "gpu_blocks"):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise InvalidInput(f"{key}: must be a whole number >= 0, not {value!r}")
        for kind, price in self.instruction_us.items():
            if kind not in OPS:
                raise unknown("kind of instruction in instruction_us", kind, OPS)
            _number(f"instruction_us.{kind}", price)
        for work, rate in self.block_gb_per_s.items():
            base, _, dtype = work.partition(":")
            if base not in WORK or (dtype and base != "reduce"):
                raise unknown("work in block_gb_per_s", work, (*WORK, "reduce:TYPE"))
            if not is_number(rate) or not 0 < rate < inf:
                raise InvalidInput(f"block_gb_per_s.{work}: must be a number > 0, not {rate!r}")
        if self.contention not in (None, "fifo", "fair"):
            raise unknown("contention", str(self.contention), ("fifo", "fair"))
        if "Simple" not in self.protocols:
            raise InvalidInput("protocols: must have one called Simple")
        for key in ("instruction_us", "block_gb_per_s", "protocols"):
            object.__setattr__(self, key, dict(getattr(self, key)))

    @property
    def is_free(self) -> bool:
        """Whether nothing has a price, so that only links, slices and windows count."""
        return (
            not (self.launch_us or self.handover_us or self.block_gb_per_s or self.holds_block or self.max_blocks)
            and not (self.step_us or self.meet_us)
            and not any(self.instruction_us.values())
            and all(p == Protocol() for p in self.protocols.values())
        )

    def us_per_byte(self, work: str, dtype: str | None = None) -> float:
        """The time of one threadblock for a byte of some work, 0 where nothing limits it.

        >>> Runtime(name="x", block_gb_per_s={"reduce": 40.0, "reduce:float16": 20.0}).us_per_byte("reduce", "float16")
        5e-05
        """
        rate = self.block_gb_per_s.get(f"{work}:{dtype}") or self.block_gb_per_s.get(work)
        return 1e-3 / rate if rate else 0.0

    @property
    def knows_wide(self) -> bool:
        """Whether it has prices for wide steps."""
        return bool(self.step_us or self.meet_us or {"read", "write"} & self.block_gb_per_s.keys())

    @property
    def knows_streams(self) -> bool:
        """Whether it has prices for instruction streams; a runtime that knows steps alone carries out no others."""
        return not self.knows_wide or any(self.instruction_us.values())

    def blocks_on(self, cluster: Cluster) -> int:
        """The most threadblocks of a rank on a cluster, whose ranks may share a GPU; 0 where nothing limits them.

        All of them must run side by side, since they wait for each other.

        >>> from stretto import Cluster
        >>> [Runtime.load("mscclpp:h200").blocks_on(Cluster.load(name)) for name in ("dgx_h200", "shared_gpu:8")]
        [80, 16]
        """
        if not self.gpu_blocks:
            return self.max_blocks
        mine = max(1, self.gpu_blocks // sharing(cluster))
        return min(mine, self.max_blocks) if self.max_blocks else mine

    def without(self, work: str) -> Runtime:
        """The same prices with one kind of work of a block free, such as ``receive`` where messages need no slots."""
        return replace(self, block_gb_per_s={key: rate for key, rate in self.block_gb_per_s.items() if key != work})

    def protocol(self, name: str) -> Protocol:
        """The prices of a protocol; raises `InvalidInput` where the runtime does not have it."""
        if name not in self.protocols:
            raise unknown(f"protocol of runtime {self.name}", name, self.protocols)
        return self.protocols[name]

    @classmethod
    def load(cls, source: str | Path) -> Runtime:
        """A runtime by the name of a preset (``network``, ``executor``, ...), or from a file.

        >>> Runtime.load("executor").window
        4
        """
        if isinstance(source, str) and source in PRESETS:
            return PRESETS[source]
        if not exists(source):
            raise unknown("runtime", str(source), (*PRESETS, "or a file"))
        where = str(source)
        text = read_text(source, max_bytes=MAX_FILE_BYTES)
        data = parse_yaml(text, where=where)
        with naming_lines(text, where=where):
            form = convert(data, _File, where="")
        if form.version != VERSION:
            raise InvalidInput(f"{where}: version: {form.version} is not known, only {VERSION}")
        fields = {
            key: value for key, value in msgspec.structs.asdict(form).items() if key not in ("stretto", "version")
        }
        fields["protocols"] = {k: Protocol(**msgspec.structs.asdict(p)) for k, p in form.protocols.items()}
        fields["notes"] = tuple(form.notes)
        try:
            return cls(**fields)
        except InvalidInput as error:
            raise InvalidInput(f"{where}: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write the versioned YAML form."""
        form = _File(
            stretto="runtime",
            version=VERSION,
            protocols={k: _Protocol(**asdict(p)) for k, p in self.protocols.items()},
            instruction_us=dict(self.instruction_us),
            block_gb_per_s=dict(self.block_gb_per_s),
            notes=list(self.notes),
            **{key: getattr(self, key) for key in _PLAIN},
        )
        write_file(path, yaml.safe_dump(plain(form), sort_keys=False, width=120))


_PLAIN: tuple[str, ...] = (
    "name", "launch_us", *WIDE_PRICES, "handover_us", "holds_block", "window", "slice_bytes", "max_blocks",
    "gpu_blocks", "contention",
)  # fmt: skip
Name = Annotated[str, Meta(min_length=1, max_length=200)]


class _Protocol(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    bytes_factor: float = 1.0
    signal_us: float = 0.0
    step_us: float = 0.0
    poll_us: float = 0.0
    send_us: float = 0.0


class _File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    stretto: Literal["runtime"]
    version: int
    name: Name
    launch_us: float = 0.0
    instruction_us: dict[Name, float] = {}
    step_us: float = 0.0
    meet_us: float = 0.0
    peer_us: float = 0.0
    place_us: float = 0.0
    block_us: float = 0.0
    thread_us: float = 0.0
    rank_us: float = 0.0
    memory_gb_per_s: float = 0.0
    cache_gb_per_s: float = 0.0
    cache_mb: float = 0.0
    handover_us: float = 0.0
    block_gb_per_s: dict[Name, float] = {}
    holds_block: bool = False
    window: int = 0
    slice_bytes: int = 0
    max_blocks: int = 0
    gpu_blocks: int = 0
    contention: Literal["fifo", "fair"] | None = None
    protocols: dict[Name, _Protocol] = {}
    notes: list[str] = []


def _number(key: str, value: Any, *, least: float = 0.0) -> None:
    if not is_number(value) or not least <= value < inf:
        raise InvalidInput(f"{key}: must be a number >= {least:g}, not {value!r}")


PRESETS: Mapping[str, Runtime] = MappingProxyType(
    {
        "network": Runtime(name="network", notes=("links alone: no instruction costs anything",)),
        "executor": Runtime(
            name="executor",
            window=4,
            contention="fair",
            notes=("Stretto's executor on CPUs: its window and fair sharing; instructions cost nothing here",),
        ),
        "mscclpp:h200": Runtime(
            name="mscclpp:h200",
            launch_us=1.23,
            step_us=0.7933,
            meet_us=0.4205,
            peer_us=0.7602,
            place_us=0.0354,
            block_us=0.004649,
            thread_us=0.345,
            rank_us=0.4821,
            memory_gb_per_s=3048.0,
            cache_gb_per_s=9274.0,
            cache_mb=50.0,
            instruction_us=dict.fromkeys(OPS[1:], 2.77),
            block_gb_per_s={
                "put": 42.0,
                "reduce": 25.8,
                "copy": 22.2,
                "receive": 28.2,
                "read": 107.1,
                "add": 60.78,
                "write": 74.3,
            },
            holds_block=True,
            window=2,
            max_blocks=80,
            gpu_blocks=132,
            contention="fair",
            protocols={
                "Simple": Protocol(signal_us=1.08),
                "LL": Protocol(bytes_factor=2.0, signal_us=0.4502, step_us=0.3394, poll_us=0.2769, send_us=0.1272),
            },
            notes=(
                "the executor of MSCCL++ 0.10 on an H200 under MPS, blocks of 1024 threads, protocol Simple",
                "fitted to 20 times of four plans on 8 ranks, an outside run of November 2026 (benchmarks/runtimes.py)",
                "receive is the copy out of a slot: free with zero copy",
                "wide steps: fitted to 504 of our own times on 2 and 8 ranks of one H200 (MSCCL++ 0.9, November 2026)",
                "and 9.0 % off in the mean on 1,028 others (benchmarks/mscclpp_plans.py), 13.0 and 11.5 % on 205",
                "and 120 of two later runs; all were seen while the model was shaped (docs/calibration.md)",
            ),
        ),
        "stretto-gpu:h200": Runtime(
            name="stretto-gpu:h200",
            launch_us=1.23,
            step_us=2.548,
            meet_us=0.2778,
            peer_us=0.3548,
            place_us=0.1768,
            block_us=0.003186,
            rank_us=0.4601,
            memory_gb_per_s=4049.0,
            cache_gb_per_s=5062.0,
            cache_mb=50.0,
            block_gb_per_s={"read": 137.7, "add": 25.33, "write": 45.29},
            max_blocks=32,
            gpu_blocks=132,
            contention="fair",
            protocols={
                "Simple": Protocol(),
                "LL": Protocol(bytes_factor=2.0, signal_us=0.5019, step_us=0.3548, poll_us=0.1076, send_us=0.07019),
            },
            notes=(
                "Stretto's executor on the memory of one H200 that 2, 4 and 8 ranks share (MPS), November 2026",
                "fitted to 148 times of two thirds of the programs in benchmarks/gpu_h200.csv,",
                "and 10 % off in the mean on 75 times of the others (docs/calibration.md)",
            ),
        ),
    }
)
"""The runtimes that have a name."""


def sharing(cluster: Cluster) -> int:
    """How many ranks share one GPU: all where its memory is all of their links (preset ``shared_gpu``)."""
    return cluster.num_devices if set(cluster.channels) == {"hbm"} else 1


def runtime_of(given: Runtime | str | Path | None) -> Runtime:
    """A runtime from what a caller gives: itself, the name of a preset, a file; None is ``network``."""
    if isinstance(given, Runtime):
        return given
    return PRESETS["network"] if given is None else Runtime.load(given)
