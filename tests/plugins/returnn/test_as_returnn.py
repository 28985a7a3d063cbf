"""The same configs with RETURNN and with hvdtrain: the same scores, weights and outputs. One start of Python runs RETURNN for all
tests."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from inside import run_inside
from launching import ROOT, clean_environment, launch

from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.plugins.schedules.file import read_learning_rate_file

pytestmark = pytest.mark.slow

TOY = ROOT / "tests" / "toy" / "returnn.config"
WORDS = ROOT / "tests" / "toy" / "rf.config"
PACKING = ROOT / "tests" / "toy" / "packing.config"
DEMO = ROOT / "data" / "returnn" / "demo-rf.config"
NAMES = ("flat", "padded", "tensor", "total", "sequences", "mean", "fer", "bad")


@dataclass(frozen=True)
class Trainings:
    """What RETURNN left. Attributes: folder: NAME/model... of the training NAME."""

    folder: Path
    out: str

    def model(self, name: str) -> Path:
        return self.folder / name / "model"

    def scores(self, name: str) -> list[dict[str, float]]:
        records = read_learning_rate_file(self.folder / name / "model.learning_rates")
        return [{key: float(value) for key, value in one.scores.items() if not key.startswith(":")} for one in records]


def ours(config: Path, **overrides: object) -> str:
    """Run hvdtrain in this process; what it printed."""
    ended = run_inside([config, *arguments({"num_threads": 1, "log_interval": 0, "log_verbosity": 5, **overrides})])
    assert ended.status == 0, ended.out + ended.err
    return ended.out


def arguments(overrides: Mapping[str, object]) -> list[str]:
    return [text for name, value in overrides.items() for text in (f"++{name}", str(value))]


def demo_data(folder: Path) -> dict[str, object]:
    """Keys with which both programs train the demo on the same sequences: RETURNN draws other ones in every epoch."""
    return {name: {"class": "HDFDataset", "files": [f"{folder}/{name}.hdf"]} for name in ("train", "dev")}


def starts(folder: Path) -> dict[str, dict[str, object]]:
    """Keys of jobs that start in different ways, by name; after an epoch the second one."""
    other = folder / "trained.007.pt"
    return {
        "resumed": {},
        "imported": {"import_model_train_epoch1": other, "num_epochs": 1},
        "loaded": {"load": other, "start_epoch": 1, "num_epochs": 1},
        "continued": {"load": folder / "trained.007", "num_epochs": 8},
        "forwarded late": {"load": folder / "trained.007", "task": "forward"},
    }


@pytest.fixture(scope="module")
def by_returnn(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    """RETURNN's trainings. Without a cache: the threads that fill it lose a sequence now and then where cores are busy."""
    made = tmp_path_factory.mktemp("by_returnn")
    for name, config in (("begun", WORDS), ("resumed", TOY), ("resumed here", TOY)):  # RETURNN continues with the first two
        ours(config, folder=folder, model=made / name / "model", num_epochs=1)
    jobs: dict[str, tuple[Path, dict[str, object]]] = {
        "sums": (TOY, {"sums": True}),
        "means": (TOY, {"sums": False}),
        "forwarded": (TOY, {"load": folder / "trained.001", "task": "forward", "kept": made / "forwarded.kept"}),
        "words": (WORDS, {}),
        "begun": (WORDS, {}),
        "packed": (PACKING, {}),
        **{name: (TOY, starts(folder)[name] | {"kept": made / f"{name}.kept"}) for name in starts(folder)},
        "double": (WORDS, {"default_float_dtype": "float64", "halved": True, "num_epochs": 1}),
        "best": (WORDS, {"load": made / "begun" / "model.001", "task": "forward", "kept": made / "best.kept"}),
    }
    if DEMO.exists():
        shutil.copy(DEMO, made / "demo-rf.config")  # it writes next to itself
        jobs["demo"] = (made / "demo-rf.config", {**demo_data(folder), "num_epochs": 2})
    lines = []
    for name, (config, overrides) in jobs.items():
        (made / name).mkdir(exist_ok=True)
        model = {"model": made / name / "model", "learning_rate_file": made / name / "model.learning_rates"}
        model["calls"] = made / name / "calls"
        lines.append([str(config), str(made / "more.py"), *arguments({"folder": folder, **model, "cache_size": 0, **overrides})])
    (made / "more.py").write_text("torch_dataloader_opts = {'num_workers': 0}\n")  # each worker would import all of it
    (made / "jobs.json").write_text(json.dumps(lines))
    environment = clean_environment() | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1"}
    command = [sys.executable, str(Path(__file__).with_name("returnn_jobs.py")), str(made / "jobs.json")]
    ended = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=1200, env=environment)
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-5000:]
    return Trainings(made, ended.stdout)


def assert_same_training(model: Path, by_returnn: Trainings, name: str, epochs: tuple[int, ...] = (1, 2)) -> None:
    """The same weights and buffers under the same names, and the same scores: RETURNN's are sums in single precision."""
    for epoch in epochs:
        one, other = (torch.load(f"{path}.{epoch:03}.pt", weights_only=True)["model"] for path in (model, by_returnn.model(name)))
        assert list(one) == list(other)
        for key, values in one.items():
            torch.testing.assert_close(values, other[key], rtol=2e-5, atol=2e-6)
    lines = [json.loads(line)["scores"] for line in (model.parent / "scores.jsonl").read_text().splitlines()]
    assert len(lines) == len(by_returnn.scores(name))
    for own, theirs in zip(lines, by_returnn.scores(name), strict=True):
        sums = ("_loss_total", "_loss_total_minimized")  # hvdtrain's own, where there are several losses
        assert {key: own[key] for key in own if key in theirs or not key.endswith(sums)} == pytest.approx(theirs, rel=2e-6)


@pytest.mark.parametrize("sums", [True, False])
def test_losses_in_every_form(folder: Path, by_returnn: Trainings, tmp_path: Path, sums: bool) -> None:
    """Two epochs from the same weights. On one thread they were equal to the last bit."""
    model, name = tmp_path / "model", "sums" if sums else "means"
    out = ours(TOY, folder=folder, model=model, sums=sums)
    assert re.search(r"train epoch 1, step 1, .*, num_seqs [1-7], max_size:time:data (\d+), max_size:time:classes \1, ", out)
    assert_same_training(model, by_returnn, name)
    hooks = Path(f"{model}.hooks").read_text()  # what epoch_start and epoch_end were called with
    assert hooks == Path(f"{by_returnn.model(name)}.hooks").read_text()
    assert len(hooks.splitlines()) == 2 * 2 * 2
    initial = torch.load(folder / "init.pt", weights_only=True)["model"]
    last = torch.load(f"{model}.002.pt", weights_only=True)["model"]
    assert not [key for key, values in last.items() if torch.allclose(values, initial[key], atol=1e-3)]
    [_, final] = by_returnn.scores(name)
    assert final.keys() == {f"{part}_loss_{loss}" for part in ("train", "dev") for loss in NAMES}
    assert 0 < final["dev_loss_bad"] < 1


def test_get_model_and_steps_know_where_training_is(folder: Path, by_returnn: Trainings, tmp_path: Path) -> None:
    """What functions are called with: in a training from the beginning, and where it starts from a model; in forward."""
    calls = {}
    for name, keys in {"sums": {}, **starts(folder)}.items():
        model = by_returnn.folder / "resumed here" / "model" if name == "resumed" else tmp_path / name / "model"
        given = {"folder": folder, "model": model, "kept": tmp_path / f"{name}.kept", "calls": tmp_path / f"{name}.calls"}
        ours(TOY, **given, **keys)
        calls[name] = (tmp_path / f"{name}.calls").read_text()
        # A file of step 0, with which the first one starts, has step -1 for RETURNN.
        assert calls[name] == (by_returnn.folder / name / "calls").read_text().replace("step -1", "step 0"), name
    assert "get_model in epoch 7, step 69" in calls["forwarded late"]
    assert "train_step in epoch 1, step 70" in calls["imported"]


@pytest.fixture(scope="module")
def on_two_ranks(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks left NAME/model... of a training, and of a forward, both in one launch."""
    made = tmp_path_factory.mktemp("two")
    common = {"folder": folder, "use_horovod": 1, "num_threads": 1}
    forward = {"load": folder / "trained.001", "task": "forward", "kept": made / "kept", "output_file": made / "out.hdf"}
    jobs = []
    for name, keys in {"train": {**BATCHES, "max_seqs": 3}, "forward": forward}.items():
        texts = {key: str(value) for key, value in {**common, **keys, "model": made / name / "model"}.items()}
        jobs.append({"name": name, "folder": str(made), "configs": [str(TOY)], "overrides": texts})
    (made / "jobs.json").write_text(json.dumps(jobs))
    ended = launch([TOY.with_name("several.py"), made / "jobs.json"], 2, environment={"OMP_NUM_THREADS": "1"})
    assert ended.status == 0, ended.err
    return made


BATCHES = {"batching": "default", "batch_size": 10_000, "num_epochs": 1}


def test_two_ranks_reach_what_one_reaches(folder: Path, on_two_ranks: Path, tmp_path: Path) -> None:
    ours(TOY, **BATCHES, folder=folder, max_seqs=6, model=tmp_path / "model")
    one, other = (json.loads((path / "scores.jsonl").read_text())["scores"] for path in (tmp_path, on_two_ranks / "train"))
    whole = {loss: value for loss, value in one.items() if not loss.endswith("mean")}  # a mean over a batch, not over frames
    assert whole == pytest.approx({loss: other[loss] for loss in whole}, rel=1e-4)


def test_forward_gives_a_callback_what_returnn_gives_it(
    folder: Path, by_returnn: Trainings, on_two_ranks: Path, tmp_path: Path
) -> None:
    """On two ranks and on one; and into an HDF file."""
    keys = {"folder": folder, "load": folder / "trained.001", "task": "forward", "model": tmp_path / "model"}
    ours(TOY, **keys, kept=tmp_path / "one")
    two, one, theirs = (
        eval(path.read_text()) for path in (on_two_ranks / "kept", tmp_path / "one", by_returnn.folder / "forwarded.kept")
    )
    assert len(two) == 20
    assert two.keys() == one.keys() == theirs.keys()
    read = open_hdf([on_two_ranks / "out.hdf"])
    for number, tag in enumerate(read.tags(range(20))):
        for output, longest in (one[tag], two[tag]):
            torch.testing.assert_close(torch.tensor(output), torch.tensor(theirs[tag][0]))
            assert longest == theirs[tag][1]
        assert read.sequence(number)["data"].tolist() == two[tag][0]
        assert read.sequence(number)["longest"].tolist() == [two[tag][1]]
    read.close()


def test_a_model_of_returnns_frontend(folder: Path, by_returnn: Trainings, tmp_path: Path) -> None:
    """A conformer with BatchNorm and CTC, and an LSTM: RETURNN's initial weights, then its scores and weights."""
    model = tmp_path / "model"
    out = ours(WORDS, folder=folder, model=model)
    assert "ctc" in out
    assert re.findall("^start of .*", out, flags=re.M) == [
        f"start of {name} in epoch {n}" for n in (1, 2) for name in ("train", "dev")
    ]
    assert_same_training(model, by_returnn, "words")
    first, last = by_returnn.scores("words")
    assert last["dev_loss_ctc"] < first["dev_loss_ctc"]
    names = torch.load(f"{model}.002.pt", weights_only=True)["model"].keys()
    assert {"encoder.layers.0.conv_block.norm.running_mean", "lstm.ff_weight", "embedding.weight"} <= names


def test_packed_tensors(folder: Path, by_returnn: Trainings, tmp_path: Path) -> None:
    """Batches without padding, in RETURNN's own packing: its scores and weights, which are those with padding, too."""
    packed, padded = tmp_path / "packed" / "model", tmp_path / "padded" / "model"
    out = ours(PACKING, folder=folder, model=packed)
    assert "train epoch 1, padding: data 0.0%, classes 0.0%" in out
    assert_same_training(packed, by_returnn, "packed", (1,))
    out = ours(PACKING, folder=folder, model=padded, packed_tensors=False)
    assert re.search(r"train epoch 1, padding: data [1-9]", out)
    assert_same_training(padded, by_returnn, "packed", (1,))
    options = "{'gap': 3, 'align': 2, 'per_key': {'classes': {'packed': False}}}"  # the loss is of both
    out = ours(PACKING, folder=folder, model=tmp_path / "gaps" / "model", packed_tensors=options)
    assert re.search(r"train epoch 1, padding: data 0.0%, classes [1-9]", out)
    assert_same_training(tmp_path / "gaps" / "model", by_returnn, "packed", (1,))
    outputs = []
    for name, is_packed in (("packed", True), ("padded", False)):
        written = tmp_path / f"{name}.hdf"
        keys = {"task": "forward", "load": f"{packed}.001", "output_file": written, "packed_tensors": is_packed}
        ours(PACKING, folder=folder, model=tmp_path / "forward" / "model", **keys)
        with_outputs = open_hdf([written])
        outputs.append([with_outputs.sequence(number)["data"] for number in range(with_outputs.num_sequences)])
        with_outputs.close()
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other))


def test_keys_of_the_model(folder: Path, by_returnn: Trainings, tmp_path: Path) -> None:
    """default_float_dtype, in which the two agree to more digits, and load_model_post_hooks."""
    model = tmp_path / "model"
    ours(WORDS, folder=folder, model=model, default_float_dtype="float64", halved=True, num_epochs=1)
    assert_same_training(model, by_returnn, "double", (1,))
    one, other = (torch.load(f"{path}.001.pt", weights_only=True)["model"] for path in (model, by_returnn.model("double")))
    for name, values in one.items():
        assert values.dtype == torch.float64
        torch.testing.assert_close(values, other[name], rtol=1e-6, atol=1e-8)


def test_either_program_goes_on_with_the_others_training(folder: Path, by_returnn: Trainings, tmp_path: Path) -> None:
    """The second epoch after the other's first one is that of a whole training, so the optimizer's state was read, too."""
    for name in ("model.001.pt", "model.001.opt.pt"):
        shutil.copy(by_returnn.folder / "words" / name, tmp_path / name)
    shutil.copy(by_returnn.folder / "words" / "model.learning_rates", tmp_path)
    ours(WORDS, folder=folder, model=tmp_path / "model")
    whole = torch.load(by_returnn.folder / "words" / "model.002.pt", weights_only=True)["model"]
    for model in (tmp_path / "model.002.pt", by_returnn.folder / "begun" / "model.002.pt"):
        for name, values in torch.load(model, weights_only=True)["model"].items():
            torch.testing.assert_close(values, whole[name], rtol=2e-5, atol=2e-6)


def test_outputs_with_hypotheses(folder: Path, by_returnn: Trainings, tmp_path: Path) -> None:
    """RETURNN loads hvdtrain's model. The hypotheses of a sequence have different lengths."""
    options = {"load": by_returnn.folder / "begun" / "model.001", "task": "forward"}
    ours(WORDS, folder=folder, model=tmp_path / "model", kept=tmp_path / "kept", **options)
    own, theirs = (eval(path.read_text()) for path in (tmp_path / "kept", by_returnn.folder / "best.kept"))
    assert len(own) == 20
    assert own.keys() == theirs.keys()
    for tag, (output, largest, best, sizes) in own.items():
        torch.testing.assert_close(torch.tensor(output), torch.tensor(theirs[tag][0]))
        assert largest == pytest.approx(theirs[tag][1])
        assert (best, sizes) == theirs[tag][2:]


@pytest.mark.skipif(not DEMO.exists(), reason="make test fetches it")
def test_the_demo_of_returnn_itself(folder: Path, by_returnn: Trainings, tmp_path: Path) -> None:
    """As it stands, with its sequences from files."""
    shutil.copy(DEMO, tmp_path)
    model = {"model": tmp_path / "model", "learning_rate_file": tmp_path / "rates"}
    ours(tmp_path / DEMO.name, **demo_data(folder), **model, num_epochs=2)
    assert_same_training(tmp_path / "model", by_returnn, "demo")
