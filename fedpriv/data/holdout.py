"""Which of a holder's records are set aside for evaluation: each by a coin of its own."""

from __future__ import annotations

import hmac
import json

from fedpriv.data.text import TextData


def split(data: TextData, *, fraction: float, key: bytes) -> tuple[TextData, TextData]:
    """The records to train on and those to evaluate on, both in their order.

    Guarantee: where a record goes depends on its own content, the key and the fraction alone, so adding or removing
    another record moves none. Equal records go to the same side. A record that is set aside stays so at any larger
    fraction.

    Args:
        data: of one holder.
        fraction: probability of being set aside, in (0, 1), over the keys.
        key: 1 to 64 bytes. To anyone who knows it, the number of records on either side tells who is there.
    """
    coins = [_is_set_aside(data, index, fraction, key) for index in range(len(data))]
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


def _is_set_aside(data: TextData, index: int, fraction: float, key: bytes) -> bool:
    record = part(data, [index])
    content = json.dumps([record.texts, record.labels, record.pairs]).encode()
    coin = hmac.digest(key, content, "sha256")
    return int.from_bytes(coin[:8]) < fraction * 2.0**64
