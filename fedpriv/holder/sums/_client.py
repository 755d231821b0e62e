"""A node's side of the protocol: pure transitions over frozen states, one for each exchange.

    advertise -> Advertised -> share -> Shared -> check; mask -> Masked -> confirm -> Confirmed -> reveal

A state may be used once: `fedpriv.holder.sums._session` sees to that, these functions do not. Everything that a
node is told may come from a server that is not honest; what does not fit is refused with a ProtocolError that names the
client or the field.

Source: Bonawitz et al. 2017, Figure 4, with the consistency check (round 3) and signatures against an active server.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fedpriv.holder.sums._masks import (
    KEY_BYTES,
    SEED_BYTES,
    Route,
    Shares,
    Sign,
    Verify,
    Words,
    agreements,
    commitments,
    pairwise_masks,
    public_half,
    seal,
    self_mask,
    split,
    to_words,
    unseal,
)
from fedpriv.holder.sums._messages import (
    Advertisement,
    Complaint,
    Reveal,
    advertised,
    check_advertisements,
    check_approved,
    check_members,
    confirmed,
    mask_private_key,
    self_commitment,
    transcript_of,
)
from fedpriv.holder.sums._terms import ProtocolError, Terms
from fedpriv.privacy.ledger import keys


@dataclass(frozen=True, kw_only=True)
class Advertised:
    """A node that has shown its keys.

    Attributes:
        terms: of the attempt.
        client: this node's number.
        sign: signs with its registered key.
        verify: checks a peer's signature.
        encryption_private: X25519 key for sealing, 32 bytes.
        self_seed: b_k, 16 bytes.
        mask_seed: gives the X25519 key for masks, 16 bytes.
        advertisement: what it told.
    """

    terms: Terms
    client: int
    sign: Sign = field(repr=False)
    verify: Verify = field(repr=False)
    encryption_private: bytes = field(repr=False)
    self_seed: bytes = field(repr=False)
    mask_seed: bytes = field(repr=False)
    advertisement: Advertisement


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A node that knows its peers' keys and has dealt shares of its seeds.

    Attributes:
        begun: the state before.
        advertisements: {client: keys} of all in U1, itself included.
        transcript: digest of the terms and of these, 32 bytes.
        own: its own shares of its own seeds.
        sealing: {peer: secret on which the two keys for encryption agree, 32 bytes}.
        masking: {peer: that of the two keys for masks}.
    """

    begun: Advertised
    advertisements: Mapping[int, Advertisement]
    transcript: bytes
    own: Shares
    sealing: Mapping[int, bytes] = field(repr=False)
    masking: Mapping[int, bytes] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Masked:
    """A node that has sent its masked vector; `held` is {client in U2: its shares of that client's seeds}."""

    shared: Shared
    held: Mapping[int, Shares]


@dataclass(frozen=True, kw_only=True)
class Confirmed:
    """A node that has signed the one list of survivors under which it will reveal; `survivors` ascend."""

    masked: Masked
    survivors: tuple[int, ...]


def advertise(
    terms: Terms,
    client: int,
    *,
    sign: Sign,
    approved: Mapping[int, str] | None,
    verify: Verify = keys.verify,
    draw: Callable[[int], bytes] = os.urandom,
    receipts: Sequence[str] = (),
) -> tuple[Advertised, Advertisement]:
    """First exchange: fresh keys of this node, signed together with the terms.

    Args:
        terms: of the attempt.
        client: this node's number; its entry must hold the public line of what `sign` signs with.
        sign: signs with the node's registered key.
        approved: {client: public line} that the node's operator approved; each participant but this node must be in it
            with exactly this identity. None accepts everyone, for a simulation.
        verify: checks signatures.
        draw: draws secret bytes, uniform.
        receipts: texts for the peers, of as many characters and as many as `wire` allows.

    Raises:
        ProtocolError: a participant is not approved, or this node's entry holds another identity.
    """
    own = terms.participant(client)
    if approved is not None:
        check_approved(terms, client, approved)
    encryption_private, self_seed, mask_seed = draw(KEY_BYTES), draw(SEED_BYTES), draw(SEED_BYTES)
    unsigned = Advertisement(
        client=client,
        encryption_key=public_half(encryption_private),
        mask_key=public_half(mask_private_key(mask_seed, client, terms)),
        self_commitment=self_commitment(self_seed, client, terms),
        signature="",
        receipts=tuple(receipts),
    )
    message = advertised(terms, unsigned)
    advertisement = replace(unsigned, signature=sign(message))
    if not verify(own.identity, message, advertisement.signature):
        raise ProtocolError(f"client {client}: its identity in the terms is not the key of this node")
    state = Advertised(
        terms=terms,
        client=client,
        sign=sign,
        verify=verify,
        encryption_private=encryption_private,
        self_seed=self_seed,
        mask_seed=mask_seed,
        advertisement=advertisement,
    )
    return state, advertisement


def share(state: Advertised, advertisements: Mapping[int, Advertisement]) -> tuple[Shared, dict[int, bytes]]:
    """Second exchange: shares of this node's seeds, sealed for each peer that advertised.

    Args:
        state: of this node.
        advertisements: {client: keys} of U1, this node included.

    Returns:
        The next state, and {holder: 124 sealed bytes}; for this node itself only the 64 bytes of commitments.

    Raises:
        ProtocolError: one is unknown, signed by another key or for other terms, or uses a key twice; or this node's own
            is missing or changed.
        TooFewError: they are fewer than the threshold.
    """
    terms, client = state.terms, state.client
    if advertisements.get(client) != state.advertisement:
        raise ProtocolError(f"client {client}: its own advertisement is missing or was changed")
    check_advertisements(terms, advertisements, state.verify, trusted=client)
    transcript = transcript_of(terms, advertisements)
    peers = {peer: shown for peer, shown in advertisements.items() if peer != client}
    sealing = agreements(state.encryption_private, {peer: shown.encryption_key for peer, shown in peers.items()})
    masking = agreements(
        mask_private_key(state.mask_seed, client, terms), {peer: shown.mask_key for peer, shown in peers.items()}
    )
    shares, sent = split(state.self_seed, state.mask_seed, terms), {}
    for peer in sorted(advertisements):
        route = Route(transcript=transcript, dealer=client, holder=peer)
        if peer == client:
            sent[peer] = commitments(shares[peer], route)
        else:
            sent[peer] = seal(shares[peer], route, sealing[peer])
    kept = Shared(
        begun=state,
        advertisements=dict(advertisements),
        transcript=transcript,
        own=shares[client],
        sealing=sealing,
        masking=masking,
    )
    return kept, sent


def received(state: Shared, sealed: Mapping[int, bytes]) -> dict[int, Shares]:
    """{client in U2: its shares of that client's seeds}, of this node too; what `mask` checks before it masks.

    Args:
        state: of this node.
        sealed: as for `mask`.

    Raises:
        ProtocolError: shares are from a client that did not advertise, or were not sealed by it for this node.
        TooFewError: U2 is smaller than the threshold.
    """
    begun = state.begun
    check_members("shares", [*sealed, begun.client], state.advertisements, begun.terms)
    return {begun.client: state.own} | {peer: _opened(state, peer, sealed[peer]) for peer in sorted(sealed)}


def _opened(state: Shared, peer: int, sealed: bytes) -> Shares:
    """The shares that a peer sealed for this node."""
    route = Route(transcript=state.transcript, dealer=peer, holder=state.begun.client)
    return unseal(sealed, route, state.sealing[peer])


def check(state: Shared, sealed: Mapping[int, bytes]) -> Complaint:
    """Third exchange: whose shares this node cannot use; with any, its part is over, since it opens all dealt to it.

    So honest nodes that open theirs are among the K - t or fewer that sign no list of survivors. With c colluders' that
    is fewer than t shares of any seed, since 2 t > K + c.

    Args:
        state: of this node.
        sealed: as for `mask`.

    Raises:
        ProtocolError, TooFewError: as for `received`, but for shares that do not open.
    """
    begun, dealers = state.begun, []
    check_members("shares", [*sealed, begun.client], state.advertisements, begun.terms)
    for peer in sorted(sealed):
        try:
            _opened(state, peer, sealed[peer])
        except ProtocolError:
            dealers.append(peer)
    return Complaint(dealers=tuple(dealers), opening=begun.encryption_private if dealers else b"")


def mask(state: Shared, sealed: Mapping[int, bytes], values: NDArray[np.int64]) -> tuple[Masked, Words]:
    """Fourth exchange: the noised values under the self-mask and one mask for each peer in U2.

    Args:
        state: of this node.
        sealed: {sender: what it sealed for this node}, of every peer in U2; this node belongs to U2 and is not in it.
        values: int64 [d], grid steps.

    Returns:
        The next state, and y + PRG(b_k) + sum over j > k of PRG(s_kj) - sum over j < k of PRG(s_kj) modulo 2^m, uint32
        or uint64 [d].

    Raises:
        ProtocolError: shares are from a client that did not advertise, or were not sealed by it for this node; or the
            values have another type or shape.
        TooFewError: U2 is smaller than the threshold.
    """
    begun, terms = state.begun, state.begun.terms
    if values.dtype != np.int64 or values.shape != (terms.dimension,):
        raise ProtocolError(f"values: are {values.dtype} {values.shape}, must be int64 ({terms.dimension},)")
    held = received(state, sealed)
    total = pairwise_masks({peer: state.masking[peer] for peer in sealed}, begun.client, terms)
    total += self_mask(begun.self_seed, begun.client, terms)
    total += to_words(values, terms)
    return Masked(shared=state, held=held), total


def confirm(state: Masked, survivors: Sequence[int]) -> tuple[Confirmed, str]:
    """Fifth exchange: this node's signature of the list of clients whose masked vectors arrived.

    Args:
        state: of this node.
        survivors: U3.

    Raises:
        ProtocolError: the list names a client twice or one outside U2, or lacks this node.
        TooFewError: it is shorter than the threshold.
    """
    begun = state.shared.begun
    check_members("survivors", survivors, state.held, begun.terms)
    if begun.client not in survivors:
        raise ProtocolError(f"survivors: client {begun.client}, this node, is missing though it sent its vector")
    listed = tuple(sorted(survivors))
    signature = begun.sign(confirmed(state.shared.transcript, listed))
    return Confirmed(masked=state, survivors=listed), signature


def reveal(state: Confirmed, signatures: Mapping[int, str]) -> Reveal:
    """Sixth exchange: shares of the survivors' self-masks, and of the mask keys of those who dropped out before.

    Args:
        state: of this node.
        signatures: {survivor: its signature of the same list}, at least t.

    Raises:
        ProtocolError: one is of no survivor, or does not hold for this list and these advertisements.
        TooFewError: they are fewer than the threshold.
    """
    shared, held = state.masked.shared, state.masked.held
    terms, survivors = shared.begun.terms, set(state.survivors)
    check_members("signatures", list(signatures), survivors, terms)
    message = confirmed(shared.transcript, survivors)
    for signer, signature in signatures.items():
        if not shared.begun.verify(terms.participant(signer).identity, message, signature):
            raise ProtocolError(f"signatures: that of client {signer} is not of this list of survivors")
    return Reveal(
        client=shared.begun.client,
        self_shares={peer: shares.self_seed for peer, shares in held.items() if peer in survivors},
        mask_shares={peer: shares.mask_seed for peer, shares in held.items() if peer not in survivors},
    )
