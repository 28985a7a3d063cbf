"""What a config may ask of the ranks: run_on_main and all_reduce, alone and in startup_callback."""

from pathlib import Path

import numpy
import pytest
from launching import TOY
from launching import hvdtrain as hvdtrain_command
from trainings import Run, Trained, trains

import hvdtrain
from hvdtrain.errors import ConfigError

MORE = """
import os
from pathlib import Path

import hvdtrain

folder = Path({folder!r})


def prepare():
    if {fails}:
        raise OSError("the disk is full")
    folder.joinpath("prepared").write_text(str(os.getpid()))
    return folder / "prepared"


def startup_callback(**_):
    path = hvdtrain.run_on_main(prepare)
    copied = hvdtrain.run_on_main(lambda: path.read_text() + " copied", once_per="host")
    total = hvdtrain.all_reduce(hvdtrain.rank() + 1)
    folder.joinpath(f"seen.{{hvdtrain.rank()}}").write_text(f"{{copied}} {{total}}")
"""


RUN = Run("torch", "torch.distributed", 2)


@trains(RUN)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    (folder / "more.py").write_text(MORE.format(folder=str(folder), fails=False))
    return {"started": {"configs": [TOY, folder / "more.py"], "part": "two.hdf", "max_seqs": 1}}


def test_alone_they_do_it_themselves() -> None:
    assert hvdtrain.run_on_main(lambda: 3) == 3
    assert hvdtrain.run_on_main(lambda: 3, once_per="host") == 3
    assert hvdtrain.all_reduce(0.5) == 0.5
    assert hvdtrain.all_reduce(4, "average") == 4
    numpy.testing.assert_array_equal(hvdtrain.all_reduce(numpy.arange(3), "max"), [0, 1, 2])
    with pytest.raises(ConfigError, match="all_reduce: expected 'sum', 'average', 'min' or 'max', got 'mean'"):
        hvdtrain.all_reduce(1, "mean")  # type: ignore[arg-type]


def test_before_the_ranks_are_connected_they_say_where_to_call_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDTRAIN_RANK", "1")
    monkeypatch.setenv("HVDTRAIN_SIZE", "2")
    with pytest.raises(ConfigError, match="run_on_main: expected a call after the 2 processes are connected") as caught:
        hvdtrain.run_on_main(lambda: 3)
    assert "startup_callback" in str(caught.value)


def test_in_startup_callback_one_prepares_what_all_use(trained: Trained) -> None:
    folder = trained(trainings, RUN).needed("started.out-0").parent
    expected = f"{(folder / 'prepared').read_text()} copied 3"
    assert [(folder / f"seen.{rank}").read_text() for rank in (0, 1)] == [expected, expected]


@pytest.mark.slow
def test_if_the_preparation_fails_all_ranks_end_and_the_reason_is_logged_once(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "more.py").write_text(MORE.format(folder=str(tmp_path), fails=True))
    keys = {"corpus": corpus, "model": tmp_path / "model", "part": "two.hdf", "max_seqs": 1, "ngpu": 2}
    finished = hvdtrain_command(TOY, keys, options=[str(tmp_path / "more.py")])
    assert finished.status != 0
    assert finished.err.count("rank 0 of 2: OSError: the disk is full") == 1
    assert not list(tmp_path.glob("seen.*"))
