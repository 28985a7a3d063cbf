"""Configs: Python and JSON, overrides of the command line, and every mistake reported at once."""

import importlib
import json
import logging
import os
import pickle
import re
import subprocess
import sys
from ast import literal_eval
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
from launching import ROOT, faults, launch, refused
from learners import CONFIG

import hvdtrain
from hvdtrain.cli import COMMANDS, main, usage
from hvdtrain.config.absent import import_part
from hvdtrain.config.access import ConfigAccess
from hvdtrain.config.check import build, closest
from hvdtrain.config.command_line import parse_command_line, split_overrides
from hvdtrain.config.convert import text_value
from hvdtrain.config.keys import REQUIRED, declared_keys, key, positive, share
from hvdtrain.config.large_imports import _is_installed
from hvdtrain.config.overrides import COMMAND_LINE
from hvdtrain.config.references import is_reference, resolve
from hvdtrain.config.source import Source, load
from hvdtrain.errors import ConfigError, LaunchError, Problem
from hvdtrain.help import explanation
from hvdtrain.plugins.other_trainer.synonyms import SYNONYMS
from hvdtrain.plugins.programs.restored import separate_imports
from hvdtrain.plugins.report.__main__ import parser as report_parser
from hvdtrain.plugins.returnn.names import UNSUPPORTED
from hvdtrain.plugins.schedules.keys import NewbobKeys
from hvdtrain.plugins.submit.__main__ import parser as submit_parser
from hvdtrain.settings import DATASET_SECTIONS, Settings, all_keys, read_settings, with_datasets
from hvdtrain.start_up.effective import effective_keys

MINIMAL = """\
model = "exp/model"
train = {"class": "HDFDataset", "files": ["train.hdf"]}
max_seqs = 4
learning_rate = 0.1
def get_model(**_): ...
def train_step(**_): ...
"""


def written(folder: Path, text: str, name: str = "config.py") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def settings(folder: Path, text: str = "", **overrides: str) -> Settings:
    """The minimal config with more lines, under overrides."""
    return read_settings([written(folder, MINIMAL + text)], overrides)


def found(folder: Path, text: str = "", minimal: str = MINIMAL, **overrides: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        read_settings([written(folder, minimal + text)], overrides)
    return caught.value.problems


def problems(folder: Path, text: str = "", minimal: str = MINIMAL, **overrides: str) -> list[str]:
    return faults(found(folder, text, minimal, **overrides))


def source(folder: Path, text: str, overrides: dict[str, str] | None = None, types: dict[str, Any] | None = None) -> Source:
    return load([written(folder, text)], overrides or {}, types or {})


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, encoding="utf-8", timeout=60, stdin=subprocess.DEVNULL
    )


def ended(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    """The exit status of the program in this process, what it printed, and its errors."""
    try:
        status: object = main(list(arguments))
    except SystemExit as end:
        status = end.code
    return status, *capsys.readouterr()


# Files


LARGE_IMPORT = """
import gc, sys
from importlib.util import find_spec
from hvdtrain.config.large_imports import LargeImports
LargeImports.install()  # once more
usual, before = gc.get_threshold(), gc.get_freeze_count()
from recipe_one import note as noted
import recipe_two, torch
assert sum(isinstance(finder, LargeImports) for finder in sys.meta_path) == 1
assert gc.get_freeze_count() > before + 100_000 and gc.get_threshold() == usual and gc.isenabled()
assert "exec_module" not in vars(torch.__spec__.loader) and torch.__loader__ is torch.__spec__.loader
assert find_spec("tensorflow").loader.get_filename().endswith("__init__.py")
model = torch.nn.Linear(2, 2)
adam = torch.optim.Adam(model.parameters())
model(torch.ones(1, 2)).sum().backward()
adam.step(), adam.zero_grad(), adam.state_dict()
assert "torch._dynamo.eval_frame" not in sys.modules  # nothing is compiled
expected = model(torch.ones(1, 2))
passed_over = torch._dynamo.disable(torch.sin)
assert "torch._dynamo.eval_frame" in sys.modules and torch._dynamo is sys.modules["torch._dynamo"]
assert passed_over is not torch.sin
assert torch.equal(torch.compile(model, backend="eager")(torch.ones(1, 2)), expected)
adam.step(), adam.zero_grad()
assert torch.optim.Optimizer.zero_grad.__wrapped__.__dynamo_disable is not torch.optim.Optimizer.zero_grad.__wrapped__
"""


@pytest.mark.slow
def test_large_imports_cost_what_they_are_used_for_and_files_that_a_config_leaves_open_are_written(tmp_path: Path) -> None:
    """Also where its functions refer to the files, so that only the end of the process closes them."""
    opened = "log_file = open({!r}, 'w')\nimport torch\nlog_file.write('all of it')\ndef note(): return log_file\n"
    for name in ("one", "two"):
        written(tmp_path, opened.format(str(tmp_path / f"{name}.log")), f"recipe_{name}.py")
    config = written(tmp_path, LARGE_IMPORT + MINIMAL + opened.format(str(tmp_path / "own.log")))
    done = run("-m", "hvdtrain", str(config), "--print-config")
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"{name}.log").read_text() for name in ("own", "one", "two")] == ["all of it"] * 3


def test_every_name_of_a_python_file_is_a_value(tmp_path: Path) -> None:
    values = source(
        tmp_path, "import math\nfrom pathlib import Path\nhalf = 1 / 2\ndef double(x):\n    return 2 * half * x\n"
    ).values
    assert set(values) == {"math", "Path", "half", "double"}
    assert values["double"](3) == 3.0


def test_defaults_and_values_arrive_in_their_sections(tmp_path: Path) -> None:
    made = settings(tmp_path, "num_epochs = 7\nhorovod_reduce_type = 'param'\ndev = 'dev.hdf, more.hdf'\nlog = ['a', 'b']\n")
    assert (made.run.model, made.run.num_epochs, made.batch.max_seqs, made.batch.batch_size) == ("exp/model", 7, 4, None)
    assert (made.reduce.reduce_type, made.log.log, made.schedule.learning_rate) == ("param", ["a", "b"], 0.1)
    assert (made.train.name, made.train.order.seq_ordering) == ("train", "default")
    assert [(spec.name, spec.order.seq_ordering) for spec in made.evaluations] == [("dev", "sorted")]


def test_json_is_a_config_too(tmp_path: Path) -> None:
    values = {
        "model": "exp/model",
        "train": {"class": "HDFDataset", "files": "train.hdf", "seq_ordering": "laplace:.100"},
        "batch_size": {"data": 100},
        "learning_rates": [1, 0.5],
        "get_model": "my_model:get_model",
        "train_step": "my_model:train_step",
        "use_horovod": True,
        "dev": None,
    }
    made = read_settings([written(tmp_path, json.dumps(values), "config.json")], {"num_epochs": "3"})
    assert made.learner.get_model == "my_model:get_model"
    assert made.schedule.learning_rates == [1.0, 0.5]
    assert (made.batch.batch_size, made.train.order.seq_ordering, made.run.num_epochs) == ({"data": 100}, "laplace:.100", 3)
    assert made.reduce.use_horovod is True
    assert made.evaluations == ()
    assert load([written(tmp_path, ' {"a": 1}', "my.config")], {}, {}).values == {"a": 1}


def test_of_several_files_later_ones_see_and_overwrite_earlier_ones(tmp_path: Path) -> None:
    first = written(tmp_path, "a, b = 1, 2\n", "first.py")
    second = written(tmp_path, '{"b": 3, "c": 4}', "second.json")
    third = written(tmp_path, "d = a + b + c\n", "third.py")
    made = load([first, second, third], {}, {})
    assert made.values == {"a": 1, "b": 3, "c": 4, "d": 8}
    assert made.origins == {"a": "first.py", "b": "second.json", "c": "second.json", "d": "third.py"}


def test_a_config_is_a_module_of_its_own(tmp_path: Path) -> None:
    written(tmp_path, "number = 5\n", "beside_the_config.py")
    text = """
from dataclasses import dataclass
from beside_the_config import number
@dataclass
class Point:
    x: int = number
name, place, point = __name__, __file__, Point()
"""
    values = source(tmp_path, text).values
    assert values["place"] == str(tmp_path / "config.py")
    assert values["name"] != "__main__"
    assert values["point"].x == 5
    assert pickle.loads(pickle.dumps(values["point"])) == values["point"]


def test_numpy_values_are_values(tmp_path: Path) -> None:
    rates = "learning_rates = numpy.linspace(0.1, 0.3, 3)\nlearning_rate = numpy.float32(0.5)\n"
    made = settings(tmp_path, "import numpy\nmax_seqs = numpy.int64(8)\n" + rates)
    assert made.schedule.learning_rates == pytest.approx([0.1, 0.2, 0.3])
    assert (type(made.batch.max_seqs), made.batch.max_seqs) == (int, 8)
    assert (type(made.schedule.learning_rate), made.schedule.learning_rate) == (float, 0.5)


def test_rank_and_size_are_known_while_the_config_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_RANK", "2")
    monkeypatch.setenv("HOROVOD_SIZE", "5")
    values = source(tmp_path, "import hvdtrain\nwho = hvdtrain.rank(), hvdtrain.size()\n").values
    assert values["who"] == (2, 5)
    assert (hvdtrain.rank(), hvdtrain.size()) == (2, 5)


# Overrides of the command line


def test_data_in_a_config_is_shown_in_few_words(tmp_path: Path) -> None:
    text = """
import numpy, torch
train = [numpy.zeros((17, 6), "float32"), torch.zeros(5, dtype=torch.int64)] * 1500
class Rows:
    def __len__(self): ...
    def __getitem__(self, index): ...
    def __repr__(self): return "all rows" * 1000
dev = Rows()
eval = {"class": list, "items": [[[0.5] * 100] * 100] * 100, "name": "x" * 10_000}
learning_rates = numpy.full(200, 0.001)
"""
    values = {key.name: key.value for key in effective_keys(settings(tmp_path, text, learning_rate="None"))}
    both = "<float32 (17, 6)>, <int64 (5,)>"
    assert values["train"] == f"[{both}, {both}, <float32 (17, 6)>, ... 2995 more]"
    assert values["dev"] == "<Rows>"
    assert sum(map(len, values.values())) < 20_000
    assert literal_eval(values["learning_rates"]) == [0.001] * 200, "reports read values back"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-0.5", -0.5),
        ("1e-3", 0.001),
        ("true", True),
        ("False", False),
        ("none", None),
        ("2G", "2G"),
        ("[1, 2]", [1, 2]),
        ("{'data': 3}", {"data": 3}),
        ("laplace:.1000", "laplace:.1000"),
        ("", ""),
        ("'quoted'", "quoted"),
        ("[1, 2", "[1, 2"),
        ("__import__('os')", "__import__('os')"),
    ],
)
def test_text_of_the_command_line_is_a_literal_or_text(text: str, value: object) -> None:
    read = text_value(text)
    assert read == value
    assert type(read) is type(value)
    assert text_value(text, str) == text


def test_overrides_are_read_by_the_keys_type(tmp_path: Path) -> None:
    made = settings(tmp_path, model="3", use_horovod="true", num_epochs="2.0", device="none", learning_rate="1")
    assert (made.run.model, made.reduce.use_horovod, made.run.num_epochs, made.learner.device) == ("3", True, 2, None)
    assert (type(made.schedule.learning_rate), made.schedule.learning_rate) == (float, 1.0)
    assert settings(tmp_path, use_horovod="1").reduce.use_horovod is True
    assert settings(tmp_path, use_horovod="0").reduce.use_horovod is False


def test_overrides_win_and_are_seen_by_the_config_while_it_runs(tmp_path: Path) -> None:
    text = "epochs = num_epochs\nseqs = config.int('max_seqs')\nmax_seqs = 4\nname = config.value('name', 'plain')\n"
    made = source(tmp_path, text, {"num_epochs": "9", "max_seqs": "16", "name": "mine"})
    assert made.values == {"num_epochs": 9, "max_seqs": 16, "name": "mine", "epochs": 9, "seqs": 16}
    assert made.origins["max_seqs"] == COMMAND_LINE
    assert made.origins["seqs"] == "config.py"
    assert made.unused == ()


def test_overrides_are_seen_by_functions_that_run_later(tmp_path: Path) -> None:
    """As globals, like those of RETURNN's configs: otherwise ++hidden 128 would train a model of 64."""
    text = "hidden = 64\ntwice = 2 * hidden\ndef get_hidden():\n    return hidden\n"
    made = source(tmp_path, text, {"hidden": "128"})
    assert (made.values["get_hidden"](), made.values["hidden"], made.values["twice"]) == (128, 128, 128)
    assert source(tmp_path, text).values["get_hidden"]() == 64
    text = "data = {'files': str(1), 'parts': 1}\ntrain = {**data}\ndef keys_of_epoch():\n    return {**train}\n"
    assert source(tmp_path, text, {"train.parts": "4"}).values["keys_of_epoch"]() == {"files": "1", "parts": 4}
    made = source(tmp_path, text, {"train": "{'files': 'a'}"}, {"train": dict})
    assert made.values["keys_of_epoch"]() == {"files": "a"}, "a declared key is what the command line says"


def test_overrides_reach_into_dicts(tmp_path: Path) -> None:
    overrides = {"train.seq_ordering": "random", "train.partition_epoch": "4", "optimizer.weight_decay": "0.5"}
    made = settings(tmp_path, "optimizer = {'class': 'adamw', 'weight_decay': 0.1}\n", **overrides)
    assert (made.train.order.seq_ordering, made.train.order.partition_epoch) == ("random", 4)
    assert made.learner.optimizer == {"class": "adamw", "weight_decay": 0.5}


def test_overrides_reach_deep_and_change_a_copy(tmp_path: Path) -> None:
    text = "other = {'x': {'y': {'z': 1}, 'text': 'a'}}\nseen = other\ndef read(): return other\n"
    made = source(tmp_path, text, {"other.x.y.z": "2", "other.x.new": "[3]", "other.x.text": "4"})
    assert made.values["read"]() == made.values["other"] == {"x": {"y": {"z": 2}, "text": "4", "new": [3]}}  # text stays text
    assert made.values["seen"] == {"x": {"y": {"z": 1}, "text": "a"}}
    assert made.origins["other"] == f"config.py and {COMMAND_LINE}"


def test_overrides_that_reach_into_nothing(tmp_path: Path) -> None:
    overrides = {"trian.x": "1", "model.x": "1", "train.files.x": "1", "train.a.b": "1"}
    assert problems(tmp_path, **overrides) == [
        "++trian.x: wrong-type",
        "++model.x: wrong-type",
        "++train.files.x: wrong-type",
        "++train.a.b: wrong-type",
    ]


def test_an_override_that_nobody_reads_is_a_mistake(tmp_path: Path) -> None:
    assert problems(tmp_path, hidden_size="128") == ["hidden_size: unknown-key"]
    misplaced = found(tmp_path, seq_ordering="random", init_method="env://")
    assert faults(misplaced) == ["seq_ordering: unknown-key", "init_method: unknown-key"]
    assert "train.seq_ordering?" in misplaced[0].hint
    assert "torch_distributed.init_method?" in misplaced[1].hint
    assert settings(tmp_path, "layers = config.int('hidden_size', 3)\n", hidden_size="128").run.model == "exp/model"
    lstm = settings(tmp_path, "def cell(): return LSTM(hidden_size=64)\n", hidden_size="128")
    assert lstm.warnings == ("hidden_size in the command line: no file of the config reads it, though one has the word",)
    assert settings(tmp_path, "num_epochs = config.int('epochs', 2)\n", epochs="3").run.num_epochs == 3
    assert settings(tmp_path, "num_epochs = config.typed_dict.get('epochs') or 2\n", epochs="3").run.num_epochs == 3
    computed = "rate = 0.5\nlearning_rate = rate\n"
    assert problems(tmp_path, computed, rate="0.25") == ["++rate: wrong-type"], "the rate would be 0.5"
    [warning] = settings(tmp_path, computed + "def now(): return rate\n", rate="0.25").warnings
    assert ": computed before, with the constant of the file (functions that run later " in warning
    inside = "sizes = {'epochs': 2}\nnum_epochs = sizes['epochs']\n"
    assert problems(tmp_path, inside, **{"sizes.epochs": "3"}) == ["++sizes.epochs: wrong-type"]
    of_key = "num_epochs = 3\nlearning_rates = [0.1] * num_epochs\n"
    assert len(settings(tmp_path, of_key, num_epochs="2").warnings) == 1
    assert settings(tmp_path, of_key, num_epochs="3").warnings == ()


def test_other_names_of_returnn_for_a_key(tmp_path: Path) -> None:
    def newbob(*args: str, **overrides: str) -> NewbobKeys:
        return settings(tmp_path, *args, **overrides).of(NewbobKeys)

    assert newbob("learning_rate_decay = 0.7\n").newbob_learning_rate_decay == 0.7
    assert newbob(learning_rate_growth="1.5").newbob_learning_rate_growth == 1.5
    assert newbob("learning_rate_decay = 0.7\n", learning_rate_decay="0.8").newbob_learning_rate_decay == 0.8


def test_the_command_line_is_files_and_then_pairs() -> None:
    assert parse_command_line(["a.py", "b.json", "++x", "1", "++y", "+-2", "++z.w", "-3", "++f=a=b", "++e=", "++n=-1"]) == (
        [Path("a.py"), Path("b.json")],
        {"x": "1", "y": "-2", "z.w": "-3", "f": "a=b", "e": "", "n": "-1"},
    )


def test_a_config_and_options_may_be_between_the_pairs() -> None:
    assert parse_command_line(["++x", "1", __file__, "++y=2"]) == ([Path(__file__)], {"x": "1", "y": "2"})
    assert parse_command_line(["++load", __file__, __file__]) == ([Path(__file__)], {"load": __file__})
    given = ["c.py", "++x", "1", "--json", "++y=2", "o.hdf", "++z", "+++1", "++w", "++v", "-3", "--out", "b"]
    assert split_overrides(given) == (
        ["c.py", "--json", "o.hdf", "--out", "b"],
        ["++x", "1", "++y=2", "++z", "+++1", "++w", "++v", "-3"],
    )


def test_a_config_may_have_an_equals_sign_in_its_name(tmp_path: Path) -> None:
    (tmp_path / "rate=1.py").touch()
    assert parse_command_line([str(tmp_path / "rate=1.py"), "++x", "1"]) == ([tmp_path / "rate=1.py"], {"x": "1"})


@pytest.mark.parametrize(
    ("arguments", "rule", "said"),
    [
        ([], "missing", "--help"),
        (["a.py", "++x"], "missing", "++x"),
        (["a.py", "++x", "++y", "1"], "missing", "++x"),
        (["a.py", "-x", "1"], "wrong-format", "++x 1?"),
        (["a.py", "--max-seqs", "++y", "1"], "wrong-format", "++max_seqs VALUE?"),
        (["a.py", "--x=1"], "wrong-format", "++x 1?"),
        (["a.py", "x=1", "++y=2"], "wrong-format", "++x 1?"),
        (["a.py", "--sumary"], "wrong-format", "--summary?"),
        (["a.py", "--dryrun"], "wrong-format", "--dry-run?"),
        (["--x", "1", __file__], "wrong-format", "++x 1?"),
        (["a.py", "+x=1"], "wrong-format", "++x 1?"),
        (["a.py", "++x", "1", __file__], "wrong-format", "configs are written first"),
        (["a.py", "++", "b.py"], "wrong-format", "--help"),
    ],
)
def test_command_lines_that_make_no_sense(arguments: list[str], rule: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        parse_command_line(arguments)
    assert faults(caught.value.problems) == [f"command line: {rule}"]


# The object `config`


def test_config_object_reads_what_is_known_so_far() -> None:
    values: dict[str, Any] = {"flag": "yes", "off": 0, "three": "3", "names": ["a", "b"], "text": "a,b", "nothing": None}
    config = ConfigAccess(values)
    assert [config.bool("flag"), config.bool("off"), config.bool("none", True), config.bool("none")] == [True, False, True, None]
    assert [config.is_true("flag"), config.is_true("none"), config.is_true("nothing")] == [True, False, False]
    assert [config.int("three"), config.int("none", 7), config.float("three")] == [3, 7, 3.0]
    assert [config.value("off"), config.value("names"), config.value("none", 5)] == ["0", "a,b", 5]
    assert [config.list("text"), config.list("names"), config.list("none", [])] == [["a", "b"], ["a", "b"], []]
    assert [config.typed_value("names"), config.has("off"), config.has("none")] == [["a", "b"], True, False]
    values["later"] = 1
    assert config.int("later") == 1
    with pytest.raises(ValueError, match="text: expected true or false, got 'a,b'"):
        config.bool("text")


def test_config_object_sees_overrides_and_the_files_own_names(tmp_path: Path) -> None:
    text = """
a = 1
use_horovod = config.bool("use_horovod", False)
b = config.int("a") + 1
known = config.has("b"), config.has("c")
"""
    values = source(tmp_path, text, {"use_horovod": "1"}).values
    assert (values["use_horovod"], values["b"], values["known"]) == (1, 2, (True, False))
    assert source(tmp_path, text).values["use_horovod"] is False
    assert "config" not in values


# Mistakes


def test_five_mistakes_are_five_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """
model = "exp/model"
train = {"class": "HDFDataset", "files": "train.hdf", "seq_ordering": "randomly"}
max_seqs = 0
learning_rat = 0.1
learning_rate = "fast"
def get_model(**_): ...
"""
    status, out, err = ended(capsys, str(written(tmp_path, text)))
    assert (status, out) == (2, "")
    first, *lines, last = err.splitlines()
    assert first == "5 problems in the config:"
    assert last.startswith("python -m hvdtrain help max_seqs train_step learning_rate explains the keys")
    assert [line.split(":")[0].strip() for line in lines] == [
        "learning_rat",
        "max_seqs",
        "train_step",
        "learning_rate",
        "train.seq_ordering",
    ]
    assert "  learning_rat: unknown key in config.py (did you mean learning_rate?)" in lines
    assert "  max_seqs: expected a positive number, or -1 for no limit, got 0 in config.py" in lines
    assert "  learning_rate: expected a number or None, got 'fast' in config.py" in lines


def test_a_module_that_is_imported_on_first_use_is_not_asked_for_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"imported, as it was asked for {name}")

    lazy = Lazy("lazy")
    object.__getattribute__(lazy, "__dict__")["__file__"] = f"{sys.prefix}/lazy.py"
    assert _is_installed(lazy)
    assert _is_installed(object())  # type: ignore[arg-type]  # as somebody may put into sys.modules


def test_a_name_like_a_key_may_be_a_variable_that_the_config_reads(tmp_path: Path) -> None:
    path = tmp_path / "config.py"
    path.write_text(
        "mode = config.value('mode', 'a')\nmax_seq = 5\nmax_seqs = max_seq\nbatch_siz = 3\ndef f(batch_siz): return batch_siz"
    )
    with pytest.raises(ConfigError) as caught:
        read_settings([path], {"mode": "b"})
    assert "batch_siz: unknown key in config.py (did you mean batch_size?)" in str(caught.value)
    assert "mode" not in str(caught.value).replace("model", "")
    assert "max_seq:" not in str(caught.value)
    path.write_text(
        path.read_text().partition("batch_siz")[0] + "train = dev = [[1.0]]\nlearning_rate = 1\nmodel = 'exp/model'\n"
        "def get_model(**_): ...\ntrain_step = get_model\n"
    )
    found = read_settings([path], {}).warnings
    assert "max_seq in config.py: not a key, but the config reads it itself (did you mean max_seqs?)" in found


def test_files_that_are_no_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data.py").write_bytes(b"\xff\xfe\x00")
    for path, message in (
        (tmp_path, "expected a config file, got: Is a directory"),
        (tmp_path / "none.py", "expected a config file, got: No such file or directory"),
        (written(tmp_path, "1 / 0\n"), "1 problem in the config:\n  config.py, line 1: ZeroDivisionError: division by zero\n"),
        (tmp_path / "data.py", "expected a Python or JSON file, got bytes that are not UTF-8"),
        (
            written(tmp_path, '{"a": 1,\n "b" 2}', "broken.json"),
            "broken.json, line 2: expected JSON, got: Expecting ':' delimiter",
        ),
        (written(tmp_path, "[1, 2]", "list.json"), "list.json: expected a JSON object of keys, got a list"),
    ):
        status, _, err = ended(capsys, str(path))
        assert (status, err.count("\n"), message in err) == (2, 2, True), err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = 1\nb = = 2\n", "config.py, line 2: SyntaxError: invalid syntax: b = = 2"),
        ("a = (1,\n", "config.py, line 1: SyntaxError: '(' was never closed"),
        ("a = 1\n\nb = c\n", "config.py, line 3: NameError: name 'c' is not defined"),
        ("def f(x):\n    return 1 / x\n\nf(0)\n", "config.py, line 2: ZeroDivisionError: division by zero"),
        ("\nimport no_such_module\n", "config.py, line 2: ModuleNotFoundError: No module named 'no_such_module'"),
        ("import json\n\n\njson.loads('[')\n", "config.py, line 4: JSONDecodeError: "),
        ("config.bool('__name__')\n", "config.py, line 1: ValueError: __name__: expected true or false"),
    ],
)
def test_exceptions_in_a_config_name_the_line(tmp_path: Path, text: str, expected: str) -> None:
    (problem,) = found(tmp_path, text, minimal="")
    assert str(problem).startswith(expected)


def test_a_config_may_begin_with_the_mark_of_its_encoding(tmp_path: Path) -> None:
    assert read_settings([written(tmp_path, f"\ufeff{MINIMAL}")], {}).run.task == "train"


def test_an_optimizer_that_the_config_has_made_is_refused_with_what_to_give_instead(tmp_path: Path) -> None:
    (mistake,) = found(tmp_path, "optimizer = object()\n")
    assert (mistake.key, mistake.rule) == ("optimizer", "wrong-type")
    assert "def optimizer(parameters)" in mistake.hint


@pytest.mark.parametrize("model", ["", "exp/", "exp/.", ".."])  # names would begin with nothing, or with that of the folder
def test_a_model_ends_in_the_beginning_of_names(tmp_path: Path, model: str) -> None:
    assert problems(tmp_path, model=model) == ["model: wrong-format"]


def test_an_exception_in_a_module_that_the_config_imports_names_the_configs_line(tmp_path: Path) -> None:
    written(tmp_path, "a = 1\n\n\nb = = 2\n", "broken_module.py")
    (problem,) = found(tmp_path, "import broken_module\n", minimal="# first line\n")
    assert problem.key == "config.py, line 2"
    assert "(broken_module.py, line 4)" in str(problem)


def test_misspelt_keys_are_mistakes_and_other_names_are_the_authors_own(tmp_path: Path) -> None:
    text = "num_epoch = 3\nlearnin_rate = 1\ntrian = 3\nhidden = 3\n_max_seq = 1\nimport numpy as modell\nclass modle: ...\n"
    assert problems(tmp_path, text, use_horovd="1") == [
        "num_epoch: unknown-key",
        "learnin_rate: unknown-key",
        "trian: unknown-key",
        "use_horovd: unknown-key",
    ]


def test_closest_key() -> None:
    keys = ["train", "dev", "model", "learning_rate", "learning_rates"]
    assert [closest(name, keys) for name in ("learning_rates_", "modle", "dve", "models", "mode", "x", "traindev")] == [
        "learning_rates",
        "model",
        "dev",
        "model",
        "model",
        None,
        None,
    ]
    assert closest("x", []) is None


def test_keys_of_returnn_that_would_change_the_training_are_mistakes(tmp_path: Path) -> None:
    names = sorted(UNSUPPORTED.keys() - {"dry_run"})
    found = problems(tmp_path, "".join(f"{name} = 2\n" for name in names))
    assert sorted(found) == [f"{name}: unsupported" for name in names]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("num_epochs = 2.5", "num_epochs: wrong-type"),
        ("num_epochs = True", "num_epochs: wrong-type"),
        ("num_epochs = float('nan')", "num_epochs: wrong-type"),
        ("num_epochs = 0", "num_epochs: out-of-range"),
        ("learning_rate = -1.0", "learning_rate: out-of-range"),
        ("use_horovod = 'maybe'", "use_horovod: wrong-type"),
        ("use_horovod = 2", "use_horovod: wrong-type"),
        ("model = 3", "model: wrong-type"),
        ("horovod_reduce_type = 'grads'", "horovod_reduce_type: unknown-value"),
        ("batch_size = {'data': 0.5}", "batch_size: wrong-type"),
        ("learning_rates = [0.1, 'x']", "learning_rates: wrong-type"),
        ("log = ['a', 3]", "log: wrong-type"),
        ("get_model = 3", "get_model: wrong-type"),
        ("import numpy as get_model", "get_model: wrong-type"),
        ("train = {'class': 'HDFDataset'}", "train.files: missing"),
        ("train = {'class': 'Sprint'}", "train.class: unknown-value"),
        ("train['fils'] = 1", "train.fils: unknown-key"),
        ("train['windy'] = 3", "train.windy: unknown-key"),
        ("train['files'] = ['a', 3]", "train.files: wrong-type"),
        ("dev = {'class': 'HDFDataset', 'files': 'x', 'partition_epoch': 0}", "dev.partition_epoch: out-of-range"),
        ("eval_datasets = {'x': {'class': 'HDFDataset'}}", "x.files: missing"),
        ("eval_datasets = ['x']", "eval_datasets: wrong-type"),
    ],
)
def test_values_of_the_wrong_kind(tmp_path: Path, text: str, expected: str) -> None:
    assert problems(tmp_path, text) == [expected]


def test_functions_that_cannot_be_called_as_hvdtrain_calls_them(tmp_path: Path) -> None:
    """All at once, without calling them, with the form that is expected and the line."""
    text = """
def train_step(model, batch): ...
def get_model(): ...
def forward_step(*, model, extern_data, beam, **_): ...
max_seqs = lambda: 3
optimizer = lambda: None
train["seq_ordering"] = lambda number, **_: "random"
load_model_post_hooks = [lambda *, model: None, lambda network: None]
task = "config:report"
def report(folder): ...
"""
    first = MINIMAL.count("\n") + 2
    places = {problem.key: problem.got for problem in found(tmp_path, text) if problem.rule == "wrong-signature"}
    expected = {
        "max_seqs": ("<lambda>()", 3),
        "get_model": ("get_model()", 1),
        "train_step": ("train_step(model, batch)", 0),
        "forward_step": ("forward_step(*, model, extern_data, beam, **_)", 2),
        "optimizer": ("<lambda>()", 4),
        "load_model_post_hooks[1]": ("<lambda>(network)", 6),
        "train.seq_ordering": ("<lambda>(number, **_)", 5),
        "task": ("report(folder)", 8),
    }
    assert places == {key: f"{form} in {tmp_path / 'config.py'}, line {first + line}" for key, (form, line) in expected.items()}


def test_functions_of_other_forms_that_can_be_called(tmp_path: Path) -> None:
    settings(
        tmp_path,
        """
import functools, torch

class Model:
    def __call__(self, **_): ...

def with_first_key(function):
    @functools.wraps(function)
    def step(*, model, extern_data, **_):
        return function(model, next(iter(extern_data.values())))
    return step

@with_first_key
def train_step(model, batch): ...
get_model = Model()
optimizer = torch.optim.SGD
max_seqs = functools.partial(lambda epoch, most: min(epoch, most), most=4)
newbob_learning_rate_decay = abs
task = "config:report"
def report(folder="."): ...
""",
    )


def test_a_forward_step_of_another_form_is_one_mistake(tmp_path: Path) -> None:
    minimal = MINIMAL.replace("def train_step(**_): ...", "def forward_step(model): ...")
    [problem] = problems(tmp_path, 'task = "forward"\nforward_data = "x.hdf"\n', minimal)
    assert problem == "forward_step: wrong-signature"


def test_long_values_are_cut_in_messages(tmp_path: Path) -> None:
    (problem,) = found(tmp_path, "num_epochs = list(range(1000))\n")
    assert problem.got == f"{repr(list(range(1000)))[:77]}... in config.py"


def test_everything_that_is_needed_is_asked_for_at_once(tmp_path: Path) -> None:
    names = ["model", "train", "batch_size", "get_model", "train_step", "learning_rate"]
    assert problems(tmp_path, minimal="") == [f"{name}: missing" for name in names]


def test_config_errors_survive_the_way_to_other_ranks() -> None:
    error = pickle.loads(pickle.dumps(ConfigError(["a: one", "b: two"])))
    assert str(error) == "2 problems in the config:\n  a: one\n  b: two"
    assert [problem.key for problem in error.problems] == ["a", "b"]


# Declaring keys


@dataclass(frozen=True, kw_only=True)
class ExampleKeys:
    """A section of keys."""

    needed: int = key(REQUIRED, "how many")
    part: float = key(0.5, "how much", share)
    either: int | str | None = key(None, "a number or a name", positive)
    choice: bool | Literal["some"] = key(False, "whether")
    table: dict[str, int] = key({"a": 1}, "numbers by name")
    level: Literal[0, 1] = key(0, "how far")


def test_a_section_is_filled_and_checked() -> None:
    filled, wrong = build(ExampleKeys, {"needed": 3.0, "either": "name", "choice": "some", "table": {"b": 2.0}}, "", {})
    assert wrong == []
    assert filled == ExampleKeys(needed=3, part=0.5, either="name", choice="some", table={"b": 2})
    filled, wrong = build(ExampleKeys, {"part": 1.5, "either": -3, "choice": "none"}, "inside.", {"part": "x.py"})
    assert filled is None
    assert faults(wrong) == [
        "inside.needed: missing",
        "inside.part: out-of-range",
        "inside.either: out-of-range",
        "inside.choice: wrong-type",
    ]


def test_of_several_types_the_values_own_comes_first() -> None:
    assert build(ExampleKeys, {"needed": 1, "choice": 1}, "", {})[0].choice is True
    assert build(ExampleKeys, {"needed": 1, "either": "3"}, "", {})[0].either == "3"
    assert build(ExampleKeys, {"needed": 1, "either": 3}, "", {})[0].either == 3


def test_a_literal_number_is_not_mistaken_for_true_or_false() -> None:
    assert build(ExampleKeys, {"needed": 1, "level": 1}, "", {})[0].level == 1
    assert faults(build(ExampleKeys, {"needed": 1, "level": True}, "", {})[1]) == ["level: unknown-value"]


def test_defaults_that_can_be_changed_are_not_shared() -> None:
    first, second = (build(ExampleKeys, {"needed": 1}, "", {})[0] for _ in range(2))
    first.table["b"] = 2
    assert second.table == {"a": 1}


def test_naming_python_in_a_string(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "class Corpus: ...\n", "my_corpus_file.py")
    written(tmp_path, "class Corpus: ...\n", "corpus_beside.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    assert is_reference(f"{path}:Corpus")
    assert resolve(f"{path}:Corpus").__name__ == "Corpus"
    assert resolve("json.decoder:JSONDecoder") is json.JSONDecoder
    for text in ("a.hdf", "a.hdf,b.hdf", "laplace:.1000", "a:b:c", "", 3, None, "my corpus:x"):
        assert not is_reference(text), text
    for text, message in (
        (f"{path}:Missing", "expected a name 'Missing' in"),
        ("no_such_module:x", "ModuleNotFoundError: No module named 'no_such_module'$"),
        ("corpus_beside:Corpus", r"No module named 'corpus_beside' \(did you mean corpus_beside.py:Corpus\?\)"),
        (f"{tmp_path / 'none.py'}:x", "no such file"),
        (f"{written(tmp_path, '1 / 0', 'failing.py')}:x", "ZeroDivisionError: division by zero"),
    ):
        with pytest.raises(ImportError, match=message):
            resolve(text)


def test_a_package_that_hvdtrain_needs_and_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "import h5py\n", "part_with_files.py")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ConfigError, match=r"part_with_files: expected the package h5py, .* got none \(pip install h5py\)"):
        import_part("part_with_files")


# Help


LIGHT = """
import sys
before = set(sys.modules)
import hvdtrain
print("IMPORTED", *sorted(set(sys.modules) - before))
from hvdtrain.cli import main
for arguments in ["--help"], ["help"], ["help", "all"], sys.argv[1:]:
    print("ENDED", main(arguments), *sorted(sys.modules))
"""


def test_neither_help_nor_a_mistake_nor_what_a_config_imports_takes_a_heavy_import(tmp_path: Path) -> None:
    finished = run("-c", LIGHT, str(written(tmp_path, MINIMAL + "num_epoch = 3\n")))
    imported, *ends = (line.split()[1:] for line in finished.stdout.splitlines() if line.startswith(("IMPORTED ", "ENDED ")))
    own = [name for name in imported if name.startswith("hvdtrain.")]
    assert len(own) <= 16
    assert {name.split(".")[1] for name in own} <= {"comm", "context", "disk", "errors", "version"}
    assert not [name for name in imported if name.startswith(("numpy", "h5py"))]
    assert [status for status, *_ in ends] == ["0", "0", "0", "2"], finished.stderr
    frameworks = {"torch", "tensorflow", "horovod", "h5py"}
    for modules in ends[:3]:
        assert not (frameworks | {"mpi4py", "tqdm", "numpy", "http.client", "ssl", "pydoc"}) & set(modules)
    assert not frameworks & set(ends[3]), "for a mistake in a config"
    assert finished.stdout.count("usage: python -m hvdtrain CONFIG") == 2
    assert finished.stderr == "1 problem in the config:\n  num_epoch: unknown key in config.py (did you mean num_epochs?)\n"


@pytest.mark.parametrize("name", ["max_epochs", "seed", "fp16", "weight_decay", "logger", "accum_grad"])
def test_other_trainers_names_of_keys_are_refused_with_ours_where_nothing_reads_them(tmp_path: Path, name: str) -> None:
    expected = f"{name}: unknown key in config.py .here, it is {re.escape(SYNONYMS[name])};"
    with pytest.raises(ConfigError, match=expected):
        settings(tmp_path, f"{name} = 3\n")
    settings(tmp_path, f"{name} = 3\nsomething = {name} + 1\n")
    with pytest.raises(ConfigError, match=f"{name}: unknown key in the command line .did you mean {re.escape(SYNONYMS[name])}"):
        settings(tmp_path, f"# no {name}\n", **{name: "3"})


@pytest.mark.parametrize("code", ["sys.exit()", "sys.exit(0)", "argparse.ArgumentParser().parse_args(['--help'])"])
def test_a_config_that_ends_the_program_is_an_error(tmp_path: Path, code: str) -> None:
    with pytest.raises(
        ConfigError, match=r"config.py, line \d+: expected a config that goes on to its end, got sys.exit\((None|0)\)"
    ):
        settings(tmp_path, f"import argparse, sys\n{code}\n")


def test_a_pipe_that_was_read_already_is_named() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    with pytest.raises(ConfigError, match=rf"/dev/fd/{reading}: expected a config file, got a pipe that is empty"):
        read_settings([Path(f"/dev/fd/{reading}")], {})
    os.close(reading)


def test_a_config_that_sets_up_logging_does_not_silence_us() -> None:
    """`logging.config.dictConfig` disables all loggers that it does not name, and `logging.disable` all there are."""
    logger = logging.getLogger("hvdtrain")
    logger.disabled = True
    logging.disable()
    assert logger.isEnabledFor(logging.CRITICAL)
    logging.disable(logging.NOTSET)


def test_a_config_may_put_its_own_objects_in_place_of_the_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a screen and a file, for example, which many write without `flush`."""
    tee = "class Tee:\n    def write(self, text): written.append(text)\nsys.stdout = sys.stderr = Tee()\n"
    (tmp_path / "config.py").write_text(f"import sys\nwritten = sys.written\n{tee}1 / 0")
    written: list[str] = []
    monkeypatch.setattr(sys, "written", written, raising=False)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    assert main([str(tmp_path / "config.py")]) == 2
    assert "config.py, line 6: ZeroDivisionError" in "".join(written)


def test_a_thread_for_which_the_program_waits_is_named(tmp_path: Path) -> None:
    thread = "threading.Thread(target=time.sleep, args=(5,), name='monitor').start()\n"
    (tmp_path / "config.py").write_text(f"import threading, time\n{thread}{MINIMAL}")
    finished = launch(["-m", "hvdtrain", tmp_path / "config.py", "--print-config"])
    assert finished.status == 0
    assert "waits for threads that the config's code has started: monitor" in finished.err


def test_a_config_is_a_module_like_any_other(tmp_path: Path) -> None:
    """Its annotations are what they say, and its file is the link by which it was named."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "mine.py").write_text(
        MINIMAL + "import os\ndef f(x: int): pass\nkind = f.__annotations__['x']\nhere = __file__\n"
    )
    (tmp_path / "one.py").symlink_to(tmp_path / "base" / "mine.py")
    values = read_settings([tmp_path / "one.py"], {}).source.values
    assert (values["kind"], values["here"]) == (int, str(tmp_path / "one.py"))


POOLS = """
import multiprocessing, random
drawn = random.random()
def scaled(x): return config.int("factor") * x, drawn == x
def noise(_): return random.random()
with multiprocessing.get_context(config.value("method")).Pool(1) as pool:
    print(pool.map(scaled, [1])[0], pool.map(scaled, [drawn])[0][1], pool.map(noise, [1])[0] == random.random())
def later(x): return x
multiprocessing.get_context("spawn").Pool(1).map(later, [1])
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_started_processes_import_the_config(method: str, tmp_path: Path) -> None:
    """A worker of a pool that cannot import its function ends, and is replaced for ever."""
    (tmp_path / "config.py").write_text(MINIMAL + POOLS)
    command = [sys.executable, "-m", "hvdtrain", "config.py", "++factor", "3", "++method", method]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=25)
    assert (ended.returncode, ended.stdout) == (2, "(3, False) True False\n")
    assert re.search(r"later: expected .* up to here only: config.py, line \d+", ended.stderr)


DRAWING = """
import random, numpy, torch
drawn = random.random(), numpy.random.rand(), random.gauss(0, 1), float(torch.rand(1))
"""


def test_what_a_config_draws_is_the_same_in_every_start(tmp_path: Path) -> None:
    """Another split of the data after a restart would evaluate on what was trained on."""
    drawn = [settings(tmp_path, DRAWING, **keys).source.values["drawn"] for keys in ({}, {}, {"random_seed": "7"})]
    assert drawn[0] == drawn[1] != drawn[2]
    assert not settings(tmp_path, "import random, numpy, torch").notes
    for drawing in ("import random\nrandom.random()", "import numpy\nnumpy.random.rand()", "import torch\ntorch.rand(1)"):
        assert "draws random numbers" in settings(tmp_path, drawing).notes[0]
    (tmp_path / "config.py").write_text(f"{MINIMAL}{DRAWING}print(drawn)\n")
    finished = launch(["-m", "hvdtrain", tmp_path / "config.py", "--print-config"])
    assert str(drawn[0]) in finished.out, "in a process in which the config imports PyTorch"


def test_a_config_that_is_read_by_each_rank_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text("import os\nos.mkdir(os.path.dirname(__file__))")
    with pytest.raises(ConfigError, match=r"FileExistsError.*each rank reads the config.*exist_ok=True"):
        read_settings([tmp_path / "config.py"], {})


def unwrapped(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def test_help_explains_every_key() -> None:
    everything = unwrapped(explanation("all"))
    dataset_keys = [declared_key for section in DATASET_SECTIONS for declared_key in declared_keys(section)]
    assert len(all_keys()) > 30
    for declared_key in [*all_keys(), *dataset_keys]:
        assert unwrapped(declared_key.doc) in everything, declared_key.name
        assert unwrapped(declared_key.doc) in unwrapped(explanation(declared_key.name)), declared_key.name


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("max_seqs", "maximal number of sequences in a rank's batch"),
        ("++max_seqs", "topic batch"),
        ("train.partition_epoch", "partition_epoch"),
        ("torch_distributed.backend", "topic torchdistributed"),
        ("MapDataset.num_workers", "worker processes that share the sequences of a batch"),
        ("num_workers", "MapDataset.num_workers"),
        ("batch", "max_seqs"),
        ("KaldiFolder", "folder"),
        ("newbob_multi_num_epochs", "learning_rate_control"),
        ("maximize_grad_norm", "a key of RETURNN that hvdtrain refuses"),
        ("network", "which hvdtrain trains with RETURNN's layers"),
        ("pretrain", "with get_model, hvdtrain refuses it"),
    ],
)
def test_help_knows_keys_topics_and_names_of_returnn(word: str, said: str) -> None:
    assert said in unwrapped(explanation(word))


def test_help_names_what_is_similar() -> None:
    with pytest.raises(LaunchError, match=r"did you mean max_seqs\?"):
        explanation("max_seq")
    with pytest.raises(LaunchError, match=r"none of them \(did you mean horovod_param_group\?\)$"):
        explanation("param_group")
    with pytest.raises(
        LaunchError, match=r"did you mean horovod_param_sync_step or .* or .* or \w+\? \d+ more have it in their names\)"
    ):
        explanation("sync")
    with pytest.raises(LaunchError, match=r"none of them \(here, it is learning_rate\)"):
        explanation("lr")
    with pytest.raises(LaunchError, match=r"descriptions of these keys have it: .*horovod_reduce_type"):
        explanation("gradients")


def test_help_fits_into_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    words = [line for line in explanation("all").splitlines() if len(line) > 60]
    assert all(len(line.split()) == 1 for line in words), "only words that are longer than a line"


def test_the_reader_of_the_output_may_end_early() -> None:
    read, write = os.pipe()
    os.close(read)
    finished = subprocess.run([sys.executable, "-m", "hvdtrain", "help", "all"], stdout=write, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(write)
    assert (finished.returncode, finished.stderr) == (1, b"")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("train", "write python -m hvdtrain CONFIG)"),
        ("summary", "write python -m hvdtrain CONFIG --summary)"),
        ("eval", "write python -m hvdtrain CONFIG ++task eval)"),
        ("predict", "++predict_ranks 2,8)"),
    ],
)
def test_words_that_look_like_commands(word: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word, "config.py"]) == 2
    assert said in capsys.readouterr().err


def test_every_key_in_effect_is_printed_and_the_changed_ones_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*more: str) -> dict[str, str]:
        """The keys with their values and origins."""
        status, out, err = ended(capsys, str(written(tmp_path, MINIMAL)), "++max_seqs", "7", "--print-config", *more)
        assert (status, err) == (0, "")
        return dict(re.findall(r"^(\S.*?) = (.*? +# .*)$", out, re.MULTILINE))

    every = printed()
    assert re.fullmatch("7 +# the command line", every["max_seqs"])
    assert re.fullmatch("0.1 +# config.py", every["learning_rate"])
    assert every["gradient_clip"].endswith("# default")
    assert printed("--changed") == {name: text for name, text in every.items() if not text.endswith("# default")}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_own_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"  {name} " in usage()
    status, out, err = ended(capsys, name, "--help")
    assert (status, err) == (0, "")
    assert f"hvdtrain {name} [" in out or f"hvdtrain {name} CONFIG" in out, out
    status, _, err = ended(capsys, name, "--such-an-option", "++no")
    assert (status, f"hvdtrain {name}: error: " in err) == (2, True), err


def test_constants_that_nothing_reads_are_listed(tmp_path: Path) -> None:
    text = "hidden = 4\nlayers, patiense = 2, [3]\nwidth = 2 * hidden\ndef size():\n    return width\n"
    assert settings(tmp_path, text).notes == ("nothing reads these names of the config: layers, patiense",)
    assert settings(tmp_path).notes == ()


def test_building_horovod_needs_none_of_the_packages() -> None:
    program = (
        "import runpy, sys\n"
        "sys.argv = ['hvdtrain', 'build-horovod', '--help']\n"
        "try:\n"
        "    runpy.run_module('hvdtrain', run_name='__main__')\n"
        "except SystemExit:\n"
        "    print('FOREIGN', sorted(name for name in sys.modules if '.' not in name and name != 'hvdtrain'\n"
        "          and 'site-packages' in str(getattr(sys.modules[name], '__file__', ''))))\n"
    )
    finished = run("-S", "-c", program)  # -S: without site-packages
    assert finished.stdout.splitlines()[-1] == "FOREIGN []", finished.stderr


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (["--max-seqs", "4"], "(a key of a config is written ++max_seqs 4, one of the scheduler --option=--max-seqs=4)"),
        (["max_seqs=4"], "(a key of a config is written ++max_seqs 4, "),
        (["--partition", "gpu"], "(did you mean --queue?)"),
        (["--shedule", "slurm"], "(did you mean --scheduler?)"),
    ],
)
def test_other_commands_know_how_keys_are_written(given: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        submit_parser().parse_args(["config.py", "--scheduler", "slurm", *given])
    assert hint in capsys.readouterr().err


def test_ctrl_c_while_a_config_is_read_shows_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "raise KeyboardInterrupt  # which Python raises on Ctrl-C\n")
    for arguments in ([str(path)], ["prove", str(path)], ["submit", str(path), "--scheduler", "mpi"]):
        assert main(arguments) == 130
        assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(("argument", "status"), [("-m", 130), ("program.py", 1)])
def test_ctrl_c_while_the_package_is_imported_shows_no_traceback_of_its_own_program(argument: str, status: int) -> None:
    code = (
        "import sys\nclass Interrupt:\n    def find_spec(self, name, *_):\n        if name == 'hvdtrain.context':\n"
        f"            raise KeyboardInterrupt\nsys.argv[0] = {argument!r}\nsys.meta_path.insert(0, Interrupt())\n"
        "try:\n    import hvdtrain\nexcept KeyboardInterrupt:\n    sys.exit(1)  # of another program, which gets it"
    )
    finished = run("-c", code)
    assert (finished.returncode, finished.stdout, finished.stderr) == (status, "", "")


def test_a_report_knows_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        report_parser().parse_args(["folder", "--ot", "page.html"])
    assert "(did you mean --out?)" in capsys.readouterr().err


def test_a_config_with_a_commands_name_and_a_misspelt_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dump").write_text(MINIMAL + "num_epochs = 'many'\n")
    monkeypatch.chdir(tmp_path)
    for arguments, said in (
        (["./dump"], "num_epochs: expected an integer"),
        (["dump"], "hvdtrain dump: error"),
        (["train", "config.py"], "train: expected a command or a config file, got neither (write python -m hvdtrain CONFIG)\n"),
        (["./dmp"], "dmp: expected a config file, got: No such file or directory (did you mean dump?)\n"),
        (["dmup", "a.hdf", "b.hdf"], "dmup: expected a command or a config file, got neither (did you mean dump?)\n"),
        (["--local-rank=0", "report", "nowhere"], "nowhere"),  # as torch.distributed.launch does
    ):
        status, _, err = ended(capsys, *arguments)
        assert (status, said in err) == (2, True), err
    assert ended(capsys, "help")[1].startswith("usage: python -m hvdtrain CONFIG")


def test_no_key_is_declared_twice_and_every_one_is_documented() -> None:
    names = [declared_key.name for declared_key in all_keys()]
    assert len(names) == len(set(names))
    assert all(declared_key.doc and "\n" not in declared_key.doc for declared_key in all_keys())
    assert not set(names) & set(UNSUPPORTED)


def test_datasets_that_stand_in_each_others_way(tmp_path: Path) -> None:
    wrong = problems(tmp_path, "train = None\ndev = 'dev.hdf'\neval_datasets = {'dev': 'other.hdf'}\n")
    assert wrong == ["train: missing", "eval_datasets.dev: conflict"]


RAISING = """
def data():
    raise RuntimeError("no such disk on the login node")
def eval():
    return {"class": "HDFDataset", "file": "b.hdf"}
train, dev = data, {"class": "CombinedDataset", "datasets": {"a": data}, "data_map": {("a", "data"): "data"}}
"""


def test_functions_for_data_are_called_when_the_data_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(written(tmp_path, MINIMAL + RAISING))
    monkeypatch.chdir(tmp_path)
    status, out, err = ended(capsys, config, "--print-config")
    assert (status, err) == (0, "")
    assert re.search(r"^train = <function data in config.py> +# config.py$", out, re.MULTILINE)
    status, _, err = ended(capsys, "submit", config, "--scheduler", "slurm")
    assert status == 0, err
    status, _, err = ended(capsys, config)
    assert status == 2
    raised = "expected a function that returns a dataset, got RuntimeError: no such disk on the login node (config.py, line "
    assert f"train: {raised}" in err
    assert f"dev.datasets.a: {raised}" in err
    assert "eval.files: expected" in err
    assert not (tmp_path / "model").exists()


def test_what_functions_return_is_checked_before_training(tmp_path: Path) -> None:
    order = "def train():\n    return {'class': 'HDFDataset', 'files': ['a.hdf'], 'seq_ordering': order, 'partition_epoch': 3}\n"
    apart = order + "partition_epoch, horovod_dataset_distribution = 3, 'random_seed_offset'\n"
    made = with_datasets(settings(tmp_path, apart + "order = 'random'\n"))
    assert (made.train.order.seq_ordering, made.train.files, made.misplaced_keys) == ("random", ("a.hdf",), ())
    assert callable(made.data.train)
    with refused("horovod_dataset_distribution: conflict"):
        with_datasets(settings(tmp_path, apart + "order = 'sorted'\n"))


def test_keys_of_a_dataset_outside_of_its_dict_are_reported(tmp_path: Path) -> None:
    used = "partition_epoch = 3\ntrain = {'class': 'HDFDataset', 'files': ['a.hdf'], 'partition_epoch': partition_epoch}\n"
    assert settings(tmp_path, used).misplaced_keys == ()
    assert settings(tmp_path, "seq_ordering = 'random'\n").misplaced_keys == (
        'seq_ordering in config.py: read in the dict of a dataset only, such as train = {"class": ..., "seq_ordering": ...}',
    )


def test_both_names_of_a_key_and_keys_of_returnn_that_ask_for_nothing(tmp_path: Path) -> None:
    both = "learning_rate_decay = 0.7\nnewbob_learning_rate_decay = 0.8\nchunking = None\n"
    assert problems(tmp_path, both) == ["learning_rate_decay: conflict"]
    settings(tmp_path, "chunking = '0'\ngradient_noise = 0.0\naccum_grad_multiple_step = 1\n")


def test_orders_of_their_own_need_an_order_that_is_random(tmp_path: Path) -> None:
    offset = "horovod_dataset_distribution = 'random_seed_offset'\n"
    assert problems(tmp_path, offset) == ["horovod_dataset_distribution: conflict"]
    assert problems(tmp_path, offset + "train['seq_ordering'] = 'random'\ntrain['fixed_random_seed'] = 1\n")
    settings(tmp_path, offset + "train['seq_ordering'] = 'laplace:.10'\n")


# Spellings


def test_a_key_has_the_value_of_the_spelling_that_wins(tmp_path: Path) -> None:
    step = "horovod_reduce_type, horovod_param_sync_step = 'param', 7\n"
    assert settings(tmp_path, step).reduce.sync_steps == 7
    both = settings(tmp_path, step + "torch_distributed = {'param_sync_step': 3, 'param_sync_delay': None}\n")
    assert (both.reduce.sync_steps, both.reduce.sync_delay, both.reduce.reduce_type) == (3, 0, "param")
    assert (
        settings(tmp_path, step + "torch_distributed = {'param_sync_step': 3}\n", torch_distributed="None").reduce.sync_steps == 7
    )
    shown = {key.name: (key.value, key.origin) for key in effective_keys(both)}
    assert shown["horovod_param_sync_step"] == ("3", "config.py")


RULE = "{'class': 'quadratic', 'alpha': 1}"


@pytest.mark.parametrize(
    ("text", "overrides", "found"),
    [
        ("torch_distributed = {'param_sync_step': 10}", {"horovod_param_sync_step": "100"}, 100),
        ("horovod_param_sync_step, torch_distributed = 10, {}", {"torch_distributed.param_sync_step": "100"}, 100),
        ("horovod_param_sync_step = 10", {"torch_distributed": "{'param_sync_step': 100}"}, 100),
        ("torch_distributed = {}", {"horovod_param_sync_step": "5", "torch_distributed.param_sync_step": "100"}, 100),
        ("torch_distributed = {}", {"torch_distributed.param_sync_step": "5", "horovod_param_sync_step": "100"}, 100),
        ("torch_distributed = {}", {"torch_distributed": "{'param_sync_step': 5}", "horovod_param_sync_step": "100"}, 100),
        (
            f"horovod_param_sync_rule, torch_distributed = {RULE}, {{'param_sync_rule': {RULE}}}",
            {"horovod_param_sync_rule.alpha": "7"},
            7,
        ),
        ("torch_amp = 'float16'", {"mixed_precision": "bfloat16"}, "bfloat16"),
        ("mixed_precision = 'float16'", {"torch_amp": "bfloat16"}, "bfloat16"),
        ("train['seq_ordering'] = 'sorted'", {"batching": "random"}, "random"),
        ("batching = 'sorted'", {"train.seq_ordering": "random"}, "random"),
        ("dist_world_size, dist_rank, torch_distributed = 2, 0, {'rank': 0}", {"dist_rank": "1"}, 1),
    ],
)
def test_the_command_line_wins_whatever_the_spelling(tmp_path: Path, text: str, overrides: dict[str, str], found: object) -> None:
    got = settings(tmp_path, f"horovod_reduce_type = 'param'\n{text}\n", **overrides)
    values = [got.reduce.sync_steps, got.precision.mixed_precision, got.train.order.seq_ordering, got.launch.dist_rank]
    assert found in [*values, *(got.reduce.sync_rule or {}).values()]


def test_a_later_file_wins_whatever_the_spelling(tmp_path: Path) -> None:
    first, second = {"torch_amp": "float16", "torch_distributed": {"scale_lr": True}}, {"horovod_scale_lr": "sqrt"}
    got = read_settings([written(tmp_path, MINIMAL), first, second | {"mixed_precision": "bfloat16"}], {})
    assert (got.reduce.learning_rate_scale, got.precision.mixed_precision) == ("sqrt", "bfloat16")


def test_problems_name_the_spelling_that_the_config_has(tmp_path: Path) -> None:
    old = "horovod_reduce_type, horovod_param_sync_step, horovod_param_sync_delay = 'param', 2, 5\n"
    assert problems(tmp_path, old) == ["horovod_param_sync_delay: conflict"]
    new = "torch_distributed = {'reduce_type': 'param', 'param_sync_step': 2, 'param_sync_delay': 5}\n"
    assert problems(tmp_path, new) == ["torch_distributed.param_sync_delay: conflict"]
    wrong = "horovod_param_sync_step, torch_distributed = 0, {'param_sync_step': 'x'}\n"
    assert problems(tmp_path, wrong) == ["horovod_param_sync_step: out-of-range", "torch_distributed.param_sync_step: wrong-type"]
    assert problems(tmp_path, "torch_distributed = {'param_sync_stp': 2}\n") == ["torch_distributed.param_sync_stp: unknown-key"]


def test_overrides_and_later_files_reach_the_functions_of_other_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "sizes_of_all.py").write_text("hidden, half = 64, 32\nwide = half * 2\n")
    (tmp_path / "shared_model.py").write_text("from sizes_of_all import *\n\n\ndef get_model():\n    return hidden, half\n")
    (tmp_path / "one.py").write_text("from shared_model import *\ndepth = 1\ndef step(): return hidden, depth\n")
    (tmp_path / "two.py").write_text("depth = 2\n")
    configs = [tmp_path / "one.py", tmp_path / "two.py"]
    with separate_imports(configs):
        values = load(configs, {"hidden": "16"}, {}).values
        assert (values["get_model"](), values["step"]()) == ((16, 32), (16, 2))
    with separate_imports(configs):
        values = load(configs, {"depth": "3"}, {}).values
        assert (values["get_model"](), values["step"]()) == ((64, 32), (64, 3))
    (tmp_path / "rates.py").write_text("weight_decay = 0.1\ndef decay(): return weight_decay\n")
    (tmp_path / "three.py").write_text(CONFIG + "from rates import *\n")
    with separate_imports(configs):
        assert read_settings([tmp_path / "three.py"], {"weight_decay": "9"}).source.values["decay"]() == 9
    with separate_imports(configs), pytest.raises(ConfigError, match=r"\+\+wide: .* got one that sizes_of_all"):
        load(configs, {"wide": "3"}, {})
    sys.path.append(str(tmp_path))
    program = importlib.import_module("shared_model")  # not only the config imports it
    with separate_imports(configs):
        assert load(configs, {"hidden": "16"}, {}).values["step"]() == (16, 2)
        assert program.get_model() == (16, 32)
    assert program.get_model() == (64, 32)
    for name in ("shared_model", "sizes_of_all"):
        del sys.modules[name]


def test_paths_of_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "config.py").write_text(CONFIG + "log = ['~/log', './~b']\n")
    settings = read_settings([tmp_path / "config.py"], {"model": "~/exp/model"})
    assert (settings.run.model, settings.log.log) == ("/home/me/exp/model", ["/home/me/log", "./~b"])
