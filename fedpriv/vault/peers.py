"""With whom a node adds up: the public keys of other holders that its operator has approved, one file each."""

from __future__ import annotations

import re
from pathlib import Path

from fedpriv.deployment import keys
from fedpriv.errors import InputError

PEER_SUFFIX = ".pub"

_PEER_ID = re.compile(r"0|[1-9][0-9]{0,8}")


def approved_peers(folder: Path) -> dict[int, str]:
    """{partition id: public line} of the holders that the operator approved, ascending; empty without a folder.

    Read whenever an attempt at a sum begins, so that an approval, and its end, hold from the next attempt on. What an
    earlier version approved, the keys of SuperNodes, approves nobody: a program beside the vault has a copy of each.

    Args:
        folder: holds a file PARTITION-ID.pub for each of them.

    Raises:
        InputError: a file is no public key, or is not named by a partition id.
    """
    return {int(path.stem): line for path, line in _peer_lines(folder) if keys.kind_of(line) == keys.VAULT}


def peers_of_earlier_versions(folder: Path) -> list[Path]:
    """The files that hold the key of a SuperNode; raises like `approved`."""
    return [path for path, line in _peer_lines(folder) if keys.kind_of(line) != keys.VAULT]


def _peer_lines(folder: Path) -> list[tuple[Path, str]]:
    """Each file and the public line in it, in the order of the partition ids."""
    found = list(folder.glob(f"*{PEER_SUFFIX}"))
    for path in found:
        if not _PEER_ID.fullmatch(path.stem):
            raise InputError(f"{path}: must be named PARTITION-ID{PEER_SUFFIX}, such as 2{PEER_SUFFIX}")
    return [(path, keys.read_public_line(path, None)) for path in sorted(found, key=lambda path: int(path.stem))]
