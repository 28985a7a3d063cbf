"""Values that mean off, default or another key's value in RETURNN, and that hvdtrain takes as RETURNN does."""

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from launching import ROOT, faults

from hvdtrain.config.missing import import_failure
from hvdtrain.errors import CheckpointError, ConfigError
from hvdtrain.plugins.chunks.fixed import make_chunks
from hvdtrain.plugins.chunks.keys import ChunkKeys
from hvdtrain.plugins.cleanup.keys import OldModelsKeys
from hvdtrain.plugins.forward.task import forward_all
from hvdtrain.plugins.returnn.names import ALIASES, NO_OPS, READ_BY_RETURNN, UNSUPPORTED
from hvdtrain.plugins.returnn.values import OFF, convert_values, is_off
from hvdtrain.run import train
from hvdtrain.settings import BOOLEAN_KEYS, Settings, all_keys, read_settings

CONFIG = """
import torch
import returnn.frontend as rf
train = {"class": "Task12AXDataset", "num_seqs": 4}
extern_data = {"data": {"dim": 9}, "classes": {"dim": 2, "sparse": True, "available_for_inference": False}}
model, learning_rate, num_epochs, max_seqs, num_threads = MODEL, 0.1, 1, 4, 1
def get_model(**_):
    return torch.nn.Linear(9, 2)
def train_step(*, model, extern_data, **_):
    rf.get_run_ctx().mark_as_loss(model(extern_data["data"].raw_tensor).square().sum(), "some")
"""


def settings(folder: Path, more: str = "", **overrides: str) -> Settings:
    (folder / "my.config").write_text(CONFIG.replace("MODEL", repr(str(folder / "model"))) + more)
    return read_settings([folder / "my.config"], overrides)


@cache
def tool() -> ModuleType:
    """tools/returnn_keys.py, which reads RETURNN's source once."""
    spec = importlib.util.spec_from_file_location("returnn_keys", ROOT / "tools" / "returnn_keys.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    made.reads = cache(made.reads)  # type: ignore[attr-defined]
    return made


@pytest.mark.slow
def test_the_page_is_that_of_the_installed_returnn() -> None:
    """All but a few lines, as another version may be installed; those of hvdtrain's own keys are as the code says now."""
    page = (ROOT / "docs" / "returnn_keys.md").read_text().splitlines()
    now = tool().page().splitlines()
    assert len(set(page) ^ set(now)) < 40
    assert len(now) > 250
    own = {line.split("|")[1]: line.split("|")[3:] for line in now if line.startswith("| `")}
    for line in page:
        if line.startswith("| `") and line.split("|")[1] in own:
            assert line.split("|")[3:] == own[line.split("|")[1]], "tools/returnn_keys.py --page > docs/returnn_keys.md"


@pytest.mark.slow
def test_the_names_are_those_of_the_installed_returnn() -> None:
    """All but a few, as another version may be installed."""
    assert len(READ_BY_RETURNN ^ set(tool().names())) < 15


def test_chunks_and_packed_batches_are_those_of_the_engine_for_pytorch(tmp_path: Path) -> None:
    """In RETURNN 1.2026: torch/data/pipeline.py. Its engine for TensorFlow has another rule for the last chunk."""
    found = settings(tmp_path, "chunking = '5:5'\nmin_chunk_size = 3\npacked_batch_size_train = 7\n")
    made = make_chunks({"data": numpy.array([13, 2])}, found.of(ChunkKeys))
    assert made is not None
    assert made.lengths["data"].tolist() == [5, 5, 3]
    assert found.batch.training_keys().limits(1).packed_batch_size == 7
    assert found.batch.evaluation_keys().limits(1).packed_batch_size is None
    (problem,) = rejected(tmp_path, "packed_batch_cost_dev", {"cost": 1})
    assert problem.startswith("packed_batch_cost_dev")


def test_datasets_are_evaluated_in_returnns_order(tmp_path: Path) -> None:
    several = "eval_datasets = {name: train for name in ('test', 'dev', 'more')}\n"
    assert [spec.name for spec in settings(tmp_path, several).datasets] == ["train", "test", "dev", "more"]
    assert [spec.name for spec in settings(tmp_path, several + "eval = train\n").datasets][1:] == ["eval", "test", "dev", "more"]


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("CombinedDataset", "'seq_ordering': 'random_dataset'"),
        ("MetaDataset", "'seq_list_file': 'all'"),
        ("ConcatDataset", "'datasets': [{**train, 'repeat_epoch': 2}]"),
    ],
)
def test_orders_that_only_returnn_has(tmp_path: Path, kind: str, more: str) -> None:
    given = {"datasets": "{'one': train}", "data_map": "{('one', 'data'): 'data'}" if kind == "CombinedDataset" else "{}"}
    entries = ", ".join(f"{name!r}: {value}" for name, value in given.items() if kind != "ConcatDataset" or name != "data_map")
    with pytest.raises(ConfigError, match=f"for the batches of RETURNN's {kind}, put the dict into .'class': 'ReturnnDataset'"):
        settings(tmp_path, f"train = {{'class': {kind!r}, {entries}, {more}}}\n")


def rejected(folder: Path, name: str, value: Any) -> list[str]:
    """The problems of a config in which a key has a value, in a form for RETURNN."""
    text = f"{name} = float('inf')\n" if value == float("inf") else f"{name} = {value!r}\n"
    try:
        settings(folder, text)
    except ConfigError as error:
        return faults(error.problems)
    return []


@pytest.mark.parametrize("name", sorted(OFF))
def test_every_value_that_means_off_is_taken(tmp_path: Path, name: str) -> None:
    for value in OFF[name][0]:
        assert rejected(tmp_path, name, value) == [], value


NOT_TRIED = {"backend", "batch_size", "cache_size", "device", "log", "max_seqs", "model", "optimizer", "random_seed", "train"}
"""Keys that a training needs, or whose defaults in the source are what RETURNN continues with, and no values of the key."""


@pytest.mark.slow
def test_returnns_own_defaults_are_taken(tmp_path: Path) -> None:
    """Those that its source says as constants."""
    own = ({key.name for key in all_keys()} | set(ALIASES)) - NOT_TRIED
    tried, refused = 0, {}
    for name, found in tool().reads().items():
        for _, default in found if name in own else ():
            if re.fullmatch(r"'[^']*'|-?[\d.e-]+|None|True|False|\{\}|\[\]", default):
                tried += 1
                if problems := rejected(tmp_path, name, ast.literal_eval(default)):
                    refused[name, default] = problems
    assert refused == {}
    assert tried > 50


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_refused_keys_may_be_off(tmp_path: Path, name: str) -> None:
    for value in (None, False, 0, 0.0, "", [], {}, "false", "off", "0", *NO_OPS.get(name, ())):
        assert rejected(tmp_path, name, value) == [], value


@pytest.mark.parametrize(
    ("value", "expected"), [(True, True), (1, True), ("true", True), ("On", True), (None, False), ("no", False)]
)
def test_every_spelling_of_true_and_false(tmp_path: Path, value: Any, expected: bool) -> None:
    """Of all keys that are true or false."""
    names = sorted(BOOLEAN_KEYS - {"use_horovod", "deterministic"})
    assert len(names) > 10
    text = "".join(f"{name} = {value!r}\n" for name in names)
    (tmp_path / "all.config").write_text(text)
    found: list[str] = []
    try:
        assert settings(tmp_path, text).log.log_batch_size is expected
    except ConfigError as error:  # some keys do not go together
        found = [str(problem) for problem in error.problems if problem.rule == "wrong-type"]
    assert not found


def test_what_is_not_off() -> None:
    assert not is_off("gradient_clip", 1e-9)
    assert not is_off("dev", [])
    assert not is_off("newbob_learning_rate_decay", 0)
    assert convert_values(
        {"newbob_learning_rate_decay": None, "stop_on_nonfinite_train_score": None}, {}, ["stop_on_nonfinite_train_score"]
    ) == (
        {"newbob_learning_rate_decay": 1.0, "stop_on_nonfinite_train_score": False},
        [],
    )


def test_keys_of_tensorflow_have_no_effect_with_pytorch(tmp_path: Path) -> None:
    text = "backend = 'torch'\nnetwork, optimizer_epsilon, pretrain, context_window = {'output': {}}, 1e-8, 'default', 5\n"
    made = settings(tmp_path, text)
    [note] = made.notes
    assert set(note.partition(": ")[2].split(", ")) == {"network", "optimizer_epsilon", "pretrain", "context_window"}
    assert made.of(ChunkKeys).context_window is None
    own = text.replace("backend", "import sys\nbackend")
    (tmp_path / "own.py").write_text(CONFIG.replace("MODEL", "'m'").replace("import returnn.frontend as rf", "") + own)
    with pytest.raises(ConfigError) as caught:
        read_settings([tmp_path / "own.py"], {})
    assert sorted(problem.key for problem in caught.value.problems) == ["network", "optimizer_epsilon", "pretrain"]


def test_a_rule_of_cleanup_that_is_no_dict_is_the_default_one(tmp_path: Path) -> None:
    """As in RETURNN, which takes a dict in a tuple, from a comma too many, for True."""
    made = settings(tmp_path, "cleanup_old_models = {'keep_last_n': 9},\n")
    assert made.of(OldModelsKeys).cleanup_old_models is True
    assert [line.partition(":")[0] for line in made.warnings] == ["cleanup_old_models"]


def test_torch_distributed_wins_over_use_horovod(tmp_path: Path) -> None:
    """i6_core writes both. On the command line, they are a contradiction."""
    both = "use_horovod, torch_distributed = 'true', {'reduce_type': 'param', 'param_sync_step': 3}\n"
    made = settings(tmp_path, both)
    assert not made.reduce.use_horovod
    assert made.torch_distributed is not None
    assert made.reduce.sync_steps == 3
    assert any(line.startswith("use_horovod: without effect") for line in made.warnings)
    with pytest.raises(ConfigError, match="use_horovod, torch_distributed: expected one of them"):
        settings(tmp_path, both, use_horovod="1")
    assert settings(tmp_path, both, torch_distributed="None").reduce.use_horovod


FORWARD = """
task, forward_data = "forward", "dev"
dev = train
del train, train_step, learning_rate, num_epochs, model
def forward_step(*, model, extern_data, **_):
    rf.get_run_ctx().mark_as_default_output(model(extern_data["data"].raw_tensor))
class forward_callback:
    def init(self, *, model):
        torch.save(model.state_dict(), "seen.pt")
    def process_seq(self, *, seq_tag, outputs):
        with open("tags", "a") as file:
            print(seq_tag, file=file)
    def finish(self):
        pass
"""


@pytest.mark.parametrize("key", ["load", "import_model_train_epoch1", "preload_from_files"])
def test_forward_without_a_saved_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """As i6_core's forward jobs: outputs go to the working folder, and the config says elsewhere which model it is."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    weights = torch.nn.Linear(9, 2).state_dict()
    torch.save({"model": weights, "epoch": 3, "step": 30}, tmp_path / "trained.003.pt")
    value: Any = str(tmp_path / "trained.003.pt")
    if key == "preload_from_files":
        value = {"all": {"filename": value, "checkpoint_key": "model"}}
    forward_all(settings(tmp_path, FORWARD + f"{key} = {value!r}\n"))
    assert sorted(path.name for path in Path().iterdir()) == ["seen.pt", "tags"]
    assert len(Path("tags").read_text().splitlines()) == 4
    seen = torch.load("seen.pt", weights_only=True)
    assert all(torch.equal(seen[name], weights[name]) for name in weights)


def test_forward_without_any_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"load: expected a trained model, got no file such as forward.001.pt .set load"):
        forward_all(settings(tmp_path, FORWARD))


def test_names_of_eval_datasets(tmp_path: Path) -> None:
    made = settings(tmp_path, "eval_datasets = {'dev': dict(train), 'devtrain': dict(train)}\n")
    assert [spec.name for spec in made.datasets] == ["train", "dev", "devtrain"]
    with pytest.raises(ConfigError, match="eval_datasets.dev: expected either it or the key dev, got both, and two datasets"):
        settings(tmp_path, "dev, eval_datasets = train, {'dev': {'class': 'Task12AXDataset', 'num_seqs': 9}}\n")
    with pytest.raises(ConfigError, match="eval_datasets.train: expected a name other than train"):
        settings(tmp_path, "eval_datasets = {'train': train}\n")


def test_a_training_with_what_published_configs_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A measure that no score has, limits of data keys that are not there, arguments of older engines, RETURNN's dummy data."""
    more = """
gradient_clip, gradient_clip_global_norm = 0.0, 0
max_seq_length, min_seq_length = {"words": 3}, {"words": 1}
learning_rate_control, learning_rate_control_error_measure = "newbob_multi_epoch", "dev_score_ce"
use_dummy_datasets, train_dummy_dataset_num_seqs = True, 8
eval_datasets, train = {"dev": 1}, 1
num_epochs, log_verbosity = 2, 4
def train_step(*, model, extern_data, global_train_step, **_):
    assert isinstance(global_train_step, int)
    rf.get_run_ctx().mark_as_loss(model(extern_data["data"].raw_tensor).square().sum(), "ce")
"""
    train(settings(tmp_path, more))
    told = capsys.readouterr().out
    for name in ("max_seq_length", "min_seq_length"):
        assert f"{name}: without effect for 'words': the data keys of train are " in told
    assert "learning_rate_control_error_measure: no score 'dev_score_ce' exists, so dev_loss_ce is used" in told
    assert told.count("no score 'dev_score_ce' exists") == 1
    assert "train: 8 sequences" in told


def test_epoch_is_that_of_the_model_in_the_task_eval(tmp_path: Path) -> None:
    """It had no effect: the last epoch was evaluated. RETURNN ignores it where `load` is a file, and in other tasks."""
    assert settings(tmp_path, task="eval", epoch="3").start.load_epoch == 3
    assert settings(tmp_path, task="eval", epoch="3", load="some").start.load_epoch is None
    assert settings(tmp_path, epoch="3").start.load_epoch is None
    with pytest.raises(ConfigError, match="epoch: expected either epoch or load_epoch"):
        settings(tmp_path, "epoch, load_epoch = 3, 2\n", task="eval")


def test_what_returnns_engine_does_otherwise_is_in_the_log(tmp_path: Path) -> None:
    """Keys that only its engines for TensorFlow and JAX read, and the order of a MetaDataset."""
    member = {"class": "HDFDataset", "files": ["a.hdf"]}
    for more, is_said in (("", True), (", 'seq_ordering': 'random'", False)):
        text = f"member = {member!r}\nmember = {{**member{more}}}\nbatching, max_pad_size = 'random', 60\n"
        meta = "{'class': 'MetaDataset', 'datasets': {'a': member}, 'data_map': {'data': ('a', 'data')}, "
        made = settings(tmp_path, text + f"train = {meta}'seq_order_control_dataset': 'a'}}\n")
        assert "max_pad_size: RETURNN's engine for PyTorch does not read it" in made.notes
        assert ("train: ordered by 'random', in RETURNN by the seq_ordering of 'a' alone" in made.notes) == is_said


def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    made = settings(tmp_path, "dry_run = 'true'\ndel model\n")
    assert made.run.task == "dry_run"


def test_code_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which module, who imports it, and where it was looked for."""
    recipe = tmp_path / "recipe" / "some_recipe"
    recipe.mkdir(parents=True)
    (recipe / "__init__.py").write_text("")
    (recipe / "net.py").write_text("\nfrom some_recipe.parts.layers import Layer\n")
    (recipe / "older.py").write_text("def first():\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path / "recipe")
    for line, expected in {
        "import some_recipe.net": rf"my.config, line 12: ModuleNotFoundError: No module named 'some_recipe.parts', imported by "
        rf"{recipe}/net.py, line 2; looked in the package some_recipe: {recipe} .add its folder to PYTHONPATH",
        "sys.path.append('/not/there')\nimport some_thing_else": "my.config, line 13: ModuleNotFoundError: No module named "
        "'some_thing_else'; looked in sys.path: ",
        "from some_recipe.older import second": rf"my.config, line 12: ImportError: cannot import name 'second' .*"
        rf".that module is {recipe}/older.py: another version",
    }.items():
        with pytest.raises(ConfigError, match=expected):
            settings(tmp_path, f"import sys\n{line}\n")
    assert import_failure(ImportError("no reason")) == "ImportError: no reason"


NETWORK = """
use_tensorflow = True
network = {"output": {"class": "softmax", "loss": "ce"}}
extern_data = {"data": (9, 2), "classes": [2, 1]}
train = {"class": "HDFDataset", "files": ["train.hdf"]}
cleanup_old_models = {"keep_last_n": 3, "ignore_score_keys": ["dev_error_ctc", "train_score"]}
batch_size, model = 100, "m"
"""


def test_older_spellings_in_a_config_with_a_network(tmp_path: Path) -> None:
    """Pairs in `extern_data`, and RETURNN's names of scores."""
    (tmp_path / "network.config").write_text(NETWORK)
    made = read_settings([tmp_path / "network.config"], {})
    assert [(entry.sparse, entry.shape, entry.dim) for entry in made.expected.values()] == [(False, (9,), None), (True, (), 2)]
    assert made.of(OldModelsKeys).cleanup_old_models == {
        "keep_last_n": 3,
        "ignore_score_keys": ["dev_loss_error_ctc", "train_loss_score"],
    }
