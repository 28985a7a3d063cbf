"""Configs written for RETURNN on hvdtrain's stand-ins for it, as where it is not installed. test_as_returnn.py compares them
with RETURNN."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT, hvdtrain, launch, torchrun

from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.errors import ConfigError, HvdtrainError
from hvdtrain.run import train
from hvdtrain.settings import print_config, read_settings

TOY = ROOT / "tests" / "toy" / "returnn.config"
DEMO = ROOT / "demos" / "demo_returnn.config"
THEIRS = ROOT / "data" / "returnn" / "demo-torch.config"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def scores(model: Path) -> list[dict[str, float]]:
    lines = (model.parent / "scores.jsonl").read_text().splitlines()
    return [json.loads(line)["scores"] for line in lines]


def test_two_ranks_reach_what_one_reaches(folder: Path, tmp_path: Path, without_returnn: dict[str, str]) -> None:
    options = {"folder": folder, "batching": "default", "max_seqs": 6, "batch_size": 10_000, "num_threads": 1}
    alone = hvdtrain(TOY, {**options, "model": tmp_path / "alone" / "model"}, environment=without_returnn)
    options["max_seqs"] = 3
    by_horovod = {**options, "model": tmp_path / "horovod" / "model", "use_horovod": 1}
    horovod = hvdtrain(TOY, by_horovod, ranks=2, environment=without_returnn)
    by_torch = {**options, "model": tmp_path / "torch" / "model", "torch_distributed": "{}"}
    texts = [text for name, value in by_torch.items() for text in (f"++{name}", str(value))]
    distributed = torchrun(["-m", "hvdtrain", str(TOY), *texts], 2, environment=without_returnn)
    for ended in (alone, horovod, distributed):
        assert ended.status == 0, ended.err
    for name in ("horovod", "torch"):
        for one, other in zip(scores(tmp_path / "alone" / "model"), scores(tmp_path / name / "model"), strict=True):
            whole = {
                loss: value for loss, value in one.items() if not loss.endswith("mean")
            }  # a mean over a batch, not over frames
            assert whole == pytest.approx({loss: other[loss] for loss in whole}, rel=1e-4)


def test_hdf_dump_reads_the_dataset_of_such_a_config(tmp_path: Path, without_returnn: dict[str, str]) -> None:
    """Without RETURNN; with it, what the config imports is RETURNN, which may have to read the data."""
    (tmp_path / "my.config").write_text(
        "import returnn.frontend as rf\n"
        "train = {'class': 'Task12AXDataset', 'num_seqs': 5}\n"
        "dev = {'class': 'ReturnnDataset', 'dataset': {'class': 'Task12AXDataset', 'num_seqs': len(rf.Linear.__name__)}}\n"
    )
    arguments = ["-m", "hvdtrain", "dump", str(tmp_path / "my.config"), str(tmp_path / "out.hdf"), "--overwrite"]
    ended = launch([*arguments, "--dataset", "dev"], environment=without_returnn)
    assert ended.status == 2
    assert "returnn.frontend.Linear: expected one of" in ended.err
    ended = launch([*arguments, "--dataset", "dev"])
    assert "out.hdf: 6 sequences" in ended.out, ended.err
    (tmp_path / "my.config").write_text((tmp_path / "my.config").read_text().replace("len(rf.Linear.__name__)", "6"))
    assert "out.hdf: 5 sequences" in launch(arguments, environment=without_returnn).out


@pytest.mark.usefixtures("stand_ins")
def test_a_callback_writes_hdf_and_looks_labels_up(tmp_path: Path) -> None:
    """As recipes do, with RETURNN's names; the files are those that RETURNN's own writer makes."""
    (tmp_path / "words.txt").write_text("a\nb\nUNK\n")
    (tmp_path / "words.py").write_text("{'b': 1, 'a': 0}")
    body = f"""
import numpy
from returnn.datasets.hdf import SimpleHDFWriter
from returnn.datasets.util.vocabulary import Vocabulary

words = Vocabulary.create_vocab(vocab_file={str(tmp_path / "words.txt")!r})
assert (words.get_seq("b x a"), words.get_seq_labels([1, 0]), words.num_labels, words.labels[1]) == ([1, 2, 0], "b a", 3, "b")
assert Vocabulary({str(tmp_path / "words.py")!r}, unknown_label=None, eos_label="b").eos_label_id == 1

def write(folder, SimpleHDFWriter):
    vectors = SimpleHDFWriter(filename=folder + "/vectors.hdf", dim=2)
    frames = numpy.arange(12, dtype="float32").reshape(2, 3, 2)
    vectors.insert_batch(frames, [3, 2], ["x", "y"])
    vectors.close()
    with SimpleHDFWriter(folder + "/classes.hdf", 3, labels=["a", "b", "UNK"], ndim=1) as classes:
        for number in range(2):
            numbers = numpy.array([[2, 1]], dtype="int32")
            classes.insert_batch(numbers, {{0: numpy.array([2])}}, [f"z{{number}}"], extra={{"more": numbers * 2}})

def both(**_):
    import os
    for name in ("ours", "theirs"):
        os.mkdir(f"{tmp_path}/{{name}}")
    write("{tmp_path}/ours", SimpleHDFWriter)
task = "config:both"
"""
    settings = read_settings([written(tmp_path, body)], {})
    assert settings.function is not None
    settings.function()
    from returnn.datasets.hdf import SimpleHDFWriter

    settings.function.__globals__["write"](str(tmp_path / "theirs"), SimpleHDFWriter)
    for name in ("vectors.hdf", "classes.hdf"):
        ours, theirs = (open_hdf([tmp_path / who / name]) for who in ("ours", "theirs"))
        assert ours.streams["data"] == theirs.streams["data"]
        assert ours.tags(range(2)) == theirs.tags(range(2))
        for number in range(2):
            one, other = ours.sequence(number), theirs.sequence(number)
            assert {key: values.tolist() for key, values in one.items()} == {
                key: values.tolist() for key, values in other.items()
            }
        ours.close()
        theirs.close()
    with pytest.raises(ConfigError, match="expected the class Vocabulary or .*, got 'SentencePieces'"):
        read_settings([written(tmp_path, body.replace("vocab_file=", "**{'class': 'SentencePieces'}, vocab_file="))], {})


def test_the_demo(tmp_path: Path, without_returnn: dict[str, str]) -> None:
    model = tmp_path / "model"
    options = {"model": model, "learning_rate_file": tmp_path / "rates", "num_threads": 1}
    ended = hvdtrain(DEMO, {**options, "num_epochs": 2, "train.num_seqs": 800}, environment=without_returnn)
    assert ended.status == 0, ended.err
    first, last = scores(model)
    assert last["dev_loss_ce"] < first["dev_loss_ce"] < 0.65
    assert last["dev_loss_fer"] < 0.15
    ended = hvdtrain(DEMO, {**options, "task": "forward"}, environment=without_returnn)
    assert ended.status == 0, ended.err
    assert len(re.findall(r"^seq-\d+ [LR]{10,99}$", ended.out, re.MULTILINE)) == 20


@pytest.mark.skipif(not THEIRS.exists(), reason="make test fetches it")
def test_the_demo_of_returnn_itself(tmp_path: Path, without_returnn: dict[str, str]) -> None:
    """As it stands, its own paths included."""
    config = tmp_path / "demo-torch.config"
    shutil.copy(THEIRS, config)
    ended = hvdtrain(config, {"num_threads": 1, "use_horovod": 1}, ranks=2, environment=without_returnn)
    assert ended.status == 0, ended.err
    [line] = re.findall(r"epoch 5 evaluation: dev: ce ([0-9.]+), fer ([0-9.]+)", ended.out)
    assert float(line[0]) < 0.1


def written(folder: Path, text: str) -> Path:
    """A config of a few lines behind the usual ones."""
    model = f"model = {str(folder / 'model')!r}"
    usual = f"""
import torch
import returnn.frontend as rf
{model}
train = {{"class": "Task12AXDataset", "num_seqs": 6}}
extern_data = {{"data": {{"dim": 9}}, "classes": {{"dim": 2, "sparse": True}}}}
num_epochs, learning_rate, max_seqs, num_threads = 1, 0.1, 3, 1
def get_model(**_):
    return torch.nn.Linear(9, 2)
def train_step(*, model, extern_data, **_):
    rf.get_run_ctx().mark_as_loss(model(extern_data["data"].raw_tensor), "some")
"""
    path = folder / "my.config"
    path.write_text(usual + text)
    return path


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "class Net(rf.Module): pass",
            r"my.config, line 12: .*returnn.frontend.Module: expected one of .*get_run_ctx.*got a name",
        ),
        ("from returnn.frontend import Linear", r"returnn.frontend.Linear: expected a name that hvdtrain has.*plain PyTorch"),
        ("import returnn.tf.engine", r"returnn.tf: expected one of returnn, returnn.frontend, .*docs/returnn.md"),
        ("from returnn.datasets import Dataset", r"returnn.datasets.Dataset: expected"),
        ("import their_recipe", r"'Linear' from 'returnn.frontend'.*hvdtrain runs"),
        ("rf.get_run_ctx().mark_as_loss(torch.ones(1), 'early')", "expected to be called in train_step, got called in init"),
        ("extern_data = {'data': {'dimm': 9}}", r"extern_data.data: expected options out of dim, .*got dimm"),
        ("extern_data = [9]", r"extern_data: expected a dict of dicts by data key, got \[9\]"),
        ("model_outputs = {'output': 3}", r"model_outputs.output: expected a dict such as"),
        ("backend = 'tensorflow'", "backend: expected 'torch' in a config that imports returnn, got 'tensorflow'"),
        ("batching = 'randm'", "batching: expected an order as in seq_ordering, got 'randm'"),
    ],
)
def test_what_is_not_there_is_told_when_the_config_is_read(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "their_recipe.py").write_text("from returnn.frontend import Linear\n")
    with pytest.raises(ConfigError, match=message):
        read_settings([written(tmp_path, text)], {})
    sys.modules.pop("their_recipe", None)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "rf.get_run_ctx().mark_as_loss(rf.relu(1), 'x')",
            "train_step, in my.config, line 13: returnn.frontend.relu: expected one of",
        ),
        (
            "from returnn.frontend import relu",
            "train_step, in my.config, line 13: returnn.frontend.relu: expected a name that hvdtrain has",
        ),
        (
            "rf.get_run_ctx().total_loss()",
            r"train_step, in my.config, line 13: get_run_ctx\(\).total_loss: expected one of .*mark_as_loss",
        ),
        ("extern_data['data'].flatten()", "train_step, in my.config, line 13: Tensor.flatten: expected one of .*raw_tensor"),
        ("extern_data['data'].dims[1].prod()", "train_step, in my.config, line 13: Dim.prod: expected one of .*dyn_size_ext"),
        ("rf.get_run_ctx().mark_as_output(torch.ones(3), 'x')", "mark_as_output: expected to be called in forward_step"),
        ("rf.get_run_ctx().mark_as_loss(1.0, 'x')", "expected a tensor as the loss 'x', got float"),
    ],
)
def test_what_is_not_there_is_told_in_a_step(tmp_path: Path, body: str, message: str) -> None:
    text = f"def train_step(*, model, extern_data, **_):\n    {body}\n"
    with pytest.raises(ConfigError, match=message):
        train(read_settings([written(tmp_path, text)], {}))


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("extern_data", "message"),
    [
        ({"data": {"dim": 8}}, r"train: expected frames of shape \(8,\), got \(9,\) in 'data' \(extern_data.data says so\)"),
        (
            {"data": {"dim": 9, "sparse": True}},
            r"train: expected class indices, got float32 in 'data' \(extern_data.data says so\)",
        ),
        ({"words": {"dim": 9}}, r"extern_data.words: expected one of the dataset's data keys \(data, classes\)"),
    ],
)
def test_data_that_is_not_as_extern_data_says(tmp_path: Path, extern_data: dict[str, object], message: str) -> None:
    with pytest.raises(HvdtrainError, match=message):
        train(read_settings([written(tmp_path, f"extern_data = {extern_data}")], {}))


@pytest.mark.parametrize("frontend", ["returnn", "stand-ins"])
def test_the_global_config_is_what_is_in_effect(tmp_path: Path, request: pytest.FixtureRequest, frontend: str) -> None:
    """While the file is read, what stands there so far; later what the command line says."""
    if frontend == "stand-ins":
        request.getfixturevalue("stand_ins")
    body = """
from returnn.config import get_global_config
factor = 2
assert get_global_config().int("factor", 1) == 2
def get_model(**_):
    assert get_global_config().int("factor", 1) == 3
    assert get_global_config().typed_dict["factor"] == 3
    return torch.nn.Linear(9, 2)
"""
    train(read_settings([written(tmp_path, body)], {"factor": "3"}))
    assert "<function train_step in my.config>" in print_config(read_settings([written(tmp_path, body)], {}))


@pytest.mark.usefixtures("stand_ins")
def test_the_older_keys_for_dimensions(tmp_path: Path) -> None:
    body = """
del extern_data
num_inputs, num_outputs = 9, {"classes": [2, 1]}
def train_step(*, model, extern_data, **_):
    assert extern_data["classes"].sparse_dim.dimension == extern_data["classes"].dim == 2
    assert extern_data["data"].feature_dim.dimension == 9 and not extern_data["data"].sparse
    assert extern_data["classes"].seq_lens.tolist() == extern_data["data"].seq_lens.tolist()
    assert extern_data["classes"].dims[1] is not extern_data["data"].dims[1]
    rf.get_run_ctx().mark_as_loss(model(extern_data["data"].raw_tensor)[extern_data["data"].mask], "some")
"""
    train(read_settings([written(tmp_path, body)], {}))
    assert scores(tmp_path / "model")[0].keys() == {"train_loss_some"}


def test_the_installed_returnn_is_left_alone(tmp_path: Path) -> None:
    """In a process that has imported it, trains such a config, with a recipe that looks for RETURNN late, and then needs it."""
    config = written(tmp_path, "from recipe import train_step")
    (tmp_path / "recipe.py").write_text(
        "def train_step(*, model, extern_data, **_):\n"
        "    import returnn.frontend as rf\n"
        "    from returnn.tensor import TensorDict\n"
        "    assert isinstance(extern_data, TensorDict)\n"
        "    rf.get_run_ctx().mark_as_loss(model(extern_data['data'].raw_tensor), 'late')\n"
    )
    program = f"""
import sys
from pathlib import Path
import returnn.frontend as before
from hvdtrain.hdf_tools.dump import main
from hvdtrain.run import train
from hvdtrain.settings import read_settings

train(read_settings([Path({str(config)!r})], {{}}))
assert "returnn_layer" not in sys.modules["returnn.frontend"].__file__
import returnn.frontend as after
assert before is after is sys.modules["returnn.frontend"]
from returnn.datasets.basic import init_dataset
inside = {{"class": "Task12AXDataset", "num_seqs": 3}}
sys.exit(main([str({{"class": "ReturnnDataset", "dataset": inside}}), {str(tmp_path / "o.hdf")!r}]))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8", timeout=120, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    assert scores(tmp_path / "model")[0].keys() == {"train_loss_late"}
    read = open_hdf([tmp_path / "o.hdf"])
    assert read.num_sequences == 3
    read.close()
