"""A node's records with choices: nothing that runs or leaves tells how many a record has, or how long they are."""

from dataclasses import replace

import pytest
import torch

from fedpriv.config import parse, to_flower
from fedpriv.holder.vault import _reply_times
from fedpriv.holder.vault.answer import answer
from fedpriv.holder.vault.holder import Holder, bench_of, run_of
from fedpriv.holder.wire import kinds
from fedpriv.holder.wire.frame import EVALUATE, Request
from fedpriv.learning.data.text import TextData, packed_choices
from fedpriv.learning.training import private_evaluation
from fedpriv.learning.training.private_evaluation import EvaluationSpec, count
from fedpriv.learning.training.workbench import forget, load_model
from tests.architectures import random_model
from tests.chats import chat_model, chat_tokenizer
from tests.vaults import make_vault

pytestmark = pytest.mark.usefixtures("quick_nodes")

MOST = 5
PROMPT = "What is flu?"
TWO, MANY = ("a rash", "a cough"), tuple(f"cough {'a rash ' * i}" for i in range(MOST))
LONG = ("a rash " * 30, "cough " * 40)
# What neighbouring records may be: of other numbers, lengths and places, and cut.
RECORDS = {"two": (0, TWO), "most": (2, MANY), "long": (1, LONG), "a prompt that is cut": (0, TWO)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def capping(tmp_path_factory):
    """A model that caps its logits, so that they are not computed apart."""
    path = chat_model(tmp_path_factory.mktemp("model"))
    random_model("gemma2", vocab_size=len(chat_tokenizer())).save_pretrained(path)
    return path


def config_of(folder, **changes):
    values = {"data": "on-nodes", "test_data": "", "model": str(folder), "num_clients": 2, "max_length": 64}
    values |= {"prompt_column": "q", "response_column": "a", "choice_columns": ["c"], "max_choices": MOST}
    values |= {"base_dtype": "float32", "layers": "last-1", "evaluation_noise_multiplier": 2.0, "test_fraction": 0.9}
    return parse({**values, **changes})


def packed(name):
    right, choices = RECORDS[name]
    return TextData((PROMPT * (40 if "prompt" in name else 1),), (), (packed_choices(right, choices),))


def traced(model, bench, records):
    """The shapes of all that the model's modules read and give, and of every product with the layer of logits."""
    shapes, handles = [], []

    def note(module, args, kwargs, output):
        found = (*args, *kwargs.values(), *(output if isinstance(output, tuple) else (output,)))
        shapes.append((type(module).__name__, [tuple(x.shape) for x in found if isinstance(x, torch.Tensor)]))

    linear = torch.nn.functional.linear

    def product(states, weight, bias=None):
        shapes.append(("linear", tuple(states.shape), tuple(weight.shape)))
        return linear(states, weight, bias)

    for module in model.peft_model.modules():
        handles.append(module.register_forward_hook(note, with_kwargs=True))
    torch.nn.functional.linear = product
    try:
        count(model, model.initial, {}, records)
    finally:
        torch.nn.functional.linear = linear
        for handle in handles:
            handle.remove()
    return shapes


@pytest.mark.parametrize("kind", ["folder", "capping"])
def test_every_record_takes_the_same_passes_in_the_same_shapes(kind, request, tmp_path):
    folder = request.getfixturevalue(kind)
    settings = node(folder, tmp_path / "n", [("q", "0", '["a", "b"]')])
    holder = Holder.of(settings)
    bench = bench_of(run_of(to_flower(config_of(folder)), holder), holder)
    assert bench.model.alone
    found = {name: traced(bench.model, bench, bench.tokenize_tested(packed(name))) for name in RECORDS}
    usable = [int(bench.tokenize_tested(packed(name)).choices.truth[0]) for name in RECORDS]
    assert usable == [0, 2, 1, 0], "each would count"
    assert len({repr(shapes) for shapes in found.values()}) == 1
    assert sum(name.endswith("Embedding") and "Rotary" not in name for name, *_ in found["two"]) == MOST
    # What hides them is seen: passes of the records' own lengths differ.
    bench.model.alone = False
    assert len({repr(traced(bench.model, bench, bench.tokenize_tested(packed(name)))) for name in RECORDS}) > 1
    bench.model.alone = True


def node(folder, path, rows):
    path.mkdir()
    data = path / "records.csv"
    lines = ["question,answer,choices", *(",".join('"' + v.replace('"', '""') + '"' for v in row) for row in rows)]
    data.write_text("\n".join(lines) + "\n")
    columns = {"prompt_column": "question", "response_column": "answer", "choice_columns": ["choices"]}
    forget()
    return make_vault(path / "node", data, folder, label_column="", labels=[], **columns)


def asked(folder, settings, z=1000.0):
    config = config_of(folder, evaluation_noise_multiplier=z)
    forget()
    start = load_model(config, labels=())[1].initial
    instruction = kinds.pack_instruction("run", 1, EvaluationSpec(noise_multiplier=z))
    arrays = {kinds.ADAPTER: {name: tensor.numpy() for name, tensor in start.items()}}
    return answer(
        Request.of(kind=EVALUATE, run_config=to_flower(config), fields=instruction, arrays=arrays), Holder.of(settings)
    )


def test_the_answer_of_a_node_and_its_time_do_not_depend_on_the_choices(folder, tmp_path, monkeypatch):
    """On the same measurements; `test_clocks` measures such times."""
    seconds, of_release = [], _reply_times.of_release
    monkeypatch.setattr(private_evaluation, "rehearse", lambda *_: 0.01)
    monkeypatch.setattr(_reply_times, "_seconds_of_text", lambda *_: 0.001)
    monkeypatch.setattr(_reply_times._Ledger, "of", lambda *_: _reply_times._Ledger(num_charges=0, seconds=0.01))
    monkeypatch.setattr(_reply_times, "of_release", lambda *a: seconds.append(of_release(*a)) or seconds[-1])
    responses = []
    for name in ("two", "most"):
        right, choices = RECORDS[name]
        cells = str(right), "[" + ", ".join(f'"{choice.strip()}"' for choice in choices) + "]"
        rows = [(PROMPT, *cells)] * 8
        settings = replace(node(folder, tmp_path / name, rows), reply_seconds=None)
        responses.append(asked(folder, settings))
    assert {response.code for response in responses} == {0}
    assert len({frozenset(response.fields) for response in responses}) == 1
    assert len({reply.seconds for reply in seconds}) == 1


def test_a_record_that_has_more_choices_than_the_run_allows_adds_nothing_and_is_no_error(folder, tmp_path):
    settings = node(folder, tmp_path / "n", [("q", "0", '["a", "b"]')])
    holder = Holder.of(settings)
    bench = bench_of(run_of(to_flower(config_of(folder, max_choices=3)), holder), holder)
    data = TextData((PROMPT,) * 2, (), (packed_choices(0, TWO), packed_choices(4, MANY)))
    alone = count(bench.model, bench.model.initial, {}, bench.tokenize_tested(data.part([0])))
    assert torch.equal(count(bench.model, bench.model.initial, {}, bench.tokenize_tested(data)), alone)
