"""A table nobody prepared becomes features that the training part alone decides."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from fedpriv.errors import InputError
from fedpriv.methods.integral.tabular import prepare

ADULT = Path(__file__).resolve().parents[4] / "shared" / "data" / "adult.csv.gz"


def frame(num=200, classes=2):
    rng = np.random.default_rng(0)
    label = np.arange(num) % classes
    return pd.DataFrame(
        {
            "age": [f"{value:.6f}" for value in rng.normal(40, 10, num) + label],
            "job": rng.choice(["nurse", "clerk", "smith"], num),
            "label": [f"class {value}" for value in label],
        }
    )


def test_numbers_are_scaled_within_the_training_range_and_categories_are_one_feature_each():
    table = prepare(frame(), "label")
    assert table.feature_names == ("age", "job_clerk", "job_nurse", "job_smith")
    assert table.classes == ("class 0", "class 1")
    assert (len(table.train_labels), len(table.test_labels)) == (140, 60)
    assert float(table.train_features[:, 0].mean()) == pytest.approx(0, abs=1e-5)
    assert float(table.train_features[:, 0].std(correction=0)) == pytest.approx(1, abs=1e-5)
    assert set(table.train_features[:, 1:].sum(dim=1).tolist()) == {1.0}
    assert table.train_labels.bincount().tolist() == [70, 70]
    ten = prepare(frame(400, classes=10), "label", scaling="min-max")
    assert ten.test_labels.bincount().tolist() == [12] * 10
    for part in (ten.train_features, ten.test_features):
        assert float(part.min()) >= 0
        assert float(part.max()) <= 1


def test_blanks_after_separators_and_full_stops_of_a_second_file_change_nothing():
    """UCI Adult as it is distributed: `, ` between fields, and `>50K.` in its test file."""
    plain = frame()
    as_it_comes = plain.map(" {}".format).rename(columns=lambda name: f" {name}" if name != "age" else name)
    as_it_comes.loc[100:, " label"] += "."
    for target in ("label", " label"):
        found, expected = prepare(as_it_comes, target, drop=[" job"]), prepare(plain, "label", drop=["job"])
        assert (found.classes, found.feature_names) == (expected.classes, expected.feature_names)
        assert torch.equal(found.train_features, expected.train_features)
        assert torch.equal(found.test_labels, expected.test_labels)
    with pytest.raises(InputError, match="two have one name but for blanks around it; rename one of age, job, label"):
        prepare(plain.assign(**{" age": 1}), "label")
    assert prepare(plain.assign(label=["a.", "b."] * 100), "label").classes == ("a.", "b."), (
        "one behind every class stays"
    )


def test_the_test_part_changes_nothing_of_the_training_part():
    """Whatever stands in the test rows, the training features stay as they were, to the bit."""
    plain = frame()
    before = prepare(plain, "label")
    # Scaling keeps the order of ages, which are distinct: so a feature's rank tells its row.
    ages = torch.cat([before.train_features[:, 0], before.test_features[:, 0]]).numpy()
    assert len(set(ages.tolist())) == len(plain)
    rows = plain["age"].astype(float).argsort().to_numpy()[ages.argsort().argsort()]
    tested = rows[len(before.train_labels) :].tolist()
    spoiled = plain.copy()
    spoiled.loc[tested, ["age", "job"]] = ["1e9", "astronaut"]
    after = prepare(spoiled, "label")
    assert torch.equal(before.train_features, after.train_features)
    assert before.feature_names == after.feature_names
    assert not after.test_features[:, 1:].any(), "an unseen category is none of the known ones"


def test_what_says_nothing_is_left_out_with_the_reason():
    spoiled = frame().assign(
        same="7", empty=None, id=[f"person {row}" for row in range(200)], word="yes", price=["inf", "1", "2", None] * 50
    )
    table = prepare(spoiled, "label", drop=["job"])
    assert table.left_out["same"] == "constant"
    assert table.left_out["word"] == "constant"
    assert table.left_out["empty"] == "empty"
    assert "id or free text" in table.left_out["id"]
    assert "price" in table.feature_names, "an infinite number is a missing one, and makes no category of its column"
    assert "job" not in " ".join(table.feature_names)
    assert torch.isfinite(table.train_features).all()


def test_ids_are_left_out_unless_they_are_kept():
    numbered = frame().assign(
        RowNumber=[str(row) for row in range(1, 201)],
        CustomerId=[f"{15_000_000 + 37 * row}.0" for row in range(200)],
        visits=[str(row % 40) for row in range(200)],
    )
    table = prepare(numbered, "label")
    assert set(table.left_out) == {"RowNumber", "CustomerId"}
    assert all("an id" in reason for reason in table.left_out.values())
    assert {"age", "visits"} <= set(table.feature_names), "measurements have fractions, and counts repeat"
    kept = prepare(numbered, "label", keep=["RowNumber"])
    assert "RowNumber" in kept.feature_names
    assert set(kept.left_out) == {"CustomerId"}
    few = frame(24).assign(weight=[str(40 + row) for row in range(24)])
    assert "weight" in prepare(few, "label").feature_names, "a handful of numbers may well not repeat"


def test_missing_values_are_filled_and_counted():
    spoiled = frame()
    spoiled.loc[::3, "age"] = None
    spoiled.loc[::4, "job"] = None
    spoiled.loc[:9, "label"] = None
    table = prepare(spoiled, "label")
    assert table.num_unlabelled == 10
    assert "job_(missing)" in table.feature_names
    assert torch.isfinite(table.train_features).all()
    assert torch.isfinite(table.test_features).all()


def test_columns_that_give_a_class_away_are_named_with_their_accuracy_and_others_are_not():
    """Two kinds of failure, each always a failure, next to a number that is only likely to be one."""
    rng = np.random.default_rng(0)
    heat, power = (rng.permutation(2000) < 40 for _ in range(2))
    torque = rng.normal(size=2000)
    fails = heat | power | (torque + rng.normal(size=2000) > 3)
    columns = {"heat": heat.astype(int), "power": power.astype(int), "torque": torque, "fails": fails.astype(str)}
    frame = pd.DataFrame(columns)
    found = prepare(frame, "fails", test_fraction=0.01).giveaways
    assert found.keys() == {"heat", "power", "all of them"}
    alone = {name: np.where(frame[name] == 1, fails, ~fails).mean() for name in ("heat", "power")}
    assert [found[name] for name in alone] == pytest.approx(list(alone.values()), abs=2e-3)
    assert found["all of them"] == pytest.approx(np.where(heat | power, fails, ~fails).mean(), abs=2e-3)
    assert not prepare(frame, "fails", drop=["heat", "power"]).giveaways


def test_many_categories_share_a_feature():
    wide = frame(2000).assign(town=[f"town {row % 300}" for row in range(2000)])
    names = [name for name in prepare(wide, "label").feature_names if name.startswith("town")]
    assert len(names) == 50
    assert "town_infrequent_sklearn" in names


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({}, {"target": "income"}, "target = 'income': no such column; there are age, job, label"),
        ({}, {"drop": ["x"]}, "drop = 'x': no such column"),
        ({}, {"drop": ["label"]}, "is the target"),
        ({}, {"keep": ["label"]}, "keep = 'label': is the target"),
        ({}, {"keep": ["x"]}, "keep = 'x': no such column"),
        ({}, {"keep": ["job"], "drop": ["job"]}, "keep = 'job': is to be dropped too"),
        ({}, {"test_fraction": 1.0}, "test_fraction = 1.0"),
        ({}, {"scaling": "log"}, "scaling = 'log'"),
        ({"label": "same"}, {}, "target = 'label': 1 classes"),
        ({"label": None}, {}, "target = 'label': 0 classes"),
        ({"label": [str(row) for row in range(200)]}, {}, "200 distinct values; at most 100"),
        ({"label": ["rare"] + ["common"] * 199}, {}, "class 'rare': has 1 record"),
        ({"age": "1", "job": "clerk"}, {}, "no other column holds anything"),
    ],
)
def test_what_cannot_be_learnt_from_is_one_line(change, options, words):
    given = {"target": "label"} | options
    with pytest.raises(InputError, match=words) as caught:
        prepare(frame().assign(**change), given.pop("target"), **given)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not ADULT.is_file(), reason="needs ../shared/data/adult.csv.gz")
def test_adult():
    table = prepare(pd.read_csv(ADULT, dtype=str), "income")
    assert len(table.train_labels) + len(table.test_labels) == 32_561
    assert table.classes == ("<=50K", ">50K")
    assert not table.left_out
