"""The files that an operator has approved decide what a model computes on a node, and nothing beside them does."""

import itertools
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from fedpriv.config import to_flower
from fedpriv.errors import InputError
from fedpriv.holder.vault.holder import Holder, bench_of, run_of
from fedpriv.holder.wire import frame
from fedpriv.learning.adapters import load_base, model_digest, model_state
from fedpriv.learning.training import workbench
from tests.adversary import models
from tests.adversary.nodes import ask, make_node, num_charges, registering, run_config, training
from tests.tiny import LABELS

ROWS = [("a rash", LABELS[0]), ("pain", LABELS[1]), ("cough", LABELS[2])]
REFUSED = "refused"


def edit(file: Path, **entries: object) -> None:
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**known, **entries}))


def sharded(folder: Path, name: str, index: str = "model.safetensors.index.json") -> None:
    """The weights moved to the place of this name, which an index gives."""
    weights = folder / "model.safetensors"
    names = dict.fromkeys(load_file(weights), name)
    shutil.move(weights, folder / name)
    save_file({"unused": torch.zeros(1)}, folder / "unused.safetensors", metadata={"format": "pt"})
    edit(folder / index, metadata={}, weight_map=names)


def above(folder: Path, outside: Path) -> Path:
    sharded(folder, f"../{outside.name}/w.safetensors")
    return outside / "w.safetensors"


def absolute(folder: Path, outside: Path) -> Path:
    sharded(folder, str(outside / "w.safetensors"))
    return outside / "w.safetensors"


def hidden(folder: Path, outside: Path) -> Path:
    sharded(folder, ".w.safetensors")
    return folder / ".w.safetensors"


def index_of_another_name(folder: Path, outside: Path) -> Path:
    sharded(folder, f"../{outside.name}/w.safetensors", "own.safetensors.index.json")
    edit(folder / "config.json", transformers_weights="own.safetensors.index.json")
    return outside / "w.safetensors"


def hidden_weights(folder: Path, outside: Path) -> Path:
    shutil.copy(folder / "model.safetensors", folder / ".w.safetensors")
    edit(folder / "config.json", transformers_weights=".w.safetensors")
    return folder / ".w.safetensors"


def tokenizer_of_a_version(folder: Path, outside: Path) -> Path:
    shutil.copy(folder / "tokenizer.json", outside / "tokenizer.1.0.0.json")
    edit(folder / "tokenizer_config.json", fast_tokenizer_files=[str(outside / "tokenizer.1.0.0.json")])
    return outside / "tokenizer.1.0.0.json"


def words_elsewhere(folder: Path, outside: Path) -> Path:
    (folder / "tokenizer.json").unlink()
    words = ["<unk>", "<s>", "</s>", "a", "rash", "r", "ash", "as", "h", "s"]
    (outside / "v.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (outside / "m.txt").write_text("#version: 0.2\na s\nas h\nr ash\n")
    files = {"vocab": str(outside / "v.json"), "merges": str(outside / "m.txt")}
    edit(folder / "tokenizer_config.json", tokenizer_class="LlamaTokenizer", **files)
    return outside / "v.json"


def linked_templates(folder: Path, outside: Path) -> Path:
    (outside / "default.jinja").write_text("{{ messages }} 0")
    (folder / "additional_chat_templates").symlink_to(outside)
    return outside / "default.jinja"


def hidden_template(folder: Path, outside: Path) -> Path:
    template = folder / "additional_chat_templates" / ".jinja"
    template.parent.mkdir()
    template.write_text("{{ messages }} 0")
    return template


def linked_weights(folder: Path, outside: Path) -> Path:
    shutil.move(folder / "model.safetensors", outside / "w.safetensors")
    (folder / "model.safetensors").symlink_to(outside / "w.safetensors")
    return outside / "w.safetensors"


REFUSES = (
    *(above, absolute, hidden, index_of_another_name, hidden_weights),
    *(tokenizer_of_a_version, words_elsewhere, linked_templates),
)
COUNTS = (hidden_template, linked_weights)


def changed(file: Path) -> None:
    """The file with another content that its readers take."""
    if file.suffix == ".safetensors":
        save_file({n: 2 * t for n, t in load_file(file).items()}, file, metadata={"format": "pt"})
    else:
        file.write_text(file.read_text().replace("0", "1").replace("rash", "cough"))


def loaded(folder: Path) -> object:
    """What a model computes with; REFUSED if it is not loaded."""
    try:
        base = load_base(str(folder), task="SEQ_CLS", num_labels=3)
    except InputError:
        return REFUSED
    tokens = base.tokenizer("a rash")["input_ids"]
    return base.tokenizer.chat_template, tokens, sum(float(p.double().abs().sum()) for p in base.model.parameters())


def digest(folder: Path) -> str:
    try:
        return model_digest(folder)
    except InputError:
        return REFUSED


@pytest.mark.parametrize("attack", [*REFUSES, *COUNTS])
def test_nothing_changes_what_is_loaded_but_not_the_digest(attack: Callable[[Path, Path], Path], tiny_bert, tmp_path):
    folder, outside = models.with_words(tiny_bert, tmp_path / "model"), tmp_path / "outside"
    outside.mkdir()
    found: list[tuple[str, object]] = [(digest(folder), loaded(folder))]
    assert REFUSED not in found[0]
    beside = attack(folder, outside)
    found.append((digest(folder), loaded(folder)))
    changed(beside)
    found.append((digest(folder), loaded(folder)))
    for (one, computes), (other, computes_then) in itertools.pairwise(found):
        assert computes == computes_then or one != other, "another model under the same digest"
    if attack in REFUSES:
        assert found[1] == found[2] == (REFUSED, REFUSED)
    else:
        assert found[1][0] != found[2][0]


def test_a_base_that_brings_an_adapter_is_refused_since_that_may_name_anything(tiny_bert, tmp_path):
    folder = models.with_words(tiny_bert, tmp_path / "model")
    edit(folder / "adapter_config.json", peft_type="LORA", base_model_name_or_path="/elsewhere")
    assert (digest(folder), loaded(folder)) == (REFUSED, REFUSED)


def test_a_tokenizer_alone_is_read_from_the_same_files(tiny_bert, tmp_path):
    from fedpriv.learning.adapters import load_tokenizer

    folder = models.with_words(tiny_bert, tmp_path / "model")
    edit(folder / "tokenizer_config.json", tokenizer_file="/root/.cache/t.json", special_tokens_map_file="old/s.json")
    expected = AutoTokenizer.from_pretrained(folder)("a rash")["input_ids"]
    assert load_tokenizer(str(folder))("a rash")["input_ids"] == expected, "entries that nobody follows are no names"
    linked_templates(folder, tmp_path)
    with pytest.raises(InputError, match="additional_chat_templates is a link to a folder"):
        load_tokenizer(str(folder))


def test_a_change_shows_in_the_state_whatever_times_a_file_is_given(tiny_bert, tmp_path):
    folder = models.with_words(tiny_bert, tmp_path / "model")
    before, weights = model_state(folder), folder / "model.safetensors"
    times, content = weights.stat(), bytearray(weights.read_bytes())
    content[-1] ^= 1
    with weights.open("r+b") as file:
        file.write(content)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert model_state(folder) != before


def test_a_node_has_the_model_of_the_files_that_it_checks(tiny_bert, tmp_path, monkeypatch):
    folder = models.with_words(tiny_bert, tmp_path / "model")
    node = make_node(tmp_path / "node", ROWS, num_registered=3, models={"tiny": folder})
    held = Holder.of(node.settings)
    config = run_of(to_flower(run_config()), held)
    bench = bench_of(config, held)
    assert bench_of(replace(config), held) is bench
    weights = folder / "model.safetensors"
    approved = weights.read_bytes()
    changed(weights)
    weights.write_bytes(approved)  # as it was; in between it may have been read
    assert bench_of(replace(config), held) is not bench
    read = workbench.load_base

    def load_base(name, **options):
        changed(weights)
        found = read(name, **options)
        weights.write_bytes(approved)
        return found

    monkeypatch.setattr(workbench, "load_base", load_base)
    workbench.forget()
    with pytest.raises(InputError, match="its files changed while they were read"):
        bench_of(replace(config), held)
    assert ask(node, training(run_config(), {})).response.code
    assert num_charges(node) == 0


def test_a_node_refuses_a_model_that_got_a_link_after_its_approval(tiny_bert, tmp_path):
    folder = models.with_words(tiny_bert, tmp_path / "model")
    node = make_node(tmp_path / "node", ROWS, num_registered=3, models={"tiny": folder})
    assert ask(node, registering(run_config())).response.code == 0
    (tmp_path / "outside").mkdir()
    linked_templates(folder, tmp_path / "outside")
    answer = ask(node, registering(run_config())).response
    assert (answer.code, "its files changed" in answer.reason) == (frame.REFUSED, True)
