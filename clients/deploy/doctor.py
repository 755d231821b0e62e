"""Checks of a data holder's machine."""

from __future__ import annotations

from collections.abc import Iterator

from clients.deploy.approvals import approved
from clients.deploy.folder import Node
from fedpriv.deployment.checks import (
    Check,
    check_clock,
    check_data,
    check_disk,
    check_key,
    check_ledger,
    check_policy,
    check_port_free,
    check_python,
    check_registered,
    check_tls,
    check_versions,
)
from fedpriv.errors import InputError

_MIN_DISK_BYTES = 2**30


def checks(node: Node) -> Iterator[Check]:
    """The checks of this machine before the SuperNode is started."""
    yield check_python()
    yield check_versions()
    yield check_tls(node.superlink_host, node.superlink_port, node.ca_certificate)
    yield check_clock(node.superlink_host, node.superlink_port, node.ca_certificate)
    yield check_port_free("127.0.0.1", node.port)
    yield check_key(node.key)
    yield check_policy(node.policy)
    if node.data is None:
        yield Check("data", True, "the embedded synthetic corpus; no real records")
    else:
        yield check_data(node.data, node.text_column, node.label_column, node.text_pair_column)
    yield _budget(node)
    yield check_ledger(node.ledger)
    yield check_registered(node.ledger)
    yield _approved(node)
    yield check_disk(node.folder, _MIN_DISK_BYTES)


def _budget(node: Node) -> Check:
    if node.budget_epsilon is None:
        return Check("budget", True, "none: nothing limits what all runs spend; set budget_epsilon in node.toml")
    return Check("budget", True, f"epsilon {node.budget_epsilon:g} for all runs together")


def _approved(node: Node) -> Check:
    try:
        number = len(approved(node.approved))
    except InputError as error:
        return Check("approved", False, str(error))
    if not number:
        return Check("approved", False, f"{node.approved}: no bundle may run here yet; run `approve`")
    return Check("approved", True, f"{number} bundle{'s' if number > 1 else ''} may run here")
