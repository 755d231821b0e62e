"""No record changes another record's gradient by a bit, whatever it holds, since nothing else is in its pass."""

import os
import signal
import time
from typing import Any

import pytest
import torch
from transformers import CanineConfig, CanineModel

from fedpriv.config import RunConfig
from fedpriv.errors import InputError
from fedpriv.learning.adapters import LoraSettings, attach
from fedpriv.learning.adapters._base_formats import to_bfloat16
from fedpriv.learning.data.records import Records
from fedpriv.learning.training import stacked
from fedpriv.learning.training._admission import REFUSED, admit
from fedpriv.learning.training._passes import batches, lengths_up_to, padded
from fedpriv.learning.training.independence import raising_failures, shared, side_by_side
from fedpriv.learning.training.model import TrainingModel
from fedpriv.learning.training.private_sums import PoissonSampler
from fedpriv.learning.training.workbench import load_model
from fedpriv.privacy.mechanisms.sources import SeededSource
from tests.architectures import DECODERS, ENCODERS, REPLACED_HEADS, TARGETS, random_base, save
from tests.learning.training.test_sensitivity import make_task
from tests.marks import slow
from tests.threads import with_threads
from tests.tiny import move, random_records

WORKERS = (1, 3, 2, 5, 7)


def training_model(kind: str, *, normalize=False, alone=True, bfloat16=False, **settings: Any) -> TrainingModel:
    task = "SEQ_CLS" if kind in ENCODERS else "CAUSAL_LM"
    settings = {"rank": 4, "task": task, "target_modules": TARGETS.get(kind, ())} | settings
    peft_model = move(attach(random_base(kind, normalize=normalize), LoraSettings(**settings)))
    if bfloat16:
        to_bfloat16(peft_model)
    model = TrainingModel(peft_model, memory_limit=2**30, max_length=40, alone=alone)
    admit(model)
    return model


def gradients(model, clients: list[tuple[Records, list[int]]], *, cached: bool, num_workers=1) -> list[torch.Tensor]:
    """[client] The per-sample gradients of the drawn records, [records, values], in the order of drawing."""
    rounds, num_registered = (1000, 8) if cached else (1, 16)
    sampler = PoissonSampler(num_registered=num_registered, expected_batch_size=8, source=SeededSource())
    tasks = [make_task(model, records, sampler=sampler, num_rounds=rounds, local_steps=1) for records, _ in clients]
    joined = stacked._Clients.of(model, tasks)
    drawn = [(client, index) for client, (_, indices) in enumerate(clients) for index in indices]
    rows = shared(len(drawn), joined.layout.size, dtype=torch.float32)
    stacked._fill_cache(joined)

    def work(number: int, _worker: int) -> None:
        client, index = drawn[number]
        one = [[index] if k == client else [] for k in range(len(clients))]
        for row, _ in stacked._gradient_rows(joined, joined.broadcast, stacked._Drawn.of_records(one)):
            rows[number] = row[0]

    with raising_failures(), with_threads(1):  # as in a vault
        side_by_side(work, len(drawn), num_workers)
    return list(rows.split([len(indices) for _, indices in clients]))


def records_for(model: TrainingModel, seed: int = 0) -> Records:
    classes = 0 if model.peft_model.active_peft_config.task_type == "CAUSAL_LM" else 3
    return random_records(40, classes=classes, seed=seed, vocabulary=50, shortest=1, longest=40)


def cases() -> list[object]:
    found = []
    kinds = [(kind, False) for kind in (*ENCODERS, *DECODERS)] + [(kind, True) for kind in REPLACED_HEADS]
    for kind, normalize in kinds:
        for bfloat16 in (False, True):
            if bfloat16 and kind in ("fnet", "mixtral"):  # compute in no bfloat16
                continue
            # One with a head, one that attends to what is before, and one whose experts take sizes from the records.
            every_day = kind == "bert" or (kind in ("llama", "mixtral") and not bfloat16)
            name = f"{kind}{' normalised' if normalize else ''}-{'bfloat16' if bfloat16 else 'float32'}"
            marks = [] if every_day and not normalize else pytest.mark.slow
            found.append(pytest.param(kind, normalize, bfloat16, id=name, marks=marks))
    return found


def assert_same_in_every_order(model: TrainingModel, num_orders: int) -> None:
    """Orders and subsets of seven records, shared out among numbers of workers."""
    records, generator = records_for(model), torch.Generator().manual_seed(1)
    chosen = torch.randperm(40, generator=generator)[:7].tolist()
    (expected,) = gradients(model, [(records, chosen)], cached=False)
    assert expected.abs().sum(dim=1).gt(0).any(), "all gradients vanish, so the test would prove nothing"
    for number in range(num_orders):
        order, num_workers = torch.randperm(7, generator=generator)[: 7 - number % 7].tolist(), WORKERS[number % 5]
        drawn = [chosen[place] for place in order]
        (found,) = gradients(model, [(records, drawn)], cached=False, num_workers=num_workers)
        assert torch.equal(found, expected[order]), (number, order)


@pytest.mark.parametrize("num_orders", [3, *slow(200)])
@pytest.mark.parametrize(("kind", "normalize", "bfloat16"), cases())
def test_a_record_has_the_same_bits_in_all_orders_and_subsets(kind, normalize, bfloat16, num_orders):
    assert_same_in_every_order(training_model(kind, normalize=normalize, bfloat16=bfloat16), num_orders)


@pytest.mark.parametrize("num_passes", [80, *slow(1000)])
@pytest.mark.parametrize("kind", ["bert", *slow("llama")])
def test_a_record_has_the_same_bits_in_a_late_pass(kind, num_passes):
    model = training_model(kind)
    records = records_for(model)
    (first,) = gradients(model, [(records, [3])], cached=False)
    drawn = [*range(4, 40), *[index % 40 for index in range(num_passes - 40)], 3]
    (others,) = gradients(model, [(records, drawn)], cached=False)
    assert torch.equal(others[-1], first[0])


@pytest.mark.parametrize("num_workers", [3, *slow(1)])
@pytest.mark.parametrize("kind", ["bert", "llama", *slow("modernbert")])
def test_other_records_and_clients_change_no_bit_through_the_prefix_cache(kind, num_workers):
    model = training_model(kind, layers="last-1")
    assert model.cache is not None
    model.num_workers = num_workers
    one, other = records_for(model), records_for(model, seed=1)
    together = gradients(model, [(one, [0, 3, 5]), (other, list(range(20)))], cached=True)
    fewer = gradients(model, [(one, [5, 0, 3]), (other, [7])], cached=True)
    assert torch.equal(together[0][[2, 0, 1]], fewer[0])
    assert torch.equal(together[1][7], fewer[1][0])


@pytest.mark.parametrize("rank", [1, *slow(3)])
def test_no_other_record_changes_a_bit_of_a_gradient_in_r(rank):
    """A product with few outputs may round by a row's place, and R has few."""
    assert_same_in_every_order(training_model("bert", rank=rank, trains="lora-r"), 3)


# ---------------------------------------------------------------- passes and workers


@pytest.mark.parametrize("longest", [None, 40, 63, 512])
def test_a_record_is_padded_by_its_own_length_alone_and_little(longest):
    for tokens in range(1, longest or 2000):
        length = padded(tokens, longest)
        assert tokens < length <= max(tokens + 8, tokens * 8 / 7)
        assert length <= (longest or length)
    assert len(lengths_up_to(512, 512)) < 40, "each is rehearsed"
    assert {padded(n, longest) for n in lengths_up_to(30, longest)} == {padded(n, longest) for n in range(1, 31)}
    if longest is not None:
        assert padded(longest, longest) == longest
        assert {longest - 1, longest} <= set(lengths_up_to(longest, longest)), "with a mask and without"


def test_passes_of_a_simulation_have_each_record_once_and_little_padding():
    rows = random_records(100, longest=40).features["input_ids"]
    found = list(batches(list(map(len, rows)), lambda tokens: 200 // tokens))
    assert sorted(position for together in found for position in together) == list(range(100))
    for together in found:
        lengths = [len(rows[position]) for position in together]
        assert lengths == sorted(lengths)
        assert len(together) <= max(1, 200 // lengths[0])
    assert list(batches([], lambda _: 8)) == []


def test_a_worker_leaves_its_results_and_a_failed_one_is_told(monkeypatch):
    found = shared(7, dtype=torch.int64)

    def fill(job: int, worker: int) -> None:
        found[job] = 10 * job + worker
        if job == 5 and worker == 2:
            raise ValueError("a record's text")

    side_by_side(fill, 5, 3)
    assert found.tolist() == [0, 11, 22, 30, 41, 0, 0]
    with pytest.raises(RuntimeError, match="a worker failed"):
        side_by_side(fill, 7, 3)
    with monkeypatch.context() as patch:
        started, fork = [], os.fork

        def one_fork() -> int:
            if started:
                raise BlockingIOError("no further process")
            started.append(fork())
            return started[0]

        patch.setattr(os, "fork", one_fork)
        with pytest.raises(BlockingIOError):
            side_by_side(lambda *_: time.sleep(60), 5, 3)
    with pytest.raises(ChildProcessError):
        os.waitpid(started[0], os.WNOHANG)
    with pytest.raises(ValueError, match="a record"):
        side_by_side(lambda job, _: fill(job, 2), 6, 1)
    side_by_side(fill, 0, 3)


def test_a_worker_ends_with_its_parent():
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        side_by_side(lambda *_: (os.write(writer, b"."), time.sleep(600)), 2, 2)
        os._exit(0)
    os.close(writer)
    assert os.read(reader, 1) == b"."
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while os.read(reader, 1):  # until no worker holds the other end
        pass
    os.close(reader)


def test_what_kills_a_worker_kills_the_process_that_waits_for_it():
    """So that it is noticed, whoever computes a record."""
    child = os.fork()
    if not child:
        os.close(2)
        side_by_side(lambda job, _: os.kill(os.getpid(), signal.SIGKILL) if job == 1 else None, 2, 2)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


# ---------------------------------------------------------------- admission


def unknown_model(monkeypatch, change=None, *, alone: bool = False) -> TrainingModel:
    """A BERT under an unknown name, in which the states of a pass go through `change`."""
    model = training_model("bert", alone=alone)
    monkeypatch.setattr(model.peft_model.config, "model_type", "unheard-of")
    if change is not None:
        embeddings = model.peft_model.base_model.model.bert.embeddings
        embeddings.register_forward_hook(lambda _module, _args, states: change(states))
    return model


def test_an_unknown_architecture_is_admitted_and_one_that_mixes_records_runs_them_one_at_a_time(monkeypatch):
    model = unknown_model(monkeypatch)
    admit(model)
    assert not model.alone
    model = unknown_model(monkeypatch, lambda states: states + 0.1 * states.mean(dim=0))
    admit(model)
    assert model.alone
    assert list(model.passes(records_for(model).items([1, 2]))) == [[0], [1]]


@pytest.mark.parametrize("kind", ["convbert", "bert"])
def test_an_architecture_in_which_padding_counts_runs_records_one_at_a_time(kind):
    model = training_model(kind, normalize=True, alone=False)
    assert model.alone == (kind == "convbert"), "its convolutions read the padding behind a text"


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["fails", "other numbers"])
def test_a_model_that_does_not_run_from_its_middle_trains_without_a_prefix_cache(monkeypatch, broken):
    model = training_model("bert", layers="last-1", alone=False)
    assert model.cache is not None
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
    assert not model.alone


@pytest.mark.parametrize("alone", [False, True])
def test_an_architecture_that_remembers_earlier_records_or_draws_random_numbers_is_refused(monkeypatch, alone):
    memory = [torch.zeros(())]

    def remember(states):
        memory[0] = memory[0] + states.detach().abs().mean()
        return states + 1e-3 * memory[0]

    with pytest.raises(InputError, match=r"unheard-of model cannot train here \(a pass changes the next one"):
        admit(unknown_model(monkeypatch, remember, alone=alone))
    with pytest.raises(InputError, match=r"unheard-of model cannot train here .*random numbers"):
        admit(unknown_model(monkeypatch, lambda states: states + 0 * torch.randn(states.shape), alone=alone))


# {what a module keeps of a pass: how it notes the length}
NOTES = {
    "buffer": lambda module, length: module.longest.fill_(length),
    "attribute": lambda module, length: setattr(module, "longest_so_far", length),
    "tensor": lambda module, length: setattr(module, "longest_mask", torch.ones(length)),
    "list": lambda module, length: module.longest_list.append(length),
    "weight": lambda module, _length: module.word_embeddings.weight.mul_(1.0),
}


@pytest.mark.parametrize("kept", NOTES)
def test_an_architecture_that_changes_itself_is_refused(monkeypatch, kept):
    model = unknown_model(monkeypatch)
    embeddings = model.peft_model.base_model.model.bert.embeddings
    embeddings.register_buffer("longest", torch.zeros(()))
    embeddings.longest_so_far, embeddings.longest_mask, embeddings.longest_list = 0, None, []

    @torch.no_grad()
    def note(module, _args, states):
        NOTES[kept](module, states.shape[1])

    embeddings.register_forward_hook(note)
    with pytest.raises(InputError, match=r"unheard-of model cannot train here .*a pass changes .*embeddings\."):
        admit(model)


def test_an_architecture_that_does_not_fit_is_refused_by_name(tmp_path, tiny_bert, caplog):
    """CANINE reads characters, so its configuration states no vocabulary; the log says where it failed."""
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = CanineConfig(**size, max_position_embeddings=64, num_hash_buckets=16, num_hash_functions=2)
    save(CanineModel(config), tmp_path / "canine", tokenizer_of=tiny_bert)
    run = RunConfig(model=str(tmp_path / "canine"), max_length=16, target_modules=("query", "value"))
    with pytest.raises(InputError, match=r"a canine model cannot train here .*vocab_size.*; bert") as refused:
        load_model(run, labels=("a", "b", "c"))
    assert "\n" not in str(refused.value)
    assert "_first_tokens" in caplog.text


def test_architectures_that_a_test_could_miss_are_refused_by_name(monkeypatch):
    model = training_model("bert")
    for kind in REFUSED:
        monkeypatch.setattr(model.peft_model.config, "model_type", kind)
        with pytest.raises(InputError, match=f"a {kind} model cannot train"):
            admit(model)
