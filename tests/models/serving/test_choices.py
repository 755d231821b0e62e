"""A language model's server tells the likeliest of given choices, as `fedpriv predict` scores them."""

import numpy as np
import pytest

from fedpriv.models.publishing import saved
from tests.models.serving.fake import FakeServing
from tests.models.serving.running import client_of
from tests.served import serving

TEXTS = ["What is flu?", "a rash on the knee"]
CHOICES = [["a disease", "pain today", "no"], ["it itches a lot", "cough"]]


@pytest.fixture(scope="module")
def scheduler(chat_run):
    with serving(chat_run, rows=3) as found:
        yield found


def asked(client, choices, texts=TEXTS, **more):
    return client.post("/v1/classify", json={"model": "client-0", "input": texts, "choices": choices, **more})


def test_each_choice_has_the_share_of_its_mean_likelihood(scheduler, chat_run):
    client = client_of(scheduler)
    found = asked(client, CHOICES).json()
    loaded = saved.load(saved.find(chat_run, variant="client-0"))
    for row, own, scores in zip(found["data"], CHOICES, saved.choose(loaded, TEXTS, CHOICES), strict=True):
        expected = np.exp(scores) / np.exp(scores).sum()
        assert row["probabilities"] == pytest.approx(dict(zip(own, expected, strict=True)), abs=1e-4)
        assert row["label"] == own[int(np.argmax(scores))]
    assert len({tuple(row["probabilities"].values()) for row in found["data"]}) == 2
    # The same for all texts, and for one.
    both = asked(client, CHOICES[0]).json()["data"]
    assert both[0]["probabilities"] == pytest.approx(found["data"][0]["probabilities"], abs=1e-5)
    assert len(both[1]["probabilities"]) == 3
    alone = asked(client, CHOICES[0], TEXTS[0]).json()["data"]
    assert alone[0]["probabilities"] == pytest.approx(both[0]["probabilities"], abs=1e-5)


def test_what_are_no_choices_is_refused_by_name(scheduler):
    client = client_of(scheduler, max_new_tokens=20)
    for choices in (
        *(["a"], [["a", "b"], ["c"]], [["a", "b"]] * 3, ["a", " a"], ["a", "  "], [], "a"),
        *(list(map(str, range(40))), ["a", "cough " * 40], ["a", ""]),
    ):
        answer = asked(client, choices)
        param = "choices.0.1" if choices == ["a", ""] else "choices"
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.json()


def test_classifiers_have_labels_of_their_own_and_language_models_none(scheduler):
    client, of_classifiers = client_of(scheduler), client_of(FakeServing(task="SEQ_CLS"))
    answer = asked(of_classifiers, ["a", "b"])
    assert "choices: are for language models" in answer.json()["error"]["message"]
    assert client.post("/v1/classify", json={"model": "client-0", "input": "x"}).status_code == 400
    embedding = client.post("/v1/embeddings", json={"model": "client-0", "input": "x", "choices": ["a", "b"]})
    assert embedding.json()["error"]["param"] == "choices"
