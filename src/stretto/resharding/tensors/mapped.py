# SPDX-License-Identifier: Apache-2.0
"""`stretto.torch.MappedSync`: a `WeightSync` between trainers and servers whose names and layouts differ."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import InvalidInput
from ...weights.mapping import MappedTensor, WeightMapping
from .weights import STAGING_BYTES, Weights, WeightSync

if TYPE_CHECKING:
    import torch

    from .deltas import Changed
    from .describe import AnyTensor, PlacedTensor
    from .pending import PendingUpdate
    from .world import SyncWorld

Dict = Mapping[str, "AnyTensor"]


class MappedSync:
    """Versions of the trainers' tensors, made into those of servers as a mapping file says.

    ::

        sync = stretto.torch.MappedSync(source=trainer.state_dict() if training else None,
                                        target=server.state_dict() if serving else None, mapping="mapping.yaml")
        version = sync.update()                    # all ranks
        with sync.read() as weights:               # on servers: tensors by the server's names, of one version
            ...

    Every rank receives the pieces that its own tensors are made of, in the server's layout, as a `WeightSync`; what
    that guarantees holds here. Pieces are joined, padded and cast on the rank when a version is first read, into memory
    of its own: `target` gives names, shapes, dtypes and layouts, and is not written. All ranks give the same mapping.
    """

    def __init__(
        self,
        source: Dict | None = None,
        target: Dict | None = None,
        *,
        mapping: WeightMapping | str | Path,
        ranks: Any = None,
        staging_bytes: int = STAGING_BYTES,
        world: SyncWorld | None = None,
        copies: int = 2,
        deltas: bool = False,
    ) -> None:
        from .carrier import default_world
        from .pieces import pieces_of

        self._rank = (world or default_world()).rank
        self._target = dict(target or {})
        self._where: dict[str, PlacedTensor] = {}
        self._made: list[MappedTensor] = []
        self._kept: dict[int, dict[str, torch.Tensor]] = {}
        self._ends: dict[int, list[Any]] = {}
        """Where the stream that has made each kept version was then."""
        self._lock = threading.Lock()
        pieces: Dict | None = None
        wanted: Dict | None = source
        try:
            self.mapping = mapping if isinstance(mapping, WeightMapping) else WeightMapping.load(mapping)
            wanted = self._wanted(source)
            if target is not None:
                self._made = self.mapping.resolve({name: tuple(t.shape) for name, t in target.items()})
                pieces = pieces_of(self._made, self._target, self._rank)
                self._where = {name: piece.where for name, piece in pieces.items()}
        except InvalidInput as error:
            pieces = _Refusal(str(error))
        self._sync = WeightSync(
            wanted, pieces, ranks=ranks, staging_bytes=staging_bytes, world=world, copies=copies, deltas=deltas
        )

    @property
    def version(self) -> int:
        """The version that readers get now; 0 is before the first update."""
        return self._sync.version

    @property
    def predicted_us(self) -> float:
        """Predicted microseconds of moving the bytes of one update."""
        return self._sync.predicted_us

    def update(self, source: Dict | None = None, *, checksums: bool = False, changed: Changed = None) -> int:
        """Copy the present values of the trainers as the next version; all ranks call this, as `WeightSync.update`.

        Args:
            source: as for `WeightSync.update`.
            checksums: as for `WeightSync.update`.
            changed: as for `WeightSync.update`; names are those of the trainers.

        Returns:
            The number of the version.
        """
        return self._sync.update(self._wanted(source), checksums=checksums, changed=changed)

    def update_async(self, source: Dict | None = None, **how: Any) -> PendingUpdate:
        """Begin an update in another thread; arguments and result are those of `WeightSync.update_async`."""
        return self._sync.update_async(self._wanted(source), **how)

    @contextmanager
    def read(self, version: int | None = None) -> Iterator[Weights]:
        """The server's tensors of the current version (or of another that is there), by the server's names."""
        from .describe import local_of
        from .packing import follow_streams, stream_ends
        from .pieces import assembled

        with self._sync.read(version) as pieces:
            with self._lock:
                if pieces.version not in self._kept:
                    made = dict(assembled(self._made, self._target, pieces, self._where, self._rank))
                    newest = sorted(self._kept)[-1:]
                    self._kept = {number: self._kept[number] for number in newest} | {pieces.version: made}
                    self._ends = {number: self._ends[number] for number in newest}
                    self._ends[pieces.version] = stream_ends(list(map(local_of, made.values())))
                found = Weights(pieces.version, self._kept[pieces.version])
                # Whoever reads second may be on another stream of the GPU than who has joined the pieces.
                follow_streams(self._ends[pieces.version], list(map(local_of, found.values())))
            yield found

    def read_pieces(self) -> AbstractContextManager[Weights]:
        """The pieces of the current version as they have arrived, by the trainers' names."""
        return self._sync.read()

    def load(self, into: Mapping[str, torch.Tensor] | None = None, only: Collection[str] | None = None) -> int:
        """Copy the current version into memory of the server's, one tensor after the other; return its number.

        Args:
            into: the local memory of the server's tensors, by name; None for that of `target`.
            only: the names of the tensors to copy; None for all.

        Returns:
            The version that was copied.

        Raises:
            InvalidInput: there is no version to read.
        """
        from .describe import local_of
        from .pieces import assembled

        with self._sync.read() as pieces:
            these = [one for one in self._made if only is None or one.to in only]
            for name, made in assembled(these, self._target, pieces, self._where, self._rank):
                goal = into[name].detach() if into is not None else local_of(self._target[name])
                goal.copy_(local_of(made))
            return pieces.version

    def close(self) -> None:
        """End the process group; readers may go on."""
        self._sync.close()

    def __enter__(self) -> MappedSync:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wanted(self, source: Dict | None) -> Dict | None:
        return None if source is None else {name: source[name] for name in self.mapping.wanted(source)}


class _Refusal(dict[str, Any]):
    """Takes the place of tensors that could not be made: all ranks then raise this rank's error together."""

    def __init__(self, why: str) -> None:
        super().__init__(refused=None)
        self._why = why

    def items(self) -> Any:
        """Raise the error."""
        raise InvalidInput(f"mapping: {self._why}")
