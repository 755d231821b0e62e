"""Likely mistakes in a table: names in two spellings, what is empty, missing, rare or repeated, and columns of ids.

A finding of which a run would silently learn something else than its table means is a refusal; the others are warnings.
Findings look at all records at once, so they are for the eyes of those who hold them, before anything is registered.
"""

from __future__ import annotations

import math
import re
import shlex
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median

from fedpriv.config import RunConfig, TableChecks
from fedpriv.errors import InputError
from fedpriv.learning.data._tables import Table
from fedpriv.texts import counted

Values = Sequence[str | None]
"""[records] of a column; None and blanks are missing."""

_NUM_PLACES, _NUM_NAMES = 5, 10
_FEW_RECORDS = 10

# A name is taken for a misspelt one only if the other has so many times its records, and in a word of so many letters.
_TIMES_AS_MANY = 5
_LETTERS = 4

# Fewer values may well all differ by chance.
_MANY = 20
_ID_LENGTH = 40

# On average; ids that repeat more often are of something else, such as a ward.
_MOST_OF_A_PERSON = 20

_NOT_AVAILABLE = re.compile(
    r"|--?|\.|\?|#?n/a|na|n\.a\.|nan|nil|null|none|missing|tbd|unk(nown)?|unbekannt|k\. ?a\.|keine angabe|n\.n\.|nn|"
    r"nat|\\n|undefined|#(ref!|value!|name\?|div/0!|null!|num!)|anonym(ous|ised|ized)?|redacted|withheld|"
    r"not (available|applicable|recorded|known|given|stated)"
)
_AROUND_NONE = "<>()[]{}"

# What systems write in the place of a number that they lack; a few records may have it as their own.
_NO_NUMBER = re.compile(r"0+|9{3,}|-[0-9]+")

# A whole number, as a spreadsheet writes it that fills a column up, or lacks a value in it.
_NUMBER = re.compile(r"(-?)0*([0-9]+)(\.0)?")

# German names are written without umlauts too.
_UMLAUTS = str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue"})

_ID_NAME = re.compile(
    r"(^|[\W_])(id|ids|no|nr|number|nummer|uuid|guid|mrn|ssn|iban|code|key)($|[\W_])|[a-z]ID$|^(id|pid)$", re.IGNORECASE
)
_PERSON_NAME = re.compile(
    r"patient|person|paciente|asegurad|customer|kunde|versichert|member|insured|subject|user|author|e-?mail|phone|"
    r"(sur|last|first)_?name|^name$|birth",
    re.IGNORECASE,
)
_DECIMAL = re.compile(r"[+-]?[0-9]*[.,][0-9]+")


@dataclass(frozen=True)
class Finding:
    """A likely mistake.

    Attributes:
        kind: such as `misspelt_clients`.
        message: one line: what it is, with the number of records and the first of their places.
        places: of its records: lines or records, from 1; empty where it is of a whole column.
        refuses: whether a run refuses it.
        renamed: {spelling: spelling meant} of a finding of names; empty where none is meant.
    """

    kind: str
    message: str
    places: tuple[int, ...] = ()
    refuses: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Roles:
    """The columns of a table that a run reads.

    Attributes:
        texts: columns, all of which a record needs.
        label, client, person: columns; empty if there is none.
        classes: the labels that are agreed on; empty takes any.
        holders: at how many clients a person may have records.
    """

    texts: tuple[str, ...]
    label: str = ""
    client: str = ""
    person: str = ""
    classes: tuple[str, ...] = ()
    holders: int = 1

    @staticmethod
    def of(config: RunConfig) -> Roles:
        """The columns of a run's table."""
        client = config.client_column if config.partition_rule == "natural" else ""
        person, holders = config.person_column, config.holders_per_person
        if config.instructs:
            texts = tuple(filter(None, (config.messages_column, config.prompt_column, config.response_column)))
            if config.choice_columns:  # of which another record may have the same, or none at the last place
                return Roles(texts=texts[:1], client=client, person=person, holders=holders)
            if not config.answers:
                return Roles(texts=texts, client=client, person=person, holders=holders)
            classes = config.labels or config.answers
            label = config.response_column
            return Roles(texts[:1], label=label, client=client, person=person, classes=classes, holders=holders)
        texts = tuple(filter(None, (config.text_column, config.text_pair_column)))
        label = config.label_column if config.task == "SEQ_CLS" else ""
        return Roles(texts, label=label, client=client, person=person, classes=config.labels, holders=holders)

    @property
    def options(self) -> str:
        """The columns as options of `fedpriv data check`."""
        if self.label or len(self.texts) == 1:
            given = {"text": self.texts[0], "label": self.label, "labels": ",".join(self.classes)}
            given |= {"text-pair": self.texts[1]} if len(self.texts) > 1 else {}
        else:
            given = dict(zip(("prompt", "response"), self.texts, strict=False))
        given |= {
            "client": self.client,
            "person": self.person,
            "holders": str(self.holders) if self.holders > 1 else "",
        }
        return " ".join(f"--{name} {shlex.quote(value)}" for name, value in given.items() if value or name == "label")


@dataclass(frozen=True, kw_only=True)
class CheckedColumns:
    """The values that mistakes are looked for in.

    Attributes:
        texts: {column: values}.
        labels, clients, persons: values; empty if there are none.
        classes: the labels that are agreed on; empty takes any.
        holders: at how many clients a person may have records.
        others: {column: values} of what no run reads.
        places: [records] at which they are; empty counts from 1.
        unit: of places.
    """

    texts: Mapping[str, Values]
    labels: Values = ()
    clients: Values = ()
    persons: Values = ()
    classes: Sequence[str] = ()
    holders: int = 1
    others: Mapping[str, Values] = field(default_factory=dict)
    places: Sequence[int] = ()
    unit: str = "record"

    @staticmethod
    def of(table: Table, roles: Roles) -> CheckedColumns:
        """The columns of a table in their roles."""

        def values(column: str) -> Values:
            return table.names_of(column) if column else ()

        used = {*roles.texts, roles.label, roles.client, roles.person}
        return CheckedColumns(
            texts={name: values(name) for name in roles.texts},
            labels=values(roles.label),
            clients=values(roles.client),
            persons=values(roles.person),
            classes=roles.classes,
            holders=roles.holders,
            others={name: values(name) for name in table.columns if name not in used},
            places=table.lines,
            unit="line" if table.lines else "record",
        )

    def where(self, rows: Sequence[int]) -> str:
        """The number of records, and the places of the first, such as `3 records: lines 2, 5 and 7`."""
        shown = [f"{self.place(row)}" for row in rows[:_NUM_PLACES]]
        more = f" and {len(rows) - _NUM_PLACES:,} more" if len(rows) > _NUM_PLACES else ""
        return f"{counted(len(rows), 'record')}, {self.unit}{'' if len(rows) == 1 else 's'} {', '.join(shown)}{more}"

    def place(self, row: int) -> int:
        """The place of a record."""
        return self.places[row] if self.places else row + 1

    def found(
        self,
        kind: str,
        message: str,
        rows: Sequence[int],
        *,
        refuses: bool = False,
        renamed: Mapping[str, str] | None = None,
    ) -> Finding:
        """A finding of records."""
        places = tuple(map(self.place, rows))
        return Finding(kind, f"{message} ({self.where(rows)})", places, refuses=refuses, renamed=renamed or {})


def mistakes(columns: CheckedColumns) -> list[Finding]:
    """The likely mistakes in columns, those that a run refuses first."""
    found = [*_empty(columns), *_repeated(columns)]
    for role in ("clients", "labels", "persons"):
        values: Values = getattr(columns, role)
        agreed = columns.classes if role == "labels" else ()
        if not agreed and role != "persons" and (ids := _as_ids(role, values)):
            found.append(ids)
            continue
        spellings = spellings_of(values)
        found += _variants(columns, role, spellings, agreed)
        found += not_available(columns, role, spellings, agreed)
        if role == "clients":
            found += misspelt_clients(columns, spellings)
    found += [*_at_several_clients(columns), *_rare(columns), *_id_columns(columns)]
    return sorted(found, key=lambda finding: not finding.refuses)


def check_table(table: Table, config: RunConfig, roles: Roles, *, key: str = "data") -> list[str]:
    """The warnings, a line each, about a run's table in these roles; InputError if a likely mistake is refused."""
    check = f"`fedpriv data check {shlex.quote(table.source)} {roles.options}`"
    how = f'{check} lists all, and --fix OUT mends a copy; if all is as it should be, set table_checks = "warn"'
    return refused(mistakes(CheckedColumns.of(table, roles)), config.table_checks, f"{key} = {table.source!r}", how)


def refused(found: Sequence[Finding], checks: TableChecks, name: str, how: str) -> list[str]:
    """The messages of findings about a table; InputError, with `how` to go on, if the checks refuse one of them."""
    refusals = [finding for finding in found if finding.refuses]
    if refusals and checks == "refuse":
        more = f", and {counted(len(refusals) - 1, 'likely mistake')} more" if len(refusals) > 1 else ""
        raise InputError(f"{name}: {refusals[0].message}{more}; {how}")
    return [f"{name}: {finding.message}" for finding in found]


def is_empty(value: object) -> bool:
    return value is None or not str(value).strip()


def _empty(columns: CheckedColumns) -> Iterator[Finding]:
    """Records without a client, a label or a text."""
    for name, values in columns.texts.items():
        if rows := [row for row, value in enumerate(values) if is_empty(value)]:
            yield columns.found("empty_texts", f"texts: column {name!r} is empty", rows)
    if rows := [row for row, value in enumerate(columns.clients) if is_empty(value)]:
        yield columns.found("empty_clients", "clients: nobody holds some records", rows, refuses=True)
    if rows := [row for row, value in enumerate(columns.persons) if is_empty(value)]:
        yield columns.found("empty_persons", "persons: some records name nobody", rows, refuses=True)
    if rows := [row for row, value in enumerate(columns.labels) if is_empty(value)]:
        yield columns.found("empty_labels", "labels: some are missing, and nothing trains on those records", rows)


def _repeated(columns: CheckedColumns) -> Iterator[Finding]:
    """Records whose texts, label and client an earlier one has."""
    seen, rows = set(), []
    parts = [*columns.texts.values(), *filter(None, (columns.labels, columns.clients))]
    for row, record in enumerate(zip(*parts, strict=True)):
        if is_empty(record[0]):
            continue
        if record in seen:
            rows.append(row)
        seen.add(record)
    if rows:
        yield columns.found("repeated_records", "records: some repeat an earlier one, text, label and client", rows)


def spellings_of(values: Values) -> dict[str, list[int]]:
    """{spelling: rows} of what is not empty."""
    found: dict[str, list[int]] = defaultdict(list)
    for row, value in enumerate(values):
        if value is not None and value.strip():
            found[value].append(row)
    return found


def folded(text: str) -> str:
    """The text without case, outer and repeated blanks, characters that nobody sees, and zeros around a number."""
    seen = "".join(char for char in unicodedata.normalize("NFKC", text) if unicodedata.category(char) != "Cf")
    name = " ".join(seen.casefold().split())
    number = _NUMBER.fullmatch(name)
    return name if number is None else "".join(number.group(1, 2))


def by_folded(spellings: Iterable[str]) -> dict[str, list[str]]:
    """{folded: the spellings that fold to it}."""
    groups: dict[str, list[str]] = defaultdict(list)
    for spelling in spellings:
        groups[folded(spelling)].append(spelling)
    return groups


def spelling_meant(spellings: Mapping[str, int], agreed: Iterable[str] = ()) -> str:
    """The spelling that is meant by several: the one agreed on, or the most frequent, without blanks around it."""
    counts: Counter[str] = Counter()
    for spelling, number in spellings.items():
        counts[" ".join(spelling.split())] += number
    for spelling in agreed:
        if folded(spelling) == folded(next(iter(spellings))):
            return spelling
    return min(counts, key=lambda spelling: (-counts[spelling], spelling))


def _variants(
    columns: CheckedColumns, role: str, spellings: Mapping[str, Sequence[int]], agreed: Sequence[str]
) -> Iterator[Finding]:
    """Names of which no more differs than `folded` leaves out, less those agreed on to be two."""
    known = {folded(name) for name in agreed}
    for name, group in by_folded(spellings).items():
        if agreed and name not in known:
            continue
        meant = spelling_meant({name: len(spellings[name]) for name in group}, agreed)
        for spelling in sorted(group, key=lambda name: spellings[name][0]):
            if spelling != meant and spelling not in agreed and (len(group) > 1 or agreed):
                what = "zeros" if _NUMBER.fullmatch(name) and spelling.strip() != meant else "case or blanks"
                yield columns.found(
                    f"variants_of_{role}",
                    f"{role}: {spelling!r} differs from {meant!r} by {what} alone",
                    spellings[spelling],
                    refuses=True,
                    renamed={spelling: meant},
                )


def not_available(
    columns: CheckedColumns, role: str, spellings: Mapping[str, Sequence[int]], agreed: Sequence[str]
) -> Iterator[Finding]:
    """Names that stand for none; as one person they would protect all of those behind them worse."""
    is_person = role == "persons"
    many = _TIMES_AS_MANY * median(map(len, spellings.values())) if is_person and spellings else math.inf
    for spelling, rows in spellings.items():
        name = folded(spelling)
        is_none = any(map(_NOT_AVAILABLE.fullmatch, (name, name.strip(_AROUND_NONE))))
        if (is_none and spelling not in agreed) or (len(rows) > many and _NO_NUMBER.fullmatch(name)):
            message = f"{role}: {spelling!r} looks like a missing one"
            yield columns.found(f"missing_{role}", message, rows, refuses=is_person, renamed={spelling: ""})


def _at_several_clients(columns: CheckedColumns) -> Iterator[Finding]:
    """Persons with records at more clients than an epsilon is for."""
    if not columns.clients or not columns.persons:
        return
    places: dict[str, set[str]] = defaultdict(set)
    pairs = list(zip(columns.persons, columns.clients, strict=True))
    for person, client in pairs:
        if person is not None and client is not None:
            places[person].add(client)
    several = {person for person, clients in places.items() if len(clients) > columns.holders}
    if several:
        rows = [row for row, (person, _) in enumerate(pairs) if person in several]
        most = max(len(places[person]) for person in several)
        message = (
            f"persons: {len(several):,} have records at more than {counted(columns.holders, 'client')}, at up to "
            f"{most}; holders_per_person = {most} protects them"
        )
        yield columns.found("persons_at_several_clients", message, rows, refuses=True)


def misspelt_clients(columns: CheckedColumns, spellings: Mapping[str, Sequence[int]]) -> Iterator[Finding]:
    """Clients with a name that is close to that of another with far more records."""
    rows: dict[str, list[int]] = defaultdict(list)
    for spelling, each in spellings.items():
        rows[folded(spelling)] += each
    meant: dict[str, str] = {}
    for one, other in _close({name: len(each) for name, each in rows.items()}):
        if one not in meant or len(rows[meant[one]]) < len(rows[other]):
            meant[one] = other
    for one, other in meant.items():
        target = spelling_meant({name: len(each) for name, each in spellings.items() if folded(name) == other})
        names = [name for name in spellings if folded(name) == one]
        shown = spelling_meant({name: len(spellings[name]) for name in names})
        yield columns.found(
            "misspelt_clients",
            f"clients: {shown!r} is likely a misspelt {target!r}, which has {counted(len(rows[other]), 'record')}",
            sorted(rows[one]),
            refuses=True,
            renamed=dict.fromkeys(names, target),
        )


def _close(counts: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """(rarer, other) of folded names that differ by punctuation or umlauts alone, or by one letter of a longer word."""
    from rapidfuzz import process  # deferred: tables without clients are read without it
    from rapidfuzz.distance import OSA

    groups: dict[str, list[str]] = defaultdict(list)
    for name in sorted(counts, key=lambda name: (counts[name], name)):
        groups["".join(re.findall(r"\w+", name)).translate(_UMLAUTS)].append(name)
    for group in groups.values():
        yield from combinations(group, 2)
    for one in counts:
        others = [name for name, number in counts.items() if counts[one] * _TIMES_AS_MANY <= number]
        for other, _, _ in process.extract(one, others, scorer=OSA.distance, score_cutoff=1, limit=None):
            if _is_in_a_word(one, other):
                yield one, other


def _is_in_a_word(one: str, other: str) -> bool:
    """Whether two names differ in one longer word of letters alone."""
    words = re.findall(r"\w+", one), re.findall(r"\w+", other)
    if len(words[0]) != len(words[1]):
        return False
    pairs = [pair for pair in zip(*words, strict=True) if pair[0] != pair[1]]
    return len(pairs) == 1 and all(map(str.isalpha, pairs[0])) and max(map(len, pairs[0])) >= _LETTERS


def _rare(columns: CheckedColumns) -> Iterator[Finding]:
    """Classes of few records."""
    spellings = spellings_of(columns.labels)
    agreed = set(map(folded, columns.classes))
    few = {
        spelling_meant({spelling: len(spellings[spelling]) for spelling in group}, columns.classes): [
            row for spelling in group for row in spellings[spelling]
        ]
        for name, group in by_folded(spellings).items()
        if sum(len(spellings[spelling]) for spelling in group) < _FEW_RECORDS and (not agreed or name in agreed)
    }
    if not few:
        return
    shown = [f"{name!r} {len(rows)}" for name, rows in list(few.items())[:_NUM_NAMES]]
    more = f" and {len(few) - _NUM_NAMES:,} more" if len(few) > _NUM_NAMES else ""
    classes = f"{len(few):,} class{'' if len(few) == 1 else 'es'}"
    yield columns.found(
        "rare_labels",
        f"labels: {classes} of fewer than {_FEW_RECORDS} records: {', '.join(shown)}{more}",
        sorted(row for rows in few.values() for row in rows),
    )


def _as_ids(role: str, values: Values) -> Finding | None:
    """The finding that a column of clients or labels holds ids, if it seems to."""
    present = [value for value in values if not is_empty(value)]
    num = len(set(present))
    if len(present) < _MANY or 2 * num <= len(present):
        return None
    message = f"{role}: look like ids or persons, {num:,} different ones in {counted(len(present), 'record')}"
    return Finding(f"{role}_are_ids", message, refuses=True)


def looks_like_persons(name: str, values: Values) -> bool:
    """Whether a column seems to say whom a record is about: by its name, and ids that repeat."""
    present = [value for value in values if value is not None and value.strip()]
    num = len(set(present))
    if _cannot_be_ids(present):
        return False
    if _PERSON_NAME.search(name):
        return 2 * num >= math.sqrt(len(present))
    return bool(_ID_NAME.search(name)) and len(present) <= _MOST_OF_A_PERSON * num and num < len(present)


def _cannot_be_ids(present: Sequence[str]) -> bool:
    """Whether values are too few, too long, or decimal numbers."""
    return len(set(present)) < _MANY or max(map(len, present)) > _ID_LENGTH or any(map(_DECIMAL.fullmatch, present))


def _id_columns(columns: CheckedColumns) -> Iterator[Finding]:
    """Columns that no run reads and that seem to say whom, or which case, a record is about."""
    for name, values in columns.others.items():
        present = [value for value in values if value is not None and value.strip()]
        num = len(set(present))
        if looks_like_persons(name, values):
            message = f"column {name!r}: looks like persons, {num:,} in {counted(len(present), 'record')}"
            if not columns.persons:
                remedy = f"person_column = {name!r} makes it that of a person"
                message += f"; an epsilon is that of one record ({remedy}, --person {shlex.quote(name)} counts them)"
            yield Finding("person_column", message)
        elif _cannot_be_ids(present) or num < len(present):
            continue
        elif _ID_NAME.search(name) or not any(" " in value for value in present):
            yield Finding("id_column", f"column {name!r}: looks like an id, another one in each record")
