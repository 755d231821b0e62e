"""What the server accepts from a client: anything malformed is refused by name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from flwr.app import Message

from fedpriv import protocol
from fedpriv.accounting.events import Event
from fedpriv.adapters.arithmetic import Adapter


class MalformedError(ValueError):
    """A reply that is not aggregated."""


def adapter_of(reply: Message, *, like: Mapping[str, torch.Tensor], round_: int, event: Event) -> Adapter:
    """The uploaded adapter.

    Args:
        reply: without an error.
        like: names and shapes that the adapter must have.
        round_: the round that was asked for.
        event: what the instruction costs; the reply must state the same.

    Raises:
        MalformedError: one line that names what is wrong.
    """
    try:
        arrays = reply.content.array_records[protocol.ADAPTER]
        release = reply.content.config_records[protocol.RELEASE]
        claimed_round, claimed_event = protocol.unpack_release(release)
    except (KeyError, ValueError) as error:
        raise MalformedError(f"malformed reply: {error}") from None
    if claimed_round != round_:
        raise MalformedError(f"reply of round {claimed_round} in round {round_}")
    if claimed_event != event:
        raise MalformedError(f"reply paid {claimed_event}, the instruction costs {event}")
    if arrays.keys() != like.keys():
        raise MalformedError(f"tensors {', '.join(sorted(arrays.keys() ^ like.keys()))} are on one side only")
    for name, array in arrays.items():
        if array.dtype != "float32" or tuple(array.shape) != tuple(like[name].shape):
            raise MalformedError(f"{name}: {array.dtype} {tuple(array.shape)}, not float32 {tuple(like[name].shape)}")
    try:
        adapter = dict(arrays.to_torch_state_dict())
    except (ValueError, TypeError) as error:
        raise MalformedError(f"unreadable tensor: {error}") from None
    for name, tensor in adapter.items():
        if tensor.dtype != torch.float32 or tensor.shape != like[name].shape:
            raise MalformedError(f"{name}: holds {tensor.dtype} {tuple(tensor.shape)}, another tensor than it says")
        if not torch.isfinite(tensor).all():
            raise MalformedError(f"{name}: holds NaN or infinity")
    return adapter
