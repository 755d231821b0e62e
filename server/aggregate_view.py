"""Whether the `aggregate` view holds for a run."""

from __future__ import annotations

from fedpriv.accounting.views import aggregate_objections
from fedpriv.aggregation.rules import RULES
from fedpriv.config import RunConfig
from fedpriv.mechanisms.registry import MECHANISMS


def objections_to_aggregate(config: RunConfig) -> tuple[str, ...]:
    """Why the `aggregate` view does not hold for the run."""
    return aggregate_objections(
        local_steps=config.local_steps,
        optimizer=config.optimizer,
        noise_on=config.noise_on,
        linear=RULES[config.aggregation].linear and config.upload_codec == "float32",
        secure_aggregation=config.secure_aggregation,
        norms_limited=config.max_update_norm is not None,
        mechanism=config.mechanism,
        noise_adds_up=MECHANISMS[config.mechanism].noise_adds_up,
    )
