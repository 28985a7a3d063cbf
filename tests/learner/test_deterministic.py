"""`deterministic = True`: the same bits in every run, or an error."""

from pathlib import Path

import torch
from documented import first_example
from launching import TOY, hvdtrain

DRAWS = """
_train_step = train_step


def train_step(*, model, extern_data, **_):
    _train_step(model=model, extern_data=extern_data)
    assert torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic
    if config.bool("undetermined", False):
        torch.zeros(3).put_(torch.tensor([1, 1]), torch.tensor([1.0, 2.0]))  # which of the two stays?
"""


def test_the_same_bits_in_every_run(corpus: Path, tmp_path: Path) -> None:
    """With the example of the docs."""
    example = first_example("training.md", "The same result in every run")
    config = tmp_path / "config.py"
    config.write_text(TOY.read_text() + DRAWS + example)
    given = {"corpus": corpus, "layers": "statistics"}
    models = []
    for number in range(2):
        ended = hvdtrain(config, given | {"model": tmp_path / str(number) / "model"})
        assert ended.status == 0, ended.err
        models.append(torch.load(tmp_path / str(number) / "model.001.pt", weights_only=True)["model"])
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    assert not torch.are_deterministic_algorithms_enabled(), "later tests are as they were"

    undetermined = hvdtrain(config, given | {"model": tmp_path / "model", "undetermined": True})
    assert undetermined.status == 1
    assert "does not have a deterministic implementation" in undetermined.err


def test_syncs_by_the_clock_are_refused(tmp_path: Path) -> None:
    syncs = {"horovod_reduce_type": "param", "horovod_param_sync_time_diff": 1.0}
    ended = hvdtrain(TOY, {"model": tmp_path / "model", "deterministic": True, **syncs})
    assert ended.status == 2
    assert "deterministic: expected syncs after a number of steps, got horovod_param_sync_time_diff" in ended.err
