"""What can be told of a run within seconds, before torch is imported: a folder in use, a missing model, wrong data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from fedpriv.adapters import locations
from fedpriv.config import ON_NODES, RunConfig, with_mechanism_parameters
from fedpriv.data import federated
from fedpriv.errors import InputError
from fedpriv.run_checks import check_clients, check_run
from fedpriv.runs import files
from fedpriv.tracking.protocol import check_installed

# What decides whether `federated.load` refuses.
_LOADED = (*federated.DATA_KEYS, "batch_size", "sampling_probability")

# What is checked against the number of clients.
_BY_CLIENTS = (
    *("budget_epsilon", "client_ranks", "min_clients"),
    *("secure_aggregation", "clients_per_round", "colluding_clients"),
)


def check(config: RunConfig) -> None:
    """Refuse a run that may not be, or whose folder, tracker, mechanism, model or data cannot be used or do not fit.

    Raises:
        InputError: the first problem that is found.
    """
    for look in _looks([config]):
        look()


def problems(configs: Iterable[RunConfig]) -> list[str]:
    """One line for each thing that cannot be used, such as a model; each is looked at once, the cheapest first.

    A model's files are not read, and neither are records that are on nodes.
    """
    found = []
    for look in _looks(configs):
        try:
            look()
        except InputError as error:
            found.append(str(error))
    return list(dict.fromkeys(found))


def _looks(configs: Iterable[RunConfig]) -> list[Callable[[], object]]:
    """What is to be looked at, each once, the cheapest first."""
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
        looks[("model", config.model)] = partial(locations.check, config.model)
    num_clients: dict[object, int] = {}
    for config in configs:
        if config.data != ON_NODES or config.test_data:
            looks[("data", _data(config))] = partial(_load, config, num_clients)
    for config in configs:
        looks[("clients", _data(config), *(getattr(config, key) for key in _BY_CLIENTS))] = partial(
            _check_clients, config, num_clients
        )
    return list(looks.values())


def _data(config: RunConfig) -> tuple[object, ...]:
    return tuple(getattr(config, key) for key in _LOADED)


def _load(config: RunConfig, num_clients: dict[object, int]) -> None:
    """Load the data, and keep how many clients hold them."""
    num_clients[_data(config)] = len(federated.load(config).clients)


def _check_clients(config: RunConfig, num_clients: Mapping[object, int]) -> None:
    """Refuse what does not fit the number of clients; data that cannot be loaded are another look's problem."""
    num = config.num_clients if config.data == ON_NODES else num_clients.get(_data(config))
    if num is not None:
        check_clients(config, num)
