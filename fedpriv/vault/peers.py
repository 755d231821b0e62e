"""With whom a node adds up: the public keys of other holders that its operator has approved, one file each."""

from __future__ import annotations

import re
from pathlib import Path

from fedpriv.deployment import keys
from fedpriv.errors import InputError

SUFFIX = ".pub"

_CLIENT = re.compile(r"0|[1-9][0-9]{0,8}")


def approved(folder: Path) -> dict[int, str]:
    """{partition id: public line} of the holders that the operator approved, ascending; empty without a folder.

    Read whenever an attempt at a sum begins, so that an approval, and its end, hold from the next attempt on.

    Args:
        folder: holds a file PARTITION-ID.pub for each of them.

    Raises:
        InputError: a file is no public key, or is not named by a partition id.
    """
    peers = {}
    for path in folder.glob(f"*{SUFFIX}"):
        if not _CLIENT.fullmatch(path.stem):
            raise InputError(f"{path}: must be named PARTITION-ID{SUFFIX}, such as 2{SUFFIX}")
        peers[int(path.stem)] = keys.read_public_line(path)
    return dict(sorted(peers.items()))
