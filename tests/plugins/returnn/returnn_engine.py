"""Runs tests of RETURNN's own test module for its PyTorch engine, with hvdtrain in place of the engine, and with RETURNN's.

    python returnn_engine.py FOLDER_WITH_THEIR_TESTS RESULTS TEST...

A test makes a config, a dataset and a callback, gives them to an `Engine`, and asserts what came of it. For each test, one child
process has hvdtrain train or forward with the values of that config and the dict of that dataset; another one has RETURNN's
engine do it, on the same sequences. RESULTS.TEST.PROGRAM gets what was computed, and the error if there was one, as a pickle.
"""

import contextlib
import importlib
import json
import os
import pickle
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import returnn.datasets.basic as datasets
import returnn.datasets.generating as generating
import returnn.torch.engine
import torch
from returnn.forward_iface import ForwardCallbackIface

from hvdtrain.errors import DataError
from hvdtrain.plugins.forward.task import forward_all
from hvdtrain.plugins.hdf_tools.dump import main as hdf_dump
from hvdtrain.run import train
from hvdtrain.settings import read_settings

TEXT = "import returnn.config\nimport values_of_their_test\nglobals().update(values_of_their_test.values)\n"
"""A config file for RETURNN with the values of a test."""

DEFAULTS = {"num_threads": 1, "log_verbosity": 3}
"""Keys that do not concern the result."""


class Results:
    """What a test computed.

    Attributes:
        scores: by epoch, the scores by name.
        outputs: by sequence tag, the outputs by name.
        batches: the data of each batch, by data key.
        error: what the test raised; None: nothing.
        line: the line of the source that raised it.
    """

    def __init__(self) -> None:
        self.scores: list[dict[str, float]] = []
        self.outputs: dict[str, dict[str, Any]] = {}
        self.batches: list[dict[str, torch.Tensor]] = []
        self.error: str | None = None
        self.line = ""


class Keeping(ForwardCallbackIface):  # type: ignore[misc]
    """A forward_callback that keeps all outputs before it hands them on to that of the test."""

    def __init__(self, inner: Any, results: Results) -> None:
        self._inner = inner
        self._results = results

    def init(self, *, model: Any) -> None:
        self._inner.init(model=model)

    def process_seq(self, *, seq_tag: str, outputs: Any) -> None:
        self._results.outputs[seq_tag] = {name: numpy.array(one.raw_tensor) for name, one in outputs.data.items()}
        self._inner.process_seq(seq_tag=seq_tag, outputs=outputs)

    def finish(self) -> None:
        self._inner.finish()


class Given:
    """The dicts of datasets that tests open, by the opened dataset."""

    def __init__(self) -> None:
        self._dicts: list[tuple[Any, dict[str, Any]]] = []
        self._init_dataset = datasets.init_dataset

    def init_dataset(self, options: Any, **others: Any) -> Any:
        """RETURNN's function, which remembers its argument."""
        dataset = self._init_dataset(options, **others)
        self._dicts.append((dataset, dict(options)))
        return dataset

    def dict_of(self, dataset: Any) -> dict[str, Any]:
        for opened, options in self._dicts:
            if opened is dataset:
                return options
        if type(dataset) is generating.DummyDataset:
            sizes = {"input_dim": dataset.num_inputs, "output_dim": dataset.num_outputs["classes"][0]}
            return {"class": "DummyDataset", **sizes, "num_seqs": dataset.num_seqs, "seq_len": dataset.seq_len}
        raise TypeError(f"expected a dataset that was made of a dict, got {type(dataset).__name__}")

    def same_sequences(self, dataset: Any, folder: Path) -> Any:
        """The dataset as RETURNN reads it from a file: it draws other random sequences than hvdtrain, and in every epoch."""
        options = self.dict_of(dataset)
        if options["class"] != "Task12AXDataset":
            return dataset
        path = folder / f"{options.get('name', 'data')}.hdf"
        if hdf_dump([str(options), str(path)]) != 0:
            raise OSError(f"{path}: could not be written")
        made = self._init_dataset({"class": "HDFDataset", "files": [str(path)], "name": options.get("name", "data")})
        made.init_seq_order(epoch=1)
        return made


class ByHvdtrain:
    """What the tests use of RETURNN's engine, on hvdtrain. Its attributes are those of that engine."""

    def __init__(self, given: Given, results: Results, folder: Path, config: Any) -> None:
        self._given, self._results, self._folder = given, results, folder
        self._values = dict(config.typed_dict)
        self._checkpoint: dict[str, Any] = {}
        self.global_train_step = 0

    def init_train_from_config(self, **data: Any) -> None:
        sources = {name.removesuffix("_data"): one for name, one in data.items() if one is not None}
        self._values.update({name: self._given.dict_of(one) for name, one in sources.items()})

    def init_network_from_config(self) -> None:
        """Nothing: hvdtrain makes the model when it trains or forwards."""

    def set_epoch(self, epoch: int) -> None:
        """Nothing: the epoch is that of the training, or that of the loaded model."""

    def train(self) -> None:
        train(self._settings({} if "learning_rate" in self._values else {"learning_rate": 1.0}))  # RETURNN's default
        last = max(path for path in self._folder.glob("model.*.pt") if not path.name.endswith(".opt.pt"))
        self._checkpoint = torch.load(last, weights_only=True)
        self.global_train_step = self._checkpoint["step"]
        lines = (self._folder / "scores.jsonl").read_text().splitlines()
        self._results.scores = [json.loads(line)["scores"] for line in lines]

    def get_pt_model(self) -> Any:
        return SimpleNamespace(parameters=lambda: list(self._checkpoint["model"].values()))

    def forward_with_callback(self, *, callback: Any, dataset: Any) -> None:
        more = {"forward_data": self._given.dict_of(dataset), "forward_callback": Keeping(callback, self._results)}
        if "load" not in self._values:  # RETURNN forwards with initial weights, too
            torch.save({"model": self._values["get_model"]().state_dict(), "epoch": 1, "step": 0}, self._folder / "init.pt")
            more["load"] = str(self._folder / "init")
        forward_all(self._settings(more))

    def _create_data_loader(self, dataset: Any) -> list[dict[str, torch.Tensor]]:
        """The batches of an epoch."""

        def train_step(*, model: Any, extern_data: Any, **_: Any) -> None:
            self._results.batches.append({name: one.raw_tensor for name, one in extern_data.data.items() if name != "seq_tag"})
            returnn.frontend.get_run_ctx().mark_as_loss(model(torch.zeros(1, 1)).sum(), "none")

        self._results.batches = []
        self._folder = Path(tempfile.mkdtemp(dir=self._folder))
        more = {"train": self._given.dict_of(dataset), "train_step": train_step, "num_epochs": 1, "learning_rate": 1.0}
        try:
            train(self._settings({"get_model": lambda **_: torch.nn.Linear(1, 1), **more}))
        except DataError as error:
            if "max_seq_length" not in str(error) and "min_seq_length" not in str(error):
                raise
        return self._results.batches

    def _settings(self, more: dict[str, Any]) -> Any:
        module = ModuleType("values_of_their_test")
        module.values = {**DEFAULTS, **self._values, **more, "model": str(self._folder / "model")}  # type: ignore[attr-defined]
        sys.modules[module.__name__] = module
        (self._folder / "their.config").write_text(TEXT)
        return read_settings([self._folder / "their.config"], {})


def engine_of_returnn(given: Given, results: Results, folder: Path) -> type:
    """RETURNN's engine, which leaves what it computes in the results."""

    class ByReturnn(returnn.torch.engine.Engine):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            config.typed_dict.setdefault("torch_dataloader_opts", {"num_workers": 0})
            super().__init__(config=config)

        def init_train_from_config(self, **data: Any) -> None:
            super().init_train_from_config(**{name: one and given.same_sequences(one, folder) for name, one in data.items()})

        def train(self) -> None:
            super().train()
            records = sorted(self.learning_rate_control.epoch_data.items())
            results.scores = [{key: float(value) for key, value in one.error.items()} for _, one in records]

        def forward_with_callback(self, *, callback: Any, dataset: Any) -> None:
            read = given.same_sequences(dataset, folder)
            super().forward_with_callback(callback=Keeping(callback, results), dataset=read)

        def _create_data_loader(self, dataset: Any, *others: Any, **options: Any) -> Any:
            loader = super()._create_data_loader(dataset, *others, **options)
            if others or options:  # for a training
                return loader
            results.batches = [
                {name: one for name, one in batch.items() if isinstance(one, torch.Tensor) and ":" not in name}
                for batch in loader
            ]
            return results.batches

    return ByReturnn


def run(module: Any, test: str, program: str, folder: Path) -> Results:
    """Run one test in this process."""
    results, given = Results(), Given()
    module.init_dataset = given.init_dataset
    with contextlib.suppress(ImportError):
        importlib.import_module("test_Dataset").init_dataset = given.init_dataset
    if program == "returnn":
        module.Engine = engine_of_returnn(given, results, folder)
    else:
        real = module.Engine
        module.Engine = lambda config: ByHvdtrain(given, results, folder, config)
        module.Engine.epoch_model_filename = real.epoch_model_filename
    try:
        getattr(module, test)()
    except BaseException as error:  # an assert of the test, too
        traceback.print_exc()
        results.error = f"{type(error).__name__}: {error}"
        results.line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    return results


def main() -> None:
    tests, made, *names = sys.argv[1:]
    torch.set_num_threads(1)
    sys.path.insert(0, tests)
    module = importlib.import_module("test_torch_engine")
    for test in names:
        for program in ("hvdtrain", "returnn"):
            folder = Path(f"{made}.{test}.{program}.folder")
            folder.mkdir(parents=True)
            print(f"== {test}, {program}", flush=True)
            child = os.fork()
            if child == 0:
                os.chdir(folder)
                results = run(module, test, program, folder)
                Path(f"{made}.{test}.{program}").write_bytes(pickle.dumps(results.__dict__))
                sys.stdout.flush()
                os._exit(0)
            _, status = os.waitpid(child, 0)
            if status != 0:
                sys.exit(f"{test}, {program}: status {status}")


if __name__ == "__main__":
    main()
