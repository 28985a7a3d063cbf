"""`hvdtrain prove` on real ranks: a training that agrees, one that does not, one that fails."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from inside import nothing_changes
from launching import TOY, Finished
from trainings import take_naps

import hvdtrain.cli

pytestmark = pytest.mark.launches

FLAWED = TOY.with_name("flawed.py")
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}

Prove = Callable[..., Finished]


@pytest.fixture
def prove(corpus: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str]) -> Prove:
    """The command in this process, which has imported PyTorch already; its ranks are processes."""

    def run(options: str, configs: Sequence[Path] = (TOY, FLAWED), **keys: object) -> Finished:
        if TOY in configs:
            keys = {"corpus": corpus, "model": tmp_path / "exp" / "model", **keys}
        overrides = [word for name, value in keys.items() for word in (f"++{name}", str(value))]
        with nothing_changes():
            os.environ.update(AS_ROOT | take_naps(tmp_path_factory.mktemp("naps")))
            status = hvdtrain.cli.main(["prove", *map(str, configs), *options.split(), *overrides])
        out, err = capfd.readouterr()
        return Finished(status, out, err, 0.0)

    return run


@pytest.mark.slow
def test_a_training_that_agrees_over_both_transports(prove: Prove, tmp_path: Path) -> None:
    """With an optimizer that looks back (with torch.distributed, each rank has a share of what it keeps), gradient accumulation
    and the config's own number of processes."""
    keys = {
        "accum_grad_multiple_step": 2,
        "ngpu": 2,
        "torch_distributed": {"sharded": True},
        "learning_rate_schedule": "one_cycle",
    }
    ended = prove("--ranks 1,2 --steps 6 --tolerance 1e-5", **keys)
    assert ended.status == 0, ended.out + ended.err
    assert "run 1 of 3: 2 ranks over Horovod ..." in ended.out
    assert "run 2 of 3: 2 ranks over torch.distributed ..." in ended.out
    found = re.search(r"^7 steps of 3 to 12 sequences, 4 updates: (.*)$", ended.out, flags=re.M)
    assert found is not None, ended.out
    assert found[1] == "steps 1 to 4, a stop and a resume, steps 18 to 20 of the 20 of an epoch on 2 ranks"
    assert "not covered: steps 5 to 17 (--steps 20 trains all), later epochs, evaluation," in ended.out
    rows = [line.split() for line in ended.out.splitlines() if line.startswith("2 ranks over") and line.endswith("agree")]
    assert len(rows) == 2
    assert ended.out.endswith("prove: all runs agree\n")
    assert list(tmp_path.iterdir()) == [], "nothing is written"


@pytest.mark.slow
def test_a_training_that_differs(prove: Prove, tmp_path: Path) -> None:
    ended = prove("--ranks 1,2 --transport torch --steps 4", flaws="['mean', 'batch norm', 'state', 'dropout']")
    assert ended.status == 1, ended.out + ended.err
    assert "prove: they differ; looking for the causes on 1 rank ..." in ended.out
    assert "  losses     first in step 1, ce: " in ended.out
    assert "  gradients  first in update 1, first.weight: " in ended.out
    assert "  weights    first after update 1, " in ended.out
    causes = [line.removeprefix("cause: ") for line in ended.out.splitlines() if line.startswith("cause: ")]
    beginnings = [
        "a mean of means: train_step marks ce",
        "BatchNorm1d at norm: its statistics",
        "state in the model",
    ]
    assert [any(cause.startswith(each) for cause in causes) for each in beginnings] == [True] * 3, causes
    assert ended.out.endswith("prove: the runs differ\n")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_ends_with_its_own_message_and_status(prove: Prove, tmp_path: Path) -> None:
    config = tmp_path / "config.py"
    config.write_text(
        "import hvdtrain\n"
        "get_model = train_step = lambda **_: None\n"
        "train, max_seqs, learning_rate, model = {'files': 'a.hdf'}, 1, 0.1, 'm'\n"
        "if hvdtrain.size() > 1:\n    raise ValueError('on several ranks')\n"
    )
    ended = prove("--ranks 1,2 --transport torch", configs=[config])
    assert ended.status == 2
    assert "config.py, line 5: ValueError: on several ranks" in ended.err
    assert "prove: failed with status 2: run 1 of 2: 2 ranks over torch.distributed" in ended.err
    assert ended.out == "prove: run 1 of 2: 2 ranks over torch.distributed ...\n"
