"""The tutorials show what they ran; executed again, no cell fails, and nothing names this machine."""

import ast
import importlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
ABSOLUTE = re.compile(r"(?<![\w./:-])/(?:home|root|tmp|work|usr|var|opt|mnt|private|Users|Volumes)/")

pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def shown(notebook: dict[str, Any]) -> str:
    """All text that the outputs hold."""
    texts = []
    for cell in code_cells(notebook):
        for output in cell["outputs"]:
            assert output["output_type"] != "error", f"{source(cell)}\n{output.get('traceback')}"
            assert output.get("name") != "stderr", f"{source(cell)}\n{output['text']}"
            texts += ["".join(output.get("text", ""))]
            texts += ["".join(text) for kind, text in output.get("data", {}).items() if kind.startswith("text/")]
    return "\n".join(texts)


def check(notebook: dict[str, Any]) -> None:
    text = shown(notebook)
    assert not ABSOLUTE.search(text), ABSOLUTE.search(text)
    for place in (ROOT, Path(sys.prefix), Path.home()):
        assert str(place) == "/" or str(place) not in text
    assert "\x1b[1A" not in text, "a display that moves the cursor"


def test_the_committed_notebook_was_run_from_top_to_bottom_is_small_and_uses_what_packages_export_alone(path):
    notebook = json.loads(path.read_text())
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert sum(cell["cell_type"] == "markdown" for cell in notebook["cells"]) >= len(cells) / 2
    assert path.stat().st_size < 150_000
    check(notebook)
    for cell in cells:
        for node in ast.walk(ast.parse(source(cell))):
            if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in ("fedpriv", "simulations"):
                exported = importlib.import_module(str(node.module)).__all__
                assert {alias.name for alias in node.names} <= set(exported), node.module


@pytest.mark.slow
def test_the_notebook_runs(path, tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat", reason="needs the extra notebook")
    nbclient = pytest.importorskip("nbclient", reason="needs the extra notebook")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where it works
    notebook = nbformat.read(path, as_version=4)
    for cell in code_cells(notebook):
        cell["outputs"], cell["execution_count"] = [], None
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place).execute()
    check(notebook)
    committed = code_cells(json.loads(path.read_text()))
    assert [bool(cell["outputs"]) for cell in code_cells(notebook)] == [bool(cell["outputs"]) for cell in committed]
