# SPDX-License-Identifier: Apache-2.0
"""The Ray backend: real tasks on a local Ray, ended ones and dead ones included."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from local_ray import started

import stretto as st
from stretto.children import ray_cluster
from stretto.synthesis import backends, portfolio, ray_backend, synthesize, worker
from stretto.synthesis.attempts import Attempt, Board
from stretto.synthesis.problem import MakerTask, SynthesisProblem

MAKERS = ["library:ring", "library:direct", "library:bruck"]
LIMIT_S = 600.0
"""Ray needs minutes to start a worker where the machine is busy; nothing here takes as long where it is not."""


@dataclass(frozen=True, kw_only=True)
class Sleeper:
    """Unpickled on a worker, where it leaves its process number and its child's in a file, and then does not end."""

    path: str

    def __reduce__(self) -> tuple[Any, ...]:
        code = (
            "import os, subprocess, time; child = subprocess.Popen(['sleep', '600']); "
            f"open({self.path!r} + '.part', 'w').write(f'{{os.getpid()}} {{child.pid}}'); "
            f"os.rename({self.path!r} + '.part', {self.path!r}); time.sleep(600)"
        )
        return exec, (code,)


@pytest.fixture
def ring() -> st.Cluster:
    return st.Cluster.preset("ring", nodes=4, gb_per_s=10.0, alpha_us=1.0)


def listening(*, locally: bool) -> set[str]:
    """Addresses on which somebody listens, as the kernel writes them."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(table).read_text().splitlines()[1:]:
                address, state = line.split()[1], line.split()[3]
                if state == "0A" and address.split(":")[0].endswith("0100007F") == locally:
                    found.add(address)
    return found


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with contextlib.ExitStack() as stack:
        ray = started(stack, lambda: ray_cluster.connected(jobs=2))
        folder = Path(ray._private.worker.global_worker.node.get_session_dir_path()).parent
        assert folder.name.startswith("stretto-ray-")
        yield ray
    assert not ray.is_initialized()
    assert not folder.exists(), "what a local Ray leaves behind is removed"


def comes_true(condition: Callable[[], bool]) -> bool:
    """Whether something is so, now or within the limit."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def numbers(path: Path) -> list[int]:
    assert comes_true(path.exists), "the task did not start"
    return [int(number) for number in path.read_text().split()]


def gone(pid: int) -> bool:
    """Whether a process has ended, or only waits to be noticed."""

    def ended() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    return comes_true(ended)


def board_of(ring: st.Cluster, budget_s: float) -> tuple[SynthesisProblem, Board]:
    problem = SynthesisProblem(collective=st.AllGather(4), cluster=ring, nbytes=st.MB)
    bound = st.lower_bound(problem.collective, ring, st.MB)
    return problem, Board(bound=bound, budget_s=budget_s, began=time.monotonic())


def test_a_local_ray_is_heard_only_on_this_machine(ray: Any) -> None:
    assert ray.util.get_node_ip_address() == "127.0.0.1"
    ports = {node["NodeManagerPort"] for node in ray.nodes()}
    ports.add(int(ray.get_runtime_context().gcs_address.rpartition(":")[2]))
    heard = {here: {int(a.rpartition(":")[2], 16) for a in listening(locally=here)} for here in (True, False)}
    assert ports <= heard[True]
    assert not ports & heard[False]
    assert not set(ray_cluster.LOCAL) & set(os.environ)


def test_a_ray_that_runs_is_taken_for_one(ray: Any) -> None:
    ray_cluster._check_listening(ray.get_runtime_context().gcs_address)


def test_ray_finds_what_one_process_finds(ray: Any, ring: st.Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = synthesize(st.AllGather(4), ring, st.MB, makers=MAKERS, cache=False)
    monkeypatch.setattr(portfolio, "SMALL", 0)
    lines: list[str] = []
    beside = synthesize(
        st.AllGather(4),
        ring,
        st.MB,
        makers=MAKERS,
        cache=False,
        jobs=2,
        backend="ray",
        budget_s=LIMIT_S,
        progress=lambda message, fraction: lines.append(message),
    )
    assert beside.program == alone.program
    assert {(c.maker, c.name, c.time_us) for c in beside.candidates} == {
        (c.maker, c.name, c.time_us) for c in alone.candidates
    }
    assert any(line.endswith("library:ring: ring(chunks=2)") for line in lines)
    assert ray.is_initialized(), "what somebody else has started stays"


def test_both_solvers_serve_tasks_on_ray(ray: Any, ring: st.Cluster) -> None:
    found = synthesize(
        st.AllGather(4), ring, st.MB, makers=["exact", "three_stage:auto"], cache=False, backend="ray", budget_s=LIMIT_S
    )
    assert {c.maker for c in found.candidates if c.time_us is not None} >= {"exact"}
    assert not any("Error" in c.reason for c in found.candidates)


def test_a_dead_ray_worker_is_a_candidate_with_a_reason(ray: Any, ring: st.Cluster, tmp_path: Path) -> None:
    problem, board = board_of(ring, LIMIT_S)
    pid_file = tmp_path / "pids"
    lost = MakerTask(maker="library", label="lost", weight=1.0, options={"x": Sleeper(path=str(pid_file))})
    good = MakerTask(maker="library", label="good", weight=1.0, options={"algorithm": "ring"})

    def start(request: bytes, tell: worker.Tell) -> worker.ActiveTask:
        far = ray_backend.RayTask(request, tell)
        if b"pids" in request:
            pid, child = numbers(pid_file)
            os.kill(pid, 9)
            os.kill(child, 9)
        return far

    backends.run_tasks(problem, [lost, good], board, jobs=2, start=start)
    reasons = {c.maker: c.reason for c in board.candidates if c.time_us is None}
    assert reasons["lost"].startswith("its Ray task failed: ")
    assert board.best is not None and board.best.maker == "good"


def test_a_late_ray_task_is_ended_with_what_it_has_started(
    ray: Any, ring: st.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "LAST_S", 0.0)
    problem, board = board_of(ring, 1.0)
    pid_file = tmp_path / "pids"
    late = MakerTask(maker="library", label="late", weight=1.0, options={"x": Sleeper(path=str(pid_file))})
    pids: list[int] = []

    def start(request: bytes, tell: worker.Tell) -> worker.ActiveTask:
        far = ray_backend.RayTask(request, tell)
        pids.extend(numbers(pid_file))
        return far

    backends.run_tasks(problem, [late], board, jobs=1, start=start)
    assert [c.reason for c in board.candidates] == ["ended: the budget of 1 s was spent"]
    assert all(gone(pid) for pid in pids)


def test_a_late_process_is_ended_with_what_it_has_started(
    ring: st.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "LAST_S", 0.0)
    problem, board = board_of(ring, 1.0)
    pid_file = tmp_path / "pids"
    late = MakerTask(maker="library", label="late", weight=1.0, options={"x": Sleeper(path=str(pid_file))})
    pids: list[int] = []

    with backends.backend("processes", jobs=1) as processes:

        def start(request: bytes, tell: worker.Tell) -> worker.ActiveTask:
            far = processes(request, tell)
            pids.extend(numbers(pid_file))
            return far

        backends.run_tasks(problem, [late], board, jobs=1, start=start)
    assert [c.reason for c in board.candidates] == ["ended: the budget of 1 s was spent"]
    assert all(gone(pid) for pid in pids)


def test_what_a_ray_task_raises_is_the_reason(ray: Any) -> None:
    messages: list[worker.Message] = []
    far = ray_backend.RayTask(pickle.dumps((b"no problem", b"", None, 1.0)), messages.append)
    assert comes_true(lambda: bool(messages))
    assert messages == [None]
    assert "UnpicklingError" in far.reason()
    assert not isinstance(messages[0], Attempt)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "threads"}, "unknown backend 'threads'; choose from: processes, ray"),
        ({"ray_address": "head:6379"}, "ray_address: is for the backend ray, not processes"),
        ({"backend": "ray", "ray_address": "ray://head:10001"}, "ray_address: ray://head:10001 is for Ray's client"),
    ],
)
def test_wrong_places_to_run_are_named(ring: st.Cluster, options: dict[str, Any], message: str) -> None:
    with pytest.raises(st.InvalidInput) as error:
        synthesize(st.AllGather(4), ring, st.MB, makers=MAKERS, cache=False, **options)
    assert str(error.value).startswith(message)


def test_without_the_extra_the_error_names_it(ring: st.Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: None)
    with pytest.raises(st.InvalidInput, match=r"pip install 'stretto\[ray\]'"):
        synthesize(st.AllGather(4), ring, st.MB, backend="ray")


def test_an_address_where_nothing_listens_is_said_at_once() -> None:
    with pytest.raises(st.InvalidInput, match=r"ray_address: nothing answers at 127\.0\.0\.1:1: "):
        ray_cluster._check_listening("127.0.0.1:1")


@contextlib.contextmanager
def listener(answer: bytes) -> Iterator[str]:
    """Somebody who says this to whoever connects, and nothing else."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    held.append(connection)
                    connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        for connection in held:
            connection.close()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-x\r\n"])
def test_a_listener_that_is_not_ray_is_said(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "CONNECT_S", 0.5)
    with listener(answer) as address, pytest.raises(st.InvalidInput) as error:
        ray_cluster._check_listening(address)
    assert str(error.value) == f"ray_address: what listens at {address} is not Ray"
