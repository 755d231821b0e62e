"""A small app bundle (FAB) as `flwr build` makes it, a folder that is not what it holds, and this checkout's digest."""

import hashlib
import io
import zipfile
from functools import cache
from pathlib import Path

import pytest
from flwr.proto.fab_pb2 import Fab
from flwr.proto.run_pb2 import Run
from flwr.proto.runtime_pb2 import PullTaskInputResponse

from fedpriv.apps import FLOWER_APP
from fedpriv.operate import approvals

# Before a test puts another in its place.
_DIGEST = approvals.bundle_digest

FILES = {
    "pyproject.toml": """
[project]
name = "app"
version = "1.0.0"
license = "MIT"
[tool.flwr.app]
publisher = "us"
[tool.flwr.app.components]
serverapp = "server.app:app"
clientapp = "clients.app:app"
""",
    "server/app.py": "app = 'server'\n",
    "clients/app.py": "app = 'client'\n",
}


def bundle() -> bytes:
    """The bundle's bytes."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        for name, text in FILES.items():
            file.writestr(zipfile.ZipInfo(name), text)
        lines = [f"{name},{hashlib.sha256(text.encode()).hexdigest()},{len(text) * 8}" for name, text in FILES.items()]
        file.writestr(zipfile.ZipInfo(".info/CONTENT"), "\n".join(lines))
    return made.getvalue()


def task_input(content: bytes, **run: str) -> PullTaskInputResponse:
    """What Flower hands to a task's process; `run` holds what the coordinator says of the bundle."""
    claimed = {"fab_id": "us/app", "fab_version": "1.0.0", **run}
    return PullTaskInputResponse(
        run=Run(**claimed), fab=Fab(hash_str=hashlib.sha256(content).hexdigest(), content=content)
    )


def plant(home: Path, content: bytes) -> Path:
    """Where Flower installs the bundle, with a stranger's files instead: changed, added, cut off, and led elsewhere."""
    folder = home / "apps" / f"us.app.1.0.0.{hashlib.sha256(content).hexdigest()[:8]}"
    (folder / "server" / "__pycache__").mkdir(parents=True)
    (folder / "server" / "app.py").write_text("app = 'evil'\n")
    (folder / "server" / "__pycache__" / "app.cpython-311.pyc").write_bytes(b"evil")
    (folder / "sitecustomize.py").write_text("evil\n")
    (home / "elsewhere").mkdir()
    (home / "elsewhere" / "app.py").write_text("app = 'evil'\n")
    (folder / "clients").symlink_to(home / "elsewhere")
    return folder


def held(folder: Path) -> dict[str, str]:
    """{name: text} of all files in a folder."""
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


@cache
def _digest_of_this_checkout() -> str:
    return _DIGEST(FLOWER_APP)


def bundled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a process bundle this checkout, which does not change, no more than once: it takes seconds."""

    def digest(app: Path) -> str:
        return _digest_of_this_checkout() if app == FLOWER_APP else _DIGEST(app)

    monkeypatch.setattr(approvals, "bundle_digest", digest)
