"""A Flower client's part in secure sums: the server learns the clients' average update, and no update by itself.

`SumMod` stands around the ClientApp; `fedpriv.flower.strategy` is the server's side. Between them they carry the
exchanges of `fedpriv.secure_aggregation`, of which the app knows nothing.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from torch import Tensor

from fedpriv.accounting import Release
from fedpriv.accounting.sensitivity import UPLOAD_FACTOR
from fedpriv.accounting.views import num_readers, smallest_aggregate_scales
from fedpriv.errors import InputError
from fedpriv.files import remove_files
from fedpriv.flower._messages import (
    NUM_EXAMPLES,
    Parameters,
    check_names,
    check_type,
    config_record,
    parameters_of,
    refusing,
    reply_of,
    request_digest,
)
from fedpriv.flower.releases import Account, AccountOf, app_update
from fedpriv.ledger import Key
from fedpriv.mechanisms import MECHANISMS, NoiseRequest, SecureSource
from fedpriv.mechanisms.discrete_gaussian import integers
from fedpriv.mechanisms.registry import FOR_SUMS
from fedpriv.secure_aggregation import (
    MAX_RUNS,
    SECRET_BYTES,
    Identity,
    ProtocolError,
    SealedSession,
    Session,
    Terms,
    make_identity,
    terms_from_text,
)
from fedpriv.training import clipped_update
from fedpriv.vault import NodePolicy, RefusedError, check_grid, check_policy
from fedpriv.vault.frames import Response

log = logging.getLogger("flwr")

# Messages of the exchanges around a train message, and the record in which each message holds its texts.
REGISTER, ADVERTISE, SHARE = "query.sum_register", "query.sum_advertise", "query.sum_share"
CHECK, CONFIRM, REVEAL = "query.sum_check", "query.sum_confirm", "query.sum_reveal"
SUM = "fedpriv-sum"
VECTOR = "vector"

# The file of a run and a node, also one that a killed process left.
_SESSION = re.compile(r"\.?[0-9]+-[0-9]+(\.[0-9a-f]+)?")

# Secrets in the state that a SuperNode keeps in memory for a run: never on disk, and never sent.
_SESSION_KEY, _IDENTITY = "session-key", "identity"

_STEPS: dict[str, Callable[[Session, str], str]] = {
    SHARE: Session.share,
    CHECK: Session.check,
    CONFIRM: Session.confirm,
    REVEAL: Session.reveal,
}
_EXCHANGES = (REGISTER, ADVERTISE, *_STEPS)


class SumMod:
    """A Flower mod that sends the app's clipped update under masks, so that the server learns the sum alone.

    With noise, each release is charged before the app runs and stored before it leaves, as by `UpdateMod`; its event is
    that of the client's own noise, and the ledger's `aggregate` view counts that of the others. Without noise nothing
    is charged, and the sum is exact to the grid: then no epsilon covers what the sum shows of one client.

    A node's session waits in a file next to its ledger while no message is answered, so each message may have a process
    of its own. The key to the file is in the context's state, which a SuperNode keeps in memory: a node that restarts
    has dropped out of the round, and so has one whose process dies.

    Args:
        account_of: gives the node's account.
        clip_norm: C, finite, > 0, in units of the parameters; the server's must be equal.
        noise_multiplier: z >= 0, this client's noise over C; the server's must be equal.
        identity: key of the node, which its peers approved, of `read_identity`; None makes one in the context's state,
            for a simulation.
        peers: public lines of the clients that the operator approved; None accepts everyone, for a simulation.
        min_survivors: t; sums of fewer clients are refused.
        colluding: c, how many others may collude with the server; terms that count on fewer are refused.
        uncovered: types of messages, such as `evaluate`, that the app answers by itself; no epsilon covers them.
    """

    def __init__(
        self,
        account_of: AccountOf,
        *,
        clip_norm: float,
        noise_multiplier: float,
        identity: Identity | None = None,
        peers: Collection[str] | None = None,
        min_survivors: int = 3,
        colluding: int = 0,
        uncovered: Collection[str] = (),
    ) -> None:
        check_noise(clip_norm, noise_multiplier)
        self._account_of, self._clip_norm, self._noise_multiplier = account_of, clip_norm, noise_multiplier
        self._identity, self._uncovered = identity, check_names("uncovered", uncovered)
        self._peers = None if peers is None else check_names("peers", peers)
        self._policy = NodePolicy(min_survivors=min_survivors, colluding_clients=colluding)

    def join(self, app: ClientApp) -> None:
        """Let the app answer the exchanges too: Flower calls mods for messages alone that an app has a function for."""
        for kind in _EXCHANGES:
            app.query(kind.removeprefix("query."))(self._exchange)

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """The masked reply to a train message, or an error."""

        def answer() -> Message:
            if message.metadata.message_type not in _EXCHANGES and check_type(message, self._uncovered):
                return self._vector_reply(message, context, call_next)
            return call_next(message, context)

        return _refusing(message, answer)

    def _exchange(self, message: Message, context: Context) -> Message:
        """The node's part in an exchange before or after the train message, or an error."""

        def answer() -> Message:
            kind, run = message.metadata.message_type, str(message.metadata.run_id)
            if kind == REGISTER:
                return _text_reply(message, self._registration(context))
            if kind == ADVERTISE:
                return _text_reply(message, {"text": self._advertised(message, context)})
            fields = config_record(message.content, SUM)
            with self._session(run, str(fields.get("attempt")), context) as session:
                return _text_reply(message, {"text": _STEPS[kind](session, str(fields.get("text")))})

        return _refusing(message, answer)

    def _identity_of(self, context: Context) -> Identity:
        return self._identity or make_identity(_secrets(context).get(_IDENTITY) or _new_secret(context, _IDENTITY))

    def _registration(self, context: Context) -> dict[str, str | int]:
        num_records = self._account_of(context).data_set.num_records
        return {"identity": self._identity_of(context).public_line, "num_records": num_records}

    def _advertised(self, message: Message, context: Context) -> str:
        """Fresh keys for an attempt, once its terms are what the operator agreed to; an earlier attempt is over."""
        path = self._path(str(message.metadata.run_id), context)
        path.unlink(missing_ok=True)
        terms, identity = _terms_of(message), self._identity_of(context)
        approved = None
        if self._peers is not None:
            approved = {each.client: each.identity for each in terms.participants if each.identity in self._peers}
        client = self._checked(terms, message, context)
        session = Session(terms, client, sign=identity.sign, approved=approved)
        SealedSession(path, _new_secret(context, _SESSION_KEY)).put(session)
        return session.advertisement

    @contextmanager
    def _session(self, run: str, attempt: str, context: Context) -> Iterator[Session]:
        """The node's session of an attempt; while it is used, no other process finds it.

        Raises:
            ProtocolError: there is none, or it is of another attempt.
        """
        key = _secrets(context).get(_SESSION_KEY)
        if key is None:
            raise ProtocolError(f"attempt {attempt} of run {run}: this node takes no part in it")
        path = self._path(run, context)
        session = SealedSession(path, key).take(sign=self._identity_of(context).sign)
        try:
            if session.terms.attempt != attempt:
                raise ProtocolError(f"attempt {attempt} of run {run}: this node takes no part in it")
            yield session
        finally:
            _forget(context, _SESSION_KEY)
            if session.expects is not None:  # under another key, so that no copy of the file is an earlier state
                SealedSession(path, _new_secret(context, _SESSION_KEY)).put(session)

    def _path(self, run: str, context: Context) -> Path:
        """The file of a run's session, in a folder next to the ledger that holds a few of them."""
        ledger = self._account_of(context).ledger
        folder = ledger.with_name(f"{ledger.name}.sums")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / f"{run}-{context.node_id}"
        known = [each for each in folder.iterdir() if each != path and _SESSION.fullmatch(each.name)]
        others = sorted(known, key=_last_written)
        remove_files(folder.parent, [f"{folder.name}/{old.name}" for old in others[: len(others) + 1 - MAX_RUNS]])
        return path

    def _checked(self, terms: Terms, message: Message, context: Context) -> int:
        """This node's number in terms that the operator agreed to.

        Raises:
            RefusedError: the terms ask for another run, clipping, noise, grid or number of records than this node's, or
                count on more survivors or fewer colluders than its operator.
        """
        own = self._identity_of(context).public_line
        found = next((each for each in terms.participants if each.identity == own), None)
        if found is None:
            raise RefusedError("terms: this node is not among the participants")
        check_policy(terms, found.client, self._policy)
        registered = self._account_of(context).data_set.num_records
        for name, stated, right in (
            ("run", terms.run, str(message.metadata.run_id)),
            ("clip_norm", terms.clip_norm, self._clip_norm),
            ("noise_multiplier", terms.noise_multiplier, self._noise_multiplier),
            ("num_records", found.num_records, registered),
            ("sampling_probability", found.sampling_probability, 1.0),
        ):
            if stated != right:
                raise RefusedError(f"terms: {name} = {stated}: this node has {right}")
        check_grid(terms, found.client, terms.clip_norm)
        return found.client

    def _vector_reply(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """The node's masked vector, charged first if it carries noise."""
        terms, sealed = _terms_of(message), str(config_record(message.content, SUM).get("sealed"))
        message.content = _without_sum(message.content)  # the app gets what the strategy made
        client = self._checked(terms, message, context)
        received, digest = _asked(message, terms)
        account = self._account_of(context)

        def make(is_new: bool) -> Response:
            if not is_new:
                raise RefusedError(f"round {terms.round}: was charged, and its reply is lost; make a new attempt")
            update, _ = app_update(partial(call_next, message, context), received, ())
            words = session.mask(sealed, _grid_values(clipped_update(update, terms.clip_norm), terms, client))
            vector = words.view(np.dtype(f"int{terms.modulus_bits}"))
            return Response(record=SUM, fields={NUM_EXAMPLES: account.data_set.num_records}, arrays={VECTOR: vector})

        with self._session(terms.run, terms.attempt, context) as session:
            if session.terms.digest() != terms.digest():
                raise RefusedError("terms: are not those that this node has signed")
            if session.expects in ("share", "mask"):  # afterwards the stored reply is sent again
                session.check_sealed(sealed)
            response = make(True) if not terms.noise_multiplier else _paid(account, session, digest, make)
        return reply_of(message, response, {VECTOR: (terms.dimension,)})


def _last_written(path: Path) -> float:
    """The time at which a file was written; one that another process has taken since is none of the old ones."""
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return math.inf


def _refusing(message: Message, answer: Callable[[], Message]) -> Message:
    """As `refusing`; what the protocol refuses names clients and fields, which are public."""

    def refused() -> Message:
        try:
            return answer()
        except ProtocolError as error:
            raise RefusedError(str(error)) from None

    return refusing(message, refused)


def _paid(account: Account, session: Session, digest: str, make: Callable[[bool], Response]) -> Response:
    """The response, charged for the noise of this client and, on the `aggregate` view, of the others."""
    terms, client = session.terms, session.client
    (event,) = MECHANISMS[FOR_SUMS].planned_events(_noise_request(terms, client))
    scales = smallest_aggregate_scales(
        {each.client: each.scale for each in terms.participants}, threshold=terms.threshold, colluding=terms.colluding
    )
    release = Release(
        event=event, rho_bar=1.0, aggregate_scale=scales[client], num_readers=num_readers(terms.colluding)
    )
    request = hashlib.sha256(terms.digest() + session.advertisement.encode() + digest.encode()).hexdigest()
    key = Key(run=terms.run, client=account.client, round=terms.round, request=request)
    return account.pay(key, release, SecureSource.name, make)


def _asked(message: Message, terms: Terms) -> tuple[Parameters, str]:
    """The parameters of a train message and its digest, both as the terms have them.

    Raises:
        RefusedError: the terms are for another message.
    """
    digest = request_digest(message.metadata.message_type, message.content)
    received = parameters_of(message.content)
    if (terms.request, terms.dimension) != (digest, received.num_values):
        raise RefusedError("terms: are for another message than this one")
    return received, digest


def _noise_request(terms: Terms, client: int) -> NoiseRequest:
    return NoiseRequest(
        noise_multiplier=terms.noise_multiplier,
        clip_norm=terms.clip_norm,
        sensitivity_factor=UPLOAD_FACTOR,
        dimension=terms.dimension,
        sampling_probabilities=(1.0,),
        unit="client",
        grids=(terms.gamma * terms.participant(client).scale,),
        bounds=(terms.clip_norm,),
    )


def _grid_values(clipped: Tensor, terms: Terms, client: int) -> np.ndarray:
    """The clipped update on the grid, with noise, int64 [values]."""
    request = _noise_request(terms, client)
    noised, _ = MECHANISMS[FOR_SUMS].add_noise(clipped.unsqueeze(0), request, [SecureSource()])
    (points,) = request.grids
    if not terms.noise_multiplier:
        return noised[0].mul(points).round_().to(torch.int64).numpy()
    return integers(noised[0], points).numpy()


def _secrets(context: Context) -> dict[str, bytes]:
    """The secrets that this node keeps for the run."""
    if SUM not in context.state.config_records:
        return {}
    return {name: value for name, value in context.state.config_records[SUM].items() if isinstance(value, bytes)}


def _new_secret(context: Context, name: str) -> bytes:
    """A secret that this node keeps for the run from now on."""
    secret = os.urandom(SECRET_BYTES)
    context.state[SUM] = ConfigRecord({**_secrets(context), name: secret})
    return secret


def _forget(context: Context, name: str) -> None:
    context.state[SUM] = ConfigRecord({key: value for key, value in _secrets(context).items() if key != name})


def _terms_of(message: Message) -> Terms:
    return terms_from_text(str(config_record(message.content, SUM).get("terms")))


def _without_sum(content: RecordDict) -> RecordDict:
    return RecordDict({name: record for name, record in content.items() if name != SUM})


def _text_reply(message: Message, fields: Mapping[str, str | int]) -> Message:
    return Message(RecordDict({SUM: ConfigRecord(dict(fields))}), reply_to=message)


def check_noise(clip_norm: float, noise_multiplier: float) -> None:
    """Refuse a clip norm or noise multiplier that is out of range, or no float, which terms hold alone.

    Raises:
        InputError: names it.
    """
    for name, value, least in (("clip_norm", clip_norm, 1e-100), ("noise_multiplier", noise_multiplier, 0.0)):
        if type(value) is not float or not least <= value < float("inf"):
            raise InputError(f"{name} = {value!r}: must be a finite float, at least {least:g}")
