"""A bundle of evidence is confirmed by a program that knows nothing of fedpriv, and a change of it is named."""

import ast
import hashlib
import io
import json
import logging
import random
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import norm

from fedpriv.holder.vault._charging import charge
from fedpriv.privacy.accounting import filters
from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.events import SubsampledGaussian, to_json
from fedpriv.privacy.accounting.filters import CommittedPlan, GaussianFilter, RenyiFilter
from fedpriv.privacy.accounting.lmo_parameters import LmoParameters
from fedpriv.privacy.accounting.lmo_renyi import SubsampledLmo
from fedpriv.privacy.accounting.risk import Risk, risk_of
from fedpriv.privacy.accounting.views import Release
from fedpriv.privacy.ledger import verify_evidence
from fedpriv.privacy.ledger.entries import Charge, Key
from fedpriv.privacy.ledger.evidence import Exhibit, write_evidence
from fedpriv.privacy.ledger.ledger import Ledger
from simulations.api import sweep_all
from tests.cli.command_line import as_json, fedpriv
from tests.events import gaussian
from tests.marks import slow
from tests.privacy.ledger.test_recovery import Node
from tests.server import parts

Files = dict[str, bytes]
SLOW = pytest.mark.slow


def verified(bundle: Path, *more: str) -> tuple[int, list[str]]:
    """The verifier's exit code and its lines."""
    before, sys.argv = sys.argv, ["verify_evidence.py", str(bundle), *more]
    try:
        with redirect_stdout(io.StringIO()) as output:
            code = verify_evidence.main()
    finally:
        sys.argv = before
        logging.disable(logging.NOTSET)  # the program ends with its process, this one goes on
    return code, output.getvalue().splitlines()


def failures(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("NOT CONFIRMED")]


def unpacked(bundle: Path) -> Files:
    with zipfile.ZipFile(bundle) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(files: Files, path: Path, *, forged: bool) -> Path:
    """A bundle of these files; a forger writes the manifest again."""
    if forged:
        digests = {n: hashlib.sha256(content).hexdigest() for n, content in files.items() if n != "manifest.json"}
        files = files | {"manifest.json": json.dumps({"format": 1, "files": digests}).encode()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def charged_ledger(
    path: Path, *releases: Release, delta: float = 1e-5, rule: object = None, noise_source: str = "secure"
) -> Path:
    """A ledger of one data set that was charged these releases, under the rule of a budget if there is one."""
    with Ledger(path) as ledger:
        data_set = ledger.register("0", 100, delta, bound=filters.to_json(rule) if rule else None)
        for round_, release in enumerate(releases):
            key = Key(run="run", client="0", round=round_, request="x")
            ledger.charge([Charge(key=key, data_set=data_set.id, release=release, noise_source=noise_source)])
    return path


def verified_ledger(path: Path, *budget: object) -> tuple[int, list[str]]:
    """What the verifier says of a ledger alone, and of its budget and the view of that."""
    bundle = path.with_suffix(".zip")
    bundle.unlink(missing_ok=True)
    write_evidence(bundle, {"ledger": Exhibit(ledger=path, budget=budget or None)})
    return verified(bundle)


@pytest.fixture(scope="module")
def node(tmp_path_factory) -> Path:
    """The bundle of a node that signs, has limits, and keeps a budget by a filter."""
    folder = tmp_path_factory.mktemp("evidence")
    made = Node(folder / "node")
    assert made.newest.counter == 0  # the receipt that a node shows as it registers, which its log keeps
    made.charge(1, 2, 3)
    policy = folder / "node" / "policy.toml"
    policy.write_text("max_rounds = 3\n")
    source = Exhibit(ledger=made.path, receipts=(made.receipts,), policy=policy, budget=(100.0, "local"))
    write_evidence(folder / "bundle.zip", {"node": source})
    return folder / "bundle.zip"


@pytest.fixture(scope="module", params=["summed", *slow("single")])
def run(request, small_run, tmp_path_factory) -> tuple[Path, Path, dict]:
    """The folder of a run of sums or of single uploads, its bundle, and what `fedpriv evidence` said of it."""
    folder = tmp_path_factory.mktemp(request.param)
    sums = {"secure_aggregation": True, "local_steps": 1, "optimizer": "sgd", "learning_rate": 0.1, "min_clients": 3}
    more = sums if request.param == "summed" else {"budget_epsilon": [50.0]}
    parts.run(small_run, folder / "run", noise_multiplier=4.0, **more)
    return folder / "run", folder / "bundle.zip", as_json("evidence", folder / "run", "--out", folder / "bundle.zip")


def test_the_evidence_of_a_run_is_confirmed(run):
    _, bundle, values = run
    code, lines = verified(bundle, "--head", values["heads"]["run"])
    assert (code, failures(lines)) == (0, [])
    is_single = any("the local budget of 50 is kept" in line for line in lines)
    for client in range(3):
        said = [line for line in lines if f"client {client} in the run's summary: epsilon" in line]
        views = {re.findall(r"epsilon_(\w+) at", line)[0] for line in said}
        assert views >= {"local", "rho"} | (set() if is_single else {"aggregate"})
    assert any(line.startswith("left to you") and "seeded" in line for line in lines)


@pytest.mark.slow
def test_the_evidence_of_a_sweep_has_a_folder_for_each_run(small_run, tmp_path):
    values = {key: value for key, value in small_run.items() if key != "noise_multiplier"} | {"rounds": 1}
    grid = {"noise_multiplier": [4.0, 8.0]}
    sweep_all(None, values, grid=grid, out=tmp_path / "sweep", max_parallel=1, progress=False)
    values = as_json("evidence", tmp_path / "sweep", "--out", tmp_path / "bundle.zip")
    assert len(values["heads"]) == 2
    assert verified(tmp_path / "bundle.zip")[0] == 0


def test_a_bundle_is_the_same_to_the_byte_and_its_manifest_lists_every_file(run, tmp_path):
    folder, bundle, said = run
    assert as_json("evidence", folder, "--out", tmp_path / "again.zip")["sha256"] == said["sha256"]
    assert hashlib.sha256(bundle.read_bytes()).hexdigest() == said["sha256"]
    files = unpacked(bundle)
    listed = json.loads(files.pop("manifest.json"))["files"]
    assert listed == {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def test_a_bundle_holds_no_record_label_seed_or_secret(run, table):
    folder, bundle, _ = run
    files = unpacked(bundle)
    content, config = b"\n".join(files.values()), json.loads(files["run/about.json"])["schedule"]
    with Ledger(folder / "ledger.sqlite") as ledger:
        secret = ledger._secret()
    texts = [row.split(",")[0].encode() for row in table.read_text().splitlines()[1:]]
    assert len(texts) > 20
    assert not [each for each in (*texts, secret, secret.hex().encode()) if each in content]
    assert not {"seed", "labels", "data", "label_column", "text_column", "out"} & config.keys()
    assert config["rounds"] == 2


def test_the_verifier_is_one_short_file_that_imports_nothing_of_ours_and_runs_alone(node, tmp_path):
    program = unpacked(node)["verify_evidence.py"]
    assert program == Path(verify_evidence.__file__).read_bytes()
    assert len(program.splitlines()) < 400
    roots = set()
    for statement in ast.walk(ast.parse(program)):
        if isinstance(statement, ast.ImportFrom):
            roots.add(str(statement.module).partition(".")[0])
        elif isinstance(statement, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in statement.names}
    assert roots - set(sys.stdlib_module_names) == {"numpy", "scipy", "dp_accounting", "cryptography"}
    (tmp_path / "verify_evidence.py").write_bytes(program)
    command = [sys.executable, "-I", tmp_path / "verify_evidence.py", node]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
    assert "4 receipts" in found.stdout
    assert found.stdout.splitlines()[-1] == "0 NOT CONFIRMED"


@pytest.mark.parametrize("rule", ["renyi", "gaussian", *slow("plan")])
def test_the_share_of_a_budget_is_confirmed_for_every_rule_and_a_spent_one_is_named(rule, tmp_path):
    event, delta = gaussian(2.0, 0.5), 1e-5
    plan = CommittedPlan.of([event.with_count(6)], delta * (1 - 1e-9))
    chosen = {"renyi": RenyiFilter.derived(20.0, delta), "gaussian": GaussianFilter(), "plan": plan}[rule]
    path = charged_ledger(tmp_path / "node.sqlite", *[Release(event=event, rho_bar=1.0)] * 4, rule=chosen)
    for epsilon, spent in {20.0: False, 0.9: True}.items():
        code, lines = verified_ledger(path, epsilon, "local")
        assert code == spent, failures(lines)
        assert any(f"used, by the rule {rule}" in line for line in lines)


@pytest.mark.parametrize(
    ("delta", "rule", "noise_source", "released"),
    [
        pytest.param(1e-12, None, "secure", [(1.0, 0.01, 1000)], marks=SLOW),  # near the rounding of Fourier transforms
        pytest.param(1e-12, None, "secure", [(0.7, 0.01, 30000)], marks=SLOW),  # below it, divergences bound mu
        (1e-17, None, "secure", [(2.0, 0.01, 50)]),  # and below the spacing of floats
        pytest.param(1e-17, None, "secure", [(0.7, 0.001, 1000)], marks=SLOW),
        pytest.param(1e-12, None, "secure", [(0.7, 0.001, 100000)], marks=SLOW),  # a grid that blurs losses
        (1e-5, RenyiFilter(order=6), "secure", [(3.570714214271425, 1.0, 1), (1.5, 0.125, 1)]),  # a mu at a corner
        (1e-5, None, "numpy", [(4.0, 1.0, 3)]),  # of Flower's own mods, as the ledger's mod for them names it
    ],
)
def test_the_evidence_of_an_honest_ledger_is_confirmed(delta, rule, noise_source, released, tmp_path):
    releases = [Release(event=gaussian(z, q, count), rho_bar=1.0) for z, q, count in released]
    path = charged_ledger(tmp_path / "ledger.sqlite", *releases, rule=rule, delta=delta, noise_source=noise_source)
    code, lines = verified_ledger(path)
    assert (code, failures(lines)) == (0, [])


@pytest.mark.parametrize("rule", ["renyi", "plan"])
def test_one_ledger_has_one_risk_wherever_it_is_told_and_view_and_rule_are_named(rule, tmp_path):
    made, event = Node(tmp_path / "node"), gaussian(3.0)
    assert made.newest.counter == 0  # as it registers
    policy = replace(made.policy, budget_epsilon=6.0, budget_view="aggregate")
    if rule == "plan":
        planned = CommittedPlan.of([event.with_noise(2.0).with_count(3)], made.data_set.delta_for_releases)
        with Ledger(made.path) as ledger:
            ledger.bound(made.data_set, filters.to_json(planned))
    for round_ in (1, 2):
        key, release = Key(run="run", client="0", round=round_, request=f"{round_}"), Release(event=event, rho_bar=1.0)
        summed = replace(release, aggregate_scale=2.0, num_readers=1)
        charge(policy, key, summed, made.data_set, noise_source="secure")
    # A larger budget, under which nothing was charged yet.
    settings = 'partition_id = 0\nname = "St. Anna"\nbudget_epsilon = 9.0\nbudget_view = "aggregate"\n'
    (made.folder / "vault.toml").write_text(settings)
    (tmp_path / "copy").mkdir()
    copy, told = tmp_path / "copy" / "ledger.sqlite", []
    as_json("ledger", "backup", made.path, "--out", copy)
    for path, part in ((made.path, "node"), (copy, "ledger")):
        told += as_json("ledger", "show", path)["data_sets"]
        told += as_json("ledger", "statement", path, "--client", "0")["statements"]
        as_json("evidence", path, "--out", tmp_path / f"{part}.zip")
        told += json.loads(unpacked(tmp_path / f"{part}.zip")[f"{part}/figures.json"])["data_sets"]
        code, lines = verified(tmp_path / f"{part}.zip")
        assert (code, failures(lines)) == (0, [])
        assert any(f"on the aggregate view, by the rule {rule}: found at 0.01" in line for line in lines)
        words = " ".join(fedpriv("ledger", "statement", path, "--client", "0")[0].split())
        assert "of the records, on the aggregate view, under a " in words
    assert len({json.dumps([each[key] for key in ("view", "mu", "advantage", "tpr_at_fpr")]) for each in told}) == 1
    assert 0.01 < told[0]["tpr_at_fpr"]["0.01"] < 1
    if rule == "plan":  # which says nothing of who sees each upload
        (alone,) = as_json("ledger", "show", copy, "--view", "local")["data_sets"]
        assert alone["tpr_at_fpr"]["0.01"] == 1.0


@pytest.mark.slow
def test_epsilons_agree_with_ours_on_random_histories():
    rng = random.Random(43)
    for _ in range(5):
        events = [
            gaussian(rng.uniform(1.5, 6), rng.choice([1.0, rng.uniform(0.005, 0.3)]), rng.randint(1, 20))
            for _ in range(rng.randint(1, 3))
        ]
        seen = verify_evidence.seen_by("local", [{"event": json.loads(to_json(event))} for event in events])
        for kind, tolerance in (("pld", 1e-3), ("rdp", 1e-6)):
            ours, theirs = epsilon_of(events, 1e-5, kind).epsilon, verify_evidence.epsilon_of(seen, 1e-5, kind)
            assert ours == pytest.approx(theirs, rel=tolerance)


# Every day the verifier is held against ours by whole ledgers: above, and in tests/privacy/accounting/test_gaussian.py.
@pytest.mark.slow
@pytest.mark.parametrize("others", [((0.8, 0.05), (0.5, 0.1)), ((1.0, 0.05),), ((1.0, 1.0),)])
def test_the_sum_over_several_holders_of_a_person_costs_the_verifier_what_it_costs_us(others):
    event = gaussian(2.0, 0.05, 20, unit="person")
    release = Release(event=event, rho_bar=1.0, aggregate_scale=1.5, other_holders=others)
    noted = {"event": json.loads(to_json(event)), "aggregate": 1.5, "other_holders": others}
    ours, seen = [release.charged_on("aggregate")], verify_evidence.seen_by("aggregate", [noted])
    for kind, tolerance in (("pld", 1e-3), ("rdp", 1e-6)):
        epsilon = epsilon_of(ours, 1e-5, kind).epsilon
        assert verify_evidence.epsilon_of(seen, 1e-5, kind) == pytest.approx(epsilon, rel=tolerance)
    findings = verify_evidence.Findings()
    verify_evidence.check_risk("x", risk_of(ours, 1e-5).values, seen, 1e-5, 0, False, findings)
    assert failures(findings) == []


def test_noise_that_the_verifier_does_not_know_is_not_confirmed(tmp_path):
    parameters = LmoParameters.from_json('{"combination": "mixture", "exponential": {"weight": 1, "rate": 1}}')
    event = SubsampledLmo(parameters=parameters, sensitivity=1.0, dimension=2, sampling_probability=0.5)
    code, lines = verified_ledger(charged_ledger(tmp_path / "ledger.sqlite", Release(event=event, rho_bar=1.0)))
    assert code == 1
    assert "subsampled_lmo" in "".join(failures(lines))


# --- mutations ---

Mutation = Callable[[Files, random.Random], tuple[Files, bool, str]]
"""Changes one thing; returns the files, whether the manifest is forged to fit, and a pattern of what is named."""


def _content(files: Files, name: str) -> tuple[str, Any]:
    """The name of such a file in its part of the bundle, and what it holds; of several objects, a list."""
    path = next(path for path in files if path.endswith(f"/{name}"))
    if name.endswith("l"):
        return path, [json.loads(line) for line in files[path].splitlines()]
    return path, json.loads(files[path])


def _with(files: Files, path: str, content: Any) -> Files:
    texts = [json.dumps(each) + "\n" for each in content] if path.endswith("l") else [json.dumps(content)]
    return files | {path: "".join(texts).encode()}


def _other(value: object, rng: random.Random) -> object:
    """Another value of the same kind."""
    if isinstance(value, str):
        at = rng.randrange(len(value)) if value else 0
        return value[:at] + ("0" if value[at : at + 1] != "0" else "1") + value[at + 1 :]
    return 1.0 if value is None else value + 1 if isinstance(value, int) else value * 1.01 + 0.01


def an_entry(files: Files, rng: random.Random) -> tuple[Files, bool, str]:
    path, entries = _content(files, "entries.jsonl")
    number = rng.randrange(len(entries))
    key = rng.choice([key for key, value in entries[number].items() if key != "number"])
    entries[number][key] = _other(entries[number][key], rng)
    return _with(files, path, entries), True, rf"entry {number + 1} follows"


def the_order(files: Files, rng: random.Random) -> tuple[Files, bool, str]:
    path, entries = _content(files, "entries.jsonl")
    at = rng.randrange(len(entries) - 1)
    entries[at : at + 2] = reversed(entries[at : at + 2])
    return _with(files, path, entries), True, rf"entry {at + 1} follows"


def a_lost_entry(files: Files, rng: random.Random) -> tuple[Files, bool, str]:
    path, entries = _content(files, "entries.jsonl")
    at = rng.randrange(len(entries))
    named = "its head" if at == len(entries) - 1 else f"entry {at + 1} f"
    return _with(files, path, entries[:at] + entries[at + 1 :]), True, named


def a_figure(files: Files, rng: random.Random) -> tuple[Files, bool, str]:
    path, figures = _content(files, "figures.json")
    place, key = rng.choice([*_numbers(figures["data_sets"]), *_numbers(figures["printed"])])
    place[key] = _other(place[key], rng)
    return _with(files, path, figures), True, rf"{place[key]:.4g}|{place[key]}|{key}|data set"


def _numbers(value: object) -> Iterator[tuple[dict, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(inner, (int, float)) and not isinstance(inner, bool) and key not in ("client", "num_readers"):
                yield value, key
            yield from _numbers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner)


def a_risk(files: Files, rng: random.Random) -> tuple[Files, bool, str]:
    """Of a data set, of a client in the run's summary, or the largest."""
    path, figures = _content(files, "figures.json")
    printed = figures["printed"]
    place = rng.choice([*figures["data_sets"], *([printed, *printed["clients"]] if printed else [])])
    if (key := rng.choice(["mu", "advantage", "0.001", "0.01", "0.05", "unit"])).startswith("0"):
        place = place["tpr_at_fpr"]
    place[key] = "client" if key == "unit" else place[key] * rng.choice([0.99, 1.02])
    return _with(files, path, figures), True, key


def the_head(files: Files, rng: random.Random) -> tuple[Files, bool, str]:
    path, about = _content(files, "about.json")
    about["head"]["digest"] = _other(about["head"]["digest"], rng)
    return _with(files, path, about), True, "ends at its head"


def a_policy(files: Files, rng: random.Random) -> tuple[Files, bool, str]:
    path, about = _content(files, "about.json")
    if not about["policy"] or rng.random() < 0.3:
        return _flipped(files, path, rng), False, r"manifest: .*about\.json"
    if rng.random() < 0.5:
        return _flipped(files, path.replace("about.json", "policy.toml"), rng), True, r"policy\.toml has the digest"
    about["policy"]["policy.toml"] = _other(about["policy"]["policy.toml"], rng)
    return _with(files, path, about), True, r"policy\.toml has the digest"


def _flipped(files: Files, name: str, rng: random.Random) -> Files:
    at = rng.randrange(len(files[name]))
    return files | {name: files[name][:at] + bytes([files[name][at] ^ 1]) + files[name][at + 1 :]}


def a_receipt(files: Files, rng: random.Random) -> tuple[Files, bool, str]:
    path, receipts = _content(files, "receipts.jsonl")
    if not receipts:
        return a_missing_file(files, rng)
    changed = rng.choice(receipts)
    key = rng.choice([key for key in changed if key != "counter"])
    changed[key] = _other(changed[key], rng)
    return _with(files, path, receipts), True, f"receipt {changed['counter']} of"


def a_missing_file(files: Files, rng: random.Random) -> tuple[Files, bool, str]:
    name = rng.choice(sorted(name for name in files if name != "manifest.json"))
    return {n: content for n, content in files.items() if n != name}, False, rf"{re.escape(name)}.*missing"


def a_byte(files: Files, rng: random.Random) -> tuple[Files, bool, str]:
    name = rng.choice(sorted(name for name, content in files.items() if content and name != "manifest.json"))
    return _flipped(files, name, rng), False, re.escape(name)


MUTATIONS: list[Mutation] = [
    *(an_entry, the_order, a_lost_entry, a_figure, the_head, a_policy, a_receipt, a_missing_file, a_byte, an_entry),
    *(a_figure, a_risk),
]


def check_mutations(bundle: Path, number: int, tmp_path: Path) -> None:
    files = unpacked(bundle)
    assert failures(verified(bundle)[1]) == []
    for seed in range(number):
        mutate, rng = MUTATIONS[seed % len(MUTATIONS)], random.Random(seed)
        changed, forged, named = mutate(dict(files), rng)
        code, lines = verified(packed(changed, tmp_path / f"{seed}.zip", forged=forged))
        assert code == 1, (seed, mutate.__name__)
        assert any(re.search(named, line) for line in failures(lines)), (seed, mutate.__name__, named, failures(lines))


@pytest.mark.parametrize("number", [12, *slow(100)])
def test_each_change_of_a_nodes_bundle_is_named(node, number, tmp_path):
    check_mutations(node, number, tmp_path)


@pytest.mark.slow
def test_each_of_a_hundred_changes_of_a_runs_bundle_is_named(run, tmp_path):
    check_mutations(run[1], 100, tmp_path)


def test_a_true_figure_at_another_place_does_not_stand_in_for_a_false_one(run, tmp_path):
    files = unpacked(run[1])
    figures = json.loads(files["run/figures.json"])
    for place, key in ((figures["data_sets"][0], "mu"), (figures["printed"], "epsilon_local_max")):
        place["tpr_at_fpr"][key], place[key] = place[key], place[key] / 2
    files["run/figures.json"] = json.dumps(figures).encode()
    code, lines = verified(packed(files, tmp_path / "forged.zip", forged=True))
    assert code == 1
    for told in (": mu is ", "epsilon_local_max"):
        assert any(told in line for line in failures(lines)), told


def test_an_older_copy_is_told_by_a_head_that_was_kept_and_what_is_no_bundle_is_named(node, tmp_path):
    (tmp_path / "bundle.zip").write_bytes(b"no zip")
    older, none = verified(node, "--head", "0" * 64), verified(tmp_path / "bundle.zip")
    for (code, lines), told in ((older, "the chain holds the entry"), (none, "has a manifest")):
        assert (code, told in failures(lines)[0]) == (1, True)


def test_a_risk_may_be_stated_too_large_by_a_hundredth_and_never_too_small():
    """Gaussian noise on all records: mu is sqrt(T) / z, and the worlds differ as N(0, 1) and N(mu, 1) do."""
    events = verify_evidence.seen_by("local", [{"event": json.loads(to_json(gaussian(4.0, count=4)))}])
    mu, rates = 0.5, (0.001, 0.01, 0.05)
    tprs = {f"{rate:g}": float(norm.cdf(mu + norm.ppf(rate))) for rate in rates}
    exact = {"mu": mu, "advantage": float(2 * norm.cdf(mu / 2) - 1), "tpr_at_fpr": tprs}
    found = verify_evidence.risk_of(events, 1e-5)
    assert found == pytest.approx({"mu": mu, "advantage": exact["advantage"], **tprs}, rel=1e-9)
    for factor, is_right in {0.998: False, 0.9995: True, 1.0: True, 1.009: True, 1.02: False}.items():
        for key in ("mu", "advantage", "0.001", "0.01", "0.05"):
            changed = exact | {"tpr_at_fpr": {rate: tpr * (factor if key == rate else 1) for rate, tpr in tprs.items()}}
            changed |= {name: exact[name] * factor for name in ("mu", "advantage") if name == key}
            findings = verify_evidence.Findings()
            verify_evidence.check_risk("x", changed, events, 1e-5, 0, False, findings)
            assert bool(failures(findings)) == (not is_right), (key, factor)


@pytest.mark.parametrize("probabilities", [(0.02,), *slow((1.0, 0.3, 0.02, 0.002, 0.02, 0.3))])
def test_risks_agree_with_ours_on_random_histories_and_for_every_rule(probabilities):
    rng = random.Random(44)
    for q in probabilities:
        events = [gaussian(rng.uniform(0.7, 4), q, rng.randint(1, 40))]
        check_risk_like_ours(events, 0, risk_of(events, 1e-5))
        rule = RenyiFilter(order=rng.randint(2, 40))
        check_risk_like_ours(events, rule.order, rule.risk(events, epsilon=None, delta=1e-5))
    # A budget's rule has one order, at which the most that a test finds is a sharp peak.
    events = [gaussian(1.5, 20 / 103, 4)]
    for order in (5, 8, 12):
        check_risk_like_ours(events, order, RenyiFilter(order=order).risk(events, epsilon=None, delta=1e-5))
    unsampled = [gaussian(3.0, count=7)]
    check_risk_like_ours(unsampled, 0, GaussianFilter().risk(unsampled, epsilon=None, delta=1e-5))


def check_risk_like_ours(events: list[SubsampledGaussian], order: int, ours: Risk) -> None:
    seen = verify_evidence.seen_by("local", [{"event": json.loads(to_json(event))} for event in events])
    findings = verify_evidence.Findings()
    verify_evidence.check_risk("x", ours.values, seen, 1e-5, order, False, findings)
    assert failures(findings) == [], (events, order)
