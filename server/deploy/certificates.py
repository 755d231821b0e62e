"""A federation's own certificate authority, and the certificate that identifies the SuperLink to the nodes."""

from __future__ import annotations

import ipaddress
import re
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedpriv.errors import InputError
from fedpriv.files import replace_file, write_new
from fedpriv.operate.checks import CA_CERTIFICATE, LOOPBACK

CA_KEY = "ca.key"
SERVER_CERTIFICATE, SERVER_KEY = "server.crt", "server.key"

# A new authority would have to be sent to every node; a new server certificate does not.
AUTHORITY_DAYS = 3650

# A node's clock may be slightly behind.
_CLOCK_ALLOWANCE = timedelta(hours=1)

_WARN_BEFORE = timedelta(days=14)

_DNS_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*", re.I)


def read_certificate(path: Path) -> x509.Certificate:
    """The certificate in a file.

    Raises:
        InputError: the file is missing or is not a certificate.
    """
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise InputError(f"certificate = {path}: {error.strerror}; give a PEM file") from None
    except ValueError:
        raise InputError(f"certificate = {path}: must be a certificate in PEM format") from None


def make_ca(folder: Path, days: int, *, passphrase: str = "", not_before: datetime | None = None) -> None:
    """Write a certificate authority, `ca.crt` and `ca.key`, into a folder; only its owner can read the key.

    Args:
        folder: must exist.
        days: of validity, 1 to 36,500.
        passphrase: that encrypts the key; empty for none.
        not_before: start of validity; by default an hour ago.

    Raises:
        InputError: days is out of range, or the folder already has an authority.
    """
    start, end = _validity(days, not_before)
    key = ec.generate_private_key(ec.SECP384R1())
    name = _name("fedpriv federation CA")
    certificate = (
        _builder(name, name, key.public_key(), start, end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA384())
    )
    write_new(folder / CA_KEY, _pem(key, passphrase), mode=0o600)
    write_new(folder / CA_CERTIFICATE, certificate.public_bytes(Encoding.PEM))


def make_server_certificate(
    folder: Path,
    address_hosts: Sequence[str],
    days: int,
    *,
    authority_key: Path | None = None,
    passphrase: str = "",
    not_before: datetime | None = None,
) -> None:
    """Write `server.crt` and `server.key`, signed by the folder's authority, replacing any that exist.

    The certificate is valid for the hosts and for this machine's loopback addresses, and expires no later than the
    authority.

    Args:
        folder: with the authority.
        address_hosts: DNS names and IP addresses at which nodes reach the server, at least one.
        days: of validity, 1 to 36,500.
        authority_key: by default the folder's `ca.key`.
        passphrase: of that key; empty if it is not encrypted.
        not_before: start of validity; by default an hour ago.

    Raises:
        InputError: a host is neither a DNS name nor an IP address, days is out of range, or there is no authority, or
            its key has another passphrase.
    """
    if not address_hosts:
        raise InputError("address: must name at least one host by which the nodes reach it")
    # Flower's own processes reach their SuperLink through loopback when it listens on every address.
    names = [_alternative_name(host) for host in dict.fromkeys((*address_hosts, *LOOPBACK))]
    start, end = _validity(days, not_before)
    authority, signing_key = _authority(folder, authority_key or folder / CA_KEY, passphrase)
    key = ec.generate_private_key(ec.SECP384R1())
    end = min(end, authority.not_valid_after_utc)
    certificate = (
        _builder(_name("fedpriv SuperLink"), authority.subject, key.public_key(), start, end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()),
            critical=False,
        )
        .sign(signing_key, hashes.SHA384())
    )
    replace_file(folder / SERVER_KEY, _pem(key), mode=0o600)
    replace_file(folder / SERVER_CERTIFICATE, certificate.public_bytes(Encoding.PEM))


def is_encrypted(key: Path) -> bool:
    """Whether a private key in PEM format is encrypted; False if the file holds anything else.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        return key.read_bytes().startswith(b"-----BEGIN ENCRYPTED PRIVATE KEY-----")
    except OSError as error:
        raise InputError(f"key = {key}: {error.strerror}") from None


def add_authority(folder: Path, passphrase: str, tell: Callable[[], None]) -> None:
    """Put a new authority before the old one in `ca.crt`, and its key in the place of `ca.key`.

    The server's certificate stays as it is: who trusts either authority trusts it.

    Args:
        folder: with the old authority.
        passphrase: of the new key.
        tell: called before the key is replaced.

    Raises:
        InputError: there is no old authority.
    """
    old = (folder / CA_CERTIFICATE).read_bytes()
    read_certificate(folder / CA_CERTIFICATE)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".authority-") as made:
        make_ca(Path(made), AUTHORITY_DAYS, passphrase=passphrase)
        tell()
        replace_file(folder / CA_CERTIFICATE, (Path(made) / CA_CERTIFICATE).read_bytes() + old)
        replace_file(folder / CA_KEY, (Path(made) / CA_KEY).read_bytes(), mode=0o600)


def host_in_one_form(host: str) -> str:
    """A DNS name as it is, or an IP address in the form that certificates have.

    Raises:
        InputError: it is neither, or an address that is of one machine's interface; names the host.
    """
    return str(_alternative_name(host).value)


def valid_until(certificate: Path) -> datetime:
    """The time at which a certificate expires, in UTC.

    Raises:
        InputError: the file is missing or is not a certificate.
    """
    return read_certificate(certificate).not_valid_after_utc


def check_lasting(folder: Path, address_hosts: Sequence[str]) -> None:
    """Refuse to renew a server's certificate that lasts as long as its authority, which is about to end, or has ended.

    Raises:
        InputError: no certificate of the folder's authority would last longer.
    """
    ends, own = valid_until(folder / CA_CERTIFICATE), folder / SERVER_CERTIFICATE
    lasts = own.exists() and valid_until(own) >= ends and set(address_hosts) <= set(hosts_of(own))
    if ends < datetime.now(UTC) or (lasts and is_ending(ends)):
        raise InputError(f"certificate = {own}: {cure(folder)}")


def is_ending(until: datetime) -> bool:
    """Whether what is valid until then needs a successor."""
    return until - datetime.now(UTC) <= _WARN_BEFORE


def cure(folder: Path) -> str:
    """The command that gives a coordinator's folder a certificate that lasts."""
    if is_ending(ends := valid_until(folder / CA_CERTIFICATE)):
        return f"its authority ends on {ends:%Y-%m-%d}, and no certificate lasts longer; run `new-authority`"
    return "run `renew` and restart the SuperLink"


def hosts_of(certificate: Path) -> list[str]:
    """The DNS names and IP addresses for which a certificate is valid.

    Raises:
        InputError: the file is missing or is not a certificate.
    """
    try:
        names = read_certificate(certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names]


def read_key(path: Path, passphrase: str = "", *, use: str, form: str) -> PrivateKeyTypes:
    """The private key in a PEM file.

    Args:
        use: of the key, told if the file cannot be read.
        form: what else it must be, or what helps, told if it is none.

    Raises:
        InputError: the file is missing, or holds no key that opens with the passphrase, empty for none.
    """
    try:
        return load_pem_private_key(path.read_bytes(), password=passphrase.encode() or None)
    except OSError as error:
        raise InputError(f"key = {path}: {error.strerror}; {use}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise InputError(f"key = {path}: must be a private key in PEM format{form}") from None


def _authority(folder: Path, path: Path, passphrase: str) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    certificate = read_certificate(folder / CA_CERTIFICATE)
    key = read_key(path, passphrase, use="it signs the server's certificate", form=", with this passphrase or none")
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise InputError(f"key = {path}: must be the private key of {CA_CERTIFICATE}")
    return certificate, key


def _validity(days: int, not_before: datetime | None) -> tuple[datetime, datetime]:
    if not 1 <= days <= 36500:
        raise InputError(f"days = {days}: must lie in 1..36500")
    start = not_before or datetime.now(UTC) - _CLOCK_ALLOWANCE
    return start, start + timedelta(days=days)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, start: datetime, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    """The key usage that RFC 5280 requires, which Python 3.13 checks strictly."""
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative_name(host: str) -> x509.GeneralName:
    try:
        if "%" not in host:  # what follows names an interface of this machine, which means nothing elsewhere
            return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        # 300.1.1.1 and 10.0.0 are mistyped addresses, not names.
        if _DNS_NAME.fullmatch(host) and not host.replace(".", "").isdigit():
            return x509.DNSName(host)
    raise InputError(f"address = {host!r}: must be a DNS name or an IP address, without port")


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _pem(key: ec.EllipticCurvePrivateKey, passphrase: str = "") -> bytes:
    encryption = BestAvailableEncryption(passphrase.encode()) if passphrase else NoEncryption()
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
