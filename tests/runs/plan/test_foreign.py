"""`fedpriv check`: a dozen public settings against a second computation, and files that want to do harm."""

import math
import os
import random
import re
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld, rdp
from mpmath import mp, mpf, ncdf
from scipy.stats import norm

from fedpriv.config import parse_overrides
from fedpriv.errors import InputError
from fedpriv.runs.plan.foreign import check_settings
from tests.cli.command_line import as_json, fedpriv
from tests.marks import slow

ROOT = Path(__file__).resolve().parents[3]
FILES, PAGE = ROOT / "docs/examples/settings", (ROOT / "docs/foreign_settings.md").read_text()
ROW = re.compile(
    r"^\| .*?\| (?P<stated>\S*) ?\| `(?P<typed>[^`]+)` \| (?P<z>\S*) ?\| (?P<epsilon>\S*) ?\| (?P<found>.*?) ?\|$", re.M
)
ROWS = {match["typed"].split()[0]: match for match in ROW.finditer(PAGE)}
DELTA = 1e-5
K = math.sqrt(2 * math.log(1.25 / DELTA))


@cache
def checked(typed: str) -> dict:
    """The last setting of what somebody types after `fedpriv check`."""
    words = shlex.split(typed)
    cut = words.index("--set") if "--set" in words else len(words)
    return check_settings([FILES / name for name in words[:cut]], parse_overrides(words[cut + 1 :: 2]))[-1]


def of_python(tmp_path: Path, text: str, **given: object) -> dict:
    (tmp_path / "app.py").write_text(text)
    return check_settings([tmp_path / "app.py"], given)[-1]


def plain_delta(mu: float, epsilon: float) -> float:
    """Delta of Gaussian noise without sampling at epsilon, in 60 digits (Dong, Roth and Su 2022, Corollary 2.13)."""
    with mp.workdps(60):
        mu, epsilon = mpf(mu), mpf(epsilon)
        below = -epsilon / mu - mu / 2
        # e^epsilon ncdf(below), whose factors leave every exponent; erfc's asymptotic series is exact to 1e-12 there.
        tail = mp.exp(epsilon) * ncdf(below) if epsilon < 1e4 else mp.npdf(mu / 2 - epsilon / mu) / -below
        return float(ncdf(mu / 2 - epsilon / mu) - tail)


def sampled(q: float, z: float, steps: int) -> float:
    """Epsilon of Poisson-sampled Gaussian steps, by dp-accounting's own accountant."""
    accountant = pld.PLDAccountant()
    accountant.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z)), steps)
    return accountant.get_epsilon(DELTA)


# {file: (z of one release, number of releases)} of noise without sampling, by hand from each platform's source.
UNSAMPLED = {
    "flip.toml": (1e-4 * K / 10 / (2 * 1.0 * 1.001), 3),  # s / (2 C), less 0.1 % for clipping in float32
    "flower_secure.py": (0.2 / 2, 3),
    # z_sum = (0.3^-2 - 0.6^-2)^-1/2, of which exp(-0.2 (1 + 6 * 0.3 / 6 - 0.5)) is left; the count has 2 * 0.3.
    "flower_adaptive.py": ((((0.3**-2 - 0.6**-2) * math.exp(0.4 * 0.8)) + 0.6**-2) ** -0.5 / 2, 5),
}
SAMPLED = {  # q, z, steps
    "flower_opacus.py": (1 / 625, 1.0, 3 * 625),
    "opacus_mnist.py": (1 / 938, 1.0, 10 * 938),
    "dp_lora.toml": (0.01, 2 / (2 * math.sqrt(3)), 50),
}
VALUES = {"nvflare_filters.json": (0.1, 0.1, 703_329, 5), "nvflare_brats18.py": (21.0, 2.0, 900_000, 600)}


OTHERS = {"nvflare_site.json", "nvflare_gaussian.conf", "nvflare_hello_dp.py", "rising_epsilon.py"}


LONG = ("nvflare_hello_dp.py", "opacus_mnist.py")


@pytest.mark.parametrize("name", [*sorted(ROWS.keys() - LONG), *slow(*LONG)])
def test_the_page_tells_what_the_command_tells(name):
    assert ROWS.keys() == {*UNSAMPLED, *SAMPLED, *VALUES, *OTHERS}, "each row has a second computation"
    assert {path.name for path in FILES.iterdir()} == ROWS.keys() | {"flower_secure.toml"}
    row, found = ROWS[name], checked(ROWS[name]["typed"])
    for told, value in ((row["z"], found["effective_noise_multiplier"]), (row["epsilon"], found["epsilon"])):
        assert (not told and value is None) or float(told) == pytest.approx(value, rel=5e-4)
    assert (found["claimed_epsilon"] is None) == (row["stated"] == "")
    assert not row["stated"] or float(row["stated"]) == pytest.approx(found["claimed_epsilon"], rel=1e-4)
    percent = None if found["found"] is None else f"{math.ceil(found['found'] * 1000 - 1e-9) / 10:.1f} %"
    assert percent == (row["found"] or None)


@pytest.mark.parametrize("name", UNSAMPLED)
def test_noise_without_sampling_has_the_closed_form(name):
    found, (z, count) = checked(ROWS[name]["typed"]), UNSAMPLED[name]
    mu = math.sqrt(count) / z
    assert found["effective_noise_multiplier"] == pytest.approx(z, rel=1e-12)
    assert (found["unit"], found["releases"]) == ("client", count)
    lost = 1e-9 * count if name == "flower_adaptive.py" else 0.0
    assert plain_delta(mu, found["epsilon"]) == pytest.approx(DELTA - lost, rel=1e-3)
    assert found["found"] == pytest.approx(norm.cdf(norm.ppf(0.01) + mu), abs=1e-6)


@pytest.mark.parametrize("name", ["flower_opacus.py", *slow("opacus_mnist.py", "dp_lora.toml")])
def test_steps_on_samples_cost_what_dp_accounting_says(name):
    found, (q, z, steps) = checked(ROWS[name]["typed"]), SAMPLED[name]
    assert found["effective_noise_multiplier"] == pytest.approx(z)
    assert (found["unit"], found["releases"], found["sampling_probability"]) == ("record", steps, pytest.approx(q))
    assert found["epsilon"] == pytest.approx(sampled(q, z, steps), rel=2e-3)


@pytest.mark.parametrize(("batch_size", "epochs"), [(12_800, 1), pytest.param(128, 50, marks=pytest.mark.slow)])
def test_an_engine_for_all_rounds_keeps_what_it_states(batch_size, epochs):
    typed = ROWS["nvflare_hello_dp.py"]["typed"].replace("=128", f"={batch_size}").replace("=50", f"={epochs}")
    found = checked(typed)
    a_round = math.ceil(113_922 / batch_size)
    assert 0.995 < sampled(1 / a_round, found["effective_noise_multiplier"], epochs * a_round) <= 1.0005


@pytest.mark.slow
def test_two_engines_exceed_what_each_states():
    twice = checked(ROWS["nvflare_hello_dp.py"]["typed"].replace("engines=1", "engines=2"))
    assert twice["epsilon"] > 1.3
    assert 0.995 < sampled(1 / 891, twice["needed_noise_multiplier"], 100 * 891) <= 1.0005


@pytest.mark.parametrize("name", VALUES)
def test_the_sparse_vector_costs_at_most_the_sum_and_at_least_its_laplace_noise(name):
    epsilon, each, values, rounds = VALUES[name]
    laplace = rdp.RdpAccountant()  # noise of scale 1 / each on what moves by 1, for each value sent
    laplace.compose(dp_accounting.LaplaceDpEvent(1 / each), values * rounds)
    found, least = checked(ROWS[name]["typed"])["epsilon"], laplace.get_epsilon(DELTA)
    assert least < found < rounds * (epsilon + values * each)
    assert found < least * (1.05 if each < 1 else 1.5)  # randomised response bounds any noise of that epsilon


def test_a_round_of_the_sparse_vector_costs_what_its_own_accountant_and_flip_say():
    assert 0.1 + VALUES["nvflare_filters.json"][2] * 0.1 == pytest.approx(70_333, abs=0.1)
    (first, _) = check_settings([FILES / "nvflare_filters.json"], {"num_rounds": 1, "num_parameters": 7033281})
    assert (first["mechanism"], first["epsilon"], first["found"]) == ("PercentilePrivacy", math.inf, 1.0)


def test_an_epsilon_that_rises_with_the_noise_is_told_with_what_is_true():
    found = checked(ROWS["rising_epsilon.py"]["typed"])
    assert found["claimed_epsilon"] == pytest.approx(sum(1 / t for t in range(1, 51)))
    (best,) = found["conditions"]
    assert plain_delta(math.sqrt(50) / 0.5, best["epsilon"]) == pytest.approx(DELTA, rel=1e-3)
    assert (found["epsilon"], best["is_counted_on"]) == (None, False)


LINES = {
    "self.epsilon_used += self.noise_multiplier / 10": 50 * 3 / 10,
    "privacy_epsilon = 0.01 * sigma * sqrt(2)": 0.01 * 3 * math.sqrt(2),
    "eps = max(1, noise) + round_number": 3 + 50,
}


@pytest.mark.parametrize("line", LINES)
def test_the_kin_of_that_line_are_found(line, tmp_path):
    found = of_python(tmp_path, line, noise_multiplier=3, num_rounds=50)
    assert found["claimed_epsilon"] == pytest.approx(LINES[line])


@pytest.mark.parametrize("right", ["1 / noise_multiplier", "get_epsilon(noise_multiplier)", "C * rounds / sigma"])
def test_a_line_that_falls_with_the_noise_is_none_of_them(right, tmp_path):
    with pytest.raises(InputError, match="no privacy setting found"):
        of_python(tmp_path, f"epsilon += {right}\nsigma = epsilon * noise", noise_multiplier=3, num_rounds=50)


def test_what_would_meet_a_claim_meets_it():
    flip = checked("flip.toml")["instead"]
    stated = f"--set dp_sensitivity={flip['sensitivity']} --set dp_epsilon={flip['epsilon']}"
    assert 9.98 < checked(f"flip.toml {stated}")["epsilon"] <= 10.001
    flower = "flower_secure.py flower_secure.toml --set target_epsilon=8"
    needed = checked(flower)["instead"]["noise_multiplier"]
    assert 7.98 < checked(f"{flower} --set noise_multiplier={needed}")["epsilon"] <= 8.001
    files = "nvflare_filters.json --set num_rounds=2 --set num_parameters=10"
    terms = checked(files)["instead"]
    met = checked(f"{files} --set epsilon={terms['epsilon']} --set epsilon_release={terms['epsilon_release']}")
    assert 0.05 < met["epsilon"] <= 0.1 + 1e-9


def test_a_condition_has_the_figure_of_the_other_case():
    of_flip = checked("flip.toml")["conditions"][-1]
    assert plain_delta(math.sqrt(3) * 10 / K * 1.001, of_flip["epsilon"]) == pytest.approx(DELTA, rel=1e-3)
    trusted, weights, left_out, _ = checked("flower_secure.py flower_secure.toml")["conditions"]
    assert (trusted["epsilon"], trusted["is_counted_on"], weights["epsilon"]) == (math.inf, True, None)
    # Under Flower's own adjacency.
    assert plain_delta(math.sqrt(3) / 0.2, left_out["epsilon"]) == pytest.approx(DELTA, rel=1e-3)


def test_noise_off_and_no_poisson_sampling_are_read(tmp_path):
    assert checked("flip.toml --set dp_enabled=false")["epsilon"] == math.inf
    call = "for _ in range(n):\n  e.make_private(noise_multiplier=2.0, poisson_sampling=False)"
    found = of_python(tmp_path, call, batch_size=10, records=95, epochs=4, engines=1)
    assert (found["releases"], found["sampling_probability"]) == (4, 1.0)
    assert plain_delta(math.sqrt(4) / 2, found["epsilon"]) == pytest.approx(DELTA, rel=1e-3)
    assert found["conditions"][0]["epsilon"] == pytest.approx(sampled(0.1, 2.0, 40), rel=2e-3)
    short = of_python(tmp_path, f"DataLoader(drop_last=True)\n{call}", batch_size=10, records=95, epochs=4, engines=1)
    assert short["conditions"][0]["epsilon"] == pytest.approx(sampled(1 / 9, 2.0, 36), rel=2e-3)


def test_the_noise_of_flowers_adaptive_strategy_has_the_next_clip():
    """What `_late` allows for: all updates are clipped, and the noise is exp(-0.2 * 0.5) of what is stated."""
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.serverapp.strategy import DifferentialPrivacyServerSideAdaptiveClipping, FedAvg

    from simulations.engines.flower_private import task_identity

    size, clip = 40_000, 100.0
    with task_identity(1):
        messages = [Message(RecordDict(), node, "train") for node in (2, 3)]
        strategy = DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(), 0.002, 2, clip, clipped_count_stddev=0.01)
        strategy.current_arrays = ArrayRecord({"w": Array(np.zeros(size))})
        grown = ArrayRecord({"w": Array(np.ones(size))})
        content = [RecordDict({"a": grown.copy(), "m": MetricRecord({"num-examples": 1})}) for _ in messages]
        replies = [Message(each, reply_to=message) for each, message in zip(content, messages, strict=True)]
        arrays, _ = strategy.aggregate_train(1, replies)
    noise = arrays["w"].numpy() - clip / math.sqrt(size)
    stated = (0.002**-2 - 0.02**-2) ** -0.5 * clip / 2
    assert noise.std() / stated == pytest.approx(math.exp(-0.2 * 0.5), rel=0.02)  # and not 1


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("m = LocalDpMod(1.0, 2.0, epsilon, 1e-5)", "epsilon, num_rounds"),
        ("m = LocalDpMod(*values)", "clipping_norm, delta, epsilon, num_rounds, sensitivity"),
        ("m = LocalDpMod(1.0, **values)", "delta, epsilon, num_rounds, sensitivity"),
        ("e = 1.0\nif x: e = 2.0\nnum_rounds = 3\nm = LocalDpMod(1.0, 2.0, e, 1e-5)", "epsilon"),
        ("num_rounds = 3\nfor e in (1.0, 2.0): m = LocalDpMod(1.0, 2.0, e, 1e-5)", "epsilon"),
        ("num_rounds, e = 3, 1.0\nm = LocalDpMod(1.0, 2.0, 1.0, 1e-5)", "num_rounds"),
        ("def fit(x):\n  e.make_private(noise_multiplier=1.0)", "batch_size, epochs, num_rounds, records"),
        ("parser.add_argument('--rounds', type=int)\nm = LocalDpMod(1.0, 2.0, 1.0, 1e-5)", "num_rounds"),
    ],
)
def test_what_cannot_be_read_is_asked_for_by_name(text, asked, tmp_path):
    with pytest.raises(InputError, match=rf": {asked} cannot be read there; give --set {asked.split(',')[0]}=\.\.\."):
        of_python(tmp_path, text)


@pytest.mark.parametrize(
    "bound",
    [
        "E = 4 / 2",
        "class C:\n  E: float = 2.0",
        "config = {'E': 2}",
        "E = float(os.environ.get('OTHER', 2.0))",
        "E = config.get('E', 2.0)",
        "parser.add_argument('-e', '--e-psilon', dest='E', default=2.0)",
        "F = 2.0\nE = F",
        "E = F = min(2, 7.5)",
    ],
)
def test_a_value_is_found_behind_its_name(bound, tmp_path):
    found = of_python(tmp_path, f"{bound}\nserver(num_rounds=3)\nLocalDpMod(1.0, 2.0, self.E, 1e-5)")
    assert (found["read"]["epsilon"], found["read"]["num_rounds"]) == (2.0, 3)


def steps(noise_multiplier: str, sampling_probability: str, rounds: str) -> str:
    """A setting of steps on samples, in TOML."""
    return f"{noise_multiplier = !s}\n{sampling_probability = !s}\n{rounds = !s}"


BOMB = "__import__('pathlib').Path('run').touch()"
HOSTILE: dict[str, tuple[str | bytes, str]] = {
    "import.py": (f"LocalDpMod(1.0, 1.0, {BOMB}, 1e-5)\n{BOMB}", "delta|epsilon, num_rounds cannot be read"),
    "import.json": ('{"path": "SVTPrivacy", "args": {"epsilon": "' + BOMB + '"}}', "epsilon = .* must be a number > 0"),
    "huge.json": ("[" + "1," * 2**19 + "1]", "at most 1,048,576 bytes"),
    "deep.json": ("[" * 200_000, "nested too deeply"),
    "deep.conf": ("a {" * 20_000, "nested too deeply"),
    "deep.toml": ("a = " + "[" * 200_000, "nested too deeply"),
    "brackets.py": ("(" * 200_000, "no .py file|nested too deeply"),
    "minus.py": ("x = " + "-" * 200_000 + "1", "nested too deeply|no .py file"),
    "sum.py": ("x = 1" + "+1" * 200_000, "nested too deeply|no privacy setting"),
    "dots.py": ("x" + ".x" * 200_000, "nested too deeply|no privacy setting"),
    "latin.py": (b"x = '\xe9'", "not text in UTF-8"),
    "null.py": ("x = 1\0", "no .py file"),
    "twice.py": (
        "\n".join(f"a{i} = a{i + 1} + a{i + 1}" for i in range(60)) + "\na60 = 1\nLocalDpMod(1.0, 1.0, a0, 1e-5)",
        "too often",
    ),
    "power.py": ("LocalDpMod(1.0, 1.0, 9 ** 9 ** 9 ** 9, 1e-5)", "epsilon, num_rounds cannot be read"),
    "digits.py": ("x = " + "9" * 10_000, "no .py file"),
    "half.conf": ('filters = [ { path = "SVTPrivacy', "no .conf file"),
    "text.json": ('{"path": "SVTPrivacy", "args": {"num_parameters": 1, "epsilon": "x"}}', "'x': must be"),
    "nan.toml": (steps("nan", "0.1", "3"), "noise_multiplier = 'nan': must be"),
    "negative.toml": (steps("-1", "0.1", "3"), "noise_multiplier = '-1': must be"),
    "share.toml": (steps("1", "1.5", "3"), "sampling_probability = '1.5': must be"),
    "long.toml": (steps("1", "1", "1e300"), "num_rounds = '1e.300': must be a whole"),
    "setting.yaml": ("epsilon: 1", "must be one of .py, .json, .conf, .toml"),
    "tool.toml": ("tool = 1", "no privacy setting found"),
    "tools.toml": ("[tool.flwr]\napp = [1]", "no privacy setting found"),
}


LIKE_OTHERS = ("minus.py", "sum.py", "dots.py", "deep.conf", "digits.py", "negative.toml", "share.toml", "tools.toml")


@pytest.mark.parametrize("name", [*(name for name in HOSTILE if name not in LIKE_OTHERS), *slow(*LIKE_OTHERS)])
def test_a_hostile_file_gets_one_line_and_nothing_runs(name, tmp_path):
    content, message = HOSTILE[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    out, error = fedpriv("check", name, folder=tmp_path, code=2)
    assert (out, error.count("\n")) == ("", 1)
    assert re.search(message, error), error
    assert len(error) < 1000
    assert [path.name for path in tmp_path.iterdir()] == [name]


MADE: dict[str, Callable[[Path], object]] = {
    "link": lambda path: path.symlink_to(FILES / "nvflare_site.json"),
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "missing": lambda path: None,
}


@pytest.mark.parametrize("kind", MADE)
def test_what_is_no_file_is_not_opened(kind, tmp_path):
    MADE[kind](tmp_path / "job.json")
    with pytest.raises(InputError, match=r"is a link|must be a file|cannot be read"):
        check_settings([tmp_path / "job.json"], {})


def test_random_text_is_read_or_refused(tmp_path):
    source = random.Random(1)
    pieces = [*'{}[]"=:,\n#()', "path", "SVTPrivacy", "args", "1e9", "${x}", "LocalDpMod"]
    for number in range(400):
        path = tmp_path / f"{number}{source.choice(['.py', '.json', '.conf', '.toml'])}"
        path.write_text(" ".join(source.choices(pieces, k=source.randrange(1, 30))))
        with pytest.raises(InputError):
            check_settings([path], {})


@pytest.mark.parametrize(
    ("given", "message"),
    [("num_round=3", "no such name"), ("num_rounds=0", "num_rounds = '0'"), ("num_rounds=2.5", "'2.5': must be"),
     ("num_rounds=inf", "must be a whole"), ("num_rounds=true", "must be a whole"), ("delta=1", "delta = '1'"),
     ("num_rounds", "must be key=value")],
)  # fmt: skip
def test_a_value_that_is_set_must_be_one_and_count(given, message):
    arguments = ["check", FILES / "flower_adaptive.py", "--set", given]
    assert message in fedpriv(*arguments, code=2)[1]


def test_the_command_says_it_in_sentences_and_in_json():
    out, _ = fedpriv("check", FILES / "flip.toml")
    assert "then epsilon 21.0102; 89.5 % are found at 1 % false accusations" in out
    assert "for an epsilon of 10 over the whole run: sensitivity = 2, epsilon = 5.58996" in out
    for name in ("nvflare_site.json", "nvflare_gaussian.conf"):  # no noise, and noise that follows the data
        (found,) = as_json("check", FILES / name)["settings"]
        assert (found["epsilon"], found["is_private"]) == ("inf", False)
        assert (found["found"], found["effective_noise_multiplier"]) == (1.0, 0.0)
