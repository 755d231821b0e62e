"""No secret choice about a record depends on what a run sets: who is set aside, which of a person's records are kept.

A coordinator that could toss such coins again would have every record evaluated in one run and trained on in another.
"""

import pytest

from fedpriv.config import ON_NODES, RunConfig, parse, to_flower
from fedpriv.holder.vault.answer import answer
from fedpriv.holder.vault.holder import Holder, bench_of, run_of
from fedpriv.holder.vault.settings import VaultSettings
from fedpriv.holder.wire import frame, kinds
from fedpriv.holder.wire.frame import Request
from fedpriv.learning.training import private_evaluation
from fedpriv.learning.training.local_update import UpdateSpec
from fedpriv.learning.training.private_evaluation import EvaluationSpec
from fedpriv.learning.training.workbench import Workbench, forget
from fedpriv.privacy.ledger.reader import reading
from tests.chats import chat_model
from tests.vaults import make_vault, write_records

NUM_RECORDS = 400
# Persons of ten records, of which a node keeps eight; that none of forty is set aside has a probability of 1e-4.
ROWS = [
    (f"What is {'flu' if row % 3 else 'rash'} {row}?", ("negative", "positive", "neither")[row % 3], f"P{row // 10}")
    for row in range(NUM_RECORDS)
]
KEPT = 8
OWN = {"prompt_column": "note", "response_column": "department", "label_column": ""}

# What runs may set about the texts of a node that agreed to these labels.
LABELLED = [
    {"labels": "negative,positive,neither", "answers": "negative,positive,neither"},
    {"labels": "negative,positive,neither", "answers": "positive,negative,neither"},
    {"labels": "negative,positive,neither", "answers": "nein,ja,weder"},
    {"labels": "negative,positive,neither", "answers": "a,b,c", "prompt_template": "Is this so? {}", "max_length": 70},
    {"labels": "negative,positive,neither", "answers": "a,b,c", "system_prompt": "You are kind.", "seed": 3},
]
# And of one that agreed to none.
FREE = [
    {},
    {"answers": "negative,positive,neither"},
    {"answers": "positive,negative"},
    {"answers": "neither,positive", "max_length": 70},
    {"answers": "negative,neither", "prompt_template": "Is this so? {}"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def make(model, tmp_path):
    def build(**settings: object) -> VaultSettings:
        forget()
        rows = ROWS if "person_column" in settings else [row[:2] for row in ROWS]
        return make_vault(tmp_path / "node", write_records(tmp_path / "r.csv", rows), model, **OWN, **settings)

    return build


def run_config(settings: VaultSettings, model, **changes: object) -> RunConfig:
    values: dict[str, object] = {"data": ON_NODES, "model": str(model), "num_clients": 2}
    values |= {"prompt_column": "q", "response_column": "a", "recipe": "per-sample", "batch_size": 4}
    values |= {"layers": "last-1", "base_dtype": "float32", "max_length": 60, "evaluation_noise_multiplier": 4.0}
    if settings.person_column:
        values |= {"unit": "person"}
    return parse(values | changes)


def used(settings: VaultSettings, config: RunConfig, monkeypatch, *, kind: str, round_: int) -> set[str]:
    """The prompts of the records that a node reads for an answer."""
    seen: set[str] = set()
    honest = Workbench.tokenize

    def tokenize(bench, data, encode=None):
        seen.update(data.texts)
        return honest(bench, data, encode)

    holder = Holder.of(settings)
    initial = bench_of(run_of(to_flower(config), holder), holder).initial
    spec = EvaluationSpec.of(config) if kind == frame.EVALUATE else UpdateSpec.of(config)
    request = Request.of(
        kind=kind,
        run_config=to_flower(config),
        fields=kinds.pack_instruction("run", round_, spec),
        arrays={kinds.ADAPTER: {name: tensor.numpy() for name, tensor in initial.items()}},
    )
    with monkeypatch.context() as patch:
        patch.setattr(Workbench, "tokenize", tokenize)
        patch.setattr(private_evaluation, "_contribution", lambda *_: private_evaluation.NO_COUNTS)
        assert answer(request, holder).code == 0
    return seen


def allowed(changes: dict[str, object]) -> set[str]:
    """The prompts of the records that have one of a run's answers."""
    given = str(changes.get("labels", changes.get("answers", "")))
    return {prompt for prompt, response, _ in ROWS if not given or response in given.split(",")}


@pytest.mark.parametrize("runs", [LABELLED, FREE], ids=["labels", "no labels"])
@pytest.mark.parametrize("unit", ["record", "person"])
def test_runs_that_set_other_texts_evaluate_the_same_records_and_train_on_no_other(
    make, model, monkeypatch, runs, unit
):
    """Before, five runs evaluated 253 of 400 records, trained on up to 71 of them, and noted changed records."""
    agreed = str(runs[0].get("labels", ""))
    persons = {"person_column": "patient", "max_records_per_person": KEPT} if unit == "person" else {}
    settings = make(labels=agreed.split(",") if agreed else [], **persons)
    evaluated, trained = set[str](), set[str]()
    for number, changes in enumerate(runs):
        config = run_config(settings, model, **changes)
        aside, train = (
            used(settings, config, monkeypatch, kind=kind, round_=2 * number + 1 + (kind == frame.EVALUATE))
            for kind in (frame.EVALUATE, frame.TRAIN)
        )
        if not evaluated:  # the first run allows every response
            evaluated, trained = aside, train
        assert aside == evaluated & allowed(changes)
        assert train == trained & allowed(changes)
        forget()
    assert evaluated.isdisjoint(trained)
    assert evaluated
    assert trained
    if unit == "person":
        assert len(evaluated | trained) == KEPT * (NUM_RECORDS // 10)
    with reading(settings.ledger) as db:
        (data_set,) = {entry.data_set for entry in db.entries()}
        assert len(db.content_changes(data_set)) == 1, "the records are said to have changed"
