# SPDX-License-Identifier: Apache-2.0
"""Whether the lab's network is what it claims: TCP throughput over shaped uplinks, beside the rate asked for.

Plain sockets, no library. `payload_share` is payload over the shaped rate; headers take 0.7 % of it with the lab's
jumbo frames. Cases: one flow; both directions at once; four ranks of one host sharing its uplink; three hosts sending
into one. All flows are measured over the same window of time. `least_share` and `most_share` compare single flows with
their average. Round trips are of 1 byte, on the idle network.
"""

from __future__ import annotations

import json
import sys
import time
from statistics import median

from common import Row, finish, options

from stretto.lab import Lab, unavailable

START_S, WARM_S, MEASURE_S = 1.5, 0.5, 2.0

RANK = r"""
import json, os, socket, sys, threading, time
pairs, start, warm_s, measure_s = json.loads(sys.argv[1]), *map(float, sys.argv[2:])
def until(moment):
    time.sleep(max(0.0, moment - time.monotonic()))
rank, port = int(os.environ["RANK"]), 6000
def address(other):  # hosts are dealt in order
    return f"10.201.0.{other // int(os.environ['LOCAL_WORLD_SIZE']) + 1}"
sources = [a for a, b in pairs if b == rank]
got = {}
def receive(link, source):
    room = bytearray(1 << 20)
    while count := link.recv_into(room):
        got[source] += count
def send(target):
    for _ in range(200):
        try:
            link = socket.create_connection((address(target), port + target))
            break
        except ConnectionError:
            time.sleep(0.05)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    trips = []
    for _ in range(200):
        begun = time.perf_counter()
        link.sendall(bytes([rank]))
        link.recv(1)
        trips.append(time.perf_counter() - begun)
    print(json.dumps({"trip_us": sorted(trips)[100] * 1e6}), flush=True)
    until(start)
    data = bytes(1 << 20)
    while time.monotonic() < start + warm_s + measure_s + 0.2:
        link.sendall(data)
threads = [threading.Thread(target=send, args=(b,)) for a, b in pairs if a == rank]
server = socket.create_server(("0.0.0.0", port + rank), backlog=64)
for thread in threads:
    thread.start()
links = [server.accept()[0] for _ in sources]
def serve(link):
    for _ in range(200):
        source = link.recv(1)
        link.sendall(b"x")
    got[source[0]] = 0
    receive(link, source[0])
readers = [threading.Thread(target=serve, args=(link,)) for link in links]
for reader in readers:
    reader.start()
if sources:
    until(start + warm_s)
    if len(got) < len(sources):
        sys.exit("the machine is too busy: not all flows were there in time")
    before, begun = dict(got), time.perf_counter()
    until(start + warm_s + measure_s)
    after, spent = dict(got), time.perf_counter() - begun
    print(json.dumps({"mbit": [(after[s] - before[s]) * 8e-6 / spent for s in sources]}), flush=True)
for thread in threads + readers:
    thread.join()
"""

Pairs = list[tuple[int, int]]

CASES: list[tuple[str, int, int, Pairs]] = [
    ("one flow", 2, 1, [(0, 1)]),
    ("both directions", 2, 1, [(0, 1), (1, 0)]),
    ("4 ranks share an uplink", 2, 4, [(0, 4), (1, 5), (2, 6), (3, 7)]),
    ("3 hosts into one", 4, 1, [(1, 0), (2, 0), (3, 0)]),
]


def measure(case: str, hosts: int, ranks: int, pairs: Pairs, rate: str, shaper: str) -> Row:
    with Lab(hosts=hosts, ranks_per_host=ranks, uplinks={"eth": rate}, shaper=shaper) as lab:
        asked = lab.layout.channels[0].bits_per_s[0] / 1e6
        command = [sys.executable, "-c", RANK, json.dumps(pairs)]
        # All processes of a machine share this clock, whatever their namespaces.
        command += map(str, (time.monotonic() + START_S, WARM_S, MEASURE_S))
        done = lab.run(command, timeout_s=60)
    if done.exit_code:
        sys.exit(f"{case}: {done.why}")
    lines = [[json.loads(line) for line in text.splitlines()] for text in done.outputs]
    trips = [line["trip_us"] for rank in lines for line in rank if "trip_us" in line]
    received = [line["mbit"] for rank in lines for line in rank if "mbit" in line]
    flows = [flow for rank in received for flow in rank]
    # Flows of one uplink are judged by their sum, those of two directions each by itself.
    together = flows if case == "both directions" else [sum(flows)]
    return {
        "case": case,
        "system": shaper,
        "rate_mbit": asked,
        "payload_mbit": min(together),
        "payload_share": min(together) / asked,
        "least_share": min(flows) / (sum(flows) / len(flows)),
        "most_share": max(flows) / (sum(flows) / len(flows)),
        "round_trip_us": median(trips),
    }


def main() -> None:
    args = options(__doc__)
    if reason := unavailable():
        print(f"skipped: {reason}")
        return
    rates = ["100mbit", "1gbit"] if args.quick else ["100mbit", "400mbit", "1gbit"]
    cases = [(*case, rate, shaper) for shaper in ("tbf", "htb") for rate in rates for case in CASES]
    finish([measure(*case) for case in cases], args, title="shaped uplinks of the lab")


if __name__ == "__main__":
    main()
