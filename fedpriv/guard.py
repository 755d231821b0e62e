"""What protects a data holder: its own rules for what a coordinator may ask, whatever the coordinator says."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedpriv.accounting.clipping import CLIPPING_RULES
from fedpriv.errors import InputError
from fedpriv.training.local_update import UpdateSpec


class RefusedError(Exception):
    """The guard refuses; nothing was computed. Its text holds public values only, so it may be sent."""


@dataclass(frozen=True, kw_only=True)
class NodePolicy:
    """The data holder's own rules.

    Attributes:
        allow_not_private: the holder agrees to releases that no epsilon covers, because its data are public or
            the whole federation is its own simulation.
    """

    allow_not_private: bool = False


def check(spec: UpdateSpec, policy: NodePolicy, *, noise_source: str, num_registered: int) -> None:
    """Refuse an instruction that would not protect the holder's records.

    Raises:
        RefusedError: one line with the name, the value and what would be right.
    """
    if spec.clipping not in CLIPPING_RULES:
        raise RefusedError(f"clipping = {spec.clipping!r}: must be one of {', '.join(CLIPPING_RULES)}")
    if not (math.isfinite(spec.clip_norm) and spec.clip_norm > 0):
        raise RefusedError(f"clip_norm = {spec.clip_norm}: must be finite and > 0")
    if not (math.isfinite(spec.noise_multiplier) and spec.noise_multiplier >= 0):
        raise RefusedError(f"noise_multiplier = {spec.noise_multiplier}: must be finite and >= 0")
    if spec.local_steps < 1:
        raise RefusedError(f"local_steps = {spec.local_steps}: must be >= 1")
    if not 1 <= spec.batch_size <= num_registered:
        raise RefusedError(f"batch_size = {spec.batch_size}: must lie in 1..{num_registered}")
    if policy.allow_not_private:
        return
    if spec.noise_multiplier == 0:
        raise RefusedError("noise_multiplier = 0: this node releases nothing without noise")
    if noise_source != "secure":
        raise RefusedError(f"noise source = {noise_source}: this node releases nothing with seeded noise")


def check_run(*, public: bool, simulate: bool, comparison: bool, noise_multiplier: float) -> None:
    """Refuse a run whose configuration asks for releases without noise on data that are not public.

    Raises:
        InputError: one line with the key, the value and what would be right.
    """
    if public or simulate:
        return
    remedy = "only for public data (public_data = true) or a run marked simulate = true"
    if noise_multiplier == 0:
        raise InputError(f"noise_multiplier = 0: {remedy}")
    if comparison:
        raise InputError(f"comparison = true: it runs without noise, {remedy}")
