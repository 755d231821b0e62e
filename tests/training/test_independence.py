"""No record changes another record's gradient by a bit, whatever it holds and wherever it stands."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest
import torch
from transformers import CanineConfig, CanineModel

from fedpriv.adapters import LoraSettings, attach
from fedpriv.adapters.lora import Trains
from fedpriv.config import RunConfig
from fedpriv.data.records import Records
from fedpriv.errors import InputError
from fedpriv.mechanisms.sources import SeededSource
from fedpriv.training import stacked
from fedpriv.training._admission import REFUSED, VERIFIED, admit
from fedpriv.training._isolation import raising_failures
from fedpriv.training._sampling import PoissonSampler
from fedpriv.training.model import TrainingModel
from fedpriv.training.workbench import load_model
from tests.architectures import DECODERS, ENCODERS, EVERY_DAY, REPLACED_HEADS, TARGETS, random_base, save
from tests.threads import NUMBERS, with_threads
from tests.tiny import move, random_records
from tests.training.test_local_update import make_task

# So little that the largest pass has few rows, of which all that may be more are tried for every model.
LITTLE_MEMORY = 2**22


def training_model(
    kind: str,
    *,
    layers: str = "all",
    rank: int = 4,
    trains: Trains = "lora",
    normalize: bool = False,
    memory_limit: int = 2**30,
    **sizes: int,
) -> TrainingModel:
    task = "SEQ_CLS" if kind in ENCODERS else "CAUSAL_LM"
    settings = LoraSettings(rank=rank, layers=layers, task=task, target_modules=TARGETS.get(kind, ()), trains=trains)
    base = random_base(kind, normalize=normalize, **sizes)
    model = TrainingModel(move(attach(base, settings)), memory_limit=memory_limit, max_length=40)
    admit(model)
    return model


def gradients(
    model: TrainingModel, clients: list[tuple[Records, list[int]]], *, cached: bool, batch_size: int = 8
) -> list[torch.Tensor]:
    """[client] The per-sample gradients of the drawn records, [records, values], in the order of drawing."""
    rounds, num_registered = (1000, batch_size) if cached else (1, 2 * batch_size)
    tasks = [
        dataclasses.replace(
            make_task(model, records, num_rounds=rounds, local_steps=1),
            sampler=PoissonSampler(
                num_registered=num_registered, expected_batch_size=batch_size, source=SeededSource()
            ),
            noise=None,
        )
        for records, _ in clients
    ]
    joined = stacked._Clients.of(model, tasks)
    drawn = [indices for _, indices in clients]
    order = [(client, index) for client, indices in enumerate(drawn) for index in indices]
    by_record = {}
    items = [(records, index) for records, indices in clients for index in indices]
    num_expected = batch_size * len(clients)
    positions = [position for together in model.passes(items, num_expected) for position in together.positions]
    with raising_failures():
        batches = list(stacked._gradient_rows(joined, joined.broadcast, stacked._Drawn.of_records(drawn)))
    rows = [row for batch, owners in batches for row in batch[: len(owners)]]
    for position, row in zip(positions, rows, strict=True):
        by_record[order[position]] = row
    return [torch.stack([by_record[client, index] for index in drawn[client]]) for client in range(len(clients))]


def records_for(model: TrainingModel, seed: int = 0) -> Records:
    classes = 0 if model.peft_model.active_peft_config.task_type == "CAUSAL_LM" else 3
    return random_records(40, classes=classes, seed=seed, vocabulary=50, shortest=1, longest=40)


def case(kind: str, *, normalize: bool) -> object:
    every_day = kind == "roberta" if normalize else kind in EVERY_DAY
    name = f"{kind} normalised" if normalize else kind
    return pytest.param(kind, normalize, id=name, marks=[] if every_day else pytest.mark.slow)


# Where features are normalised, some encoders have another head.
CASES = [case(kind, normalize=False) for kind in (*ENCODERS, *DECODERS)]
CASES += [case(kind, normalize=True) for kind in REPLACED_HEADS]


# With much memory the largest passes have many rows; those of an encoder are tried every day below.
@pytest.mark.parametrize("memory_limit", [LITTLE_MEMORY, pytest.param(2**30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("cached", [False, True], ids=["whole model", "prefix cache"])
@pytest.mark.parametrize(("kind", "normalize"), CASES)
def test_what_else_was_drawn_changes_no_bit_of_a_records_gradient(kind, normalize, cached, memory_limit):
    layers = "last-1" if cached else "all"
    model = training_model(kind, layers=layers, normalize=normalize, memory_limit=memory_limit)
    if cached and model.cache is None:
        pytest.skip(f"{kind} has no frozen prefix")
    records, chosen = records_for(model), list(range(0, 40, 2))
    (expected,) = gradients(model, [(records, chosen)], cached=cached)
    assert expected.abs().sum(dim=1).gt(0).any(), "all gradients vanish, so the test would prove nothing"
    others = records_for(model, seed=9)
    for drawn in (
        chosen[1:],  # one removed
        chosen[:1],
        chosen[::-1],  # permuted
        list(range(40)),  # others added in between
    ):
        (found,) = gradients(model, [(records, drawn)], cached=cached)
        for index in set(drawn) & set(chosen):
            assert torch.equal(found[drawn.index(index)], expected[chosen.index(index)]), index
    # Other contents in the same places.
    mixed = Records(
        {"input_ids": tuple((records if i in chosen[:5] else others).features["input_ids"][i] for i in range(40))},
        records.labels,
        0,
    )
    (found,) = gradients(model, [(mixed, chosen)], cached=cached)
    assert torch.equal(found[:5], expected[:5])


def cases_of_any_size() -> list[object]:
    """Every day the smallest and the largest passes of an encoder."""
    every_day = [("bert", False, 1), ("bert", False, 10**6)]
    kinds = [*((kind, False) for kind in (*ENCODERS, *DECODERS)), *((kind, True) for kind in REPLACED_HEADS)]
    found = []
    for (kind, normalize), (batch_size, which) in product(kinds, ((1, "smallest"), (10**6, "largest"))):
        name = f"{kind}{' normalised' if normalize else ''}-{which} passes"
        marks = [] if (kind, normalize, batch_size) in every_day else pytest.mark.slow
        found.append(pytest.param(kind, normalize, batch_size, id=name, marks=marks))
    return found


@pytest.mark.parametrize(("kind", "normalize", "batch_size"), cases_of_any_size())
def test_in_passes_of_any_size_no_other_record_changes_a_bit(kind, normalize, batch_size):
    assert_no_other_record_changes_a_bit(training_model(kind, normalize=normalize), batch_size)


@pytest.mark.parametrize("threads", [pytest.param(n, marks=[] if n == 3 else pytest.mark.slow) for n in NUMBERS])
@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[] if k == "gemma2" else pytest.mark.slow) for k in (*ENCODERS, *DECODERS)],
)
def test_no_other_record_changes_a_bit_at_any_number_of_threads(kind, threads):
    """So wide that activations are shared among threads, and cut within vectors at three, five and seven of them."""
    wide = {"intermediate_size": 1088} if "intermediate_size" in {**ENCODERS, **DECODERS}[kind] else {}
    with with_threads(threads):
        model = training_model(kind, **wide)
        classes = 3 if kind in ENCODERS else 0
        records = random_records(13, classes=classes, seed=0, vocabulary=50, shortest=6, longest=7)
        (expected,) = gradients(model, [(records, list(range(13)))], cached=False, batch_size=8)
        for drawn in ([0], [0, *range(4, 13)], list(range(13))[::-1]):
            (found,) = gradients(model, [(records, drawn)], cached=False, batch_size=8)
            assert torch.equal(found, expected[drawn])


def cases_of_r() -> list[object]:
    """Every day the fewest outputs, in the smallest and the largest passes; less of a decoder."""
    every_day = [("bert", 1, 1), ("bert", 1, 10**6), ("llama", 1, 8)]
    every_case = product(("bert", "llama"), (1, 3, 16), (1, 8, 10**6))
    return [pytest.param(*each, marks=[] if each in every_day else pytest.mark.slow) for each in every_case]


@pytest.mark.parametrize(("kind", "rank", "batch_size"), cases_of_r())
def test_no_other_record_changes_a_bit_of_a_gradient_in_r(kind, rank, batch_size):
    """A product with few outputs may round by a row's place, and R has few."""
    assert_no_other_record_changes_a_bit(training_model(kind, rank=rank, trains="lora-r"), batch_size)


def assert_no_other_record_changes_a_bit(model: TrainingModel, batch_size: int) -> None:
    records, everyone = records_for(model), list(range(40))
    (expected,) = gradients(model, [(records, everyone)], cached=False, batch_size=batch_size)
    for drawn in (everyone[:1], everyone[1::2], everyone[::-1]):
        (found,) = gradients(model, [(records, drawn)], cached=False, batch_size=batch_size)
        assert torch.equal(found, expected[drawn])


def test_every_verified_architecture_is_tested():
    assert {*ENCODERS, *DECODERS} == {*VERIFIED, "mixtral"}


@pytest.mark.parametrize(("kind", "normalize"), CASES)
def test_what_other_clients_draw_changes_no_bit_of_a_records_gradient(kind, normalize):
    model = training_model(kind, normalize=normalize)
    one, other = records_for(model), records_for(model, seed=1)
    together = gradients(model, [(one, [0, 3, 5]), (other, list(range(20)))], cached=False)
    fewer = gradients(model, [(one, [0, 3, 5]), (other, [7])], cached=False)
    assert torch.equal(together[0], fewer[0])
    assert torch.equal(together[1][7], fewer[1][0])


def unknown_model(monkeypatch, change=None) -> TrainingModel:
    """A BERT under an unknown name, in which the states of a pass go through `change`."""
    model = training_model("bert")
    monkeypatch.setattr(model.peft_model.config, "model_type", "unheard-of")
    if change is not None:
        embeddings = model.peft_model.base_model.model.bert.embeddings
        embeddings.register_forward_hook(lambda _module, _args, states: change(states))
    return model


def test_an_unknown_architecture_that_passes_the_test_is_admitted(monkeypatch):
    model = unknown_model(monkeypatch)
    admit(model)
    assert model.records_share_passes


def test_an_unknown_architecture_that_mixes_records_runs_them_one_at_a_time(monkeypatch):
    model = unknown_model(monkeypatch, lambda states: states + 1e-5 * states.mean(dim=0))
    admit(model)
    assert not model.records_share_passes
    assert model.sizes(8) == (1,)


def test_records_that_touch_each_other_in_the_largest_passes_alone_are_found(monkeypatch):
    model = unknown_model(monkeypatch)
    monkeypatch.setattr("fedpriv.training.model.found_once", lambda _, __, sizes: [(size,) for size in sizes])
    (most,) = model.sizes(40)
    assert model.sizes(40, 10**6)[-1] > most
    embeddings = model.peft_model.base_model.model.bert.embeddings
    embeddings.register_forward_hook(lambda _module, _args, s: s + 1e-5 * s.mean(dim=0) if len(s) > most else s)
    admit(model)
    assert not model.records_share_passes


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["fails", "other numbers"])
def test_a_model_that_does_not_run_from_its_middle_trains_without_a_prefix_cache(monkeypatch, broken):
    model = training_model("bert", layers="last-1")
    assert model.cache is not None
    monkeypatch.setattr(model.peft_model.config, "model_type", "unheard-of")
    bert, first = model.peft_model.base_model.model.bert, model.cache.prefix.layers[0]

    def from_the_middle(_module, _args, states):
        if bert.encoder.layer[0] is first:
            return None
        if broken == "fails":
            raise RuntimeError("the size of tensor a must match the size of tensor b")
        return states + 1

    bert.encoder.layer[1].output.register_forward_hook(from_the_middle)
    admit(model)
    assert model.cache is None
    assert model.records_share_passes


@pytest.mark.slow
def test_an_unknown_architecture_that_runs_from_its_middle_keeps_its_prefix_cache(monkeypatch):
    model = training_model("bert", layers="last-1")
    monkeypatch.setattr(model.peft_model.config, "model_type", "unheard-of")
    admit(model)
    assert model.cache is not None


def test_an_architecture_that_remembers_earlier_records_is_refused(monkeypatch):
    memory = [torch.zeros(())]

    def remember(states):
        memory[0] = memory[0] + states.detach().abs().mean()
        return states + 1e-3 * memory[0]

    with pytest.raises(InputError, match="unheard-of model cannot train"):
        admit(unknown_model(monkeypatch, remember))


def test_an_architecture_that_draws_random_numbers_is_refused(monkeypatch):
    with pytest.raises(InputError, match="unheard-of model cannot train"):
        admit(unknown_model(monkeypatch, lambda states: states + 1e-3 * torch.randn(states.shape)))


def test_an_architecture_that_does_not_fit_is_refused_by_name(tmp_path, tiny_bert, caplog):
    """CANINE reads characters, so its configuration states no vocabulary; the log says where it failed."""
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = CanineConfig(**size, max_position_embeddings=64, num_hash_buckets=16, num_hash_functions=2)
    save(CanineModel(config), tmp_path / "canine", tokenizer_of=tiny_bert)
    run = RunConfig(model=str(tmp_path / "canine"), max_length=16, target_modules=("query", "value"))
    with pytest.raises(InputError, match=r"a canine model cannot train here .*vocab_size.*; bert") as refused:
        load_model(run, num_labels=3)
    assert "\n" not in str(refused.value)
    assert "_first_tokens" in caplog.text


@pytest.mark.parametrize("kind", REFUSED)
def test_architectures_that_a_test_could_miss_are_refused_by_name(monkeypatch, kind):
    model = training_model("bert")
    monkeypatch.setattr(model.peft_model.config, "model_type", kind)
    with pytest.raises(InputError, match=f"a {kind} model cannot train"):
        admit(model)
