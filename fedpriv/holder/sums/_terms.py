"""The terms of one attempt at a secure sum, on which all participants agree, and the digest by which they sign them.

Terms and messages come from parties that are not trusted. They are JSON, read with bounds and without duplicates, and
refused in one line with the name, the value and what would be right.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Set
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Any

from fedpriv.privacy.accounting.views import num_readers
from fedpriv.privacy.ledger import keys

MIN_PARTICIPANTS = 3
MAX_PARTICIPANTS = 1000
MAX_DIMENSION = 2**27
MAX_CLIENT = 2**31
MAX_RECORDS = 2**53
MAX_GRID_EXPONENT = 100

_DOMAIN = b"fedpriv secure aggregation, terms, 1\n"
_RUN = re.compile(r"[\x21-\x7e][\x20-\x7e]{0,199}")
_ATTEMPT = re.compile(r"[0-9a-f]{16,64}")
_REQUEST = re.compile(r"[0-9a-f]{64}")

MAX_TEXT = 2**20


@dataclass(frozen=True, kw_only=True)
class Participant:
    """One data holder of an attempt, with what is public of it.

    Attributes:
        client: its number, >= 0.
        identity: public line of its vault's registered key, `ssh-ed25519 AAAA...`, without a comment.
        num_records: records that it registered, >= 1.
        sampling_probability: of one of its records in a step, in (0, 1].
        scale: c_k, what its clipped sum is multiplied by, in (0, 1].

    Raises:
        ProtocolError: a field has another type or lies outside its range.
    """

    client: int
    identity: str
    num_records: int
    sampling_probability: float
    scale: float

    def __post_init__(self) -> None:
        integer("client", self.client, 0, MAX_CLIENT)
        name = f"client {self.client}"
        if not keys.is_public_line(self.identity):
            raise ProtocolError(
                f"{name}: identity = {shown(self.identity)}: must be `{keys.VAULT} AAAA...` without a comment"
            )
        integer(f"{name}: num_records", self.num_records, 1, MAX_RECORDS)
        for field in ("sampling_probability", "scale"):
            value = getattr(self, field)
            if type(value) is not float or not 0 < value <= 1:
                raise ProtocolError(f"{name}: {field} = {shown(value)}: must be a float in (0, 1]")


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Everything that decides what an attempt computes and how well it hides it; each node checks it and signs it.

    Attributes:
        run: name of the run, 1 to 200 printable ASCII characters.
        round: >= 1.
        attempt: 16 to 64 random hexadecimal digits; a repeated round is a new attempt.
        participants: ordered by client; no client and no identity occurs twice.
        threshold: t, survivors that a sum needs, with t <= K, 2 t > K + c and t >= max(c, 1) + 2.
        colluding: c, clients that may collude with the server; any other participant may read sums by itself.
        modulus_bits: m, 32 or 64: sums are modulo 2^m.
        grid_exponent: gamma = 2^grid_exponent grid steps make one unit of the gradient.
        dimension: d, values in a vector.
        clip_norm: C, L2 bound of one record's gradient, finite, > 0, gradient units.
        noise_multiplier: z, a ratio, finite, >= 0.
        request: SHA-256 of the broadcast and the specification of the update, 64 hexadecimal digits.

    Raises:
        ProtocolError: a field has another type, lies outside its range, or contradicts another.
    """

    run: str
    round: int
    attempt: str
    participants: tuple[Participant, ...]
    threshold: int
    colluding: int
    modulus_bits: int
    grid_exponent: int
    dimension: int
    clip_norm: float
    noise_multiplier: float
    request: str

    def __post_init__(self) -> None:
        _text("run", self.run, _RUN, "1 to 200 printable ASCII characters")
        integer("round", self.round, 1, 2**31)
        _text("attempt", self.attempt, _ATTEMPT, "16 to 64 hexadecimal digits")
        _check_participants(self.participants)
        _check_threshold(self.threshold, self.colluding, len(self.participants))
        if type(self.modulus_bits) is not int or self.modulus_bits not in (32, 64):
            raise ProtocolError(f"modulus_bits = {shown(self.modulus_bits)}: must be 32 or 64")
        integer("grid_exponent", self.grid_exponent, -MAX_GRID_EXPONENT, MAX_GRID_EXPONENT)
        integer("dimension", self.dimension, 1, MAX_DIMENSION)
        if type(self.clip_norm) is not float or not 0 < self.clip_norm < math.inf:
            raise ProtocolError(f"clip_norm = {shown(self.clip_norm)}: must be a finite float > 0")
        if type(self.noise_multiplier) is not float or not 0 <= self.noise_multiplier < math.inf:
            raise ProtocolError(f"noise_multiplier = {shown(self.noise_multiplier)}: must be a finite float >= 0")
        if not math.isfinite(self.gamma * self.noise_multiplier * self.clip_norm):
            raise ProtocolError(f"noise_multiplier = {self.noise_multiplier}: must give finite noise on the grid")
        _text("request", self.request, _REQUEST, "64 hexadecimal digits")

    @property
    def gamma(self) -> float:
        """Grid steps in one unit of the gradient."""
        return 2.0**self.grid_exponent

    @cached_property
    def by_client(self) -> dict[int, Participant]:
        """{client: participant}, ordered by client."""
        return {participant.client: participant for participant in self.participants}

    @cached_property
    def holder_numbers(self) -> dict[int, int]:
        """{client: the x, from 1 to K, at which it holds a share of every secret}."""
        return {client: place for place, client in enumerate(self.by_client, start=1)}

    def participant(self, client: int) -> Participant:
        """The entry of a client.

        Raises:
            ProtocolError: it has none.
        """
        if client not in self.by_client:
            raise ProtocolError(f"client {client}: is no participant of this attempt")
        return self.by_client[client]

    def noise_stddev(self, client: int) -> float:
        """gamma c_k z C, the standard deviation of a client's noise in grid steps."""
        return self.gamma * self.participant(client).scale * self.noise_multiplier * self.clip_norm

    def text(self) -> str:
        """These terms as JSON: one line, fields in alphabetical order, floats with all their digits."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False)

    def digest(self) -> bytes:
        """SHA-256 of all fields [32 bytes]; different terms have different texts, and so different digests."""
        return self._digest

    @cached_property
    def _digest(self) -> bytes:
        return hashlib.sha256(_DOMAIN + self.text().encode()).digest()


def terms_from_text(text: str) -> Terms:
    """The terms in a text, which must hold every field and no other.

    Raises:
        ProtocolError: the text is no JSON, a field is missing, unknown, mistyped, or outside its range.
    """
    values = exactly("terms", parsed_object("terms", text), _FIELDS[Terms])
    entries = values["participants"]
    if type(entries) is not list or len(entries) > MAX_PARTICIPANTS:
        raise ProtocolError(f"participants: must be a list of at most {MAX_PARTICIPANTS}")
    participants = tuple(Participant(**exactly("participant", entry, _FIELDS[Participant])) for entry in entries)
    return Terms(**{**values, "participants": participants})


def smallest_threshold(num_participants: int, colluding: int) -> int:
    """The smallest t with 2 t > K + c and t >= max(c, 1) + 2; above K where no threshold is allowed."""
    return max((num_participants + colluding) // 2 + 1, num_readers(colluding) + 2)


_FIELDS = {record: {field.name for field in fields(record)} for record in (Terms, Participant)}


def exactly(name: str, value: Any, expected: Set[str]) -> dict[str, Any]:
    """The value, if it is an object with exactly these fields; else it is refused by name."""
    if type(value) is not dict:
        raise ProtocolError(f"{name} = {shown(value)}: must be an object")
    for wrong, what in ((value.keys() - expected, "unknown"), (expected - value.keys(), "missing")):
        if wrong:
            raise ProtocolError(f"{name}: {shown(min(wrong))} is {what}")
    return value


def _check_participants(participants: tuple[Participant, ...]) -> None:
    if type(participants) is not tuple or not all(type(entry) is Participant for entry in participants):
        raise ProtocolError("participants: must be a tuple of Participant")
    if not MIN_PARTICIPANTS <= len(participants) <= MAX_PARTICIPANTS:
        raise ProtocolError(
            f"participants: are {len(participants)}, must be {MIN_PARTICIPANTS} to {MAX_PARTICIPANTS}: of the sum of "
            "two, each reads the other's vector"
        )
    for before, after in pairwise(participants):
        if before.client == after.client:
            raise ProtocolError(f"participants: client {after.client} is listed twice")
        if before.client > after.client:
            raise ProtocolError(f"participants: client {after.client} must stand before client {before.client}")
    holders: dict[str, int] = {}
    for entry in participants:
        # Otherwise one node could hold several shares of every secret.
        if entry.identity in holders:
            raise ProtocolError(f"participants: clients {holders[entry.identity]} and {entry.client} have one identity")
        holders[entry.identity] = entry.client


def _check_threshold(threshold: int, colluding: int, num_participants: int) -> None:
    integer("colluding", colluding, 0, MAX_PARTICIPANTS)
    integer("threshold", threshold, 1, MAX_PARTICIPANTS)
    # Two lists of survivors with t signatures each would need 2 (t - c) of the K - c honest clients.
    smallest = smallest_threshold(num_participants, colluding)
    if not smallest <= threshold <= num_participants:
        raise ProtocolError(
            f"threshold = {threshold}: must be at least {smallest} and at most {num_participants} "
            f"for {num_participants} participants, {colluding} of them colluding"
        )


def integer(name: str, value: object, least: int, most: int) -> int:
    """The value, if it is an integer in this range; else it is refused by name."""
    if type(value) is not int or not least <= value <= most:
        raise ProtocolError(f"{name} = {shown(value)}: must be an integer from {least} to {most}")
    return value


def _text(name: str, value: object, pattern: re.Pattern[str], right: str) -> None:
    if type(value) is not str or not pattern.fullmatch(value):
        raise ProtocolError(f"{name} = {shown(value)}: must be {right}")


class ProtocolError(ValueError):
    """A message, or an order of messages, that the protocol refuses; it names the client or the field."""


class DealerError(ProtocolError):
    """A client dealt shares that give another seed than it advertised; what it masked cannot be unmasked.

    Attributes:
        client: the dealer.
    """

    def __init__(self, client: int, what: str) -> None:
        super().__init__(f"client {client}: the shares that it dealt do not give the {what} that it advertised")
        self.client = client


class TooFewError(ProtocolError):
    """Fewer clients than the threshold are left, so no sum is made and nothing is unmasked."""


def shown(value: object) -> str:
    """A value for an error message, on one line and cut to 60 characters."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def parsed_object(name: str, text: str) -> dict[str, Any]:
    """The JSON object in a text.

    Args:
        name: of the text, for messages.
        text: of at most 2^20 characters.

    Raises:
        ProtocolError: the text is too long, is not one JSON object, or names a key twice.
    """
    if type(text) is not str or len(text) > MAX_TEXT:
        raise ProtocolError(f"{name}: must be a text of at most {MAX_TEXT} characters")
    try:
        value = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_no_constant)
    except ProtocolError as error:
        raise ProtocolError(f"{name}: {error}") from None
    except (ValueError, RecursionError):  # ValueError also covers integers of too many digits
        raise ProtocolError(f"{name}: must be JSON") from None
    if type(value) is not dict:
        raise ProtocolError(f"{name}: must be a JSON object")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ProtocolError(f"{shown(key)} is listed twice")
        found[key] = value
    return found


def _no_constant(constant: str) -> None:
    raise ProtocolError(f"{constant} is no JSON number")
