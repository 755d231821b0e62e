"""A checkpoint reads back whole or is refused by name; a run goes on only as what it was, and spares others' files."""

import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from fedpriv.config import BY_RECIPE, parse, read
from fedpriv.errors import InputError
from fedpriv.holder.wire.kinds import Registration
from fedpriv.learning.adapters._arithmetic import Product
from fedpriv.learning.aggregation._fedavg import GlobalModel
from fedpriv.models.variants.store import Store
from fedpriv.privacy.ledger import keys
from fedpriv.privacy.ledger.ledger import Ledger
from fedpriv.runs import RunWriter, files
from server import checkpoint
from server.checkpoint import Checkpoint, first_registrations, read_last, write
from server.registration import NO_NODE
from server.round import Absences
from simulations import __main__ as command
from tests.cli.command_line import as_json
from tests.foreign import linked, planted
from tests.marks import slow
from tests.privacy.ledger.test_evidence import failures, verified
from tests.server.parts import StopsAfter, global_adapter, nodes_of, registered, run, signed, summary
from tests.tiny import with_persons

INITIAL = {"b": torch.zeros(2, 3), "a": torch.ones(4)}


def moved(by: float) -> dict[str, torch.Tensor]:
    return {name: tensor + by for name, tensor in INITIAL.items()}


def make(round_: int = 3) -> Checkpoint:
    base = {"other": Product(torch.randn(4, 4)), "layer": Product(torch.randn(3, 2), torch.randn(2, 5))}
    known = {"initial": INITIAL, "last_update": dict(INITIAL), "optimizer_state": {"first": moved(3)}}
    return Checkpoint(
        **{"run": "5eed", "round": round_, "digest": "abc", "ledger": (7, "d1"), "retired": {2: "budget"}},
        registrations=(Registration(client=0, num_records=40, name="St. Anna", data_set="x", keeps_replies=True),),
        model=GlobalModel(**known, adapter=moved(1), merged=base),
        uploads={0: (moved(2), base), 5: (dict(INITIAL), {})},
    )


def assert_equal_tensors(one, other):
    assert list(one) == list(other), "sums of floats and the digest of a request depend on the order"
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_reads_back_everything(tmp_path):
    made = make()
    write(tmp_path, made)
    found = read_last(tmp_path, INITIAL)
    for name in ("run", "round", "digest", "ledger", "registrations", "retired"):
        assert getattr(found, name) == getattr(made, name), name
    assert_equal_tensors(found.model.adapter, made.model.adapter)
    assert_equal_tensors(found.model.last_update, made.model.last_update)
    assert found.model.optimizer_state.keys() == {"first"}
    assert_equal_tensors(found.model.optimizer_state["first"], made.model.optimizer_state["first"])
    assert [(name, p.right is None) for name, p in found.model.merged.items()] == [("other", True), ("layer", False)]
    for name, each in made.model.merged.items():
        assert torch.equal(found.model.merged[name].matrix(), each.matrix())
    assert found.uploads.keys() == {0, 5}
    assert found.uploads[0][1] is found.model.merged
    assert found.uploads[5][1] == {}
    assert_equal_tensors(found.uploads[0][0], made.uploads[0][0])


def test_the_last_two_stay_and_what_a_crash_left_unfinished_does_not_count(tmp_path):
    for round_ in range(4):
        write(tmp_path, make(round_))
    kept = tmp_path / "checkpoint"
    shutil.copytree(kept / "round-000003", kept / "round-000004.tmp")
    (kept / "round-000004.tmp" / "state.json").unlink()
    assert read_last(tmp_path, INITIAL).round == 3
    write(tmp_path, make(4))
    assert [path.name for path in sorted(kept.iterdir())] == ["round-000003", "round-000004"]
    assert read_last(tmp_path, INITIAL).round == 4
    assert read_last(kept / "round-000003", INITIAL).round == 3


def test_what_others_keep_among_the_checkpoints_stays(tmp_path):
    run, parent = tmp_path / "run", tmp_path / "run" / "checkpoint"
    places = ("", "round-000001-good", "round-9", "round-000002.tmp", "round-000000")
    foreign = [planted(parent / place, tmp_path / "outside" / (place or "parent")) for place in places]
    for round_ in (0, 1, 2, 2, 3):
        write(run, make(round_))
        if round_ == 2 and len(foreign) == len(places):
            foreign.append(planted(parent / "round-000002", tmp_path / "outside" / "last"))
        for each in foreign:
            each.check()
        assert read_last(run, INITIAL).round == round_
    assert sorted(path.parent.name for path in parent.glob("*/state.json")) == ["round-000002", "round-000003"]
    assert not list(parent.glob("*/.state*")), "something is half-written"


def test_checkpoints_behind_a_link_are_written_and_never_deleted(tmp_path):
    write(tmp_path / "other", make(1))
    (tmp_path / "run").mkdir()
    behind = linked(tmp_path / "run" / "checkpoint", tmp_path / "other" / "checkpoint")
    for round_ in (2, 3, 4):
        write(tmp_path / "run", make(round_))
    behind.check()
    assert read_last(tmp_path / "run", INITIAL).round == 4


@pytest.mark.parametrize(
    ("file", "harm"),
    [
        *product(["state.json", "state.json.sha256", "tensors.safetensors"], ["gone", "cut", "flipped"]),
        ("registrations.json", "gone"),
    ],
)
def test_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_offered(tmp_path, file, harm):
    write(tmp_path, make(3))
    write(tmp_path, make(4))
    path = tmp_path / "checkpoint" / "round-000004" / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= harm == "flipped"
    path.write_bytes(content[: len(content) // 2] if harm == "cut" else content)
    if harm == "gone":
        path.unlink()
    with pytest.raises(InputError, match=r"round-000004: damaged.*the one before is .*round-000003, resume from that$"):
        read_last(tmp_path, INITIAL)
    assert read_last(tmp_path / "checkpoint" / "round-000003", INITIAL).round == 3


def test_checkpoint_of_another_version_or_package_or_none_is_refused(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="holds no checkpoint"):
        read_last(tmp_path, INITIAL)
    write(tmp_path, make())
    monkeypatch.setattr(checkpoint, "_packages", lambda: {"flwr": "9.9"})
    with pytest.raises(InputError, match=r"was written with flwr \d\S*; 9\.9 is installed"):
        read_last(tmp_path, INITIAL)
    monkeypatch.setattr(checkpoint, "VERSION", 2)
    with pytest.raises(InputError, match=r"is version 1; this is fedpriv \S+, which reads 2"):
        read_last(tmp_path, INITIAL)


def interrupt(values: dict, out: Path, **changes: object) -> tuple[dict, Path]:
    """The configuration and folder of a run that ended after its second round."""
    values = {**values, "rounds": 4, "target_epsilon": 6.0, "noise_multiplier": BY_RECIPE, **changes}
    with pytest.raises(KeyboardInterrupt):
        run(values, out, StopsAfter(2))
    return values, out


def resume(values: dict, folder: Path, **changes: object) -> Path:
    return run(values, folder, resume=str(folder), **changes)


@pytest.fixture(scope="module")
def stopped(small_run, tmp_path_factory) -> tuple[dict, Path]:
    return interrupt(small_run, tmp_path_factory.mktemp("stopped") / "run")


@pytest.fixture
def interrupted(stopped, tmp_path) -> tuple[dict, Path]:
    """Such a run, in a folder that a test may change."""
    return stopped[0], shutil.copytree(stopped[1], tmp_path / "run")


@pytest.mark.parametrize(
    "changes",
    [
        {"server_optimizer": "adam", "person_column": "patient", "max_records_per_person": 2},
        *slow({"server_optimizer": "sgd"}, {"server_optimizer": "momentum"}),
    ],
    ids=str,
)
def test_an_interrupted_run_ends_as_an_uninterrupted_one(small_run, table, tmp_path, changes):
    if "person_column" in changes:
        changes = changes | {"data": str(with_persons(table, tmp_path / "persons.csv", 3))}
    values, folder = interrupt(small_run, tmp_path / "run", **changes)
    folders = resume(values, folder), run(values, tmp_path / "whole")
    tables = [pd.read_csv(f / "rounds.csv").drop(columns="seconds") for f in folders]
    pd.testing.assert_frame_equal(*tables, check_exact=True)
    assert_equal_tensors(*map(global_adapter, folders))
    one, other = map(summary, folders)
    for name in ("accuracy", "epsilon_local_max", "epsilon_rho_max", "bytes_up", "bytes_down", "num_rounds"):
        assert one[name] == other[name], name
    assert [client["earlier_runs"] for client in one["clients"]] == [0, 0, 0]


@pytest.mark.parametrize("new_key", [False, True])
def test_a_statement_stays_as_its_node_has_signed_it_when_the_run_goes_on(node_keys, new_key):
    old, new = node_keys.parent / "key-0", node_keys.parent / "key-1"
    began = signed(make().registrations[0], old, receipt="of the start")
    now = signed(make().registrations[0], new if new_key else old, receipt="of later charges")
    ((_, kept),) = first_registrations({0: (7, now)}, replace(make(), registrations=(began,))).values()
    assert keys.verify(kept.identity, kept.signed, kept.signature)
    assert kept.identity == now.identity, "sums are signed by the key that the node has now"


def test_the_evidence_of_a_resumed_run_is_confirmed(small_run, tmp_path):
    """Its nodes keep no ledger, so each start makes a new key, which signs for sums and for no older statement."""
    # So much noise that loss distributions are short.
    sums = {"secure_aggregation": True, "local_steps": 1, "optimizer": "sgd", "min_clients": 3}
    given = {"target_epsilon": "", "noise_multiplier": 20.0}
    folder = resume(*interrupt(small_run, tmp_path / "run", **sums, **given))
    as_json("evidence", folder, "--out", tmp_path / "bundle.zip")
    code, lines = verified(tmp_path / "bundle.zip")
    assert (code, failures(lines)) == (0, [])
    assert sum("its registration is signed by ssh-ed25519" in line for line in lines) == 3


def test_the_command_line_resumes_with_the_run_s_own_keys_and_a_finished_run_can_be_finished_again(interrupted):
    values, folder = interrupted
    runner = CliRunner()
    refused = runner.invoke(command.app, ["run", "--resume", str(folder), "-c", "rounds=9"])
    assert refused.exit_code == 2
    done = runner.invoke(command.app, ["run", "--resume", str(folder)])
    assert done.exit_code == 0, done.output
    assert "resumes after round 2" in " ".join(done.output.split())
    assert summary(folder)["num_rounds"] == 4
    before = (folder / "rounds.csv").read_text()
    (folder / "summary.json").unlink()
    resume(values, folder)
    assert (folder / "rounds.csv").read_text() == before
    assert (folder / "summary.json").exists()


def test_a_run_whose_noise_came_from_shares_of_a_target_goes_on_with_that_noise(small_run, tmp_path):
    settings = {"batch_size": 64, "local_steps": 1, "rounds": 3, "lora_rounds": 1, "target_epsilon": 2.3}
    values = {**small_run, **settings, "sampling_probability": 1.0}
    del values["noise_multiplier"]
    with pytest.raises(KeyboardInterrupt):
        run(values, tmp_path / "run", StopsAfter(2))
    resolved = read(tmp_path / "run" / "config.toml")
    assert resolved["lora_noise_multiplier"], "the check would be blind"
    resume(resolved, tmp_path / "run")


def test_another_configuration_other_nodes_or_no_ledger_of_its_own_are_refused_by_name(interrupted, tmp_path):
    values, folder = interrupted
    before = (folder / "rounds.csv").read_text()
    for change, named in (
        ({"learning_rate": 0.1}, "learning_rate"),
        ({"clip_norm": 2.0, "seed": 5}, "clip_norm, seed"),
    ):
        with pytest.raises(InputError, match=rf"began with another configuration; {named}.* differ"):
            resume(values, folder, **change)
    with pytest.raises(InputError, match="keeps_replies = True: client 0 began this run with False"):
        resume(values, folder, ledger=str(tmp_path / "other.sqlite"))
    assert (folder / "rounds.csv").read_text() == before
    for file in folder.glob("ledger.sqlite*"):
        file.unlink()
    with pytest.raises(InputError, match=r"ledger\.sqlite: is missing"):
        resume(values, folder)
    Ledger(folder / "ledger.sqlite").close()
    with pytest.raises(InputError, match=r"ledger\.sqlite: is not the one of the run"):
        resume(values, folder)


def test_a_run_that_lives_on_another_machine_keeps_every_row(interrupted):
    values, folder = interrupted
    table, process = folder / files.ROUNDS, folder / files.PRESENCE
    last = table.read_text().splitlines()[-1]
    with files.marked_alive(folder), table.open("a") as file:
        process.write_text('{"boot": "another machine"}')
        print(last.replace("2", "3", 1), file=file, flush=True)  # of a round that has no checkpoint yet
        before = table.read_bytes(), process.read_bytes()
        with pytest.raises(InputError, match="another process runs this run"):
            resume(values, folder)
        assert (table.read_bytes(), process.read_bytes()) == before
    resume(values, folder)


def began(*clients: int, **state) -> SimpleNamespace:
    """What a checkpoint knows of the clients of its run."""
    known = [replace(each, name=f"site {each.client}") for each in registered(dict.fromkeys(clients, 10))]
    return SimpleNamespace(registrations=tuple(known), **{"retired": {}, "skipped": (), **state})


def there(*clients: int) -> dict:
    return nodes_of(began(*clients).registrations)


@pytest.mark.parametrize(("here", "gone"), [((0, 1, 2), ()), ((0, 2), (1,)), ((0, 1), (2,)), ((0, 2, 7), (1,))])
def test_a_run_goes_on_with_those_who_are_there_and_knows_the_others_by_name(here, gone):
    """One left, another joined, or both; the one that is new was never asked, and is not now."""
    nodes = checkpoint.first_registrations(there(*here), began(0, 1, 2), min_clients=2)
    assert list(nodes) == [0, 1, 2]
    assert [client for client, (node_id, _) in nodes.items() if node_id == NO_NODE] == list(gone)
    assert Absences(nodes).skipped == list(gone), "who is not there is not asked, and so not charged"


@pytest.mark.parametrize("retired", [{}, {0: "its budget is spent"}])
def test_a_run_that_too_few_are_left_of_says_who_is_missing(retired):
    needed = 3 - len(retired)
    missing = rf"min_clients = {needed}: the run .* needs as many of the 3 nodes .* missing are site 1 \(1\)"
    with pytest.raises(InputError, match=missing):
        checkpoint.first_registrations(there(0, 2), began(0, 1, 2, retired=retired), min_clients=needed)


def test_nobody_waits_for_whose_key_is_admitted_no_more_even_of_the_last_partition(tmp_path):
    for client in (0, 1):
        keys.make_key_pair(tmp_path / str(client))
    assert checkpoint.may_be_missing(began(0, 1, 2, skipped=(1,)), 1, tmp_path) == {1, 2}
    assert checkpoint.may_be_missing(began(0, 1, 2, skipped=(1,)), 2, tmp_path) == {2}, "the skipped one is needed"
    assert checkpoint.may_be_missing(began(0, 1, 2), 1) == set()


def test_what_others_keep_in_a_runs_folders_outlives_its_resumption(small_run, tmp_path):
    values = {**small_run, "rounds": 1, "comparison": True, "dedup": "lossless"}
    folder = run(values, tmp_path / "run")
    places = ("", files.CHECKPOINTS, files.COMPARISON, files.STORE, "variants/global", "checkpoint/round-000001")
    foreign = [planted(folder / place, tmp_path / "outside" / (place or "run")) for place in places]
    foreign.append(linked(folder / files.COMPARISON / "linked", tmp_path / "outside" / "store"))
    (folder / files.SUMMARY).unlink()
    with Store(folder / files.STORE) as store:
        of_another_attempt = store.names[0]
        store.remove(of_another_attempt)
        layout = store.manifest(store.names[0]).layout
        zeros = {name: values * 0 for name, values in store.tensors(store.names[0]).items()}
        store.add("stranger", layout, *layout.to_blocks(zeros))
    resume(values, folder)
    for each in foreign:
        each.check()
    assert files.is_finished(folder)
    assert files.is_finished(folder / files.COMPARISON)
    with Store(folder / files.STORE, read_only=True) as store:
        assert of_another_attempt in store.names
        assert "stranger" not in store.names
        assert not store.verify()


def test_of_two_runs_that_begin_in_one_folder_at_once_the_second_is_refused(tmp_path, monkeypatch):
    first = RunWriter.created(tmp_path / "run", parse({"seed": 1}))
    before = (first.path / files.CONFIG).read_bytes()
    monkeypatch.setattr(files, "check_unused", lambda _: None)  # both have looked before either wrote
    with pytest.raises(InputError, match=r"config\.toml: exists"):
        RunWriter.created(tmp_path / "run", parse({"seed": 2}))
    assert (first.path / files.CONFIG).read_bytes() == before


def test_a_comparison_behind_a_link_is_not_written_over(tmp_path):
    other = RunWriter.created(tmp_path / "other", parse({"seed": 1}))
    (tmp_path / "run").mkdir()
    behind = linked(tmp_path / "run" / files.COMPARISON, other.path)
    with pytest.raises(InputError, match="already holds a run"):
        RunWriter.started_over(tmp_path / "run" / files.COMPARISON, parse({"seed": 2}))
    behind.check()


def test_a_temporary_name_takes_nobodys_file(tmp_path):
    writer = RunWriter.created(tmp_path, parse({}))
    foreign = planted(tmp_path, tmp_path / "outside", ("summary.tmp", "rounds.csv.tmp", "samples.tmp", "tracker.tmp"))
    behind = linked(tmp_path / "progress.tmp", tmp_path / "outside" / "patients.csv")
    writer.finish({"accuracy": 1.0})
    writer.note_progress(1, {0: "training"})
    writer._write_tables()
    foreign.check()
    behind.check()
