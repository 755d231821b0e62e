"""A node whose records are prompts with responses: the columns are its own, how prompts are put is the run's."""

import json

import pytest
import torch

from fedpriv.config import ON_NODES, parse, to_flower
from fedpriv.holder.vault import _records, answer
from fedpriv.holder.vault._records import TokenFile
from fedpriv.holder.vault.holder import Holder, bench_of, run_of
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import REFUSED, Request
from fedpriv.learning.data.chat import RESPONSE_MASK, ChatFormat
from fedpriv.learning.training.local_update import UpdateSpec
from fedpriv.learning.training.workbench import forget, load_model
from fedpriv.privacy.ledger.reader import reading
from fedpriv.privacy.mechanisms.sources import SeededSource
from tests.chats import chat_model
from tests.vaults import make_vault, write_records
from tests.wire import arrays_of

pytestmark = pytest.mark.usefixtures("quick_nodes")

ROWS = [(f"What is flu {'rash ' * i}?", ("negative", "positive")[i % 2]) for i in range(10)]
CHATS = {"prompt_column": "", "response_column": "", "messages_column": "note"}
PROMPTS = {"prompt_column": "note", "response_column": "department", "label_column": "", "labels": []}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(autouse=True)
def _seeded(monkeypatch):
    monkeypatch.setattr(answer, "_source", lambda _config, client, round_, use: SeededSource(0, client, round_, use))


def config_of(folder, **changes):
    values = {"data": ON_NODES, "test_data": "t.csv", "model": str(folder), "num_clients": 2, "max_length": 60}
    values |= {"prompt_column": "q", "response_column": "a"}
    values |= {"base_dtype": "float32", "batch_size": 4, "layers": "last-1"}
    return parse({**values, **changes})


@pytest.fixture
def node(folder, tmp_path):
    """Makes the settings of a node with these rows."""

    def build(rows=ROWS, *, name="node", **settings):
        data = write_records(tmp_path / f"{name}.csv", rows)
        forget()
        return make_vault(tmp_path / name, data, folder, **(PROMPTS | settings))

    return build


def update(settings, config, *, round_=1):
    """The values of the upload for one request to train."""
    forget()
    start = load_model(config, labels=())[1].initial
    instruction = kinds.pack_instruction("run", round_, UpdateSpec.of(config))
    arrays = {kinds.ADAPTER: arrays_of(start)}
    request = Request.of(kind="train", run_config=to_flower(config), fields=instruction, arrays=arrays)
    response = answer.answer(request, Holder.of(settings))
    assert response.code == 0, response.reason
    return torch.cat([torch.as_tensor(array).flatten() for array in response.arrays[kinds.ADAPTER].values()])


def refusal(settings, config):
    response = answer.answer(Request.of(kind="register", run_config=to_flower(config)), Holder.of(settings))
    assert response.code == REFUSED
    return response.reason


def bench_for(settings, config):
    """What a node makes of a run's configuration, and its bench."""
    holder = Holder.of(settings)
    run = run_of(to_flower(config), holder)
    return run, bench_of(run, holder)


def learned(bench):
    """The responses that a node trains on."""
    found = bench.client(0).features
    masked = zip(found["input_ids"], found[RESPONSE_MASK], strict=True)
    return [bench.base.tokenizer.decode(ids[mask.bool()]) for ids, mask in masked]


def test_it_trains_on_the_responses_of_its_own_columns(node, folder):
    run, bench = bench_for(node(), config_of(folder))
    assert (run.prompt_column, run.response_column) == ("note", "department")
    assert bench.features == ("input_ids", RESPONSE_MASK)
    assert learned(bench) == [f"{response}<|im_end|>" for _, response in ROWS]


def charges(settings):
    """What the node's ledger was charged."""
    with reading(settings.ledger) as db:
        return [entry.event for entry in db.entries() if entry.phase == "charged"]


def chat(num_turns):
    return json.dumps([{"role": ("user", "assistant")[i % 2], "content": "flu"} for i in range(num_turns)])


@pytest.mark.parametrize(
    ("rows", "silent", "columns"),
    [
        (ROWS, [(note, "") for note, _ in ROWS], {}),
        # The frames of so many turns leave no room for the last response.
        ([(chat(2), "")] * 10, [(chat(20), "")] * 10, CHATS),
    ],
    ids=["none", "cut away wholly"],
)
def test_records_without_a_response_pay_and_move_the_upload_like_no_records(node, folder, rows, silent, columns):
    """Noise and draws are seeded, and each record's draw is a coin of its own in its place."""
    held = {"full": rows, "silent": silent, "none": []}
    nodes = [node(each, name=name, num_records=10, **columns) for name, each in held.items()]
    full, without, none = (update(settings, config_of(folder)) for settings in nodes)
    assert torch.equal(without, none)
    assert not torch.equal(full, without)
    paid = [charges(settings) for settings in nodes]
    assert paid[0] == paid[1] == paid[2] != []


def test_kept_tokens_are_those_of_the_runs_own_prompts(node, folder):
    holder = Holder.of(node())
    config = run_of(to_flower(config_of(folder, system_prompt="You are kind.")), holder)
    data_set, _ = _records.registered(config, bench_of(config, holder), holder)
    file = _records._encode(config, bench_of(config, holder), holder.settings, data_set).__self__
    assert isinstance(file, TokenFile)
    assert file.encoder == ChatFormat(system_prompt="You are kind.")


def test_a_run_for_other_kinds_of_records_is_refused(node, folder):
    plain = config_of(folder, prompt_column="", response_column="", task="CAUSAL_LM")
    assert "this node's records are prompts with responses" in refusal(node(), plain)
    texts = node(name="texts", prompt_column="", response_column="", text_column="note")
    assert "this node's records are plain texts" in refusal(texts, config_of(folder))
    chats = node(name="chats", **CHATS)
    assert "no place for it" in refusal(chats, config_of(folder, prompt_template="a {}"))
    classes = config_of(folder, answers="no,yes", labels="0,1")
    assert "labels: are not those" in refusal(node(name="open"), classes)


def test_answers_stand_for_the_labels_that_the_operator_agreed_to(node, folder):
    config = config_of(folder, answers="no,yes", labels="negative,positive")
    _, bench = bench_for(node(labels=["negative", "positive"], name="agreed"), config)
    assert learned(bench) == ["no<|im_end|>", "yes<|im_end|>"] * 5
    assert bench.data.clients[0].pairs == ("negative", "positive") * 5, "what a run set would decide secret choices"


def test_a_node_of_choices_learns_the_right_ones_and_a_run_of_other_records_is_refused(node, folder):
    texts = ["a rash", "a cough"]
    rows = [(f"What is flu {i}?", "12"[i % 2], json.dumps(texts)) for i in range(10)]
    settings = node(rows, name="choices", choice_columns=["patient"], labels=["1", "2"])
    config = config_of(folder, choice_columns=["c"], labels=["1", "2"])
    run, bench = bench_for(settings, config)
    assert run.choice_columns == ("patient",)
    assert learned(bench) == [f"{texts[i % 2]}<|im_end|>" for i in range(10)]
    assert update(settings, config).abs().sum() > 0
    assert "choice_columns: this node's records have choices" in refusal(settings, config_of(folder))
    assert "choice_columns: this node's records have none" in refusal(node(), config_of(folder, choice_columns=["c"]))
