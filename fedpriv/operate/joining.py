"""The three files that a coordinator and its institutions hand each other until a federation stands.

An invitation says where the coordinator is and what it plans. An application answers it with the keys of a node, and
carries the signature of its vault. A roster lists the keys of all vaults, for sums under masks. Nothing in them is
secret. Whoever carries them could change them, so two people compare fingerprints by telephone: that of an invitation
with the coordinator, that of a vault's key with the institution whose key it is.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tomli_w
from cryptography import x509
from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo
from pydantic.dataclasses import dataclass

from fedpriv import config
from fedpriv.errors import InputError
from fedpriv.operate.command_line import check_version, validated
from fedpriv.privacy.ledger import keys
from fedpriv.privacy.ledger.keys import NODE, VAULT, Kind, fingerprint

_APPLIES = "fedpriv application\n"


def _printable(text: str, info: ValidationInfo) -> str:
    """Refuse what would move the cursor of a terminal that shows it."""
    if not text.isprintable():
        raise ValueError(f"{info.field_name} = {text!r}: must hold no control characters")
    return text


def _certificate(text: str, info: ValidationInfo) -> str:
    try:
        x509.load_pem_x509_certificates(text.encode())
    except ValueError:
        raise ValueError(f"{info.field_name}: must be a certificate in PEM format") from None
    return text


def _key(kind: Kind) -> AfterValidator:
    def check(line: str, info: ValidationInfo) -> str:
        if not keys.is_public_line(line, kind):
            raise ValueError(f"{info.field_name} = {line!r}: must be one line `{kind} ...`")
        return line

    return AfterValidator(check)


_Name = Annotated[str, Field(min_length=1, max_length=100), AfterValidator(_printable)]
_Client = Annotated[int, Field(strict=True, ge=0, lt=10**9)]
_Value = str | int | float | bool
_Digest = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
_VaultKey = Annotated[str, _key(VAULT)]
_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Invitation:
    """A coordinator's request to one institution.

    Attributes:
        name: of the institution, for display.
        partition_id: which client of a run its node is.
        superlink: HOST:PORT of the coordinator.
        ca: the certificate of its authority, PEM; while that is exchanged, of both.
        key: its public line, which signs what each round's sum was made of.
        software: the version and digest of the coordinator's fedpriv; its runs take only nodes that have the same.
        bundle: SHA-256 of the code that its runs ship.
        model: SHA-256 of the files of the planned run's model; empty without a plan.
        run: the planned run's configuration, as far as it concerns a node; empty without a plan.
        contact: whom an institution asks; empty if nobody is named.
    """

    version: Literal[1] = 1
    name: _Name
    partition_id: _Client
    superlink: Annotated[str, AfterValidator(_printable)]
    ca: Annotated[str, AfterValidator(_certificate)]
    key: _VaultKey
    software: Annotated[str, Field(max_length=100), AfterValidator(_printable)] = ""
    bundle: _Digest = ""
    model: _Digest = ""
    run: dict[str, _Value | list[_Value]] = Field(default_factory=dict)
    contact: Annotated[str, Field(max_length=200), AfterValidator(_printable)] = ""

    @property
    def fingerprint(self) -> str:
        """Stands for the whole invitation."""
        return fingerprint(_canonical(self))

    @property
    def plan(self) -> config.RunConfig | None:
        """The planned run, None if there is none; InputError if a key or value is wrong."""
        return config.parse(self.run) if self.run else None


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Application:
    """An institution's answer to an invitation.

    Attributes:
        name: as in the invitation.
        node_key: the public line by which Flower is to admit the node.
        vault_key: the public line by which runs are to check what its vault says.
        signature: by the vault's key, of all else.
    """

    version: Literal[1] = 1
    name: _Name
    partition_id: _Client
    node_key: Annotated[str, _key(NODE)]
    vault_key: _VaultKey
    signature: str = ""

    def signed(self, vault_key: Path) -> Application:
        """The application with the signature by this private key."""
        return replace(self, signature=keys.sign(vault_key, self._content))

    @property
    def _content(self) -> bytes:
        return (_APPLIES + _canonical(replace(self, signature=""))).encode()

    def check(self, path: Path) -> None:
        """Refuse an application that its vault did not make: the signature is another's, or of other content."""
        if not keys.verify(self.vault_key, self._content, self.signature):
            raise InputError(f"{path}: was changed since the node made it; ask the institution for it again")


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Member:
    """A node in a roster; `partition_id` is which client of a run it is."""

    partition_id: _Client
    name: _Name
    vault_key: _VaultKey

    @property
    def fingerprint(self) -> str:
        """Stands for the key."""
        return fingerprint(self.vault_key)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Roster:
    """The nodes of a federation, each once."""

    version: Literal[1] = 1
    members: Annotated[tuple[Member, ...], Field(min_length=1)]

    def check(self, path: Path) -> None:
        """Refuse a roster in which two nodes share an id or a key, with an InputError that names it."""
        for name in ("partition_id", "vault_key"):
            value, number = Counter(getattr(each, name) for each in self.members).most_common(1)[0]
            if number > 1:
                raise InputError(f"{path}: {name} = {value} stands there {number} times; each node has its own")


Handed = TypeVar("Handed", Invitation, Application, Roster)


def read(form: type[Handed], path: Path) -> Handed:
    """The content of a file that was handed over; InputError if it is missing, or is none of this form."""
    try:
        values = config.read(path)
    except RecursionError:
        raise InputError(f"{path}: is nested too deeply") from None
    check_version(path, values)
    if unknown := values.keys() - {field.name for field in fields(form)}:
        raise InputError(f"{path}: {min(unknown)}: unknown; is the file of a later version?")
    return validated(form, values, prefix=f"{path}: ")


def text(handed: Handed, header: str) -> str:
    """The file's text, after one line, `header`, that a person who opens it should know."""
    return f"# {header}\n{tomli_w.dumps(asdict(handed), multiline_strings=True)}"


def _canonical(handed: Invitation | Application) -> str:
    """One text for one content, whatever its file's line ends and comments."""
    values: Mapping[str, Any] = asdict(handed)
    return json.dumps(values, sort_keys=True)
