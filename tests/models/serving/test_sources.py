"""Variants come from a run's folder or a store, in order, and an unreadable one is refused, others are not."""

import json
import random
import shutil
import socket
import tracemalloc
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from fedpriv.errors import InputError
from fedpriv.models.serving import requests, sources
from fedpriv.models.serving._engine import Weights
from fedpriv.models.serving.requests import Classified, Failed, ServingError
from fedpriv.models.serving.sources import NoRoomError, VariantMemory, find
from fedpriv.models.variants import Store, layout_of
from fedpriv.models.variants.composition import History
from fedpriv.models.variants.folders import describe, read, read_tensors
from tests.cli.command_line import fedpriv
from tests.models.publishing.runs import store_of
from tests.served import LABELS, ask_classes, save_run, serving
from tests.stores import add, flip, uploads

NAMES = ("global", "client-2", "client-10")


@pytest.fixture(scope="module")
def made(tiny_bert, tmp_path_factory):
    values = {"model": str(tiny_bert), "layers": "last-1", "rank": 4, "alpha": 8.0}
    return save_run(tmp_path_factory.mktemp("made") / "run", values, NAMES)


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run")


def answers(folder, names=NAMES, **limits):
    with serving(folder, **limits) as scheduler:
        return [ask_classes(scheduler, name, ("the rash",)).last() for name in names]


def test_what_cannot_be_served_is_refused_before_the_model_is_loaded(made, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "load", lambda _: pytest.fail("the model is loaded in vain"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for options, message in (
            (["--port", taken.getsockname()[1]], "cannot listen there; is it taken?"),
            (["--port", 0, "--socket", "none/s"], "cannot listen there"),
            (["--port", 0, "--tokens", "none.toml"], "none.toml: No such file"),
            (["--port", 0, "--alias", "a=nobody"], "there is no variant 'nobody'"),
            (["--port", 0, "--alias", "global=client-2"], "is the name of a variant"),
        ):
            _, said = fedpriv("serve", made, *options, folder=tmp_path, code=2)
            assert message in said
            assert said.count("error: ") == 1


def test_a_store_serves_the_same_answers_as_the_files(run, tmp_path, tiny_bert):
    expected = answers(run)
    assert len({answer.probabilities for answer in expected}) == 3
    inside = store_of(run, run / "store", NAMES)
    assert answers(inside) == expected
    alone = store_of(run, tmp_path / "alone", NAMES)
    assert find(alone, model=str(tiny_bert)).like.model == find(run).like.model
    assert find(alone).like.model == tiny_bert.name
    shutil.rmtree(run / "variants" / "client-2")
    assert answers(run) == expected, "a variant without files of its own is in the store"


def test_a_run_answers_from_its_store_bit_for_bit_and_from_its_folders_what_that_does_not_hold(run):
    expected = answers(run)
    assert find(run).origin == str(run / "variants")
    store_of(run, run / "store", names=NAMES[:2])
    both, store, own = find(run), run / "store", run / "variants"
    assert both.origin == f"{store}, and 1 that it does not hold, or holds as they were, from {own}"
    for name in NAMES:
        own = read_tensors(run / "variants" / name)
        read = both.readers[name](2**30)
        assert read.keys() == own.keys()
        assert all(read[tensor].numpy().tobytes() == own[tensor].tobytes() for tensor in own)
    for name in NAMES[:2]:
        (run / "variants" / name / "adapter_model.safetensors").write_bytes(b"\x08")
    assert answers(run) == expected, "the files of stored variants are not read"
    assert isinstance(answers(run, names=(NAMES[2],))[0], Classified)
    shutil.rmtree(run / "store")
    assert [type(answer) for answer in answers(run)] == [Failed, Failed, Classified]
    store_of(shutil.copytree(run, run.parent / "whole"), run / "store", names=NAMES[2:])
    assert find(run).origin.startswith(f"{run / 'store'}, and 2 that")


def test_a_variant_of_a_resumed_run_is_not_read_from_the_store_of_before(run):
    def described(name, number):
        history = History(name=name, ancestors=uploads(number))
        return replace(read(run / "variants" / name), history=history, deltas={"clinic": 1e-5})

    with Store(run / "store") as store:
        for name in NAMES:
            tensors = {key: -values for key, values in read_tensors(run / "variants" / name).items()}
            add(store, name, tensors, described=described(name, 2))
    for name, number in zip(NAMES, (3, 2, 1), strict=True):
        describe(run / "variants" / name, described(name, number))
    found = find(run)
    assert found.origin.startswith(f"{run / 'store'}, and 1 that")
    for name, own in zip(NAMES, (True, False, False), strict=True):
        tensors = read_tensors(run / "variants" / name)
        sign = 1 if own else -1
        served = found.readers[name](2**30)
        assert all(torch.equal(values, sign * torch.from_numpy(tensors[key])) for key, values in served.items())


def set_values(folder, value):
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values()))[0, 0] = value
    save_file(tensors, path)
    described = path.parent / "variant.json"
    fields = json.loads(described.read_text())
    described.write_text(json.dumps({name: fields[name] for name in fields if name != "tensors_sha256"}))


TENSORS, DESCRIPTION, SETTINGS = "adapter_model.safetensors", "variant.json", "adapter_config.json"


def with_other_alpha(folder):
    (folder / SETTINGS).write_text((folder / SETTINGS).read_text().replace('"lora_alpha": 8', '"lora_alpha": 9'))


DAMAGE = {
    f"{TENSORS}: cannot be read": lambda folder: (folder / TENSORS).write_bytes(b"\x08"),
    f"{TENSORS}: is damaged or was changed": lambda folder: flip(folder / TENSORS, -4),
    "holds 0 safetensors files": lambda folder: (folder / TENSORS).unlink(),
    "holds values that are no numbers": lambda folder: set_values(folder, np.nan),
    f"its SHA-256 is not the tensors_sha256 of {DESCRIPTION}": lambda folder: shutil.copy(
        folder.parent / "global" / DESCRIPTION, folder
    ),
    f"{DESCRIPTION}: not a variant's description": lambda folder: (folder / DESCRIPTION).write_text("{"),
    "its lora_alpha / r = 2.25 is not": with_other_alpha,
    SETTINGS: lambda folder: (folder / SETTINGS).write_text("[]"),
}


def test_a_variant_that_cannot_be_read_is_refused_by_name_and_the_log_says_why(run, caplog):
    damaged = {f"damaged-{number}": cause for number, cause in enumerate(DAMAGE)}
    for name, cause in damaged.items():
        DAMAGE[cause](shutil.copytree(run / "variants" / "client-2", run / "variants" / name))
    one, *refused, other = answers(run, names=("global", *damaged, "client-10"))
    assert len(one.probabilities) == len(other.probabilities) == 1
    for (name, cause), answer in zip(damaged.items(), refused, strict=True):
        assert_refused(answer, name, run)
        assert any(cause in line and name in line for line in caplog.messages), cause


def assert_refused(answer, name, run):
    assert isinstance(answer, Failed)
    assert isinstance(answer.error, requests.UnreadableVariantError)
    assert name in str(answer.error)
    assert str(run) not in str(answer.error)


def test_a_variant_of_a_damaged_store_is_refused_by_name_and_the_others_answer(run, caplog):
    store_of(run, run / "store", NAMES)
    store = Store(run / "store", read_only=True)
    row = int(store.rows(store.manifest("client-2").blocks)[0])
    flip(next((run / "store").glob("blocks.*.npy")), -1 - (len(store.blocks) - 1 - row) * 256)
    one, refused, other = answers(run)
    assert_refused(refused, "client-2", run)
    assert "damaged, the first is block" in caplog.text
    assert len(one.probabilities) == len(other.probabilities) == 1


def test_a_copied_renamed_or_linked_variant_is_served_under_the_name_of_its_folder_and_a_hidden_one_is_none(run):
    own = run / "variants"
    shutil.copytree(own / "global", own / "global backup")
    shutil.copytree(own / "global", own / ".ipynb_checkpoints")
    (own / "best").symlink_to("client-2")
    (own / "client-10").rename(own / "St. Anna")
    names = ("global", "St. Anna", "best", "client-2", "global backup")
    assert tuple(find(run).readers) == names
    assert all(isinstance(answer, Classified) for answer in answers(run, names=names))


def test_the_first_variant_that_says_how_it_is_used_decides_and_another_use_is_refused(run):
    (run / "variants/global/fedpriv.json").write_text("{")
    other = run / "variants/client-10/fedpriv.json"
    other.write_text(other.read_text().replace(f'"{LABELS[0]}"', '"urology"'))
    assert find(run).like.labels == LABELS
    assert [type(answer) for answer in answers(run)] == [Failed, Classified, Failed]
    for path in run.glob("variants/*/fedpriv.json"):
        path.unlink()
    with pytest.raises(InputError, match=r"fedpriv.json: missing"):
        find(run)


def test_folders_that_hold_nothing_to_serve_are_named(run, tiny_bert, tmp_path):
    for folder in (tmp_path / "nothing", tmp_path):
        with pytest.raises(InputError, match="neither"):
            find(folder)
    shutil.rmtree(run / "variants")
    with pytest.raises(InputError, match="no variant"):
        find(run)
    with Store(tmp_path / "empty"):
        pass
    with pytest.raises(InputError, match=r"no variant|neither"):
        find(tmp_path / "empty")
    values = {"model": str(tiny_bert), "layers": "last-1", "aggregation": "t-fedavg", "recipe": "per-sample"}
    with pytest.raises(InputError, match=r"t-fedavg"):
        find(save_run(tmp_path / "whole weights", values, ("global",)))


def test_a_model_of_one_block_over_and_over_is_refused_before_it_fills_the_memory(run):
    block = np.zeros((1, 1024), np.float32)
    large = np.broadcast_to(block, (2**15, 1024))  # 128 MiB
    with Store(run / "store") as store:
        known = read(run / "variants" / "global")
        store.add("one", layout_of({"small": block}, 1024), block, {}, described=replace(known, name="one"))
        store.add("large", layout_of({"large": large}, 1024), large, {}, described=replace(known, name="large"))
    assert sum(file.stat().st_size for file in (run / "store").iterdir()) < 2**19
    read_large = find(run).readers["large"]
    tracemalloc.start()
    try:
        with pytest.raises(ServingError, match=f"'large' needs {2**27} bytes, but the server has {2**26} for all"):
            read_large(2**26)
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


def memory(sizes: dict[str, int], total: int) -> VariantMemory:
    def weights(name, tensors):
        return Weights(variant=name, rank=1, flat=tensors["x"], active=frozenset())

    readers = {name: (lambda _, size=size: {"x": torch.zeros(size // 4)}) for name, size in sizes.items()}
    return VariantMemory(readers, weights, total)


def test_hits_are_those_of_least_recently_used():
    generator, names, hits = random.Random(0), [f"v{number}" for number in range(20)], 0
    paging, held = memory(dict.fromkeys(names, 400), 7 * 400), OrderedDict[str, None]()
    for _ in range(2000):
        name = names[min(int(generator.expovariate(0.25)), 19)]
        hits += name in held
        held[name] = None
        held.move_to_end(name)
        if len(held) > 7:
            held.popitem(last=False)
        paging.take(name)
        paging.give_back(name)
        assert paging.statistics.bytes_in_memory <= 2800
    misses = 2000 - hits
    found = paging.statistics
    assert (found.hits, found.misses, found.bytes_read) == (hits, misses, 400 * misses)


def test_a_variant_in_use_stays_and_what_has_no_room_says_so():
    paging = memory({"a": 400, "b": 400, "c": 400, "huge": 4000}, 800)
    first = paging.take("a")
    paging.take("b")
    with pytest.raises(NoRoomError):
        paging.take("c")
    assert paging.take("a") is first
    paging.give_back("a")
    paging.give_back("b")
    paging.take("c")  # in the place of b, though a was asked for earlier: a is in use
    assert paging.take("a", again=True) is first
    assert (paging.statistics.hits, paging.statistics.misses) == (1, 3)
    with pytest.raises(ServingError, match="huge"):
        paging.take("huge")
    with pytest.raises(requests.UnknownVariantError):
        paging.take("../a")


def test_requests_beyond_the_memory_wait_for_it(run):
    with serving(run) as scheduler:
        ask_classes(scheduler, "global", ("x",)).last()
        one = scheduler.statistics().bytes_in_memory
    with serving(run, memory_bytes=one) as scheduler:
        asked = [ask_classes(scheduler, name, ("x", "y")) for name in NAMES * 5]
        assert all(len(found.last().probabilities) == 2 for found in asked)
        statistics = scheduler.statistics()
    assert statistics.bytes_in_memory == one
    assert statistics.hits + statistics.misses == 15
    with serving(run, memory_bytes=one - 1) as scheduler:
        failed = ask_classes(scheduler, "global", ("x",)).last()
        assert "needs" in str(failed.error)
