"""Folders of runs that are finished and private, with random variants and a ledger of their own."""

import json
import shutil
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedpriv.config import parse, to_toml
from fedpriv.models.variants import Store, folders, layout_of
from fedpriv.privacy.accounting import Release, SubsampledGaussian
from fedpriv.privacy.ledger.ledger import Ledger
from tests.chats import chat_model
from tests.cli.inputs import charge
from tests.served import save_run

RUN = "run-1"
RELEASE = Release(event=SubsampledGaussian(noise_multiplier=2.0, sampling_probability=0.1), rho_bar=0.7)
# A run of a language model of prompts and responses, all of whose layers are adapted.
CHAT = {"task": "CAUSAL_LM", "layers": "all", "normalize_features": False, "prompt_column": "p", "response_column": "r"}
CHAT |= {"max_length": 128, "max_new_tokens": 8}

# Keys on which no variant depends, and the variants that were saved for all others, which are copied.
OF_THE_RUN = ("ledger", "public_data", "budget_epsilon", "target_epsilon")
SAVED, SAVED_AT = dict[str, Path](), tempfile.TemporaryDirectory()


def chat_run(folder: Path, names: tuple[str, ...] = ("global",), **values: object) -> Path:
    """A run of a small language model, which lies beside it, with random variants."""
    base = {"model": str(chat_model(folder / "model")), "data": "x.csv"}
    return save_run(folder / "run", base | CHAT | values, names, scale=0.5)


def store_of(
    run: Path, path: Path, names: Iterable[str], bases: Mapping[str, list[str]] | None = None, **provenance: Any
) -> Path:
    """A store of a run's variants; one with bases takes its first blocks from the first of them."""
    with Store(path) as store:
        for name in names:
            folder, own_bases = run / "variants" / name, (bases or {}).get(name, [])
            tensors = folders.read_tensors(folder)
            layout = layout_of(tensors, 64)
            blocks, extras = layout.to_blocks(tensors)
            if own_bases:
                blocks[:2] = store.blocks[store.rows(store.manifest(own_bases[0]).blocks[:2])]
            told = {"bases": own_bases, **provenance}
            store.add(name, layout, blocks, extras, described=folders.read(folder), provenance=told)
    return path


def finished(
    folder: Path,
    model: Path,
    names: tuple[str, ...] = ("global", "client-0", "client-1"),
    *,
    noise_source: str = "secure",
    values: dict[str, object] | None = None,
    summary: dict[str, Any] | None = None,
) -> Path:
    """A run's folder; nothing was trained, and its two clients were charged for one round."""
    settings = {"model": str(model), "data": "hospital.csv", "client_column": "site", **(values or {})}
    of_the_run = {key: settings.pop(key) for key in OF_THE_RUN if key in settings}
    key = json.dumps([settings, names])
    if key not in SAVED:
        SAVED[key] = save_run(Path(SAVED_AT.name) / str(len(SAVED)), settings, names)
    shutil.copytree(SAVED[key], folder)
    config = tomllib.loads((folder / "config.toml").read_text())
    (folder / "config.toml").write_text(to_toml(parse(config | of_the_run)))
    data_sets = {}
    with Ledger(folder / "ledger.sqlite") as ledger:
        for client in ("0", "1"):
            data_sets[client] = ledger.register(client, 100, 1e-5).id
            charge(ledger, data_sets[client], RELEASE, client=client, run=RUN, source=noise_source)
        head = ledger.head
    registrations = {client: {"data_set": id_, "name": "St. Anna"} for client, id_ in data_sets.items()}
    (folder / "clients.csv").write_text("round,client,status\n1,0,ok\n1,1,ok\n")
    (folder / "registrations.json").write_text(json.dumps(registrations))
    paid = {"epsilon_local": 1.2345, "epsilon_rho": 2.5, "delta": 1e-5}
    found = {
        **{f"{figure}_max": value for figure, value in paid.items()},
        **{"epsilon_aggregate_max": None, "privacy_view": "local", "unit": "record", "accountant": "pld"},
        **{"mechanism": "gaussian", "noise_source": noise_source, "private": True, "caveat": ""},
        **{"accuracy": 0.81234, "run_id": RUN, "ledger_head": head, "num_clients": 2},
        "clients": [{"client": k, "name": "St. Anna", **paid} for k in (0, 1)],
    }
    (folder / "summary.json").write_text(json.dumps(found | (summary or {})))
    return folder
