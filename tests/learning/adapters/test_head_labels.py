"""A checkpoint's own head gives its answers under the names that its configuration has, in whatever order data have."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from fedpriv.config import ON_NODES, parse, to_toml
from fedpriv.errors import InputError
from fedpriv.learning.adapters import load_base
from fedpriv.learning.data import DataSource
from fedpriv.learning.training.workbench import Workbench
from fedpriv.models.publishing import saved
from fedpriv.models.publishing.export import export
from fedpriv.models.variants import folders
from tests import architectures
from tests.learning.adapters.test_heads import classifier
from tests.marks import slow
from tests.served import ask_classes, described, serving
from tests.tiny import BATCH, LABELS

OTHER = ("neurology", "Cardiology", "dermatology")
PLACES = [OTHER.index(name) for name in ("Cardiology", "dermatology", "neurology")]
TEXT = "the patient has a rash"


def checkpoint(folder, tiny_bert, kind, names=OTHER):
    model = classifier(kind)
    if kind == "gpt2":
        model.score.weight.data.mul_(30)
    model.config.id2label = dict(enumerate(names))
    model.config.label2id = {name: row for row, name in enumerate(names)}
    return architectures.save(model, folder, tokenizer_of=tiny_bert)


def logits(folder, **labels):
    return load_base(str(folder), task="SEQ_CLS", **labels).model(**BATCH).logits


@pytest.mark.parametrize("kind", ["bert", "roberta", "gpt2", *slow("distilbert")])
def test_its_rows_stand_in_the_order_of_the_labels(kind, tiny_bert, tmp_path):
    folder = checkpoint(tmp_path / kind, tiny_bert, kind)
    as_they_are = logits(folder, num_labels=3)
    assert (as_they_are.std(dim=1) > 1e-3).all(), "the check would be blind"
    assert torch.equal(logits(folder, labels=LABELS), as_they_are[:, PLACES])
    assert torch.equal(logits(folder, labels=OTHER), as_they_are)
    assert load_base(str(folder), task="SEQ_CLS", labels=LABELS).model.config.label2id["neurology"] == 2


def test_names_that_match_none_or_only_in_part_decide_nothing_silently(tiny_bert, tmp_path):
    for names in (("LABEL_0", "LABEL_1", "LABEL_2"), ("good", "bad", "neutral")):
        folder = checkpoint(tmp_path / names[0], tiny_bert, "bert", names)
        assert torch.equal(logits(folder, labels=LABELS), logits(folder, num_labels=3))
    partly = checkpoint(tmp_path / "partly", tiny_bert, "bert", ("neurology", "cardiology", "urology"))
    with pytest.raises(InputError, match=r"labels = cardiology, .*head for neurology, cardiology, urology, which"):
        logits(partly, labels=LABELS)
    assert load_base(str(partly), task="SEQ_CLS", labels=LABELS, normalize=True).new_modules == ("classifier",)
    assert load_base(str(partly), task="SEQ_CLS", labels=LABELS[:2]).new_modules == ("classifier",)


def test_every_door_gives_a_class_the_probability_that_the_checkpoint_gives_it(tiny_bert, table, tmp_path):
    folder = checkpoint(tmp_path / "base", tiny_bert, "gpt2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(TEXT, return_tensors="pt")
    plain = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    expected = plain(**inputs).logits[0].softmax(dim=0)[PLACES]
    assert expected.std() > 0.01, "the check would be blind"

    def agrees(probabilities):
        torch.testing.assert_close(torch.as_tensor(probabilities), expected, atol=1e-6, rtol=0, check_dtype=False)

    shared = {"model": str(folder), "recipe": "per-sample", "layers": "last-1", "base_dtype": "float32"}
    simulated = Workbench(parse({**shared, "data": str(table), "client_column": "site", "max_length": 32}))
    of_node = {"data": ON_NODES, "labels": ",".join(LABELS), "num_clients": 2}
    on_node = Workbench(parse({**shared, **of_node, "test_data": str(table)}), DataSource(data=str(table)))
    for bench in (simulated, on_node):
        agrees(bench.model.peft_model(**inputs).logits[0].softmax(dim=0))
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(to_toml(simulated.config))
    simulated.save(run / "variants" / "global", simulated.initial, {})
    folders.describe(run / "variants" / "global", described(simulated.config, "global"))
    loaded = saved.load(saved.find(run))
    agrees(saved.classify(loaded, [TEXT])[0])
    with serving(run) as scheduler:
        assert scheduler.labels == LABELS
        agrees(ask_classes(scheduler, "global", [TEXT]).last().probabilities[0])
    assert export(loaded, tmp_path / "exported") == "transformers"
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported").eval()
    assert tuple(exported.config.id2label.values()) == LABELS
    agrees(exported(**inputs).logits[0].softmax(dim=0))
