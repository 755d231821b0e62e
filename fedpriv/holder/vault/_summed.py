"""A node's part in a sum that the server learns without its parts: secure aggregation, and what it costs.

The exchanges before and after the train message answer here. Between them the session lives in this process's memory:
a node that was restarted has dropped out. Nothing but the masked vector depends on records, and it is charged first.
"""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from fedpriv.config import RunConfig
from fedpriv.holder.sums import (
    MAX_RECEIPT,
    MAX_RECEIPTS,
    Identity,
    ProtocolError,
    Session,
    Sessions,
    Terms,
    make_identity,
    read_identity,
    smallest_threshold,
    terms_from_text,
    to_words,
    verify_once,
)
from fedpriv.holder.vault import _charging
from fedpriv.holder.vault._charging import NodePolicy, RefusedError
from fedpriv.holder.vault.holder import Holder, NodeHolder, bench_of, run_of
from fedpriv.holder.vault.settings import approved_peers
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import Request, Response
from fedpriv.learning.adapters import Adapter
from fedpriv.learning.training.local_update import ClientUpdate, UpdateSpec, num_trained_values
from fedpriv.learning.training.rounds import num_included
from fedpriv.privacy.accounting.events import Event
from fedpriv.privacy.accounting.views import Release, aggregate_objections, num_readers, smallest_aggregate_scales
from fedpriv.privacy.ledger import keys
from fedpriv.privacy.ledger.receipts import from_text
from fedpriv.privacy.mechanisms.discrete_gaussian import DEVIATIONS, MIN_STDDEV, RANGE_BITS, ClientGrid, integers
from fedpriv.privacy.mechanisms.discrete_sampler import MAX_SIGMA

log = logging.getLogger(__name__)

# In the advertisements of an attempt, together at most 600 kB.
_RECEIPTS_OF_ALL = 400

# By client: a simulation's nodes share this process.
_sessions: defaultdict[int, Sessions] = defaultdict(Sessions)
_identities: dict[int, Identity] = {}


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """One client's part in one sum.

    Attributes:
        terms: that all participants sign.
        client: whose part it is.
        grid: of its integers.
        aggregate_scale: the noise over its own, at least, of what the terms' colluders, or any one other participant,
            can read in a sum; >= 1.
        session: masks the integers; None in a simulation that leaves out what would cancel out.
        sealed: its peers' shares, for the session.
    """

    terms: Terms
    client: int
    grid: ClientGrid
    aggregate_scale: float
    session: Session | None
    sealed: str

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of the terms and of this node's keys: with other keys or terms it is another release."""
        keys_shown = self.session.advertisement if self.session else ""
        return hashlib.sha256(self.terms.digest() + keys_shown.encode()).hexdigest()

    def release(self, event: Event) -> Release:
        """The release that the part is, and that the event pays for."""
        return Release(
            event=event,
            rho_bar=1.0,
            aggregate_scale=self.aggregate_scale,
            num_readers=num_readers(self.terms.colluding),
        )

    @property
    def num_records(self) -> int:
        """N_k, as the terms have it."""
        return self.terms.participant(self.client).num_records

    def vector(self, update: ClientUpdate) -> np.ndarray:
        """The vector that leaves the node, int32 or int64 [values]: integers modulo 2^bits, masked if a session masks.

        Args:
            update: on this part's grid.

        Raises:
            RefusedError: the session does not stand before this step, or a peer's shares are not for this node.
        """
        if update.noised is None:
            raise ValueError("update: was not made for a sum")
        values = integers(update.noised, self.grid.points).numpy()
        try:
            words = self.session.mask(self.sealed, values) if self.session else to_words(values, self.terms)
        except ProtocolError as error:
            raise RefusedError(str(error)) from None
        return words.view(np.dtype(f"int{self.terms.modulus_bits}"))


def identity_of(holder: Holder, client: int) -> Identity:
    """The key that signs for the node: its vault's or, in a simulation, one made in memory."""
    if holder.identity_key is not None:
        return read_identity(holder.identity_key)
    if client not in _identities:
        _identities[client] = make_identity()
    return _identities[client]


def part_of(
    request: Request, config: RunConfig, holder: Holder, client: int, *, spec: UpdateSpec, digest: str, adapter: Adapter
) -> Part:
    """The node's part in the sum that a train request is for.

    Args:
        request: with the terms and its peers' shares.
        config: of the run.
        holder: of the node.
        client: whose part it is.
        spec: of the update.
        digest: of the request's broadcast and specification, which the terms must name.
        adapter: all tensors that are broadcast.

    Raises:
        RefusedError: the terms are not for this request or not what the operator agreed to, or the node takes no part.
    """
    terms = _terms(request)
    _check_policy(terms, client, holder.policy)
    dimension = num_trained_values(adapter, spec.trains)
    for name, stated, asked in (
        ("request", terms.request, digest),
        ("dimension", terms.dimension, dimension),
        ("clip_norm", terms.clip_norm, spec.clip_norm),
        ("noise_multiplier", terms.noise_multiplier, spec.noise_multiplier),
    ):
        if stated != asked:
            raise RefusedError(f"terms: {name} = {stated}: the request has {asked}")
    if objections := aggregate_objections(
        local_steps=spec.local_steps,
        optimizer=spec.optimizer,
        noise_on=spec.noise_on,
        linear=True,
        secure_aggregation=True,
        mechanism=spec.mechanism,
        noise_adds_up=spec.mechanism == config.mechanism,  # which suits sums, or the configuration is refused
    ):
        raise RefusedError(objections[0])
    own = terms.participant(client)
    if own.sampling_probability != spec.probability(own.num_records):
        raise RefusedError(f"terms: sampling_probability = {own.sampling_probability}: is not that of the request")
    bound = spec.clip_norm * num_included(spec, own.num_records)
    _check_grid(terms, client, bound)
    sealed = str(request.own.get(kinds.SEALED, ""))
    if config.masks:
        session = _session_of(terms, client, sealed)
    elif not isinstance(holder, NodeHolder) and (holder.trusts_run or holder.policy.allow_not_private):
        session = None
    else:
        raise RefusedError("secure_masks = false: this node sends no vector without masks; only simulations do")
    return Part(
        terms=terms,
        client=client,
        grid=ClientGrid(points=terms.gamma * own.scale, bound=bound),
        aggregate_scale=smallest_aggregate_scales(
            {participant.client: participant.scale for participant in terms.participants},
            threshold=terms.threshold,
            colluding=terms.colluding,
        )[client],
        session=session,
        sealed=sealed,
    )


def _session_of(terms: Terms, client: int, sealed: str) -> Session:
    """The session that masks the part, or masked it before; refused before the charge unless it will."""
    try:
        session = _sessions[client].of(terms.run, terms.attempt)
        if session.terms.digest() != terms.digest():
            raise RefusedError("terms: are not those that this node has signed")
        # After `mask` the stored answer is sent again.
        if session.expects not in ("confirm", "reveal"):
            session.check_sealed(sealed)
    except ProtocolError as error:
        raise RefusedError(str(error)) from None
    return session


def advertise(request: Request, holder: Holder) -> Response:
    """Fresh keys for an attempt at a sum, signed with its terms.

    Raises:
        RefusedError: the terms are not what the node's operator agreed to, or a participant is not approved.
        InputError: the run's configuration, a file of a peer's key or, in a simulation, its data cannot be used.
    """
    config = run_of(request.run_config, holder)
    client = _client(config, holder)
    if not (config.secure_aggregation and config.masks):
        raise RefusedError("advertise: the run's configuration has no masks")
    terms = _terms(request)
    _check_policy(terms, client, holder.policy)
    try:
        session = _sessions[client].begin(
            terms,
            client,
            sign=identity_of(holder, client).sign,
            # A simulation's nodes have no operator who knows the others.
            approved=approved_peers(holder.settings.peers) if isinstance(holder, NodeHolder) else None,
            # A simulation's nodes all check the same signatures.
            verify=keys.verify if isinstance(holder, NodeHolder) else verify_once,
            receipts=_passed_on(holder, terms, client),
        )
    except ProtocolError as error:
        raise RefusedError(str(error)) from None
    holder.journal.write("advertised", run=terms.run, round=terms.round, attempt=terms.attempt)
    return _message(session.advertisement)


def share(request: Request, holder: Holder) -> Response:
    """Shares of the node's seeds, sealed for its peers; raises like `advertise`."""
    return _step(partial(_share, holder), request, holder)


def check(request: Request, holder: Holder) -> Response:
    """The clients whose shares the node cannot use, before anything is charged for the sum; raises like `advertise`."""
    return _step(Session.check, request, holder)


def confirm(request: Request, holder: Holder) -> Response:
    """The node's signature of the list of those whose vectors are summed; raises like `advertise`."""
    return _step(Session.confirm, request, holder)


def reveal(request: Request, holder: Holder) -> Response:
    """The shares with which the server takes the masks off the sum; raises like `advertise`."""
    return _step(Session.reveal, request, holder)


def _step(step: Callable[[Session, str], str], request: Request, holder: Holder) -> Response:
    client = _client(run_of(request.run_config, holder), holder)
    asked = kinds.unpack(kinds.Step, request.fields)
    try:
        answer = step(_sessions[client].of(asked.run, asked.attempt), asked.message)
    except ProtocolError as error:
        raise RefusedError(str(error)) from None
    holder.journal.write(request.kind, run=asked.run, attempt=asked.attempt)
    return _message(answer)


def _share(holder: Holder, session: Session, message: str) -> str:
    """`Session.share`, and what the peers have told of each other's receipts is kept; the charge comes later."""
    answer = session.share(message)
    if (watch := holder.policy.watch) is not None:
        try:
            watch.told(session.receipts, {participant.identity for participant in session.terms.participants})
        except OSError as error:
            log.error("%s: the receipts of peers are not kept: %s", error.filename, error.strerror)
    return answer


def _passed_on(holder: Holder, terms: Terms, client: int) -> list[str]:
    """The receipts that the node passes on: its own, and those of the next participants after it, in a circle.

    All texts of an attempt travel in one message, so each node tells of fewer where there are many.
    """
    watch = holder.policy.watch
    if watch is None:
        return []
    own = _charging.signed_receipt(holder.policy, _charging.registered_data_set(holder.policy, str(client), None))
    order = sorted(terms.participants, key=lambda each: (each.client <= client, each.client))
    peers = [each.identity for each in order if each.client != client]
    texts = watch.passed_on(from_text(own), peers, min(MAX_RECEIPTS, _RECEIPTS_OF_ALL // len(terms.participants)))
    return [text for text in texts if len(text) <= MAX_RECEIPT]


def _client(config: RunConfig, holder: Holder) -> int:
    is_own = isinstance(holder, NodeHolder)
    return holder.partition(config.num_clients if is_own else bench_of(config, holder).num_clients)


def _terms(request: Request) -> Terms:
    """The terms in a request."""
    try:
        return terms_from_text(str(request.own.get(kinds.TERMS, "")))
    except ProtocolError as error:
        raise RefusedError(f"terms: {error}") from None


def _message(text: str) -> Response:
    return Response.of(fields=kinds.pack(kinds.Words(message=text)))


def _check_policy(terms: Terms, client: int, policy: NodePolicy) -> None:
    """Refuse terms under which less noise, or fewer honest peers, would count than the node's operator agreed to.

    Raises:
        RefusedError: one line with the name, the value and the limit.
    """
    if client not in terms.by_client:
        raise RefusedError(f"terms: client {client}, this node, is not among the participants")
    if terms.colluding < policy.colluding_clients:
        raise RefusedError(
            f"terms: colluding = {terms.colluding}: this node counts on {policy.colluding_clients} that may collude"
        )
    least = max(policy.min_survivors, smallest_threshold(len(terms.participants), terms.colluding))
    if terms.threshold < least:
        raise RefusedError(
            f"terms: threshold = {terms.threshold}: this node needs at least {least} survivors among "
            f"{len(terms.participants)} participants, of whom {terms.colluding} may collude"
        )


def _check_grid(terms: Terms, client: int, bound: float) -> None:
    """Refuse a grid on which the node's noise would be too coarse, or its part no integers that add up.

    On such a grid a vector would be no sum of integers, and whether there is one at all could depend on the records.
    """
    stddev = terms.noise_stddev(client)
    steps = terms.gamma * terms.participant(client).scale * bound + DEVIATIONS * stddev
    if stddev and not MIN_STDDEV <= stddev <= MAX_SIGMA:
        raise RefusedError(
            f"terms: grid_exponent = {terms.grid_exponent}: gives this node's noise {stddev:g} steps, must be "
            f"{MIN_STDDEV:g} to {MAX_SIGMA:g}"
        )
    if steps >= 2.0 ** RANGE_BITS[terms.modulus_bits]:
        raise RefusedError(
            f"terms: grid_exponent = {terms.grid_exponent}: this node's part may have {steps:g} steps, which "
            f"modulus_bits = {terms.modulus_bits} does not hold"
        )
