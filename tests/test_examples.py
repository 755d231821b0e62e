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


@pytest.fixture
def runs_and_library():
    """The Python of docs/python.md: a run, a sweep, own parts, then the library."""
    found = python_of("python.md")
    assert len(found) == 4
    return found


def test_a_network_a_rule_and_a_noise_schedule_of_ones_own_are_one_short_script(
    runs_and_library, tmp_path, monkeypatch
):
    pytest.importorskip("sklearn.datasets")
    monkeypatch.chdir(tmp_path)
    rules = dict(RULES)
    code = runs_and_library[2]
    assert len(code.splitlines()) <= 40
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code.replace('out="digits"', 'out="digits", progress=False'), "python.md", "exec"), {})
    for name in RULES.keys() - rules.keys():
        del RULES[name]
    assert printed.getvalue().splitlines() == re.findall(r"^print\(.*\)  # (.*)$", code, re.M)
    noise = [
        json.loads(event)["noise_multiplier"]
        for event in fedpriv.open_run(tmp_path / "digits").ledger["event"].dropna()
    ]
    assert sorted(set(noise), reverse=True) == [4 - round_ / 10 for round_ in range(1, 21)]


def test_the_lines_on_the_library_print_what_stands_beside_them(runs_and_library, tmp_path, monkeypatch):
    code = runs_and_library[-1]
    beside = re.findall(r"^ *print\(.*\)  # (.*)$", code, re.M)
    assert len(beside) == code.count("print(") >= 4
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "python.md", "exec"), {"__name__": "__main__"})
    assert printed.getvalue().splitlines() == beside


def test_the_lines_on_a_model_of_ones_own_print_what_stands_beside_them(tmp_path, monkeypatch):
    step, federation = python_of("training.md")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for code in (step, federation.replace('out="own"', 'out="own", progress=False')):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "training.md", "exec"), names)
        assert printed.getvalue().splitlines() == re.findall(r"^print\(.*\)  # (.*)$", code, re.M)
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
def test_the_lines_on_runs_and_sweeps_run(runs_and_library, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in runs_and_library[:2]:
            exec(compile(block, "python.md", "exec"), names)
    assert "Run('first': accuracy" in printed.getvalue()
    assert "num_runs=2" in printed.getvalue()
