"""Tasks besides training, on one and on two ranks."""

import gzip
import json
from pathlib import Path

import numpy
import pytest
from inside import run_inside
from launching import FAST, TOY, Finished, hvdtrain, launch

from hvdtrain.data.hdf.dataset import open_hdf

CONFIG = """
from pathlib import Path
import hvdtrain

told = config.value("told")
forward_data = {"files": str(Path(corpus) / "dev.hdf")}
max_seqs = 7

def forward_step(*, model, extern_data, **_):
    data = extern_data["data"]
    scores = model(data.raw_tensor, data.mask)
    context = hvdtrain.get_run_ctx()
    context.mark_as_default_output(scores, seq_lens=data.seq_lens)
    context.mark_as_output(scores.argmax(-1), "best", seq_lens=data.seq_lens)
    context.mark_as_output(data.seq_lens.float().sqrt(), "root")
    context.mark_as_output(scores[:, 0], "first")

class Callback:
    def init(self, *, model):
        self.file = open(told, "w")
        print("model has", len(list(model.parameters())), "parameters", file=self.file)
    def process_seq(self, *, seq_tag, outputs):
        assert outputs["output"].raw_tensor.dtype == "float32" and outputs["root"].raw_tensor.shape == ()
        assert outputs["first"].raw_tensor.shape == (5,)
        print(seq_tag, outputs["output"].raw_tensor.shape, *outputs["best"].raw_tensor.tolist(), file=self.file)
    def finish(self):
        print("finished", file=self.file)
        self.file.close()

def hello():
    print("hello from the config")
"""


def run(config: Path, overrides: dict[str, object], ranks: int | None = None) -> Finished:
    """Run the toy config with what another one adds."""
    arguments: list[str] = [str(TOY), str(config)]
    for name, value in (overrides | FAST).items():
        arguments += [f"++{name}", str(value)]
    # TensorFlow has to be the first in its process to compute.
    inside = ranks is None and overrides.get("backend") != "tensorflow"
    return run_inside(arguments) if inside else launch(["-m", "hvdtrain", *arguments], ranks)


@pytest.fixture(scope="module")
def after_training(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    folder = tmp_path_factory.mktemp("tasks")
    config = folder / "config.py"
    config.write_text(CONFIG)
    keys: dict[str, object] = {"corpus": corpus, "model": folder / "model", "evaluated": True, "log_interval": 100}
    assert run(config, {**keys, "num_epochs": 2}).status == 0
    return config, keys


def test_eval_gives_the_scores_of_the_training(after_training: tuple[Path, dict[str, object]]) -> None:
    config, keys = after_training
    scores = json.loads((config.parent / "scores.jsonl").read_text().splitlines()[0])["scores"]
    for ranks in (None, 2):
        finished = run(config, {**keys, "task": "eval", "load_epoch": 1, "use_horovod": ranks is not None}, ranks=ranks)
        assert finished.status == 0, finished.err
        assert f"epoch 1 evaluation: dev: ce {scores['dev_loss_ce']:.4g}, fer {scores['dev_loss_fer']:.4g}" in finished.out


def test_forward_hands_outputs_on_in_the_datasets_order(after_training: tuple[Path, dict[str, object]], corpus: Path) -> None:
    config, keys = after_training
    folder = config.parent
    told = {}
    for ranks in (1, 2):
        task = {"task": "forward", "output_file": folder / f"out-{ranks}.hdf", "use_horovod": ranks > 1}
        task |= {"told": folder / f"told-{ranks}"}
        other = {**keys, **task}
        with_callback = folder / "with_callback.py"
        with_callback.write_text(config.read_text() + "\nforward_callback = Callback\n")
        finished = run(with_callback, other, ranks=ranks if ranks > 1 else None)
        assert finished.status == 0, finished.err
        assert "Forward " in finished.out
        told[ranks] = (folder / f"told-{ranks}").read_text()
    assert told[1] == told[2]
    lines = told[1].splitlines()
    assert (lines[0], lines[-1]) == ("model has 6 parameters", "finished")
    dev, one, two = open_hdf([corpus / "dev.hdf"]), open_hdf([folder / "out-1.hdf"]), open_hdf([folder / "out-2.hdf"])
    assert [line.split()[0] for line in lines[1:-1]] == dev.tags(range(101)) == one.tags(range(101)) == two.tags(range(101))
    for index in range(101):
        sequences = one.sequence(index), two.sequence(index)
        assert all(numpy.array_equal(sequences[0][key], sequences[1][key]) for key in ("data", "best", "root"))
        assert sequences[0]["data"].shape == (len(dev.sequence(index)["data"]), 5)
        assert numpy.array_equal(sequences[0]["data"].argmax(-1), sequences[0]["best"])
        assert numpy.array_equal(sequences[0]["first"], sequences[0]["data"][:1])  # no axis of time: one frame of five numbers
        assert numpy.array_equal(sequences[0]["root"], numpy.sqrt([len(sequences[0]["data"])], dtype=numpy.float32))
    assert not list(folder.glob("*.unfinished"))
    again = run(config, {**keys, "task": "forward", "output_file": folder / "out-1.hdf"})
    assert again.status == 2
    assert "out-1.hdf: expected a file that does not exist yet (output_file)" in again.err


def test_search_writes_texts_in_the_datasets_order(after_training: tuple[Path, dict[str, object]], corpus: Path) -> None:
    config, keys = after_training
    texts = {}
    for ranks in (1, 2):
        file = config.parent / f"search-{ranks}.py.gz"
        task = {
            "task": "search",
            "search_data": corpus / "dev.hdf",
            "search_output_file": file,
            "search_output_file_format": "py",
        }
        task |= {"search_output_layer": "best", "search_labels": ["a", "b", "c", "d", "e"], "use_horovod": ranks > 1}
        finished = run(config, {**keys, **task}, ranks=ranks if ranks > 1 else None)
        assert finished.status == 0, finished.err
        texts[ranks] = gzip.decompress(file.read_bytes()).decode()
    assert texts[1] == texts[2]
    dev = open_hdf([corpus / "dev.hdf"])
    found = eval(texts[1])
    assert list(found) == dev.tags(range(101))
    assert [len(text.split()) for text in found.values()] == [len(dev.sequence(index)["data"]) for index in range(101)]
    assert not list(config.parent.glob("*.unfinished"))
    again = run(config, {**keys, **task, "use_horovod": False})
    assert again.status == 2
    assert "search-2.py.gz: expected a file that does not exist yet (search_output_file)" in again.err
    early = run(
        config, {**keys, **task, "use_horovod": False, "search_output_file": config.parent / "early", "search_labels": ["a"]}
    )
    assert early.status == 2
    assert "output 'best': expected numbers below 1 (the labels), got" in early.err
    assert not (config.parent / "early").exists()


def test_forward_says_what_is_missing(after_training: tuple[Path, dict[str, object]]) -> None:
    config, keys = after_training
    neither = run(config, {**keys, "task": "forward"})
    assert neither.status == 2
    assert neither.names("output_file, forward_callback")
    step = hvdtrain(TOY, {**keys, "task": "forward", "forward_data": keys["corpus"] / "dev.hdf", "output_file": "x.hdf"})
    assert step.status == 2
    assert step.problems == ("forward_step: missing",)
    nothing = hvdtrain(TOY, {**keys, "task": "search"})
    assert nothing.status == 2
    assert nothing.problems == ("search_data: missing",)


def test_a_function_of_the_config_is_a_task(after_training: tuple[Path, dict[str, object]]) -> None:
    config, keys = after_training
    assert "hello from the config\n" in run(config, {**keys, "task": "config:hello"}).out
    wrong = run(config, {**keys, "task": "config:bye"})
    assert wrong.status == 2
    assert wrong.names("task", "'config:bye'")
    unknown = run(config, {**keys, "task": "sing"})
    assert unknown.names("task", "'sing'")


@pytest.mark.parametrize(("backend", "suffix"), [("torch", "pt"), ("tensorflow", "npz")])
def test_cleanup_is_a_task(after_training: tuple[Path, dict[str, object]], tmp_path: Path, backend: str, suffix: str) -> None:
    config, keys = after_training
    keys = {**keys, "backend": backend}
    for epoch in range(1, 8):
        (tmp_path / f"model.{epoch:03d}.{suffix}").write_bytes(b"")
    scores = [json.dumps({"epoch": epoch, "scores": {"dev_loss_ce": abs(epoch - 3)}}) for epoch in range(1, 8)]
    (tmp_path / "scores.jsonl").write_text("\n".join(scores))
    rule = {"keep_last_n": 1, "keep_best_n": 2, "keep": []}
    cleaned = run(config, {**keys, "task": "cleanup_old_models", "model": tmp_path / "model", "cleanup_old_models": rule})
    assert cleaned.status == 0, cleaned.err
    assert "We will delete the models of epochs [1, 4, 5, 6]." in cleaned.out
    assert sorted(path.name for path in tmp_path.glob("model.*")) == [f"model.00{epoch}.{suffix}" for epoch in (2, 3, 7)]
    again = run(config, {**keys, "task": "cleanup_old_models", "model": tmp_path / "model", "cleanup_old_models": rule})
    assert f"{tmp_path}/model: of 3 models, none is to be deleted." in again.out
