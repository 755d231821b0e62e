"""`fedpriv dedup` on variants of a small linear model: plan, run, restore, verify, and one line for what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.numpy

from fedpriv.accounting.events import PureEpsilon
from fedpriv.ledger.ledger import Ledger
from tests.cli.command_line import as_json, fedpriv
from tests.cli.inputs import write_study


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the module `study` and, under variants/, three rounds of a run."""
    return write_study(tmp_path_factory.mktemp("study"))


def test_variants_are_planned_stored_restored_and_verified(study, tmp_path):
    planned = as_json("dedup", "plan", "variants", "--fairness", "outcome", folder=study)
    assert set(planned["targets"]) | set(planned["untouched"]) == {"round-10", "round-12", "round-14"}
    assert planned["targets"]
    store = tmp_path / "store"
    options = ["--evaluator", "study:evaluator", "--block-size", "128", "-o", "min_batch=1", "--fairness", "outcome"]
    done = as_json("dedup", "run", "variants", store, *options, folder=study)
    assert 0 < done["compression_ratio"] < 1
    assert done["num_validations"] > 0
    for outcome in done["variants"]:
        assert outcome["correct_before"] - outcome["correct_after"] <= 0.05 * 500
        assert outcome["epsilon_after"] <= outcome["epsilon_before"] + 0.3
    out = tmp_path / "round-14.safetensors"
    fedpriv("dedup", "restore", store, "round-14", "--out", out)
    assert safetensors.numpy.load_file(out)["weight"].shape == (8192,)
    assert "3 variants, all sound" in fedpriv("dedup", "verify", store)[0]
    blocks = next(store.glob("blocks.*.npy"))
    damaged = bytearray(blocks.read_bytes())
    damaged[-3] ^= 1
    blocks.write_bytes(damaged)
    assert "weight" in fedpriv("dedup", "verify", store, code=1)[0]


def test_private_records_are_charged_to_their_ledger_and_no_number_is_shown(study, tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.register("clinic", 500, 1e-5, data_set="validation")
    options = ["--evaluator", "study:private", "--block-size", "128", "--fairness", "outcome"]
    options += ["--epsilon-bound", "5", "--validation-epsilon", "0.75", "--ledger", tmp_path / "ledger.sqlite"]
    done = as_json("dedup", "run", "variants", tmp_path / "store", *options, folder=study)
    targets = [outcome for outcome in done["variants"] if outcome["bases"]]
    assert targets
    assert {outcome["correct_before"] for outcome in done["variants"]} == {None}
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        (release,) = ledger.releases("validation")
    assert release.event == PureEpsilon(epsilon=0.75, count=len(targets))
    other = ["--ledger", tmp_path / "other.sqlite", "--validation-epsilon", "1"]
    Ledger(tmp_path / "other.sqlite").close()
    run = ["dedup", "run", "variants", "s", "--evaluator", "study:private", *other]
    assert "no such data set of 500 records" in fedpriv(*run, folder=study, code=2)[1]
    assert not (study / "s").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "nowhere"], "folder = 'nowhere': holds no variants"),
        (["plan", "variants", "--strategy", "best"], "strategy = 'best': must be one of single, multi, cross"),
        (["run", "variants", "s", "--evaluator", "study:evaluator", "--algorithm", "magic"], "known are drd, dred"),
        (
            ["run", "variants", "s", "--evaluator", "study:evaluator", "-o", "speed=3"],
            "option = 'speed': drd knows min_batch",
        ),
        (["run", "variants", "s", "--evaluator", "missing:evaluator"], "must be MODULE:FUNCTION"),
        (["run", "variants", "s", "--evaluator", "study:private"], "its records are private"),
        (["run", "variants", "s"], "is not the variants of a run; give an --evaluator"),
        (["run", "variants", "s", "--evaluator", "study:evaluator", "--validation-epsilon", "1"], "are public"),
        (["verify", "nowhere"], "nowhere"),
    ],
)
def test_a_mistake_is_one_line_and_no_store_appears(study, arguments, message):
    out, err = fedpriv("dedup", *arguments, folder=study, code=2)
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    assert not (study / "s").exists()
