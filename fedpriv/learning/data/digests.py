"""The memory that a simulation keeps of its data, so that it notices when they change: names, numbers and digests.

A node with records of its own has no such file: its ledger notes changes for its operator alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpriv.config import RunConfig
from fedpriv.errors import InputError
from fedpriv.files import sha256_of
from fedpriv.learning.data._text import FederatedData, TextData
from fedpriv.learning.data.federated import holdings

if TYPE_CHECKING:
    from fedpriv.learning.data.tensors import TensorRecords

# Differences that an error names.
_MOST_NAMED = 5


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
        return asdict(self)

    def check_same(self, then: DataDigests, where: str) -> None:
        """Refuse records that are not those of an earlier look by the same configuration.

        Args:
            then: of that look.
            where: begins the error.

        Raises:
            InputError: names what differs.
        """
        if found := list(self._differences(then)):
            more = f", and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
            raise InputError(f"{where}: {', '.join(found[:_MOST_NAMED])}{more}; put the data back as they were")

    def check_same_files(self, then: DataDigests, where: str) -> None:
        """Refuse files that have changed since an earlier look, by whatever configuration.

        Raises:
            InputError: names the file, and what differs where records were dealt out in the same way.
        """
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
