"""What happened in a run, as rows: one for each round, one for each client and round."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RoundRow:
    """A row of rounds.csv; round 0 is the untrained model.

    `num_late` counts replies to earlier rounds that arrived in this one. Epsilons are cumulative, earlier runs on the
    same data sets included, by the rdp accountant; `aggregate` is None where that view does not hold.
    """

    round: int
    num_selected: int
    num_replies: int
    num_silent: int
    num_failures: int
    num_late: int
    num_retired: int
    test_accuracy: float
    test_loss: float
    epsilon_local_max: float
    epsilon_rho_max: float
    epsilon_aggregate_max: float | None
    bytes_up: int
    bytes_down: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ClientRow:
    """A row of clients.csv: what one client did in one round, and what it has spent after it, by rdp.

    `status` is `ok`, `silent`, `malformed`, `refused`, `retired`, `failed` or `no reply`, and `detail` says what was
    wrong. Bytes are those of the serialised messages. `seconds` runs from sending the instruction to the reply's
    creation.
    """

    round: int
    client: int
    num_records: int
    status: str
    detail: str
    sampling_probability: float
    noise_multiplier: float
    effective_noise_multiplier: float
    steps: int
    weight: float
    rho_bar: float
    epsilon_local: float
    epsilon_rho: float
    epsilon_aggregate: float | None
    delta: float
    bytes_up: int
    bytes_down: int
    seconds: float
