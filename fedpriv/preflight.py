"""What can be told of a run within seconds, before torch is imported: a folder in use, a missing model, wrong data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from fedpriv.adapters import locations
from fedpriv.config import ON_NODES, RunConfig
from fedpriv.data import federated
from fedpriv.errors import InputError
from fedpriv.runs import files

# What decides whether `federated.load` refuses.
_LOADED = (*federated.DATA_KEYS, "batch_size", "sampling_probability")


def check(config: RunConfig) -> None:
    """Refuse a run whose folder, model or data cannot be used.

    Raises:
        InputError: the first problem that is found.
    """
    for look in _looks([config]):
        look()


def problems(configs: Iterable[RunConfig]) -> list[str]:
    """One line for each folder, model and set of data that cannot be used; each is looked at once, the cheapest first.

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
    for config in configs:
        looks[("model", config.model)] = partial(locations.check, config.model)
    for config in configs:
        if config.data != ON_NODES or config.test_data:
            values = tuple(getattr(config, key) for key in _LOADED)
            looks[("data", values)] = partial(federated.load, config)
    return list(looks.values())
