"""Flower's SuperNode, with one rule more: it runs only app bundles (FABs) whose SHA-256 the node's operator approved.

The ClientApp's code arrives from the coordinator, so a guard inside it protects nobody by itself. Flower's own trusted
entities ask for signatures that its hub alone hands out: given any, a SuperNode refuses every bundle that a self-hosted
SuperLink has. So the check is on the bytes, where the SuperNode first sees a run, before anything of the bundle is
stored, installed or imported; a refused run gets Flower's error reply for invalid bundles.

    python -m clients.deploy.approved_supernode APPROVED_FABS --superlink ... (the arguments of flower-supernode)
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.supernode import start_client_internal
from flwr.supernode.cli import flower_supernode

from clients.deploy import approvals

log = logging.getLogger("flwr")


def is_approved(content: bytes, path: Path) -> bool:
    """Whether a bundle's bytes are among the approved; a file that cannot be read approves nothing."""
    digest = hashlib.sha256(content).hexdigest()
    try:
        is_known = digest in approvals.approved(path)
    except (OSError, ValueError) as error:
        log.error("approved-fabs: %s", error)
        return False
    if not is_known:
        log.error("refused: the bundle %s is not approved; read it, then add it to %s", digest, path)
    return is_known


def hold(path: Path) -> None:
    """Make every SuperNode of this process refuse bundles that the file does not approve.

    Flower 1.41 asks `_verify_fab` about a bundle with verifications where trusted entities are given. Both are given
    here, and the answer is the file's, read anew for each run.
    """
    pull: Callable[..., Any] = start_client_internal._pull_and_store_message

    def pull_approved(*, get_fab: Callable[[str, int], Any], **rest: Any) -> Any:
        def marked(fab_hash: str, run_id: int) -> Any:
            return replace(get_fab(fab_hash, run_id), verifications={"valid_license": "approved-fabs"})

        return pull(get_fab=marked, **{**rest, "trusted_entities": {"approved-fabs": str(path)}})

    def verify(fab: Any, trusted_entities: dict[str, str]) -> bool:
        return is_approved(fab.content, Path(trusted_entities["approved-fabs"]))

    start_client_internal._pull_and_store_message = pull_approved
    start_client_internal._verify_fab = verify


if __name__ == "__main__":
    hold(Path(sys.argv.pop(1)).absolute())
    flower_supernode()
