"""Keys of RETURNN: honoured, accepted because they ask for nothing, refused with advice, or logged."""

import re
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, faults

from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.config.keys import declared_keys
from hvdtrain.data.config_datasets import parse
from hvdtrain.data.plan.order_keys import OrderKeys
from hvdtrain.errors import ConfigError
from hvdtrain.plugins.cache.budget import Budget
from hvdtrain.plugins.hdf_tools.writer import HDFWriter
from hvdtrain.plugins.returnn.dataset_dicts import RETURNN_ENTRIES
from hvdtrain.plugins.returnn.names import ALIASES, ELSEWHERE, NO_OPS, READ_BY_RETURNN, UNSUPPORTED
from hvdtrain.plugins.returnn.networks import OF_THE_ENGINE
from hvdtrain.run import train
from hvdtrain.settings import Settings, all_keys, read_settings
from hvdtrain.start_up.data import open_datasets

CONFIG = """
import torch
train = {"class": "Task12AXDataset", "num_seqs": 4}
model, learning_rate, num_epochs, max_seqs, num_threads = MODEL, 0.1, 1, 4, 1
def get_model(**_):
    return torch.nn.Linear(9, 2)
def train_step(*, model, extern_data, **_):
    import hvdtrain
    hvdtrain.get_run_ctx().mark_as_loss(model(extern_data["data"].raw_tensor).square().sum(-1), "some")
"""


def settings(folder: Path, more: str = "", **overrides: str) -> Settings:
    (folder / "config.py").write_text(CONFIG.replace("MODEL", repr(str(folder / "model"))) + more)
    return read_settings([folder / "config.py"], overrides)


def hdf(**entries: Any) -> dict[str, Any]:
    return {"class": "HDFDataset", "files": ["a.hdf"], **entries}


ACCEPTED: list[dict[str, Any]] = [
    {"name": "train", "estimated_num_seqs": 100, "use_cache_manager": True, "unique_seq_tags": False},
    {"window": 1, "context_window": {"data": 1}, "chunking": None, "min_chunk_size": {"data": 0}, "chunking_variance": 0.0},
    {"context_window": None, "chunking": "0", "shuffle_frames_of_nseqs": 0, "seq_order_seq_lens_file": None},
    {"partition_epoch": None, "repeat_epoch": None, "random_seed_offset": None, "_num_shards": 1, "_shard_index": 0},
    {"cache_byte_size": 0},
]


@pytest.mark.parametrize("entries", ACCEPTED)
def test_entries_of_datasets_that_ask_for_nothing(entries: dict[str, Any]) -> None:
    inside = {"class": "MapDataset", "dataset": hdf(**entries), "map_seq": lambda arrays: arrays, **entries}
    for value in (hdf(**entries), {"class": "Task12AXDataset", "num_seqs": 3, **entries}, inside):
        spec, problems = parse("train", value, {})
        assert problems == []
        assert spec is not None
        assert (spec.order.partition_epoch, spec.order.repeat_epoch, spec.order.random_seed_offset) == (1, 1, 0)


REFUSED: dict[str, tuple[Any, str]] = {
    "unique_seq_tags": (True, "None or False, .*got True .leave repeated sequences out"),
    "window": (3, "None or 1, .*got 3 .stack the frames in the model"),
    "context_window": ({"data": 5}, "None or 1, .*got {'data': 5} .stack the frames"),
    "chunking": ("50:25", "None or 0 or '0', .*got '50:25' .set the key chunking outside of the dict"),
    "min_chunk_size": (3, "None or 0, .*set the key min_chunk_size outside"),
    "chunking_variance": (0.1, "None or 0, "),
    "shuffle_frames_of_nseqs": (2, "None or 0, .*map_seq"),
    "seq_order_seq_lens_file": ("lens", "None, .*got 'lens' .sequences are sorted by their own"),
    "_num_shards": (2, "1, .*the ranks share"),
    "_shard_index": (1, "0, .*the ranks share"),
}


@pytest.mark.parametrize("name", [name for name, (nothing, _) in RETURNN_ENTRIES.items() if nothing is not None])
def test_entries_of_datasets_with_a_meaning_say_what_to_do_instead(name: str) -> None:
    value, message = REFUSED[name]
    for where, dataset in {
        "train": hdf(**{name: value}),
        "dev.dataset": {"class": "MapDataset", "dataset": hdf(**{name: value})},
    }.items():
        if "." in where:
            dataset["map_seq"] = lambda arrays: arrays
        _, problems = parse(where.split(".")[0], dataset, {})
        assert len(problems) == 1
        assert problems[0].key == f"{where}.{name}"
        with pytest.raises(ConfigError, match=message):
            raise ConfigError(problems)


def test_the_cache_of_a_dataset(tmp_path: Path) -> None:
    """RETURNN's number of bytes in the dict, with cache_size for the others."""
    for name in ("train", "dev"):
        with HDFWriter(tmp_path / f"{name}.hdf", dims={"data": 3}) as writer:
            writer.add("seq", {"data": [1, 2]})
    more = f"""
train = {{"class": "HDFDataset", "files": [{str(tmp_path / "train.hdf")!r}], "cache_byte_size": 5000}}
dev = {str(tmp_path / "dev.hdf")!r}
cache_size = ["2K", "1K"]
"""
    made = settings(tmp_path, more)
    feeds = open_datasets(made, SingleCommunicator(), made.datasets)
    assert [feed.cache.size for feed in feeds if isinstance(feed.cache, Budget)] == [5000, 1024]
    for feed in feeds:
        feed.dataset.close()
    _, problems = parse("train", hdf(cache_byte_size="2G"), {})
    assert faults(problems) == ["train.cache_byte_size: wrong-type"]
    _, problems = parse("train", {"class": "ConcatDataset", "datasets": [hdf(cache_byte_size=9)]}, {})
    assert faults(problems) == ["train.datasets.0.cache_byte_size: conflict"]


NAMED = """
tf_log_memory_usage = torch_dataloader_opts = True
log_grad_norm = False
tensorboard_opts = {"log_every_n_train_steps": 10}
train["use_cache_manager"] = True
window, context_window, default_float_dtype, chunking_variance = 1, 1, "float32", 0
torch_distributed = {"options": {"find_unused_parameters": True}}
size_of_my_own = 3
"""


def test_names_that_returnn_reads_are_logged_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = (
        "RETURNN reads from a config, and hvdtrain does not: tf_log_memory_usage, torch_dataloader_opts (every rank reads ahead; "
        "num_workers of a MapDataset), tensorboard_opts (use_tensorboard writes after every epoch, and within it every "
        "log_interval_steps), "
        "train.use_cache_manager (set cache_dir)\n"
    )
    for verbosity in ("3", "2"):
        made = settings(tmp_path, NAMED.replace("torch_distributed", "of_all_ranks"), log_verbosity=verbosity, start_epoch="1")
        train(made)
        assert capsys.readouterr().out.count(told) == (verbosity == "3")
    assert settings(tmp_path, NAMED).torch_distributed is not None
    assert settings(tmp_path).notes == ()


@pytest.mark.parametrize(
    ("name", "value"), [("window", 3), ("default_float_dtype", "float16"), ("dataset_random_seed_offset", 1)]
)
def test_values_that_ask_for_something_are_refused(tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name}: a key of RETURNN that is not supported, in config.py .{UNSUPPORTED[name]}"):
        settings(tmp_path, f"{name} = {value!r}\n")


def test_hooks_of_a_config_that_does_not_import_returnn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hook = "def hook(*, model, **_):\n    print('called with', type(model).__name__)\n"
    train(settings(tmp_path, f"{hook}load_model_post_hooks = [hook]\n"))
    assert capsys.readouterr().out.count("called with Linear\n") == 1


def rows() -> list[tuple[str, str]]:
    """The lines of the table in docs/returnn.md, as what a config says and what becomes of it."""
    page = (ROOT / "docs" / "returnn.md").read_text()
    table = page.partition("### Key by key")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(.*?)` \| (\w+) \|", table, flags=re.M)


def test_every_line_of_the_table_of_keys(tmp_path: Path) -> None:
    with HDFWriter(tmp_path / "train.hdf", dims={"data": 3}) as writer:
        writer.add("seq", {"data": [1, 2]})
    files = f"train = {{'class': 'HDFDataset', 'files': [{str(tmp_path / 'train.hdf')!r}]}}\n"
    own = (
        {key.name for key in (*all_keys(), *declared_keys(OrderKeys))} | {"cache_byte_size", "default_float_dtype"} | set(ALIASES)
    )
    found = rows()
    assert {outcome for _, outcome in found} == {"honoured", "taken", "logged", "refused"}
    assert len(found) > 40
    for line, outcome in found:
        name, _, value = line.partition(" = ")
        entry = name.rpartition(".")[2]
        text = f"import returnn.frontend\n{files}{f'train[{entry!r}] = {value}' if entry != name else line}\n"
        if outcome == "refused":
            with pytest.raises(ConfigError) as raised:
                settings(tmp_path, text)
            [problem] = raised.value.problems
            assert re.match(rf"{re.escape(name)}\b", problem.key), problem
            assert re.search(r"\(.+\)", str(problem)), problem
            continue
        made = settings(tmp_path, text)
        assert any(re.search(rf"(: |, ){re.escape(name)}\b", note) for note in made.notes) == (outcome == "logged"), line
        assert outcome != "honoured" or entry in own, line


def test_the_tables_of_names_do_not_overlap() -> None:
    ours = {key.name for key in all_keys()}
    assert not READ_BY_RETURNN & (ours | set(ALIASES) | set(UNSUPPORTED))
    assert set(NO_OPS) <= set(UNSUPPORTED)
    assert set(ELSEWHERE) - {"use_cache_manager"} <= READ_BY_RETURNN


NETWORK = """
train = {"class": "Task12AXDataset", "num_seqs": 4}
network = {"output": {"class": "softmax", "loss": "ce", "from": "data"}}
model, batch_size = "model", 100
"""

OF_EARLIER_ENGINES = "update_on_device = multiprocessing = True\ntruncation = -1\n"


def test_keys_of_earlier_engines_are_accepted_where_they_ask_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(NETWORK + OF_EARLIER_ENGINES)
    made = read_settings([tmp_path / "config.py"], {})
    assert (made.notes, made.warnings) == ((), ())


def test_keys_that_change_what_the_engine_for_networks_computes_are_refused(tmp_path: Path) -> None:
    values = {name: 50 if name == "truncation" else True for name in OF_THE_ENGINE}
    (tmp_path / "config.py").write_text(NETWORK + "\n".join(f"{name} = {value}" for name, value in values.items()))
    with pytest.raises(ConfigError) as raised:
        read_settings([tmp_path / "config.py"], {})
    assert faults(raised.value.problems) == [f"{name}: unsupported" for name in OF_THE_ENGINE]
