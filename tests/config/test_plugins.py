"""Plug-ins that cannot be used are errors that name them. (`tests/test_extending.py` installs one that can.)"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hvdtrain.config.keys import Section, key
from hvdtrain.config.overrides import COMMAND_LINE
from hvdtrain.config.plugins import Plugin, Registry, plugins, with_implied_keys
from hvdtrain.config.source import Source
from hvdtrain.errors import ConfigError

Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a module as the plug-in 'one' of a distribution of the module's name."""
    monkeypatch.syspath_prepend(tmp_path)
    plugins.cache_clear()

    def write(module: str, code: str) -> None:
        monkeypatch.delitem(sys.modules, module, raising=False)
        (tmp_path / f"{module}.py").write_text(code)
        about = tmp_path / f"{module}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[hvdtrain]\none = {module}:PLUGIN\n")

    yield write
    plugins.cache_clear()


IMPORT = "from hvdtrain import Plugin\n"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import nothing_like_it", "ModuleNotFoundError: No module named 'nothing_like_it' (pip uninstall bad_one removes it)"),
        ("PLUGIN = 3", "plug-in one of bad_one: expected a hvdtrain.Plugin in bad_one:PLUGIN, got int"),
        (f"{IMPORT}PLUGIN = Plugin(tasks=['count'])", "plug-in one of bad_one: expected a dict of tasks, got ['count']"),
        (f"{IMPORT}PLUGIN = Plugin(task={{}})", "TypeError"),
        (
            f"{IMPORT}PLUGIN = Plugin(tasks={{'train': 'bad_one:run'}})",
            "plug-in one of bad_one: expected other names of tasks than those of hvdtrain, got 'train'",
        ),
    ],
)
def test_a_plug_in_that_cannot_be_used_is_named(install: Install, code: str, message: str) -> None:
    install("bad_one", code)
    with pytest.raises(ConfigError, match="plug-in one of bad_one") as caught:
        len(Registry("tasks", {"train": "hvdtrain.run:train"}))
    assert message in str(caught.value)


def test_an_entry_is_imported_when_it_is_used(install: Install) -> None:
    install("good_one", f"{IMPORT}PLUGIN = Plugin(tasks={{'other': 'good_two:run', 'count': 'good_one:run'}})\nrun = print")
    install("good_two", f"{IMPORT}PLUGIN = Plugin()\n")
    table: Registry[object] = Registry("tasks", {"train": "hvdtrain.run:train"})
    assert [name for name in table if name in ("train", "other", "count")] == ["train", "other", "count"]
    assert table["count"] is print
    assert [*plugins().values()][-2].tasks.keys() == {"other", "count"}
    assert Registry("watchdogs").last is Registry("watchdogs")["watchdog"]
    with pytest.raises(ConfigError, match=r"other: expected good_two:run to be imported, got AttributeError"):
        table["other"]
    assert all(isinstance(plugin, Plugin) for plugin in plugins().values())


@dataclass(frozen=True, kw_only=True)
class SizeKeys(Section):
    inputs: int | None = key(None, "the number of inputs")


def test_the_entry_of_another_distribution_is_used_in_place_of_hvdtrains(install: Install) -> None:
    install("watching", f"{IMPORT}PLUGIN = Plugin(watchdogs={{'other': 'watching:watch'}})\nwatch = print")
    assert Registry("watchdogs").last is print


def test_keys_follow_from_another_one(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "def keys_of(values):\n    return {'num_epochs': values['inputs'] + 1, 'get_model': len, 'model': 'other'}\n"
    install("sized", f"{IMPORT}{code}PLUGIN = Plugin(configs={{'inputs': 'sized:keys_of'}})")
    monkeypatch.setattr("hvdtrain.config.plugins.CONFIGS", Registry("configs"))
    given = Source({"model": "m", "inputs": 3}, dict.fromkeys(("model", "inputs"), COMMAND_LINE), ())
    found = with_implied_keys(given, {})
    assert found.values == {"model": "m", "inputs": 3, "num_epochs": 4, "get_model": len}
    assert found.origins["get_model"] == "inputs", "not the command line: nobody can read a function there again"
