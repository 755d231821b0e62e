"""`fedpriv account`, `calibrate` and `repeat-and-select`: the library's figures, and what may not be asked."""

import pytest

from fedpriv.privacy.accounting.accountants import epsilon_of
from fedpriv.privacy.accounting.events import SubsampledGaussian
from fedpriv.privacy.accounting.risk import risk_of
from tests.cli.command_line import as_json, fedpriv, refused
from tests.cli.inputs import ACCOUNT

EVENT = SubsampledGaussian(noise_multiplier=2.0, sampling_probability=0.05, count=40)
SCHEDULE = ("--delta", "1e-5", "--sampling-probability", "1", "--steps", "2")


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ([], 1.0),
        (["--rho-bar", "0.5"], 0.5),
        (["--clipping", "split", "--head"], 3**-0.5),
        (["--clipping", "batch", "--head"], 3**-0.5 / 2),
    ],
    ids=["joint", "rho", "split", "batch"],
)
def test_account_gives_the_librarys_figure(accountant, options, factor):
    result = as_json(*ACCOUNT, "--accountant", accountant, *options)
    assert result["epsilon"] == pytest.approx(epsilon_of([EVENT.with_noise(factor)], 1e-5, accountant).epsilon)
    assert result["effective_noise_multiplier"] == pytest.approx(2 * factor)
    assert (result["noise_multiplier"], result["delta"], result["is_private"]) == (2, 1e-5, True)


def test_closed_form_is_the_papers_figure_states_its_conditions_and_calibrates_nothing():
    result = as_json(*ACCOUNT, "--accountant", "closed-form")
    # 2 * 0.05 * sqrt(40 ln 1e5) / 2 = 0.05 * 21.459658
    assert result["epsilon"] == pytest.approx(1.0729829, abs=1e-6)
    assert result["conditions_hold"] is False
    assert "q < 1 / (16 rho_bar * sigma)" in result["violated"]
    calibrate = ("calibrate", "--epsilon", "2", *SCHEDULE, "--accountant", "closed-form")
    assert "accountant = closed-form" in refused(*calibrate)


def test_no_noise_is_infinite_and_everybody_may_be_found():
    arguments = [*ACCOUNT[:2], "0", *ACCOUNT[3:]]
    found = as_json(*arguments)
    assert (found["epsilon"], found["mu"], found["is_private"]) == ("inf", "inf", False)
    assert (found["advantage"], set(found["tpr_at_fpr"].values())) == (1.0, {1.0})
    assert "inf" in fedpriv(*arguments)[0]
    assert as_json("account", "--noise-multiplier", "1e-300", *ACCOUNT[3:])["epsilon"] == "inf"


def test_repeat_and_select_needs_its_conditions_stated():
    arguments = ["repeat-and-select", "--noise-multiplier", "4", "--sampling-probability", "0.05", "--steps", "30"]
    arguments += ["--delta", "1e-5", "--mean-repetitions", "10"]
    assert "random and secret" in refused(*arguments)
    result = as_json(*arguments, "--number-is-random-and-secret", "--losers-are-hidden")
    assert result["epsilon_of_one_run"] < result["epsilon"] < 10 * result["epsilon_of_one_run"]


def test_account_says_what_an_attacker_finds():
    result = as_json(*ACCOUNT)
    told = risk_of([EVENT], 1e-5)
    assert (result["mu"], result["advantage"], result["tpr_at_fpr"]) == (told.mu, told.advantage, told.tpr_at_fpr)
    text = fedpriv(*ACCOUNT)[0]
    assert "An attacker who wrongly accuses 1 % of outside records identifies at most" in text
    assert "Delta, 1e-5, is the small probability" in text


@pytest.mark.parametrize(("option", "target"), [("--target-risk", "tpr=0.05@fpr=0.01"), ("--target-mu", "0.8")])
def test_noise_is_calibrated_to_a_risk(option, target):
    result = as_json("calibrate", option, target, *SCHEDULE)
    reached, limit = (result["mu"], 0.8) if option == "--target-mu" else (result["tpr_at_fpr"]["0.01"], 0.05)
    assert 0.98 * limit < reached <= limit


def test_calibration_needs_one_target():
    assert "give one of --epsilon" in refused("calibrate", *SCHEDULE)
    assert "give one of --epsilon" in refused("calibrate", "--epsilon", "2", "--target-mu", "1", *SCHEDULE)
    wrong = refused("calibrate", "--target-risk", "tpr=0.1", *SCHEDULE)
    assert "--target-risk = 'tpr=0.1': must be such as tpr=0.1@fpr=0.01" in wrong


def test_a_unit_changes_words_alone():
    # A client's release is not sampled: the server knows who sends.
    schedule = ["--delta", "1e-5", "--sampling-probability", "1", "--steps", "30", "--unit"]
    epsilons = set()
    for unit in ("record", "person", "client"):
        found = as_json("account", "--noise-multiplier", "1.88", *schedule, unit)
        assert (found["unit"], found["adjacency"].split()[1]) == (unit, unit)
        epsilons.add(found["epsilon"])
        assert as_json("calibrate", "--epsilon", "2", *schedule, unit)["unit"] == unit
    assert len(epsilons) == 1
