"""The accounts that a ledger keeps for the clients of a simulation: of a holder by name, or of a part of a data set.

A client's number never stands for an account: others join and leave, and the same number is then another's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from fedpriv.config import IN_MEMORY, RunConfig
from fedpriv.learning.data.federated import dealing, is_natural

_PARTITION = ", partition "


def accounts(config: RunConfig, names: Sequence[str]) -> tuple[str, ...]:
    """The account of each client, by partition id.

    A named holder keeps its account whoever else takes part. A client that is only a number has an account for this way
    of dealing out these data, since in any other it holds other records. The place of a file does not count.

    Args:
        config: of the run.
        names: of its clients.
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
    ways, all_ = ({_way(account) for account in each if _PARTITION in account} for each in (own, known))
    data = {way.rpartition(_PARTITION)[0] for way in ways}
    return sorted(way for way in all_ - ways if way.rpartition(_PARTITION)[0] in data)


def _way(account: str) -> str:
    """The data set and the partition of an account."""
    return account.partition(" of ")[2]
