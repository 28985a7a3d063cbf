"""Checkpoints within an epoch whose batches were others when they were written."""

import re
from pathlib import Path

import numpy
import pytest
import torch

from hvdtrain.data.config_datasets import parse
from hvdtrain.data.feed import Feed
from hvdtrain.data.opening import open_dataset
from hvdtrain.data.plan import order, order_keys
from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.data.plan.inputs import differences
from hvdtrain.data.plan.order_keys import OrderKeys
from hvdtrain.errors import CheckpointError
from hvdtrain.run import train
from hvdtrain.settings import read_settings

CONFIG = """
import torch
train = {"class": "Task12AXDataset", "num_seqs": 11, "seq_ordering": "laplace:4"}
model = MODEL
learning_rate, num_epochs, max_seqs, num_threads, save_interval_steps = 0.01, 2, 1, 1, 7
def get_model(**_):
    return torch.nn.Linear(9, 2)
def train_step(*, model, extern_data, **_):
    import hvdtrain
    context = hvdtrain.get_run_ctx()
    if context.step == config.int("fails", 0):
        raise EOFError
    context.mark_as_loss(model(extern_data["data"].raw_tensor).square().sum(-1), "some")
"""


def laplace_of_version_1(lengths: numpy.ndarray, indices: numpy.ndarray, bins: int) -> numpy.ndarray:
    """With the first bins longer by one."""
    for number, part in enumerate(numpy.array_split(indices, bins)):
        here = lengths[part]
        part[:] = part[numpy.argsort(here if number % 2 == 0 else ~here, kind="stable")]
    return indices


def written_by_version_1(folder: Path, monkeypatch: pytest.MonkeyPatch, fails: int, ordering: str = "laplace:4") -> Path:
    """A config whose training has a checkpoint of the older version, from before its step `fails`."""
    path = folder / "config.py"
    path.write_text(CONFIG.replace("MODEL", repr(str(folder / "model"))))
    with monkeypatch.context() as patch:
        patch.setattr(order, "laplace", laplace_of_version_1)
        with pytest.raises(EOFError):
            train(read_settings([path], {"fails": str(fails), "train.seq_ordering": ordering}))
    for file in folder.glob("model*.pt"):
        contents = torch.load(file, weights_only=True)
        if contents["within"] is not None:
            assert contents["within"].pop("order_version") == order_keys.ORDER_VERSION
            torch.save(contents, file)
    return path


def test_another_laplace_within_an_epoch_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written_by_version_1(tmp_path, monkeypatch, fails=9)
    with pytest.raises(CheckpointError) as refused:
        train(read_settings([path], {"fails": "-1"}))
    assert str(refused.value) == (
        "epoch 1: expected the batches it began with, got others after 7 of them (laplace cuts its bins as RETURNN does now; "
        "before, the first bins were longer by one sequence: continue with the version of hvdtrain that wrote the checkpoint, or "
        f"remove {tmp_path / 'model.001.step-7.pt'} to repeat the epoch from its beginning)"
    )
    with pytest.raises(
        CheckpointError, match="got others after 7 of them: seq_ordering: random, expected laplace:4 .continue with"
    ):
        train(read_settings([path], {"fails": "-1", "train.seq_ordering": "random"}))


@pytest.mark.parametrize(("ordering", "fails"), [("laplace:4", 11), ("random", 9)])
def test_the_end_of_an_epoch_and_other_orders_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ordering: str, fails: int
) -> None:
    path = written_by_version_1(tmp_path, monkeypatch, fails, ordering)
    train(read_settings([path], {"fails": "-1", "train.seq_ordering": ordering}))
    assert (tmp_path / "model.002.pt").exists()


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"max_seqs": "2"}, "max_seqs per rank: 2, expected 1"),
        ({"chunking": "3:3", "shuffle_batches": "1"}, "shuffle_batches: True, expected False; chunking: "),
        (
            {"train.seq_ordering": "sorted", "train.random_seed_offset": "1"},
            "seq_ordering: sorted, expected laplace:4; the seed of",
        ),
    ],
)
def test_other_batches_are_refused_with_what_differs(tmp_path: Path, changed: dict[str, str], difference: str) -> None:
    path = tmp_path / "config.py"
    path.write_text(CONFIG.replace("MODEL", repr(str(tmp_path / "model"))))
    with pytest.raises(EOFError):
        train(read_settings([path], {"fails": "9"}))
    with pytest.raises(CheckpointError, match=re.escape(f"got others after 7 of them: {difference}")):
        train(read_settings([path], {"fails": "-1", **changed}))
    (file,) = tmp_path.glob("model*.step-7.pt")
    contents = torch.load(file, weights_only=True)
    contents["within"].pop("made_from")  # as in checkpoints of before
    torch.save(contents, file)
    with pytest.raises(CheckpointError, match="got others after 7 of them .continue with the same data and the same keys"):
        train(read_settings([path], {"fails": "-1", **changed}))
    train(read_settings([path], {"fails": "-1"}))
    assert (tmp_path / "model.002.pt").exists()


@pytest.mark.parametrize(
    ("keys", "warning"),
    [
        (
            {"max_seqs_total": "2"},
            "max_seqs_total: epoch 1 began on 2 ranks and keeps its batches of 1: until it ends, a step has 1 on 1 rank",
        ),
        ({"batch_size_total": "{'data': 100000}", "max_seqs_total": "2"}, "began on 2 ranks and keeps its batches"),
        (
            {"max_seqs": "1", "horovod_dataset_distribution": "random_seed_offset", "train.seq_ordering": "random"},
            "horovod_dataset_distribution: epoch 1 began on 2 ranks, each with an order of its own: what the others had left",
        ),
    ],
)
def test_an_epoch_goes_on_on_fewer_ranks_with_the_batches_that_it_began_with(
    tmp_path: Path, keys: dict[str, str], warning: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank takes the place of the first of two, for which its batches are as large."""
    path = tmp_path / "config.py"
    path.write_text(CONFIG.replace("MODEL", repr(str(tmp_path / "model"))))
    as_of_two = keys | {"max_seqs": "1", "batch_size_total": "None", "max_seqs_total": "None", "num_epochs": "1"}
    train(read_settings([path], {**as_of_two, "model": str(tmp_path / "undisturbed"), "fails": "-1"}))
    with pytest.raises(EOFError):
        train(read_settings([path], {**as_of_two, "fails": "9"}))
    (file,) = tmp_path.glob("model*.step-7.pt")
    contents = torch.load(file, weights_only=True)
    contents["within"]["made_from"]["ranks"] = "2"
    contents["within"]["fingerprints"] += [1] if "horovod_dataset_distribution" in keys else []
    torch.save(contents, file)
    capsys.readouterr()
    train(read_settings([path], {"max_seqs": "None", **keys, "num_epochs": "2", "fails": "-1"}))
    assert warning in capsys.readouterr().out
    undisturbed, resumed = (torch.load(tmp_path / f"{name}.001.pt", weights_only=True) for name in ("undisturbed", "model"))
    assert all(torch.equal(values, resumed["model"][name]) for name, values in undisturbed["model"].items())
    assert torch.load(tmp_path / "model.002.pt", weights_only=True)["step"] == (22 if "max_seqs" in keys else 11 + 6)


def test_the_number_of_ranks_is_among_what_differs() -> None:
    dataset = open_dataset(parse("train", {"class": "Task12AXDataset", "num_seqs": 9}, {})[0])
    one, two = (
        Feed("train", dataset, OrderKeys(), BatchKeys(max_seqs_total=4).per_rank(size), 0, size).plan_inputs(1) for size in (1, 2)
    )
    assert differences(one, two) == "ranks: 2, expected 1; max_seqs per rank: 2, expected 4"
    assert differences({}, two) == ""
