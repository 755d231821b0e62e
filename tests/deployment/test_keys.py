"""A node's key pair: written once, readable by its owner, and a signature that holds for one message and key only."""

import shutil
import subprocess

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from fedpriv.errors import InputError
from fedpriv.privacy.ledger import keys


@pytest.fixture(params=[keys.NODE, keys.VAULT])
def key(tmp_path, request):
    keys.make_key_pair(tmp_path / "node.key", request.param)
    return tmp_path / "node.key"


def test_pair_is_private_and_in_openssh_format(key):
    assert key.stat().st_mode & 0o777 == 0o600
    assert key.read_text().startswith("-----BEGIN OPENSSH PRIVATE KEY-----")
    assert key.with_name("node.key.pub").read_text().strip() == keys.public_line(key)
    assert sorted(file.name for file in key.parent.iterdir()) == ["node.key", "node.key.pub"]


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs OpenSSH")
def test_openssh_reads_the_same_public_line_from_the_private_key(key):
    found = subprocess.run(["ssh-keygen", "-y", "-f", key], capture_output=True, text=True, check=True).stdout
    assert found.split()[:2] == keys.public_line(key).split()


@pytest.mark.parametrize("taken", ["node.key", "node.key.pub"])
def test_nothing_is_overwritten(tmp_path, taken):
    (tmp_path / taken).write_text("mine")
    with pytest.raises(InputError, match="exists"):
        keys.make_key_pair(tmp_path / "node.key")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [(taken, "mine")]


def test_signature_holds_for_one_message_and_one_key(key, tmp_path):
    keys.make_key_pair(tmp_path / "other.key")
    line, signature = keys.public_line(key), keys.sign(key, b"message")
    assert keys.verify(line, b"message", signature)
    assert keys.verify(f"{line} a comment", b"message", signature)
    assert not keys.verify(line, b"massage", signature)
    assert not keys.verify(keys.public_line(tmp_path / "other.key"), b"message", signature)


def test_a_malformed_signature_is_none_and_a_malformed_key_verifies_nothing(key):
    for signature in ("", "no base64!", "ü", "AAAA", "MGU="):
        assert not keys.verify(keys.public_line(key), b"message", signature), signature
    for line in ("", "ü", "ssh-rsa AAAA", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp384 AAAA", "a\nb"):
        assert not keys.verify(line, b"message", keys.sign(key, b"message")), line


def openssh(private) -> bytes:
    return private.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"nonsense", "must be an OpenSSH private key"),
        (openssh(rsa.generate_private_key(65537, 2048)), "must be an Ed25519 key, or an EC key on secp384r1"),
        (openssh(ec.generate_private_key(ec.SECP256R1())), "secp384r1"),
    ],
)
def test_unusable_private_key_is_named_in_one_line(tmp_path, content, message):
    path = tmp_path / "some.key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        keys.public_line(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_neither_kind_of_key_stands_for_the_other(key):
    line = keys.public_line(key)
    kind, other = keys.kind_of(line), {keys.NODE: keys.VAULT, keys.VAULT: keys.NODE}[keys.kind_of(line)]
    assert line.startswith(f"{kind} ")
    assert keys.read_public_line(keys.public_path(key), kind) == line
    with pytest.raises(InputError, match=rf"is a {kind} key, as in a .*\.key\.pub; give the .*\.key\.pub"):
        keys.read_public_line(keys.public_path(key), other)
    assert keys.is_public_line(line) is (kind == keys.VAULT)


def test_the_lines_of_earlier_keys_are_kept_in_their_order_each_once(key, tmp_path):
    file, line = tmp_path / "vault.key.earlier", keys.public_line(key)
    assert keys.read_lines(file) == ()
    keys.make_key_pair(tmp_path / "other.key")
    other = keys.public_line(tmp_path / "other.key")
    for each in (line, other, line):
        keys.add_line(file, each)
    assert keys.read_lines(file) == (line, other)
    file.write_text(f"{line}\nnonsense\n")
    with pytest.raises(InputError, match="line 2 is no public key"):
        keys.read_lines(file)


def test_a_public_file_is_read_without_its_comment_and_one_without_a_key_or_with_two_is_refused(key, tmp_path):
    path, line = tmp_path / "sent.pub", keys.public_line(key)
    for content in (None, b"", b"\xff\xfe", b"ssh-rsa AAAA"):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(InputError, match=r"sent\.pub"):
            keys.read_public_line(path)
    path.write_text(f"{line}\n{line}\n")
    with pytest.raises(InputError, match="one line"):
        keys.read_public_line(path)
    path.write_text(f"{line} somebody@clinic\n")
    assert keys.read_public_line(path, None) == line
