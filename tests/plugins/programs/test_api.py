"""hvdtrain called by another program: `hvdtrain.train(...)` and what belongs to it (api.py)."""

import faulthandler
import json
import logging
import os
import random
import re
import signal
import sys
import threading
import types
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import tqdm
from launching import ROOT, faults, launch, refused
from learners import tiny
from torch import nn

import hvdtrain
from hvdtrain.errors import BrokenSequence
from hvdtrain.runtime.interrupt import Stopped

SMALLEST = ROOT / "configs" / "smallest.py"


def keys_of(folder: Path, **more: Any) -> dict[str, Any]:
    """A config of closures, which trains in a fraction of a second."""

    def get_model(**_: Any) -> nn.Module:
        return nn.Sequential(nn.Embedding(5, 8), nn.Dropout(0.1), nn.Linear(8, 5))

    def train_step(*, model: nn.Module, extern_data: Mapping[str, Any], **_: Any) -> None:
        data = extern_data["data"]
        scores, targets, mask = model(data.raw_tensor)[:, :-1], data.raw_tensor[:, 1:], data.mask[:, 1:]
        losses = nn.functional.cross_entropy(scores[mask], targets[mask], reduction="none")
        hvdtrain.get_run_ctx().mark_as_loss(losses, "ce", use_normalized_loss=True)

    def forward_step(*, model: nn.Module, extern_data: Mapping[str, Any], **_: Any) -> None:
        data = extern_data["data"]
        hvdtrain.get_run_ctx().mark_as_default_output(model(data.raw_tensor), seq_lens=data.seq_lens)

    functions = {"get_model": get_model, "train_step": train_step, "forward_step": forward_step}
    return tiny(folder, 5) | functions | more


@pytest.fixture(autouse=True)
def fresh_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logger as a program finds it: other tests of this process train as the command line does, which opens the log."""
    log = logging.getLogger("hvdtrain")
    for name, value in {"handlers": [], "level": logging.NOTSET, "propagate": True}.items():
        monkeypatch.setattr(log, name, value)


def small_config(folder: Path) -> Path:
    """That of the README with a hundred sequences for training and twenty for evaluations."""
    path = folder / "config.py"
    path.write_text(SMALLEST.read_text().replace("5500", "120").replace("500", "20"))
    return path


def lines_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line)["scores"] for line in (folder / "scores.jsonl").read_text().splitlines()]


def state_of_the_process() -> dict[str, Any]:
    """What a program would not like to find changed."""
    log = logging.getLogger("hvdtrain")
    return {
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals() if number < signal.SIGRTMIN},
        "faulthandler": faulthandler.is_enabled(),
        "threads": set(threading.enumerate()),
        "handlers": list(logging.getLogger().handlers),
        "log": (list(log.handlers), log.level, log.propagate, list(log.filters)),
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "path": list(sys.path),
        "finders": list(sys.meta_path),
        "streams": (sys.stdout, sys.stderr),
        "tqdm": tqdm.tqdm.monitor_interval,
        "torch": (torch.get_num_threads(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()),
        "generators": (torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()),
        "children": (Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()),
    }


@pytest.mark.slow
def test_the_numbers_are_those_of_the_command_line(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    finished = launch(["-m", "hvdtrain", config, "++num_epochs", 1, "++model", tmp_path / "cli" / "model"])
    assert finished.status == 0, finished.err
    result = hvdtrain.train(config, num_epochs=1, model=str(tmp_path / "api" / "model"))
    assert [record.scores for record in result.history] == lines_of(tmp_path / "cli") == lines_of(tmp_path / "api")
    assert result.scores == lines_of(tmp_path / "api")[-1]
    saved = [torch.load(tmp_path / name / "model.001.pt")["model"] for name in ("cli", "api")]
    assert all(torch.equal(saved[0][name], tensor) for name, tensor in saved[1].items())
    assert "helpers" not in sys.modules


def test_closures_train_and_leave_the_process_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = keys_of(tmp_path, deterministic=True, save_in_background=True)
    torch.manual_seed(7)
    before = state_of_the_process()
    result = hvdtrain.train(keys, num_epochs=3)
    by_name = hvdtrain.train(**keys_of(tmp_path / "by_name", deterministic=True, num_epochs=3))
    assert state_of_the_process() == before
    assert by_name.history == result.history
    assert capsys.readouterr() == ("", "")
    assert [record.epoch for record in result.history] == [1, 2, 3]
    assert result.history[0].scores["dev_loss_ce"] > result.scores["dev_loss_ce"]
    assert result.num_epochs == 3
    assert result.checkpoint == tmp_path / "model.003.pt"
    saved = torch.load(result.checkpoint)["model"]
    assert all(torch.equal(saved[name], tensor) for name, tensor in result.model.state_dict().items())
    assert not result.model.training


def test_one_process_trains_twice_with_the_same_numbers_and_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = hvdtrain.train(keys_of(tmp_path / "a"), num_epochs=1)
    second = hvdtrain.train(keys_of(tmp_path / "b"))
    assert second.history[0] == first.history[0]
    went_on = hvdtrain.train(keys_of(tmp_path / "a"))
    assert went_on.num_epochs == 1
    assert went_on.history == second.history
    assert not caplog.records
    again = hvdtrain.train(keys_of(tmp_path / "a"))
    assert (again.num_epochs, again.history) == (0, second.history)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "Already trained until final epoch 2, nothing to do.")
    ]


def test_the_best_epoch_is_that_of_best_json(tmp_path: Path) -> None:
    result = hvdtrain.train(keys_of(tmp_path, learning_rates=[0.01, 0.01, 100.0], num_epochs=3))
    stated = json.loads((tmp_path / "best.json").read_text())
    assert result.best is not None
    assert (result.best.epoch, result.best.measure, result.best.score) == (stated["epoch"], "dev_loss_ce", stated["score"])
    assert result.best.epoch < 3
    assert result.best.checkpoint == tmp_path / stated["file"]
    loaded = hvdtrain.load_model(result.best.checkpoint, keys_of(tmp_path))
    saved = torch.load(tmp_path / stated["file"])["model"]
    assert all(torch.equal(saved[name], tensor) for name, tensor in loaded.state_dict().items())


def test_averages_are_part_of_the_result(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, average_checkpoints=[{"last": 2}, {"best": 1}], ema_decay=0.9)
    for result in (hvdtrain.train(keys), hvdtrain.train(keys)):  # a second call has nothing to train
        stated = json.loads((tmp_path / "averages.json").read_text())
        assert [(one.name, one.scores) for one in result.averages] == [(one["name"], one["scores"]) for one in stated]
        assert [one.name for one in result.averages] == ["last-2", "best-1", "trained weights"]
        files = [one.checkpoint for one in result.averages]
        assert files == [tmp_path / "model.last-2.pt", tmp_path / "model.best-1.pt", None]
    assert files[0] is not None
    loaded = hvdtrain.load_model(files[0], keys_of(tmp_path)).state_dict()
    first, last = (torch.load(tmp_path / f"model.00{epoch}.pt")["model"] for epoch in (1, 2))
    for name, tensor in loaded.items():
        torch.testing.assert_close(tensor, ((first[name].double() + last[name].double()) / 2).to(tensor.dtype))
    assert hvdtrain.train(keys_of(tmp_path)).averages == []


def test_the_files_of_overfit_batches_are_found(tmp_path: Path) -> None:
    result = hvdtrain.train(keys_of(tmp_path, overfit_batches=1))
    assert result.best is not None
    assert result.best.checkpoint is not None
    assert result.best.checkpoint.exists()
    assert result.checkpoint == tmp_path / "overfit" / "model.002.pt"


@pytest.mark.parametrize("keys", [{"ema_decay": 0.9}, {"optimizer": {"class": "schedulefree.AdamWScheduleFree"}}], ids=str)
def test_the_model_of_the_result_is_what_was_evaluated(tmp_path: Path, keys: dict[str, Any]) -> None:
    result = hvdtrain.train(keys_of(tmp_path, **keys))
    saved = torch.load(result.checkpoint)["model"]
    assert all(torch.equal(saved[name], tensor) for name, tensor in result.model.state_dict().items())


def test_evaluations_that_can_read_nothing_are_an_error(tmp_path: Path) -> None:
    """They had no scores, without a word."""
    broken = [("a", {"data": numpy.array([1.0, numpy.nan])}), ("b", {"data": numpy.array([numpy.inf])})]

    def train_step(*, model: nn.Module, extern_data: Mapping[str, Any], **_: Any) -> None:
        hvdtrain.get_run_ctx().mark_as_loss(model(extern_data["data"].raw_tensor[..., None].float()).flatten(), "output")

    keys = {"get_model": lambda **_: nn.Linear(1, 1), "train_step": train_step, "num_epochs": 1, "skip_broken": 2}
    with pytest.raises(BrokenSequence, match="dev: expected sequences that can be read, got only broken ones"):
        hvdtrain.train(keys_of(tmp_path, dev=broken, train=[("c", {"data": numpy.ones(3)})], **keys))


def test_it_logs_as_logging_does(tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    caplog.set_level(logging.INFO)
    hvdtrain.train(keys_of(tmp_path, num_epochs=1, log=str(tmp_path / "train.log"), log_verbosity=[4, 3]))
    lines = {record.getMessage().partition("  ")[0]: record for record in caplog.records}
    assert lines["epoch 1/1"].levelname == "INFO"  # scores, which are no errors
    assert lines["epoch 1/1"].name == "hvdtrain"
    assert all(record.levelno >= logging.INFO for record in caplog.records)
    assert "start epoch 1" in (tmp_path / "train.log").read_text()  # of log_verbosity 4
    assert capsys.readouterr().out == ""


def test_evaluate_and_forward(tmp_path: Path) -> None:
    keys = keys_of(tmp_path)
    result = hvdtrain.train(keys)
    assert hvdtrain.evaluate(keys) == {"dev_loss_ce": result.scores["dev_loss_ce"]}
    first = {"dev_loss_ce": result.history[0].scores["dev_loss_ce"]}
    assert hvdtrain.evaluate(keys, checkpoint=1) == hvdtrain.evaluate(keys, checkpoint=tmp_path / "model.001.pt") == first
    best = result.best
    assert best is not None
    assert hvdtrain.evaluate(keys, checkpoint="best") == {"dev_loss_ce": best.score}
    outputs = hvdtrain.forward(keys, forward_data=keys["dev"])
    assert [tag for tag, _ in outputs] == [f"seq-{number}" for number in range(20)]
    for (_, output), sequence in zip(outputs, keys["dev"], strict=True):
        with torch.no_grad():
            expected = result.model(torch.as_tensor(sequence)[None])[0]
        assert output["output"] == pytest.approx(expected.numpy(), abs=1e-6)
    assert hvdtrain.forward(keys, forward_data=keys["dev"], output_file=str(tmp_path / "out.hdf")) == []
    assert (tmp_path / "out.hdf").exists()


def test_a_model_is_loaded_as_its_training_was_started(tmp_path: Path) -> None:
    config = tmp_path / "config.py"
    config.write_text(
        small_config(tmp_path)
        .read_text()
        .replace("nn.GRU(32, 64", "nn.GRU(32, size")
        .replace("nn.Linear(64, 10)", "nn.Linear(size, 10)")
        .replace("num_threads = 1", "num_threads = 1\nsize = 64")
    )
    result = hvdtrain.train(config, num_epochs=1, size=8, model=str(tmp_path / "exp" / "model"))
    loaded = hvdtrain.load_model(result.checkpoint, config, size=8)
    assert all(torch.equal(result.model.state_dict()[name], tensor) for name, tensor in loaded.state_dict().items())
    with pytest.raises(hvdtrain.HvdtrainError, match="expected"):
        hvdtrain.load_model(result.checkpoint, config)  # another size
    started = hvdtrain.train(config, num_epochs=1, max_seqs_total=40, model=str(tmp_path / "other" / "model"))
    loaded = hvdtrain.load_model(started.checkpoint)
    assert all(torch.equal(started.model.state_dict()[name], tensor) for name, tensor in loaded.state_dict().items())
    with pytest.raises(hvdtrain.HvdtrainError, match="expected a model's file, such as .*model.001.pt, got the folder"):
        hvdtrain.load_model(tmp_path / "other")
    config.write_text(config.read_text().replace("size = 64", "size = 16"))
    with pytest.raises(hvdtrain.HvdtrainError, match="expected the config that the model was trained with, got another text"):
        hvdtrain.load_model(started.checkpoint)
    closures = hvdtrain.train(keys_of(tmp_path / "closures", num_epochs=1))
    with pytest.raises(hvdtrain.HvdtrainError, match="an object of the program"):
        hvdtrain.load_model(closures.checkpoint)


def test_mistakes_are_reported_all_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdtrain.plugins.programs.spawn.find_spec", lambda name: None)  # without cloudpickle
    with pytest.raises(hvdtrain.ConfigError) as raised:
        hvdtrain.train(keys_of(tmp_path), num_epoch=3, learning_rate=-1.0, color="red", **{"train.seq_ordering": "random"})
    names = [problem.key for problem in raised.value.problems]
    assert names == ["train.seq_ordering", "num_epoch", "color", "learning_rate"]
    for ranks in (0, True, "2"):
        with refused("ranks: out-of-range"):
            hvdtrain.train(keys_of(tmp_path), ranks=ranks)  # type: ignore[arg-type]
    with pytest.raises(hvdtrain.ConfigError) as raised:
        hvdtrain.train(keys_of(tmp_path), ranks=2)
    assert faults(raised.value.problems) == [f"{name}: cannot-import" for name in ("get_model", "train_step", "forward_step")]
    with refused("config: wrong-type"):
        hvdtrain.train([SMALLEST, 3])  # type: ignore[list-item]
    with refused("use_horovod: conflict"):
        hvdtrain.train(SMALLEST, ranks=2, use_horovod=True)
    with refused("min_ngpu: conflict"):  # the call's ranks are those that may be started again
        hvdtrain.train(SMALLEST, ranks=2, max_restarts=1, min_ngpu=3)


def test_one_job_at_a_time(tmp_path: Path) -> None:
    keys = keys_of(tmp_path / "outer", num_epochs=1)
    found = []

    class Nested:
        def on_train_begin(self, training: Any) -> None:
            try:
                hvdtrain.train(keys_of(tmp_path / "inner"))
            except hvdtrain.HvdtrainError as error:
                found.append(str(error))

    hvdtrain.train(keys, callbacks=Nested())
    assert len(found) == 1
    assert "expected one job at a time in a process" in found[0]
    assert not (tmp_path / "inner").exists()


def test_ctrl_c_is_a_keyboard_interrupt_and_leaves_nothing_behind(tmp_path: Path) -> None:
    class Interrupts:
        def on_step_end(self, training: Any) -> None:
            if training.step == 3:
                signal.raise_signal(signal.SIGINT)

    before = state_of_the_process()
    with pytest.raises(KeyboardInterrupt):
        hvdtrain.train(keys_of(tmp_path), callbacks=Interrupts())
    assert state_of_the_process() == before
    assert not list(tmp_path.glob("*.pt"))
    with pytest.raises(Stopped) as stopped:
        hvdtrain.train(keys_of(tmp_path), callbacks=Interrupts(), handle_signals=True)
    assert stopped.value.status == 130
    assert state_of_the_process() == before
    assert list(tmp_path.glob("model.*.pt"))
    whole = hvdtrain.train(keys_of(tmp_path / "whole"))
    assert hvdtrain.train(keys_of(tmp_path)).history == whole.history


def test_a_thread_trains_but_handles_no_signals(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(hvdtrain.train, keys_of(tmp_path / "a", num_epochs=1)).result()
        assert result.history == hvdtrain.train(keys_of(tmp_path / "b", num_epochs=1)).history
        with pytest.raises(hvdtrain.HvdtrainError, match="handle_signals: expected a call in the main thread, got one in"):
            pool.submit(hvdtrain.train, keys_of(tmp_path / "c"), handle_signals=True).result()
    assert not (tmp_path / "c").exists()


def test_an_error_of_a_function_is_raised_as_it_is(tmp_path: Path) -> None:
    def train_step(**_: Any) -> None:
        raise ZeroDivisionError("of the program")

    before = state_of_the_process()
    with pytest.raises(ZeroDivisionError, match="of the program"):
        hvdtrain.train(keys_of(tmp_path, train_step=train_step))
    assert state_of_the_process() == before


def test_modules_next_to_two_configs_are_not_confused(tmp_path: Path) -> None:
    text = small_config(tmp_path).read_text().replace("import hvdtrain\n", "import hvdtrain\nfrom beside import size\n")
    for name, size in {"a": 8, "b": 16}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "beside.py").write_text(f"size = {size}\n")
        (tmp_path / name / "config.py").write_text(text.replace("64", "size"))
        result = hvdtrain.train(tmp_path / name / "config.py", num_epochs=1, model=str(tmp_path / name / "model"))
        assert result.model.gru.hidden_size == size
    assert "beside" not in sys.modules


@pytest.mark.parametrize("place", ["folder of the config", "another folder"])
def test_an_override_of_an_imported_constant_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """A program that lies in its config's folder, as most do, or that has the module on its path."""
    text = small_config(tmp_path).read_text().replace("import hvdtrain\n", "import hvdtrain\nfrom beside import size\n")
    (tmp_path / "config.py").write_text(text.replace("64", "size"))
    folder = tmp_path if place == "folder of the config" else tmp_path / "other"
    folder.mkdir(exist_ok=True)
    (folder / "beside.py").write_text("size = 8\n")
    monkeypatch.syspath_prepend(folder)
    for number, (keys, size) in enumerate([({"size": 16}, 16), ({}, 8)]):
        result = hvdtrain.train(tmp_path / "config.py", num_epochs=1, model=str(tmp_path / str(number) / "model"), **keys)
        assert result.model.gru.hidden_size == size
    sys.modules.pop("beside", None)


def test_importing_it_is_light() -> None:
    program = "import sys, hvdtrain; print(sorted({'numpy', 'logging', 'argparse'} & set(sys.modules)), 'train' in dir(hvdtrain))"
    assert launch(["-c", program]).out == "[] True\n"


FAILS = """
import hvdtrain

def train_step(**_):
    if hvdtrain.rank() == 1:
        raise FloatingPointError("of rank 1")
    plain_step(**_)
"""


@pytest.mark.slow
def test_ranks_get_functions_that_they_cannot_import_with_their_code(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    keys = keys_of(tmp_path / "two", num_epochs=1)
    del keys["max_seqs"]
    two = hvdtrain.train(keys, ranks=2, max_seqs_total=5, deterministic=True)
    one = hvdtrain.train(keys, ranks=1, max_seqs_total=5, model=str(tmp_path / "one" / "model"))
    assert two.scores["dev_loss_ce"] == pytest.approx(one.scores["dev_loss_ce"], rel=0.05)
    assert isinstance(two.model, nn.Sequential)


@pytest.mark.slow
def test_an_error_of_a_rank_is_raised_with_its_traceback(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.write_text(config.read_text() + FAILS.replace("\ndef", "\nplain_step = train_step\n\ndef"))
    before = state_of_the_process()
    with pytest.raises(FloatingPointError, match="of rank 1") as raised:
        hvdtrain.train(config, ranks=2, num_epochs=1, model=str(tmp_path / "model"))
    assert state_of_the_process() == before
    assert raised.value.__notes__[-1] == "on rank 1 of 2"
    assert 'in train_step\n    raise FloatingPointError("of rank 1")' in str(raised.value.__cause__)


@pytest.mark.slow
def test_the_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """In order, as one program, whose config has less data. The ranks that one starts compute what those of the command line do;
    the study with Optuna is among them.
    """
    text = (ROOT / "docs" / "python_api.md").read_text()
    (tmp_path / "configs").mkdir()
    small_config(tmp_path).rename(tmp_path / "configs" / "smallest.py")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        if "ranks=2" not in block:
            exec(block, names)
            assert lines_of(tmp_path / "exp" / "a")
            continue
        before = state_of_the_process()
        with caplog.at_level(logging.INFO):
            exec(block, names)
            assert state_of_the_process() == before
        assert [record.getMessage() for record in caplog.records if record.getMessage().startswith("epoch 1/1  train ce ")]
        finished = launch(
            [
                "-m",
                "hvdtrain",
                tmp_path / "configs/smallest.py",
                *"++num_epochs 1 ++ngpu 2 ++model".split(),
                tmp_path / "cli/model",
            ]
        )
        assert finished.status == 0, finished.err
        result = names["result"]
        assert [record.scores for record in result.history] == lines_of(tmp_path / "cli") == lines_of(tmp_path / "exp" / "two")
        assert result.best.checkpoint == result.checkpoint == tmp_path / "exp" / "two" / "model.001.pt"
        saved = torch.load(result.checkpoint)["model"]
        assert all(torch.equal(saved[name], tensor) for name, tensor in result.model.state_dict().items())
    assert isinstance(names["model"], nn.Module)
    assert len(names["study"].trials) == 3
    for trial in names["study"].trials:
        scores = [line["dev_loss_ce"] for line in lines_of(tmp_path / "exp" / "study" / str(trial.number))]
        assert trial.value == min(scores)
    assert len({trial.value for trial in names["study"].trials}) == 3


NOTEBOOK = """
import sys
sys.path[:0] = {folders!r}
import threading
import types
from pathlib import Path
import hvdtrain
from test_api import keys_of
result = hvdtrain.train(keys_of(Path({folder!r})), num_epochs=2, log_interval_steps=1, callbacks=Slow())
print(result.scores, [thread.name for thread in threading.enumerate() if "watchdog" in thread.name])
"""


@pytest.mark.slow
def test_a_notebook_trains_and_shows_a_bar(tmp_path: Path) -> None:
    import nbclient
    import nbformat

    slow = "import time\nclass Slow:\n    def on_step_end(self, training):\n        time.sleep(0.05)"  # bars come after 0.2 s
    cells = [
        slow,
        NOTEBOOK.format(folders=[str(Path(__file__).parent), str(ROOT / "tests")], folder=str(tmp_path)),
        "result.model",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    [shown] = [output for output in notebook.cells[1].outputs if output.output_type == "stream" and output.name == "stdout"]
    assert "dev_loss_ce" in shown.text
    bars = [output.data for output in notebook.cells[1].outputs if output.output_type == "display_data"]
    assert any("application/vnd.jupyter.widget-view+json" in bar for bar in bars)
    widgets = notebook.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"]
    values = [str(widget["state"].get("value")).replace("\u2007", " ") for widget in widgets.values()]
    assert {"epoch 1: 100%", "epoch 2: 100%"} <= set(values), values
    assert "Embedding" in str(notebook.cells[2].outputs)


MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "24137"}
"""Where the ranks of torch.distributed meet: the port is the same for each training."""

PROGRAM = """
import sys
import hvdtrain

class Fails:
    def on_step_end(self, training):
        raise EOFError

keys = {"num_epochs": 1, sys.argv[3]: {} if sys.argv[3] == "torch_distributed" else True}
try:
    hvdtrain.train(sys.argv[1], model=f"{sys.argv[2]}/failed/model", callbacks=Fails(), **keys)
except EOFError:
    pass
for name in ("first", "second"):
    result = hvdtrain.train(sys.argv[1], model=f"{sys.argv[2]}/{name}/model", **keys)
    loaded = hvdtrain.load_model(result.checkpoint, sys.argv[1], model="other/model")
    assert all((loaded.state_dict()[name] == tensor).all() for name, tensor in result.model.state_dict().items())
    # A file per rank: what two ranks print may arrive mixed.
    with open(f"{sys.argv[2]}/rank-{hvdtrain.rank()}", "a") as file:
        print(result.scores["dev_loss_ce"], result.checkpoint.name, file=file)
"""


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["use_horovod", "torch_distributed"])
def test_the_processes_of_mpirun_are_ranks_and_train_again(tmp_path: Path, transport: str) -> None:
    config, program = small_config(tmp_path), tmp_path / "program.py"
    program.write_text(PROGRAM)
    finished = launch([str(program), str(config), str(tmp_path), transport], ranks=2, environment=MEETING)
    assert finished.status == 0, finished.err
    first, second = lines_of(tmp_path / "first"), lines_of(tmp_path / "second")
    assert first == second
    for rank in range(2):
        assert (tmp_path / f"rank-{rank}").read_text() == f"{first[-1]['dev_loss_ce']} model.001.pt\n" * 2


def test_a_notebook_shows_the_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []

    class Cell:
        update = shown.append

    monkeypatch.setattr("hvdtrain.plugins.programs.table.is_notebook", lambda: True)
    monkeypatch.setattr("IPython.display.display", lambda html, display_id: shown.append(html) or Cell)
    html = hvdtrain.train(keys_of(tmp_path))._repr_html_()
    assert [one.data.count("<tr") for one in shown] == [2, 3]
    assert html.startswith(shown[-1].data)
    assert html.startswith("<table><tr><td>epoch</td><td>learning rate</td><td>train ce</td><td>dev ce</td></tr><tr><td>1</td>")
    assert "<tr style=font-weight:bold><td>2</td><td>0.01</td>" in html
    assert html.endswith("model.002.pt</code>")


def test_a_pruned_trial_keeps_its_epoch(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    called = []

    class Prunes:
        def on_epoch_end(self, training: Any) -> None:
            raise optuna.TrialPruned("no better")

    class Later:  # in which other ranks may wait for this one
        def on_epoch_end(self, training: Any) -> None:
            called.append(training.epoch)

    with pytest.raises(optuna.TrialPruned, match="no better"):
        hvdtrain.train(keys_of(tmp_path, callbacks=[Prunes, Later]))
    assert called == [1]
    assert len((tmp_path / "scores.jsonl").read_text().splitlines()) == 1
    assert (tmp_path / "model.001.pt").exists()
    assert json.loads((tmp_path / "ends.jsonl").read_text())["status"] == "finished"
    with pytest.raises(optuna.TrialPruned, match="^no better$"):  # as after a kill at its end, when Optuna repeats the call
        hvdtrain.train(keys_of(tmp_path))
    assert len((tmp_path / "scores.jsonl").read_text().splitlines()) == 1, "the same call does not go on"


def test_track_epoch_may_prune_a_trial(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")

    def track_epoch(**_: Any) -> None:
        raise optuna.TrialPruned("no better")

    for _ in range(2):
        with pytest.raises(optuna.TrialPruned, match="^no better$"):
            hvdtrain.train(keys_of(tmp_path, track_epoch=track_epoch, save_interval=2))
    assert json.loads((tmp_path / "best.json").read_text())["file"] == "model.001.pt"


def test_a_pruned_trial_that_is_stopped_is_pruned_when_it_goes_on(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")

    class Prunes:
        def on_step_end(self, training: Any) -> None:
            training.stop("planted")
            raise optuna.TrialPruned("no better")

    with pytest.raises(Stopped):
        hvdtrain.train(keys_of(tmp_path, callbacks=Prunes, num_epochs=3))
    with pytest.raises(optuna.TrialPruned, match="^no better$"):
        hvdtrain.train(keys_of(tmp_path, num_epochs=3))
    assert hvdtrain.train(keys_of(tmp_path, num_epochs=4)).num_epochs == 3


def test_a_full_disk_is_noticed_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = keys_of(tmp_path, model=str(tmp_path / "[model]"), num_epochs=1)
    disk = types.SimpleNamespace(free=100)
    monkeypatch.setattr("shutil.disk_usage", lambda path: disk)
    with refused("model: not-writable"):
        hvdtrain.train(keys)
    assert not (tmp_path / "scores.jsonl").exists()
    disk.free = 10**6
    hvdtrain.train(keys)
    disk.free = 100
    assert hvdtrain.train(keys).num_epochs == 0, "nothing is left to train"
    (tmp_path / "[model].001.step-9.pt").write_bytes(bytes(10**6))  # of another checkpoint
    disk.free = 10**6
    hvdtrain.train(keys, num_epochs=2)
    disk.free = sum(file.stat().st_size for file in tmp_path.glob("?model].002.*")) - 1
    with refused("model: not-writable"):
        hvdtrain.train(keys, num_epochs=3)


def test_an_evaluation_needs_no_learning_rate_and_another_end_no_word_if_nothing_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    endless = {"class": "constant", "num_warmup_steps": 2}
    trained = hvdtrain.train(keys_of(tmp_path, learning_rate_schedule=endless))
    with caplog.at_level("INFO", "hvdtrain"):
        hvdtrain.train(keys_of(tmp_path, learning_rate_schedule=endless, num_epochs=3))
        hvdtrain.train(keys_of(tmp_path, learning_rate_schedule="cosine", num_epochs=4))
    assert "num_epochs: 3" not in caplog.text
    keys = keys_of(tmp_path)
    del keys["learning_rate"]
    assert hvdtrain.evaluate(keys, load_epoch=2) == {"dev_loss_ce": trained.scores["dev_loss_ce"]}


def test_transformers_of_pytorch_in_bfloat16_are_evaluated(tmp_path: Path) -> None:
    """Their fast path in evaluations does not know autocast on a CPU."""

    def get_model(**_: Any) -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        return nn.Sequential(nn.Embedding(5, 8), nn.TransformerEncoder(layer, 1), nn.Linear(8, 5))

    trained = hvdtrain.train(keys_of(tmp_path, get_model=get_model, mixed_precision="bfloat16", num_epochs=1))
    assert 0 < trained.scores["dev_loss_ce"] < 5
