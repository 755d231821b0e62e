"""A variant that lives only in a store answers, is exported and is pushed as one in a folder of its own."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedpriv.models.publishing import hub, saved
from fedpriv.models.publishing.saved import find
from fedpriv.models.variants import folders
from fedpriv.models.variants.blocks import layout_of
from fedpriv.models.variants.store import Store
from tests.cli.command_line import as_json, fedpriv
from tests.models.publishing.runs import finished
from tests.served import described

TEXTS = ["the patient has a rash", "pain in the chest today"]
ANSWER = {"outcome": {"utility_before": 0.9, "utility_after": 0.9}}


def store_variants(run: Path, names: tuple[str, ...], bases: dict[str, list[str]], provenance: dict | None = None):
    """Store variants of a run; one with bases takes its first blocks from the first of them."""
    with Store(run / "store") as store:
        for name in names:
            folder = run / "variants" / name
            tensors = folders.read_tensors(folder)
            layout = layout_of(tensors, 64)
            blocks, extras = layout.to_blocks(tensors)
            if bases.get(name):
                blocks[:2] = store.blocks[store.rows(store.manifest(bases[name][0]).blocks[:2])]
            told = {"bases": bases.get(name, []), **(ANSWER if provenance is None else provenance)}
            store.add(name, layout, blocks, extras, described=folders.read(folder), provenance=told)
    return run / "store"


@pytest.fixture
def run(tiny_bert, tmp_path):
    return finished(tmp_path / "run", tiny_bert)


def probabilities(*arguments: object) -> dict:
    return as_json("predict", *arguments, TEXTS[0])["probabilities"]


def test_it_answers_as_it_did_from_its_folder_however_it_is_named(run, tmp_path, tiny_bert):
    expected = probabilities(run, "--variant", "client-0")
    store = store_variants(run, ("global", "client-0"), {})
    shutil.rmtree(run / "variants" / "client-0")
    for named in ((run, "--variant", "client-0"), (store, "--variant", "client-0")):
        assert probabilities(*named) == expected
    for path in (run / "client-0", run / "variants" / "client-0", store / "client-0"):
        assert not path.exists()
        assert probabilities(path) == expected
    alone = shutil.copytree(store, tmp_path / "alone")
    assert probabilities(alone / "client-0", "--model", tiny_bert) == expected
    _, message = fedpriv("predict", run, "x", "--variant", "client-7", code=2)
    assert "variant = 'client-7'" in message
    assert message.rstrip().endswith("has global, client-1, client-0")
    assert "neither the folder of a run" in fedpriv("predict", tmp_path / "nowhere" / "x", "x", code=2)[1]


def test_what_was_replaced_is_what_answers_and_no_figure_of_the_run_is_said_of_it(run):
    plain = probabilities(run)
    store_variants(run, ("client-0", "global"), {"global": ["client-0"]})
    assert probabilities(run) == plain, "a folder of its own comes first"
    shutil.rmtree(run / "variants" / "global")
    found = find(run)
    assert found.sources == ["global", "client-0"]
    assert probabilities(run) != plain
    text = as_json("card", run)["card"]
    assert "It was deduplicated" in text
    assert "0.81234" not in text
    assert "| rho |" not in text, "it may show an upload, which only the local view bounds"
    assert "only a store has it" in fedpriv("card", run, "--write", code=2)[1]


def test_a_card_marks_what_was_accepted_without_a_proof(run):
    told = {"outcome": {**ANSWER["outcome"], "acceptance": "empirical"}}
    store_variants(run, ("client-0", "global"), {"global": ["client-0"]}, told)
    assert "unproven" not in as_json("card", run)["card"], "its own folder holds its own values"
    shutil.rmtree(run / "variants" / "global")
    assert "**unproven (empirical)**" in as_json("card", run)["card"]


def test_it_is_exported_whole(run, tmp_path):
    store = store_variants(run, ("client-0",), {})
    expected = as_json("export", run, tmp_path / "own", "--variant", "client-0")
    shutil.rmtree(run / "variants" / "client-0")
    found = as_json("export", store / "client-0", tmp_path / "stored")
    assert found == expected | {"out": found["out"]}
    for path in (tmp_path / "own").rglob("*.safetensors"):
        one, other = load_file(path), load_file(tmp_path / "stored" / path.relative_to(tmp_path / "own"))
        assert all(np.array_equal(one[name], other[name]) for name in one.keys() | other.keys()), path


def refused(*arguments: object, code: int = 2) -> str:
    return fedpriv("push", *arguments, code=code)[1]


def test_what_would_be_pushed_are_the_four_files_that_load(run, tmp_path):
    before = hub.contents(find(run))
    store = store_variants(run, ("global",), {})
    shutil.rmtree(run / "variants")
    contents = hub.contents(find(store))
    assert contents.keys() == before.keys()
    folder = tmp_path / "downloaded"
    folder.mkdir()
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    loaded = saved.load(find(folder, model=str(find(store).model)))
    expected = saved.load(find(store))
    assert saved.classify(loaded, TEXTS) == saved.classify(expected, TEXTS)
    assert json.loads(contents["fedpriv.json"]) == json.loads(before["fedpriv.json"])
    assert as_json("push", store, "a/b")["allowed"].startswith("made of releases that the ledger has paid for")


def test_blocks_of_a_holders_variant_need_that_holders_permission(run):
    store_variants(run, ("client-1", "client-0", "global"), {"client-0": ["client-1"], "global": ["client-0"]})
    assert as_json("push", run, "a/b")["allowed"].startswith("made of releases"), "its own folder holds its own values"
    shutil.rmtree(run / "variants" / "global")
    for client in ("0", "1"):
        assert f"({client}) uploaded" in refused(run, "a/b")
        fedpriv("ledger", "permit", run / "ledger.sqlite", "--client", client, "--reason", "a letter")
    assert as_json("push", run, "a/b")["allowed"].count("a letter") == 2


def test_what_private_records_chose_is_refused(run):
    store_variants(run, ("client-1", "global"), {"global": ["client-1"]}, {"outcome": {"utility_after": None}})
    shutil.rmtree(run / "variants" / "global")
    assert "private records chose its values" in refused(run, "a/b")


def test_a_store_that_does_not_say_how_its_variants_are_used_is_refused_in_one_line(run):
    tensors = folders.read_tensors(run / "variants" / "global")
    layout = layout_of(tensors, 64)
    with Store(run / "store") as store:
        store.add("old", layout, *layout.to_blocks(tensors))
        bare = dataclasses.replace(described(find(run).config, "bare"), files={})
        store.add("bare", layout, *layout.to_blocks(tensors), described=bare)
    for name in ("old", "bare"):
        for command in (("predict", run / name, "x"), ("push", run / name, "a/b")):
            _, message = fedpriv(*command, code=2)
            assert "does not say how it is used" in message
            assert message.count("\n") == 1
