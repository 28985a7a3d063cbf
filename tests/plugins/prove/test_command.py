"""The command line of `hvdtrain prove`, and how it starts a config's ranks. Nothing is started."""

import re
from pathlib import Path

import pytest
from launching import TOY

from hvdtrain.comm import this_process
from hvdtrain.comm.launchers import Place
from hvdtrain.plugins.prove.__main__ import Run, main, parse_job, parser, run_overrides, unavailable_reason
from hvdtrain.settings import read_settings


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--ranks 1,x", "--ranks: .*'1,x'"),
        ("--ranks 2,2", "--ranks: .*'2,2'"),
        ("--ranks 1", "--ranks: .*got 1"),
        ("--transport torch,mpi", "--transport: .*'mpi'"),
        ("--steps 0", "--steps: .*got 0"),
        ("--tolerance -1", "--tolerance: .*got -1"),
        ("++max_seq 3", "max_seq: "),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    options: str, problem: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = [*options.split(), "++model", str(tmp_path / "model")]
    assert main([str(TOY), *given]) == 2
    out, err = capfd.readouterr()
    assert re.search(problem, err)
    assert out == ""


def test_under_a_launcher(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(this_process, "place", lambda: Place("mpirun", 0, 2, 0, 2))
    assert main([str(TOY), "++model", "m"]) == 2
    assert re.search("prove: .*mpirun", capfd.readouterr().err)


def runs(*options: str) -> list[str]:
    return [str(run) for run in parse_job(parser().parse_args([str(TOY), *options]), [str(TOY), "++model", "m"]).runs]


def test_the_runs() -> None:
    assert runs("--transport", "torch") == ["1 rank", "2 ranks over torch.distributed", "3 ranks over torch.distributed"]
    both = runs("--ranks", "2,4", "--transport", "horovod,torch")
    assert both == [f"{size} ranks over {name}" for size in (2, 4) for name in ("Horovod", "torch.distributed")]
    assert runs("--ranks", "1,2") == ["1 rank", "2 ranks over Horovod", "2 ranks over torch.distributed"]


def test_the_tolerance_goes_by_the_precision() -> None:
    def tolerance(*options: str, **keys: str) -> float:
        overrides = [word for name, value in {"model": "m", **keys}.items() for word in (f"++{name}", value)]
        return parse_job(parser().parse_args([str(TOY), *options]), [str(TOY), *overrides]).tolerance

    assert (tolerance(), tolerance("--tolerance", "0.5")) == (1e-3, 0.5)
    assert tolerance(mixed_precision="bfloat16") == 2e-2


def test_transports_go_with_the_framework() -> None:
    assert unavailable_reason("torch", "torch") is None
    assert unavailable_reason("torch", "tensorflow") == "backend = 'tensorflow', which it does not connect"
    assert unavailable_reason("horovod", "torch") is None, "the tests need it"
    assert unavailable_reason("horovod", "mxnet") == "no Horovod that was built for mxnet (python -m hvdtrain build-horovod)"


def test_a_run_decides_on_its_processes_itself() -> None:
    overrides = {"model": "m", "ngpu": "4", "torch_distributed": "{'sharded': True, 'world_size': 4}"}
    settings = read_settings([TOY], overrides)
    assert run_overrides(Run("torch", 2), settings) == {
        "use_horovod": "False",
        "torch_distributed": "{'sharded': True}",
        "ngpu": "None",
        "dist_world_size": "None",
    }
    alone = run_overrides(Run(None, 1), settings)
    assert (alone["use_horovod"], alone["torch_distributed"]) == ("False", "None")
    for run in (Run("horovod", 2), Run("torch", 2), Run(None, 1)):
        read_settings([TOY], overrides | run_overrides(run, settings))  # what the ranks do
    assert run_overrides(Run("horovod", 2), read_settings([TOY], {"model": "m", "ngpu": "0"}))["device"] == "cpu"
