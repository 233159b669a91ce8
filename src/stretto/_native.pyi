"""Types of the native module (`native/`)."""

import numpy as np
from numpy.typing import NDArray

class Router:
    def __init__(
        self,
        num_nodes: int,
        link_src: NDArray[np.int32],
        link_dst: NDArray[np.int32],
        gb_per_s: NDArray[np.float64],
        allowed: NDArray[np.bool_],
        forwards: NDArray[np.bool_],
    ) -> None: ...
    def count_paths(self, src: int, dst: int) -> int: ...
    def routes(
        self, src: NDArray[np.int32], dst: NDArray[np.int32], choice: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]: ...

def derive_dependencies(
    num_ranks: int,
    num_chunks: int,
    src: NDArray[np.int32],
    dst: NDArray[np.int32],
    reduce: NDArray[np.bool_],
    chunk_ptr: NDArray[np.int64],
    chunk: NDArray[np.int32],
    step: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64], NDArray[np.int32]]: ...
