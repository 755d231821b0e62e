"""A node's own records, read when its operator registers or counts them: how many there are, with which labels."""

from __future__ import annotations

import gzip
import json
import os
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from fedpriv.errors import InputError
from fedpriv.files import owner_for, owner_of, read_text, replace_file, sync_folder
from fedpriv.holder.vault.settings import VaultSettings
from fedpriv.privacy.ledger.entries import DataSet
from fedpriv.privacy.ledger.reader import ERASURES, erasures_in
from fedpriv.texts import counted

if TYPE_CHECKING:
    from fedpriv.holder.vault import Choice
    from fedpriv.learning.data import CheckedColumns, OwnRecord
    from fedpriv.privacy.accounting.filters import CommittedPlan, GaussianFilter, RenyiFilter, Rule
    from fedpriv.privacy.ledger.ledger import Ledger


@dataclass(frozen=True, kw_only=True)
class Found:
    """The figures of a file of records.

    Attributes:
        num_records: of the whole file, whatever label a record has.
        num_persons: whom these are about, whatever labels a person's records have; None where the unit is the record.
        counts: number of records of each agreed label, in the agreed order.
        num_other_labels: records with a label that was not agreed on; nothing trains on them.
        num_without_label: records that have none.
        num_empty: records whose text is empty, or whose response is.
        warnings: likely mistakes, a line each, for the operator's terminal alone.
        content: of all records that a run would read, or of those among the first so many, as its reading notes it.
    """

    num_records: int
    num_persons: int | None
    counts: Mapping[str, int]
    num_other_labels: int
    num_without_label: int
    num_empty: int
    warnings: Sequence[str]
    content: Callable[[int | None], bytes] = field(repr=False)

    @property
    def num_units(self) -> int:
        """N_k: persons, or records where these are the unit."""
        return self.num_records if self.num_persons is None else self.num_persons

    def lines(self) -> list[str]:
        """The lines that tell the operator."""
        found = [f"found {self.num_records} records, {self.num_empty} of them empty"]
        if self.num_persons is not None:
            found.append(f"they are about {self.num_persons} persons, whom the node protects and registers")
        if self.counts:
            found.append("labels: " + ", ".join(f"{label} {number}" for label, number in self.counts.items()))
            others = f"{self.num_other_labels} records have another label and {self.num_without_label} have none"
            counted = "they count in N_k, and " if self.num_persons is None else ""
            found.append(f"{others}: {counted}nothing trains on them")
        return [*found, *(f"warning: {line}" for line in self.warnings)]


def check_terms(vault: VaultSettings) -> None:
    """Refuse settings that leave to a coordinator what the operator of a node with records of its own must decide.

    Raises:
        InputError: one line that names the setting.
    """
    if vault.data is None:
        return
    check_budget(vault)
    check_columns(vault)
    check_labels(vault)


def check_columns(vault: VaultSettings) -> None:
    """Refuse columns that make no record together.

    Raises:
        InputError: one line that names the setting.
    """
    source = vault.source
    if source.messages_column and (source.prompt_column or source.response_column):
        raise InputError(
            f"messages_column = {source.messages_column!r}: holds prompts and responses; leave out prompt_column and "
            "response_column"
        )
    if source.choice_columns and not (source.prompt_column and source.response_column):
        raise InputError(
            f"choice_columns = {','.join(source.choice_columns)}: go with a prompt_column, and a response_column that "
            "says which choice is right; give both"
        )
    if not source.messages_column and bool(source.prompt_column) != bool(source.response_column):
        missing = "response_column" if source.prompt_column else "prompt_column"
        raise InputError(f"{missing}: required, since prompts are learned with their responses; give both columns")
    if source.text_pair_column and not source.instructs and not vault.label_column:
        raise InputError(
            f"text_pair_column = {source.text_pair_column!r}: a causal model would join the two texts; give "
            "--prompt-column and --response-column"
        )


def check_budget(vault: VaultSettings) -> None:
    """Refuse a node that spends without end.

    Raises:
        InputError: it has records of its own, and no budget.
    """
    if vault.data is not None and vault.budget_epsilon is None:
        raise InputError("budget_epsilon: required for records of the node's own; give --budget-epsilon, such as 4")


def check_labels(vault: VaultSettings) -> None:
    """Refuse labels that are not two or more classes, each named once; or labels without a column.

    Raises:
        InputError: one line that says which.
    """
    if vault.data is None or (vault.source.instructs and not vault.labels):
        return
    if not vault.label_column and not vault.source.instructs:
        if vault.labels:
            raise InputError("labels: given without a label_column; causal models have neither")
        return
    if not vault.labels:
        raise InputError(
            "labels: required, the classes in the order that all holders agreed on; give --labels a,b,c, or "
            '--label-column "" for causal models'
        )
    if len(vault.labels) < 2 or len(set(vault.labels)) < len(vault.labels) or "" in vault.labels:
        raise InputError(f"labels = {','.join(vault.labels)}: must be two or more names, each once")


def find(vault: VaultSettings) -> Found:
    """The figures of the node's file, of which every record must be readable.

    Likely mistakes in it are for the operator's terminal, and nothing keeps them.

    Raises:
        InputError: the file, a column or a record cannot be used, or a likely mistake is refused.
    """
    from fedpriv.learning.data import mistakes, read_strictly, refused  # slow to import

    records = read_strictly(vault.source)
    name = f"data = {str(vault.data)!r}"
    how = "`fedpriv data check` lists all, and --fix OUT.jsonl mends a copy; if all is right, set table_checks = warn"
    warnings = refused(mistakes(_columns(records, vault)), vault.table_checks, name, how)
    instructs = vault.source.instructs
    labels = Counter(record.label for record in records) if vault.labels and not vault.choice_columns else Counter()
    num_without_label = labels.pop(None, 0)
    counts = {label: labels[label] for label in vault.labels if not vault.choice_columns}
    return Found(
        num_records=len(records),
        num_persons=len({record.person for record in records if record.person.strip()})
        if vault.person_column
        else None,
        counts=counts,
        num_other_labels=labels.total() - sum(counts.values()),
        num_without_label=num_without_label,
        num_empty=sum(not (record.pair if instructs else record.text).strip() for record in records),
        warnings=warnings,
        content=partial(_content, records, vault),
    )


def _columns(records: Sequence[OwnRecord], vault: VaultSettings) -> CheckedColumns:
    """The texts in which mistakes are looked for, and the labels if there are agreed ones."""
    from fedpriv.learning.data import CheckedColumns

    source = vault.source
    texts = {source.prompt_column or source.messages_column or source.text_column: [record.text for record in records]}
    if second := source.response_column or source.text_pair_column:
        texts[second] = [record.pair for record in records]
    if source.choice_columns or (source.instructs and vault.labels):
        texts.pop(source.response_column, None)
    return CheckedColumns(
        texts=texts,
        labels=[record.label for record in records] if vault.labels and not source.choice_columns else (),
        persons=[record.person for record in records] if vault.person_column else (),
        classes=vault.labels,
        places=[record.place for record in records],
        unit=source.unit,
    )


def _content(records: Sequence[OwnRecord], vault: VaultSettings, first: int | None = None) -> bytes:
    """The records as a run's note has them."""
    from fedpriv.learning.data.federated import of_own

    return repr(of_own(records[:first], vault.source, vault.labels)).encode()


def register(
    vault: VaultSettings,
    ledger: Path,
    found: Found,
    *,
    disjoint: str | None = None,
    plan: Path | None = None,
    filter_: str | None = None,
    plan_delta: float | None = None,
) -> DataSet:
    """The node's data set in its ledger, registered now if there is none; N_k is that of its registration.

    Args:
        vault: of the node.
        ledger: its ledger.
        found: what the records are.
        disjoint: registers another data set even if there is one: why it shares no record with those before.
        plan, filter_, plan_delta: of the new data set, as for `bound`; without them a Renyi filter enforces its budget.

    Raises:
        InputError: an earlier data set held the same records, so it is not disjoint from this one; the ledger is that
            of other records, or has another delta; or the plan or filter cannot be used; nothing was written.
        LedgerError: the ledger cannot be used.
    """
    from fedpriv.holder.vault import rule_note
    from fedpriv.privacy.accounting.views import default_delta  # slow to import
    from fedpriv.privacy.ledger.ledger import Ledger

    client, delta = str(vault.partition_id), vault.delta or default_delta(found.num_units)
    planned = DataSet(id="", client=client, num_records=found.num_units, delta=delta)

    def note() -> str | None:
        if vault.budget_epsilon is None:
            return None
        chosen = _choice(vault, planned, plan, filter_, plan_delta)
        return rule_note(chosen, vault.budget_epsilon, planned.delta_for_releases)

    if not ledger.exists():
        note()  # refused before there is a ledger
    with Ledger(ledger) as opened:
        known = opened.data_set()
        if known is not None and disjoint is None:
            _check_own(opened, known, found, vault)
            return known
        if (same := _held_before(opened, found)) is not None:
            raise InputError(
                f"data = {str(vault.data)!r}: holds the same records as data set {same.id} of {ledger}, and maybe "
                "more; what was spent on them counts, so name a file of other records alone in vault.toml"
            )
        made = opened.register(client, found.num_units, delta, note=disjoint, bound=note())
        opened.log_content(made, found.content(None))
    return made


def _check_own(ledger: Ledger, known: DataSet, found: Found, vault: VaultSettings) -> None:
    """Refuse a ledger of other records, by the note on its content, or without one by what was registered."""
    known.check_fixed(ledger.path, delta=vault.delta)
    if not ledger.content_changes(known.id):
        known.check_fixed(ledger.path, client=vault.partition_id, num_records=found.num_units)
    elif (held := _held_before(ledger, found)) is None or held.id != known.id:
        raise InputError(
            f"ledger = {str(ledger.path)!r}: was kept for other records than those in {vault.data}; name their own "
            "ledger or none, or if they only changed since, name it as ledger_file in vault.toml afterwards"
        )


def _held_before(ledger: Ledger, found: Found) -> DataSet | None:
    """A data set that had all of these records, or the first of them; None if none is known to have had them.

    Where persons are the unit, N_k does not say how many records there were, so a file that has grown is not found.
    """
    if (same := ledger.data_set_with(found.content(None))) is not None:
        return ledger.data_set(same)
    grown = [each for each in ledger.data_sets() if each.num_records < found.num_records]
    return next((each for each in grown if ledger.data_set_with(found.content(each.num_records)) == each.id), None)


def compared(vault: VaultSettings, found: Found) -> Iterator[str]:
    """Lines on what counts of a node's records now, against what is registered, for the operator's terminal alone.

    Raises:
        InputError: nothing is registered.
        LedgerError: the ledger cannot be used.
    """
    from fedpriv.privacy.ledger.ledger import Ledger  # slow to import

    if not vault.ledger.is_file():
        raise InputError(f"{vault.ledger}: no data set is registered; make the node with `init --data`")
    with Ledger(vault.ledger) as ledger:
        data_set = ledger.data_set()
        held = _held_before(ledger, found)
    if data_set is None:
        raise InputError(f"{vault.ledger}: no data set is registered; make the node with `init --data`")
    yield f"registered N_k = {data_set.num_records}, data set {data_set.id}, to which all that trains is charged"
    if held is not None and held.id != data_set.id:
        yield f"warning: these are records of data set {held.id}, which had been registered before; name others as data"
    more, what = found.num_units - data_set.num_records, "record" if found.num_persons is None else "person"
    if more > 0:
        yield (
            f"{counted(more, what)} more than registered: from the next start on all train, on what is left of the "
            "same budget; N_k, and what follows from it, stays"
        )
        yield f"so that replies have time for them, set max_records in vault.toml to a number above {found.num_units}"
        yield (
            "or, for a budget of their own, put them into a file of their own before that start, name it as data in "
            f"vault.toml, and run: fedpriv node register {shlex.quote(str(vault.folder))} --disjoint TEXT"
        )
    elif more < 0:
        yield f"{counted(-more, what)} fewer than registered: N_k stays, and so does what was charged"
    else:
        yield "as many as registered"


def erase(vault: VaultSettings, person: str, column: str = "") -> None:
    """Delete a person's records from the file of a node that is stopped, and its kept tokens, and note the day.

    The note says nothing else, and stays in the node's folder. N_k stays as it was registered.

    Args:
        vault: of the node.
        person: as the file names them.
        column: that says whom a record is about; empty for the node's own `person_column`.

    Raises:
        InputError: there is no such column or person, nobody else is in the file, or it cannot be edited such that all
            other records stay as they are; nothing was changed.
    """
    from fedpriv.learning.data import read_strictly  # slow to import

    if vault.data is None or not (column := column or vault.person_column):
        raise InputError("--column: required, since vault.toml names no file with a person_column")
    source, person = replace(vault.source, person_column=column), person.strip()
    found = read_strictly(source)
    places = {record.place for record in found if person and record.person.strip() == person}
    left = [record for record in found if record.place not in places]
    if not places or not left:
        who = "nobody else is" if places else "nobody of this name is"
        raise InputError(f"data = {str(vault.data)!r}: {who} in column {column!r}; nothing is erased")
    data = vault.data.resolve()
    old, owner = data.stat(), owner_of(data) if os.geteuid() == 0 else None
    with TemporaryDirectory(dir=data.parent, prefix=".") as beside:  # closed to all others
        new = Path(beside, data.name)
        replace_file(new, _without(data, places), mode=old.st_mode & 0o777, owner=owner)
        if read_strictly(replace(source, data=str(new))) != left:
            raise InputError(f"data = {str(data)!r}: its other records would change; delete this one's lines by hand")
        vault.tokens.unlink(missing_ok=True)
        new.replace(data)
    sync_folder(data)
    days = "\n".join([*erasures_in(vault.folder), f"{datetime.now(UTC).date()}\n"])
    replace_file(vault.folder / ERASURES, days.encode(), mode=0o600, owner=owner_for(vault.folder))


def _without(path: Path, places: Collection[int]) -> bytes:
    """The content of a file without the lines or rows at these places, from 1; compressed if the file is."""
    from pyarrow import parquet  # slow to import

    if path.suffix.lower() == ".parquet":
        table, new = parquet.read_table(path), BytesIO()
        parquet.write_table(table.take([i for i in range(len(table)) if i + 1 not in places]), new)
        return new.getvalue()
    content, is_zipped = path.read_bytes(), path.suffix.lower() == ".gz"
    lines = BytesIO(gzip.decompress(content) if is_zipped else content).readlines()
    kept = b"".join(line for number, line in enumerate(lines, start=1) if number not in places)
    return gzip.compress(kept) if is_zipped else kept


def bound(vault: VaultSettings, *, plan: Path | None, filter_: str | None, plan_delta: float | None) -> Rule:
    """Note in the node's ledger how the budget of its last data set is enforced, and return all that holds then.

    Args:
        vault: of a node with records of its own, which are registered.
        plan: a file of `fedpriv plan --out`; None if a filter is given.
        filter_: `renyi:ORDER` or `gaussian`; None if a plan is given.
        plan_delta: of the plan; None takes the file's.

    Raises:
        InputError: nothing is registered; the plan or filter cannot be used, or comes too late.
        LedgerError: the ledger cannot be used.
    """
    from fedpriv.holder.vault import choose_rule
    from fedpriv.privacy.ledger.ledger import Ledger  # slow to import

    check_budget(vault)
    if vault.budget_epsilon is None or not vault.ledger.is_file():
        raise InputError(f"{vault.ledger}: no data set is registered; make the node with `init --data`")
    with Ledger(vault.ledger) as ledger:
        if (data_set := ledger.data_set()) is None:
            raise InputError(f"{vault.ledger}: no data set is registered; make the node with `init --data`")
        chosen = _choice(vault, data_set, plan, filter_, plan_delta)
        if chosen is None:
            raise InputError("register: give --plan FILE, --filter renyi:ORDER or gaussian, or --disjoint TEXT")
        return choose_rule(ledger, data_set, chosen, vault.budget_epsilon)


def _choice(
    vault: VaultSettings, data_set: DataSet, plan: Path | None, filter_: str | None, plan_delta: float | None
) -> Choice | None:
    """The rule that the operator chose to enforce a data set's budget; None if none."""
    if plan is not None and filter_ is not None:
        raise InputError("register: give either --plan FILE or --filter renyi:ORDER or gaussian")
    if plan is not None:
        return _plan(plan, vault, data_set, plan_delta)
    return None if filter_ is None else _filter(filter_)


def _filter(text: str) -> RenyiFilter | GaussianFilter:
    """The filter that `renyi:ORDER` or `gaussian` names.

    Raises:
        InputError: the text is another one.
    """
    from fedpriv.privacy.accounting.filters import GaussianFilter, RenyiFilter  # slow to import

    name, _, order = text.partition(":")
    try:
        if text == "gaussian":
            return GaussianFilter()
        if name == "renyi":
            return RenyiFilter(order=int(order))
    except ValueError:
        pass
    raise InputError(f"filter = {text!r}: must be gaussian, or renyi:ORDER with ORDER in 2..63, 128, 256, 512 or 1024")


def _plan(path: Path, vault: VaultSettings, data_set: DataSet, delta: float | None) -> CommittedPlan:
    """The node's plan from a file that `fedpriv plan --out` wrote; its cost is computed again.

    Args:
        path: of the file.
        vault: of the node.
        data_set: of the node.
        delta: of the plan, of which the share that is left for releases counts; None takes that of the file.

    Raises:
        InputError: the file cannot be used, or was made for other records, another view or another unit.
    """
    from fedpriv.privacy.accounting import events  # slow to import
    from fedpriv.privacy.accounting.filters import CommittedPlan

    try:
        values = json.loads(read_text(path))
        planned = next(each for each in values["clients"] if each["client"] == vault.partition_id)
        found = [events.from_json(json.dumps(each)) for each in planned["events"]]
        share = (planned["delta"] if delta is None else delta) / data_set.delta  # 1 and halves are exact
        plan = CommittedPlan.of(found, share * data_set.delta_for_releases)
        facts = {
            "num_records": (planned["num_records"], data_set.num_records),
            "view": (values["view"], vault.budget_view),
            "of persons": (any(event.unit == "person" for event in found), bool(vault.person_column)),
        }
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except StopIteration:
        raise InputError(f"{path}: plans nothing for client {vault.partition_id}") from None
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: must be a plan that `fedpriv plan --out` wrote ({error})") from None
    for name, (theirs, own) in facts.items():
        if theirs != own:
            raise InputError(f"{path}: {name} = {theirs}: this node has {own}")
    return plan
