"""The embedded corpus: patients' messages to a hospital, to be routed to one of eight departments.

This module makes up every message from the phrases in hospital.toml, so the corpus is public. A message states one
leading complaint, which alone decides the department; the lesser complaints, false leads and small talk around it do
not. Some messages are ambiguous even to a human reader: a complaint that several departments treat may lack the
circumstance that decides.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from numpy.random import Generator, default_rng

_T = TypeVar("_T")

_WORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _phrases(table: str) -> tuple[str, ...]:
    """The phrases of a table, of any number of lines."""
    return tuple(phrase for line in table.strip().splitlines() for phrase in line.split(" / "))


@dataclass(frozen=True)
class Theme:
    """One complaint: interchangeable names, full statements, and circumstances that can follow either."""

    names: tuple[str, ...]
    statements: tuple[str, ...]
    circumstances: tuple[str, ...]


_Themes = Mapping[str, Sequence[Theme]]

THEMES: dict[str, tuple[Theme, ...]] = {
    department: tuple(Theme(*map(_phrases, block.splitlines())) for block in table.strip().split("\n\n"))
    for department, table in _WORDS["themes"].items()
}
NEIGHBOURS: dict[str, list[str]] = _WORDS["neighbours"]
SPECIALISTS: dict[str, list[str]] = _WORDS["specialists"]
DEPARTMENTS: tuple[str, ...] = tuple(THEMES)
HOSPITAL_SIZES: tuple[int, ...] = (1200, 1000, 800, 600, 400)

_DEPARTMENT_MIXES: dict[str, list[int]] = _WORDS["mixes"]
# The last phrase of each list is reserved for the test set, so that memorising phrases does not suffice there.
_TRAIN_THEMES = {
    name: tuple(Theme(theme.names[:-1], theme.statements[:-1], theme.circumstances[:-1]) for theme in table)
    for name, table in THEMES.items()
}
_TEST_SIZE = 1000
# How many messages a patient writes, all equally likely.
_MESSAGES_OF_A_PATIENT = (*(1,) * 10, *(2,) * 4, 3, 3, 4, 5, 6, 6)
_WORD_LIMITS = (8, 45)

# How often the front desk files a training message (never a test message) under a similar department.
_MISROUTED_PROBABILITY = 0.02
_CIRCUMSTANCE_PROBABILITY = 0.95
_JOINT_PROBABILITY = 0.08

_FRAMES = {name: _phrases(table) for name, table in _WORDS["frames"].items()}
_SLOTS: dict[str, list[str]] = _WORDS["slots"]

# What may come before and after the complaint, and with what probability.
_BEFORE = (("introductions", 0.2), ("false_leads", 0.08))
_AFTER = (("afterthoughts", 0.08), ("remarks", 0.2))


@dataclass(frozen=True)
class Message:
    """One patient's message.

    Attributes:
        text: 8 to 45 words of English.
        department: one of DEPARTMENTS, under which the message was filed.
        hospital: that holds the message; empty for the server's test messages.
        patient: who wrote it, to this hospital alone; empty for the server's test messages.
    """

    text: str
    department: str
    hospital: str
    patient: str = ""


@dataclass(frozen=True)
class _Register:
    """A style of writing: greetings, closings (empty for none), the stop after a sentence, and how careful it is."""

    openings: Sequence[str]
    closings: Sequence[str]
    stop: str
    lowercase: bool
    typo_probability: float


_REGISTERS = tuple(_Register(**register) for register in _WORDS["registers"])


def generate(seed: int = 0) -> tuple[list[Message], list[Message]]:
    """The training messages of a seed >= 0, ordered by hospital, and the server's test messages.

    Each patient has written one to six of a hospital's messages, most of them one; which ones decides no text.

    No text occurs twice within or across the two lists. Hospitals have HOSPITAL_SIZES messages and different
    mixes of departments; in the test set all departments are equally likely. About 2% of the training labels are
    wrong: the front desk filed these messages under a similar department. The same seed gives the same corpus on
    every platform.

    The test set also uses phrases that no training message contains, so its distribution differs slightly. For
    non-members from exactly the same distribution, use the training messages of another seed.
    """
    rng = default_rng(seed)
    seen: set[str] = set()
    train = [
        Message(text, _filed(rng, department), hospital)
        for (hospital, mix), size in zip(_DEPARTMENT_MIXES.items(), HOSPITAL_SIZES, strict=True)
        for text, department in _new_texts(rng, _TRAIN_THEMES, mix, size, seen)
    ]
    evenly = (1,) * len(DEPARTMENTS)
    test = [Message(text, department, "") for text, department in _new_texts(rng, THEMES, evenly, _TEST_SIZE, seen)]
    return list(_with_patients(train, seed)), test


def _with_patients(messages: Sequence[Message], seed: int) -> Iterator[Message]:
    """The messages with their patients, from a stream of its own: the texts are those that they are without."""
    rng = default_rng([seed, 1])
    for hospital in _DEPARTMENT_MIXES:
        of_hospital = [message for message in messages if message.hospital == hospital]
        numbers: list[int] = []  # of the patient of each message, before they are shuffled
        while len(numbers) < len(of_hospital):
            numbers += [numbers[-1] + 1 if numbers else 1] * _pick(rng, _MESSAGES_OF_A_PATIENT)
        patients = rng.permutation(numbers[: len(of_hospital)]).tolist()
        for message, patient in zip(of_hospital, patients, strict=True):
            yield replace(message, patient=f"{hospital} {patient:04d}")


def _new_texts(
    rng: Generator, themes: _Themes, mix: Sequence[int], size: int, seen: set[str]
) -> Iterator[tuple[str, str]]:
    """`size` texts not in `seen`, with departments in the proportions `mix`; they are added to `seen`."""
    pool = [name for name, weight in zip(DEPARTMENTS, mix, strict=True) for _ in range(weight)]
    for _ in range(size):
        department = _pick(rng, pool)
        text = _text(rng, themes, department)
        while text in seen or not _WORD_LIMITS[0] <= len(text.split()) <= _WORD_LIMITS[1]:
            text = _text(rng, themes, department)
        seen.add(text)
        yield text, department


def _filed(rng: Generator, department: str) -> str:
    """The department under which the front desk files a training message: nearly always the right one."""
    wrong = _pick(rng, NEIGHBOURS[department])
    return wrong if rng.random() < _MISROUTED_PROBABILITY else department


def _text(rng: Generator, themes: _Themes, department: str) -> str:
    """One message whose leading complaint belongs to the department."""
    theme = _pick(rng, themes[department])
    register = _pick(rng, _REGISTERS)
    frames = [
        _pick(rng, register.openings),
        *(_pick(rng, _FRAMES[table]) for table, probability in _BEFORE if rng.random() < probability),
        _pick(rng, _FRAMES["joint_leads" if rng.random() < _JOINT_PROBABILITY else "leads"]),
        *(_pick(rng, _FRAMES[table]) for table, probability in _AFTER if rng.random() < probability),
        _pick(rng, register.closings),
    ]
    neighbours = {name: themes[name] for name in NEIGHBOURS[department]}
    return _typed(rng, [_filled(rng, frame, theme, neighbours) for frame in frames if frame], register)


def _filled(rng: Generator, frame: str, theme: Theme, neighbours: _Themes) -> str:
    """The frame with its slots filled: the leading complaint from `theme`, false leads from one neighbour."""
    neighbour = _pick(rng, tuple(neighbours))
    specialist, organ = SPECIALISTS[neighbour]
    minors = [name for other in neighbours[neighbour] for name in other.names if name not in theme.names]
    sign, name = _two(rng, theme.names)
    circumstance = " " + _pick(rng, theme.circumstances) if rng.random() < _CIRCUMSTANCE_PROBABILITY else ""
    return frame.format(
        sign=sign,
        name=name + circumstance,
        statement=_pick(rng, theme.statements) + circumstance,
        minor=_pick(rng, minors),
        specialist=specialist,
        organ=organ,
        relative=_pick(rng, _SLOTS["relatives"]),
        span=_pick(rng, _SLOTS["spans"]),
        day=_pick(rng, _SLOTS["days"]),
        age=_pick(rng, range(18, 88)),
    )


def _typed(rng: Generator, sentences: Sequence[str], register: _Register) -> str:
    """The sentences as someone using this register types them: stops, capital letters, typos."""

    def typed(word: re.Match[str]) -> str:
        return _mistyped(rng, word[0]) if rng.random() < register.typo_probability else word[0]

    stopped = (text if text[-1] in ".,:?" else text + register.stop for text in sentences)
    text = re.sub("[a-z]{4,}", typed, " ".join(stopped).rstrip(","))
    if register.lowercase:
        return text.lower()
    return re.sub(r"(^|[.?] )([a-z])", lambda start: start[1] + start[2].upper(), text)


def _mistyped(rng: Generator, word: str) -> str:
    """The word with two inner letters swapped, one dropped, or one doubled."""
    at = _pick(rng, range(1, len(word) - 1))
    first, second = word[at], word[at + 1]
    return word[:at] + _pick(rng, (second + first, second, first + first + second)) + word[at + 2 :]


def _two(rng: Generator, options: Sequence[_T]) -> tuple[_T, _T]:
    """Two different options in random order, all pairs equally likely."""
    first, step = _pick(rng, range(len(options))), _pick(rng, range(1, len(options)))
    return options[first], options[(first + step) % len(options)]


def _pick(rng: Generator, options: Sequence[_T]) -> _T:
    """One option, all equally likely. Several times faster than scalar `integers` or `choice`."""
    return options[int(rng.random() * len(options))]
