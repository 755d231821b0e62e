"""Each check says plainly what is wrong with a real server, file or folder, and never shows a record."""

import errno
import os
import pwd
import socket
from datetime import UTC, datetime, timedelta

import pytest

from clients.deploy import doctor, separate_users
from fedpriv.files import User
from fedpriv.operate import checks
from fedpriv.operate.checks import Check
from fedpriv.privacy.ledger import keys
from fedpriv.privacy.ledger.ledger import Ledger
from server.deploy import certificates
from simulations.sites import free_port
from tests.deployment.tls_server import serving

HOST = "127.0.0.1"


@pytest.fixture
def folder(tmp_path):
    certificates.make_ca(tmp_path, 100)
    certificates.make_server_certificate(tmp_path, [HOST], 30)
    return tmp_path


@pytest.mark.parametrize(
    ("host", "begins", "said"),
    [
        (HOST, None, "valid until"),
        ("127.0.0.2", None, "not valid for 127.0.0.2"),  # loopback as well, but not named in the certificate
        (HOST, timedelta(days=-2), "expired"),
        (HOST, timedelta(days=2), "not yet valid"),
    ],
)
def test_a_certificate_is_for_its_host_and_its_days(folder, host, begins, said):
    if begins:
        certificates.make_server_certificate(folder, [HOST], 1, not_before=datetime.now(UTC) + begins)
    with serving(folder, host=host) as port:
        found = checks.check_tls(host, port, folder / "ca.crt")
    assert (found.ok, said in found.detail) == (said == "valid until", True), found


def test_a_server_that_is_missing_speaks_no_tls_or_is_another_authoritys_is_told(folder, tmp_path_factory):
    own, other = folder / "ca.crt", tmp_path_factory.mktemp("other")
    certificates.make_ca(other, 100)  # of the same name
    with serving(folder) as port, serving(None) as plain:
        for host, at, ca, said in (
            (HOST, free_port(), own, "nothing is listening"),
            ("no-such-host.invalid", 9093, own, "is unknown"),
            (HOST, port, other / "ca.crt", "signed by another CA"),
            (HOST, plain, own, "speaks no TLS"),
        ):
            found = checks.check_tls(host, at, ca)
            assert (found.ok, said in found.detail) == (False, True), found


def test_a_door_where_anything_but_a_bare_404_answers_is_open(folder):
    with serving(folder) as port:
        opened = "OPEN TO STRANGERS: register, run, list, stop, log, acquire-task"
        for at, said in ((port, opened), (free_port(), "gave no answer to register")):
            found = checks._check_door(HOST, at, folder / "ca.crt")
            assert (found.ok, said in found.detail) == (False, True), found


@pytest.mark.parametrize("content", [None, "nonsense"])
def test_authority_that_cannot_be_read(tmp_path, content):
    ca = tmp_path / "ca.crt"
    if content:
        ca.write_text(content)
    for check in (checks.check_tls, checks._check_clock):
        found = check(HOST, free_port(), ca)
        assert (found.ok, str(ca) in found.detail) == (False, True), found


@pytest.mark.parametrize(("seconds", "ok"), [(0, True), (60, False), (-60, False)])
def test_clock_is_compared_with_the_servers(folder, seconds, ok):
    with serving(folder, clock_offset=timedelta(seconds=seconds)) as port:
        found = checks._check_clock(HOST, port, folder / "ca.crt")
    assert found.ok is ok, found
    if not ok:
        assert ("behind" if seconds > 0 else "ahead of") in found.detail
    assert not checks._check_clock(HOST, free_port(), folder / "ca.crt").ok, "there is no server"


@pytest.mark.parametrize(
    ("host", "port", "advice"),
    [("192.0.2.1", 9, "this machine has no such address"), ("127.0.0.1", 1, "the unit that `units` writes")],
)
def test_a_port_that_nobody_uses_is_refused_with_its_own_cure(monkeypatch, host, port, advice):
    if port == 1:  # as for anyone but root

        def refused(*_: object, **__: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(socket, "create_server", refused)
    found = checks.check_port_free(host, port)
    assert (found.ok, advice in found.detail, "stop the program" in found.detail) == (False, True, False)


def test_ledger_none_yet_then_whole_then_damaged(tmp_path):
    path = tmp_path / "new" / "ledger.sqlite"
    assert doctor.check_ledger(path).ok
    assert not path.parent.exists(), "a check makes nothing"
    assert not doctor.check_registered(path).ok
    with Ledger(path) as ledger:
        assert not doctor.check_registered(path).ok
        data_set = ledger.register("0", 7, 1e-5)
    assert "1 entries" in doctor.check_ledger(path).detail
    assert doctor.check_registered(path) == Check("registered", True, f"N_k = 7, data set {data_set.id}")
    path.write_bytes(b"no ledger at all" * 100)
    assert not doctor.check_ledger(path).ok
    assert not doctor.check_registered(path).ok


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_ledger_in_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    assert not doctor.check_ledger(tmp_path / "ledger.sqlite").ok


def test_data_are_there_or_not_and_never_opened(tmp_path):
    file = tmp_path / "records.csv"
    file.write_bytes(b"\xff no table")
    assert doctor.check_data(file) == Check("data", True, f"{file}: 10 bytes")
    assert not doctor.check_data(tmp_path / "none.csv").ok
    assert not doctor.check_data(tmp_path).ok


@pytest.mark.parametrize(("mode", "ok"), [(0o600, True), (0o640, True), (0o604, False), (0o601, False), (0o666, False)])
def test_files_are_closed_to_everybody_else(tmp_path, mode, ok):
    file = tmp_path / "ledger.sqlite"
    file.touch()
    file.chmod(mode)
    found = doctor.check_files([file, tmp_path / "none"])
    assert (found.ok, "chmod 600" in found.detail) == (ok, not ok), found


def test_a_named_user_must_not_own_the_files(tmp_path):
    file = tmp_path / "own.csv"
    file.touch(mode=0o600)
    me = pwd.getpwuid(os.geteuid()).pw_name
    assert "change its owner" in doctor.check_files([file], me).detail
    assert doctor.check_files([], me).ok
    assert "no such user" in doctor.check_files([file], "nobody-of-that-name").detail


@pytest.mark.parametrize(
    ("mode", "owner", "member", "stranger"),
    [(0o600, True, False, False), (0o640, True, True, False), (0o604, True, False, True), (0o000, True, False, False)],
)
def test_who_can_use_a_file(tmp_path, mode, owner, member, stranger):
    file = tmp_path / "own.csv"
    file.touch()
    file.chmod(mode)
    status = file.stat()
    others = status.st_uid + 1
    assert separate_users.can_use(User("owner", status.st_uid, 1, ()), file) is owner
    assert separate_users.can_use(User("member", others, 1, (1, status.st_gid)), file) is member
    assert separate_users.can_use(User("stranger", others, status.st_gid + 1, (status.st_gid + 1,)), file) is stranger


def test_key_must_be_its_owners_alone(tmp_path):
    key = tmp_path / "vault.key"
    keys.make_key_pair(key)
    assert separate_users._check_key(key, keys.VAULT).ok
    assert "must be `ecdsa-sha2-nistp384`" in separate_users._check_key(key, keys.NODE).detail
    key.chmod(0o640)
    found = separate_users._check_key(key, keys.VAULT)
    assert (found.ok, "chmod 600" in found.detail) == (False, True), found
    assert not separate_users._check_key(tmp_path / "vault.key.pub", keys.VAULT).ok


def test_a_policy_shows_its_limits_and_a_disk_its_room(tmp_path):
    policy = tmp_path / "policy.toml"
    policy.write_text("max_rounds = 3\n")
    assert "max_rounds = 3," in doctor.check_policy(policy).detail
    policy.write_text("max_rouns = 3\n")
    assert not doctor.check_policy(policy).ok
    assert checks.check_disk(tmp_path, 1).ok
    assert not checks.check_disk(tmp_path, 2**80).ok


def test_versions_name_the_pinned_flower():
    found = checks._check_versions()
    assert found.ok, found
    assert f"flwr {checks._pinned_flower()}" in found.detail
    assert next(checks.check_programs()).ok


def test_all_must_be_ok_and_each_gets_a_line(capsys):
    assert checks.print_checks([Check("disk", True, "plenty")])
    assert not checks.print_checks([Check("disk", True, "plenty"), Check("tls", False, "expired")])
    assert [line[:4] for line in capsys.readouterr().out.splitlines()] == ["ok  ", "ok  ", "FAIL"]
