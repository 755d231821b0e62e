"""`fedpriv dedup` on variants of a small linear model: plan, run, restore, verify, and one line for what is wrong."""

import itertools
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.numpy
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from fedpriv.learning.adapters import quiet_transformers
from fedpriv.models.dedup import planning
from fedpriv.models.dedup.distance import nearest
from fedpriv.models.dedup.planning import cost_of
from fedpriv.models.publishing import saved
from fedpriv.models.serving.http.cards import Cards
from fedpriv.models.variants.store import Store
from fedpriv.models.variants.stored import StoredVariants
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.events import PureEpsilon
from fedpriv.privacy.accounting.views import Release
from fedpriv.privacy.ledger.ledger import Ledger
from tests.chats import chat_model
from tests.cli.command_line import as_json, fedpriv, refused
from tests.cli.inputs import charge, write_ledger, write_plain_adapter, write_study
from tests.stores import EVENT, content_of


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the module `study` and, under variants/, three rounds of a run."""
    return write_study(tmp_path_factory.mktemp("study"))


RUN = ["--evaluator", "study:evaluator", "--block-size", "32", "-o", "min_batch=1", "--fairness", "outcome"]
NAMES = ["round-10", "round-12", "round-14"]


def run(store: Path, *options: object, study: Path) -> dict[str, Any]:
    """What storing all variants of the study prints with --json."""
    return as_json("dedup", "run", "variants", store, *RUN, *options, folder=study)


@pytest.fixture(scope="module")
def stored(study: Path) -> SimpleNamespace:
    """The path of a store of all variants, which no test changes, what was said, and what JSON says of it."""
    path = study / "stored"
    out, err = fedpriv("dedup", "run", "variants", path, *RUN, folder=study)
    return SimpleNamespace(path=path, out=out, err=err, done=run(path, study=study))


def test_variants_are_planned_stored_restored_and_verified(study, stored, tmp_path):
    """A line each tells of it where there is no terminal."""
    planned = as_json("dedup", "plan", "variants", "--fairness", "outcome", folder=study)
    assert sorted(set(planned["targets"]) | set(planned["untouched"])) == NAMES
    assert planned["targets"]
    for target in planned["targets"].values():
        assert target["memory_bytes"] > target["memory_bytes_published"] == 4 * (2048 * len(target["bases"]) + 64)
    assert "a search holds " in fedpriv("dedup", "plan", "variants", "--fairness", "outcome", folder=study)[0]
    assert 0 < stored.done["compression_ratio"] < 1
    assert stored.done["num_validations"] > 0
    for outcome in stored.done["variants"]:
        if outcome["num_replaced"]:
            assert outcome["utility_before"] - outcome["utility_after"] <= outcome["loss_limit"] <= 0.05
        assert outcome["epsilon_after"] <= outcome["epsilon_before"] + 0.3
    out = tmp_path / "round-14.safetensors"
    fedpriv("dedup", "restore", stored.path, "round-14", "--out", out)
    assert safetensors.numpy.load_file(out)["weight"].shape == (2048,)
    assert "3 variants, all sound" in fedpriv("dedup", "verify", stored.path)[0]
    lines = stored.err.splitlines()
    assert [line.split(" | ")[:2] for line in lines] == [
        [f"{number} of 3 variants stored", name] for number, name in enumerate(NAMES, 1)
    ]
    assert lines[-1].endswith(" | 0:00:00 left")
    assert "bytes stored" in stored.out


def damage_blocks(store: Path) -> None:
    (blocks,) = store.glob("blocks.*.npy")
    content = bytearray(blocks.read_bytes())
    content[-3] ^= 1
    blocks.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (damage_blocks, "tensor 'weight': 1 of its 64 blocks damaged"),
        (lambda store: (store / "index.sqlite").write_text("{}"), "index.sqlite: damaged"),
    ],
)
def test_a_damaged_store_is_reported_and_stays_as_it_is(stored, tmp_path, damage, said):
    store = shutil.copytree(stored.path, tmp_path / "store")
    damage(store)
    before = {path: path.read_bytes() for path in store.iterdir()}
    assert said in "".join(fedpriv("dedup", "verify", store, code=1))
    assert said in refused("dedup", "restore", store, "round-14", "--out", tmp_path / "o", code=1)
    assert not (tmp_path / "o").exists()
    assert {path: path.read_bytes() for path in store.iterdir()} == before


def test_the_stopping_rule_of_the_published_code_is_an_option(study, stored, tmp_path):
    published = run(tmp_path / "store", "-o", "stopping=published", study=study)
    assert 0 < published["num_validations"] < stored.done["num_validations"]


def registered(path: Path) -> Path:
    """A new ledger with the study's private records."""
    with Ledger(path) as ledger:
        ledger.register("clinic", 1500, 1e-5, data_set="validation")
    return path


def test_private_records_are_charged_to_their_ledger_by_one_process_and_no_number_is_shown(study, tmp_path):
    path, store = registered(tmp_path / "ledger.sqlite"), tmp_path / "store"
    options = ["--evaluator", "study:private", "--block-size", "32", "--fairness", "outcome", "--ledger", path]
    options += ["--epsilon-bound", "5", "--utility-bound", "0.5", "--validation-epsilon", "0.75"]
    command = ["dedup", "run", "variants", store, *options]
    two = refused(*command, "--workers", "2", folder=study)
    assert "workers: private records answer one process" in two, "which cannot spend one budget"
    with Ledger(path) as ledger, Store(store, read_only=True) as opened:
        assert (ledger.releases("validation"), list(opened.names), planning.read_charges(store)) == ([], [], [])
    done = as_json(*command, folder=study)
    targets = [outcome for outcome in done["variants"] if outcome["bases"]]
    assert targets
    assert {outcome["utility_before"] for outcome in done["variants"]} == {None}
    with Ledger(path) as ledger:
        (release,) = ledger.releases("validation")
    assert release.event == PureEpsilon(epsilon=0.75, count=len(targets))
    other = ["--ledger", tmp_path / "other.sqlite", "--validation-epsilon", "1"]
    Ledger(tmp_path / "other.sqlite").close()
    refusal = refused("dedup", "run", "variants", "s", "--evaluator", "study:private", *other, folder=study)
    assert "no such data set of 1500 records" in refusal
    assert not (study / "s").exists()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["drd", "mcts"])
def test_workers_store_the_same_bit_for_bit(study, tmp_path, algorithm):
    command = ["dedup", "run", "variants"]
    options = [*RUN[:4], *RUN[6:], "--algorithm", algorithm, "--workers"]
    found = [as_json(*command, tmp_path / str(number), *options, number, folder=study) for number in (1, 2)]
    assert found[0] == found[1]
    assert found[0]["num_validations"] > 0
    assert content_of(tmp_path / "1") == content_of(tmp_path / "2")


@pytest.mark.slow
def test_a_worker_that_ends_is_one_line(study, tmp_path):
    (study / "ending.py").write_text(
        "import multiprocessing, os\nfrom study import Study\n\n\nclass Ending(Study):\n"
        "    def saliency(self, *given):\n        os._exit(1)\n\n\ndef evaluator():\n"
        "    return Ending() if multiprocessing.parent_process() else Study()\n"
    )
    command = ["dedup", "run", "variants", tmp_path / "store", *RUN[2:], "--evaluator", "ending:evaluator"]
    assert "workers: a process ended" in fedpriv(*command, "--workers", "2", folder=study, code=2)[1]


def test_interrupted_it_says_how_to_go_on_and_goes_on(study, stored, tmp_path):
    calls = itertools.count(1)

    def stopped(*arguments):
        """Ctrl-C in the second search for nearest blocks."""
        if next(calls) == 2:
            raise KeyboardInterrupt
        return nearest(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("fedpriv.models.dedup._blocks.nearest", stopped)
        out, err = fedpriv("dedup", "run", "variants", tmp_path / "store", *RUN, folder=study, code=130)
    assert out == ""
    assert err.splitlines()[-1] == "interrupted: 2 of 3 variants are stored; the same command goes on from there"
    assert run(tmp_path / "store", study=study) == stored.done


def test_every_variant_may_have_an_evaluator_of_its_own(study, stored, tmp_path):
    (study / "several.py").write_text(
        "from study import Study, private\n"
        "def evaluators():\n    return {f'round-{n}': Study() for n in (10, 12, 14)}\n"
        "def one_missing():\n    return {f'round-{n}': Study() for n in (10, 12)}\n"
        "def one_too_many():\n    return {**evaluators(), 'gone': private()}\n"
        "def one_private():\n    return {**evaluators(), 'round-14': private()}\n"
    )
    command = ["dedup", "run", "variants", tmp_path / "store", *RUN[2:], "--evaluator"]
    assert "evaluators: none for variant 'round-14'" in refused(*command, "several:one_missing", folder=study)
    assert "its records are private" in refused(*command, "several:one_private", folder=study)
    found = as_json(*command, "several:one_too_many", folder=study)
    # Digests name the evaluator, and another digest may compress to another number of bytes.
    sizes = {key: pytest.approx(stored.done[key], rel=1e-3) for key in ("bytes_stored", "compression_ratio")}
    assert found == stored.done | sizes


def test_another_command_for_the_same_store_is_refused_before_the_evaluator_is_asked(study, stored):
    for change in (["-o", "min_batch=2"], ["--utility-bound", "0.2"], ["--block-size", "16"]):
        command = ["dedup", "run", "variants", stored.path, *RUN, *change, "--evaluator", "missing:evaluator"]
        error = refused(*command, folder=study)
        assert "from other settings" in error or "has blocks of 32" in error


def test_plain_adapters_come_into_a_store_at_what_is_known_of_their_origin(tmp_path):
    base = chat_model(tmp_path / "base")
    for name, kind in (("task-0", "LORA"), ("task-1", "LORA"), ("odd", "LOHA")):
        write_plain_adapter(tmp_path / "adapters" / name, "base", kind)
    adapters = [f"adapters/{name}" for name in ("task-0", "task-1", "odd")]
    done = as_json("dedup", "import", *adapters, "--store", "unknown", folder=tmp_path)
    assert [(v["origin_known"], v["epsilon_after"]) for v in done["variants"]] == [(False, "inf")] * 3
    assert done["unserved"] == {"odd": "peft_type = 'LOHA': plain LoRA alone is served"}
    assert done["bytes_stored"] <= done["bytes_logical"], "never more than the files"
    lines = fedpriv("dedup", "import", *adapters[:2], "--store", "again", folder=tmp_path)[0].splitlines()
    assert lines[0] == "task-0: stays as it is, it is stored without loss; epsilon unknown"
    assert lines[-1].endswith("next: fedpriv serve again")
    assert fedpriv("dedup", "list", "unknown", folder=tmp_path)[0].count("unknown") == 6
    card = Cards(tmp_path / "unknown").card("task-0")
    assert (card["epsilon"], card["note"]) == ("inf", "nothing says what went into it: take it as not private")

    public = as_json("dedup", "import", *adapters[:2], "--store", "public", "--public", folder=tmp_path)
    assert [(v["origin_known"], v["epsilon_after"]) for v in public["variants"]] == [(True, 0.0)] * 2
    restored = saved.load(saved.find(tmp_path / "public", variant="task-1", model=str(base)))
    with quiet_transformers():
        plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapters" / "task-1")
    tokens = torch.tensor([[1, 5, 9, 2]])
    assert torch.equal(restored.peft_model(tokens).logits, plain.eval()(tokens).logits)

    write_ledger(tmp_path / "ledger.sqlite", EVENT)
    charged = ["--ledger", "ledger.sqlite", "--client", "0"]
    seeded = refused("dedup", "import", *adapters[:1], "--store", "s", *charged, folder=tmp_path)
    assert "was seeded, which protects nobody" in seeded
    with Ledger(tmp_path / "own.sqlite") as ledger:
        for client, num_rounds in (("0", 2), ("1", 3)):
            releases = [Release(event=EVENT, rho_bar=1.0)] * num_rounds
            charge(ledger, ledger.register(client, 100, 1e-5).id, *releases, client=client)
    own = ["--ledger", "own.sqlite", "--client", "0"]
    of_run = as_json("dedup", "import", adapters[0], "--store", "own", *own, folder=tmp_path)
    # Of the run, and not of the client alone: a model of a federation descends from all uploads.
    assert of_run["variants"][0]["epsilon_after"] == epsilon_of([EVENT.with_count(3)], 1e-5).epsilon
    for wrong, why in (
        (["--public", *own], "leave out --ledger and --client"),
        (own[:2], "takes both"),
        (["--ledger", "own.sqlite", "--client", "9"], "9"),
    ):
        assert why in refused("dedup", "import", adapters[0], "--store", "w", *wrong, folder=tmp_path)
    (tmp_path / "adapters" / "task-0").rename(tmp_path / "adapters" / "task 0")
    two = ["adapters/task-1", "adapters/task 0"]
    assert "a name has letters" in refused("dedup", "import", *two, "--store", "w", folder=tmp_path)
    assert not (tmp_path / "w").exists()


def test_a_base_goes_with_its_targets_and_gc_gives_its_space_back(study, tmp_path):
    store, strict = tmp_path / "store", ("--utility-bound", "0.014")
    run(store, *strict, study=study)
    first = as_json("dedup", "list", store)
    listed = {row["name"]: row for row in first["variants"]}
    (base,) = listed["round-14"]["bases"]
    assert 0 < listed["round-14"]["num_shared"] <= listed["round-14"]["num_blocks"] == 64
    assert 0.9 < listed["round-14"]["accuracy"] <= 1
    assert f"  {base}" in fedpriv("dedup", "list", store)[0]
    before = out_of(store, tmp_path, "round-14")
    assert "error: model = 'x': not in" in refused("dedup", "remove", store, "round-12", "x")
    assert len(as_json("dedup", "list", store)["variants"]) == 3, "a refused removal removes nothing"
    assert as_json("dedup", "remove", store, "round-12")["left"] == ["round-10", "round-14"]
    freed = as_json("dedup", "gc", store)
    assert freed["bytes_freed"] == freed["num_blocks"] * (32 * 4 + 40) > 0
    assert listed["round-12"]["bytes_own"] == first["bytes_stored"] - freed["bytes_stored"]
    assert as_json("dedup", "gc", store)["bytes_freed"] == 0
    assert out_of(store, tmp_path, "round-14") == before
    removed = as_json("dedup", "remove", store, base)
    assert (removed["left"], removed["kept_for_others"]) == (["round-14"], {base: ["round-14"]})
    as_json("dedup", "gc", store)
    assert out_of(store, tmp_path, "round-14") == before, "the blocks that it holds stay"
    assert "1 variants, all sound" in fedpriv("dedup", "verify", store)[0]
    assert "its description alone is kept" in refused("dedup", "restore", store, base, "--out", "o")
    with Store(store, read_only=True) as opened:
        described = [opened.describe(name) for name in ("round-14", base)]
    epsilon = cost_of(described).guarantee.epsilon
    assert epsilon == pytest.approx(listed["round-14"]["epsilon_after"]), "its epsilon counts the base"
    assert as_json("dedup", "remove", store, "round-14")["left"] == []
    with Store(store) as opened:
        assert opened._index.models == {}, "with the last holder of its blocks a base is forgotten"
    run(store, *strict, study=study)


def test_a_later_variant_takes_blocks_of_one_that_is_stored(study, stored, tmp_path):
    store, later = tmp_path / "store", tmp_path / "later"
    first, third = tmp_path / "first", tmp_path / "third"
    for name, folder in (("round-10", first), ("round-12", later), ("round-14", third)):
        shutil.copytree(study / "variants" / name, folder / name)
    add = ["--evaluator", "study:evaluator", "-o", "min_batch=1", "--fairness", "outcome"]
    fedpriv("dedup", "run", first, store, *RUN, folder=study)
    before = out_of(store, tmp_path, "round-10")
    for folder in (later, third, third):  # the last one is there already
        done = as_json("dedup", "add", folder, store, *add, folder=study)
    (outcome,) = done["variants"]
    assert (outcome["bases"], outcome["num_replaced"] > 0) == (["round-10"], True)
    assert outcome["epsilon_after"] <= outcome["epsilon_before"] + 0.3
    assert out_of(store, tmp_path, "round-10") == before
    at_once = {each["name"]: each for each in stored.done["variants"]}["round-14"]
    assert (outcome["num_replaced"], outcome["epsilon_after"]) == (at_once["num_replaced"], at_once["epsilon_after"])


def test_variants_of_a_removed_base_take_blocks_of_another_where_that_takes_fewer_bytes(study, tmp_path):
    store = tmp_path / "store"
    run(store, "--utility-bound", "0.3", study=study)
    (base,) = {row["bases"][0] for row in as_json("dedup", "list", store)["variants"] if row["bases"]}
    options = ["--originals", "variants", "--evaluator", "study:evaluator", "--algorithm", "greedy"]
    for name in ("kept", "rebased"):
        shutil.copytree(store, tmp_path / name)
    as_json("dedup", "remove", tmp_path / "kept", base)
    done = as_json("dedup", "remove", tmp_path / "rebased", base, *options, folder=study)
    sizes = {name: as_json("dedup", "gc", tmp_path / name)["bytes_stored"] for name in ("kept", "rebased")}
    assert sizes["rebased"] < sizes["kept"]
    assert done["rebased"] == ["round-12", "round-14"]
    assert "2 variants, all sound" in fedpriv("dedup", "verify", tmp_path / "rebased")[0]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    shutil.copytree(study / "variants" / base, tmp_path / "only" / base)
    options[1] = tmp_path / "only"
    assert as_json("dedup", "remove", tmp_path / "store", base, *options, folder=study)["rebased"] == []
    base, private = "round-12", ["--originals", "variants", "--evaluator", "study:private"]
    assert "its records are private" in refused("dedup", "remove", store, base, *private, folder=study)


@pytest.mark.parametrize("cutoff", [0, 3])
def test_what_was_accepted_without_a_proof_says_so_wherever_it_is_shown(study, tmp_path, cutoff):
    rule, store = ["--acceptance", "empirical"], tmp_path / "store"
    if cutoff:
        rule = ["-o", f"cutoff={cutoff}", "--evaluator", "study:private", "--validation-epsilon", "8"]
        rule += ["--ledger", registered(tmp_path / "ledger.sqlite"), "--epsilon-bound", "20"]
    out, _ = fedpriv("dedup", "run", "variants", store, *RUN, *rule, "--utility-bound", "0.2", folder=study)
    name = "sparse vector" if cutoff else "empirical"
    changed = [line for line in out.splitlines() if "blocks replaced" in line and ": 0 of" not in line]
    assert changed
    assert all(f"unproven ({name})" in line for line in changed)
    listed = as_json("dedup", "list", store)["variants"]
    assert {row["acceptance"] for row in listed if row["bases"]} == {name}
    outcomes = [Store(store, read_only=True).manifest(row["name"]).outcome for row in listed]
    table = StoredVariants(outcomes=tuple(outcomes), lossless=False, bytes_stored=1, bytes_logical=1).variant_table()
    marks = [f"unproven ({name})" if row["bases"] else "" for row in listed]
    assert [row[5] if row[5].startswith("unproven") else "" for row in table.rows] == marks
    assert [Cards(store).card(row["name"])["unproven"] for row in listed] == marks
    for wrong in (["--acceptance", "empirical", "--evaluator", "study:private"], ["-o", "cutoff=3"]):
        terms = ["--validation-epsilon", "1", "--ledger", tmp_path / "l"] if len(wrong) > 2 else []
        Ledger(tmp_path / "l").close()
        assert "error: " in refused("dedup", "run", "variants", tmp_path / "no", *RUN, *wrong, *terms, folder=study)


def out_of(store, folder, name) -> bytes:
    (folder / "out").unlink(missing_ok=True)
    fedpriv("dedup", "restore", store, name, "--out", folder / "out")
    return (folder / "out").read_bytes()


EVALUATED = ("run", "variants", "s", "--evaluator", "study:evaluator")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "nowhere"], "folder = 'nowhere': holds no variants"),
        (["plan", "variants", "--strategy", "best"], "strategy = 'best': must be one of single, multi, cross"),
        ([*EVALUATED, "--algorithm", "magic"], "known are drd, dred"),
        ([*EVALUATED, "-o", "speed=3"], "option = 'speed': drd knows min_batch, stopping"),
        ([*EVALUATED, "-o", "stopping=early"], "stopping = 'early': known are listing, published"),
        ([*EVALUATED, "-o", "min_batch=0"], "min_batch = 0: must be"),
        ([*EVALUATED, "--block-size", "3000"], "largest one has 2048"),
        ([*EVALUATED, "--seed", "1"], "a run's own test set"),
        ([*EVALUATED, "--validation-epsilon", "1"], "are public"),
        (["run", "variants", "s", "--evaluator", "missing:evaluator"], "must be MODULE:FUNCTION"),
        (["run", "variants", "s", "--evaluator", "study:private"], "its records are private"),
        (["run", "variants", "s"], "is not the variants of a run; give an --evaluator"),
        (["run", "variants", "s", "--algorithm", "lossless", "--seed", "1"], "= 'lossless' validates nothing"),
        (["plan", "variants", "--algorithm", "lossless"], "stores every variant as it is"),
        (["verify", "nowhere"], "nowhere"),
        (["list", "s"], "s: "),
        (["gc", "s"], "s: "),
        (["remove", "s", "x"], "s: "),
    ],
)
def test_a_mistake_is_one_line_and_no_store_appears(study, arguments, message):
    assert message in refused("dedup", *arguments, folder=study)
    assert not (study / "s").exists()


def test_a_store_without_loss_needs_no_evaluator_and_restores_every_bit(study, tmp_path):
    store, out = tmp_path / "store", tmp_path / "round-10.safetensors"
    done = as_json("dedup", "run", "variants", store, "--algorithm", "lossless", folder=study)
    assert all(each["epsilon_before"] == each["epsilon_after"] for each in done["variants"])
    assert done["num_validations"] == 0
    said, _ = fedpriv("dedup", "run", "variants", store, "--algorithm", "lossless", folder=study)
    assert "stays as it is, it is stored without loss" in said
    fedpriv("dedup", "restore", store, "round-10", "--out", out)
    (given,) = (study / "variants" / "round-10").glob("*.safetensors")
    assert {k: v.tobytes() for k, v in safetensors.numpy.load_file(out).items()} == {
        k: v.tobytes() for k, v in safetensors.numpy.load_file(given).items()
    }
    assert as_json("dedup", "remove", store, "round-10")["left"] == ["round-12", "round-14"]
    assert "2 variants, all sound" in fedpriv("dedup", "verify", store)[0]
