"""The package's structure: imports between root files and folders go down only, and each package has its places."""

import ast
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from launching import ROOT

from hvdtrain.config.plugins import plugins
from hvdtrain.learner.frameworks import FRAMEWORKS

PACKAGE = ROOT / "hvdtrain"
LEVELS, ROOT_FILES = 9, 10

PLACES = {
    "torch": ["learner/torch/*", "comm/torch*.py", "plugins/*"],
    "tensorflow": ["plugins/tensorflow/*", "plugins/returnn/network/*"],
    "keras": ["plugins/tensorflow/*"],
    "horovod": ["plugins/horovod/*"],
    "mpi4py": ["comm/*"],
    "h5py": ["data/*", "plugins/hdf_tools/*", "plugins/returnn/nextgen.py"],
    "returnn": ["plugins/returnn/*"],
}
"""Where a package may be imported."""


FOR_CHECKERS = {"plugins/other_trainer", "plugins/programs", "plugins/reductions", "plugins/transformers"}
"""The plug-ins whose names `hvdtrain/__init__.py` imports for type checkers only; it looks them up in a table."""


@cache
def sources() -> dict[str, ast.Module]:
    """Every file of the package by its path."""
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}


def imports(tree: ast.AST) -> Iterator[str]:
    """The full names of everything that a file imports, at its top, in functions, and through importlib."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and "import_module" in (getattr(node.func, "id", ""), getattr(node.func, "attr", "")):
            first = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
            if isinstance(first, ast.Constant):
                yield str(first.value)


def unit(place: str) -> str:
    """The root file, folder or plug-in that a file belongs to: `data` for data/hdf/file.py, `run` for run.py."""
    parts = place.removesuffix(".py").split("/")
    return "/".join(parts[: 2 if parts[0] == "plugins" else 1])


@cache
def imports_of_files() -> dict[str, list[str]]:
    """By file, what it imports."""
    return {place: list(imports(tree)) for place, tree in sources().items()}


@cache
def units() -> dict[str, set[str]]:
    """By root file or folder, the others that it imports."""
    found: dict[str, set[str]] = {unit(place): set() for place in sources()}
    for place, imported in imports_of_files().items():
        parts = [name.split(".") for name in imported]
        used = [unit("/".join(name[1:])) for name in parts if name[0] == "hvdtrain" and len(name) > 1]
        names = {name if name in found else "__init__" for name in used if name != "plugins/"}  # that imports any of them
        found[unit(place)] |= names - {unit(place)}
    return found


def test_the_parser_finds_imports_of_every_kind() -> None:
    text = """
import a.b, c
from d import e
def f():
    import g
    importlib.import_module("h.i")
    import_module(f"j.{k}")
"""
    assert list(imports(ast.parse(text))) == ["a.b", "c", "d.e", "g", "h.i", "j."]
    assert units()["engine"] >= {"training", "data"}
    assert units()["__main__"] == {"cli"}


def test_imports_go_down_only_and_levels_are_few() -> None:
    levels: dict[str, int] = {}
    for name in TopologicalSorter(units()).static_order():  # raises CycleError, with the cycle
        if name == "__init__":
            continue  # it hands on names of others: plug-ins' when they are asked for
        levels[name] = max((levels[other] + 1 for other in units()[name]), default=0)
    assert max(level for name, level in levels.items() if not name.startswith("plugins/")) <= LEVELS, levels
    assert units()["__init__"] <= {"comm", "config", "context", "errors", "version"} | FOR_CHECKERS, "configs import little"
    assert not [name for name, others in units().items() if "__init__" in others], "the package itself is for configs"


def needs(place: str) -> Mapping[str, str]:
    """The other plug-ins that the one of a file declares to need."""
    name = place.split("/")[1] if place.startswith("plugins/") else ""
    return plugins()[f"plug-in {name}"].needs if name and name != "__init__.py" else {}


def test_only_a_plug_in_that_needs_another_one_imports_it() -> None:
    importing = {(place, name) for place, imported in imports_of_files().items() for name in imported}
    wrong = [
        (place, name)
        for place, name in importing
        if not (place == "__init__.py" and unit("/".join(name.split(".")[1:])) in FOR_CHECKERS)
        and name.startswith("hvdtrain.plugins.")
        and name != "hvdtrain.plugins."
        and unit("/".join(name.split(".")[1:])) != unit(place)
        and name.split(".")[2] not in needs(place)
    ]
    assert wrong == []


def test_files_do_not_import_each_other() -> None:
    by_file = imports_of_files()
    modules = {place.removesuffix(".py").removesuffix("/__init__").replace("/", "."): by_file[place] for place in by_file}
    graph: dict[str, set[str]] = {}
    for module, imported in modules.items():
        names = {name.removeprefix("hvdtrain.") for name in imported if name.startswith("hvdtrain.")}
        graph[module] = {name if name in modules else name.rpartition(".")[0] for name in names}
    TopologicalSorter(graph).prepare()  # raises CycleError, with the cycle


def test_the_root_has_the_walk_and_folders_name_their_files_once() -> None:
    assert len([place for place in sources() if "/" not in place]) <= ROOT_FILES
    for place in sources():
        folder = Path(place).parent.name
        assert not (folder in ("torch", "tensorflow") and Path(place).name.startswith(f"{folder}_")), place


@pytest.mark.parametrize("package", PLACES)
def test_a_package_is_imported_in_its_places_only(package: str) -> None:
    for place, imported in imports_of_files().items():
        if package in {name.split(".")[0] for name in imported}:
            assert any(fnmatch(place, allowed) for allowed in PLACES[package]), f"{place} imports {package}"


def test_only_returnns_plug_in_compares_the_backend_with_a_name() -> None:
    comparing = set()
    for place, tree in sources().items():
        for node in ast.walk(tree):
            sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            names = {one.value for one in sides if isinstance(one, ast.Constant)} & FRAMEWORKS.keys()
            if not names or place.startswith("plugins/tensorflow/"):  # which asks for Keras' own
                continue
            if any(word in ast.unparse(node) for word in ("backend", "framework")):
                comparing.add(place)
    horovods = {"plugins/doctor/horovod_recipe.py"}  # compiles its bindings, of which there are two
    assert comparing == {"plugins/returnn/translate.py", "plugins/returnn/values.py"} | horovods


def test_the_environment_is_read_in_one_place() -> None:
    readers = set()
    for place, tree in sources().items():
        for node in ast.walk(tree):
            named = node.attr if isinstance(node, ast.Attribute) else node.name if isinstance(node, ast.alias) else ""
            if named in ("environ", "environb", "getenv", "putenv", "unsetenv"):
                readers.add(place)
    assert readers == {"comm/this_process.py", "plugins/doctor/build_horovod.py"}


FORMATS_OF_RETURNN = [
    "plugins/*", "data/*", "checkpoint/*",
    "learner/optimizer.py", "learner/contents.py", "learner/torch/*state.py", "learner/frameworks.py",
    "config/absent.py", "start_up/data.py", "start_up/overfit.py",
]  # fmt: skip
"""Where RETURNN is mentioned: its configs; its datasets, HDF files, checkpoints, files of learning rates and of searches."""


def test_returnn_is_mentioned_where_its_formats_are() -> None:
    for place in sources():
        if re.search(r"\breturnn\b", (PACKAGE / place).read_text(encoding="utf-8"), re.IGNORECASE):
            assert any(fnmatch(place, pattern) for pattern in FORMATS_OF_RETURNN), place


def test_nothing_is_asserted_that_a_user_could_cause() -> None:
    for place, tree in sources().items():
        lines = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]
        assert not lines, f"{place}, line {lines[:1]}: an assert"
