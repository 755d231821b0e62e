"""What no run from here can do, though a configuration may say it, for instance to be planned with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedpriv.config_checks import LINEAR_RULES
from fedpriv.errors import InputError
from fedpriv.mechanisms.registry import MECHANISMS

if TYPE_CHECKING:
    from fedpriv.config import RunConfig


def check_run(config: RunConfig) -> None:
    """Refuse a run that may not be, whatever its data.

    Raises:
        InputError: the first of `objections_to_run`, or a package is missing that scores the run's answers.
    """
    for objection in objections_to_run(config):
        raise InputError(objection)
    if config.generates_answers:
        from fedpriv.training import metrics  # deferred: few runs need it

        metrics.require_rouge(config.generated_answers)


def objections_to_run(config: RunConfig) -> list[str]:
    """Each release without noise from data that are not public, and a `privacy_view` that does not hold."""
    found = []
    if not config.data_are_public and not config.simulate:
        remedy = "allowed only on public data (public_data = true) or in a run marked simulate = true"
        if config.noise_multiplier == 0:
            found.append(f"noise_multiplier = 0: {remedy}")
        if config.compares:
            found.append(f"comparison = true: a run without noise is {remedy}")
    if config.privacy_view == "aggregate" and (objections := objections_to_aggregate(config)):
        found.append(f"privacy_view = aggregate: does not hold: {'; '.join(objections)}")
    return found


def objections_to_aggregate(config: RunConfig) -> tuple[str, ...]:
    """Why the `aggregate` view does not hold for the run."""
    from fedpriv.accounting.views import aggregate_objections  # deferred: it imports the accountants

    return aggregate_objections(
        local_steps=config.local_steps,
        optimizer=config.optimizer,
        noise_on=config.noise_on,
        linear=config.aggregation in LINEAR_RULES and config.upload_codec == "float32",
        secure_aggregation=config.secure_aggregation,
        norms_limited=config.max_update_norm is not None,
        mechanism=config.mechanism,
        noise_adds_up=MECHANISMS.named(config.mechanism).noise_adds_up,
    )


def check_clients(config: RunConfig, num_clients: int) -> None:
    """Refuse keys that do not fit so many clients.

    Raises:
        InputError: names the key, the value and what would be right.
    """
    if len(config.budget_epsilon) not in (0, 1, num_clients):
        raise InputError(
            f"budget_epsilon = {list(config.budget_epsilon)}: has {len(config.budget_epsilon)} entries for "
            f"{num_clients} clients; give one number for all, or one for each"
        )
    if len(config.client_ranks) not in (0, num_clients):
        raise InputError(
            f"client_ranks = {list(config.client_ranks)}: has {len(config.client_ranks)} entries for {num_clients} "
            "clients; give one for each"
        )
    if config.secure_aggregation:
        from fedpriv.secure_aggregation import smallest_threshold  # deferred: few runs need it

        num_each = config.clients_per_round or num_clients
        least = smallest_threshold(num_each, config.colluding_clients)
        if not least <= config.min_clients <= num_each:
            raise InputError(
                f"min_clients = {config.min_clients}: secure_aggregation = true needs {least} to {num_each}, with "
                f"{num_each} clients a round of whom {config.colluding_clients} may collude"
            )
    if config.min_clients > num_clients:
        raise InputError(f"min_clients = {config.min_clients}: there are {num_clients} clients; use at most as many")
