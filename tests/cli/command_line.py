"""`fedpriv ...` in this process: the console script's own `main`, without the seconds that a new interpreter takes."""

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, cast

from fedpriv.cli.main import main


def fedpriv(*arguments: object, folder: Path | None = None, code: int = 0) -> tuple[str, str]:
    """What the command line prints to stdout and to stderr; its exit code is checked.

    Args:
        arguments: of the command line.
        folder: the working directory.
        code: the exit code that is expected. Any exception but SystemExit would be a traceback, and fails the test.
    """
    out, err = io.StringIO(), io.StringIO()
    streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with _own_modules(), contextlib.chdir(folder or Path.cwd()), streams[0], streams[1]:
        ended = _exit_code(list(map(str, arguments)))
    assert ended == code, out.getvalue() + err.getvalue()
    assert "Traceback" not in err.getvalue()
    return out.getvalue(), err.getvalue()


def refused(*arguments: object, folder: Path | None = None, code: int = 2) -> str:
    """The one line that a refused command prints, on stderr."""
    out, err = fedpriv(*arguments, folder=folder, code=code)
    assert (out, err.count("\n")) == ("", 1), out + err
    return err


def as_json(*arguments: object, folder: Path | None = None, code: int = 0) -> dict[str, Any]:
    """The object that the command prints with --json: a single line of JSON, and nothing on stderr."""
    out, err = fedpriv(*arguments, "--json", folder=folder, code=code)
    assert err == ""
    assert out.count("\n") == 1
    found = json.loads(out, parse_constant=_refuse)
    assert isinstance(found, dict)
    return cast(dict[str, Any], found)


def _exit_code(arguments: list[str]) -> int:
    try:
        main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)
    raise AssertionError("the console script returned instead of exiting")


def _refuse(name: str) -> NoReturn:
    raise AssertionError(f"{name} is no JSON")


@contextlib.contextmanager
def _own_modules() -> Iterator[None]:
    """Forget what a command imported from its working directory, as a process does when it ends."""
    path, before = list(sys.path), set(sys.modules)
    try:
        yield
    finally:
        added = set(sys.path) - set(path)
        sys.path[:] = path
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file and str(Path(file).parent) in added:
                del sys.modules[name]
