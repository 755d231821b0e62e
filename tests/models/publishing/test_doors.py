"""A variant says the same at every door: predict, export, push and serve read it alike, and refuse it alike.

One that lives only in a store answers, is exported and is pushed as one in a folder of its own.
"""

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from fedpriv.errors import InputError
from fedpriv.learning import adapters
from fedpriv.models.publishing import hub, saved
from fedpriv.models.publishing.export import export
from fedpriv.models.serving.scheduler import open_serving
from fedpriv.models.variants import Store, folders
from tests import architectures
from tests.cli.command_line import as_json, fedpriv, refused
from tests.models.publishing.runs import finished, store_of
from tests.served import LABELS, ask_classes, described
from tests.stores import add

SHORT, LONG = "the patient has a rash", "pain in the chest today " * 8 + "a rash on the skin " * 30
MOST = 24

Answer = Mapping[str, float]
Door = Callable[[Path, str, str], Answer]


def predicts(source: Path, model: str, text: str) -> Answer:
    loaded = saved.load(saved.find(source, model=model))
    return dict(zip(loaded.saved.labels, saved.classify(loaded, [text])[0], strict=True))


@torch.no_grad()
def exports(source: Path, model: str, text: str) -> Answer:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        assert export(saved.load(saved.find(source, model=model)), out) == "transformers"
        tokenizer = AutoTokenizer.from_pretrained(out)
        plain = AutoModelForSequenceClassification.from_pretrained(out).eval()
    inputs = tokenizer(text, truncation=True, max_length=MOST, return_tensors="pt")
    found = plain(**inputs).logits[0].softmax(dim=0)
    return {plain.config.id2label[row]: float(p) for row, p in enumerate(found)}


def pushes(source: Path, model: str, text: str) -> Answer:
    found = saved.find(source)
    with tempfile.TemporaryDirectory() as folder:
        for name, content in hub.contents(found).items():
            (Path(folder) / name).write_bytes(content)
        return predicts(Path(folder), model or str(found.model), text)


def serves(source: Path, model: str, text: str) -> Answer:
    served = open_serving(source, memory_bytes=10**9, max_waiting=9, base_dtype="float32", model=model)
    try:
        return dict(zip(served.labels, ask_classes(served, "global", [text]).last().probabilities[0], strict=True))
    finally:
        served.close()


DOORS: Mapping[str, Door] = {"predict": predicts, "export": exports, "push": pushes, "serve": serves}
# A store that was moved from its run has nothing that may go to the Hub.
OF_A_STORE = ("predict", "export", "serve")


def made(folder: Path, tiny_bert: Path) -> tuple[Path, Path]:
    """A classifier whose pooling is its own, so that its export is of transformers, and a run of it."""
    config = AutoConfig.for_model("gpt2", **architectures.DECODERS["gpt2"], num_labels=len(LABELS))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config)
    base = architectures.save(model, folder / "base", tokenizer_of=tiny_bert)
    values = {"recipe": "per-sample", "layers": "all", "rank": 4, "alpha": 64.0, "max_length": MOST}
    return base, finished(folder / "run", base, values=values)


@pytest.fixture(scope="module")
def run(tiny_bert, tmp_path_factory):
    return made(tmp_path_factory.mktemp("doors"), tiny_bert)[1]


@pytest.fixture(scope="module")
def base(run):
    return run.parent / "base"


@pytest.fixture(scope="module")
def moved(run, tmp_path_factory):
    """A store of the run's variants, which lies in no run's folder."""
    return store_of(run, tmp_path_factory.mktemp("moved") / "store", ("client-0", "client-1", "global"))


@torch.no_grad()
def expected(run: Path, base: Path, text: str) -> Answer:
    """The probabilities by plain transformers and peft."""
    model = adapters.load(str(base), run / "variants" / "global")
    inputs = AutoTokenizer.from_pretrained(base)(text, truncation=True, max_length=MOST, return_tensors="pt")
    found = dict(zip(LABELS, model(**inputs).logits[0].softmax(dim=0).tolist(), strict=True))
    assert max(found.values()) - min(found.values()) > 0.05, "the check would be blind"
    return found


def test_a_run_and_a_store_that_was_moved_answer_alike(run, base, moved):
    known = expected(run, base, LONG)
    for name, door in DOORS.items():
        assert door(run, "", LONG) == pytest.approx(known, abs=1e-5), name
        assert name not in OF_A_STORE or door(moved, str(base), LONG) == pytest.approx(known, abs=1e-5), name


def test_a_base_that_was_moved_is_the_one_that_is_named(tiny_bert, tmp_path):
    base, run = made(tmp_path, tiny_bert)
    known, elsewhere = expected(run, base, SHORT), tmp_path / "elsewhere"
    shutil.move(base, elsewhere)
    for name, door in DOORS.items():
        assert door(run, str(elsewhere), SHORT) == pytest.approx(known, abs=1e-5), name
        for named in ("", "/nowhere/base"):
            with pytest.raises(InputError, match="model = "):
                door(run, named, SHORT)


def test_a_base_with_other_weights_is_refused(run, moved, base, tmp_path):
    altered = shutil.copytree(base, tmp_path / "base")
    weights = altered / "model.safetensors"
    save_file({name: tensor + 0.01 for name, tensor in load_file(weights).items()}, weights, metadata={"format": "pt"})
    for name, door in DOORS.items():
        for source in [run, moved] if name in OF_A_STORE else [run]:
            with pytest.raises(InputError, match="its weights are not those that this adapter was trained on"):
                door(source, str(altered), SHORT)


def test_a_pickle_beside_the_tensors_is_never_read(run, base, tmp_path):
    run = shutil.copytree(run, tmp_path / "run")
    before = predicts(run, "", SHORT)
    folder = run / "variants" / "global"
    tensors = {name: torch.zeros_like(tensor) for name, tensor in load_file(folder / folders.TENSORS).items()}
    shutil.move(folder / folders.TENSORS, folder / "other.safetensors")
    torch.save(tensors, folder / "adapter_model.bin")
    for door in DOORS.values():
        assert door(run, "", SHORT) == pytest.approx(before, abs=1e-5)
    with pytest.raises(InputError, match=r"needs adapter_model.safetensors .* never read"):
        adapters.load(str(base), folder)


ANSWER = {"utility_before": 0.9, "utility_after": 0.9}


def store_variants(
    run: Path, *names: str, bases: Mapping[str, list[str]] | None = None, outcome: Mapping[str, object] = ANSWER
) -> Path:
    """The store of a run, with variants that were deduplicated."""
    return store_of(run, run / "store", names, bases, outcome=outcome)


@pytest.fixture
def own(tiny_bert, tmp_path):
    return finished(tmp_path / "run", tiny_bert)


def probabilities(*arguments: object) -> dict:
    return as_json("predict", *arguments, SHORT)["probabilities"]


def test_it_answers_as_it_did_from_its_folder_however_it_is_named(own, tmp_path, tiny_bert):
    expected = probabilities(own, "--variant", "client-0")
    store = store_variants(own, "global", "client-0")
    shutil.rmtree(own / "variants" / "client-0")
    for named in ((own, "--variant", "client-0"), (store, "--variant", "client-0")):
        assert probabilities(*named) == expected
    for path in (own / "client-0", own / "variants" / "client-0", store / "client-0"):
        assert not path.exists()
        assert probabilities(path) == expected
    alone = shutil.copytree(store, tmp_path / "alone")
    assert probabilities(alone / "client-0", "--model", tiny_bert) == expected
    _, message = fedpriv("predict", own, "x", "--variant", "client-7", code=2)
    assert "variant = 'client-7'" in message
    assert message.rstrip().endswith("has global, client-1, client-0")
    assert "neither the folder of a run" in fedpriv("predict", tmp_path / "nowhere" / "x", "x", code=2)[1]


def test_what_was_replaced_is_what_answers_and_no_figure_of_the_run_is_said_of_it(own):
    plain = probabilities(own)
    store_variants(own, "client-0", "global", bases={"global": ["client-0"]})
    assert probabilities(own) == plain, "a folder of its own comes first"
    shutil.rmtree(own / "variants" / "global")
    found = saved.find(own)
    assert found.sources == ["global", "client-0"]
    assert probabilities(own) != plain
    text = as_json("card", own)["card"]
    assert "It was deduplicated" in text
    assert "0.81234" not in text
    assert "| rho |" not in text, "it may show an upload, which only the local view bounds"
    assert "only a store has it" in fedpriv("card", own, "--write", code=2)[1]


def test_a_card_marks_what_was_accepted_without_a_proof_and_what_private_records_chose_is_refused(own):
    unproven = {**ANSWER, "acceptance": "empirical"}
    store_variants(own, "client-0", "global", bases={"global": ["client-0"]}, outcome=unproven)
    assert "unproven" not in as_json("card", own)["card"], "its own folder holds its own values"
    shutil.rmtree(own / "variants" / "global")
    assert "**unproven (empirical)**" in as_json("card", own)["card"]
    shutil.copytree(own / "variants" / "client-1", own / "variants" / "round-1")
    store_variants(own, "client-1", "round-1", bases={"round-1": ["client-1"]}, outcome={"utility_after": None})
    shutil.rmtree(own / "variants" / "round-1")
    assert "private records chose its values" in refused("push", own, "a/b", "--variant", "round-1")


def test_it_is_exported_whole(own, tmp_path):
    store = store_variants(own, "client-0")
    expected = as_json("export", own, tmp_path / "own", "--variant", "client-0")
    shutil.rmtree(own / "variants" / "client-0")
    found = as_json("export", store / "client-0", tmp_path / "stored")
    assert found == expected | {"out": found["out"]}
    for path in (tmp_path / "own").rglob("*.safetensors"):
        one, other = load_file(path), load_file(tmp_path / "stored" / path.relative_to(tmp_path / "own"))
        assert all(np.array_equal(one[name], other[name]) for name in one.keys() | other.keys()), path


def test_what_would_be_pushed_are_the_four_files_that_load(own):
    before = hub.contents(saved.find(own))
    store = store_variants(own, "global")
    shutil.rmtree(own / "variants")
    contents = hub.contents(saved.find(store))
    assert contents.keys() == before.keys()
    assert pushes(store, "", SHORT) == predicts(store, "", SHORT)
    assert json.loads(contents["fedpriv.json"]) == json.loads(before["fedpriv.json"])
    assert as_json("push", store, "a/b")["allowed"].startswith("made of releases that the ledger has paid for")


def test_blocks_of_a_holders_variant_need_that_holders_permission(own):
    store_variants(own, "client-1", "client-0", "global", bases={"client-0": ["client-1"], "global": ["client-0"]})
    assert as_json("push", own, "a/b")["allowed"].startswith("made of releases"), "its own folder holds its own values"
    shutil.rmtree(own / "variants" / "global")
    for client in ("0", "1"):
        assert f"({client}) uploaded" in refused("push", own, "a/b")
        fedpriv("ledger", "permit", own / "ledger.sqlite", "--client", client, "--reason", "a letter")
    assert as_json("push", own, "a/b")["allowed"].count("a letter") == 2


def test_a_store_that_does_not_say_how_its_variants_are_used_is_refused_in_one_line(own):
    tensors = folders.read_tensors(own / "variants" / "global")
    with Store(own / "store") as store:
        add(store, "old", tensors)
        add(store, "bare", tensors, described=dataclasses.replace(described(saved.find(own).config, "bare"), files={}))
    for name in ("old", "bare"):
        for command in (("predict", own / name, "x"), ("push", own / name, "a/b")):
            assert "does not say how it is used" in refused(*command)
