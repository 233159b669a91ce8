# SPDX-License-Identifier: Apache-2.0
"""What ranks find around them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import Infeasible, InvalidInput
from stretto.lab import Lab, LabResult, network, running, unavailable

pytestmark = pytest.mark.real_lab
LIMIT_S = 480.0

LOOK = """
import json, os, socket
keys = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
        "GLOO_SOCKET_IFNAME", "STRETTO_LAB_HOST", "STRETTO_CHANNELS", "EXTRA")
print(json.dumps({key: os.environ.get(key) for key in keys} | {
    "hostname": socket.gethostname(), "peer": socket.gethostbyname("h1"), "second": socket.gethostbyname("h1.eth"),
    "reverse": socket.getnameinfo(("::ffff:10.201.1.1", 1, 0, 0), 0)[0],
    "interfaces": sorted(os.listdir("/sys/class/net")), "names": sorted(n for _, n in socket.if_nameindex())}))
"""

# Rank 0 leaves marks in every way that is not the network; the others say which of them they find.
MARKS = """
import json, os, pathlib, socket, time
rank = int(os.environ["RANK"])
hub = socket.create_server(("0.0.0.0", 7000)) if rank == 0 else None
if hub:
    pathlib.Path("/dev/shm/mark").write_text("here")
    local = socket.socket(socket.AF_UNIX)
    local.bind("\\0mark")
    local.listen()
    for _ in range(4):  # three ranks, and the one that finds it on the loopback, too
        link, _ = hub.accept()
        link.recv(1)
else:
    for _ in range(3000):
        try:
            link = socket.create_connection((os.environ["MASTER_ADDR"], 7000))
            break
        except ConnectionError:
            time.sleep(0.02)
    found = {"shm": pathlib.Path("/dev/shm/mark").exists()}
    for name, family, where in (("unix", socket.AF_UNIX, "\\0mark"), ("outside", socket.AF_INET, ("192.0.2.1", 80)),
                                ("loopback", socket.AF_INET, ("127.0.0.1", 7000))):
        probe = socket.socket(family)
        probe.settimeout(5)
        found[name] = probe.connect_ex(where) == 0
    print(json.dumps(found))
    link.sendall(b"x")
"""

# Sends a megabyte from rank 0 to rank 1 over the channel that is asked for, and a word back.
SEND = """
import os, socket, sys, time
channels = dict(part.split("=") for part in os.environ["STRETTO_CHANNELS"].split(";"))
mine = channels[sys.argv[1]].split(",")[1]
word = sys.argv[2].encode()
if os.environ["RANK"] == "1":
    with socket.create_server((mine, 7000)) as hub:
        link, _ = hub.accept()
        got = b""
        while piece := link.recv(1 << 20):
            got += piece
        assert len(got) == 1_000_000, len(got)
        print(got[:len(word)].decode())
else:
    for _ in range(3000):
        try:
            link = socket.create_connection((mine[:-1] + "2", 7000))
            break
        except ConnectionError:
            time.sleep(0.02)
    link.sendall(word.ljust(1_000_000))
"""


def python(lab: Lab, script: str, *arguments: str, **options: Any) -> LabResult:
    done = lab.run([sys.executable, "-c", script, *arguments], timeout_s=LIMIT_S, **options)
    assert done.exit_code == 0, done.errors
    return done


@pytest.mark.parametrize("order", ["host", "interleaved"])
def test_ranks_get_the_environment_of_torchrun_and_see_only_their_host(order: str) -> None:
    uplinks = {"rdma": "400mbit", "eth": "200mbit"}
    with Lab(hosts=2, ranks_per_host=2, uplinks=uplinks, order=order) as lab:
        seen = [json.loads(text) for text in python(lab, LOOK, env={"EXTRA": "1"}).outputs]
    assert [int(rank["RANK"]) for rank in seen] == [0, 1, 2, 3]
    assert {rank["WORLD_SIZE"] for rank in seen} == {"4"}
    assert [rank["GROUP_RANK"] for rank in seen] == (list("0011") if order == "host" else list("0101"))
    assert [rank["LOCAL_RANK"] for rank in seen] == (list("0101") if order == "host" else list("0011"))
    for rank in seen:
        host = rank["STRETTO_LAB_HOST"]
        assert rank["GROUP_RANK"] == host
        assert rank["hostname"] == f"h{host}"
        assert rank["LOCAL_WORLD_SIZE"] == "2"
        assert rank["MASTER_ADDR"] == "10.201.0.1"
        assert (rank["peer"], rank["second"], rank["reverse"]) == ("10.201.0.2", "10.201.1.2", "h0.eth.v6")
        assert rank["MASTER_PORT"].isdecimal()
        assert rank["GLOO_SOCKET_IFNAME"] == "rdma"
        at = int(host) + 1
        assert rank["STRETTO_CHANNELS"] == f"rdma=rdma,10.201.0.{at};eth=eth,10.201.1.{at}"
        assert rank["EXTRA"] == "1"
        assert rank["names"] == ["eth", "lo", "rdma"]
        assert {"eth", "lo", "rdma"} <= set(rank["interfaces"])
        assert not {"eth0", "docker0"} & set(rank["interfaces"])


def test_a_job_starts_where_the_lab_was_called(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Lab(hosts=1, ranks_per_host=1) as lab:
        assert lab.run(["pwd"], timeout_s=LIMIT_S).outputs == (f"{tmp_path}\n",)


def test_hosts_share_nothing_but_the_shaped_links() -> None:
    with Lab(hosts=2, ranks_per_host=2) as lab:
        done = python(lab, MARKS)
    together, *apart = (json.loads(text) for text in done.outputs[1:])
    assert together == {"shm": True, "unix": True, "outside": False, "loopback": True}
    assert apart == [{"shm": False, "unix": False, "outside": False, "loopback": False}] * 2


def test_bytes_pass_over_the_channel_that_was_taken_and_no_other() -> None:
    with Lab(hosts=2, ranks_per_host=1, uplinks={"rdma": "400mbit", "eth": "200mbit"}) as lab:
        python(lab, SEND, "eth", "word")
        sent, _ = lab.uplink_bytes("eth", 0)
        _, received = lab.uplink_bytes("eth", 1)
        other, _ = lab.uplink_bytes("rdma", 0)
        with pytest.raises(InvalidInput, match="unknown channel 'nvlink'; choose from: rdma, eth"):
            lab.uplink_bytes("nvlink", 0)
    assert 1_000_000 < sent < 1_100_000
    assert 1_000_000 < received < 1_100_000
    assert other < 10_000


@pytest.mark.parametrize("shaper", ["tbf", "htb"])
def test_every_uplink_is_shaped_in_both_directions(shaper: str) -> None:
    with Lab(hosts=2, ranks_per_host=1, uplinks={"a": "300mbit", "b": "50MB/s,20mbit"}, shaper=shaper) as lab:
        (here,) = (found for found in running() if found.name == lab.name)
        user = ["--user", "--preserve-credentials"] if lab.rootless else []

        def shapers(where: str) -> dict[str, str]:
            """The shaper of each device with its rate."""
            inside = ["nsenter", f"--target={here.keepers[where]}", *user, "--net"]
            what = ["qdisc"] if shaper == "tbf" else ["class"]
            found = {}
            for device in sorted(json.loads(output([*inside, "ip", "-json", "link"])), key=lambda d: str(d["ifname"])):
                words = output([*inside, "tc", *what, "show", "dev", device["ifname"]]).split()
                if "rate" in words:
                    found[device["ifname"]] = f"{words[1]} {words[words.index('rate') + 1]}"
            return found

        assert shapers("h0") == {"a": f"{shaper} 300Mbit", "b": f"{shaper} 400Mbit"}
        assert shapers("h1") == {"a": f"{shaper} 300Mbit", "b": f"{shaper} 20Mbit"}
        ports = ("p0h0", "p0h1", "p1h0", "p1h1")
        rates = ("300Mbit", "300Mbit", "400Mbit", "20Mbit")
        assert shapers("switch") == {port: f"{shaper} {rate}" for port, rate in zip(ports, rates, strict=True)}
        assert python(lab, SEND, "b", "through").outputs[1] == "through\n"

        lab.reshape("a", 1, "70mbit")
        assert shapers("h1") == {"a": f"{shaper} 70Mbit", "b": f"{shaper} 20Mbit"}
        assert shapers("switch")["p0h1"] == f"{shaper} 70Mbit"
        assert shapers("h0")["a"] == f"{shaper} 300Mbit"
        for wrong, message in ((("c", 0, "1gbit"), "unknown channel 'c'"), (("a", 2, "1gbit"), "host: must be 0..1")):
            with pytest.raises(InvalidInput, match=message):
                lab.reshape(*wrong)


def test_hosts_have_the_congestion_control_that_was_asked_for() -> None:
    own = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    before = own.read_text()
    by_default = Lab(hosts=2, ranks_per_host=1)
    for one, expected in ((by_default, "reno\n"), (Lab(hosts=2, ranks_per_host=1, tcp="machine"), before)):
        with one as lab:
            assert lab.run(["cat", str(own)], timeout_s=LIMIT_S).outputs == (expected, expected)
    with pytest.raises(Infeasible, match="lets hosts choose"), Lab(tcp="nosuch"):
        pass
    assert own.read_text() == before


def test_two_labs_at_once_have_the_same_addresses_and_do_not_meet() -> None:
    with Lab(ranks_per_host=1) as one, Lab(ranks_per_host=1, shaper="htb") as two:
        assert one.name != two.name
        jobs = [lab.start([sys.executable, "-c", SEND, "eth", word]) for lab, word in ((one, "one"), (two, "two"))]
        done = [job.wait(LIMIT_S) for job in jobs]
        assert [result.outputs[1] for result in done] == ["one\n", "two\n"]
        with pytest.raises(InvalidInput, match="is open already"):
            one.__enter__()


def test_gloo_adds_a_megabyte_over_the_uplinks() -> None:
    job = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.full((250_000,), float(1 + dist.get_rank()))
dist.all_reduce(value)
print(value.unique().tolist())
dist.destroy_process_group()
"""
    with Lab(hosts=2, ranks_per_host=2, uplinks={"eth": "400mbit"}) as lab:
        assert python(lab, job).outputs == ("[10.0]\n",) * 4
        # A ring of four sends 1.5 times the tensor over each link.
        assert lab.uplink_bytes("eth", 0)[0] > 1_400_000


def output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout


def stretto(*command: str, through: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    line = [*through, sys.executable, "-m", "stretto", *command]
    return subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S)


NO_RIGHTS = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")


def test_without_root_a_user_namespace_does(as_root: bool, rootless: bool) -> None:
    done = stretto("lab", "run", "--ranks", "2", "--", "hostname", through=NO_RIGHTS if as_root else ())
    if rootless:
        assert done.returncode == 0, done.stderr
        assert done.stderr.strip().endswith("rootless")
        assert sorted(done.stdout.splitlines()) == ["[0] h0", "[1] h0", "[2] h1", "[3] h1"]
    else:
        assert done.returncode == 2
        assert done.stderr.startswith("stretto: error: lab: ")


def test_without_any_right_one_line_says_so(rootless: bool) -> None:
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" "$@"'
    inside = ("unshare", "--user", "--map-root-user", "sh", "-c", forbid, *NO_RIGHTS)
    done = stretto("lab", "run", "--", "true", through=inside if rootless else NO_RIGHTS)
    assert done.returncode == 2
    assert done.stderr.startswith("stretto: error: lab: this machine gives no right to make network namespaces (run as")
    assert done.stderr.count("\n") == 1


def test_a_missing_tool_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(network, "PATH", str(tmp_path))
    network.tool.cache_clear()
    try:
        assert unavailable() == "lab: the command 'ip' is missing; install iproute2"
        with pytest.raises(Infeasible, match="install iproute2"):
            Lab().__enter__()
    finally:
        network.tool.cache_clear()


def test_a_lab_that_is_not_open_runs_nothing() -> None:
    with pytest.raises(InvalidInput, match="lab: is not open"):
        Lab().run(["true"])
    with Lab(hosts=1, ranks_per_host=1) as lab:
        with pytest.raises(InvalidInput, match="command: 'no-such-command' is not an executable"):
            lab.run(["no-such-command"])
        with pytest.raises(InvalidInput, match="command: is empty"):
            lab.run([])


def test_any_command_can_enter_a_host() -> None:
    with Lab(hosts=2, ranks_per_host=1, uplinks={"eth": "100mbit"}) as lab:
        for host in range(2):
            said = subprocess.run([*lab.enter(host), "hostname"], capture_output=True, text=True, timeout=LIMIT_S)
            assert said.stdout.strip() == f"h{host}"
        with pytest.raises(InvalidInput, match=r"host: must be 0\.\.1, not 2"):
            lab.enter(2)
