"""The plan of the house, read from the source: `python -m tests.house` prints its measures.

A wing is a folder or a file at fedpriv's top, or a program. A room is a folder of fedpriv, or a file at its top. An
arrow is an import of one by another, late imports and those for types alone included. A top-level function or class is
public if neither its name, its file nor its folder begins with `_`, and also if another room imports it, however it is
spelled.
"""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from fedpriv.exports import listed_imports

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("fedpriv", "clients", "server", "simulations")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Module:
    """One file of the source."""

    name: str
    path: Path

    @cached_property
    def source(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree."""
        return list(ast.walk(self.tree))

    @property
    def num_lines(self) -> int:
        return len(self.source.splitlines())

    @property
    def room(self) -> str:
        """Its folder, or the file itself at the top of a package."""
        parts = self.path.relative_to(ROOT).parts
        return "/".join(parts[:-1] if len(parts) > 2 else parts)

    @property
    def wing(self) -> str:
        """What stands at the top: a wing of fedpriv, a file there, or a program."""
        parts = self.path.relative_to(ROOT).parts
        return "/".join(parts[:2]) if parts[0] == "fedpriv" else parts[0]

    @property
    def definitions(self) -> list[str]:
        """Names of its top-level functions and classes."""
        return [node.name for node in self.tree.body if isinstance(node, DEFINITIONS)]

    @property
    def exports(self) -> dict[str, tuple[str, str]]:
        """{name: (module, its name there)} of a room's `__init__` that hands names on."""
        return listed_imports(self.source) if "lazy_exports(" in self.source else {}


@dataclass(frozen=True)
class House:
    """All modules, and who uses which name of which module."""

    modules: Mapping[str, Module]
    users: Mapping[tuple[str, str], frozenset[str]]
    """{(module, name): modules that import the name}."""
    arrows: Mapping[str, frozenset[str]]
    """{module: modules that it imports}."""

    def of(self, package: str) -> list[Module]:
        return [m for m in self.modules.values() if m.name.split(".")[0] == package]

    def room_arrows(self, package: str = "fedpriv") -> set[tuple[str, str]]:
        """(room, room that it imports) within a package."""
        inside = {module.name for module in self.of(package)}
        pairs = {
            (self.modules[name].room, self.modules[target].room)
            for name in inside
            for target in self.arrows.get(name, ())
            if target in inside
        }
        return {(one, other) for one, other in pairs if one != other}

    def wing_arrows(self) -> set[tuple[str, str]]:
        """(wing, wing that it imports) of the whole house."""
        pairs = {
            (self.modules[one].wing, self.modules[other].wing)
            for one, others in self.arrows.items()
            for other in others
        }
        return {(one, other) for one, other in pairs if one != other}

    def used_by_another_room(self, module: Module, name: str) -> bool:
        return any(self.modules[user].room != module.room for user in self.users.get((module.name, name), ()))

    def public_names(self, package: str = "fedpriv") -> list[tuple[str, str]]:
        """(module, name) of what a reader of other rooms may meet."""
        return [
            (module.name, name)
            for module in self.of(package)
            for name in module.definitions
            if not any(part.startswith("_") for part in (*module.name.split("."), name))
            or self.used_by_another_room(module, name)
        ]


def read_house(root: Path = ROOT) -> House:
    """The house as it stands in the source."""
    modules = {
        (name := ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")): Module(name, path)
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py"))
    }
    exports = {
        (module.name, name): origin
        for module in modules.values()
        for name, origin in module.exports.items()
        if origin != (module.name, name)
    }
    users: dict[tuple[str, str], set[str]] = defaultdict(set)
    arrows: dict[str, set[str]] = defaultdict(set)
    for module in modules.values():
        if module.exports:  # a face hands names on; who imports them from it uses them
            continue
        for target, name in _imported(module.nodes, modules, exports):
            arrows[module.name].add(target)
            users[target, name].add(module.name)
    return House(
        modules,
        {key: frozenset(value) for key, value in users.items()},
        {key: frozenset(value) for key, value in arrows.items()},
    )


def _imported(
    nodes: list[ast.AST], modules: Mapping[str, Module], exports: Mapping[tuple[str, str], tuple[str, str]]
) -> Iterator[tuple[str, str]]:
    """(module, name in it) of each import from the house and each use of an imported module; ("", for the module)."""
    aliases: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module in modules:
            for alias in node.names:
                origin = (node.module, alias.name)
                while origin in exports:
                    origin = exports[origin]
                if (full := ".".join(origin)) in modules:
                    aliases[alias.asname or alias.name] = full
                    yield full, ""
                else:
                    yield origin
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            yield aliases[node.value.id], node.attr


def circle(arrows: Iterable[tuple[str, str]]) -> list[str]:
    """One way along the arrows that ends where it began; empty if there is none."""
    try:
        TopologicalSorter(_targets(arrows)).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def floors(arrows: Iterable[tuple[str, str]]) -> int:
    """The length of the longest way down; there is none in a circle."""
    targets, depth = _targets(arrows), dict[str, int]()
    for node in TopologicalSorter(targets).static_order():  # after all that it reaches
        depth[node] = 1 + max((depth[target] for target in targets.get(node, ())), default=0)
    return max(depth.values(), default=0)


def _targets(arrows: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    targets: dict[str, set[str]] = defaultdict(set)
    for one, other in arrows:
        targets[one].add(other)
    return targets


def repeated_classes(modules: Iterable[Module]) -> dict[str, int]:
    """{class name: in how many modules}, where it is more than one."""
    counts = Counter(node.name for module in modules for node in module.tree.body if isinstance(node, ast.ClassDef))
    return {name: count for name, count in sorted(counts.items()) if count > 1}


def loose_files(house: House) -> list[str]:
    """Files at fedpriv's top."""
    return [
        m.path.name for m in house.of("fedpriv") if m.path.parent.name == "fedpriv" and m.path.name != "__init__.py"
    ]


def measures(house: House) -> dict[str, object]:
    """What a reader has to know, in numbers."""
    library = house.of("fedpriv")
    num_lines = sum(module.num_lines for module in library)
    num_imports = sum(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for module in library
        for node in module.nodes
        if isinstance(node, (ast.Import, ast.ImportFrom))
    )
    public = house.public_names()
    arrows, wing_arrows = house.room_arrows(), house.wing_arrows()
    file_arrows = [(one, other) for one, others in house.arrows.items() for other in others if one != other]
    return {
        "public names": len(public),
        "public names in a thousand lines": round(1000 * len(public) / num_lines, 1),
        "names that another room imports": sum(house.used_by_another_room(house.modules[m], n) for m, n in public),
        "files in fedpriv": len(library),
        "files below 60 lines": sum(module.num_lines < 60 for module in library),
        "folders at fedpriv's top": len({m.wing for m in library if not m.wing.endswith(".py")}),
        "files at fedpriv's top": len(loose_files(house)) + 1,
        "lines in fedpriv": num_lines,
        "lines in fedpriv, server and clients": sum(
            m.num_lines for package in ("fedpriv", "server", "clients") for m in house.of(package)
        ),
        "wings": len({module.wing for module in house.modules.values()} - {"fedpriv/__init__.py"}),
        "floors of wings": "none: they run in a circle" if circle(wing_arrows) else floors(wing_arrows),
        "arrows between wings": len(wing_arrows),
        "a circle of wings": circle(wing_arrows),
        "rooms": len({module.room for module in library}),
        "arrows between rooms": len(arrows),
        "a circle of rooms": circle(arrows),
        "a circle of files": circle(file_arrows),
        "class names more than once in fedpriv": repeated_classes(library),
        "class names more than once": len(repeated_classes(house.modules.values())),
        "share of import lines": f"{num_imports / num_lines:.1%}",
    }


if __name__ == "__main__":
    for measure, value in measures(read_house()).items():
        print(f"{measure}: {value}")
