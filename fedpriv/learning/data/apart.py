"""A test set beside private records must hold none of them: what is measured on it is shown as it is, without noise.

Only those who hold both compare them. So a simulation does, and a node never: its refusals would tell a coordinator
whose records it has.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

from fedpriv.config import DataSection
from fedpriv.errors import InputError
from fedpriv.learning.data._mistakes import folded
from fedpriv.learning.data.text import TextData
from fedpriv.texts import counted

Content = str | bytes | tuple[str, ...]
"""The texts or the digest of a record, or the name of its person; empty where there is none."""

_NUM_PLACES = 5


def check_texts(config: DataSection, test: TextData, private: TextData, places: Sequence[int]) -> list[str]:
    """The warnings about a test set of texts beside a private table, one a line.

    Args:
        test: the records of `test_data`, with their persons if it names any.
        private: all records of `data`, whoever trains on them.
        places: [records] of the test set in its file, from 0.

    Raises:
        InputError: both are one file, or have a text or a person in common.
    """
    if _is_same_file(config.test_data, config.data):
        raise _refusal(config, "is the file of data", "give records of the server's own")
    rows = [_rows(each, config) for each in (test, private)]
    check_apart(config, *rows, shared="have the text of one in data", places=places)
    warnings = []
    if test.persons is not None and private.persons is not None:
        persons = [list(map(folded, each)) for each in (test.persons, private.persons)]
        check_apart(config, *persons, shared="are about a person in data", places=places)
    elif private.persons is not None:
        warnings.append(f"has no column {config.person_column!r}, so a person in both it and data goes unseen")
    if alike := _in_common(*([tuple(map(_squeezed, row)) for row in each] for each in rows)):
        warnings.append(
            f"{counted(len(alike), 'record')} with the text of one in data but for case, blanks, punctuation"
        )
    return [f"test_data = {config.test_data!r}: {each}" for each in warnings]


def check_apart(
    config: DataSection,
    test: Sequence[Content],
    private: Iterable[Content],
    *,
    shared: str = "equal one in data",
    places: Sequence[int] = (),
) -> None:
    """Refuse a test set that has something in common with private records.

    Args:
        test: [records] the content, or the person, of each; what is empty is in common with nothing.
        private: the same of the private records.
        shared: says what some records of the test set have in common with these.
        places: as for `check_texts`; empty counts the records of the test set.

    Raises:
        InputError: it has.
    """
    found = _in_common(test, private)
    if found:
        shown = ", ".join(f"{(places or range(len(test)))[at] + 1:,}" for at in found[:_NUM_PLACES])
        more = f" and {len(found) - _NUM_PLACES:,} more" if len(found) > _NUM_PLACES else ""
        raise _refusal(config, f"{counted(len(found), 'record')} ({shown}{more}) {shared}", "leave them out")


def _refusal(config: DataSection, what: str, remedy: str) -> InputError:
    return InputError(
        f"test_data = {config.test_data!r}: {what}, and no epsilon covers exact figures on private records; {remedy}, "
        "use evaluation_noise_multiplier instead or set public_data = true if nobody's privacy depends on data"
    )


def _is_same_file(one: str, other: str) -> bool:
    """Whether two sources are one file, by whatever name or link, or one data set of the Hub."""
    paths = [Path(each).expanduser() for each in (one, other)]
    return one == other or (all(path.is_file() for path in paths) and paths[0].samefile(paths[1]))


def _in_common(test: Sequence[Content], private: Iterable[Content]) -> list[int]:
    """The places of the test set's records that private ones equal; of those that are empty, none."""
    wanted = set(test)
    held = {each for each in private if each in wanted}
    return [place for place, each in enumerate(test) if each in held and any(each)]


def _rows(data: TextData, config: DataSection) -> list[tuple[str, ...]]:
    """The texts of each record; where a response is one of few answers, it is no text of the record's."""
    columns = [data.texts] if data.pairs is None or config.answers else [data.texts, data.pairs]
    return [tuple(text.strip() for text in row) for row in zip(*columns, strict=True)]


def _squeezed(text: str) -> str:
    """The letters and digits of a text, in one case."""
    return re.sub(r"[\W_]+", "", unicodedata.normalize("NFKC", text).casefold())
