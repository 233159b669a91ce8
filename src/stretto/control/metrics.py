# SPDX-License-Identifier: Apache-2.0
"""What a controller knows of its jobs as counters for Prometheus: as text, or served at an address of this machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from .local_http import QuietHandler, listen_locally
from .messages import JobStatus, Status

CONTENT = "text/plain; version=0.0.4; charset=utf-8"
PATH = "/metrics"
Labels = tuple[tuple[str, str], ...]
Sample = tuple[Labels, float]


def prometheus_text(status: Status) -> str:
    """A status in Prometheus's text format, version 0.0.4.

    >>> print(prometheus_text(Status(pid=7, jobs=())).splitlines()[-1])
    stretto_jobs 0
    """
    lines = []
    for name, kind, about, samples in _families(status):
        found = list(samples)
        if not found:
            continue
        lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{_braces(labels)} {value:.12g}" for labels, value in found]
    return "\n".join(lines) + "\n"


def _families(status: Status) -> Iterator[tuple[str, str, str, Iterator[Sample]]]:
    """Name, type, description and values of every counter."""
    jobs = status.jobs

    def of_jobs(value: Callable[[JobStatus], float | None]) -> Iterator[Sample]:
        for job in jobs:
            found = value(job)
            if found is not None:
                yield (("job", job.job),), found

    def of_ranks(name: str, scale: float = 1.0) -> Iterator[Sample]:
        for job in jobs:
            for rank in job.ranks:
                yield (("job", job.job), ("rank", str(rank.rank))), getattr(rank, name) * scale

    gauge, counter = "gauge", "counter"
    yield "stretto_job_ranks", gauge, "Ranks of the job.", of_jobs(lambda job: job.size)
    yield (
        "stretto_job_plan", gauge, "Number of the active plan; 0 is plain order.", of_jobs(lambda job: job.plan.number)
    )  # fmt: skip
    yield "stretto_job_replans_total", counter, "Plans that were made anew.", of_jobs(lambda job: job.replans)
    yield (
        "stretto_job_recalled", gauge, "1 where the job began with a plan of an earlier start.",
        of_jobs(lambda job: job.recalled),
    )  # fmt: skip
    yield (
        "stretto_job_iteration_seconds", gauge, "An iteration as it is now.",
        of_jobs(lambda job: job.iteration_us * 1e-6 if job.iteration_us else None),
    )  # fmt: skip
    yield (
        "stretto_job_unchanged_iteration_seconds", gauge, "An iteration of the job on its own backend, in plain order.",
        of_jobs(lambda job: job.split.unchanged.median_us * 1e-6 if job.split.unchanged is not None else None),
    )  # fmt: skip
    yield (
        "stretto_job_predicted_iteration_seconds", gauge, "An iteration under the active plan, as predicted.",
        of_jobs(lambda job: job.predicted_us * 1e-6 if job.predicted_us else None),
    )  # fmt: skip
    yield (
        "stretto_job_gain_ratio", gauge, "How many times as fast as the unchanged job.",
        of_jobs(lambda job: job.split.gain or None),
    )  # fmt: skip
    yield "stretto_rank_heard_seconds", gauge, "How long ago the rank was heard of.", of_ranks("heard_s")
    yield "stretto_rank_iterations_total", counter, "Iterations that the rank has counted.", of_ranks("iteration")
    yield (
        "stretto_rank_iteration_seconds", gauge, "An iteration of the rank.", of_ranks("iteration_us", 1e-6)
    )  # fmt: skip
    yield (
        "stretto_rank_waits_seconds", gauge, "How long the rank waits for calls in an iteration.",
        of_ranks("waits_us", 1e-6),
    )  # fmt: skip
    yield (
        "stretto_rank_held_seconds", gauge, "How long the plan's order holds its calls back in an iteration.",
        of_ranks("held_us", 1e-6),
    )  # fmt: skip
    yield "stretto_hangs_total", counter, "Hangs and lost ranks that were named.", _hangs(status, over=True)
    yield "stretto_hangs", gauge, "Those of them that have not gone on.", _hangs(status, over=False)
    yield "stretto_jobs", gauge, "Jobs that the controller knows.", iter([((), float(len(jobs)))])


def _hangs(status: Status, *, over: bool) -> Iterator[Sample]:
    counts: dict[Labels, float] = {}
    for hang in status.hangs:
        labels = (("job", hang.job), ("kind", hang.kind))
        counts[labels] = counts.get(labels, 0.0) + (over or not hang.went_on_s)
    yield from counts.items()


def _braces(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}" if labels else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class MetricsServer:
    """Serves ``/metrics`` from the start until `close`, on an address of this machine only: there is no token."""

    def __init__(self, address: str, status: Callable[[], Status]) -> None:
        class Handler(QuietHandler):
            def do_GET(self) -> None:
                if self.path.split("?")[0] != PATH:
                    self.send_error(404)
                    return
                self.answer(200, CONTENT, prometheus_text(status()))

        self._server, self.address = listen_locally("--metrics", address, Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="stretto-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving the counters."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
