"""What differs between ranks although it must not is an error, before anything is trained."""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import TOY, hvdtrain
from thread_ranks import ThreadCommunicator, on_ranks

from hvdtrain.comm.alike import OF_LOCAL_UPDATES, OWN_FOLDERS, OWN_KEYS, check_alike
from hvdtrain.comm.base import Communicator
from hvdtrain.comm.torch_dist import TorchCommunicator
from hvdtrain.comm.torch_pickled import gather_pickled
from hvdtrain.errors import ConfigError, TrainingError
from hvdtrain.settings import all_keys, entries_of, read_settings
from hvdtrain.start_up.job import check_models, open_session


def test_a_value_that_differs_is_named_with_its_rank() -> None:
    def work(comm: Communicator) -> str:
        values = {"learning_rate": "0.1" if comm.rank < 2 else "0.2", "num_epochs": "3"}
        values |= {"momentum": "0.9" if comm.rank == 2 else "0.0"}
        with pytest.raises(ConfigError) as error:
            check_alike(comm, "keys", values)
        assert error.value.on_every_rank
        return str(error.value)

    first, *others = on_ranks(3, work)
    assert "learning_rate: expected the same on all ranks, got 0.1 on rank 0 and 0.2 on rank 2" in first
    assert "momentum: expected the same on all ranks, got 0.0 on rank 0 and 0.9 on rank 2 (every rank reads" in first
    assert others == [first, first]


def test_many_differences_are_counted_and_none_is_no_error() -> None:
    def work(comm: Communicator) -> str:
        check_alike(comm, "model", {"a": "1"})
        with pytest.raises(ConfigError) as error:
            check_alike(comm, "model", {str(number): str(comm.rank) for number in range(12)})
        return str(error.value)

    assert (
        "get_model: 4: expected the same on all ranks, got 0 on rank 0 and 1 on rank 1, 7 more differ (every"
        in on_ranks(2, work)[0]
    )


def test_what_is_the_same_is_not_sent_to_all_ranks() -> None:
    class Counting(ThreadCommunicator):
        def gather(self, value: Any, *, name: str) -> list[Any]:
            sent.append(len(pickle.dumps(value)))
            return super().gather(value, name=name)

    sent: list[int] = []

    def work(comm: Communicator) -> None:
        comm.__class__ = Counting  # type: ignore[assignment]
        check_alike(comm, "model", {f"parameter {number}": "float32 (1000, 1000)" for number in range(1000)})

    on_ranks(2, work)
    assert len(sent) == 2
    assert max(sent) < 200


def test_a_call_on_one_rank_only_does_not_get_the_answers_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    other: list[torch.Tensor] = []

    def sent(tensor: torch.Tensor, _: Sequence[int], name: str) -> torch.Tensor:
        other.append(tensor)
        return tensor.repeat(2, 1)

    gather_pickled(("all_reduce", 1), 2, sent)

    def gathered(into: list[torch.Tensor], own: torch.Tensor, group: Any) -> None:
        into[:] = [own, *other]

    monkeypatch.setattr(torch.distributed, "all_gather", gathered)
    comm = TorchCommunicator.__new__(TorchCommunicator)
    comm.size, comm._group = 2, None
    with pytest.raises(TrainingError, match="got 'plan' on rank 0 and 'all_reduce' on rank 1"):
        comm.gather(None, name="plan")
    assert comm.gather(2, name="all_reduce") == [2, 1]


PARAM = {"horovod_reduce_type": "param"}


@pytest.mark.parametrize(
    ("on_rank_1", "key", "alike"),
    [
        ({"learning_rate": 0.02}, "learning_rate: .* got 0.01 on rank 0 and 0.02 on rank 1", {}),
        ({"optimizer": {"class": "adam"}}, "optimizer: .* got {class: .sgd.*} on rank 0", {}),
        ({"horovod_scale_lr": True}, "horovod_scale_lr: .* got False on rank 0 and True on rank 1", PARAM),
        (PARAM, "horovod_reduce_type", {}),
        ({"horovod_param_sync_step": 2}, "horovod_param_sync_step", PARAM),
        ({"torch_distributed": {"param_sync_step": 2}}, "horovod_param_sync_step", PARAM),
        ({"horovod_param_group": 2}, "horovod_param_group", PARAM),
        ({"horovod_compression": "bf16"}, "horovod_compression", {}),
        ({"horovod_avg_grad": True}, "horovod_avg_grad", {}),
        ({"torch_distributed": {"sharded": True}}, "torch_distributed.sharded", {"torch_distributed": {"sharded": False}}),
        ({"checkpoint_local": "/tmp/models"}, "checkpoint_local: .* got None on rank 0 and a folder on rank 1", {}),
        ({"model": "elsewhere"}, "model: .* and 'elsewhere' on rank 1", {}),
        (
            {"layers": "statistics"},
            r"get_model: norm.weight: expected .* got nothing on rank 0 and parameters\[5\] torch.float32 \(4,\) on rank 1",
            {},
        ),
    ],
)
def test_ranks_with_other_keys_or_models_are_refused(
    on_rank_1: dict[str, object], key: str, alike: dict[str, object], corpus: Path, tmp_path: Path
) -> None:
    settings = []
    for more in ({}, on_rank_1):
        given = {"corpus": corpus, "model": tmp_path / "model", "num_threads": 1, **alike, **more}
        settings.append(read_settings([TOY], {name: str(value) for name, value in given.items()}))

    def work(comm: Communicator) -> str:
        with pytest.raises(ConfigError, match=key) as caught, open_session(settings[comm.rank], "measure", comm) as session:
            check_models(settings[comm.rank], comm, session.learner)
        assert caught.value.on_every_rank
        return str(caught.value)

    one, other = on_ranks(2, work)
    assert one == other


def test_what_a_rank_may_have_for_itself_is_not_compared(corpus: Path) -> None:
    names = {one.name for one in all_keys()} | {f"torch_distributed.{one.name}" for one in entries_of("torch_distributed")}
    assert names >= OWN_KEYS | OWN_FOLDERS | OF_LOCAL_UPDATES
    given = {"corpus": corpus, "model": "model", **PARAM}
    own = {"learning_rate": 0.5, "optimizer": {"class": "adam"}, "cache_dir": "/b", "device": "cpu", "max_seqs": 3, "dev": None}
    first, other = (
        read_settings([TOY], {name: str(value) for name, value in {**given, "cache_dir": "/a", **more}.items()}).shared_keys
        for more in ({}, own)
    )
    assert first == other


@pytest.mark.slow
def test_real_ranks_are_compared_before_anything_is_trained(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "apart.py").write_text("horovod_reduce_type = ['grad', 'param'][hvdtrain.rank()]\n")
    keys = {"corpus": corpus, "model": tmp_path / "model", "use_horovod": True}
    ended = hvdtrain(TOY, keys, ranks=2, options=[str(tmp_path / "apart.py")])
    assert ended.status == 2
    assert "horovod_reduce_type: expected the same on all ranks, got 'grad' on rank 0 and 'param' on rank 1" in ended.err
    assert not list(tmp_path.glob("model.0*"))
