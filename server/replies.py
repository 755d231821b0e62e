"""What the server accepts from a client: anything malformed is refused by name."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from flwr.app import Message

from fedpriv import protocol
from fedpriv.accounting.events import Event
from fedpriv.adapters.arithmetic import Adapter, difference, norm
from fedpriv.protocol import Broadcast, Release
from fedpriv.training.local_update import UpdateSpec


class MalformedError(ValueError):
    """A reply that is not aggregated."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
    """What a client was asked, by which its reply is judged.

    Attributes:
        round: of the run.
        event: what the instruction costs; the reply must state the same.
        num_records: N_k as registered; likewise.
        spec: says how the upload is written.
        broadcast: names and shapes that the upload must have.
        initial: the tensors at the start of the run.
        max_norm: the largest L2 norm that the update may have; None for any.
    """

    round: int
    event: Event
    num_records: int
    spec: UpdateSpec
    broadcast: Broadcast
    initial: Adapter
    max_norm: float | None = None


def read_reply(reply: Message, asked: Asked) -> tuple[Adapter | None, str]:
    """The uploaded adapter, or None from a client that stays silent; and the reply's digest, as its own ledger has it.

    Args:
        reply: without an error.
        asked: of its client.

    Raises:
        MalformedError: one line that names what is wrong.
    """
    try:
        release = protocol.unpack_release(reply.content.config_records[protocol.RELEASE])
        _check_release(release, asked)
        records = reply.content.array_records
        if release.silent:
            if records:
                raise MalformedError(f"silent, but sends {', '.join(records)}")
            return None, _digest(release, {})
        if records.keys() != {protocol.ADAPTER}:
            raise MalformedError(f"records {', '.join(records) or 'none'}, not {protocol.ADAPTER}")
        protocol.check_arrays({name: array.data for name, array in records[protocol.ADAPTER].items()})
        arrays = dict(records[protocol.ADAPTER].to_torch_state_dict())
        adapter = protocol.unpack_upload(arrays, asked.broadcast, asked.spec, asked.initial)
    except MalformedError:
        raise
    except (KeyError, ValueError, TypeError, EOFError, OSError) as error:
        raise MalformedError(f"malformed reply: {error}") from None
    for name, tensor in adapter.items():
        if not torch.isfinite(tensor).all():
            raise MalformedError(f"{name}: holds NaN or infinity")
    size = norm(difference(adapter, asked.broadcast.adapter))
    if asked.max_norm is not None and size > asked.max_norm:
        raise MalformedError(f"its update has norm {size:.4g}, max_update_norm is {asked.max_norm:g}")
    return adapter, _digest(release, arrays)


def _check_release(release: Release, asked: Asked) -> None:
    if release.round != asked.round:
        raise MalformedError(f"reply of round {release.round} in round {asked.round}")
    if release.event != asked.event:
        raise MalformedError(f"reply paid {release.event}, the instruction costs {asked.event}")
    if release.num_records != asked.num_records:
        raise MalformedError(f"reply claims {release.num_records} records, registered are {asked.num_records}")
    if release.silent and not asked.broadcast.signs:
        raise MalformedError("silent, though it was not asked to judge its update")


def _digest(release: Release, arrays: dict[str, torch.Tensor]) -> str:
    return hashlib.sha256(protocol.pack_reply(release, arrays)).hexdigest()
