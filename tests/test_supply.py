"""What a node installs: every package by version and SHA-256, and nothing that a registry puts in its place."""

import hashlib
import json
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCK = (ROOT / "requirements.txt").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEPLOYMENT = (ROOT / "docs" / "deployment.md").read_text()

PLACES = [(python, machine) for python in ("3.11", "3.12", "3.13") for machine in ("x86_64", "aarch64")]

# Small packages, of one wheel each, that need no other.
SMALL = ("annotated-types", "mdurl", "tomli-w")


def entries(lock: str) -> list[tuple[Requirement, list[str]]]:
    """(requirement, SHA-256 of its files) of each entry of a lock file."""
    lines = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", lock, flags=re.MULTILINE)).splitlines()
    return [
        (Requirement(line.split(" --hash=")[0]), re.findall(r"--hash=sha256:([0-9a-f]{64})\b", line)) for line in lines
    ]


def locked(python: str, machine: str) -> dict[str, str]:
    """{package: version} of the lock file on Linux."""
    place = {"python_version": python, "python_full_version": f"{python}.0", "platform_machine": machine}
    place |= {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}
    place |= {"implementation_name": "cpython", "platform_python_implementation": "CPython", "extra": ""}
    found = [each for each, _ in entries(LOCK) if each.marker is None or each.marker.evaluate(place)]
    assert len({each.name for each in found}) == len(found), "two versions of one package"
    return {each.name: str(each.specifier).removeprefix("==") for each in found}


def required(extra: str) -> list[Requirement]:
    """What pyproject.toml asks for, with an extra and those that it names."""
    found = [Requirement(each) for each in PROJECT["optional-dependencies"][extra]]
    own = [inner for each in found if each.name == "fedpriv" for inner in each.extras]
    return [each for each in found if each.name != "fedpriv"] + [each for inner in own for each in required(inner)]


def excerpt(*names: str) -> str:
    """The entries of some packages, as the lock file has them."""
    return "".join(re.search(rf"^{name}==.*\\\n(?:    --hash=.*\n)+", LOCK, re.MULTILINE)[0] for name in names)


def install(lock: str, folder: Path, *, registry: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command by which the documentation installs the lock file, for a part of it, into a folder.

    Args:
        lock: the part.
        folder: made.
        registry: a folder of wheels that stands for it; the real one if None.
    """
    path = folder.with_suffix(".txt")
    path.write_text(lock)
    (flags,) = re.findall(r"^pip install (.*)-r requirements\.txt$", DEPLOYMENT, re.MULTILINE)
    words = [*shlex.split(flags), "-r", str(path), "--target", str(folder)]
    words += ["--no-index", "--find-links", str(registry)] if registry else []
    return subprocess.run([sys.executable, "-m", "pip", "install", *words], capture_output=True, text=True, check=False)


def wheel(folder: Path, name: str, version: str, content: str, requires: str = "") -> Path:
    """A wheel of one module, under any name and version, that may require another package."""
    module, info = name.replace("-", "_"), f"{name.replace('-', '_')}-{version}.dist-info"
    made = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as file:
        file.writestr(f"{module}/__init__.py", content)
        needs = f"Requires-Dist: {requires}\n" if requires else ""
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", f"{module}/__init__.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return made


def test_the_lock_has_every_requirement_of_a_node_in_a_version_that_it_admits() -> None:
    needed = [*map(Requirement, PROJECT["dependencies"]), *required("node")]
    for place in PLACES:
        versions = locked(*place)
        assert not [each for each in needed if not each.specifier.contains(versions[canonicalize_name(each.name)])]


def test_every_package_of_the_lock_is_pinned_with_hashes_and_from_nowhere_in_particular() -> None:
    assert len(entries(LOCK)) > 100
    for requirement, hashes in entries(LOCK):
        assert re.fullmatch(r"==[\w.!+]+", str(requirement.specifier)), requirement
        assert hashes, requirement
    options = re.findall(r"^\s*(-\S+)", LOCK.replace("--hash=", ""), re.MULTILINE)
    assert "://" not in LOCK
    assert not options, "an index or a folder would be this machine's"


def entry(file: Path, name: str, version: str) -> str:
    """A lock file's entry for a wheel."""
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}\n"


def test_a_package_swapped_at_the_registry_is_not_installed(tmp_path: Path) -> None:
    version = locked("3.11", "x86_64")["tomli-w"]
    wheel(tmp_path, "tomli-w", version, "STRANGER = True\n")
    done = install(excerpt("tomli-w"), tmp_path / "site", registry=tmp_path)
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr, "the registry itself fails"
    assert not (tmp_path / "site").exists()


@pytest.mark.slow
def test_a_package_that_the_lock_does_not_list_is_not_installed_with_one_that_it_does(tmp_path: Path) -> None:
    listed = wheel(tmp_path, "listed", "1.0", "", requires="unlisted")
    unlisted = wheel(tmp_path, "unlisted", "1.0", "STRANGER = True\n")
    lock = entry(listed, "listed", "1.0")
    done = install(lock, tmp_path / "site", registry=tmp_path)
    assert done.returncode != 0
    assert "unlisted" in done.stderr
    assert not (tmp_path / "site").exists()
    done = install(lock + entry(unlisted, "unlisted", "1.0"), tmp_path / "both", registry=tmp_path)
    assert (tmp_path / "both" / "unlisted" / "__init__.py").is_file(), f"the registry itself fails: {done.stderr}"


@pytest.mark.slow
def test_pip_takes_what_the_registry_has_by_its_hash_and_refuses_it_by_another(tmp_path: Path) -> None:
    done = install(excerpt(*SMALL), tmp_path / "site")
    assert done.returncode == 0, done.stderr
    digit = {"0": "1"}
    changed = re.sub(r"(?<=sha256:)[0-9a-f]", lambda found: digit.get(found[0], "0"), excerpt(*SMALL))
    done = install(changed, tmp_path / "other")
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("python", "machine"), PLACES)
def test_the_registry_has_a_wheel_of_every_package_for_every_python_and_processor(python, machine, tmp_path) -> None:
    command = [sys.executable, "-m", "uv", "pip", "install", "--dry-run", "--no-deps", "--target", str(tmp_path)]
    place = ["--python-version", python, "--python-platform", f"{machine}-manylinux_2_28"]
    hashes = ["--require-hashes", "--only-binary", ":all:", "-r", "requirements.txt"]
    done = subprocess.run([*command, *place, *hashes], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"Would install {len(locked(python, machine))} packages" in done.stderr


def test_the_image_installs_as_the_page_says() -> None:
    image = re.sub(r"\\\n", " ", (ROOT / "docs" / "Dockerfile").read_text())
    commands = re.findall(r"^pip install (.*)$", DEPLOYMENT, re.MULTILINE)
    assert len(commands) == 2
    found = re.findall(r"-m pip install (.*?)(?: &&|\n)", re.sub(r"\$\{TORCH_INDEX:.*?\} ", "", image))
    assert [" ".join(each.split()) for each in found] == commands


@pytest.mark.slow
def test_the_bill_of_materials_has_what_a_node_installs_and_nothing_else(tmp_path: Path) -> None:
    (options,) = re.findall(r"-m cyclonedx_py (.*)", (ROOT / "Makefile").read_text())
    assert "--no-validate" not in options
    made = tmp_path / "sbom.json"
    command = [sys.executable, "-m", "cyclonedx_py", *options.replace("sbom.json", str(made)).split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    bill = json.loads(made.read_text())
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", "fedpriv")
    expected = {(each.name, str(each.specifier)[2:]): set(hashes) for each, hashes in entries(LOCK)}
    found = {
        (each["name"], each["version"]): {h["content"] for ref in each["externalReferences"] for h in ref["hashes"]}
        for each in bill["components"]
    }
    assert found == expected
    assert all(each["purl"].startswith(f"pkg:pypi/{each['name']}@") for each in bill["components"])
    assert not {name for name, _ in found} & {"pytest", "mypy", "ruff", "opacus", "cyclonedx-bom"}
