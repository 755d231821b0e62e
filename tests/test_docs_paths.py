"""Every path, link and module that the documentation names exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
AT_THE_TOP = [ROOT / name for name in ("CONTRIBUTING.md", "README.md", "SECURITY.md")]
PAGES = [*AT_THE_TOP, *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("results/*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
PACKAGES = "fedpriv|clients|server|simulations|tests"

# Files that a run writes, such as clients.csv or server.key, look like modules.
OUTPUT = ("csv", "json", "key", "sqlite", "toml", "yaml")


def named_paths(text: str) -> set[str]:
    """Repository paths that a page names, such as fedpriv/errors.py or docs/, without globs and run output."""
    sources = re.findall(rf"(?<![\w./-])(?:{PACKAGES}|docs)/[\w./*<>{{}}-]*", text)
    pages = re.findall(r"(?<![\w./-])results/[\w.-]+\.(?:md|png)\b", text)
    return {path.rstrip(".") for path in (*sources, *pages) if not re.search(r"[*<>{}]", path)}


def named_modules(text: str) -> set[str]:
    """Dotted names of this repository that a page names, such as fedpriv.models.dedup.validation.Evaluator."""
    names = re.findall(rf"(?<![\w./-])(?:{PACKAGES})(?:\.[A-Za-z_]\w*)+(?![\w/])", text)
    return {name for name in names if not name.endswith(OUTPUT)}


def resolves(dotted: str) -> bool:
    """Whether a dotted name is a package, a module, or a name that occurs in one."""
    path, parts = ROOT, dotted.split(".")
    while parts and (path / parts[0]).is_dir():
        path /= parts.pop(0)
    if parts and (path / f"{parts[0]}.py").is_file():
        path /= f"{parts.pop(0)}.py"
    source = path / "__init__.py" if path.is_dir() else path
    return not parts or (source.is_file() and re.search(rf"\b{parts[0]}\b", source.read_text()) is not None)


@each_page
def test_every_path_module_and_relative_link_of_a_page_exists(page: Path) -> None:
    text = page.read_text()
    missing = [path for path in named_paths(text) if not (ROOT / path).exists()]
    missing += [name for name in named_modules(text) if not resolves(name)]
    targets = [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r"(?m)^\[[^\]]+\]: (\S+)", text)]
    local = [target.split("#")[0] for target in targets if not target.startswith(("http:", "https:", "#", "mailto:"))]
    missing += [target for target in local if not (page.parent / target).exists()]
    assert not missing, f"{page.name} names {sorted(missing)}"


def test_a_wrong_path_or_module_would_be_found() -> None:
    assert named_paths("see `fedpriv/no_such.py`.") == {"fedpriv/no_such.py"}
    assert named_modules("call `fedpriv.errors.InputError` of") == {"fedpriv.errors.InputError"}
    assert resolves("fedpriv.errors.InputError")
    assert not resolves("fedpriv.errors.NoSuchError")
    assert not resolves("fedpriv.no_such.thing")
