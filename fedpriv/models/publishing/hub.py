"""A variant on the Hugging Face Hub: whether it may go there, with which files, in one commit or none.

A global model is a function of releases that were paid for, so it may go out where the run was private and within its
budgets. What one holder uploaded shows that holder alone, so it needs that holder's permission, in the ledger; so does
what a few made, or a federation of one, and a global model after a round in which only one upload arrived, since it
is that upload. Records that are public need no permission.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils._validators import validate_repo_id

from fedpriv.config import RunConfig
from fedpriv.errors import InputError, LedgerError
from fedpriv.learning.adapters.lora import CONVENTION_FILE
from fedpriv.models.publishing import card
from fedpriv.models.publishing.card import why_not_private
from fedpriv.models.publishing.saved import SavedVariant, tensor_file
from fedpriv.models.variants.folders import ADAPTER_CONFIG, TENSORS, Described
from fedpriv.privacy.ledger import reader
from fedpriv.privacy.ledger.entries import LedgerConnection
from fedpriv.runs import ClientRow, files, read_rows
from fedpriv.texts import holder_label

_Registered = Mapping[str, Mapping[str, Any]]
"""{client: what the run registered of it}."""

_KEPT = ("version", "base_model", "base_weights", "pooling", "labels", "reading")

# What the coordinator writes: models of everybody's uploads, one of a few holders' (which ones is not kept), their own.
_OF_ALL = re.compile(r"global|round-[0-9]+")

_OF_SOME = "integral-mean"
_COLUMNS = ("round", "client", "status")
_OF_ONE = re.compile(r"client-([0-9]+)")


def check_name(name: str) -> None:
    """Refuse, with an InputError, a name that no repository of the Hub can have: it must be OWNER/NAME."""
    try:
        validate_repo_id(name)
        is_valid = name.count("/") == 1
    except HFValidationError:
        is_valid = False
    if not is_valid:
        raise InputError(f"NAME = {name!r}: must be OWNER/NAME, as on the Hub")


def contents(saved: SavedVariant, *, license: str = "") -> dict[str, bytes]:
    """{file: content} of what is uploaded: adapter, how to use it, and its card; nothing else of the run.

    Its provenance, the ledger and the configuration stay here, and so does the path of a base that is a folder.

    Args:
        license: of the Hub's identifiers; empty states none.

    Raises:
        InputError: its tensors were changed, or a file is damaged.
    """
    tensors = saved.kept.tensors(saved.name)  # against their digests
    convention = {key: saved.convention[key] for key in _KEPT if key in saved.convention} | {"base_model": saved.base}
    settings = saved.settings | {"base_model_name_or_path": saved.base}
    return {
        card.FILE: card.text(saved, license=license).encode(),
        ADAPTER_CONFIG: _json(settings),
        TENSORS: tensor_file(tensors),
        CONVENTION_FILE: _json(convention),
    }


def upload(name: str, found: Mapping[str, bytes], *, public: bool) -> str:
    """Make the repository if it is not there, and commit the files, all or none; returns the commit's address.

    Args:
        public: whether the repository, new or not, may be one that anyone can read.

    Raises:
        InputError: the repository is there and public, and may not be.
        ConnectionError: the Hub refuses, or cannot be reached; one line, which says whether anything was uploaded.
    """
    api = HfApi()
    operations = [CommitOperationAdd(path_in_repo=path, path_or_fileobj=content) for path, content in found.items()]
    try:
        api.create_repo(name, private=not public, exist_ok=True)
        is_private = public or api.model_info(name).private is True
    except Exception as error:  # of the Hub's client, or of what it is built on
        raise ConnectionError(f"push {name}: nothing was uploaded ({_reason(error)})") from None
    if not is_private:
        raise InputError(f"NAME = {name!r}: anyone can read this repository; say so with --public, or name another")
    try:
        return str(api.create_commit(name, operations, commit_message="Upload an adapter with fedpriv").commit_url)
    except Exception as error:
        if _is_refusal(error):
            raise ConnectionError(f"push {name}: nothing was uploaded ({_reason(error)})") from None
        raise ConnectionError(
            f"push {name}: nobody knows whether it was uploaded ({_reason(error)}); look at "
            f"{api.endpoint}/{name}/commits/main before you push again"
        ) from None


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _is_refusal(error: Exception) -> bool:
    """Whether the Hub has refused, or was never reached: one that breaks off may have stored what it was sent."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code < 500
    return isinstance(error, httpx.ConnectError)


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


def why_publishable(saved: SavedVariant, *, ledger: Path | None = None, public_data: bool = False) -> str:
    """Say in one line why the variant may be published.

    Args:
        ledger: where the run was charged; None for the ledger that its configuration names, or else its folder's.
        public_data: whether the operator says that the records are public, which the run's configuration must say too.

    Raises:
        InputError: it may not be, or the ledger that the configuration names cannot be read; one line that says why.
        LedgerError: the ledger is damaged, or is not that of the run.
    """
    if saved.run is None or saved.config is None or not saved.run.is_finished:
        raise InputError(
            f"variant = {saved.name!r}: only a variant in the folder of its finished run, or in its store, can be "
            f"pushed, with the run's ledger"
        )
    run, config = saved.run.path, saved.config
    if saved.folder is not None and saved.folder.resolve().parent.parent != run.resolve():
        raise InputError(f"{saved.folder}: leads out of its run's folder; name the variant where it is")
    if saved.kept.is_chosen_privately(saved.name):
        raise InputError(
            f"variant = {saved.name!r}: private records chose its values, so more went into it than this run's uploads"
        )
    described = [_described(saved, name) for name in saved.sources]
    registered = files.read_values(run / files.REGISTRATIONS)
    asked = {name: _whose(name, list(registered)) for name in saved.sources}
    if public_data:
        if not config.data_are_public:
            raise InputError("--public-data: the run's configuration does not say so (public_data = false)")
        return "the run's records are public"
    summary = files.read_values(run / files.SUMMARY)
    if reason := why_not_private(saved, summary):
        hint = "; its records are public, so --public-data allows it" if config.data_are_public else ""
        raise InputError(f"variant = {saved.name!r}: the run is not private: {reason}{hint}")
    _check_budgets(saved, summary, registered)
    clients = sorted({client for name, of in asked.items() for client in of or _only_uploader(name, run)})
    path = ledger or _charged_in(run, config)
    with reader.reading(path) as db:
        reader.verify_with_head(db, path)
        _check_ledger(db, path, summary, registered)
        for each in described:
            _check_history(db, path, each, str(summary.get("run_id")))
        permissions = [_permission(db, path, summary, client, registered) for client in clients]
    return "; ".join(permissions) or "made of releases that the ledger has paid for, within every budget"


def _described(saved: SavedVariant, name: str) -> Described:
    """The description of a variant, or of one whose values it may hold."""
    described = saved.kept.describe(name)
    if described is None:
        raise InputError(f"variant = {name!r}: its store says nothing of what went into it")
    if described.name != name:
        raise InputError(f"variant = {name!r}: its description describes another variant, so nobody knows what this is")
    return described


def _charged_in(run: Path, config: RunConfig) -> Path:
    """The ledger that the run was charged in; its folder holds a copy from its end, which lacks what came later."""
    if not config.ledger:
        return run / files.LEDGER
    path = Path(config.ledger)
    try:
        with reader.reading(path):
            return path
    except (LedgerError, OSError) as error:
        raise InputError(
            f"ledger = {config.ledger!r}: the run was charged there, and a permission may be withdrawn there, but it "
            f"cannot be read ({error}); say with --ledger PATH where it is now"
        ) from None


def _whose(name: str, clients: list[str]) -> list[str]:
    """The clients that a variant needs the permission of."""
    if of_one := _OF_ONE.fullmatch(name):
        return [of_one[1]]
    if name != _OF_SOME and not _OF_ALL.fullmatch(name):
        raise InputError(f"variant = {name!r}: is none that a run writes, so nothing says what went into it")
    return clients if name == _OF_SOME or len(clients) == 1 else []


def _only_uploader(name: str, run: Path) -> list[str]:
    """The client that a global model is the upload of, if nobody else's was in the last round that changed it."""
    last = int(name.removeprefix("round-")) if name.startswith("round-") else math.inf
    rows = [row for row in read_rows(run / files.CLIENTS, ClientRow, _COLUMNS) if row["status"] == "ok"]
    made = max((row["round"] for row in rows if row["round"] <= last), default=0)
    uploaders = [str(row["client"]) for row in rows if row["round"] == made]
    return uploaders if len(uploaders) == 1 else []


def _check_history(db: LedgerConnection, path: Path, described: Described, run: str) -> None:
    """Refuse a variant that is made of anything but releases of the run that the ledger has charged."""
    uploads = described.history.ancestors
    if uploads is None or any(upload.run != run for upload in uploads):
        raise InputError(f"variant = {described.name!r}: is not made of this run's uploads alone")
    for data_set in {upload.data_set for upload in uploads}:
        charged = {(key.round, key.request) for key, _ in db.releases_of(data_set, run)}
        if not {(u.round, u.request) for u in uploads if u.data_set == data_set} <= charged:
            raise InputError(f"variant = {described.name!r}: is made of uploads that {path} has not charged")


def _check_budgets(saved: SavedVariant, summary: Mapping[str, Any], registered: _Registered) -> None:
    assert saved.config is not None
    view = saved.config.privacy_view
    for client in summary["clients"]:
        budget, spent = saved.config.budget_of(client["client"]), client[f"epsilon_{view}"]
        if budget is not None and (spent is None or spent > budget * (1 + 1e-9)):
            raise InputError(
                f"variant = {saved.name!r}: {_named(str(client['client']), registered)} has spent epsilon {spent} on "
                f"the {view} view, more than its budget {budget:g}"
            )


def _named(client: str, registered: _Registered) -> str:
    """The client by the name that it chose, with its number; by the number alone if the run does not know it."""
    return holder_label(client, str(registered.get(client, {}).get("name", "")))


def _check_ledger(db: LedgerConnection, path: Path, summary: Mapping[str, Any], registered: _Registered) -> None:
    """Refuse a ledger of another run, and noise of which the ledger says that it was seeded."""
    if db.number_of(str(summary.get("ledger_head"))) is None:
        raise LedgerError(
            f"{path}: has no entry {summary.get('ledger_head')}, with which the run ended; give its --ledger"
        )
    for client, fields in registered.items():
        own = [known for known in db.runs(fields["data_set"]) if known.run == summary.get("run_id")]
        if own and own[0].noise_source != "secure":
            raise InputError(
                f"{_named(client, registered)}: by {path} its noise was {own[0].noise_source}, which protects nobody"
            )


def _permission(
    db: LedgerConnection, path: Path, summary: Mapping[str, Any], client: str, registered: _Registered
) -> str:
    found = db.permission(registered.get(client, {}).get("data_set", ""), str(summary.get("run_id")))
    if found is None:
        raise InputError(
            f"variant: shows what {_named(client, registered)} uploaded, and {path} has no permission of that holder; "
            f"once you have it: fedpriv ledger permit {path} --client {client} --reason '...'"
        )
    return f"{_named(client, registered)}: permitted by entry {found.number} of the ledger: {found.note}"
