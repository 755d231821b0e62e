"""Which of a holder's records are set aside for evaluation: each by a coin of its own."""

from __future__ import annotations

import hmac
import json

from fedpriv.data.text import TextData


def split(data: TextData, *, fraction: float, seed: int) -> tuple[TextData, TextData]:
    """The records to train on and those to evaluate on, both in their order.

    Guarantee: where a record goes depends on its own content and the seed alone, so adding or removing another record
    moves none. Equal records go to the same side.

    Args:
        data: of one holder.
        fraction: probability of being set aside, in (0, 1), over the seeds.
        seed: the run's; it may be public.
    """
    coins = [_is_set_aside(data, index, fraction, seed) for index in range(len(data))]
    return (
        part(data, [index for index, aside in enumerate(coins) if not aside]),
        part(data, [index for index, aside in enumerate(coins) if aside]),
    )


def part(data: TextData, indices: list[int]) -> TextData:
    """The records with the given indices."""

    def chosen(column: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(column[index] for index in indices)

    return TextData(
        texts=chosen(data.texts),
        labels=chosen(data.labels) if data.labels else (),
        pairs=None if data.pairs is None else chosen(data.pairs),
    )


def _is_set_aside(data: TextData, index: int, fraction: float, seed: int) -> bool:
    record = part(data, [index])
    content = json.dumps([record.texts, record.labels, record.pairs]).encode()
    coin = hmac.digest(str(seed).encode(), content, "sha256")
    return int.from_bytes(coin[:8]) < fraction * 2.0**64
