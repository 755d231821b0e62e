"""The identity of a simulation's data: digests by which a change is noticed, and the accounts that its ledger keeps.

A node with records of its own keeps no such digests: its ledger notes changes for its operator alone. An account is of
a holder by name, or of a part of a data set. A client's number never stands for one: others join and leave, and the
same number is then another's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpriv.config import IN_MEMORY, RunConfig
from fedpriv.errors import InputError
from fedpriv.files import sha256_of
from fedpriv.learning.data.federated import dealing, holdings, is_natural
from fedpriv.learning.data.text import FederatedData, TextData

if TYPE_CHECKING:
    from fedpriv.learning.data.tensors import TensorRecords

# Differences that an error names.
_MOST_NAMED = 5

_PARTITION = ", partition "


@dataclass(frozen=True, kw_only=True)
class DataDigests:
    """The data of a run as digests, SHA-256 in hex. Anyone who knows all records of a holder but one can test a guess.

    Attributes:
        files: {file, as the configuration names it: its digest}; none of a data set on the Hub or in memory.
        dealt: digest of what decides who holds a record.
        holders: {name: (its number of what is registered, digest of its records)}, by partition id.
        test: digest of the server's test records.
    """

    files: Mapping[str, str]
    dealt: str
    holders: Mapping[str, tuple[int, str]]
    test: str

    @staticmethod
    def of(config: RunConfig, data: FederatedData, files: Mapping[str, str]) -> DataDigests:
        """The digests of what was loaded from these files; see `digests_of_files`."""
        clients = zip(data.client_names, data.clients, strict=True)
        return DataDigests(
            files=files,
            dealt=hashlib.sha256(repr(holdings(config)).encode()).hexdigest(),
            holders={name: (records.num_units, _digest(records)) for name, records in clients},
            test=_digest(data.test),
        )

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> DataDigests:
        """The digests whose fields `to_json` gave."""
        return DataDigests(**{**values, "holders": {name: tuple(each) for name, each in values["holders"].items()}})

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values."""
        return dict(vars(self))  # `asdict` would copy every holder's

    def check_same(self, then: DataDigests, where: str) -> None:
        """Refuse, naming what differs after `where`, other records than an earlier look by this configuration had."""
        if found := list(self._differences(then)):
            more = f", and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
            raise InputError(f"{where}: {', '.join(found[:_MOST_NAMED])}{more}; put the data back as they were")

    def check_same_files(self, then: DataDigests, where: str) -> None:
        """Refuse, by name, files that have changed since an earlier look, by whatever configuration."""
        for name in self.files.keys() & then.files.keys():
            if self.files[name] != then.files[name]:
                if self.dealt == then.dealt:
                    self.check_same(then, where)
                raise InputError(f"{where}: {name} has changed; put it back as it was")

    def _differences(self, then: DataDigests) -> Iterator[str]:
        yield from (f"{name!r} held records and holds none now" for name in then.holders if name not in self.holders)
        for name, (number, digest) in self.holders.items():
            if name not in then.holders:
                yield f"{name!r} is a new holder"
            elif (before := then.holders[name])[0] != number:
                yield f"{name!r} had {before[0]} records and has {number}"
            elif before[1] != digest:
                yield f"the records of {name!r} are others"
        if self.holders.keys() == then.holders.keys() and list(self.holders) != list(then.holders):
            yield "the holders are in another order"
        if self.test != then.test:
            yield "the test records are others"


def digests_of_files(config: RunConfig) -> dict[str, str]:
    """{file, as the configuration names it: SHA-256 of its bytes, in hex}."""
    names = {config.data, config.test_data} - {""}
    return {name: sha256_of(path) for name in sorted(names) if (path := Path(name).expanduser()).is_file()}


def _digest(records: TextData | TensorRecords) -> str:
    return hashlib.sha256(records.content + json.dumps(records.persons).encode()).hexdigest()


def accounts(config: RunConfig, names: Sequence[str]) -> tuple[str, ...]:
    """The account of each client, by partition id.

    A named holder keeps its account whoever else takes part. A client that is only a number has an account for this way
    of dealing out these data, since in any other it holds other records. The place of a file does not count.
    """
    are_numbers = config.data == IN_MEMORY and tuple(names) == tuple(f"client {number}" for number in range(len(names)))
    if is_natural(config) and not are_numbers:
        return tuple(names)
    files = {key: Path(getattr(config, key)).name for key in ("data", "test_data")}
    dealt = json.dumps([config.has_test_set, dealing(config) | files], sort_keys=True)
    digest = hashlib.sha256(dealt.encode()).hexdigest()[:12]
    return tuple(f"{name} of {files['data']}{_PARTITION}{digest}" for name in names)


def other_partitions(own: Iterable[str], known: Iterable[str]) -> list[str]:
    """The known ways, other than that of one's own accounts, in which the same data were dealt out."""
    # The data set and the partition, which follow the name of the client.
    ways, all_ = ({account.partition(" of ")[2] for account in each if _PARTITION in account} for each in (own, known))
    data = {way.rpartition(_PARTITION)[0] for way in ways}
    return sorted(way for way in all_ - ways if way.rpartition(_PARTITION)[0] in data)
