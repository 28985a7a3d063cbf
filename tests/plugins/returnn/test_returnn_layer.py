"""Trainings of configs written for RETURNN, which test_as_returnn.py compares with RETURNN's; and what happens without it."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from inside import run_inside
from launching import ROOT, hvdtrain, launch

from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.run import train
from hvdtrain.settings import read_settings
from hvdtrain.start_up.effective import print_config

DEMO = ROOT / "demos" / "demo_returnn.config"
THEIRS = ROOT / "data" / "returnn" / "demo-torch.config"


def scores(model: Path) -> list[dict[str, float]]:
    lines = (model.parent / "scores.jsonl").read_text().splitlines()
    return [json.loads(line)["scores"] for line in lines]


def test_dump_reads_the_dataset_of_such_a_config(tmp_path: Path) -> None:
    """And RETURNN's datasets in it, with the config's values."""
    (tmp_path / "my.config").write_text(
        "import returnn.frontend as rf\n"
        "from returnn.torch.context import get_run_ctx\n"
        "from returnn.config import get_global_config\n"
        "num_seqs = 6\n"
        "inside = {'class': 'Task12AXDataset', 'num_seqs': get_global_config().int('num_seqs', 1)}\n"
        "dev = {'class': 'ReturnnDataset', 'dataset': inside}\n"
    )
    ended = run_inside(["dump", tmp_path / "my.config", tmp_path / "out.hdf", "--dataset", "dev"])
    assert "out.hdf: 6 sequences" in ended.out, ended.err


EXPECTED = "expected the package returnn, got none (pip install returnn dm-tree rapidfuzz soundfile)"


DIRECT, BY_A_RECIPE = "import torch\nimport returnn.frontend as rf", "import their_recipe"


@pytest.mark.parametrize(
    ("command", "blocked", "text"),
    [
        ([], "by a finder", DIRECT),
        (["dump"], "by None", BY_A_RECIPE),
        pytest.param([], "by None", BY_A_RECIPE, marks=pytest.mark.slow),
        pytest.param(["dump"], "by a finder", DIRECT, marks=pytest.mark.slow),
    ],
)
def test_without_the_package(
    tmp_path: Path, without_returnn: dict[str, str], command: list[str], blocked: str, text: str
) -> None:
    """One line that says what imports it, and how to install it."""
    if blocked == "by None":
        (tmp_path / "blocked" / "sitecustomize.py").write_text("import sys\nsys.modules['returnn'] = None\n")
    config, recipe = tmp_path / "my.config", tmp_path / "their_recipe.py"
    recipe.write_text("import os\nfrom returnn.torch.context import get_run_ctx\n")
    config.write_text(text)
    out = [str(tmp_path / "out.hdf")] if command else []
    ended = launch(["-m", "hvdtrain", *command, str(config), *out], environment=without_returnn)
    assert ended.status == 2
    place = f"line 2: {EXPECTED}" if text == DIRECT else f"line 1: {EXPECTED}, imported by {recipe}, line 2"
    assert ended.err == f"1 problem in the config:\n  my.config, {place}\n"


@pytest.mark.slow
def test_configs_that_do_without_the_package(tmp_path: Path, without_returnn: dict[str, str]) -> None:
    """One with RETURNN's keys, and an import that may fail. One in a step fails there, with the same advice."""
    text = """
import hvdtrain
try:
    import returnn
except ImportError:
    returnn = None
learning_rate_decay, tf_log_memory_usage = 0.7, True
def train_step(*, model, extern_data, **_):
    hvdtrain.get_run_ctx().mark_as_loss(model(extern_data["data"].raw_tensor).sum(-1), "some")
"""
    config = written(tmp_path, text, "")
    ended = launch(["-m", "hvdtrain", str(config)], environment=without_returnn)
    assert ended.status == 0, ended.err
    assert "RETURNN reads from a config, and hvdtrain does not: tf_log_memory_usage" in ended.out
    config.write_text(config.read_text().replace("    hvdtrain.get", "    import returnn.frontend\n    hvdtrain.get"))
    ended = launch(["-m", "hvdtrain", str(config), "++num_epochs", "2"], environment=without_returnn)
    assert ended.status not in (0, 75)
    assert EXPECTED.partition(",")[0] in ended.err


def test_the_demo(tmp_path: Path) -> None:
    model = tmp_path / "model"
    options = {"model": model, "learning_rate_file": tmp_path / "rates", "num_threads": 1}
    ended = hvdtrain(DEMO, {**options, "num_epochs": 2, "train.num_seqs": 800})
    assert ended.status == 0, ended.err
    first, last = scores(model)
    assert last["dev_loss_ce"] < first["dev_loss_ce"] < 0.65
    assert last["dev_loss_fer"] < 0.15
    ended = hvdtrain(DEMO, {**options, "task": "forward"})
    assert ended.status == 0, ended.err
    assert len(re.findall(r"^seq-\d+ [LR]{10,99}$", ended.out, re.MULTILINE)) == 20


@pytest.mark.slow
@pytest.mark.skipif(not THEIRS.exists(), reason="make test fetches it")
def test_the_demo_of_returnn_itself(tmp_path: Path) -> None:
    """As it stands, its own paths included."""
    config = tmp_path / "demo-torch.config"
    shutil.copy(THEIRS, config)
    ended = hvdtrain(config, {"num_threads": 1, "log_verbosity": 5})
    assert ended.status == 0, ended.err
    [line] = re.findall(r"epoch 5 evaluation: dev: ce ([0-9.]+), fer ([0-9.]+)", ended.out)
    assert float(line[0]) < 0.1


def written(folder: Path, text: str, imports: str = "import returnn.frontend as rf") -> Path:
    """A config of a few lines behind the usual ones."""
    model = f"model = {str(folder / 'model')!r}"
    usual = f"""
import torch
{imports}
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


def test_the_global_config_is_what_is_in_effect(tmp_path: Path) -> None:
    """While the file is read, what stands there so far; later what the command line says."""
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


def test_the_older_keys_for_dimensions(tmp_path: Path) -> None:
    body = """
del extern_data
num_inputs, num_outputs = 9, {"classes": [2, 1]}
def train_step(*, model, extern_data, **_):
    assert extern_data["classes"].sparse_dim.dimension == extern_data["classes"].dim == 2
    assert extern_data["data"].feature_dim.dimension == 9 and not extern_data["data"].sparse
    sizes = [extern_data[key].dims[1].dyn_size.tolist() for key in ("data", "classes")]
    assert sizes[0] == sizes[1]
    rf.get_run_ctx().mark_as_loss(model(extern_data["data"].raw_tensor).sum(-1), "some", dims=extern_data["data"].dims[:2])
"""
    train(read_settings([written(tmp_path, body)], {}))
    assert scores(tmp_path / "model")[0].keys() == {"train_loss_some"}


@pytest.mark.slow
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
from hvdtrain.plugins.hdf_tools.dump import main
from hvdtrain.run import train
from hvdtrain.settings import read_settings

train(read_settings([Path({str(config)!r})], {{}}))
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
