# SPDX-License-Identifier: Apache-2.0
"""Who may talk to a controller, and what it does with what should not be said."""

from __future__ import annotations

import errno
import multiprocessing
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from toy_job import planner

from stretto.control.controller import Controller
from stretto.control.messages import MAX_MESSAGE_BYTES, RankState, Reply, Status, StatusRequest, decode, encode
from stretto.control.transport import (
    EXCHANGE,
    SERVICE,
    STATUS,
    ControllerConnection,
    Server,
    Tls,
    check_address,
    from_environment,
    is_local,
    make_token,
    private_folder,
    read_token,
)
from stretto.errors import InvalidInput, PeerLost

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def controller() -> Iterator[Controller]:
    running = Controller(start=planner("x"))
    yield running
    running.close()


@pytest.fixture
def server(controller: Controller) -> Iterator[Server]:
    listening = controller.serve("127.0.0.1:0", token=TOKEN)
    yield listening
    listening.close()


def ask(link: ControllerConnection) -> Status:
    return decode(link.call(STATUS, encode(StatusRequest()), timeout_s=100.0), Status)


def _make(path: str) -> str:
    return make_token(Path(path))


def test_processes_that_start_together_get_one_whole_token(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        for number in range(60):
            made = pool.map(_make, [str(tmp_path / f"t{number}")] * 4, chunksize=1)
            assert len(set(made)) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"t{number}" for number in range(60))


def test_an_empty_token_is_replaced_and_a_full_disk_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t"
    path.touch(0o600)
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert len(set(pool.map(_make, [str(path)] * 8, chunksize=1))) == 1
    path.unlink()

    def full(*_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("stretto.control.transport.secrets.token_hex", full)
    with pytest.raises(InvalidInput, match="cannot make the token: No space left on device"):
        make_token(path)
    assert not list(tmp_path.iterdir())


def test_the_right_token_is_heard(server: Server) -> None:
    link = ControllerConnection(server.address, token=TOKEN)
    assert ask(link).jobs == ()
    state = RankState(job="j", epoch=1, rank=0, size=1)
    assert decode(link.call(EXCHANGE, encode(state), timeout_s=100.0), Reply).epoch == 1
    assert [job.job for job in ask(link).jobs] == ["j"]
    link.close()


@pytest.mark.parametrize("token", ["", "wrong", TOKEN + "0", TOKEN[:-1]])
def test_a_wrong_token_is_refused(server: Server, token: str) -> None:
    link = ControllerConnection(server.address, token=token)
    with pytest.raises(InvalidInput, match="token is not this controller's"):
        ask(link)
    link.close()


def test_nonsense_with_the_right_token_is_named_and_changes_nothing(server: Server) -> None:
    link = ControllerConnection(server.address, token=TOKEN)
    for message in (b"", b"\xff" * 100, encode(StatusRequest()), b"\x91" * 5000):
        with pytest.raises(InvalidInput, match="not a RankState"):
            link.call(EXCHANGE, message, timeout_s=100.0)
    for wrong in (
        RankState(job="j", epoch=1, rank=3, size=2),
        RankState(job="j", epoch=1, rank=0, size=2, protocol=99),
        RankState(job="j", epoch=-1, rank=0, size=2),
        RankState(job="j" * 1000, epoch=1, rank=0, size=2),
        RankState(job="j", epoch=1, rank=0, size=1 << 30),
    ):
        with pytest.raises(InvalidInput):
            link.call(EXCHANGE, encode(wrong), timeout_s=100.0)
    assert ask(link).jobs == ()
    link.close()


def test_a_message_that_is_too_large_is_refused_on_both_sides(server: Server) -> None:
    link = ControllerConnection(server.address, token=TOKEN)
    with pytest.raises(InvalidInput):
        link.call(EXCHANGE, bytes(MAX_MESSAGE_BYTES + 1), timeout_s=100.0)
    assert ask(link).jobs == ()
    link.close()


def test_a_sender_without_a_limit_of_its_own_meets_the_controllers(server: Server) -> None:
    import grpc

    channel = grpc.insecure_channel(server.address, options=[("grpc.max_send_message_length", -1)])
    call = channel.unary_unary(f"/{SERVICE}/{EXCHANGE}")
    with pytest.raises(grpc.RpcError) as refused:
        call(bytes(MAX_MESSAGE_BYTES + 1), timeout=100.0, metadata=(("authorization", f"Bearer {TOKEN}"),))
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    channel.close()


def test_garbage_on_the_socket_disturbs_nobody(server: Server) -> None:
    host, _, port = server.address.rpartition(":")
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(1 << 16), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(5000)):
        with socket.create_connection((host, int(port)), timeout=100.0) as line:
            line.sendall(garbage)
    link = ControllerConnection(server.address, token=TOKEN)
    assert ask(link).jobs == ()
    link.close()


def test_a_unix_socket_is_for_this_user_alone(controller: Controller, tmp_path: Path) -> None:
    path = tmp_path / "s"
    server = controller.serve(f"unix:{path}", token=TOKEN)
    assert path.stat().st_mode & 0o077 == 0
    link = ControllerConnection(f"unix:{path}", token=TOKEN)
    assert ask(link).jobs == ()
    link.close()
    server.close()


def test_nobody_there_is_said_in_time(tmp_path: Path) -> None:
    link = ControllerConnection(f"unix:{tmp_path}/nobody", token=TOKEN)
    with pytest.raises(PeerLost, match="does not answer"):
        ask(link)
    link.close()


def test_an_address_that_others_can_reach_needs_certificates(controller: Controller) -> None:
    with pytest.raises(InvalidInput, match="give certificates"):
        controller.serve("0.0.0.0:0", token=TOKEN)
    assert [is_local(a) for a in ("unix:/a", "127.0.0.2:1", "localhost:1", "[::1]:1", "10.0.0.1:1", "name:1")] == [
        True, True, True, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:99999", "unix:relative", "unix:/" + "x" * 200])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(InvalidInput, match="address"):
        check_address(address)


def test_one_address_has_one_controller(controller: Controller, server: Server) -> None:
    with pytest.raises(InvalidInput, match="cannot listen"):
        controller.serve(server.address, token=TOKEN)


def test_a_token_file_is_made_once_and_refused_when_others_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = make_token(path)
    assert len(token) == 64
    assert make_token(path) == token
    path.chmod(0o644)
    with pytest.raises(InvalidInput, match="chmod 600"):
        read_token(path)
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(InvalidInput, match="at least"):
        read_token(path)


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir(mode=0o755)
    with pytest.raises(InvalidInput, match="0700"):
        private_folder(folder)
    (tmp_path / "link").symlink_to(private_folder(tmp_path / "own"))
    with pytest.raises(InvalidInput, match="0700"):
        private_folder(tmp_path / "link")


def test_the_environment_names_controller_and_token(tmp_path: Path) -> None:
    assert from_environment({}) is None
    with pytest.raises(InvalidInput, match="STRETTO_TOKEN_FILE"):
        from_environment({"STRETTO_CONTROLLER": "unix:/a"})
    make_token(tmp_path / "t")
    both = {"STRETTO_CONTROLLER": "unix:/a", "STRETTO_TOKEN_FILE": str(tmp_path / "t")}
    assert from_environment(both) is not None
    with pytest.raises(InvalidInput, match="STRETTO_TLS_KEY: mTLS needs all"):
        from_environment({**both, "STRETTO_TLS_CERT": "c", "STRETTO_TLS_CA": "a"})


def openssl(*arguments: str, folder: Path) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=300)


def authority(folder: Path, name: str) -> None:
    openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem", folder=folder,
    )  # fmt: skip


def certificate(folder: Path, name: str, signer: str) -> Tls:
    (folder / "ext").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    openssl(
        "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}",
        "-keyout", f"{name}.key", "-out", f"{name}.csr", folder=folder,
    )  # fmt: skip
    openssl(
        "x509", "-req", "-in", f"{name}.csr", "-CA", f"{signer}.pem", "-CAkey", f"{signer}.key", "-CAcreateserial",
        "-days", "2", "-extfile", "ext", "-out", f"{name}.pem", folder=folder,
    )  # fmt: skip
    return Tls(certificate=folder / f"{name}.pem", key=folder / f"{name}.key", authority=folder / "ca.pem")


def test_with_certificates_only_those_that_the_authority_signed_are_heard(
    controller: Controller, tmp_path: Path
) -> None:
    authority(tmp_path, "ca")
    authority(tmp_path, "other")
    server = controller.serve("0.0.0.0:0", token=TOKEN, tls=certificate(tmp_path, "server", "ca"))
    address = f"127.0.0.1:{server.address.rpartition(':')[2]}"
    rank = certificate(tmp_path, "rank", "ca")
    links = [
        ControllerConnection(address, token=TOKEN, tls=rank),
        ControllerConnection(address, token=TOKEN, tls=certificate(tmp_path, "stranger", "other")),
        ControllerConnection(address, token=TOKEN),
        ControllerConnection(address, token="wrong", tls=rank),
    ]
    assert ask(links[0]).jobs == ()
    for link in links[1:3]:
        with pytest.raises(PeerLost):
            ask(link)
    with pytest.raises(InvalidInput, match="token"):
        ask(links[3])
    for link in links:
        link.close()
    server.close()
