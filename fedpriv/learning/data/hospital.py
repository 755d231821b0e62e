"""The embedded corpus: patients' messages to a hospital, to be routed to one of eight departments.

This module makes up every message, so the corpus is public. A message states one leading complaint, which alone
decides the department; the lesser complaints, false leads and small talk around it do not. Some messages are
ambiguous even to a human reader: a complaint that several departments treat may lack the circumstance that decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from numpy.random import Generator, default_rng

from fedpriv.learning.data._hospital_phrases import NEIGHBOURS, SPECIALISTS, THEMES, Theme, phrases

_T = TypeVar("_T")
_Themes = Mapping[str, Sequence[Theme]]

DEPARTMENTS: tuple[str, ...] = tuple(THEMES)
HOSPITAL_SIZES: tuple[int, ...] = (1200, 1000, 800, 600, 400)

# Percentages of each hospital's patients, in the order of DEPARTMENTS.
_DEPARTMENT_MIXES = {
    "St. Anna": (20, 8, 18, 10, 18, 8, 10, 8),
    "Northgate": (30, 4, 10, 8, 6, 4, 30, 8),
    "Lakeside": (6, 6, 8, 30, 8, 30, 6, 6),
    "Riverside": (6, 12, 6, 14, 42, 6, 8, 6),
    "Marienhof": (4, 30, 22, 4, 6, 4, 4, 26),
}
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

# A single complaint. {name} and {statement} include a circumstance; {sign} is another name without one.
_LEADS = phrases("""
I have {name} / I have had {name} for {span} / for {span} I have been dealing with {name} / I keep getting {name}
I am writing because of {name} / what bothers me is {name} / my problem is {name} / it is about {name}
I am not sure what to call it, perhaps {name} / my {relative} has {name}
my {relative} has been complaining of {name} for {span} / my {relative} needs help with {name} / {statement}
{statement}, and it has been like this for {span} / lately {statement} / the problem is that {statement}
I noticed {span} ago that {statement} / what worries me: {statement} / {statement}, and I do not know why
I have {sign}: {statement} / I would call it {sign}: {statement} / {statement}, so I suppose it is {sign}
{statement}; for {span} I have had {sign} like this / I have {name} and also {sign}
my {relative} has {sign}, now even {name}
""")

# Two complaints in one sentence: {name} or {statement} leads, {minor} does not.
_JOINT_LEADS = phrases("""
I have {name}, and a bit of {minor} as well / it is not so much {minor} as {name} that worries me
never mind {minor}, I need help with {name} / I can live with {minor}, but not with {name}
mainly {name}, now and then {minor} / besides {minor}, which is being treated, I now have {name}
I came to you with {minor} last year, this time it is {name} / I am here for {name}, {minor} can wait
{statement}, and I also have {minor}, but that is bearable / I have known {minor} for years, what is new is {name}
{minor} got better, but now I have {name} / for {span} {name}, later {minor} on top
first it was only {minor}, but by now the real trouble is {name} / {statement}, which is worse than {minor}
my {relative} has {name}, apart from {minor}
""")

# Mentions of another department that do not change the complaint.
_FALSE_LEADS = phrases("""
my {specialist} said it is not {organ} / a {specialist} has already ruled out {organ} / at first I blamed {organ}
my GP first suspected {organ} / I am also seeing a {specialist} for {minor}
a {specialist} is looking after {minor} already / last month I had {minor}, but that has settled
I was in hospital for {minor} {span} ago / the {specialist} sent me on to you / my {relative} thinks it is {organ}
I do not know whether this is for you or for the {specialist} / please note that I take tablets for {minor}
""")

# The same, but referring back to the complaint.
_AFTERTHOUGHTS = phrases("""
I also notice {minor}, but less / sometimes it comes with {minor}
my {relative} had {minor} and it began the same way / I read that it may come from {organ}
not sure whether that has to do with {minor} / maybe I should rather ask a {specialist}
I asked the {specialist}, who was not concerned / it is hardly {organ}, or is it?
now {minor} as well, if that matters / could {organ} be behind it?
""")

# Padding before and after the complaint that says nothing about it.
_INTRODUCTIONS = phrases("""
I am {age} years old / I am {age} and otherwise healthy / I have a referral from my GP
I could not get through on the phone / I moved here {span} ago / my GP is on holiday
I am a little embarrassed to ask / I hope I am writing to the right place / I missed my appointment on {day}
my last visit was {span} ago / a friend recommended you
""")
_REMARKS = phrases("""
mornings suit me best / I work shifts, so please call after four / I can send the reports
I live alone and do not drive / maybe it is nothing / it is getting worse / it comes and goes
some days I hardly notice it / I am away from {day} on / I tried to wait it out / I am insured with the public fund
I would rather not take more tablets
""")

# What may come before and after the complaint, and with what probability.
_BEFORE = ((_INTRODUCTIONS, 0.2), (_FALSE_LEADS, 0.08))
_AFTER = ((_AFTERTHOUGHTS, 0.08), (_REMARKS, 0.2))

_RELATIVES = ("husband", "wife", "mother", "father", "son", "daughter", "brother", "sister", "partner")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
_SPANS = (
    *("two days", "three days", "four days", "almost a week", "ten days", "two weeks", "three weeks"),
    *("a month", "six weeks", "two months", "a few months", "half a year", "a year", "over a year"),
)


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

    openings: tuple[str, ...]
    closings: tuple[str, ...]
    stop: str
    lowercase: bool
    typo_probability: float


_REGISTERS = (
    _Register(
        openings=("Dear Sir or Madam,", "Dear doctor,", "Good morning,", "Dear team,", ""),
        closings=(
            "I would be grateful for an appointment.",
            "Could you tell me which tests are needed?",
            "Please let me know when I may come.",
            "Thank you for your help.",
            "Kind regards.",
            "",
        ),
        stop=".",
        lowercase=False,
        typo_probability=0.0,
    ),
    _Register(
        openings=("Hello,", "Hi,", "Hi there,", "Good evening,", "Short question:", "", ""),
        closings=("Who should I see?", "Can I come in this week?", "Should I be worried?", "Thanks.", "", ""),
        stop=".",
        lowercase=False,
        typo_probability=0.02,
    ),
    _Register(
        openings=("hi", "hey", "hello", "sorry to bother you", "urgent:", "", "", ""),
        closings=("pls call me back", "thx", "any slots on {day}?", "what now?", "is that bad?", "", "", ""),
        stop=",",
        lowercase=True,
        typo_probability=0.06,
    ),
)


def generate(seed: int = 0) -> tuple[list[Message], list[Message]]:
    """The training messages, ordered by hospital, and the server's test messages.

    Each patient has written one to six of a hospital's messages, most of them one; which ones decides no text.

    No text occurs twice within or across the two lists. Hospitals have HOSPITAL_SIZES messages and different
    mixes of departments; in the test set all departments are equally likely. About 2% of the training labels are
    wrong: the front desk filed these messages under a similar department. The same seed gives the same corpus on
    every platform.

    The test set also uses phrases that no training message contains, so its distribution differs slightly. For
    non-members from exactly the same distribution, use the training messages of another seed.

    Args:
        seed: >= 0; another seed gives another corpus.

    Raises:
        ValueError: seed is negative.
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
        *(_pick(rng, table) for table, probability in _BEFORE if rng.random() < probability),
        _pick(rng, _JOINT_LEADS if rng.random() < _JOINT_PROBABILITY else _LEADS),
        *(_pick(rng, table) for table, probability in _AFTER if rng.random() < probability),
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
        relative=_pick(rng, _RELATIVES),
        span=_pick(rng, _SPANS),
        day=_pick(rng, _DAYS),
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
