"""What the documentation names exists, and what it shows can be typed: Python, command lines and configurations.

Nothing is run here. tests/test_examples.py runs the lines of docs/python.md, tests/test_readme.py the README,
tests/deployment/test_walkthrough.py the commands of docs/deployment.md.
"""

import re
import shlex
import tomllib
from functools import cache
from importlib import import_module
from itertools import takewhile
from pathlib import Path

import click
import pytest
import typer

from fedpriv import config as configuration

ROOT = Path(__file__).parents[1]
AT_THE_TOP = [ROOT / name for name in ("CONTRIBUTING.md", "README.md", "SECURITY.md")]
PAGES = [*AT_THE_TOP, *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("results/*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
PACKAGES = "fedpriv|clients|server|simulations|tests"

# Files that a run writes, such as clients.csv or server.key, look like modules.
OUTPUT = ("csv", "json", "key", "sqlite", "toml", "yaml")

FENCED = re.compile(r"^```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```$", re.M | re.S)
INLINE = re.compile(r"`([^`\n]+)`")
APPS = {"fedpriv": "fedpriv.cli.main", "python -m simulations": "simulations.__main__"}
# `fedpriv serve FOLDER` means `fedpriv serve run FOLDER`.
BY_DEFAULT = {"serve": "run"}
PROGRAM = re.compile(rf"(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\S*/bin/)?(?P<program>{'|'.join(APPS)})(?P<rest> .*|$)")


def blocks(page: str, *languages: str) -> list[str]:
    """The fenced blocks of code in one of the languages; "" is a block that names none."""
    return [match["code"] for match in FENCED.finditer(page) if match["language"] in languages]


def shown(lines: list[str]) -> list[tuple[str, list[str]]]:
    """(program, its words) of all command lines that start one of our programs."""
    parts = (part.strip() for line in lines for part in line.split(" && "))
    found = [match for match in map(PROGRAM.fullmatch, parts) if match]
    words = [(match["program"], shlex.split(match["rest"], comments=True)) for match in found]
    return [(program, list(takewhile(lambda word: word not in (">", "|"), rest))) for program, rest in words]


def typed(page: str) -> list[tuple[str, list[str]]]:
    """The commands in blocks, as somebody would type them."""
    code = "\n".join(blocks(page, "", "sh", "bash", "console")).replace("\\\n", " ")
    return shown(code.splitlines())


def mentioned(page: str) -> list[tuple[str, list[str]]]:
    """The commands in sentences, which may leave arguments out."""
    return shown(INLINE.findall(FENCED.sub("", page)))


command_line = cache(lambda program: typer.main.get_command(import_module(APPS[program]).app))


def leaf(program: str, words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that the words reach, and the words that are left for it.

    Raises:
        click.UsageError: there is no such command.
    """
    command = command_line(program)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        if words[0] not in command.commands and command.name in BY_DEFAULT:
            words = [BY_DEFAULT[command.name], *words]
        _, command, words = command.resolve_command(click.Context(command), words)
    return command, words


def check(program: str, words: list[str], *, whole: bool):
    """Refuse what the program would not understand, down to the keys of a run's configuration.

    Args:
        program: one of APPS.
        words: the arguments.
        whole: whether arguments, types and values are checked too, unless a value is a word in capitals that stands
            for the reader's own; else options and keys alone.
    """
    command, rest = leaf(program, words)
    if isinstance(command, click.Group):
        return
    parser = command.make_parser(click.Context(command))
    given, _, _ = parser.parse_args(list(rest))
    keys = configuration.parse_overrides([pair for pair in given.get("override") or [] if "=" in pair])
    assert keys.keys() <= set(configuration.KEYS), keys.keys() - set(configuration.KEYS)
    if not whole:
        return
    try:
        command.make_context(program, list(rest))
    except click.BadParameter as error:
        if not error.message.endswith("does not exist."):  # the reader's file
            raise
    if command.name == "run" and not given.get("resume") and "resume" not in keys:
        base = ROOT / given["config"] if isinstance(given.get("config"), str) else None
        values = configuration.read(base) if base and base.exists() else {}
        stated = {key: value for key, value in keys.items() if not re.fullmatch(r"[A-Z]+", str(value))}
        configuration.parse({**values, **stated})


@each_page
def test_the_commands_that_a_page_shows_are_understood(page: Path):
    text = page.read_text()
    for whole, commands in ((True, typed(text)), (False, mentioned(text))):
        for program, words in commands:
            try:
                check(program, words, whole=whole)
            except (click.UsageError, ValueError) as error:
                pytest.fail(f"{page.name}: {program} {shlex.join(words)}: {error}")


@each_page
def test_the_python_and_the_configurations_that_a_page_shows_are_accepted(page: Path):
    for code in blocks(page.read_text(), "python"):
        compile(code, page.name, "exec")
    for code in blocks(page.read_text(), "toml"):
        values = tomllib.loads(code)
        of_runs = values.keys() & set(configuration.KEYS)
        varied = [values.pop("grid", {}), *values.pop("runs", [])]
        if of_runs and not any(varied):
            configuration.parse(values)
        for keys in [*varied, values] if any(varied) else []:
            assert keys.keys() <= {*configuration.KEYS, "title"}, keys


def test_the_pages_show_enough_for_the_checks_to_see():
    texts = [page.read_text() for page in PAGES]
    assert sum(len(typed(text)) for text in texts) > 60
    assert sum(len(mentioned(text)) for text in texts) > 60
    assert sum(len(blocks(text, "python")) for text in texts) >= 5


@pytest.mark.parametrize(
    "wrong",
    [
        "fedpriv acount --steps 3",
        "fedpriv account --stepps 3",
        ".venv/bin/fedpriv ledger show",
        "fedpriv account --noise-multiplier loud --sampling-probability 1 --steps 1 --delta 1e-5",
        "fedpriv run -c rouns=3",
        "fedpriv run -c rounds=none",
        "fedpriv coordinator run ~/federation -c rouns=3",
    ],
)
def test_a_wrong_command_would_be_found(wrong):
    ((program, words),) = typed(f"```\n{wrong}   # a comment\n```\n")
    with pytest.raises((click.UsageError, ValueError, AssertionError)):
        check(program, words, whole=True)


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
def test_every_path_module_and_relative_link_of_a_page_exists(page: Path):
    text = page.read_text()
    missing = [path for path in named_paths(text) if not (ROOT / path).exists()]
    missing += [name for name in named_modules(text) if not resolves(name)]
    targets = [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r"(?m)^\[[^\]]+\]: (\S+)", text)]
    local = [target.split("#")[0] for target in targets if not target.startswith(("http:", "https:", "#", "mailto:"))]
    missing += [target for target in local if not (page.parent / target).exists()]
    assert not missing, f"{page.name} names {sorted(missing)}"


def test_a_wrong_path_or_module_would_be_found():
    assert named_paths("see `fedpriv/no_such.py`.") == {"fedpriv/no_such.py"}
    assert named_modules("call `fedpriv.errors.InputError` of") == {"fedpriv.errors.InputError"}
    assert resolves("fedpriv.errors.InputError")
    assert not resolves("fedpriv.errors.NoSuchError")
    assert not resolves("fedpriv.no_such.thing")
