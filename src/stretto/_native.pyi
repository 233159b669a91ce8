# SPDX-License-Identifier: Apache-2.0
"""Types of the native module (`native/`)."""

import numpy as np
from numpy.typing import NDArray

class Router:
    def __init__(
        self,
        num_nodes: int,
        link_src: NDArray[np.int32],
        link_dst: NDArray[np.int32],
        alpha_us: NDArray[np.float64],
        gb_per_s: NDArray[np.float64],
        allowed: NDArray[np.bool_],
        forwards: NDArray[np.bool_],
    ) -> None: ...
    def count_paths(self, src: int, dst: int, nbytes: float) -> int: ...
    def classes(
        self, src: NDArray[np.int32], dst: NDArray[np.int32], nbytes: NDArray[np.float64]
    ) -> NDArray[np.int32]: ...
    def num_classes(self, src: NDArray[np.int32], dst: NDArray[np.int32]) -> NDArray[np.int32]: ...
    def routes(
        self,
        src: NDArray[np.int32],
        dst: NDArray[np.int32],
        choice: NDArray[np.int64],
        nbytes: NDArray[np.float64],
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]: ...

def derive_dependencies(
    num_slots: int,
    reduce: NDArray[np.bool_],
    chunk_ptr: NDArray[np.int64],
    src_slot: NDArray[np.int32],
    dst_slot: NDArray[np.int32],
    step: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64], NDArray[np.int32], NDArray[np.uint8]]: ...
def check_events(
    num_locations: int,
    num_parts: int,
    reductions_commute: bool,
    thread: NDArray[np.int32],
    pop: NDArray[np.int32],
    push: NDArray[np.int32],
    item_ptr: NDArray[np.int64],
    rd: NDArray[np.int32],
    rd2: NDArray[np.int32],
    wr: NDArray[np.int32],
    pred_ptr: NDArray[np.int64],
    pred: NDArray[np.int32],
    conn_ptr: NDArray[np.int64],
    conn: NDArray[np.int32],
    init_loc: NDArray[np.int32],
    init_chunk: NDArray[np.int32],
    init_part: NDArray[np.int32],
    post_loc: NDArray[np.int32],
    post_chunk: NDArray[np.int32],
    post_set: NDArray[np.int32],
    set_ptr: NDArray[np.int64],
    set_part: NDArray[np.int32],
) -> tuple[list[tuple[int, int, int, int, int, int]], int, list[int], int, int, int]: ...
def simulate(
    reduce: NDArray[np.bool_],
    bytes: NDArray[np.float64],
    after_ptr: NDArray[np.int64],
    after: NDArray[np.int32],
    gate_ptr: NDArray[np.int64],
    gate: NDArray[np.int32],
    gate_reads: NDArray[np.bool_],
    connection: NDArray[np.int32],
    route: NDArray[np.int32],
    route_ptr: NDArray[np.int64],
    route_links: NDArray[np.int32],
    alpha_us: NDArray[np.float64],
    bytes_per_us: NDArray[np.float64],
    flow_cap: NDArray[np.float64],
    incast: NDArray[np.int32],
    curve_ptr: NDArray[np.int64],
    curve_flows: NDArray[np.int32],
    curve_share: NDArray[np.float64],
    reduce_us_per_byte: float,
    alpha_blocks: bool,
    fair: bool,
    delay_us: NDArray[np.float64] | None = None,
    cast: NDArray[np.int32] | None = None,
    load_slots: int = 0,
) -> tuple[
    NDArray[np.float64],
    NDArray[np.float64],
    NDArray[np.int32],
    NDArray[np.float64],
    NDArray[np.float64],
    int,
    NDArray[np.float64],
]: ...
def cast_forks(
    cast: NDArray[np.int32],
    route: NDArray[np.int32],
    route_ptr: NDArray[np.int64],
    route_links: NDArray[np.int32],
) -> NDArray[np.int32]: ...

class MaxFlow:
    def __init__(self, num_nodes: int, src: NDArray[np.int32], dst: NDArray[np.int32]) -> None: ...
    def set_capacity(self, capacity: NDArray[np.float64], unit: float) -> None: ...
    def run(
        self,
        sources: NDArray[np.int32],
        supply: NDArray[np.float64],
        sinks: NDArray[np.int32],
        demand: NDArray[np.float64],
    ) -> float: ...
    def sink_side(self) -> NDArray[np.uint8]: ...

def path_lengths(
    num_nodes: int,
    src: NDArray[np.int32],
    dst: NDArray[np.int32],
    length: NDArray[np.float64],
    sources: NDArray[np.int32],
) -> NDArray[np.float64]: ...
def cheapest_flows(
    num_nodes: int,
    src: NDArray[np.int32],
    dst: NDArray[np.int32],
    length: NDArray[np.float64],
    rate: NDArray[np.float64],
    sources: NDArray[np.int32],
    sinks: NDArray[np.int32],
    most: int,
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]: ...
def crowded_lengths(
    num_nodes: int,
    src: NDArray[np.int32],
    dst: NDArray[np.int32],
    rate: NDArray[np.float64],
    sources: NDArray[np.int32],
    need_ptr: NDArray[np.int64],
    sinks: NDArray[np.int32],
    amounts: NDArray[np.float64],
    rounds: int,
) -> NDArray[np.float64]: ...
def route_items(
    num_nodes: int,
    src: NDArray[np.int32],
    dst: NDArray[np.int32],
    use_ptr: NDArray[np.int64],
    use: NDArray[np.int32],
    relays: NDArray[np.bool_],
    base: NDArray[np.float64],
    rate: NDArray[np.float64],
    open: NDArray[np.float64],
    from_node: NDArray[np.int32],
    to_node: NDArray[np.int32],
    size: NDArray[np.float64],
    target: float,
    sharpness: float,
    sweeps: int,
    walk: int,
    seed: int,
) -> tuple[NDArray[np.int64], NDArray[np.int32], float]: ...
def plan_messages(
    after_ptr: NDArray[np.int64],
    after: NDArray[np.int32],
    route: NDArray[np.int32],
    route_ptr: NDArray[np.int64],
    route_links: NDArray[np.int32],
    bytes: NDArray[np.float64],
    alpha_us: NDArray[np.float64],
    bytes_per_us: NDArray[np.float64],
    key: NDArray[np.float64],
    alpha_blocks: bool,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]: ...
def greedy_schedule(
    num_devices: int,
    hop_src: NDArray[np.int32],
    hop_dst: NDArray[np.int32],
    link_ptr: NDArray[np.int64],
    link: NDArray[np.int32],
    alpha_us: NDArray[np.float64],
    bytes_per_us: NDArray[np.float64],
    shift: NDArray[np.int32],
    there: NDArray[np.int32],
    back: NDArray[np.int32],
    nbytes: NDArray[np.float64],
    kind: NDArray[np.int32],
    region: NDArray[np.int32],
    crosses: NDArray[np.bool_],
    goal: NDArray[np.int32],
    distance: NDArray[np.float64],
    held: NDArray[np.int64],
    alpha_blocks: bool,
    mirrored: bool,
    once: bool,
    patient: bool,
    seed: int,
    limit_s: float,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int32], NDArray[np.int32], int]: ...

class SteinerTrees:
    def __init__(
        self,
        num_nodes: int,
        src: NDArray[np.int32],
        dst: NDArray[np.int32],
        passes: NDArray[np.bool_],
        active: NDArray[np.int32],
    ) -> None: ...
    def set_price(self, price: NDArray[np.float64], alpha: NDArray[np.float64]) -> None: ...
    def hops(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]: ...
    def trees(
        self, terminals: NDArray[np.int32], roots: NDArray[np.int32], inward: bool
    ) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]: ...

def cheapest_trees(
    num_nodes: int,
    src: NDArray[np.int32],
    dst: NDArray[np.int32],
    price: NDArray[np.float64],
    passes: NDArray[np.bool_],
    rank_node: NDArray[np.int32],
) -> tuple[NDArray[np.float64], NDArray[np.int32], NDArray[np.int32], NDArray[np.int64], NDArray[np.int32]]: ...
def time_sends(
    after_ptr: NDArray[np.int64],
    after: NDArray[np.int32],
    route: NDArray[np.int32],
    route_ptr: NDArray[np.int64],
    route_links: NDArray[np.int32],
    bytes: NDArray[np.float64],
    extra_us: NDArray[np.float64],
    alpha_us: NDArray[np.float64],
    bytes_per_us: NDArray[np.float64],
    rank: NDArray[np.int64],
    release_us: NDArray[np.float64],
    alpha_blocks: bool,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]: ...
def timetable(
    *,
    num_ranks: int,
    link_src: NDArray[np.int32],
    link_dst: NDArray[np.int32],
    slot_us: NDArray[np.float64],
    tail_us: NDArray[np.float64],
    extra_us: float,
    pieces: int,
    until_us: float,
    full_us: float,
    tries: int,
    ruin: float,
    most_insertions: int,
    seed: int,
    home: NDArray[np.int32],
) -> tuple[int, NDArray[np.int32], NDArray[np.int32], NDArray[np.uint8], NDArray[np.float64]]: ...
def soft_timetable(
    *,
    num_ranks: int,
    link_src: NDArray[np.int32],
    link_dst: NDArray[np.int32],
    slot_us: NDArray[np.float64],
    tail_us: NDArray[np.float64],
    extra_us: float,
    pieces: int,
    until_us: float,
    full_us: float,
    spans: int,
    passes: int,
    tries: int,
    seed: int,
    home: NDArray[np.int32],
    first_root: NDArray[np.int32],
    first_meet: NDArray[np.float64],
    first_link: NDArray[np.int32],
    first_piece: NDArray[np.int32],
    first_gathers: NDArray[np.uint8],
    first_start: NDArray[np.float64],
) -> tuple[bool, NDArray[np.int32], NDArray[np.int32], NDArray[np.uint8], NDArray[np.float64], NDArray[np.int32]]: ...
def pack_forest(
    num_nodes: int,
    src: NDArray[np.int32],
    dst: NDArray[np.int32],
    capacity: NDArray[np.int64],
    terminals: NDArray[np.int32],
    supply: NDArray[np.int64],
    max_height: int,
    num_devices: int,
) -> tuple[
    int,
    int,
    NDArray[np.int32],
    NDArray[np.int64],
    NDArray[np.int64],
    NDArray[np.int32],
    NDArray[np.int32],
    NDArray[np.int32],
    NDArray[np.int64],
    NDArray[np.int32],
]: ...
def colour_edges(
    left: NDArray[np.int32], right: NDArray[np.int32], num_left: int, num_right: int
) -> NDArray[np.int32]: ...
def simulate_dimensions(
    rate: NDArray[np.float64],
    chunk_ptr: NDArray[np.int64],
    dim: NDArray[np.int32],
    bytes: NDArray[np.float64],
    latency: NDArray[np.float64],
    key: NDArray[np.float64],
    release: NDArray[np.float64],
    job: NDArray[np.int32],
    after_ptr: NDArray[np.int64],
    after: NDArray[np.int32],
    priority: NDArray[np.int64],
    fifo: NDArray[np.bool_],
    turn: NDArray[np.int64],
    in_flight: int,
    ordered: bool,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]: ...

class ScheduleProblem:
    def __init__(
        self,
        comm: NDArray[np.uint8],
        duration_us: NDArray[np.float64],
        stream_ptr: NDArray[np.int64],
        stream: NDArray[np.int32],
        num_streams: int,
        dep_ptr: NDArray[np.int64],
        dep_op: NDArray[np.int32],
        dep_lag: NDArray[np.int32],
        set: NDArray[np.int32],
        line: NDArray[np.int32],
        option_ptr: NDArray[np.int64],
        task_ptr: NDArray[np.int64],
        task_us: NDArray[np.float64],
        inner_ptr: NDArray[np.int64],
        inner: NDArray[np.int32],
        held_ptr: NDArray[np.int64],
        held: NDArray[np.int32],
        held_us: NDArray[np.float64],
        serial_ptr: NDArray[np.int64],
        serial: NDArray[np.int32],
        num_resources: int,
        anchor: int,
    ) -> None: ...
    def evaluate(
        self,
        choice: NDArray[np.int32],
        discipline: int,
        priority: NDArray[np.float64],
        step: float,
        serial: bool,
        iterations: int,
    ) -> float: ...
    def schedule(
        self,
        choice: NDArray[np.int32],
        discipline: int,
        priority: NDArray[np.float64],
        step: float,
        serial: bool,
        iterations: int,
    ) -> tuple[float, NDArray[np.int32], NDArray[np.int32]]: ...
    def unrolled(
        self,
        choice: NDArray[np.int32],
        discipline: int,
        priority: NDArray[np.float64],
        step: float,
        serial: bool,
        iterations: int,
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]: ...
    def replay(
        self,
        choice: NDArray[np.int32],
        order: NDArray[np.int32],
        shift: NDArray[np.int32],
        serial: bool,
        iterations: int,
    ) -> tuple[
        float,
        NDArray[np.float64],
        NDArray[np.float64],
        NDArray[np.float64],
        NDArray[np.int32],
        NDArray[np.int32],
        NDArray[np.int32],
        NDArray[np.int32],
    ]: ...

def waiting_circle(
    num_nodes: int, node: NDArray[np.int32], waits_for: NDArray[np.int32], lag: NDArray[np.int32]
) -> NDArray[np.int32]: ...

class ScheduleSearch:
    def __init__(
        self,
        problem: ScheduleProblem,
        joint: bool,
        discipline: int,
        serial: bool,
        iterations: int,
        chains: int,
        beta: float,
        seed: int,
        threads: int,
    ) -> None: ...
    def start_listed(self, choice: NDArray[np.int32], discipline: int) -> float: ...
    def start_ordered(self, choice: NDArray[np.int32], order: NDArray[np.int32], shift: NDArray[np.int32]) -> float: ...
    def run(self, rounds: int, steps: int) -> float: ...
    def plan(self, chain: int = -1) -> tuple[float, NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]: ...
    def counts(self) -> tuple[int, int, int]: ...

def run_gpu_streams(
    memory: list[int],
    state: list[int],
    layout: list[int],
    launches: list[tuple[list[int], list[int], list[int], list[int], list[int], list[int], bool]],
    seed: int,
    most: int,
) -> None: ...
