"""What docs/python.md, training.md, aggregation.md and the packages show in Python runs, and prints what they say."""

import contextlib
import doctest
import importlib
import io
import json
import re

import pytest
import torch

import fedpriv
from fedpriv.exports import Registry
from fedpriv.learning import aggregation
from fedpriv.learning.aggregation import RULES
from tests.marks import slow
from tests.test_docs_code import ROOT, blocks

# Not called from Python: the command line, what kits share, and what frames and pages are made of; wings list rooms.
WITHOUT_EXAMPLE = {"cli", "operate", "wire", "http", "holder", "learning", "methods", "models", "privacy"}
FOLDERS = {file.parent for file in ROOT.glob("fedpriv/*/**/__init__.py") if file.parent.name not in WITHOUT_EXAMPLE}
PACKAGES = sorted(".".join(folder.relative_to(ROOT / "fedpriv").parts) for folder in FOLDERS)


def test_the_public_packages_are_found():
    some = {"privacy.accounting", "learning.adapters", "privacy.ledger", "learning.training", "holder.vault"}
    assert some <= set(PACKAGES), "the check would be blind"


@pytest.mark.parametrize("package", PACKAGES)
def test_the_package_shows_an_example_and_it_holds(package, tmp_path, monkeypatch):
    module = importlib.import_module(f"fedpriv.{package}")
    example = doctest.DocTestParser().get_doctest(module.__doc__ or "", {}, module.__name__, module.__file__, 0)
    assert any(part.want for part in example.examples), f"fedpriv.{package}: its docstring shows no example with output"
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    assert not said, "".join(said)
    assert not list(tmp_path.iterdir()), "an example leaves files behind"


def python_of(page: str) -> list[str]:
    return blocks((ROOT / "docs" / page).read_text(), "python")


def printed(code: str, names: dict[str, object] | None = None) -> list[str]:
    """The lines that a block prints, in these names."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "a page", "exec"), {"__name__": "__main__"} if names is None else names)
    return out.getvalue().splitlines()


def beside(code: str) -> list[str]:
    """What stands beside each `print` of a block."""
    return re.findall(r"^ *print\(.*\)  # (.*)$", code, re.M)


@pytest.fixture
def runs_and_library(tmp_path, monkeypatch):
    """The Python of docs/python.md: a run, a sweep, own parts, then the library."""
    found = python_of("python.md")
    assert len(found) == 4
    monkeypatch.chdir(tmp_path)
    return found


@pytest.mark.parametrize("rounds", [3, *slow(20)])
def test_a_network_a_rule_and_a_noise_schedule_of_ones_own_are_one_short_script(runs_and_library, rounds):
    pytest.importorskip("sklearn.datasets")
    code = runs_and_library[2]
    assert len(code.splitlines()) <= 40
    assert '"rounds": 20,' in code
    said = printed(code.replace('out="digits"', 'out="digits", progress=False').replace("20,", f"{rounds},"))
    del RULES["trimmed"]
    assert said == beside(code) if rounds == 20 else len(said) == 1
    events = fedpriv.open_run("digits").ledger["event"].dropna().map(json.loads)
    noise = sorted({event["noise_multiplier"] for event in events}, reverse=True)
    assert noise == [4 - round_ / 10 for round_ in range(1, rounds + 1)]


def test_the_lines_on_the_library_print_what_stands_beside_them(runs_and_library):
    code = runs_and_library[-1]
    assert len(beside(code)) == code.count("print(") >= 4
    assert printed(code) == beside(code)


def test_the_lines_on_a_model_of_ones_own_print_what_stands_beside_them(tmp_path, monkeypatch):
    step, federation = python_of("training.md")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for code in (step, federation):
        assert printed(code.replace('out="own"', 'out="own", progress=False'), names) == beside(code)
    assert (tmp_path / "own" / "variants" / "global" / "model.safetensors").is_file()


def test_the_lines_on_a_rule_of_ones_own_register_it(monkeypatch):
    (code,) = python_of("aggregation.md")
    rules = Registry("aggregation", {})
    monkeypatch.setattr(aggregation, "RULES", rules, raising=False)
    exec(compile(code, "aggregation.md", "exec"), {})
    uploads = [{"a": torch.tensor([value])} for value in (1.0, 2.0, 9.0)]
    found = rules["median"].aggregate(aggregation.GlobalModel(initial={}, adapter={}), uploads, [0.2, 0.3, 0.5])
    assert found.adapter == {"a": torch.tensor([2.0])}


@pytest.mark.slow
def test_the_lines_on_runs_and_sweeps_run(runs_and_library):
    said = "\n".join(printed("\n".join(runs_and_library[:2])))
    assert "Run('first': accuracy" in said
    assert "num_runs=2" in said
