"""Averages of checkpoints: equal to numpy's mean in float64, in every format, and made at the end of a training."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from launching import TOY, Finished, faults, hvdtrain
from safetensors.numpy import load_file

from hvdtrain.checkpoint.folder import CheckpointFolder
from hvdtrain.checkpoint.hooks import needed_epochs
from hvdtrain.checkpoint.progress import Progress
from hvdtrain.errors import CheckpointError, ConfigError
from hvdtrain.learner.frameworks import FRAMEWORKS
from hvdtrain.learner.torch.model_file import read_model, write_model
from hvdtrain.plugins.average.__main__ import main
from hvdtrain.plugins.average.means import mean_of_files
from hvdtrain.plugins.average.rules import AverageRule, Averages, make_rule, parse_averages
from hvdtrain.plugins.cleanup.removal import Cleanup
from hvdtrain.plugins.cleanup.rule import CleanupRule
from hvdtrain.plugins.tensorflow.model_file import write_model as write_arrays
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.schedule.measure import Measure


def save(folder: Path, epoch: int, score: float, suffix: str = "pt") -> dict[str, torch.Tensor]:
    """A model after an epoch, with shared, transposed, half and integer tensors; each epoch's `dev_loss_ce` is its score."""
    generator = torch.Generator().manual_seed(epoch)
    weight = torch.randn(5, 3, generator=generator)
    model = {
        "embedding": weight,
        "output": weight,
        "transposed": torch.randn(4, 2, generator=generator).T,
        "scalar": torch.randn((), generator=generator),
        "half": torch.randn(7, generator=generator).to(torch.bfloat16),
        "wide": torch.randn(3, generator=generator, dtype=torch.float64),
        "norm.num_batches_tracked": torch.tensor(10 * epoch),
        "empty": torch.zeros(0, 2),
    }
    scores[epoch] = score
    history = [
        {"epoch": number, "learning_rate": 0.1, "scores": {"dev_loss_ce": scores.get(number, 9.0), "dev_loss_acc": number}}
        for number in range(1, epoch + 1)
    ]
    progress = {"epoch": epoch, "step": 7 * epoch, "history": history}
    write_model(folder / f"model.{epoch:03d}.{suffix}", model, progress, suffix)
    return model


scores: dict[int, float] = {}


def numpy_mean(models: list[dict[str, torch.Tensor]], name: str) -> numpy.ndarray:
    return numpy.mean([model[name].double().numpy() for model in models], axis=0, dtype=numpy.float64)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_the_average_is_numpys_mean(tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    scores.clear()
    models = {epoch: save(tmp_path, epoch, score, suffix) for epoch, score in ((1, 5.0), (2, 1.0), (3, 3.0), (4, 2.0))}
    assert main([str(tmp_path / "model"), "--best", "3", "--measure", "dev_loss_ce"]) == 0
    assert "model.002" in capsys.readouterr().out
    contents = read_model(tmp_path / f"model.best-3-dev_loss_ce.{suffix}")
    average, chosen = contents["model"], [models[epoch] for epoch in (2, 3, 4)]
    for name in ("embedding", "transposed", "wide", "scalar"):
        expected = numpy_mean(chosen, name).astype(chosen[0][name].numpy().dtype)
        assert numpy.array_equal(average[name].numpy(), expected), name
    assert torch.equal(average["half"], torch.from_numpy(numpy_mean(chosen, "half")).to(torch.bfloat16))
    assert average["norm.num_batches_tracked"] == 40
    assert average["empty"].shape == (0, 2)
    assert average["output"].data_ptr() == average["embedding"].data_ptr(), "shared tensors stay shared"
    assert (contents["epoch"], contents["step"]) == (4, 28)
    assert contents["average"] == {"name": "best-3-dev_loss_ce", "of": [f"model.{epoch:03d}.{suffix}" for epoch in (2, 3, 4)]}

    out = tmp_path / "other.pt"  # another format than that of the models, and files by name
    files = [str(tmp_path / f"model.{epoch:03d}.{suffix}") for epoch in (1, 2)]
    assert main([*files, "--out", str(out)]) == 0
    assert numpy.array_equal(
        read_model(out)["model"]["embedding"].numpy(), numpy_mean([models[1], models[2]], "embedding").astype("float32")
    )
    for options, wanted in ((["--last", "2"], (3, 4)), (["--epochs", "1,3-4"], (1, 3, 4))):
        assert main([str(tmp_path / "model"), *options, "--out", str(out)]) == 0
        expected = numpy_mean([models[epoch] for epoch in wanted], "transposed").astype("float32")
        assert numpy.array_equal(read_model(out)["model"]["transposed"].numpy(), expected)


def test_arrays_of_tensorflow_are_averaged_without_it(tmp_path: Path) -> None:
    generator = numpy.random.default_rng(1)
    arrays = [{"layer.kernel": generator.normal(size=(3, 4)).astype("float32"), "count": numpy.array(n)} for n in range(3)]
    for suffix in ("npz", "safetensors"):
        files = [tmp_path / f"{number}.{suffix}" for number in range(3)]
        for number, file in enumerate(files):
            write_arrays(file, arrays[number], {"step": 5 - number, "epoch": 1}, suffix)
        mean = mean_of_files(files, FRAMEWORKS["tensorflow"])
        expected = numpy.mean([one["layer.kernel"] for one in arrays], axis=0, dtype="float64").astype("float32")
        assert numpy.array_equal(mean["model"]["layer.kernel"], expected)
        assert (int(mean["model"]["count"]), mean["step"]) == (0, 5), "integers of the model with the highest step"
        assert main([*map(str, files), "--out", str(tmp_path / f"mean.{suffix}")]) == 0
    assert numpy.array_equal(load_file(tmp_path / "mean.safetensors")["layer.kernel"], expected)


def test_what_cannot_be_averaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores.clear()
    for epoch in (1, 2, 3):
        save(tmp_path, epoch, float(epoch))
    prefix = str(tmp_path / "model")

    def refused(*arguments: str) -> str:
        assert main([*arguments]) == 2
        return capsys.readouterr().err

    assert "expected 5 models, got 3" in refused(prefix, "--best", "5")
    assert "'dev_loss_wer'" in refused(prefix, "--best", "2", "--measure", "dev_loss_wer")
    assert "higher values" in refused(prefix, "--best", "2", "--measure", "dev_loss_acc")
    assert "got none of 7" in refused(prefix, "--epochs", "2,7")
    assert "running" in refused(prefix, "--running", "2")
    assert "'x'" in refused(prefix, "--last", "x")
    assert "other" in refused(str(tmp_path / "other"), "--last", "2")
    assert "no checkpoint" in refused(prefix, "--last", "2", "--out", str(tmp_path / "model.007.pt"))
    assert "ends in" in refused(prefix, "--last", "2", "--out", str(tmp_path / "model.zip"))
    assert "++max_seqs" in refused(prefix, "--last", "2", "++max_seqs", "3")
    contents = torch.load(tmp_path / "model.002.pt", weights_only=True)
    for name, value in (
        ("embedding", torch.zeros(5, 2)),
        ("wide", torch.tensor([1, 2, 3])),
        ("half", torch.full((7,), torch.inf)),
    ):
        write_model(tmp_path / "model.002.pt", {**contents["model"], name: value}, {"epoch": 2, "step": 14}, "pt")
        assert name in refused(prefix, "--last", "3")
    write_model(tmp_path / "model.002.pt", {"other": torch.zeros(1)}, {"epoch": 2, "step": 14}, "pt")
    assert "others: embedding, " in refused(prefix, "--last", "3")
    (tmp_path / "model.002.pt").write_bytes(b"no model")
    assert "model.002.pt" in refused(prefix, "--last", "3")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.001.pt", "model.002.pt", "model.003.pt"]


def test_rules_and_their_mistakes() -> None:
    names = [rule.name for rule in parse_averages([{"best": 5}, {"last": 2}, {"epochs": [3, 5]}, {"running": "4-9"}])]
    assert names == ["best-5", "last-2", "epochs-3-5", "running-4-9"]
    assert make_rule("running", "7-7").numbers == (7,)
    assert make_rule("running", 7).count == 7
    wrong: list[tuple[Any, str]] = [
        ({"beste": 5}, "average_checkpoints: wrong-type"),
        ({"best": 0}, "average_checkpoints.best: out-of-range"),
        ({"epochs": "9-3"}, "average_checkpoints.epochs: out-of-range"),
        ({"running": "3,9"}, "average_checkpoints.running: out-of-range"),
        ([{"best": 5, "by": "x"}], "average_checkpoints[0].by: unknown-key"),
        ({"last": 5, "measure": "dev_loss_ce"}, "average_checkpoints.measure: conflict"),
        ({"running": 5, "measure": "dev_loss_ce"}, "average_checkpoints.measure: conflict"),
        ({"last": 5, "recompute_statistics": 1}, "average_checkpoints.recompute_statistics: wrong-type"),
        ([{"last": 5}, {"last": 5}], "average_checkpoints: duplicate"),
    ]
    for value, expected in wrong:
        with pytest.raises(ConfigError) as caught:
            parse_averages(value)
        assert faults(caught.value.problems) == [expected]


@pytest.mark.parametrize(("kind", "value", "save_interval"), [("epochs", "1-2", 2), ("epochs", 5, 1), ("running", 3, 2)])
def test_an_average_of_epochs_that_will_not_be_saved_is_refused_at_the_start(kind: str, value: Any, save_interval: int) -> None:
    averages = Averages([make_rule(kind, value)], Measure(), num_epochs=4, save_interval=save_interval)
    with pytest.raises(ConfigError, match=f"average_checkpoints.{kind}: .* got one that needs those of [15]$"):
        averages.restored(Progress())
    averages.restored(Progress(epoch=5))  # an earlier start may have saved them with other keys
    rules = [make_rule("epochs", "2,4"), make_rule("running", 2)]
    Averages(rules, Measure(), num_epochs=4, save_interval=save_interval).restored(Progress())


def test_an_average_of_steps_of_which_no_model_will_be_kept_is_refused_at_the_start() -> None:
    averages = Averages([make_rule("steps", [7, 14])], Measure(), num_epochs=4, has_within=False)
    with pytest.raises(ConfigError, match="average_checkpoints.steps: expected evaluations within epochs"):
        averages.restored(Progress(step=13))
    averages.restored(Progress(step=14))
    Averages([make_rule("steps", [7, 14])], Measure(), num_epochs=4).restored(Progress())


def test_cleanup_keeps_what_averages_need(tmp_path: Path) -> None:
    scores.clear()
    for epoch in range(1, 9):
        save(tmp_path, epoch, 0.0)
    history = [EpochRecord(epoch, 0.1, {"dev_loss_ce": abs(epoch - 3.2), "dev_loss_wer": -epoch}) for epoch in range(1, 9)]
    folder = CheckpointFolder(tmp_path / "model")
    cleanup = Cleanup(CleanupRule(keep_last_n=1, keep_best_n=0, keep=[]))

    def clean_up(averages: Averages) -> None:
        cleanup.clean_up(folder, history, partial(needed_epochs, [averages], history=history))

    clean_up(Averages([make_rule("best", 3), make_rule("epochs", "7")], Measure(["dev_loss_ce"]), 9))
    assert folder.finished_epochs() == [2, 3, 4, 7, 8]
    clean_up(Averages([make_rule("running", 2)], Measure(), 9))
    assert folder.finished_epochs() == [4, 7, 8]
    clean_up(Averages([AverageRule("best", 1, measure="dev_loss_ce")], Measure(["dev_loss_wer"]), 9))
    assert folder.finished_epochs() == [4, 8]


AVERAGED = '[{"best": 3}, {"last": 2, "recompute_statistics": True}, {"running": 2}]'


def toy(corpus: Path, folder: Path, **keys: object) -> Finished:
    plain = {"corpus": corpus, "model": folder / "model", "evaluated": True, "layers": "only_statistics", "num_epochs": 5}
    return hvdtrain(TOY, plain | keys)


def test_averages_at_the_end_of_a_training(corpus: Path, tmp_path: Path) -> None:
    keys = {"running_average": 3, "cleanup_old_models": "{'keep_last_n': 1, 'keep_best_n': 0, 'keep': []}", "ema_decay": 0.9}
    ended = toy(corpus, tmp_path, average_checkpoints=AVERAGED, **keys)
    assert ended.status == 0, ended.err
    made = {one["name"]: one for one in json.loads((tmp_path / "averages.json").read_text())}
    assert list(made) == ["best-3", "last-2", "running-2", "trained weights"]
    assert made["last-2"]["of"] == ["model.004.pt", "model.005.pt"]
    models = [read_model(tmp_path / name)["model"] for name in made["best-3"]["of"]]
    average = read_model(tmp_path / "model.best-3.pt")["model"]
    for name in ("first.weight", "norm.running_var"):
        assert numpy.array_equal(average[name].numpy(), numpy_mean(models, name).astype("float32"))
    for name in ("best-3", "last-2", "running-2"):
        again = toy(corpus, tmp_path, task="eval", load=tmp_path / f"model.{name}.pt")
        assert again.status == 0, again.err
        assert f"dev: ce {made[name]['scores']['dev_loss_ce']:.4g}" in again.out, "the file is what was evaluated"
    line = next(line for line in ended.out.splitlines() if "best of all, by dev_loss_ce" in line)
    assert all(text in line for text in ("best-3", "last-2", "running-2", "the last epoch, 5, with the moving average"))
    best = min([*(one["scores"]["dev_loss_ce"] for one in made.values()), *dev_scores(tmp_path)])
    assert f"{best:.6g} (" in line, line
    whole = read_model(tmp_path / "model.005.pt")["model"]

    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("model.*-*.pt")}
    again = toy(corpus, tmp_path, average_checkpoints=AVERAGED, **keys)
    assert again.status == 0
    assert "best of all" in again.out
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("model.*-*.pt")} == before, "nothing is made twice"
    assert all(torch.equal(value, whole[name]) for name, value in read_model(tmp_path / "model.005.pt")["model"].items())


def dev_scores(folder: Path) -> list[float]:
    return [json.loads(line)["scores"]["dev_loss_ce"] for line in (folder / "scores.jsonl").read_text().splitlines()]


def test_recomputed_statistics_are_those_of_pytorch(corpus: Path, tmp_path: Path) -> None:
    """As torch.optim.swa_utils.update_bn computes them on the same batches."""
    plain = toy(corpus, tmp_path, num_epochs=2)
    assert plain.status == 0, plain.err
    out, config = tmp_path / "mean.pt", ["--recompute-statistics", str(TOY), "++corpus", str(corpus)]
    more = ["++layers", "only_statistics", "++model", str(tmp_path / "unused"), "++record", str(tmp_path / "ids")]
    assert main([str(tmp_path / "model"), "--last", "2", "--out", str(out), *config, *more]) == 0
    contents = read_model(out)
    assert contents["average"]["recomputed_statistics"] is True
    model = contents["model"]
    import h5py
    import hdf_files  # noqa: F401  the corpus is an HDF file

    with h5py.File(corpus / "train.hdf") as file:
        lengths = file["seqLengths"][:, 0]
        frames = numpy.split(file["inputs"][:], numpy.cumsum(lengths)[:-1])
    ids = [int(line.split()[1]) for line in Path(f"{tmp_path}/ids.0").read_text().splitlines()]
    norm = torch.nn.BatchNorm1d(4)
    batches = []
    for place in range(0, len(ids), 12):
        rows = [torch.from_numpy(frames[number]).float() for number in ids[place : place + 12]]
        batches.append(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).transpose(1, 2))
    torch.optim.swa_utils.update_bn(batches, norm)
    torch.testing.assert_close(model["norm.running_mean"], norm.running_mean)
    torch.testing.assert_close(model["norm.running_var"], norm.running_var)


def test_a_model_without_batch_norm_has_no_statistics(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert toy(corpus, tmp_path, num_epochs=2, layers="plain").status == 0
    config = ["--recompute-statistics", str(TOY), "++corpus", str(corpus), "++model", str(tmp_path / "x")]
    assert main([str(tmp_path / "model"), "--last", "2", *config]) == 2
    assert "BatchNorm" in capsys.readouterr().err
    assert not [path.name for path in tmp_path.iterdir() if "last" in path.name]


def test_an_average_of_other_models_is_no_mistake_of_the_training(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing.pt: expected a checkpoint's file, got: no such file"):
        mean_of_files([tmp_path / "nothing.pt"], FRAMEWORKS["torch"])


def test_averages_of_trained_parameters_only(corpus: Path, tmp_path: Path) -> None:
    """With save_parameters = 'trained', averages and models within epochs have no others, either, and say what base they need."""
    keys = {"save_parameters": "trained", "layers": "plain", "num_epochs": 2, "eval_interval_steps": 7, "learning_rate": 0.0003}
    keys["fault"] = "no_score,-1,-1"
    assert toy(corpus, tmp_path, **keys).status == 0
    ended = toy(corpus, tmp_path, average_checkpoints={"best": 2}, **keys)
    assert ended.status == 0, ended.err
    [made] = json.loads((tmp_path / "averages.json").read_text())
    assert made["scores"]["dev_loss_quality_error"] == 1 / 2, "train_step finds the last epoch, also if nothing is trained"
    for name in ("model.best-2.pt", *(name for name in made["of"])):
        contents = read_model(tmp_path / name)
        assert "frozen" not in contents["model"]
        assert contents["base"]["parameters"] == 3
    again = toy(corpus, tmp_path, task="eval", load=tmp_path / "model.best-2.pt", **keys)
    assert again.status == 0, again.err
    assert f"dev: ce {made['scores']['dev_loss_ce']:.4g}" in again.out
