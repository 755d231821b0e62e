"""Certificates that Python's strictest verification takes, for the hosts they name and no other."""

import socket
import ssl
import subprocess
from datetime import UTC, datetime, timedelta

import pytest

from fedpriv.errors import InputError
from server.deploy import certificates
from tests.deployment.tls_server import serving


@pytest.fixture
def folder(tmp_path):
    certificates.make_ca(tmp_path, 100)
    return tmp_path


def handshake(port, ca, host) -> None:
    context = ssl.create_default_context(cafile=str(ca))
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    with socket.create_connection(("127.0.0.1", port)) as raw, context.wrap_socket(raw, server_hostname=host):
        pass


@pytest.fixture
def certified(folder):
    certificates.make_server_certificate(folder, ["fl.example.org", "10.1.2.3", "2001:db8::1"], 30)
    return folder


def test_strict_verification_takes_the_certificate_for_each_host_and_for_no_other(certified):
    with serving(certified) as port:
        for host in ("fl.example.org", "10.1.2.3", "2001:db8::1", "127.0.0.1", "localhost"):
            handshake(port, certified / "ca.crt", host)
        for host in ("example.org", "10.1.2.4"):
            with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
                handshake(port, certified / "ca.crt", host)


def test_openssl_verifies_the_chain_too_and_private_keys_are_their_owners_alone(certified):
    command = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-CAfile", "ca.crt", "server.crt"]
    done = subprocess.run(command, cwd=certified, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {(certified / name).stat().st_mode & 0o777 for name in ("ca.key", "server.key")} == {0o600}


def test_server_certificate_ends_no_later_than_its_authority_and_one_of_the_past_has_expired(folder):
    certificates.make_server_certificate(folder, ["fl.example.org"], 3000)
    assert certificates.valid_until(folder / "server.crt") == certificates.valid_until(folder / "ca.crt")
    certificates.make_server_certificate(folder, ["h.org"], 1, not_before=datetime.now(UTC) - timedelta(days=2))
    assert certificates.valid_until(folder / "server.crt") < datetime.now(UTC)


def test_another_certificate_replaces_the_first_and_keeps_the_authority(certified):
    certificates.make_server_certificate(certified, ["second.org"], 30)
    assert "second.org" in certificates.hosts_of(certified / "server.crt")
    with serving(certified) as port:
        handshake(port, certified / "ca.crt", "second.org")


def test_authority_is_never_overwritten(folder):
    before = (folder / "ca.key").read_bytes()
    with pytest.raises(InputError, match="exists"):
        certificates.make_ca(folder, 100)
    assert (folder / "ca.key").read_bytes() == before


NO_HOSTS = ("", "a b", "host:9093", "https://h.org", "300.1.2.3", "10.0.0", "-a.org", "a..b")


@pytest.mark.parametrize(
    ("host", "days", "message"),
    [
        *((host, 30, "must be a DNS name or an IP address") for host in NO_HOSTS),
        *(("h.org", days, "days = ") for days in (0, -1, 10**6)),
    ],
)
def test_host_or_validity_without_sense_is_refused_before_anything_is_written(folder, host, days, message):
    with pytest.raises(InputError, match=message):
        certificates.make_server_certificate(folder, [host], days)
    assert not (folder / "server.key").exists()


def test_key_of_another_authority_signs_nothing(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    certificates.make_ca(other, 100)
    (folder / "ca.key").write_bytes((other / "ca.key").read_bytes())
    with pytest.raises(InputError, match=r"must be the private key of ca\.crt"):
        certificates.make_server_certificate(folder, ["h.org"], 30)
