"""`fedpriv ledger ...` and `fedpriv evidence`: what every data set has spent, from its ledger."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from fedpriv.cli._command import OneOf, Result, command, entries, table
from fedpriv.errors import InputError
from fedpriv.texts import percent_up, risk_in_words

if TYPE_CHECKING:
    from fedpriv.holder.vault.settings import VaultSettings
    from fedpriv.privacy.accounting.views import PlannedView
    from fedpriv.privacy.ledger.evidence import Exhibit

app = typer.Typer(no_args_is_help=True, help="What every data set has spent, from its ledger.")

ViewName = Annotated[
    str | None,
    typer.Option(
        "--view",
        click_type=OneOf("fedpriv.privacy.accounting.views:PlannedView"),
        help="What a budget counts: each upload, or under secure aggregation the sum that shows it. By default as the "
        "settings in the ledger's folder say, of a node or a run.",
    ),
]
LedgerPath = Annotated[Path, typer.Argument(help="ledger.sqlite of a run, or a node's own ledger.")]

RunFolder = Annotated[
    Path | None,
    typer.Option("--run", help="A run's folder that knows the holders' names; by default the ledger's own folder."),
]

# The files of a node in which its operator sets limits.
_LIMITS = ("policy.toml", "vault.toml")

# What is told of a data set, and its heading.
HEADINGS = {
    "client": "client",
    "data_set": "data set",
    "num_records": "records",
    "runs": "runs",
    "rounds": "rounds",
    "epsilon_local": "ε local",
    "epsilon_rho": "ε rho",
    "epsilon_aggregate": "ε aggregate",
    "delta": "δ",
    "found": "found",
    "noise_source": "noise",
    "remaining_rounds": "left",
}


@command(app, "show")
def show_ledger(
    path: LedgerPath,
    budget_epsilon: Annotated[
        float | None, typer.Option(help="Show how many rounds this budget leaves, on the view; by default the node's.")
    ] = None,
    view: ViewName = None,
    run: RunFolder = None,
) -> Result:
    """Show what each client and data set has spent, by pld; with a budget, also the rounds that remain.

    In a node's folder, budget and view are those of its vault.toml; of a copy elsewhere, those it was charged under.

    On the aggregate view, an upload that the server saw by itself counts in full.

    Example: fedpriv ledger show results/ledger.sqlite --budget-epsilon 4
    """
    from fedpriv.privacy.ledger import reader, statement

    with reader.reading(path) as db:
        reader.verify_with_head(db, path)
        its_view, its_budget = reader.limit_of(db, path)
        if budget_epsilon is None and view in (None, its_view):  # on another view the budget bounds nothing
            budget_epsilon = its_budget
        view = view or its_view
        known = reader.holder_names(db, path, run)
        rows = statement.spending(db, names=known, budget_epsilon=budget_epsilon, view=cast("PlannedView", view))
        gaps = statement.gaps(db)
    lines = [*_spent(rows, view), *_worst(rows), *statement.gap_lines(**gaps)]
    lines += [
        f"{statement.label(row['client'], row['name'])}: enforced by {row['enforced_by']}"
        for row in rows
        if row["enforced_by"]
    ]
    if any(row["enforced_by"] for row in rows):
        lines.append(statement.ODOMETER)
    if any("remaining_rounds" in row for row in rows):
        lines.append(f"left: rounds like the last one until ε {budget_epsilon:g} on the {view} view")
    return Result({"ledger": str(path), "view": view, "data_sets": rows, **gaps}, lines)


def _spent(rows: list[dict[str, Any]], view: str = "local") -> list[str]:
    """A line for each data set, with what is known of it."""
    from fedpriv.privacy.ledger.statement import label

    rows = [row | {"found": percent_up(row["tpr_at_fpr"]["0.01"])} for row in rows]
    shown = {name for row in rows for name in row} | (HEADINGS.keys() - {"epsilon_aggregate", "remaining_rounds"})
    if view != "aggregate":
        shown.discard("epsilon_aggregate")
    epsilons = [name for name in HEADINGS if name.startswith("epsilon_")]
    first = sorted(epsilons, key=lambda name: name != f"epsilon_{view}")
    ordered = [first.pop(0) if name in epsilons else name for name in HEADINGS]
    headings = {name: HEADINGS[name] for name in ordered if name in shown}
    named = [{**row, "client": label(row["client"], row["name"]), "data_set": row["data_set"][:12]} for row in rows]
    named = [
        each | ({"num_records": f"{each['num_records']} persons"} if each["unit"] == "person" else {}) for each in named
    ]
    cells = [{heading: row.get(name) for name, heading in headings.items()} for row in named]
    return table(cells, list(headings.values()))


def _worst(rows: list[dict[str, Any]]) -> list[str]:
    """The largest risk of any data set, in words; `found` in the table is its figure."""
    from fedpriv.privacy.ledger.statement import label

    if not rows:
        return []
    worst = max(rows, key=lambda row: row["tpr_at_fpr"]["0.01"])
    whose = f"{label(worst['client'], worst['name'])}: " if len(rows) > 1 else ""
    first, *others = risk_in_words(worst, worst["delta"])
    return [f"{whose}{first}", *others]


@command(app)
def verify(
    path: LedgerPath,
    head: Annotated[
        str | None, typer.Option(help="A digest that a report or statement of this ledger printed: 64 hex digits.")
    ] = None,
) -> Result:
    """Check the hash chain from the first entry to the last, and that PATH.head agrees. Exit code 1 if not.

    With --head, also check that the chain still holds the entry with this digest: then no entry up to it was changed
    or lost since it was printed, even if somebody replaced both files.

    Example: fedpriv ledger verify results/ledger.sqlite

    Example: fedpriv ledger verify ledger.sqlite --head 94c1e3f70f2a4d6b8a5f0e9d7c6b5a493827160594c1e3f70f2a4d6b8a5f0e9d
    """
    from fedpriv.errors import LedgerError
    from fedpriv.privacy.ledger import reader, statement

    kept = None if head is None else head.strip().lower()
    if kept is not None and not re.fullmatch("[0-9a-f]{64}", kept):
        raise InputError(f"--head {head}: must be the 64 hex digits that a report or statement prints")
    with reader.reading(path) as db:
        last = reader.verify_with_head(db, path)
        number = None if kept is None else db.number_of(kept)
        gaps = statement.gaps(db)
    if kept is not None and number is None:
        raise LedgerError(
            f"{path}: its chain is intact but has no entry {kept}: entries were lost or replaced since that was printed"
        )
    values: dict[str, Any] = {"entries": last.number if last else 0, "head": last.digest if last else None}
    values |= {"intact": True} | ({} if number is None else {"kept_head_is_entry": number})
    return Result(values | gaps, [*entries(values), *statement.gap_lines(**gaps)])


@command(app)
def backup(
    path: LedgerPath,
    out: Annotated[Path, typer.Option(help="The copy to make, a new file, which gets a head of its own.")],
) -> Result:
    """Copy a ledger with all its entries and its head, also while a node or run writes it.

    Copies of the file alone lack what is still in PATH-wal. The copy is for its owner alone, as are the stored replies
    and the ledger's secret in it. Keep the digest that is printed: `fedpriv ledger verify` compares it.

    Example: fedpriv ledger backup node/ledger.sqlite --out /mnt/backup/ledger-2027-05-03.sqlite
    """
    from fedpriv.privacy.ledger import reader
    from fedpriv.privacy.ledger.head_file import head_path

    if out.exists() or head_path(out).exists():
        raise InputError(f"--out {out}: it or its head exists; name a new file")
    if not out.parent.is_dir():
        raise InputError(f"--out {out}: its folder does not exist; make it first")
    with reader.reading(path) as db:
        reader.verify_with_head(db, path)
        last = reader.write_copy(db, out)
    values = {"backup": str(out), "entries": last.number if last else 0, "head": last.digest if last else None}
    return Result(values, entries(values))


@command(app, "adopt-head")
def adopt_head(
    path: LedgerPath,
    reason: Annotated[
        str | None, typer.Option(help="Why you vouch that no entry is missing; it is logged. Without it, only look.")
    ] = None,
) -> Result:
    """Go on with a ledger whose PATH.head is missing or unreadable. Without --reason it only shows what is there.

    Compare the number of entries, the last digest and the spending with the last statement or report that you have:
    what was lost at the end would be spent a second time. With --reason the ledger gets an entry that says so and a new
    head; every later statement repeats it. An intact head needs no adoption, and one that names entries that the
    ledger lacks cannot be adopted: restore the newest copy.

    Example: fedpriv ledger adopt-head node.sqlite

    Example: fedpriv ledger adopt-head node.sqlite --reason "moved to a new disk; statement of 3 May has the same head"
    """
    from fedpriv.privacy.ledger import reader, statement
    from fedpriv.privacy.ledger.ledger import Ledger

    if reason is not None and not reason.strip():
        raise InputError("--reason: must not be empty; it is what a later reader of this ledger's statements sees")
    with reader.reading(path) as db:
        last = reader.verify_without_head(db, path)
        rows = statement.spending(db, names=reader.holder_names(db, path, None), view=reader.limit_of(db, path)[0])
    values: dict[str, Any] = {"entries": last.number if last else 0, "head": last.digest if last else None}
    if reason is not None:
        with Ledger(path, adopting=reason.strip()) as ledger:
            values |= {"adopted_by_entry": ledger.last[0], "new_head": ledger.head}
    lines = [*_spent(rows), *entries(values)]
    if reason is None:
        lines.append("nothing is adopted yet: compare this with your last statement, then give --reason")
    return Result({**values, "data_sets": rows}, lines)


@command(app)
def recover(
    path: LedgerPath,
    sources: Annotated[
        list[Path],
        typer.Option(
            "--from",
            help="What knows more: receipts.jsonl of this node or a peer, its counter file or events.jsonl, the "
            "coordinator's *.receipts or receipts.jsonl, or another ledger. Give it once for each.",
        ),
    ],
    key: Annotated[
        Path | None,
        typer.Option(help="The node's vault.key.pub, with its vault.key.earlier; by default in the ledger's folder."),
    ] = None,
    reason: Annotated[
        str | None, typer.Option(help="Why the ledger lacks charges; it is logged. Without it, only look.")
    ] = None,
) -> Result:
    """Charge what a node's ledger lacks since it was restored from an old copy. Without --reason, only show that.

    What a receipt under a key of the node proves is charged with its event. If one proves a charge of which no source
    has the detail, its data set counts as spent in full, and releases nothing more. What only another ledger claims,
    such as the coordinator's, is charged too: a false claim costs budget. Stop the node first, and restore the newest
    copy of the ledger together with its head.

    Example: fedpriv ledger recover node.sqlite --from receipts.jsonl

    Example: fedpriv ledger recover node.sqlite --from receipts.jsonl --from coordinator.receipts --reason "new disk"
    """
    from fedpriv.privacy.ledger import keys, reader, receipts, statement
    from fedpriv.privacy.ledger.ledger import Ledger

    if reason is not None and not reason.strip():
        raise InputError("--reason: must not be empty; it is what a later reader of this ledger's statements sees")
    key = key or path.with_name("vault.key.pub")
    signers = (keys.read_public_line(key, None), *keys.read_lines(key.with_suffix(keys.EARLIER)))
    with reader.reading(path) as db:
        reader.verify_with_head(db, path)
        found = [each for each in receipts.missing(db, sources, signers) if each]
    if reason is not None and found:
        with Ledger(path) as ledger:
            ledger.recover(found, reason.strip())
    with reader.reading(path) as db:
        rows = statement.spending(db, names=reader.holder_names(db, path, None), view=reader.limit_of(db, path)[0])
    releases = [
        {"data_set": each.data_set.id, "run": link.run, "round": link.round, "event": link.event, "known_by": how}
        for each in found
        for how, links in (("receipt", each.proven), ("claim", each.claimed))
        for link in links
    ]
    retired = [each.data_set.id for each in found if each.unknown]
    cells = [{name: str(value)[:16] for name, value in each.items()} for each in releases]
    lines = table(cells, ["data_set", "run", "round", "known_by"]) if cells else []
    lines += [f"data set {id_}: more was released than the sources know; it counts as spent in full" for id_ in retired]
    if not found:
        lines.append("nothing is missing, as far as these sources know")
    elif reason is None:
        lines.append("nothing is charged yet: compare this with what you know, then give --reason")
    charged = reason is not None
    return Result(
        {"ledger": str(path), "missing": releases, "retired": retired, "charged": charged, "data_sets": rows},
        [*lines, *_spent(rows)],
    )


@command(app)
def statement(
    path: LedgerPath,
    client: Annotated[
        str | None,
        typer.Option(
            help="Number or name of the client, as `ledger show` lists them; the number goes first. By default all."
        ),
    ] = None,
    view: ViewName = None,
    run: RunFolder = None,
    since: Annotated[
        str, typer.Option(help="YYYY-MM-DD: list runs and refused requests from then on, and what that part cost.")
    ] = "",
    year: Annotated[
        str, typer.Option(help="YYYY: begin with who, what, when, how much, what is left, and who changed limits.")
    ] = "",
    erasures: Annotated[
        bool, typer.Option("--erasures", help="List the dates of erasures at this node; not for others' eyes.")
    ] = False,
) -> Result:
    """One page for a privacy officer: what a client's data have spent, what that covers and what it does not.

    With --view aggregate it also states what the releases cost where the server saw sums alone. With --year it first
    answers what an ethics board asks once a year; in a node's folder, its history tells of limits.

    Example: fedpriv ledger statement results/ledger.sqlite --client 2

    Example: fedpriv ledger statement node/ledger.sqlite --year 2026

    Example: fedpriv ledger statement node/ledger.sqlite --client 0 --since 2027-01-01

    Example: fedpriv ledger statement results/ledger.sqlite --client Northgate
    """
    from fedpriv.privacy.ledger import reader
    from fedpriv.privacy.ledger import statement as statements
    from fedpriv.privacy.ledger.entries import LATER

    try:
        since = since and date.fromisoformat(since).isoformat()
    except ValueError:
        raise InputError(f"--since {since}: must be a date such as 2027-01-31") from None
    if year and (since or not re.fullmatch(r"[1-9]\d{3}", year)):
        raise InputError(f"--year {year}: must be a year such as 2026, and without --since")
    begin, end = (year, f"{year}-12-31~") if year else (since, LATER)
    with reader.reading(path) as db:
        known = reader.holder_names(db, path, run)
        pages = statements.statement(
            db,
            path,
            client,
            names=known,
            view=cast("PlannedView | None", view),
            since=since,
            year=year,
            changes=_limits_changed(path.parent, begin, end) if year else None,
        )
    lines = ["\n\n".join(map(statements.render, pages))]
    days = {"erasures": reader.erasures_in(path.parent, begin, end)} if erasures else {}
    if erasures:
        told = ", ".join(days["erasures"]) or f"none is noted in {path.parent}"
        lines.append(f"\nErasures at this node, not to be handed on: {told}")
    return Result({"client": client, "statements": pages, **days}, lines)


def _limits_changed(folder: Path, begin: str, end: str) -> list[str] | None:
    """A line on each key that was changed in a node's limits and settings, with who did, from a time to before another.

    None where the folder is no node's.

    Raises:
        LedgerError: the node's history is broken.
    """
    from fedpriv.holder.vault import history
    from fedpriv.privacy.ledger.reader import NODE

    if not (folder / NODE).is_file():
        return None
    changes = [line for line in history.read(folder) if begin <= line.time < end and line.file in _LIMITS]
    return [
        f"{line.time[:10]} {line.user or line.uid}, {line.command}: {line.file}: {key}: {before} -> {since}"
        for line in changes
        for key, (before, since) in line.values.items()
    ]


@command(app)
def register(
    path: LedgerPath,
    client: Annotated[str, typer.Option(help="Id of the client that holds the data.")],
    num_records: Annotated[int, typer.Option(help="N_k, which never changes afterwards.")],
    disjoint: Annotated[
        str | None, typer.Option(help="Your statement why no record is in an earlier data set of this ledger.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="By default 1 / (10 N_k), at most 1e-5.")] = None,
    new: Annotated[bool, typer.Option("--new", help="Make the ledger, of which there is none yet.")] = False,
) -> Result:
    """Register a data set in a node's ledger: it gets a random id and starts with nothing spent.

    A node registers its first data set by itself. Any further one needs your statement that it shares no record with
    the earlier ones: otherwise records that have already paid would start again at zero. This command sees no records;
    `fedpriv node register` on the node compares them with those of earlier data sets first.

    Example: fedpriv ledger register node.sqlite --client 2 --num-records 5000 --disjoint "admissions of 2027 only"

    Example: fedpriv ledger register node.sqlite --client 2 --num-records 5000 --new
    """
    from fedpriv.privacy.accounting.accountants import check_delta
    from fedpriv.privacy.accounting.views import default_delta
    from fedpriv.privacy.ledger.ledger import Ledger

    if num_records < 1:
        raise InputError(f"--num-records {num_records}: must be >= 1")
    delta = default_delta(num_records) if delta is None else delta
    check_delta(delta)
    if path.exists() == new:
        found = "is there already; leave out --new" if new else "no such ledger; give its path, or --new to make one"
        raise InputError(f"{path}: {found}")
    with Ledger(path) as opened:
        if opened.data_set() is not None and not (disjoint or "").strip():
            raise InputError("--disjoint: this ledger holds a data set; say why the new one shares no record with it")
        made = opened.register(client, num_records, delta, note=disjoint)
    values = {"data_set": made.id, "client": client, "num_records": num_records, "delta": delta}
    return Result(values, entries(values))


@command(app)
def permit(
    path: LedgerPath,
    client: Annotated[str, typer.Option(help="Id of the client whose uploads may be published.")],
    reason: Annotated[str, typer.Option(help="Who gave this permission, when and how; every later reader sees it.")],
    run: Annotated[
        str, typer.Option(help="Id of the run; by default the one charged last, and for --withdraw the one permitted.")
    ] = "",
    withdraw: Annotated[bool, typer.Option("--withdraw", help="End a permission instead.")] = False,
) -> Result:
    """Record that a data holder lets its own variant of a run be published; `fedpriv push` asks for this entry.

    The keeper of the ledger vouches that the holder agreed. It is never removed; --withdraw adds another
    entry, and calls nothing back that was published already.

    Example: fedpriv ledger permit results/ledger.sqlite --client 2 --reason "letter of Dr Huber, 3 May 2027"
    """

    from fedpriv.privacy.ledger import reader, statement
    from fedpriv.privacy.ledger.ledger import Ledger

    if not reason.strip():
        raise InputError("--reason: must not be empty; say who gave this permission, when and how")
    with reader.reading(path) as db:
        data_sets = statement.of_client(db, path, client, reader.holder_names(db, path, None))
        charged = [each for each in db.charged_last(data_sets) if run in ("", each[1])]
        standing = [each for each in charged if db.permission(each[0].id, each[1]) is not None]
    if not charged:
        raise InputError(f"--client {client}: {path} has no upload of this client" + (f" in run {run}" if run else ""))
    if withdraw and len(standing) > 1:
        permitted = ", ".join(known_run for _, known_run in standing)
        raise InputError(f"--withdraw: client {client} has permitted several runs ({permitted}); say which with --run")
    data_set, known_run = standing[0] if withdraw and standing else charged[-1]
    with Ledger(path) as opened:
        opened.permit(data_set, known_run, reason.strip(), withdraw=withdraw)
        head = opened.head
    values = {"client": client, "data_set": data_set.id, "run": known_run, "permitted": not withdraw, "head": head}
    return Result(values, entries(values))


def evidence(
    path: Annotated[
        Path, typer.Argument(metavar="RUN|LEDGER", help="Folder of a run, a sweep or a node; or a ledger's file.")
    ],
    out: Annotated[Path, typer.Option(help="The bundle to write, a zip.")],
) -> Result:
    """Write a bundle with which anyone can compute the figures of a ledger again, without fedpriv.

    It holds entries, receipts, registrations, schedule, digests, every figure that was printed, and verify_evidence.py,
    which checks them: `python verify_evidence.py BUNDLE.zip` exits with 0 if all is confirmed. It holds no record, text
    or seed. A node's bundle tells when its records' file changed: it is for those who may see the ledger.

    Example: fedpriv evidence results/20261121-042553-embedded --out bundle.zip

    Example: fedpriv evidence node/ledger.sqlite --out bundle.zip
    """
    from fedpriv.privacy.ledger.evidence import write_evidence

    values = write_evidence(out, _sources(path))
    return Result(values, entries({**values, "check": f"unzip {out} verify_evidence.py, then run it on {out}"}))


def _sources(path: Path) -> dict[str, Exhibit]:
    """{folder in the bundle: ledger} of what a path names."""
    from fedpriv.holder.vault.settings import FILE, VaultSettings
    from fedpriv.privacy.ledger.evidence import Exhibit
    from fedpriv.runs import files

    folder = path if path.is_dir() else path.parent
    if (folder / FILE).is_file():
        return {"node": _of_node(VaultSettings.read(folder))}
    if not path.is_dir():
        return {"ledger": Exhibit(ledger=path)}
    if (path / files.CONFIG).is_file():
        return {"run": _of_run(path)}
    runs = sorted(file.parent for file in path.glob(f"*/{files.SUMMARY}"))
    return {run.name: _of_run(run) for run in runs if files.SWEEP_KEY.fullmatch(run.name)}


def _of_node(node: VaultSettings) -> Exhibit:
    from fedpriv.holder.vault.settings import read_models
    from fedpriv.privacy.ledger import keys
    from fedpriv.privacy.ledger.evidence import Exhibit

    return Exhibit(
        ledger=node.ledger,
        receipts=(node.receipts,),
        models={model.digest: Path(model.name).name for model in read_models(node.models)},
        inclusions=node.inclusions,
        coordinator=keys.read_public_line(node.coordinator) if node.coordinator.is_file() else "",
        policy=node.policy,
        budget=None if node.budget_epsilon is None else (node.budget_epsilon, node.budget_view),
    )


def _of_run(folder: Path) -> Exhibit:
    from fedpriv.holder.wire import frame
    from fedpriv.learning.adapters import public_name, weights_digests
    from fedpriv.privacy.ledger import keys
    from fedpriv.privacy.ledger.evidence import Exhibit
    from fedpriv.runs import RunFolder, files

    run = RunFolder(folder)
    model, ledger = str(run.config["model"]), str(run.config.get("ledger") or "")
    key = keys.public_path(keys.coordinators(Path(run.config.get("node_keys") or folder)))
    return Exhibit(
        ledger=folder / files.LEDGER,
        receipts=(Path(f"{ledger}.receipts") if ledger else folder.parent / "receipts.jsonl",),
        registrations={
            client: {"version": frame.VERSION, **registered}
            for client, registered in files.read_values(folder / files.REGISTRATIONS, optional=True).items()
        },
        inclusions=folder / files.INCLUSIONS,
        coordinator=keys.read_public_line(key) if key.is_file() else "",
        config=run.config,
        environment=run.environment,
        summary=run.summary,
        models={public_name(model): weights_digests(model)},
    )
