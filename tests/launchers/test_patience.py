"""Ranks that wait for another one's long work, on two ranks of a real Horovod."""

import re
from pathlib import Path

from launching import ROOT, TOY, Finished, hvdtrain, launch


def patient(*how: str) -> Finished:
    return launch([str(ROOT / "tests" / "patient.py"), *how], ranks=2)


def test_no_rank_is_taken_for_hung_while_another_works_and_its_error_is_raised_on_all() -> None:
    """And no rank leaves before the others are done: mpirun would end them."""
    finished = patient("progress", "error")
    assert finished.status == 75, finished.err
    assert sorted(finished.out.splitlines()) == [
        "0 error rank 1: planted by the test True",
        "0 progress 10",
        "1 closes",
        "1 error rank 1: planted by the test True",
        "1 progress 11",
    ]
    assert finished.seconds > 4


def test_work_without_progress_ends_the_job() -> None:
    finished = patient("silence")
    assert finished.status != 0
    assert "no progress for 1 s (watchdog_timeout) in working" in finished.err
    assert finished.seconds < 30


CONFIG = """
from hvdtrain.comm.torch_dist import TorchCommunicator
from hvdtrain.plugins.watchdog import watchdog
from hvdtrain.plugins.forward import outputs as forward

forward.TASK_INTERVAL = 1.0
seconds, hangs = config.float("seconds", 0), config.value("hangs")


class Slow:
    def on_step_end(self, training):
        if training.rank == 0 and training.epoch == 2:
            training.stop("a test")

    def on_stop(self, training):
        if training.rank == 1:
            time.sleep(seconds)
        Path(f"{record}.stopped.{training.rank}").touch()


def track_epoch(*, epoch, **_):
    if epoch == 1:
        time.sleep(seconds)


callbacks = Slow
forward_data = dev or str(corpus / "dev.hdf")


def forward_step(*, model, extern_data, **_):
    data = extern_data["data"]
    time.sleep(seconds / 60 * (1 + hvdtrain.rank()))
    hvdtrain.get_run_ctx().mark_as_default_output(model(data.raw_tensor, data.mask), seq_lens=data.seq_lens)


class Callback:
    number = 0

    def init(self, *, model):
        pass

    def process_seq(self, *, seq_tag, outputs):
        self.number += 1
        time.sleep(600 if self.number == 60 else seconds / 40)

    def finish(self):
        pass


forward_callback = Callback


def close(self):
    time.sleep(600)


if hangs == "close" and hvdtrain.rank() == 1:
    TorchCommunicator.close = close
    watchdog.UNKNOWN = 6.0
"""


def with_slow_parts(corpus: Path, folder: Path, ranks: int | None, **overrides: object) -> Finished:
    config = folder / "config.py"
    config.write_text(TOY.read_text() + CONFIG)
    keys = {"corpus": corpus, "model": folder / "model", "record": folder / "record", **overrides}
    return hvdtrain(config, keys, ranks=ranks)


SLOW: dict[str, object] = {"seconds": 6, "watchdog_timeout": 4, "use_horovod": 1, "max_seqs": 1}


def test_callbacks_and_trackers_have_time(corpus: Path, tmp_path: Path) -> None:
    """On one rank, while the other one waits: longer than the watchdog's patience."""
    finished = with_slow_parts(corpus, tmp_path, 2, num_epochs=99, **SLOW)
    assert finished.status == 75, finished.err
    assert "stopped by a callback (a test) in epoch " in finished.err
    assert "watchdog_timeout" not in finished.err
    assert "blocked on" not in finished.err
    assert sorted(path.name for path in tmp_path.glob("record.stopped.*")) == ["record.stopped.0", "record.stopped.1"]


def test_so_has_forward_unless_its_callback_hangs(corpus: Path, tmp_path: Path) -> None:
    """Rank 1 takes longer than that after rank 0 for its batches, and rank 0 for 59 outputs, before it hangs."""
    assert with_slow_parts(corpus, tmp_path, None, num_epochs=1).status == 0
    finished = with_slow_parts(corpus, tmp_path, 2, task="forward", **SLOW)
    assert finished.status == 1
    found = re.search(
        r"rank 0 on \S+ hangs: no progress for \d s \(watchdog_timeout\) in handing on .*, (\d+) of 101 seq", finished.err
    )
    assert found is not None, finished.err
    assert 20 <= int(found[1]) < 60
    assert "in process_seq" in finished.err


def test_a_rank_that_hangs_where_the_ranks_disconnect_ends_the_job(corpus: Path, tmp_path: Path) -> None:
    finished = with_slow_parts(corpus, tmp_path, None, hangs="close", ngpu=2, torch_distributed="{}")
    assert finished.status == 1
    assert (tmp_path / "model.001.pt").exists()
    assert re.search(r"rank 1: no progress for \d s \(watchdog_timeout\) in closing the job", finished.err), finished.err
    assert "in close" in finished.err


def test_what_hangs_after_a_checkpoint_has_no_more_time_than_a_step(corpus: Path, tmp_path: Path) -> None:
    """Here, in the plan of the next epoch, after a callback that has half an hour."""
    config = tmp_path / "config.py"
    config.write_text(
        TOY.read_text()
        + """
class Saved:
    def on_save(self, training):
        pass


def order(*, epoch, **_):
    time.sleep(600 if epoch == 2 else 0)
    return "default"


callbacks = Saved
train["seq_ordering"] = order
"""
    )
    keys = {"corpus": corpus, "model": tmp_path / "model", "num_epochs": 2, "watchdog_timeout": 4}
    finished = hvdtrain(config, keys, environment={"PYTHONFAULTHANDLER": "1"})
    assert finished.status == 1
    assert re.search(r"rank 0: no progress for \d s \(watchdog_timeout\) in epoch 2, planning; its threads", finished.err)
