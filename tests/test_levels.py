"""The package's levels: imports go down only, and each framework, the environment and HDF5 have one place."""

import ast
from collections.abc import Iterator
from fnmatch import fnmatch
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "hvdtrain"

LEVELS = {
    "__main__": 6,
    "cli": 6,
    "hdf_dump": 6,
    "hdf_check": 6,
    "build_horovod": 6,
    "doctor": 6,
    "submit": 6,
    "tasks": 5,
    "run": 5,
    "dry_run": 5,
    "announce": 5,
    "connect": 5,
    "feeds": 5,
    "dump": 5,
    "settings": 5,
    "run_keys": 4,
    "returnn_names": 0,
    "effective": 5,
    "engine": 4,
    "saving": 4,
    "evaluation": 4,
    "not_finite": 4,
    "forward": 4,
    "ballot": 3,
    "cleanup": 3,
    "preload": 3,
    "start": 3,
    "trace": 3,
    "step_log": 3,
    "state": 3,
    "ending": 3,
    "interrupt": 3,
    "comm": 3,
    "data": 3,
    "learner": 3,
    "reduce": 3,
    "schedule": 3,
    "returnn_layer": 3,  # RETURNN's names for configs written for it
    "checkpoint": 3,
    "report": 3,
    "report.__main__": 6,
    "log": 2,
    "watchdog": 3,
    "comm.base": 2,
    "comm.keys": 2,
    "data.types": 2,
    "learner.base": 2,
    "context": 2,
    "config": 1,
    "progress": 1,
    "errors": 0,
    "scores": 0,
    "timer": 0,
    "version": 0,
}
"""A module's own level, or that of its folder."""

BESIDE = [
    ("__main__", "cli"),
    ("hdf_dump", "cli"),  # the grammar of ++key value
    ("doctor.__main__", "cli"),
    ("doctor.config", "hdf_check"),  # a config's files are looked at as that tool does
    ("submit.__main__", "cli"),
    ("submit.commands", "doctor.environment"),  # what it looks for is what a script should say
    ("run", "settings"),
    ("run", "announce"),
    ("run", "connect"),
    ("run", "feeds"),
    ("announce", "effective"),
    ("announce", "settings"),
    ("connect", "settings"),
    ("feeds", "settings"),
    ("dry_run", "announce"),
    ("dry_run", "connect"),
    ("dry_run", "run"),
    ("dry_run", "settings"),
    ("tasks", "connect"),
    ("tasks", "dry_run"),
    ("tasks", "feeds"),
    ("effective", "settings"),
    ("tasks", "run"),
    ("tasks", "settings"),
    ("engine", "saving"),
    ("engine", "evaluation"),
    ("engine", "not_finite"),
    ("state", "schedule.history"),  # what is remembered of an epoch
    ("ending", "schedule.history"),
    ("start", "checkpoint"),
    ("start", "preload"),
    ("step_log", "data.sizes"),
    ("returnn_layer.hdf", "data.writer"),
    ("learner.*", "reduce"),  # a learner is handed a reducer
    ("learner.base", "comm.base"),  # contracts may speak of each other
    ("learner.base", "data.types"),
]
"""Who may import whom on the same level, beside modules of the same folder."""

PLACES = {
    "torch": ["learner/torch*.py", "comm/torch*.py", "returnn_layer/*.py"],
    "tensorflow": ["learner/tensorflow*.py"],
    "keras": ["learner/tensorflow*.py"],
    "horovod": ["comm/horovod*.py"],
    "mpi4py": ["comm/*.py"],
    "h5py": ["data/*.py"],
}
"""Where a package may be imported."""

SOURCES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    """`data.hdf` for hvdtrain/data/hdf/dataset.py; a folder's __init__.py has the folder's name, the package's own ''."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_of(path): ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in SOURCES}


def level(module: str) -> int:
    found = LEVELS.get(module, LEVELS.get(module.split(".")[0]))
    assert found is not None, f"hvdtrain.{module} is new: give it a level in tests/test_levels.py and in the design"
    return found


def imports(tree: ast.AST) -> Iterator[str]:
    """The full names of everything a module imports, at its top, in functions, and through importlib."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            first = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
            if isinstance(first, ast.Constant):
                yield str(first.value)


def own_imports(module: str) -> set[str]:
    """The modules of the package that a module imports."""
    names = [name.removeprefix("hvdtrain.") for name in imports(MODULES[module]) if name.split(".")[0] == "hvdtrain"]
    return {name if name in MODULES else name.rpartition(".")[0] for name in names}


def may_stand_beside(importer: str, imported: str) -> bool:
    same_folder = "." in importer and importer.split(".")[0] == imported.split(".")[0]
    return same_folder or any(fnmatch(importer, left) and imported == right for left, right in BESIDE)


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
    assert own_imports("data.plan") >= {"config.keys", "data.order", "data.types"}
    assert own_imports("__main__") == {"cli"}
    assert len(MODULES) > 30


@pytest.mark.parametrize("importer", [module for module in MODULES if module])
def test_imports_go_down_only(importer: str) -> None:
    for imported in own_imports(importer):
        assert imported, f"hvdtrain.{importer} imports the package itself, which is for configs"
        assert level(imported) <= level(importer), f"hvdtrain.{importer} imports hvdtrain.{imported}, which stands above it"
        if level(imported) == level(importer):
            assert may_stand_beside(importer, imported), (
                f"hvdtrain.{importer} imports hvdtrain.{imported}, which stands beside it"
            )


def test_what_a_config_imports_is_light() -> None:
    assert own_imports("") == {"comm.current", "comm.launch", "context", "version"}


def test_no_modules_import_each_other() -> None:
    TopologicalSorter({module: own_imports(module) for module in MODULES}).prepare()  # raises CycleError


@pytest.mark.parametrize("package", PLACES)
def test_a_framework_is_imported_in_its_place_only(package: str) -> None:
    for path, tree in zip(SOURCES, MODULES.values(), strict=True):
        if package in {name.split(".")[0] for name in imports(tree)}:
            place = path.relative_to(PACKAGE).as_posix()
            assert any(fnmatch(place, allowed) for allowed in PLACES[package]), f"{place} imports {package}"


def test_the_environment_is_read_in_one_place() -> None:
    readers = set()
    for path, tree in zip(SOURCES, MODULES.values(), strict=True):
        for node in ast.walk(tree):
            named = node.attr if isinstance(node, ast.Attribute) else node.name if isinstance(node, ast.alias) else ""
            if named in ("environ", "environb", "getenv", "putenv", "unsetenv"):
                readers.add(path.relative_to(PACKAGE).as_posix())
    assert readers == {"comm/launch.py", "build_horovod.py"}


def test_nothing_is_asserted_that_a_user_could_cause() -> None:
    for path, tree in zip(SOURCES, MODULES.values(), strict=True):
        lines = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]
        assert not lines, f"{path.relative_to(PACKAGE)}, line {lines[:1]}: an assert"
