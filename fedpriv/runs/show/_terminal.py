"""The status of a run in the terminal: its figures, a row for each client, and the last events."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedpriv.runs import ClientStatus, RunFolder, RunStatus, files, spent_on_view, status_of
from fedpriv.runs.figures import MISSING, figures, format_bound, format_delta, format_seconds
from fedpriv.runs.show._tables import TextTable
from fedpriv.texts import holder_label, of_whom, what_is_counted
from fedpriv.texts import printable as _printable

# If there are more clients, only those in trouble are listed.
MAX_CLIENTS = 40
_STYLES = {"finished": "bold green", "running": "bold cyan", "interrupted": "bold red", "unknown": "bold yellow"}
_BY_STATUS = "rounds by status"
_SHOWN_APART = ("time", "event", "run", "round", "client")


def show_status(folder: RunFolder, console: Console) -> None:
    """Print the status of the run in the folder; InputError if it holds no run, or one of its files is damaged."""
    run = status_of(folder)
    console.print(_figures(folder, run))
    if run.resume_command:  # outside the table, so that it can be copied in one piece
        console.print(f"\nresume with\n  {_printable(run.resume_command)}", soft_wrap=True, markup=False)
    for warning in run.warnings:
        console.print(Text.assemble(("\nwarning: ", "bold red"), _printable(warning)))
    if run.clients:
        console.print()
        console.print(_client_table(run, spent_on_view(folder)))
        for line in _notes(run):
            console.print(line)
    if run.events or run.num_unreadable_events:
        console.print()
        for line in _event_lines(run):
            console.print(line, no_wrap=True, overflow="ellipsis")


def _figures(folder: RunFolder, run: RunStatus) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    grid.add_row("run", Text(_printable(run.run_dir)))
    grid.add_row("state", _state(run))
    grid.add_row("written", Text(_age(run)))
    if run.stopped_early:
        grid.add_row("ended early", Text(_printable(run.stopped_early)))
    for figure in figures(folder, "terminal"):
        grid.add_row(figure.label, Text(_printable(figure.text), style="bold red" if figure.is_alarming else ""))
    grid.add_row("page", Text(page_line(folder.path)))
    return grid


def page_line(path: Path) -> str:
    """The place of a folder's report, as a browser takes it; a dash before there is one."""
    page = path.absolute() / files.REPORT
    return _printable(page.as_uri()) if page.is_file() else MISSING


def plain_table(content: TextTable) -> Table:
    """A table with its caption as a title."""
    table = Table(title=content.caption, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for header in content.headers:
        table.add_column(header, no_wrap=bool(header) or not table.columns)
    for row in content.rows:
        table.add_row(*map(Text, row))
    return table


def _state(run: RunStatus) -> Text:
    return Text.assemble((run.state, _STYLES[run.state]), f", engine {_printable(run.engine)}" if run.engine else "")


def _age(run: RunStatus) -> str:
    age = f"{format_seconds(run.seconds_since_change)} ago"
    if run.state == "unknown":
        return f"{age}; from this machine, or since it was restarted, nobody can tell whether the run lives"
    if run.state != "running":
        return age
    if run.is_alive:
        return f"{age}; its process lives"
    return f"{age}; after {format_seconds(run.round_seconds)} without a sign of life it counts as interrupted"


def clients_so_far(run: RunStatus, spent: Mapping[int, float | None]) -> TextTable:
    """A row for each client; of many clients, only for those in trouble."""
    num_unlisted = len(run.clients) - len(_listed(run.clients))
    more = f"; {num_unlisted:,} more are in clients.csv" if num_unlisted else ""
    return TextTable(
        caption=f"ε{of_whom(run.unit)} on the {run.privacy_view} view, by {run.accountant}{more}",
        headers=("client", what_is_counted(run.unit), "round", f"ε {run.privacy_view}", "δ", "status", _BY_STATUS),
        rows=tuple(_client_cells(client, spent[client.client]) for client in _listed(run.clients)),
    )


def _client_table(run: RunStatus, spent: Mapping[int, float | None]) -> Table:
    """The clients' table; on a narrow terminal a name may be cut, but never a figure."""
    content = clients_so_far(run, spent)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_edge=False)
    for position, header in enumerate(content.headers):
        width = max(
            len(line) for cell in (header, *(row[position] for row in content.rows)) for line in cell.split("\n")
        )
        is_figure = header not in ("client", "status", _BY_STATUS)
        table.add_column(
            header, justify="right" if is_figure else "left", no_wrap=True, min_width=width if position else None
        )
    for client, (*cells, status, counts) in zip(_listed(run.clients), content.rows, strict=True):
        style = "red" if client.is_troubled else ""
        table.add_row(*map(Text, cells), Text(status, style=style), Text(counts))
    return table


def _client_cells(client: ClientStatus, epsilon: float | None) -> tuple[str, ...]:
    # A status and its number stay on one line.
    counts = ", ".join(f"{name} {number}".replace(" ", "\0") for name, number in client.status_counts.items())
    lines = [_printable(line.replace("\0", " ")) for line in wrap(counts, 24)]
    return (
        _printable(holder_label(client.client, client.name).removeprefix("client ")),
        f"{client.num_records:,}",
        MISSING if client.last_round is None else str(client.last_round),
        MISSING if epsilon is None else format_bound(epsilon),
        format_delta(client.delta),
        state_of(client),
        "\n".join(lines),
    )


def state_of(client: ClientStatus) -> str:
    """One word for why a client is not asked, for what it does in this round, or for how its last one ended."""
    if client.retired is not None:
        return "retired"
    return "skipped" if client.skipped else _printable(client.doing or client.status or "not asked")


def troubles(run: RunStatus) -> list[tuple[str, str]]:
    """The listed clients that are in trouble, with the reason, as far as one is known."""
    silence = "its node stopped answering; not asked, and not charged, until it registers again"
    known = [
        (holder_label(client.client, client.name), client.retired or (silence if client.skipped else client.detail))
        for client in _listed(run.clients)
        if client.is_troubled
    ]
    return [(who, _printable(reason)) for who, reason in known if reason]


def _listed(clients: tuple[ClientStatus, ...]) -> list[ClientStatus]:
    """All clients, or only those in trouble if there are many."""
    if len(clients) <= MAX_CLIENTS:
        return list(clients)
    return [client for client in clients if client.is_troubled][:MAX_CLIENTS]


def _notes(run: RunStatus) -> Iterable[Text]:
    """Yield how many clients are not listed, and the trouble of those that are."""
    listed = _listed(run.clients)
    if num_unlisted := len(run.clients) - len(listed):
        num_troubled = sum(client.is_troubled for client in run.clients)
        num_listed = sum(client.is_troubled for client in listed)
        also = f", {num_troubled - num_listed} of them in trouble" if num_troubled > num_listed else ""
        yield Text(f"{num_unlisted:,} more clients{also}; --json lists all", style="dim")
    for who, reason in troubles(run):
        yield Text.assemble((f"{who}: ", "red"), reason)


def last_events(run: RunStatus) -> TextTable:
    """The last events of the run: time (UTC), name, and the client and the values that each of them names."""
    unreadable = f", {run.num_unreadable_events:,} unreadable lines" if run.num_unreadable_events else ""
    return TextTable(
        caption=f"last of {run.num_events:,} events (UTC){unreadable}",
        headers=("time", "event", ""),
        rows=tuple(_event_cells(event) for event in run.events),
    )


def _event_lines(run: RunStatus) -> Iterable[Text]:
    events = last_events(run)
    yield Text(events.caption, style="dim")
    width = max((len(name) for _, name, _ in events.rows), default=0)
    for moment, name, rest in events.rows:
        yield Text.assemble((moment, "dim"), f"  {name:<{width}}  {rest}")


def _event_cells(event: Mapping[str, Any]) -> tuple[str, ...]:
    fields = {name: value for name, value in event.items() if value not in (None, "")}
    keys = [f"{name} {fields[name]}" for name in ("round", "client") if name in fields]
    others = [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in fields.items()
        if name not in _SHOWN_APART
    ]
    cells = (str(event["time"])[:19].replace("T", " "), event["event"], ", ".join([*keys, *others]))
    return tuple(map(_printable, cells))
