"""Small federations of the stacked engine, trained side by side: the target of an attack and its shadow models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedpriv.accounting.events import Event, group
from fedpriv.adapters import Adapter
from fedpriv.aggregation import weighted_average, weights_by_size
from fedpriv.data.records import Records
from fedpriv.mechanisms.sources import SeededSource
from fedpriv.training import PoissonSampler
from fedpriv.training.local_update import ClientUpdate, UpdateSpec, UpdateTask
from fedpriv.training.model import TrainingModel
from fedpriv.training.stacked import execute_stacked


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A client of one federation: its records, and N_k, which need not equal their number."""

    records: Records
    num_registered: int


def train(
    model: TrainingModel, federations: Sequence[Sequence[Holder]], spec: UpdateSpec, *, seed: int
) -> tuple[list[Adapter], tuple[Event, ...]]:
    """The final global adapter of each federation, and the total charge of the first client of the first one.

    Args:
        model: shared by all; every federation starts from its initial adapter.
        federations: the clients of each.
        spec: of every update.
        seed: of inclusion and noise.
    """
    adapters: list[Adapter] = [model.initial] * len(federations)
    charged: list[Event] = []
    for round_ in range(1, spec.num_rounds + 1):
        tasks = [
            UpdateTask(
                adapter=adapters[federation],
                data=holder.records,
                spec=spec,
                round=round_,
                sampler=PoissonSampler(
                    num_registered=holder.num_registered,
                    expected_batch_size=spec.batch_size,
                    source=SeededSource(seed, federation, client, round_, "inclusion"),
                ),
                noise=SeededSource(seed, federation, client, round_, "noise"),
            )
            for federation, holders in enumerate(federations)
            for client, holder in enumerate(holders)
        ]
        updates = iter(execute_stacked(model, tasks))
        for federation, holders in enumerate(federations):
            uploads = [_upload(next(updates)) for _ in holders]
            weights = weights_by_size({client: holder.num_registered for client, holder in enumerate(holders)})
            adapters[federation] = weighted_average([upload.adapter for upload in uploads], list(weights.values()))
            if federation == 0:
                charged.append(uploads[0].event)
    return adapters, group(charged)


def _upload(update: ClientUpdate | Exception) -> ClientUpdate:
    if isinstance(update, Exception):
        raise update
    return update
