"""Refuse a run within seconds, before torch is imported: a folder in use, a missing model, data that do not fit.

Some things that a configuration may say, for instance to be planned with, no run from here may do; `check_run` and
`check_clients` refuse them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from fedpriv.config import ON_NODES, RunConfig, with_mechanism_parameters
from fedpriv.errors import InputError
from fedpriv.learning.adapters import check_model, locate
from fedpriv.learning.data import federated
from fedpriv.privacy.mechanisms.registry import MECHANISMS
from fedpriv.runs import files
from fedpriv.runs.show import check_installed
from fedpriv.texts import printable

# As many as delta's default no longer depends on.
_SOME_RECORDS = 10_000

# Bytes of weights that are not loaded for a check.
_LARGE = 2 * 2**30


def check(config: RunConfig) -> None:
    """Refuse a run that may not be, or whose folder, tracker, mechanism, model or data cannot be used or do not fit.

    Raises:
        InputError: the first problem that is found.
    """
    for look in _looks([config]):
        look()


def problems(configs: Iterable[RunConfig], *, begins: bool = False) -> list[str]:
    """One line for each thing that cannot be used, such as a model; each is looked at once, the cheapest first.

    Records that are on nodes are not read.

    Args:
        begins: whether to load each model that is on this machine and not large, and to calibrate each run's noise,
            where nothing else is wrong, once whatever the seed; else no model's file is read.
    """
    configs = list(configs)
    found = _refusals(_looks(configs))
    if begins and not found:
        distinct = dict.fromkeys(replace(config, seed=0) for config in configs if not config.is_own_model)
        found = _refusals([partial(_begin, config) for config in distinct])
    return found


def _refusals(looks: Iterable[Callable[[], object]]) -> list[str]:
    found = []
    for look in looks:
        try:
            look()
        except InputError as error:
            found.append(str(error))
    return list(dict.fromkeys(found))


def _begin(config: RunConfig) -> None:
    """Refuse what the model cannot take, and a target that no noise meets."""
    place = locate(config.model)
    if place is None:
        return
    if sum(file.stat().st_size for file in ([place] if place.is_file() else place.glob("*.safetensors"))) > _LARGE:
        return
    from fedpriv.learning.training.noise_plan import calibrated, decided  # deferred: these import torch
    from fedpriv.learning.training.workbench import workbench

    config = with_mechanism_parameters(config)
    bench = workbench(config)
    if config.data != ON_NODES:
        sizes = [records.num_units for records in bench.data.clients]
    else:  # with a given q no number of records changes what noise costs
        sizes = [_SOME_RECORDS] * config.num_clients if config.sampling_probability else []
    if sizes and config.has_target:
        calibrated(decided(config, sizes, bench.initial)[0], sizes, bench.initial)


def _looks(configs: Iterable[RunConfig]) -> list[Callable[[], object]]:
    """The checks to make, each once, the cheapest first."""
    configs = list(configs)
    looks: dict[object, Callable[[], object]] = {}
    for config in configs:
        if config.out and not config.resume:
            looks[("out", config.out)] = partial(files.check_unused, Path(config.out))
        looks[("track", config.track)] = partial(check_installed, config.track)
        looks[("run", config)] = partial(check_run, config)
    for config in configs:
        values = (config.mechanism, config.mechanism_parameters, config.noise_multiplier)
        looks[("mechanism", values)] = partial(with_mechanism_parameters, config)
    for config in configs:
        if not config.is_own_model:
            looks[("model", config.model)] = partial(check_model, config.model)
    num_clients: dict[object, int] = {}
    for config in configs:
        if not config.is_own_model and (config.data != ON_NODES or config.test_data):
            looks[("data", federated.loaded(config))] = partial(_load, config, num_clients)
    for config in configs:
        looks[("clients", config)] = partial(_check_clients, config, num_clients)
    return list(looks.values())


def _load(config: RunConfig, num_clients: dict[object, int]) -> None:
    """Load the data, keep the number of clients that hold them, and show on stderr what is odd about their table.

    Nothing else keeps that, no log and no folder: it tells of records, and is for those who hold the table.
    """
    data = federated.load(config)
    num_clients[federated.loaded(config)] = len(data.clients)
    for line in data.warnings:
        print(f"warning: {printable(line)}", file=sys.stderr)


def _check_clients(config: RunConfig, num_clients: Mapping[object, int]) -> None:
    """Refuse keys that do not fit the number of clients; data that cannot be loaded are another check's problem."""
    is_stated = config.data == ON_NODES or config.is_own_model
    num = config.num_clients if is_stated else num_clients.get(federated.loaded(config))
    if num is not None:
        check_clients(config, num)


def check_run(config: RunConfig) -> None:
    """Refuse a run that may not be, whatever its data.

    Raises:
        InputError: the first of `objections_to_run`, or a package is missing that scores the run's answers.
    """
    for objection in objections_to_run(config):
        raise InputError(objection)
    if config.generates_answers:
        from fedpriv.learning.training import require_rouge  # deferred: few runs need it

        require_rouge(config.generated_answers)


def objections_to_run(config: RunConfig) -> list[str]:
    """Each release without noise from data that are not public, and a `privacy_view` that does not hold."""
    found = []
    if not config.protects_nobody:
        remedy = "allowed only on public data (public_data = true) or in a run marked simulate = true"
        if config.noise_multiplier == 0:
            found.append(f"noise_multiplier = 0: {remedy}")
        if config.compares:
            found.append(f"comparison = true: a run without noise is {remedy}")
    if config.privacy_view == "aggregate" and (objections := objections_to_aggregate(config)):
        found.append(f"privacy_view = aggregate: does not hold: {'; '.join(objections)}")
    return found


def objections_to_aggregate(config: RunConfig) -> tuple[str, ...]:
    """The reasons why the `aggregate` view does not hold for the run; none if it holds."""
    from fedpriv.privacy.accounting.views import aggregate_objections  # deferred: it imports the accountants

    return aggregate_objections(
        local_steps=config.local_steps,
        optimizer=config.optimizer,
        noise_on=config.noise_on,
        linear=config.rule.linear and config.upload_codec == "float32",
        secure_aggregation=config.secure_aggregation,
        norms_limited=config.max_update_norm is not None,
        mechanism=config.mechanism,
        noise_adds_up=MECHANISMS.named(config.mechanism).noise_adds_up,
    )


def check_clients(config: RunConfig, num_clients: int) -> None:
    """Refuse, with an InputError that names the key, values that do not fit so many clients."""
    if len(config.budget_epsilon) not in (0, 1, num_clients):
        raise InputError(
            f"budget_epsilon = {list(config.budget_epsilon)}: has {len(config.budget_epsilon)} entries for "
            f"{num_clients} clients; give one number for all, or one for each"
        )
    if config.holders_per_person > num_clients:
        raise InputError(
            f"holders_per_person = {config.holders_per_person}: there are {num_clients} clients; use at most so many"
        )
    if len(config.client_ranks) not in (0, num_clients):
        raise InputError(
            f"client_ranks = {list(config.client_ranks)}: has {len(config.client_ranks)} entries for {num_clients} "
            "clients; give one for each"
        )
    if config.secure_aggregation:
        from fedpriv.holder.sums import smallest_threshold  # deferred: few runs need it

        num_each = config.clients_per_round or num_clients
        least = smallest_threshold(num_each, config.colluding_clients)
        if not least <= config.min_clients <= num_each:
            raise InputError(
                f"min_clients = {config.min_clients}: secure_aggregation = true needs {least} to {num_each}, with "
                f"{num_each} clients a round of whom {config.colluding_clients} may collude"
            )
    if config.min_clients > num_clients:
        raise InputError(f"min_clients = {config.min_clients}: there are {num_clients} clients; use at most as many")
