"""Tasks besides training, on one and on two ranks."""

import gzip
import json
from pathlib import Path

import numpy
import pytest
from inside import run_inside
from launching import TOY, Finished, hvdtrain
from trainings import Run, Trained, trains

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

if config.bool("hands_on", False):
    forward_callback = Callback

def hello():
    print("hello from the config")
"""


def run(config: Path, overrides: dict[str, object]) -> Finished:
    """Run the toy config with what another one adds."""
    given = (overrides).items()
    return run_inside([TOY, config, *(word for name, value in given for word in (f"++{name}", value))])


TWO = Run("torch", "horovod", 2)
SEARCH: dict[str, object] = {
    "task": "search",
    "search_output_file_format": "py",
    "search_output_layer": "best",
    "search_labels": ["a", "b", "c", "d", "e"],
}


@trains(slow=[TWO])
def tasks(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    """A training, and the tasks with its model."""
    folder.mkdir(parents=True, exist_ok=True)
    configs = [TOY, write_config(folder)]
    search_data = folder.parent.parent.parent / "corpus" / "dev.hdf"
    keys: dict[str, dict[str, object]] = {
        "trained": {"num_epochs": 2},
        "eval": {"task": "eval", "load_epoch": 1},
        "forward": {"task": "forward", "output_file": folder / "out-2.hdf", "told": folder / "told-2", "hands_on": True},
        "search": {**SEARCH, "search_data": search_data, "search_output_file": folder / "search-2.py.gz"},
    }
    common = {"configs": configs, "saved_as": "trained", "evaluated": True, "log_interval": 100}
    return {name: common | own for name, own in keys.items()}


def write_config(folder: Path) -> Path:
    path = folder / "config.py"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def after_training(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    folder = tmp_path_factory.mktemp("tasks")
    config = write_config(folder)
    keys: dict[str, object] = {"corpus": corpus, "model": folder / "model", "evaluated": True, "log_interval": 100}
    assert run(config, {**keys, "num_epochs": 2}).status == 0
    return config, keys


def test_eval_gives_the_scores_of_the_training(after_training: tuple[Path, dict[str, object]]) -> None:
    config, keys = after_training
    scores = json.loads((config.parent / "scores.jsonl").read_text().splitlines()[0])["scores"]
    finished = run(config, {**keys, "task": "eval", "load_epoch": 1})
    assert finished.status == 0, finished.err
    assert f"epoch 1 evaluation: dev: ce {scores['dev_loss_ce']:.4g}, fer {scores['dev_loss_fer']:.4g}" in finished.out


def test_forward_hands_outputs_on_in_the_datasets_order(after_training: tuple[Path, dict[str, object]], corpus: Path) -> None:
    config, keys = after_training
    out, told = config.with_name("out.hdf"), config.with_name("told")
    finished = run(config, {**keys, "task": "forward", "output_file": out, "told": told, "hands_on": True})
    assert finished.status == 0, finished.err
    assert "Forward " in finished.out
    lines = told.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("model has 6 parameters", "finished")
    dev, written = open_hdf([corpus / "dev.hdf"]), open_hdf([out])
    assert [line.split()[0] for line in lines[1:-1]] == dev.tags(range(101)) == written.tags(range(101))
    for index in range(101):
        sequence = written.sequence(index)
        assert sequence["data"].shape == (len(dev.sequence(index)["data"]), 5)
        assert numpy.array_equal(sequence["data"].argmax(-1), sequence["best"])
        assert numpy.array_equal(sequence["first"], sequence["data"][:1])  # no axis of time: one frame of five numbers
        assert numpy.array_equal(sequence["root"], numpy.sqrt([len(sequence["data"])], dtype=numpy.float32))
    assert not list(config.parent.glob("*.unfinished"))
    again = run(config, {**keys, "task": "forward", "output_file": out})
    assert again.status == 2
    assert "out.hdf: expected a file that does not exist yet (output_file)" in again.err


def test_sequences_without_an_output_are_a_warning(after_training: tuple[Path, dict[str, object]]) -> None:
    config, keys = after_training
    given = {**keys, "task": "forward", "told": config.with_name("few"), "hands_on": True, "forward_data.max_batches": 2}
    said = "eval: the outputs are those of 14 of 101 sequences (max_batches = 2)"
    for number, most in enumerate((None, 2)):
        out = run(config, {**given, "forward_data.max_batches": most}).out
        assert (said.replace("eval", "forward_data") in out) == (number == 1), out


def test_outputs_that_would_have_padding_are_refused(after_training: tuple[Path, dict[str, object]], tmp_path: Path) -> None:
    config = write_config(tmp_path)
    config.write_text(CONFIG.replace("(scores, seq_lens=data.seq_lens)", "(scores)"))
    for given, status in ({}, 2), ({"max_seqs": 1}, 0), ({"max_seqs": 101}, 0):
        out = tmp_path / f"{status}-{len(given)}-{given.get('max_seqs')}.hdf"
        finished = run(config, {**after_training[1], "task": "forward", "output_file": out, **given})
        assert finished.status == status, finished.err
        assert ("expected seq_lens in mark_as_output(..., 'output')" in finished.err) == (status == 2)
        assert ("also for shorter ones: if that is padding" in finished.out) == (given.get("max_seqs") == 101)


def test_search_writes_texts_in_the_datasets_order(after_training: tuple[Path, dict[str, object]], corpus: Path) -> None:
    config, keys = after_training
    search = {**keys, **SEARCH, "search_data": corpus / "dev.hdf", "search_output_file": config.with_name("search.py.gz")}
    finished = run(config, search)
    assert finished.status == 0, finished.err
    dev = open_hdf([corpus / "dev.hdf"])
    found = eval(gzip.decompress(config.with_name("search.py.gz").read_bytes()).decode())
    assert list(found) == dev.tags(range(101))
    assert [len(text.split()) for text in found.values()] == [len(dev.sequence(index)["data"]) for index in range(101)]
    assert not list(config.parent.glob("*.unfinished"))
    again = run(config, search)
    assert again.status == 2
    assert "search.py.gz: expected a file that does not exist yet (search_output_file)" in again.err
    early = run(config, {**search, "search_output_file": config.with_name("early"), "search_labels": ["a"]})
    assert early.status == 2
    assert "output 'best': expected numbers below 1 (the labels), got" in early.err
    assert not config.with_name("early").exists()


@pytest.mark.slow
def test_two_ranks_give_what_one_does(trained: Trained, corpus: Path, tmp_path: Path) -> None:
    """With the model that the two have trained."""
    results = trained(tasks, TWO)
    scores = results.scores("trained")[0]
    assert f"epoch 1 evaluation: dev: ce {scores['dev_loss_ce']:.4g}, fer {scores['dev_loss_fer']:.4g}" in results.out("eval")
    assert "Forward " in results.out("forward")
    config = write_config(tmp_path)
    keys = {"corpus": corpus, "model": results.models["trained"], "evaluated": True}
    forward = {"task": "forward", "output_file": tmp_path / "out.hdf", "told": tmp_path / "told", "hands_on": True}
    search = {**SEARCH, "search_data": corpus / "dev.hdf", "search_output_file": tmp_path / "search.py.gz"}
    for task in (forward, search):
        assert run(config, {**keys, **task}).status == 0
    assert (tmp_path / "told").read_text() == (results.folder / "told-2").read_text()
    one, two = open_hdf([tmp_path / "out.hdf"]), open_hdf([results.folder / "out-2.hdf"])
    assert one.tags(range(101)) == two.tags(range(101))
    for index in range(101):
        sequences = one.sequence(index), two.sequence(index)
        assert all(numpy.array_equal(sequences[0][key], sequences[1][key]) for key in ("data", "best", "root"))
    written = [gzip.decompress(path.read_bytes()) for path in (tmp_path / "search.py.gz", results.folder / "search-2.py.gz")]
    assert written[0] == written[1]
    assert not list(results.folder.glob("*.unfinished"))


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


@pytest.mark.parametrize(("backend", "suffix"), [("torch", "pt"), pytest.param("tensorflow", "npz", marks=pytest.mark.slow)])
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
