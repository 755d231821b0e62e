"""A variant says the same at every door: predict, export, push and serve read it alike, and refuse it alike."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from fedpriv.errors import InputError
from fedpriv.learning import adapters
from fedpriv.models.publishing import hub, saved
from fedpriv.models.publishing.export import export
from fedpriv.models.serving.scheduler import open_serving
from fedpriv.models.variants import folders
from fedpriv.models.variants.blocks import layout_of
from fedpriv.models.variants.store import Store
from tests import architectures
from tests.models.publishing.runs import finished
from tests.served import LABELS, ask_classes

SHORT, LONG = "the patient has a rash", "pain in the chest today " * 8 + "a rash on the skin " * 30
MOST = 24

Answer = Mapping[str, float]
Door = Callable[[Path, str, str, Path], Answer]


def predicts(source: Path, model: str, text: str, _: Path) -> Answer:
    loaded = saved.load(saved.find(source, model=model))
    return dict(zip(loaded.saved.labels, saved.classify(loaded, [text])[0], strict=True))


@torch.no_grad()
def exports(source: Path, model: str, text: str, folder: Path) -> Answer:
    assert export(saved.load(saved.find(source, model=model)), folder / "out") == "transformers"
    tokenizer = AutoTokenizer.from_pretrained(folder / "out")
    plain = AutoModelForSequenceClassification.from_pretrained(folder / "out").eval()
    inputs = tokenizer(text, truncation=True, max_length=MOST, return_tensors="pt")
    found = plain(**inputs).logits[0].softmax(dim=0)
    return {plain.config.id2label[row]: float(p) for row, p in enumerate(found)}


def pushes(source: Path, model: str, text: str, folder: Path) -> Answer:
    found = saved.find(source)
    (folder / "pushed").mkdir()
    for name, content in hub.contents(found).items():
        (folder / "pushed" / name).write_bytes(content)
    return predicts(folder / "pushed", model or str(found.model), text, folder)


def serves(source: Path, model: str, text: str, _: Path) -> Answer:
    served = open_serving(source, memory_bytes=10**9, max_waiting=9, base_dtype="float32", model=model)
    try:
        return dict(zip(served.labels, ask_classes(served, "global", [text]).last().probabilities[0], strict=True))
    finally:
        served.close()


DOORS: Mapping[str, Door] = {"predict": predicts, "export": exports, "push": pushes, "serve": serves}
# A store that was moved from its run has nothing that may go to the Hub.
OF_A_STORE = ("predict", "export", "serve")


@pytest.fixture
def base(tiny_bert, tmp_path):
    """A classifier whose pooling is its own, so that its export is of transformers, and is not the default."""
    config = AutoConfig.for_model("gpt2", **architectures.DECODERS["gpt2"], num_labels=len(LABELS))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config)
    return architectures.save(model, tmp_path / "base", tokenizer_of=tiny_bert)


@pytest.fixture
def run(base, tmp_path):
    values = {"recipe": "per-sample", "layers": "all", "rank": 4, "alpha": 64.0, "max_length": MOST}
    return finished(tmp_path / "run", base, values=values)


@pytest.fixture
def moved(run, tmp_path):
    """A store of the run's variants, which lies in no run's folder."""
    with Store(tmp_path / "moved" / "store") as store:
        for folder in sorted((run / "variants").iterdir()):
            tensors = folders.read_tensors(folder)
            layout = layout_of(tensors, 64)
            store.add(folder.name, layout, *layout.to_blocks(tensors), described=folders.read(folder))
    return tmp_path / "moved" / "store"


@torch.no_grad()
def expected(run: Path, base: Path, text: str) -> list[float]:
    """The probabilities by plain transformers and peft."""
    model = adapters.load(str(base), run / "variants" / "global")
    inputs = AutoTokenizer.from_pretrained(base)(text, truncation=True, max_length=MOST, return_tensors="pt")
    found: list[float] = model(**inputs).logits[0].softmax(dim=0).tolist()
    assert max(found) - min(found) > 0.05, "the check would be blind"
    return found


@pytest.mark.parametrize("text", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("door", DOORS)
def test_a_run_answers_alike(door, text, run, base, tmp_path):
    found = DOORS[door](run, "", text, tmp_path)
    assert found == pytest.approx(dict(zip(LABELS, expected(run, base, text), strict=True)), abs=1e-5)


@pytest.mark.parametrize("door", OF_A_STORE)
def test_a_store_that_was_moved_answers_as_its_run_does(door, moved, run, base, tmp_path):
    found = DOORS[door](moved, str(base), LONG, tmp_path)
    assert found == pytest.approx(dict(zip(LABELS, expected(run, base, LONG), strict=True)), abs=1e-5)


@pytest.mark.parametrize("door", DOORS)
def test_a_base_that_was_moved_is_the_one_that_is_named(door, run, base, tmp_path):
    known = dict(zip(LABELS, expected(run, base, SHORT), strict=True))
    shutil.move(base, tmp_path / "elsewhere")
    assert DOORS[door](run, str(tmp_path / "elsewhere"), SHORT, tmp_path) == pytest.approx(known, abs=1e-5)
    for named in ("", "/nowhere/base"):
        (tmp_path / f"again{len(named)}").mkdir()
        with pytest.raises(InputError, match="model = "):
            DOORS[door](run, named, SHORT, tmp_path / f"again{len(named)}")


@pytest.mark.parametrize(
    ("of", "door"), [*(("run", door) for door in DOORS), *(("moved", door) for door in OF_A_STORE)]
)
def test_a_base_with_other_weights_is_refused(of, door, run, moved, base, tmp_path):
    weights = base / "model.safetensors"
    save_file({name: tensor + 0.01 for name, tensor in load_file(weights).items()}, weights, metadata={"format": "pt"})
    with pytest.raises(InputError, match="its weights are not those that this adapter was trained on"):
        DOORS[door](run if of == "run" else moved, str(base), SHORT, tmp_path)


def test_a_pickle_beside_the_tensors_is_never_read(run, base, tmp_path):
    before = predicts(run, "", SHORT, tmp_path)
    folder = run / "variants" / "global"
    tensors = {name: torch.zeros_like(tensor) for name, tensor in load_file(folder / folders.TENSORS).items()}
    shutil.move(folder / folders.TENSORS, folder / "other.safetensors")
    torch.save(tensors, folder / "adapter_model.bin")
    for door in DOORS:
        (tmp_path / door).mkdir()
        assert DOORS[door](run, "", SHORT, tmp_path / door) == pytest.approx(before, abs=1e-5)
    with pytest.raises(InputError, match=r"needs adapter_model.safetensors .* never read"):
        adapters.load(str(base), folder)
