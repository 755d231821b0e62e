"""Questions that a coordinator may think of: attacks that are known, and anything that hypothesis can put together."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from fedpriv.holder.wire import frame, kinds
from fedpriv.learning.aggregation._cmfl import pack_signs
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.accounting.views import Release
from tests.adversary.exchanges import PERSONS, ROWS, Exchange
from tests.adversary.nodes import Question, Row, registering, run_config, training
from tests.tiny import LABELS, WORDS

Adapter = Mapping[str, Tensor]
Starts = Mapping[str, Adapter]
"""{model: the adapter that a run on it starts from}"""

# Models in which records touch, with the settings of a run that trains them.
COUPLED = {
    "convbert": {"layers": "all", "target_modules": "query,value"},
    "fnet": {"layers": "all", "target_modules": "dense"},
}

LONG = " ".join(WORDS * 12)
JANE = ("jane doe has a rash", LABELS[1])

# Of a text with this word alone, between [CLS] and [SEP]; five special tokens come before the words and the labels.
_NEUROLOGY = (2, 5 + len(WORDS) + LABELS.index("neurology"), 3)


def honest(adapter: Adapter, **fields: object) -> Question:
    """An honest question for an update, but for the fields of its instruction."""
    return training(run_config(), adapter, fields=fields)


def named(model: str, adapter: Adapter, **fields: object) -> Question:
    """The same on another model."""
    return training(run_config(model=model), adapter, fields=fields)


def sure_head(adapter: Adapter, confidence: float) -> dict[str, Tensor]:
    """The adapter with a head that is sure of the first class: its records' gradients are about exp(-confidence)."""
    moved = {name: torch.zeros_like(t) if "classifier" in name else t for name, t in adapter.items()}
    (bias,) = (name for name, t in moved.items() if "classifier" in name and t.ndim == 1)
    moved[bias] = torch.tensor([0.0, *[-confidence] * (len(LABELS) - 1)])
    return moved


def far_head(adapter: Adapter) -> dict[str, Tensor]:
    """The adapter with a head whose rows' mean is far from every feature, which centred steps take off them."""
    far = {name: t + 9e3 if "classifier" in name and t.ndim == 2 else t for name, t in adapter.items()}
    return far | {name: t * 0 for name, t in far.items() if "classifier" in name and t.ndim == 1}


def _tiny_norms(**fields: object) -> Callable[[Starts], Exchange]:
    """Against C = 1e-36, gradients of 1e-26, whose squares vanish in float32."""
    return lambda starts: Exchange(
        one=("rash", LABELS[0]),
        other=None,
        questions=[honest(sure_head(starts["tiny"], 60.0), clip_norm=1e-36, noise_multiplier=50.0, **fields)],
        rows=[(text, LABELS[0]) for text, _ in ROWS],
        limits={"min_clip_norm": 1e-37},
    )


def _padding(model: str) -> Callable[[Starts], Exchange]:
    """A long record beside others in a model in which they touch."""
    return lambda starts: Exchange(
        one=(LONG, LABELS[0]),
        other=None,
        questions=[training(run_config(model=model, clip_norm=0.01, **COUPLED[model]), moved(starts[model]))],
    )


# Attacks by name. The nodes have approved models with faults, and allow any clip norm, so that no refusal hides a leak.
ATTACKS: dict[str, Callable[[Starts], Exchange]] = {
    "a tokenizer that fails, for a request that is refused": lambda starts: Exchange(
        one=JANE, other=None, questions=[named("oracle", starts["tiny"], noise_multiplier=0.0)]
    ),
    "a tokenizer that fails, paid for": lambda starts: Exchange(
        one=JANE, other=None, questions=[named("oracle", starts["tiny"])] * 2
    ),
    "a token without an embedding": lambda starts: Exchange(
        one=JANE, other=None, questions=[named("beyond", starts["tiny"])] * 3
    ),
    "a record on which the model fails": lambda starts: Exchange(
        one=("neurology", LABELS[0]),
        other=None,
        questions=[honest(starts["tiny"])] * 2,
        fails_on=_NEUROLOGY,
    ),
    "a record on which the model fails, where the head alone is trained": lambda starts: Exchange(
        one=("neurology", LABELS[0]),
        other=None,
        questions=[
            honest(starts["tiny"], trains="head", objective="class-sums", sampling_probability=1.0),
            honest(sure_head(starts["tiny"], 1.0), trains="head", sampling_probability=1.0, round=2),
            honest(moved(starts["tiny"]), trains="head", round=3),
        ],
        fails_on=_NEUROLOGY,
    ),
    "company in the cache of features": lambda starts: Exchange(
        one=(LONG, LABELS[0]),
        other=None,
        questions=[honest(starts["tiny"], trains="head", round=round_, num_rounds=1000) for round_ in range(1, 6)],
        everyone=False,
    ),
    "a centre that makes every gradient long": lambda starts: Exchange(
        one=("rash", LABELS[0]),
        other=None,
        questions=[
            honest(far_head(starts["tiny"]), trains="head", centred=True, sampling_probability=1.0, round=round_)
            for round_ in (1, 2)
        ],
    ),
    "a bias that would crowd out a record's weights": lambda starts: Exchange(
        one=("rash", LABELS[0]),
        other=None,
        questions=[honest(starts["tiny"], bias_scale=100.0, lora_learning_rate=100.0)],
    ),
    "a text that is cut nowhere": lambda starts: Exchange(
        one=(LONG, LABELS[0]), other=None, questions=[training(run_config(max_length=1), starts["tiny"])] * 3
    ),
    "gradients whose squares vanish": _tiny_norms(),
    "gradients whose squares vanish, by the batch": _tiny_norms(clipping="batch"),
    "gradients whose squares vanish, in the upload": _tiny_norms(noise_on="upload"),
    "padding by a long record, convolutions": _padding("convbert"),
    "padding by a long record, Fourier transforms": _padding("fnet"),
    "company in the prefix cache": lambda starts: Exchange(
        one=(LONG, LABELS[0]),
        other=None,
        # In so long a run the cache pays off; each round draws other records, the long one only now and then.
        questions=[honest(starts["tiny"], round=round_, num_rounds=1000) for round_ in range(1, 6)],
        everyone=False,
    ),
    "a process that ends within a round": lambda starts: Exchange(
        one=("rash", LABELS[0]), other=None, questions=[honest(starts["tiny"])] * 3, killed_at=1
    ),
    "labels that only one record has": lambda starts: Exchange(
        one=("rash", "hiv"),
        other=None,
        questions=[
            registering(run_config(), labels="hiv,none-of-these"),
            training(run_config(), starts["tiny"], labels=f"{LABELS[0]},{LABELS[1]},hiv"),
            honest(starts["tiny"]),
        ],
    ),
    "a second unit, and the first again": lambda starts: Exchange(
        one=None,
        other=("rash", LABELS[2]),
        questions=[honest(starts["tiny"]), honest(starts["tiny"], noise_on="upload"), honest(starts["tiny"])],
    ),
}


# Of a person, at a node of persons.
M = 2
ABOUT_JANE = tuple((*row, "jane") for row in (JANE, ("a rash", LABELS[0]), (LONG, LABELS[0]), ("knee", LABELS[2])))
A_THOUSAND = tuple((f"{WORDS[i % 13]} {WORDS[i % 11]}", LABELS[i % 3], "jane") for i in range(1000))


def of_persons(question: Question, most: int = M) -> Question:
    """The question as it is for nodes of persons, unless it says something else itself."""
    fields = dict(question.fields)
    if not fields.get("max_records_per_person", 1):
        fields["max_records_per_person"] = most
    config = {**question.config, "unit": "person", "max_records_per_person": most}
    return replace(question, config=config, fields=fields)


def _persons(starts: Starts, *sides: Sequence[Row] | None, **options: object) -> Exchange:
    """Two nodes that differ in whom they know."""
    one, other = (side or () for side in sides)
    questions = [of_persons(honest(starts["tiny"], round=round_)) for round_ in (1, 2)]
    return Exchange(**{"one": one, "other": other, "rows": PERSONS, "questions": questions, **options})


# Attacks on nodes of persons.
ATTACKS |= {
    "a person": lambda starts: _persons(starts, ABOUT_JANE, None),
    "a person with a thousand records": lambda starts: _persons(starts, A_THOUSAND, None),
    "a person who is seldom drawn": lambda starts: _persons(
        starts,
        A_THOUSAND,
        None,
        everyone=False,
        questions=[
            of_persons(honest(starts["tiny"], round=round_, num_rounds=1000, trains=trains, sampling_probability=0.3))
            for round_, trains in enumerate(("all", "head", "all"), 1)
        ],
    ),
    "a person whose records give a person away": lambda starts: _persons(
        starts,
        ABOUT_JANE,
        [(*row[:2], name) for row, name in zip(ABOUT_JANE, ("jane", "joan", "jane", "joan"), strict=True)],
    ),
    "a record that moves from a person to another": lambda starts: _persons(
        starts,
        [*ABOUT_JANE, ("cough", LABELS[1], "joan")],
        [*ABOUT_JANE[1:], ("cough", LABELS[1], "joan"), (*JANE, "joan")],
    ),
    "persons padded by a long record": lambda starts: _persons(
        starts,
        ABOUT_JANE,
        None,
        questions=[
            of_persons(
                training(run_config(model="convbert", clip_norm=0.01, **COUPLED["convbert"]), moved(starts["convbert"]))
            )
        ],
    ),
    "records, asked of persons": lambda starts: _persons(
        starts, ABOUT_JANE, None, questions=[registering(run_config()), honest(starts["tiny"])]
    ),
}


# Values of an instruction that a node may carry out.
_USUAL: dict[str, list[object]] = {
    "clip_norm": [1e-4, 0.05, 100.0],
    "noise_multiplier": [1.5, 50.0],
    "batch_size": [1, 4, 6],
    "local_steps": [1, 2, 3],
    "learning_rate": [1e-45, 1e-3, 0.5, 100.0],
    "lora_learning_rate": [0.0, 1e-45, 0.5, 100.0],
    "sampling_probability": [0.0, 0.0, 0.3, 1.0],
    "trains": ["all", "all", "head", "lora-a", "lora-b"],
    "objective": ["loss", "loss", "class-sums"],
    "bias_scale": [1.0, 1e-30, 0.3, 100.0],
    "centred": [False, False, True],
    "weight_decay": [0.0, 1.0],
    "optimizer": ["sgd", "adamw"],
    "clipping": ["joint", "split", "per-tensor", "batch"],
    "noise_on": ["gradients", "gradients", "upload"],
    "codec": ["float32", "bfloat16", "int8"],
    "relevance_threshold": [0.0, 0.6, 1.0],
    "num_rounds": [3, 1000],
    "round": [1, 2, 3],
    "run": ["run", "other", ""],
}

# Others, with which it should carry out none.
_HOSTILE: dict[str, list[object]] = {
    "clip_norm": [1e-45, 1e-36, 1e38, 0.0, -1.0, math.nan, math.inf],
    "noise_multiplier": [0.0, 0.3, 1e300, -1.0, math.nan],
    "batch_size": [0, -1, 16, 10**9, "8"],
    "local_steps": [0, 101, 10**9, True],
    "learning_rate": [0.0, 1e24, math.inf],
    "lora_learning_rate": [-1.0, 1e24, math.nan],
    "sampling_probability": [-0.1, 1.5, math.nan],
    "trains": ["nothing", "", 1],
    "objective": ["accuracy", True],
    "bias_scale": [0.0, -1.0, 1e30, math.nan],
    "centred": ["yes", 1],
    "weight_decay": [-1.0, 1e9],
    "optimizer": ["adam", 1],
    "clipping": ["none", ""],
    "noise_on": ["nothing"],
    "codec": ["ternary", "pickle"],
    "quantization": ["ternary", "x"],
    "relevance_threshold": [2.0, math.nan],
    "mechanism": ["lmo", "nothing"],
    "mechanism_parameters": ["{}", "x" * 10**5],
    "num_rounds": [1, 0, 10**12],
    "round": [0, -1, 4, 10**12],
    "run": ["x" * 10**4, 1],
    "max_records_per_person": [-1, 1, 2, 9, 10**9, True, "3"],
    "version": [4, "5", True],
    "something else": [1, "x", True],
}

# Values of a run's configuration.
_CONFIG: dict[str, list[object]] = {
    "model": ["oracle", "oracle", "beyond", "/tmp", "", "all-MiniLM-L6-v2"],
    "max_length": [1, 2, 3, 8, 64, 513, 10**6],
    "labels": ["hiv,none-of-these", "hiv,none-of-these", ",".join(reversed(LABELS)), LABELS[0], "", '["x'],
    "data": ["embedded", "records.csv", ""],
    "task": ["CAUSAL_LM", "x"],
    "rank": [1, 64, 0],
    "alpha": [1e-30, 1e30, -1.0],
    "layers": ["all", "0", "last-9"],
    "target_modules": ["dense", "nothing"],
    "memory_limit_mb": [1, 10**9],
    "device": ["cpu", "cuda:7"],
    "seed": [1],
    "prefix_cache": [False],
    "normalize_features": [True, "perhaps"],
    "train": ["head", "auto"],
    "factors": ["answers", "heads"],
    "simulate": [True],
    "public_data": [True],
    "audit": ["tokens"],
    "aggregation": [
        *("t-fedavg", "cmfl", "ffa-lora", "rolora", "fedsvd", "fed-sb", "fedex-lora", "flora", "fedavg", "bitfit"),
    ],
    "num_clients": [0, 3],
    "budget_epsilon": ["1e9"],
    "delta": [0.5],
    "ledger": ["/tmp/other.sqlite"],
    "text_column": ["label"],
    "label_column": ["text"],
    "trust-run-config": [True],
}

_TEXTS = [
    "",
    " ",
    "nan",
    "NaN",
    "inf",
    "-1e999",
    "rash",
    "neurology",
    LONG,
    JANE[0],
    'a "quoted\n\r text',
    "\u202e\u0000é🦠\ufeff",
    ",;\t",
]


def _scaled(factor: float) -> Callable[[Adapter], dict[str, Tensor]]:
    return lambda adapter: {name: torch.full_like(t, factor) for name, t in adapter.items()}


def moved(adapter: Adapter) -> dict[str, Tensor]:
    """The adapter away from its start, where the gradients of all its tensors are large."""
    generator = torch.Generator().manual_seed(0)
    return {name: t + 0.5 * torch.randn(t.shape, generator=generator) for name, t in adapter.items()}


def _first(change: Callable[[Tensor], Tensor]) -> Callable[[Adapter], dict[str, Tensor]]:
    """The adapter with its first tensor changed."""
    return lambda adapter: {n: change(t) if i == 0 else t for i, (n, t) in enumerate(adapter.items())}


_USUAL_ADAPTERS: list[Callable[[Adapter], Mapping[str, Tensor]]] = [
    dict,
    moved,
    *(lambda adapter, c=c: sure_head(adapter, c) for c in (1.0, 60.0, 1e4)),
    *map(_scaled, (0.0, 1e-45, 1e-30, 1.0, 1e4)),
]

_HOSTILE_ADAPTERS: list[Callable[[Adapter], Mapping[str, Tensor]]] = [
    *map(_scaled, (1e38, math.nan, math.inf)),
    *map(_first, (lambda t: t.T, lambda t: t[:0], lambda t: t.double(), lambda t: t.to(torch.int64), torch.flatten)),
    lambda adapter: dict(list(adapter.items())[1:]),
    lambda adapter: {**adapter, "no.such.layer": torch.ones(1)},
    lambda adapter: {},
]


def _layer(adapter: Adapter) -> str:
    return next(name for name in adapter if name.endswith(".lora_A.weight")).removesuffix(".lora_A.weight")


# Further records of a message.
_USUAL_RECORDS: list[Callable[[Adapter], Mapping[str, Mapping[str, Tensor]]]] = [
    lambda adapter: {},
    lambda adapter: {kinds.SIGNS: {kinds.SIGNS: pack_signs(moved(adapter))}},
    lambda adapter: {kinds.MERGED: {f"{_layer(adapter)}.left": torch.eye(64) * 1e3}},
]

_HOSTILE_RECORDS: list[Callable[[Adapter], Mapping[str, Mapping[str, Tensor]]]] = [
    lambda adapter: {kinds.MERGED: {f"{_layer(adapter)}.left": torch.full((64, 64), 1e30)}},
    lambda adapter: {kinds.MERGED: {"no.such.layer.left": torch.ones(2, 2)}},
    lambda adapter: {kinds.SIGNS: {kinds.SIGNS: torch.full((3,), 255, dtype=torch.uint8)}},
    lambda adapter: {"something else": {"x": torch.ones(1)}},
]


_RELEASE = Release(event=SubsampledGaussian(noise_multiplier=1.5, sampling_probability=0.25), rho_bar=1.0)
_PLANS = [
    kinds.pack_plan([(_RELEASE, 3)]),
    kinds.pack_plan([(_RELEASE, 10**6), (replace(_RELEASE, aggregate_scale=2.0), 1)]),
    {"plan": "[[1, 2, 3]]"},
    {},
]


def _one_in(draw: st.DrawFn, num: int) -> bool:
    return draw(st.integers(1, num)) == num


@st.composite
def _questions(draw: st.DrawFn, adapter: Adapter) -> Question:
    """A registration, or a request for an update; about half of those could be honest."""
    config = _config(draw)
    if _one_in(draw, 8):
        return Question(kind=draw(st.sampled_from([frame.REGISTER] * 4 + [frame.TRAIN, ""])), config=config)
    if _one_in(draw, 16):
        return Question(kind=frame.AFFORD, config=config, fields=draw(st.sampled_from(_PLANS)))
    names = draw(st.lists(st.sampled_from(sorted(_USUAL)), max_size=6, unique=True))
    fields = {"noise_multiplier": 1.5} | {name: draw(st.sampled_from(_USUAL[name])) for name in names}
    if _one_in(draw, 4):
        name = draw(st.sampled_from(sorted(_HOSTILE)))
        fields[name] = draw(st.sampled_from(_HOSTILE[name]))
    broadcast = draw(st.sampled_from(_HOSTILE_ADAPTERS if _one_in(draw, 6) else _USUAL_ADAPTERS))(adapter)
    further = draw(st.sampled_from(_HOSTILE_RECORDS if _one_in(draw, 8) else _USUAL_RECORDS))(adapter)
    question = honest(broadcast, **fields)
    if _one_in(draw, 12):
        malformed = draw(st.sampled_from([{}, {"version": frame.VERSION}, {"run": "run", "round": None}]))
        question = replace(question, fields=malformed)
    return replace(question, config=config, arrays={**question.arrays, **further})


def _config(draw: st.DrawFn) -> dict[str, object]:
    """Mostly honest, and else with one or two keys of the coordinator's choice."""
    config = dict(registering(run_config()).config)
    if _one_in(draw, 3):
        names = st.sampled_from(["model", "labels"]) | st.sampled_from(sorted(_CONFIG))
        for name in draw(st.lists(names, min_size=1, max_size=2, unique=True)):
            config[name] = draw(st.sampled_from(_CONFIG[name]))
    return config


# Records on which something known to fail does fail, and any others.
_ROWS = st.sampled_from([JANE, ("neurology", LABELS[0]), (LONG, LABELS[0]), ("rash", "hiv")]) | st.tuples(
    st.sampled_from(_TEXTS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
    st.sampled_from([*LABELS, "hiv", "", "nan"]),
)


@st.composite
def exchanges(draw: st.DrawFn, adapter: Adapter, num_questions: int) -> Exchange:
    """Exchanges of so many questions, some of them repeated."""
    pool = draw(st.lists(_questions(adapter), min_size=2, max_size=num_questions))
    order = draw(st.lists(st.integers(0, len(pool) - 1), min_size=num_questions, max_size=num_questions))
    one = draw(_ROWS)
    other = draw(st.none() | _ROWS)
    return Exchange(
        one=one,
        other=other,
        questions=[pool[index] for index in order],
        everyone=draw(st.booleans()),
        killed_at=draw(st.sampled_from([0, 0, 0, 1, 2])),
        fails_on=_NEUROLOGY,
    )


@st.composite
def _sides(draw: st.DrawFn) -> tuple[list[Row], list[Row]]:
    """What two nodes know of the persons in which they differ: another person, one more record, one moved, a split."""
    records = draw(st.lists(_ROWS, min_size=1, max_size=6))
    jane = [(*row, "jane") for row in records]
    kind = draw(st.sampled_from(["removed", "record added", "record moved", "split", "a thousand"]))
    if kind == "removed":
        return jane, []
    if kind == "record added":
        return jane, [*jane, (*draw(_ROWS), "jane")]
    if kind == "a thousand":
        return jane, [(*row[:2], "jane") for row in A_THOUSAND]
    if kind == "split":
        return jane, [(*row, draw(st.sampled_from(["jane", "joan"]))) for row in records]
    joan = [(*row, "joan") for row in draw(st.lists(_ROWS, min_size=1, max_size=3))]
    return [*jane, *joan], [*jane[1:], *joan, (*records[0], "joan")]


@st.composite
def exchanges_with_persons(draw: st.DrawFn, adapter: Adapter, num_questions: int) -> Exchange:
    """The same with nodes of persons; some questions ask for records, or for more of a person than is allowed."""
    exchange = draw(exchanges(adapter, num_questions))
    one, other = draw(_sides())
    questions = [
        q if _one_in(draw, 10) else of_persons(q, draw(st.sampled_from([1, M, M, 8, 9]))) for q in exchange.questions
    ]
    return replace(exchange, one=one, other=other, rows=PERSONS, questions=questions)
