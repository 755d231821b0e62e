"""Flower's SuperNode with one more rule: it runs only app bundles (FABs) whose SHA-256 the node's operator approved.

The ClientApp's code comes from the coordinator, so a guard inside it protects nobody by itself. Flower's own trusted
entities require signatures that only its hub issues: if any are configured, a SuperNode refuses every bundle from a
self-hosted SuperLink. So this check compares the bytes when the SuperNode first sees a run, before anything from the
bundle is stored, installed or imported; a refused run gets Flower's error reply for invalid bundles.

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
    """Whether a bundle's bytes are approved; a file that cannot be read approves nothing."""
    digest = hashlib.sha256(content).hexdigest()
    try:
        is_known = digest in approvals.approved(path)
    except (OSError, ValueError) as error:
        log.error("approved-fabs: %s", error)
        return False
    if not is_known:
        log.error("refused: the bundle %s is not approved; review it, then add it to %s", digest, path)
    return is_known


def require_approval(path: Path) -> None:
    """Make every SuperNode of this process refuse bundles that the file does not approve.

    Flower 1.41 calls `_verify_fab` on a bundle that has verifications if trusted entities are configured. This function
    supplies both, and lets the file decide, which is read anew for each run.
    """
    pull: Callable[..., Any] = start_client_internal._pull_and_store_message

    def pull_approved(*, get_fab: Callable[[str, int], Any], **rest: Any) -> Any:
        def marked(fab_hash: str, run_id: int) -> Any:
            return replace(get_fab(fab_hash, run_id), verifications={"valid_license": "approved-fabs"})

        return pull(get_fab=marked, **{**rest, "trusted_entities": {"approved-fabs": str(path)}})

    def verify(fab: Any, trusted_entities: dict[str, str]) -> bool:
        return is_approved(fab.content, Path(trusted_entities["approved-fabs"]))

    # It hands on whatever Flower passes, so its signature is wider than that of Flower's function.
    start_client_internal._pull_and_store_message = pull_approved  # type: ignore[assignment]
    start_client_internal._verify_fab = verify


if __name__ == "__main__":
    require_approval(Path(sys.argv.pop(1)).absolute())
    flower_supernode()
