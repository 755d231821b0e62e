"""A node joins a federation: it takes an invitation, approves what that asks, and tells what is left to do."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer

from clients.deploy import admission
from clients.deploy.folder import Made, Node
from fedpriv.apps import FLOWER_APP
from fedpriv.config import RunConfig
from fedpriv.errors import InputError
from fedpriv.files import software
from fedpriv.operate import approvals, joining
from fedpriv.operate.command_line import compare
from fedpriv.operate.joining import Invitation
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.views import default_delta
from fedpriv.privacy.ledger import keys
from fedpriv.privacy.mechanisms.registry import MECHANISMS

# Records, of which no cost depends where q is given.
_MANY = 10_000


def asked(option: str, question: str) -> str:
    """The answer of the person at the terminal.

    Raises:
        InputError: nobody does.
    """
    if not sys.stdin.isatty():
        raise InputError(f"--{option}: is required with --data")
    return str(typer.prompt(question))


def number_asked(option: str, question: str) -> float:
    """The number that the person at the terminal answers."""
    text = asked(option, question)
    try:
        return float(text)
    except ValueError:
        raise InputError(f"--{option} = {text!r}: must be a number") from None


def take(path: Path, fingerprint: str | None) -> Invitation:
    """The invitation in a file, which is shown, once its fingerprint is what the coordinator has read out.

    Raises:
        InputError: the file is none, or another fingerprint was told, or none without a terminal to ask for it.
    """
    invitation = joining.read(Invitation, path)
    _tell_invitation(invitation)
    compare([fingerprint] if fingerprint else (), {"the coordinator": invitation.fingerprint})
    return invitation


def _tell_invitation(invitation: Invitation) -> None:
    """Tell what is asked, with control characters escaped."""
    typer.echo(f"invitation of {invitation.name} as partition {invitation.partition_id}, by {invitation.superlink}")
    typer.echo(f"its fingerprint: {invitation.fingerprint}")
    typer.echo(f"the coordinator runs fedpriv {invitation.software or 'of an unknown version'}")
    if invitation.software not in ("", software()):
        typer.echo(f"note: here is fedpriv {software()}, and its runs take no node of another version; install its own")
    plan = invitation.plan
    typer.echo(f"contact: {invitation.contact or 'nobody is named'}")
    if plan is not None:
        typer.echo(f"purpose: {plan.purpose or 'none is named'}{f', until {plan.until}' if plan.until else ''}")
        typer.echo(f"cost: {_cost(plan)}")
    for key, value in invitation.run.items():
        typer.echo(f"planned: {json.dumps(key)[1:-1]} = {json.dumps(value)}")


def _cost(plan: RunConfig) -> str:
    """The cost of the planned run for a node that takes part in every round, as far as it is known beforehand."""
    view = f"on the {plan.privacy_view} view, at delta {plan.delta or '1 / (10 N_k), at most 1e-5'}"
    if plan.target_risk:
        return f"a risk of at most {plan.target_risk} {view}"
    if plan.target_epsilon:
        return f"epsilon {plan.target_epsilon:g} at most {view}; a round that is asked again costs again"
    unknown = "as much as the planned noise costs at this node's number of records; see `fedpriv account`"
    if MECHANISMS[plan.mechanism].cost_depends_on_dimension or not plan.sampling_probability:
        return unknown
    import torch  # deferred: takes seconds

    from fedpriv.learning.training.noise_plan import calibrated, planned_releases, with_any_rates

    tensors = {name: torch.zeros(1, 1) for name in ("x.lora_A.weight", "x.lora_B.weight", "classifier.weight")}
    try:
        releases = planned_releases(with_any_rates(calibrated(plan, (), {})), {0: _MANY}, 0, tensors)
    except ValueError:  # it trains other tensors
        return unknown
    delta = plan.delta or default_delta(_MANY)
    return f"epsilon {epsilon_of(releases, delta).epsilon:.2f} on the local view, at delta {delta:g}"


def approve_asked(node: Node, invitation: Invitation) -> None:
    """Approve what `admission.check_asked` has compared."""
    if invitation.bundle:
        approvals.approve(node.approved, invitation.bundle)
        typer.echo(f"bundle {invitation.bundle} is approved")
    if (note := approvals.note_on(FLOWER_APP)) and invitation.bundle:
        typer.echo(note)
    if invitation.plan is not None:
        name = invitation.plan.model
        found = admission.approve_model(node.vault, name, name=name, digest=invitation.model)
        typer.echo(f"model {name} is approved: digest {found.model.digest}")


def tell(made: Made, quoted: str, *, approves: bool) -> None:
    """Tell what was made, and what is left to do."""
    node = made.node
    typer.echo(f"created {node.folder}; keep {node.key} and {node.vault.key} secret, review {node.vault.policy}")
    if made.found is not None and made.data_set is not None:
        for line in made.found.lines():
            typer.echo(line)
        typer.echo(f"registered N_k = {made.data_set.num_records}, data set {made.data_set.id}")
        if made.data_set.num_records != made.found.num_units:
            typer.echo(f"note: {node.vault.ledger} had registered this number before, and it stays")
    tell_keys(node)
    steps = []
    if not approves:
        steps += [f"approve-model {quoted} MODEL"] if made.found is not None else []
        steps.append(f"approve {quoted} --this-checkout")
    if node.vault.budget_view == "aggregate":
        steps.append(f"approve-peers {quoted} ROSTER")
    for command in (*steps, f"doctor {quoted}", f"start {quoted}"):
        typer.echo(f"next: fedpriv node {command}")


def tell_keys(node: Node) -> None:
    """Tell what the coordinator must get."""
    typer.echo(f"send to the coordinator: {node.application}")
    own = keys.fingerprint(keys.public_line(node.vault.key))
    typer.echo(f"fingerprint of vault.key, to be read to coordinator and peers by telephone: {own}")
