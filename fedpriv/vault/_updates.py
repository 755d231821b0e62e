"""The release of a whole update that another framework's code computed: charge, clip, noise, store, reply.

It has a socket, an account and a process of its own, which nothing that a coordinator of fedpriv sends can reach. What
the vault answers depends on an update by its noised values alone. What else the other code does with its records, and
when it asks, is its own affair.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from fedpriv.accounting.events import Event
from fedpriv.accounting.views import Release
from fedpriv.errors import InputError
from fedpriv.ledger.entries import DataSet, Key
from fedpriv.ledger.reader import reading
from fedpriv.mechanisms.sources import SecureSource
from fedpriv.training.whole_updates import UpdateNoise
from fedpriv.vault._charging import (
    AlreadyReleasedError,
    NodePolicy,
    RefusedError,
    charge,
    coin_key,
    refused,
    registered_data_set,
    store_reply,
)
from fedpriv.vault._disk import NodeJournal, Room
from fedpriv.vault.frames import RELEASE, UPDATE, Request, Response, pack_response, unpack_response
from fedpriv.vault.rollback import ReceiptWatch
from fedpriv.vault.settings import NodeLimits, UpdateSettings, VaultSettings

log = logging.getLogger(__name__)

_RUN = re.compile(r"[\x21-\x7e][\x20-\x7e]{0,199}")
_MAX_ROUND = 2**63 - 1

# Of a key's 64 hex digits: the first name the layout, the others, keyed, the values.
_LAYOUT_DIGITS = 24

# The unit is the client, of which an account holds one.
_NUM_CLIENTS = 1

Update = Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class UpdateGuard:
    """The operator's terms for whole updates, and the account that pays for them.

    Attributes:
        settings: from vault.toml.
        client: the holder's name in the ledger.
        noise: that each release gets.
        event: the cost of each release: that of the largest update, so that no request decides it.
        policy: ledger, budget and receipts.
        journal: of the node's events.
        room: on its disks.
    """

    settings: UpdateSettings
    client: str
    noise: UpdateNoise
    event: Event
    policy: NodePolicy
    journal: NodeJournal
    room: Room

    @staticmethod
    def of(settings: VaultSettings) -> UpdateGuard:
        """That of a node's folder.

        Raises:
            InputError: vault.toml has no section `updates`, its numbers give no noise, or the policy file is wrong.
        """
        updates = settings.updates
        if updates is None:
            raise InputError("updates: vault.toml has no such section")
        noise = UpdateNoise(clip_norm=updates.clip_norm, noise_multiplier=updates.noise_multiplier)
        watch = None
        if settings.key.is_file():
            watch = ReceiptWatch(
                settings.key,
                settings.updates_receipts,
                settings.receipts_of_peers,
                earlier_keys=settings.earlier_keys,
            )
        policy = NodePolicy(
            ledger=settings.updates_ledger,
            budget_epsilon=updates.budget_epsilon,
            delta=updates.delta,
            limits=NodeLimits.read(settings.policy) if settings.policy.is_file() else NodeLimits(),
            watch=watch,
        )
        return UpdateGuard(
            settings=updates,
            client=settings.name,
            noise=noise,
            event=noise.event(updates.max_values),
            policy=policy,
            journal=NodeJournal(settings.events, client=settings.partition_id),
            room=Room.of(settings),
        )

    def data_set(self) -> DataSet:
        """The account, registered on first use.

        Raises:
            LedgerError: the ledger cannot be used.
        """
        found = registered_data_set(self.policy, self.client, _NUM_CLIENTS)
        assert found is not None, "the account has a ledger"
        return found


def release(request: Request, guard: UpdateGuard) -> Response:
    """The noised update, charged before it is made and stored before it is returned; this function raises nothing.

    The same request gets the stored bytes again. Whatever is refused is refused by the update's layout and the ledger
    alone. An update with a value that is not finite counts as zero, since its refusal would tell.
    """
    try:
        guard.room.check()
        return _released(request, guard)
    except Exception as error:  # its text must not leave
        return refused(error, guard.journal)


def _released(request: Request, guard: UpdateGuard) -> Response:
    run, round_, update = _decoded(request, guard.settings)
    data_set = guard.data_set()
    asked = _request_key(update, coin_key(guard.policy, data_set))
    key = Key(run=run, client=guard.client, round=round_, request=asked)
    _check_layout(key, guard, data_set)
    room = guard.room.reserve_reply(sum(array.nbytes for array in update.values()))
    try:
        is_new, _ = charge(
            guard.policy, key, Release(event=guard.event, rho_bar=1.0), data_set, noise_source=SecureSource.name
        )
    except AlreadyReleasedError as answered:
        return unpack_response(answered.content)
    if is_new:
        guard.journal.write("charged", run=run, round=round_, kind=RELEASE)
    response = Response(record=RELEASE, arrays=_noised(update, guard.noise, keep=is_new))
    room.close()
    content = store_reply(guard.policy, key, guard.event, pack_response(response))
    guard.journal.write("released", run=run, round=round_, kind=RELEASE)
    return unpack_response(content)


def _decoded(request: Request, settings: UpdateSettings) -> tuple[str, int, Update]:
    """Run, round and update of a request.

    Raises:
        RefusedError: it is for something else, or its layout is not allowed.
    """
    if request.kind != RELEASE:
        raise RefusedError(f"kind = {request.kind[:60]!r}: this socket answers {RELEASE} alone")
    if request.run_config or request.fields.keys() != {"run", "round"} or request.arrays.keys() != {UPDATE}:
        raise RefusedError(f"{RELEASE}: must hold run, round and tensors, and nothing else")
    run, round_ = request.fields["run"], request.fields["round"]
    if type(run) is not str or not _RUN.fullmatch(run):
        raise RefusedError("run: must be 1 to 200 printable ASCII characters")
    if type(round_) is not int or not 0 <= round_ <= _MAX_ROUND:
        raise RefusedError("round: must be a whole number from 0 to 2^63 - 1")
    update = request.arrays[UPDATE]
    if not 1 <= len(update) <= settings.max_tensors:
        raise RefusedError(f"tensors: are {len(update)}; must be 1 to {settings.max_tensors}")
    for name, array in update.items():
        if array.dtype not in (np.float16, np.float32, np.float64):
            raise RefusedError(f"{name[:60]}: is {array.dtype}; only float16, float32 and float64 are noised")
    num_values = sum(array.size for array in update.values())
    if not 1 <= num_values <= settings.max_values:
        raise RefusedError(f"tensors: hold {num_values} values; must be 1 to {settings.max_values}")
    return run, round_, update


def _request_key(update: Update, secret: bytes) -> str:
    """The key of a request in 64 hex digits: of its layout, and of its values, which a guess cannot be tried on."""
    layout = [(name, array.shape, array.dtype.name) for name, array in sorted(update.items())]
    named = hashlib.sha256(json.dumps(layout).encode())
    values = hashlib.blake2b(key=secret, digest_size=32, person=b"update values")
    for _, array in sorted(update.items()):
        values.update(np.ascontiguousarray(array).data)
    return named.hexdigest()[:_LAYOUT_DIGITS] + values.hexdigest()[_LAYOUT_DIGITS:]


def _check_layout(key: Key, guard: UpdateGuard, data_set: DataSet) -> None:
    """Refuse names, shapes and types that differ from those of the run's first release.

    Raises:
        RefusedError: they differ.
        LedgerError: the ledger cannot be used.
    """
    assert guard.policy.ledger is not None, "the account has a ledger"
    with reading(guard.policy.ledger) as db:
        earlier = db.releases_of(data_set.id, key.run)
    if earlier and earlier[0][0].request[:_LAYOUT_DIGITS] != key.request[:_LAYOUT_DIGITS]:
        raise RefusedError("tensors: have other names, shapes or types than in the run's first release")


def _noised(update: Update, noise: UpdateNoise, *, keep: bool) -> dict[str, np.ndarray]:
    """The noised update in its own shapes and types; without `keep` noise alone."""
    names = sorted(update)
    vector = np.concatenate([update[name].reshape(-1).astype(np.float64) for name in names])
    noised = noise.noised(torch.from_numpy(vector if keep else np.zeros_like(vector)), SecureSource()).numpy()
    found, start = {}, 0
    with np.errstate(over="ignore"):
        for name in names:
            array = update[name]
            found[name] = noised[start : start + array.size].reshape(array.shape).astype(array.dtype)
            start += array.size
    return found
