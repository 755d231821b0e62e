"""The rules of the house: who may import whom, what each program loads, and what travels to the nodes."""

import ast
import gc
import importlib
import inspect
import itertools
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fedpriv.exports import listed_imports
from fedpriv.privacy.mechanisms.registry import MECHANISMS
from tests.house import PACKAGES, ROOT, House, circle, loose_files, read_house, repeated_classes
from tests.marks import slow


@cache  # every worker imports this file, and one of them runs its tests
def house() -> House:
    """The house, whose 700,000 nodes stay to the end: no search for garbage looks at them."""
    gc.disable()
    found = read_house()
    gc.freeze()
    gc.enable()
    return found


LAZY_PACKAGES = sorted(
    ".".join(file.parent.relative_to(ROOT).parts)
    for file in (ROOT / "fedpriv").rglob("__init__.py")
    if "lazy_exports(" in file.read_text()
)

MODELS = {"torch", "transformers", "peft"}
TABLES = {"datasets", "pyarrow", "pandas", "matplotlib", "sklearn"}
# A package counts in every start of a node or a run. What commands load, tests/cli/test_every_command.py says.
LOADED = {
    # A message to a node with a vault needs nothing of what trains.
    "import clients.app": ({"flwr", "safetensors"}, MODELS | {"scipy", "pandas", "pydantic", "dp_accounting"}),
    f"import {', '.join(LAZY_PACKAGES)}": ({"fedpriv.learning.training"}, MODELS | {"numpy", "dp_accounting"}),
    "from fedpriv.privacy.accounting import *; from fedpriv.privacy.ledger import *": ({"scipy"}, MODELS),
    "import fedpriv.holder.vault._service": (
        {"fedpriv.holder.vault._service"},
        MODELS | TABLES | {"flwr", "ray", "dp_accounting", "scipy.signal", "scipy.stats"},
    ),
    "import simulations": ({"simulations"}, MODELS | {"flwr", "ray", "numpy", "pandas", "pydantic", "rich"}),
    "import fedpriv.runs.show._report_page": (
        {"fedpriv.runs.show._report_page"},
        {"torch", "flwr", "ray", "matplotlib.pyplot"},
    ),
    # Both apps and the vault's answers.
    "import simulations.engines.federation": ({"clients.app", "server.app"}, TABLES | {"ray", "dp_accounting"}),
}


@pytest.mark.parametrize("statement", [*list(LOADED)[:-1], *slow(list(LOADED)[-1])], ids=lambda text: text[:40])
def test_a_program_loads_nothing_before_it_needs_it(statement):
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded, (expected, forbidden) = set(done.stdout.split()), LOADED[statement]
    assert expected <= loaded, "the check would be blind"
    assert not loaded & forbidden


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_torchs_threads_are_told_to_spin_briefly_before_it_is_loaded(given, expected):
    code = "import os, sys, fedpriv; print('torch' in sys.modules, os.environ.get('GOMP_SPINCOUNT'))"
    inherited = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=inherited | given, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", expected]


@pytest.mark.parametrize("package", LAZY_PACKAGES)
def test_every_exported_name_is_listed_can_be_imported_and_says_what_it_is(package):
    """A module, class or function by a docstring of its own; a table or an alias by the text below its assignment."""
    module = importlib.import_module(package)
    assert dir(module) == module.__all__ == sorted(set(module.__all__))
    exported = {name: getattr(module, name) for name in module.__all__}
    inner = {found.name for found in pkgutil.iter_modules(module.__path__)}
    hidden = {name for name in exported.keys() & inner if not inspect.ismodule(exported[name])}
    assert not hidden, f"{package}: both a module and an export are called {hidden}"
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        _ = module.nothing
    for name, (origin, inner) in listed_imports(Path(str(module.__file__)).read_text()).items():
        value = exported[name]
        if inspect.ismodule(value) or inspect.isclass(value) or inspect.isfunction(value):
            own = value.__doc__ or ""
            made = inspect.isclass(value) and own.startswith(f"{value.__name__}(")  # by `dataclass`
            assert len(own) > 10, f"{package}.{name}"
            assert not made, f"{package}.{name}"
        else:
            body = ast.parse(Path(str(sys.modules[origin].__file__)).read_text()).body
            assert inner in described_values(body), f"{package}.{name}"


def described_values(body: list[ast.stmt]) -> set[str]:
    """Names that a module assigns, with a text right below."""
    found = set()
    for statement, below in itertools.pairwise(body):
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and is_text:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


@cache
def imports() -> dict[str, set[str]]:
    """{file: dotted names that it imports}, from the source, late imports too."""
    names: dict[str, set[str]] = {}
    for module in house().modules.values():
        found = names.setdefault(str(module.path.relative_to(ROOT)), set())
        for node in module.nodes:
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return names


def test_no_files_import_each_other_in_a_circle():
    assert not circle((one, other) for one, others in house().arrows.items() for other in others if one != other)


def test_no_room_imports_what_another_keeps_to_itself():
    """Neither names nor modules that begin with `_`; a face hands on what others may use."""
    room = {name: module.room for name, module in house().modules.items()}
    assert not [
        f"{user}: {module}.{name}"
        for (module, name), users in house().users.items()
        for user in users
        if room[user] != room[module]
        and not room[module].startswith("simulations")
        and (f"{module}.{name}").rpartition(".")[2].startswith("_")
        and not name.startswith("__")
    ]
    assert not [
        f"{file}: {name}"
        for file, names in imports().items()
        for name in names
        if (of := house().modules.get(name))
        and of.path.name.startswith("_")
        and of.path.name != "__init__.py"
        and Path(file).parent != of.path.relative_to(ROOT).parent
    ]


def test_every_text_has_an_encoding_of_its_own():
    """That of the machine is not the product's: what one machine writes, another reads."""

    def lacks_one(call: ast.Call) -> bool:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        given = {keyword.arg for keyword in call.keywords}
        modes = [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        return "encoding" not in given and (
            (name in ("read_text", "write_text") and isinstance(call.func, ast.Attribute))  # ours is a function
            or (name in ("run", "Popen") and "text" in given)
            or (name in ("open", "fdopen") and any(re.fullmatch("[rwax]t?[+]?", mode) for mode in modes))
        )

    blind = ["path.read_text()", "subprocess.run(a, text=True)", "path.open('w', newline='')"]
    assert all(lacks_one(ast.parse(line).body[0].value) for line in blind), "the check would be blind"
    product = {name: module for name, module in house().modules.items() if not name.startswith("simulations")}
    nodes = [(name, node) for name, module in product.items() for node in module.nodes]
    assert not [f"{name}:{node.lineno}" for name, node in nodes if isinstance(node, ast.Call) and lacks_one(node)]


def test_a_docstring_begins_with_a_subject_or_a_verb():
    opening = re.compile(r'^\s*"""(What|Of|Whom|Who) ', re.MULTILINE)
    assert opening.search('    """What a round costs."""'), "the check would be blind"
    assert not [module.name for module in house().modules.values() if opening.search(module.source)]


def test_the_top_has_few_folders_and_files_and_no_class_the_name_of_another():
    library = house().of("fedpriv")
    assert 5 <= len({m.wing for m in library if not m.wing.endswith(".py")}) <= 9
    assert 1 <= len(loose_files(house())) <= 5
    assert not repeated_classes(library)


# Registries, what lists the rooms of the library, and the meaning of the key that names one.
NAMES_EVERY_MECHANISM = {
    *("fedpriv/__init__.py", "fedpriv/cli/main.py", "fedpriv/config/_federation_and_privacy.py"),
    *("fedpriv/methods/__init__.py", "fedpriv/privacy/accounting/events.py", "fedpriv/privacy/mechanisms/registry.py"),
}


# Gaussian noise is the default, and many a formula is about it by name.
@pytest.mark.parametrize("mechanism", sorted(set(MECHANISMS) - {"gaussian"}))
def test_a_mechanism_is_named_in_its_own_files_and_the_registries_alone(mechanism):
    named = re.compile(rf"(?<![a-z]){mechanism}", re.IGNORECASE)
    for package in ("fedpriv", "clients", "server", "simulations/engines", "simulations/sweeps"):
        for path in (ROOT / package).rglob("*.py"):
            file = path.relative_to(ROOT)
            own = any(part.startswith(mechanism.replace("-", "_")) for part in file.parts)
            if not own and named.search(path.read_text()):
                assert str(file) in NAMES_EVERY_MECHANISM, file


def test_private_flower_names_live_in_one_file_a_side():
    files = {"clients/deploy/approved_supernode.py", "server/deploy/guarded_superlink.py"}
    files |= {"simulations/engines/flower_private.py"}
    private = (
        *("flwr.supercore", "flwr.supernode", "flwr.superlink"),
        *("flwr.server.", "flwr.simulation.", "flwr.common", "flwr.proto", "flwr.compat"),
    )
    public = "flwr.simulation.run_simulation"
    for file, names in imports().items():
        if file not in files:
            assert not [name for name in names if name.startswith(private) and name != public], file


def test_all_that_programs_read_beside_their_code_travels_in_the_wheel():
    """Without hatchling, which the hook imports, and which nothing else of the everyday tests needs."""
    parts = ("_PROGRAMS", "_LEFT_OUT", "def _programs")
    hook: dict[str, Any] = {"Iterator": Iterator, "Path": Path}
    for each in ast.parse((ROOT / "hatch_build.py").read_text()).body:
        if ast.unparse(each).startswith(parts):
            exec(ast.unparse(each), hook)
    files = [each for folder in hook["_PROGRAMS"] for each in (ROOT / folder).rglob("*") if each.is_file()]
    kept = {each for each in files if each.suffix != ".pyc"}
    kept -= {each for each in kept for left in hook["_LEFT_OUT"] if each.is_relative_to(ROOT / left)}
    assert kept == set(hook["_programs"](ROOT))


def test_nothing_outside_the_tests_imports_them():
    assert not [file for file, names in imports().items() if any(f"{name}.".startswith("tests.") for name in names)]


def test_no_file_is_too_long():
    for package in (*PACKAGES, "tests"):
        for file in (ROOT / package).rglob("*.py"):
            assert len(file.read_text().splitlines()) < 600, file
