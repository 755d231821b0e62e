"""`fedpriv ledger`: what a privacy officer asks of a ledger, and what a user's mistake looks like."""

import json
import sqlite3
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedpriv.holder.vault import history
from fedpriv.privacy.accounting import filters
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.accounting.filters import RenyiFilter
from fedpriv.privacy.accounting.risk import risk_of
from fedpriv.privacy.accounting.views import Release
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.privacy.ledger.reader import reading
from fedpriv.texts import percent_up
from tests.cli.command_line import as_json, fedpriv, refused
from tests.cli.inputs import charge, write_ledger

EVENT = SubsampledGaussian(noise_multiplier=1.5, sampling_probability=0.1)
SHOWN = (["verify"], ["show"], ["statement", "--client", "0"])


def words(*arguments: object) -> str:
    """What `fedpriv ledger` prints, without its line breaks."""
    return " ".join(fedpriv("ledger", *arguments)[0].split())


def costs(left: int, *spent: SubsampledGaussian, each: int = 1) -> tuple[float, float]:
    """Epsilon of what was spent with all rounds that are left, each of so many events, and with one more."""
    more = (epsilon_of([*spent, EVENT.with_count(each * number)], 1e-5).epsilon for number in (left, left + 1))
    return next(more), next(more)


@pytest.fixture
def path(tmp_path) -> Path:
    """Two clients, two runs; the second run's noise was seeded for client 1."""
    return write_ledger(tmp_path / "ledger.sqlite", EVENT.with_count(3))


def test_show_agrees_with_the_accountant(path):
    (row, _) = as_json("ledger", "show", path, "--budget-epsilon", 2)["data_sets"]
    assert row["epsilon_local"] == epsilon_of([EVENT.with_count(12)], 1e-5).epsilon
    assert row["epsilon_rho"] > row["epsilon_local"]
    assert (row["runs"], row["rounds"], row["delta"]) == (2, 4, 1e-5)
    enough, too_many = costs(row["remaining_rounds"], EVENT.with_count(12), each=3)
    assert enough <= 2 < too_many
    assert fedpriv("ledger", "show", path)[0].count("\n") == 5, "headings, a line each, and the largest risk in words"


def test_the_aggregate_view_counts_what_sums_showed_and_single_uploads_in_full(tmp_path):
    path, scales = tmp_path / "node.sqlite", (2.0, 2.0, None)
    with Ledger(path) as ledger:
        releases = [Release(event=EVENT, rho_bar=1.0, aggregate_scale=scale, num_readers=1) for scale in scales]
        charge(ledger, ledger.register("0", 100, 1e-5).id, *releases)
    command = ["ledger", "show", path, "--budget-epsilon", 1.0]
    (row,) = as_json(*command)["data_sets"]
    (summed,) = as_json(*command, "--view", "aggregate")["data_sets"]
    assert row["epsilon_local"] == summed["epsilon_local"] == epsilon_of([EVENT.with_count(3)], 1e-5).epsilon
    spent = [EVENT.with_noise(2.0).with_count(2), EVENT]
    assert summed["epsilon_aggregate"] == epsilon_of(spent, 1e-5).epsilon < row["epsilon_local"]
    # The last upload was seen by itself, and so would the next ones be.
    enough, too_many = costs(summed["remaining_rounds"], *spent)
    assert enough <= 1.0 < too_many
    assert row["remaining_rounds"] < summed["remaining_rounds"]
    assert "Aggregate view" not in words("statement", path, "--client", "0")
    assert "must be one of local, aggregate" in refused("ledger", "show", path, "--view", "rho")


def test_a_ledger_is_shown_on_the_view_that_its_folder_names(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        release = Release(event=EVENT, rho_bar=1.0, aggregate_scale=2.0, num_readers=1)
        charge(ledger, ledger.register("0", 100, 1e-5).id, release)
    assert as_json("ledger", "show", path)["view"] == "local"
    (tmp_path / "config.toml").write_text('privacy_view = "aggregate"\n')  # a run's folder
    shown = as_json("ledger", "show", path)
    assert (shown["view"], "remaining_rounds" in shown["data_sets"][0]) == ("aggregate", False)
    (tmp_path / "vault.toml").write_text('partition_id = 0\nbudget_view = "aggregate"\nbudget_epsilon = 1.0\n')
    text, _ = fedpriv("ledger", "show", path)
    assert text.index("ε aggregate") < text.index("ε local")
    assert "left: rounds like the last one until ε 1 on the aggregate view" in text
    assert "remaining_rounds" not in as_json("ledger", "show", path, "--view", "local")["data_sets"][0]
    assert "Aggregate view" in words("statement", path, "--client", "0")
    # A ledger of another name in the folder has a budget of its own.
    path.rename(tmp_path / "other.sqlite")
    path.with_name("ledger.sqlite.head").rename(tmp_path / "other.sqlite.head")
    assert "remaining_rounds" not in as_json("ledger", "show", tmp_path / "other.sqlite")["data_sets"][0]


@pytest.mark.parametrize(
    ("readers", "against"),
    [
        ((2, 1), "the server and any one participant"),
        ((3, 2), "the server and any 2 participants"),
        ((0, 1), "the server alone"),
        ((), "the server and all other participants"),
    ],
)
def test_a_statement_names_the_fewest_against_whom_its_sums_were_charged(tmp_path, readers, against):
    """Charges of before participants were counted hold no number of them, and are stated as what they were."""
    path = tmp_path / "node.sqlite"
    with Ledger(path) as ledger:
        data_set = ledger.register("0", 100, 1e-5).id
        releases = [Release(event=EVENT, rho_bar=1.0, aggregate_scale=2.0, num_readers=num) for num in readers]
        releases += [Release(event=EVENT, rho_bar=1.0, aggregate_scale=scale) for scale in (1.0, None)]
        charge(ledger, data_set, *releases)
        assert [each.num_readers for each in ledger.releases_in_order(data_set)] == [*readers, 0, 0]
    with reading(path) as db:
        notes = [entry.note for entry in db.entries() if entry.phase == "charged"]
    assert [note for note in notes if note] == [json.dumps({"num_readers": num}) for num in readers if num]
    text = words("statement", path, "--client", "0", "--view", "aggregate")
    assert "Aggregate view" in text
    assert f": against {against}, where" in text
    assert ("those of earlier versions, do not count" in text) == (0 in readers)


def test_statement_says_what_was_spent_what_it_covers_and_where_to_check(path):
    (page,) = as_json("ledger", "statement", path, "--client", "0")["statements"]
    text, _ = fedpriv("ledger", "statement", path, "--client", "0")
    covered = ("one record", "NOT COVERED", "delta 1e-05", "secure", "first", "second")
    assert all(part in text for part in (page["data_set"], page["head"], *covered))
    shown = float(text.split("epsilon ")[1].split()[0])
    assert page["epsilon_local"] <= shown <= page["epsilon_local"] + 1e-4, "rounded up"
    assert page["private"] is True
    assert "NOT PRIVATE" not in text
    row = as_json("ledger", "show", path)["data_sets"][0]
    assert page["tpr_at_fpr"] == row["tpr_at_fpr"]
    found = percent_up(page["tpr_at_fpr"]["0.01"])
    assert f"identifies at most {found} of the records, on the local view, for releases" in " ".join(text.split())
    assert found in words("show", path)
    (seeded,) = as_json("ledger", "statement", path, "--client", "1")["statements"]
    assert seeded["private"] is False
    assert "NOT PRIVATE" in words("statement", path, "--client", "1")


def test_a_filter_states_what_its_budget_lets_pass(tmp_path):
    path, event = tmp_path / "node.sqlite", SubsampledGaussian(noise_multiplier=4.0, sampling_probability=0.1)
    rule = RenyiFilter.derived(3.0, 1e-5)
    with Ledger(path) as ledger:
        data_set = ledger.register("0", 100, 1e-5)
        ledger.bound(data_set, filters.to_json(rule))
        charge(ledger, data_set.id, Release(event=event, rho_bar=1.0))
    (with_budget,) = as_json("ledger", "show", path, "--budget-epsilon", "3")["data_sets"]
    told = rule.risk([event], epsilon=3.0, delta=data_set.delta_for_releases)
    assert with_budget["tpr_at_fpr"] == told.tpr_at_fpr
    (so_far,) = as_json("ledger", "show", path)["data_sets"]
    assert risk_of([event], 1e-5).tpr_at_fpr["0.01"] < so_far["tpr_at_fpr"]["0.01"] < told.tpr_at_fpr["0.01"]


def test_a_statement_answers_what_regulators_ask_in_80_columns_and_claims_no_compliance(path):
    text, _ = fedpriv("ledger", "statement", path, "--client", "1", "--view", "aggregate")
    lines = [line for line in text.splitlines() if str(path) not in line]
    assert max(map(len, lines)) <= 80
    questions = ("Unit", "Neighbouring data", "Delta", "Composition", "Adversary", "Assumed of others", "Extraction")
    assert [sum(line.startswith(f"{question} ") for line in lines) for question in questions] == [1] * 7
    said = " ".join(text.split())
    assert all(part in said for part in ("NIST SP 800-226", "EDPB Opinion 28/2024", "claims no compliance"))


def test_a_statement_of_a_part_of_the_history_says_what_it_cost_alone_and_what_was_refused(tmp_path, monkeypatch):
    path = tmp_path / "ledger.sqlite"
    for year, run in ((2026, "first"), (2027, "second")):
        charge_in(path, datetime(year, 5, 3, tzinfo=UTC), run, monkeypatch)
    (tmp_path / "vault.toml").write_text('partition_id = 0\nname = "St. Anna"\nbudget_epsilon = 4.0\n')
    told = {"time": "2027-05-03T10:00:00+00:00", "event": "began", "run": "second", "purpose": "falls, 2027"}
    clipped = told | {"event": "refused", "reason": "refused: clip_norm = 900.0", "purpose": None}
    old = clipped | {"time": "2026-01-01T10:00:00+00:00", "reason": "refused: long ago"}
    lines = [json.dumps(each) for each in (told, clipped, clipped, old)]
    (tmp_path / "events.jsonl").write_text("\n".join([*lines, "torn"]))
    command = ["ledger", "statement", path, "--client", "0"]
    (page,) = as_json(*command, "--since", "2027-01-01")["statements"]
    assert page["epsilon_since"] == epsilon_of([EVENT], 1e-5).epsilon < page["epsilon_local"]
    assert [run["study"] for run in page["run_list"]] == ["falls, 2027"]
    assert page["refused"] == {"refused: clip_norm = 900.0": 2}
    (whole,) = as_json(*command)["statements"]
    same = ("epsilon_local", "tpr_at_fpr", "budget", "rounds")
    assert [whole[key] for key in same] == [page[key] for key in same]
    assert (len(whole["run_list"]), len(whole["refused"])) == (2, 2)
    said = words(*command[1:], "--since", "2027-01-01")
    assert f"epsilon 4 for all runs together, on the local view: {page['budget']['used']:.1%} of it is used" in said
    for part in ("RUNS SINCE 2027-01-01", "falls, 2027: 1 round charged", "2 times refused: clip_norm = 900.0"):
        assert part in said
    assert "--since 2027-13-01: must be a date" in refused(*command, "--since", "2027-13-01")


def charge_in(path: Path, time: datetime, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Charge a round at this time, and let other clocks show it too."""
    for module in ("fedpriv.privacy.ledger.ledger", "fedpriv.holder.vault.history"):
        monkeypatch.setattr(f"{module}.datetime", SimpleNamespace(now=lambda _: time))
    with Ledger(path) as ledger:
        data_set = ledger.data_set() or ledger.register("0", 100, 1e-5)
        charge(ledger, data_set.id, Release(event=EVENT, rho_bar=1.0), run=run)


@pytest.fixture
def years(tmp_path, monkeypatch):
    """A node's ledger with a round in each of three years, and a limit that was changed in each."""
    folder = tmp_path / "node"
    folder.mkdir()
    (folder / "vault.toml").write_text('partition_id = 0\nname = "St. Anna"\nbudget_epsilon = 4.0\n')
    for year in (2025, 2026, 2027):
        charge_in(folder / "ledger.sqlite", datetime(year, 12, 31, 23, 59, tzinfo=UTC), f"of {year}", monkeypatch)
        (folder / "policy.toml").write_text(f"max_rounds = {year}\n")
        history.note(folder, "start")
    return folder / "ledger.sqlite"


def test_a_year_answers_an_ethics_board_in_its_order_and_counts_nothing_of_other_years(years):
    (page,) = as_json("ledger", "statement", years, "--year", "2026")["statements"]
    assert [run["run"] for run in page["run_list"]] == ["of 2026"]
    expected = [epsilon_of([EVENT.with_count(number)], 1e-5).epsilon for number in (1, 2, 3)]
    assert [page["epsilon_since"], page["epsilon_until"], page["epsilon_local"]] == pytest.approx(expected, rel=1e-12)
    (change,) = page["changes"]
    assert change.startswith("2026-12-31 ")
    assert change.endswith(", start: policy.toml: max_rounds: 2025 -> 2026")
    text = fedpriv("ledger", "statement", years, "--client", "0", "--year", "2026")[0]
    lines = [line for line in text.splitlines() if str(years) not in line]
    assert max(map(len, lines)) <= 80
    questions = ("Who", "What was released", "When", "How much", "What is left", "Limits changed by")
    answered = [question for line in lines for question in questions if line.startswith(f"{question} ")]
    assert tuple(answered) == questions
    said = " ".join(text.split())
    for answer in (
        "THE YEAR 2026",
        "noised updates of 1 round in 1 run: of 2026 When from 2026-12-31 to 2026-12-31 UTC",
        f"{1 - page['budget']['used']:.1%} of epsilon 4 on the local view, as of 2027-12-31",
        "RUNS IN 2026",
    ):
        assert answer in said, answer


def test_an_empty_year_a_bad_one_and_a_ledger_without_a_history_are_told(years, path):
    (page,) = as_json("ledger", "statement", years, "--year", "2024")["statements"]
    assert (page["run_list"], page["epsilon_since"], page["epsilon_until"], page["changes"]) == ([], 0, 0, [])
    said = words("statement", years, "--year", "2024")
    assert "What was released nothing was released" in said
    assert "Limits changed by nobody, as the node's history has it" in said
    for bad in (["--year", "26"], ["--year", "20x6"], ["--year", "0026"], ["--year", "2026", "--since", "2026-02-01"]):
        error = refused("ledger", "statement", years, *bad)
        assert f"--year {bad[1]}: must be a year such as 2026, and without --since" in error
    pages = as_json("ledger", "statement", path, "--year", "2026")["statements"]
    assert len(pages) > 1, "of all clients"
    said = words("statement", path, "--client", "1", "--year", "2026")
    assert "not known here: the ledger is not in the folder of a node" in said


def test_a_broken_chain_is_named_by_its_entry_and_nothing_is_stated_on_it(path):
    assert as_json("ledger", "verify", path)["entries"] == 10
    db = sqlite3.connect(path)
    db.execute("DROP TRIGGER no_update")
    db.execute("UPDATE entries SET event = replace(event, '1.5', '15') WHERE number = 3")
    db.commit()
    db.close()
    for command in SHOWN:
        assert "entry 3 was changed" in refused("ledger", command[0], path, *command[1:], "--json", code=1)


def test_another_data_set_needs_the_holders_statement(tmp_path):
    path = tmp_path / "node.sqlite"
    command = ["ledger", "register", path, "--client", "0", "--num-records"]
    assert f"{path}: no such ledger; give its path, or --new to make one" in refused(*command, "50")
    assert not path.exists()
    first = as_json(*command, "50", "--new")
    assert "--disjoint" in refused(*command, "60")
    second = as_json(*command, "60", "--disjoint", "cases of 2027")
    assert second["data_set"] != first["data_set"]
    with Ledger(path) as ledger:
        assert ledger.data_set().id == second["data_set"]
    assert "cases of 2027" in words("statement", path, "--client", "0")


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["show", "none.sqlite"], 1, "no such ledger"),
        (["statement", "{path}", "--client", "7"], 2, "knows 0, 1"),
        (["show", "{path}", "--budget-epsilon", "0"], 2, "epsilon = 0"),
        (["register", "{path}", "--client", "0", "--num-records", "0"], 2, "--num-records 0"),
        (["adopt-head", "none.sqlite"], 1, "no such ledger"),
        (["adopt-head", "{path}", "--reason", " "], 2, "--reason"),
    ],
)
def test_a_mistake_is_one_line(path, arguments, code, part):
    assert part in refused("ledger", *(argument.format(path=path) for argument in arguments), code=code)


def truncated(path: Path) -> Path:
    """The ledger without its last charges and without its head: it looks as if less had been spent."""
    db = sqlite3.connect(path)
    db.execute("DROP TRIGGER no_delete")
    db.execute("DELETE FROM entries WHERE number > 4")
    db.commit()
    db.close()
    path.with_name(path.name + ".head").unlink()
    return path


def test_a_ledger_that_lost_its_last_entries_and_its_head_is_not_vouched_for(path):
    truncated(path)
    for command in SHOWN:
        error = refused("ledger", command[0], path, *command[1:], code=1)
        assert "ledger.sqlite.head is missing" in error
        assert "fedpriv ledger adopt-head" in error


def test_adopting_shows_what_is_there_and_every_later_statement_says_so(path):
    assert as_json("ledger", "verify", path)["adopted"] == []
    for command in SHOWN:
        assert "COMPLETE" not in words(command[0], path, *command[1:])
    truncated(path)
    shown = as_json("ledger", "adopt-head", path)
    assert (shown["entries"], shown["data_sets"][0]["rounds"]) == (4, 3)
    fedpriv("ledger", "show", path, code=1)  # looking adopts nothing
    assert "nothing is adopted yet" in words("adopt-head", path)
    adopted = as_json("ledger", "adopt-head", path, "--reason", "new disk")
    assert (adopted["entries"], adopted["head"], adopted["adopted_by_entry"]) == (4, shown["head"], 5)
    (page,) = as_json("ledger", "statement", path, "--client", "0")["statements"]
    found = as_json("ledger", "verify", path)
    assert (found["entries"], found["head"], page["head"]) == (5, adopted["new_head"], adopted["new_head"])
    for noted in (page["adopted"], found["adopted"], as_json("ledger", "show", path)["adopted"]):
        (each,) = noted
        assert (each["up_to_entry"], each["reason"]) == (4, "new disk")
    for command in SHOWN:
        text = words(command[0], path, *command[1:])
        assert "NOT KNOWN TO BE COMPLETE up to entry 4" in text
        assert "no entry is lost: new disk" in text


@pytest.mark.parametrize("reason", [[], ["--reason", "because"]])
def test_a_head_that_is_there_is_not_adopted(path, reason):
    assert "nothing to adopt" in refused("ledger", "adopt-head", path, *reason, code=1)
    kept = path.with_name(path.name + ".head").read_text()
    truncated(path).with_name(path.name + ".head").write_text(kept)
    error = refused("ledger", "adopt-head", path, *reason, code=1)
    assert "ends at entry 4, but ledger.sqlite.head has seen entry 10" in error


def test_a_digest_that_was_kept_tells_whether_its_entry_is_still_there(path):
    kept = as_json("ledger", "verify", path)["head"]
    with Ledger(path) as ledger:
        ledger.register("2", 10, 1e-5)
    assert as_json("ledger", "verify", path, "--head", kept.upper())["kept_head_is_entry"] == 10
    command = fedpriv("ledger", "statement", path, "--client", "0")[0].rpartition("  fedpriv ")[2]
    assert "kept_head_is_entry  11" in fedpriv(*command.replace("\\\n", "").split())[0]
    truncated(path)
    as_json("ledger", "adopt-head", path, "--reason", "says the thief")
    assert f"has no entry {kept}" in refused("ledger", "verify", path, "--head", kept, code=1)
    short = refused("ledger", "verify", path, "--head", kept[:12])
    assert f"--head {kept[:12]}: must be the 64 hex digits" in short


def called(folder: Path, ledger: Path, *names: str) -> None:
    """Write into a run's folder by which names it knows the first clients of the ledger."""
    rows = as_json("ledger", "show", ledger)["data_sets"]
    known = {row["client"]: {"data_set": row["data_set"], "name": name} for row, name in zip(rows, names, strict=False)}
    (folder / "registrations.json").write_text(json.dumps(known))


def test_a_holder_is_shown_by_the_name_that_its_run_knows(path, tmp_path):
    assert [row["name"] for row in as_json("ledger", "show", path)["data_sets"]] == [None, None]
    run = tmp_path / "run"
    run.mkdir()
    assert "holds no registrations.json" in refused("ledger", "show", path, "--run", run)
    called(run, path, "St. Anna")
    assert "St. Anna (0)  " in fedpriv("ledger", "show", path, "--run", run)[0]
    assert as_json("ledger", "show", path, "--run", run)["data_sets"][0]["name"] == "St. Anna"
    text = words("statement", path, "--client", "0", "--run", run)
    assert "Client St. Anna (0), a name that it chose; the chain covers its number" in text
    assert "St. Anna" not in words("show", path)
    assert "knows St. Anna (0), 1" in refused("ledger", "statement", path, "--client", "7", "--run", run)
    (run / "registrations.json").replace(path.parent / "registrations.json")
    assert "St. Anna (0)" in words("show", path)


def test_a_statement_is_found_by_name_and_no_name_stands_for_another_clients_number(path):
    def stated(client: str) -> str:
        return as_json("ledger", "statement", path, "--client", client)["statements"][0]["client"]

    called(path.parent, path, "St. Anna", "North\x1b[2Jgate")
    assert (stated("St. Anna"), stated("North\N{REPLACEMENT CHARACTER}[2Jgate")) == ("0", "1")
    text, _ = fedpriv("ledger", "statement", path, "--client", "North\x1b[2Jgate")
    assert "\x1b" not in text
    assert "the chain covers its number" in " ".join(text.split())
    assert "\x1b" not in refused("ledger", "statement", path, "--client", "\x1b[31mMallory")
    called(path.parent, path, "1", "St. Anna")
    assert stated("1") == "1", "the first client calls itself by the second one's number"
    called(path.parent, path, "St. Anna", "St. Anna")
    error = refused("ledger", "statement", path, "--client", "St. Anna")
    assert "knows 2 of this name, St. Anna (0), St. Anna (1); give the number" in error
    called(path.parent, path, "", "")
    assert "knows 0, 1; give the number" in refused("ledger", "statement", path, "--client", "")
