"""Replies of a Flower app that are paid for: charged to a ledger before the app runs, and stored before they leave.

`LedgerMod` stands around code that adds noise by itself: Flower's LocalDpMod, Opacus, or the steps of
`fedpriv.learning.training` in the app's own train function. `UpdateMod` clips and noises the update of any app.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol

import torch
from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable

from fedpriv.errors import InputError
from fedpriv.holder.flower._messages import (
    NUM_EXAMPLES,
    Parameters,
    check_names,
    check_type,
    metrics_of,
    parameters_of,
    refusing,
    reply_of,
    request_digest,
    round_of,
)
from fedpriv.holder.vault import (
    AlreadyReleasedError,
    NodeLimits,
    NodePolicy,
    RefusedError,
    charge,
    registered_data_set,
    store_reply,
)
from fedpriv.holder.vault.rollback import ReceiptWatch
from fedpriv.holder.wire.frame import Response, Scalar
from fedpriv.learning.training import UpdateNoise
from fedpriv.privacy.accounting import Event, PrivacySpent, Release, SubsampledGaussian, epsilon_of
from fedpriv.privacy.accounting.sensitivity import local_dp_multiplier
from fedpriv.privacy.ledger import DataSet, Key, Ledger, reading
from fedpriv.privacy.mechanisms import SecureSource

log = logging.getLogger("flwr")

# The batches that BatchNorm has seen: an integer, of which the average of Flower's strategies makes a float.
_UNTRAINED = ("num_batches_tracked",)


@dataclass(frozen=True, kw_only=True)
class Account:
    """A data holder's account: a ledger, and the budget that its releases may use.

    All values are the operator's, from its node's configuration or a file of its own, never from a message. Each charge
    has a receipt, signed with a key next to the ledger; a ledger that lacks one is an old copy, and releases nothing.

    Attributes:
        ledger: file of the node's ledger, created on first use, as are LEDGER.key and LEDGER.receipts.
        client: the holder's name in it; a number, as Flower has for its partitions, stands for its digits.
        num_records: N_k >= 1, registered on first use and constant from then on.
        budget_epsilon: the most that all runs may cost together; None sets no bound.
        delta: of the budget, in (0, 1); None means 1/(10 N_k), at most 1e-5.
        max_releases: that the data may have, whatever each costs, >= 1.
        counter_file: keeps the receipts on a disk that is not restored with the ledger; see `begin_counter_file`.

    Raises:
        InputError, ValueError: the budget, delta or number of releases is out of range.
    """

    ledger: Path
    client: str | int
    num_records: int
    budget_epsilon: float | None = None
    delta: float | None = None
    max_releases: int = NodeLimits.max_releases
    counter_file: Path | None = None

    def __post_init__(self) -> None:
        if self.num_records < 1:
            raise InputError(f"num_records = {self.num_records}: must be at least 1")
        _ = self._policy  # checks budget and delta

    @cached_property
    def _policy(self) -> NodePolicy:
        return NodePolicy(
            ledger=self.ledger,
            budget_epsilon=self.budget_epsilon,
            delta=self.delta,
            limits=NodeLimits(max_releases=self.max_releases),
            watch=self._watch,
        )

    @cached_property
    def _watch(self) -> ReceiptWatch:
        return ReceiptWatch.beside(self.ledger, self.counter_file)

    def begin_counter_file(self) -> None:
        """Make the counter file, once; without it nothing is released. A request never makes it: its disk may be away.

        Raises:
            InputError: none is named, it exists, or it cannot be written.
            LedgerError: the ledger cannot be used.
        """
        _ = self.data_set  # whose charges it counts
        self._watch.begin_counter_file(self.ledger)

    @property
    def data_set(self) -> DataSet:
        """The registered data set; one is registered if there is none yet.

        Raises:
            InputError: the ledger has registered another client, N_k or delta, so it is another holder's.
            LedgerError: the ledger cannot be used.
        """
        if not self._watch.key.exists():
            with Ledger(self.ledger):  # whose lock keeps other processes from making another key
                self._watch.make_key()
        found = registered_data_set(self._policy, str(self.client), self.num_records)
        assert found is not None, "an account has a ledger"
        found.check_fixed(self.ledger, client=self.client, num_records=self.num_records, delta=self.delta)
        return found

    def spent(self) -> PrivacySpent:
        """The cost of everything charged so far, on the `local` view.

        Raises:
            LedgerError: the ledger cannot be used.
        """
        data_set = self.data_set
        with reading(self.ledger) as db:
            return epsilon_of([release.event for release in db.releases(data_set.id)], data_set.delta)

    def pay(self, key: Key, release: Release, noise_source: str, make: Callable[[bool], Response]) -> Response:
        """The response to a request, charged before it is made and stored before it is returned.

        The same key gets the stored response again, and nothing is made.

        Args:
            key: of the request.
            release: to charge.
            noise_source: for the ledger, `secure`, or where the noise is from.
            make: makes the response; its argument says whether the charge is new. If not, an earlier attempt ended
                before it stored a response, and records must not be read again.

        Raises:
            RefusedError: the budget does not allow the release, or the ledger is an old copy; see
                `fedpriv.holder.vault.charge`.
            LedgerError: the ledger cannot be used.
        """
        try:
            is_new, _ = charge(self._policy, key, release, self.data_set, noise_source=noise_source)
        except AlreadyReleasedError as answered:
            return Response(answered.content)
        return Response(store_reply(self._policy, key, release.event, make(is_new).frame))


AccountOf = Callable[[Context], Account]
"""The account of the node in whose context a mod runs."""

_Ask = Callable[[], Message]


class _PaidMod(ABC):
    """A Flower mod that pays for its reply to each train message, and refuses others that the operator does not allow.

    Its arguments are those that `LedgerMod` and `UpdateMod` share.
    """

    _noise_source = SecureSource.name

    def __init__(
        self, account_of: AccountOf, *, metrics: Collection[str], uncovered: Collection[str], untrained: Collection[str]
    ) -> None:
        self._account_of = account_of
        self._metrics, self._uncovered = check_names("metrics", metrics), check_names("uncovered", uncovered)
        self._untrained = check_names("untrained", untrained)

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """The paid reply to a message, or an error."""

        def answer() -> Message:
            if not check_type(message, self._uncovered):
                return call_next(message, context)
            received = parameters_of(message.content, self._untrained)
            account = self._account_of(context)
            key = _key_of(message, account)

            def make(is_new: bool) -> Response:
                ask = partial(call_next, message, context) if is_new else None
                parameters, metrics = self._made(ask, received, key)
                fields = {**metrics, NUM_EXAMPLES: account.data_set.num_records}
                return Response.of(fields=fields, arrays={parameters.record: parameters.arrays})

            release = Release(event=self._event(context, received), rho_bar=1.0)
            response = account.pay(key, release, self._noise_source, make)
            return reply_of(message, response, {name: array.shape for name, array in received.arrays.items()})

        return refusing(message, answer)

    @abstractmethod
    def _event(self, context: Context, received: Parameters) -> Event:
        """The cost of the reply to a train message with these parameters."""

    @abstractmethod
    def _made(self, ask: _Ask | None, received: Parameters, key: Key) -> tuple[Parameters, Mapping[str, Scalar]]:
        """The parameters that leave, and the numbers that the operator allows.

        Args:
            ask: asks the app; None if an earlier attempt may have asked it.
            received: parameters of the message.
            key: that was charged.
        """


class LedgerMod(_PaidMod):
    """A Flower mod that charges each train message with a fixed event before the app runs, and stores the reply.

    It adds no noise: the mods behind it and the app must give what the event says. The reply's arrays leave as the app
    made them, but for those that `UpdateMod` keeps; its numbers are replaced by the registered N_k. If the app fails,
    the server learns that it did.

    Args:
        account_of: gives the node's account.
        event_of: gives what one train message costs on this node.
        noise_source: `secure`, or where the noise is from, for the ledger.
        metrics: names of numbers in the app's replies that leave all the same; no epsilon covers them.
        uncovered: types of messages, such as `evaluate`, that the app answers by itself; no epsilon covers them.
        untrained: names of arrays, or the last parts of them, that the app does not train.
    """

    def __init__(
        self,
        account_of: AccountOf,
        event_of: Callable[[Context], Event],
        *,
        noise_source: str = SecureSource.name,
        metrics: Collection[str] = (),
        uncovered: Collection[str] = (),
        untrained: Collection[str] = _UNTRAINED,
    ) -> None:
        super().__init__(account_of, metrics=metrics, uncovered=uncovered, untrained=untrained)
        self._event_of, self._noise_source = event_of, noise_source

    def _event(self, context: Context, received: Parameters) -> Event:
        return self._event_of(context)

    def _made(self, ask: _Ask | None, received: Parameters, key: Key) -> tuple[Parameters, Mapping[str, Scalar]]:
        if ask is None:
            raise RefusedError(f"round {key.round}: was charged, and its reply is lost; make a new request")
        return _trained(ask, received, self._metrics)


class UpdateMod(_PaidMod):
    """A Flower mod that releases the app's update under client-level differential privacy, or nothing.

    Only the difference to the received parameters is released: clipped to C as a whole, with exact discrete Gaussian
    noise of standard deviation z C on every value. It is charged before the app runs and stored before it leaves; the
    same message again gets the same reply. All else in the app's reply is dropped. If the app fails, or returns other
    arrays or values that are not finite, its update counts as zero, and the reply is noise like any other.

    Arrays of integers, such as BatchNorm's number of batches, leave as they came, and so do those named as untrained:
    they have no noise, and count in no norm. The running means of a BatchNorm are part of the update.

    Guarantee: replacing all data of the client costs what the charged event says, by the reply's content. How long the
    app takes, and what it does besides its reply, is not covered.

    Args:
        account_of: gives the node's account.
        clip_norm: C, finite, > 0, in units of the parameters.
        noise_multiplier: z > 0, the noise over C; any two updates are up to 2 C apart, so the event has z / 2.
        metrics: names of numbers in the app's replies that leave all the same; no epsilon covers them.
        uncovered: types of messages, such as `evaluate`, that the app answers by itself; no epsilon covers them.
        untrained: names of arrays of floats, or the last parts of them, that the app does not train. An average that a
            strategy takes makes floats of integers, so other integers than BatchNorm's have to be named here.

    Raises:
        InputError: clip_norm or noise_multiplier is out of range.
    """

    def __init__(
        self,
        account_of: AccountOf,
        *,
        clip_norm: float,
        noise_multiplier: float,
        metrics: Collection[str] = (),
        uncovered: Collection[str] = (),
        untrained: Collection[str] = _UNTRAINED,
    ) -> None:
        super().__init__(account_of, metrics=metrics, uncovered=uncovered, untrained=untrained)
        self._noise = UpdateNoise(clip_norm=clip_norm, noise_multiplier=noise_multiplier)

    def event(self, num_values: int) -> Event:
        """The cost of one release of so many values; rounding to the mechanism's grid adds a little for each."""
        return self._noise.event(num_values)

    def _event(self, context: Context, received: Parameters) -> Event:
        return self.event(received.num_values)

    def _made(self, ask: _Ask | None, received: Parameters, key: Key) -> tuple[Parameters, Mapping[str, Scalar]]:
        update, metrics = torch.zeros(received.num_values, dtype=torch.float64), dict[str, Scalar]()
        if ask is not None:
            try:
                trained, numbers = _trained(ask, received, self._metrics)
                update, metrics = trained.difference(received), numbers
            except Exception:  # a record may have caused it, so the reply is noise like any other
                log.exception("the app failed; its update counts as zero")
        return received.moved(self._noise.noised(update, SecureSource())), metrics


def _key_of(message: Message, account: Account) -> Key:
    """The key of the release that a message asks for.

    Raises:
        RefusedError: the message's round is none.
    """
    content = message.content
    return Key(
        run=str(message.metadata.run_id),
        client=str(account.client),
        round=round_of(content),
        request=request_digest(message.metadata.message_type, content),
    )


def _trained(ask: _Ask, received: Parameters, allowed: Collection[str]) -> tuple[Parameters, dict[str, Scalar]]:
    """The app's parameters under the received record's name, and the numbers that may leave.

    Args:
        ask: asks the app; it may change the message.
        received: parameters of the message, read before the app runs.
        allowed: names of numbers that the operator lets leave.

    Raises:
        ValueError: the reply holds none that may leave; the text is for this node's log alone.
    """
    try:
        reply = ask()
        trained = parameters_of(reply.content, received.kept)
    except RefusedError as error:  # its text would leave
        raise ValueError(f"the app's reply: {error}") from None
    trained.difference(received)
    return replace(received, arrays={**received.arrays, **trained.changing}), metrics_of(reply, allowed)


class LocalDp(Protocol):
    """The part of Flower's LocalDpMod that decides its noise."""

    clipping_norm: float
    sensitivity: float
    epsilon: float
    delta: float


def local_dp_event(mod: LocalDp, count: int = 1) -> SubsampledGaussian:
    """The cost of releases through Flower's LocalDpMod: Gaussian noise on the whole clipped update of one client.

    The Gaussian itself is accounted, at any epsilon, see `local_dp_multiplier`. Unit: the client, whose data may all be
    replaced.

    Args:
        mod: the LocalDpMod.
        count: number of releases, >= 1.

    Raises:
        InputError: the mod's epsilon or delta is 0, so its noise has no finite size; or it adds none.
    """
    if not (mod.epsilon > 0 and 0 < mod.delta < 1 and mod.sensitivity > 0):
        raise InputError(
            f"LocalDpMod: sensitivity = {mod.sensitivity}, epsilon = {mod.epsilon}, delta = {mod.delta}: must be > 0, "
            "and delta below 1"
        )
    multiplier = local_dp_multiplier(mod.clipping_norm, mod.sensitivity, mod.epsilon, mod.delta)
    return SubsampledGaussian(noise_multiplier=multiplier, sampling_probability=1.0, count=count, unit="client")
