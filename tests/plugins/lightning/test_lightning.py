"""LightningModules as they are: the same weights, rates and values as by Lightning's own Trainer."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from inside import run_inside
from lightning_modules import Net, fit
from other_trainers import check_resume, difference, state_of, train
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError

import hvdtrain
from hvdtrain.errors import ConfigError
from hvdtrain.plugins.lightning.arguments import Extent
from hvdtrain.plugins.lightning.loaders import Loaders
from hvdtrain.plugins.lightning.logged import Logged
from hvdtrain.plugins.lightning.trainer import gather
from hvdtrain.plugins.lightning.user_objects import UserObjects

lightning = pytest.importorskip("lightning.pytorch")
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks  # noqa: E402
from lightning.pytorch.demos import boring_classes as demos  # noqa: E402
from lightning.pytorch.demos.transformer import LightningTransformer  # noqa: E402
from lightning.pytorch.utilities import CombinedLoader  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def test_weights_rates_and_values_are_those_of_lightnings_trainer(tmp_path: Path) -> None:
    theirs, ours = Net(), Net()
    start = state_of(theirs)
    trainer = fit(theirs)
    keys = {"lightning_module": ours, "model": str(tmp_path / "model"), "num_epochs": 2, "num_threads": 1, "save_ckpt": True}
    result = hvdtrain.train(keys)
    weights = state_of(result.model)
    assert difference(weights, state_of(theirs), start) < 1e-6
    assert ours.rates == theirs.rates
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    for dataset, names in {"dev": ["val_loss", "val_mse", "most", "again"], "train": ["train_loss", "train_mse"]}.items():
        for name in names:
            assert result.scores[f"{dataset}_loss_{name}"] == pytest.approx(values[name], rel=1e-6)
    assert {name: float(value) for name, value in ours.trainer.callback_metrics.items()} == pytest.approx(values, rel=1e-6)
    check_resume(lambda: {"lightning_module": Net(), "num_epochs": 2}, tmp_path, 5, weights)
    scores = hvdtrain.evaluate({**keys, "lightning_module": Net}, num_threads=1)
    assert scores["eval_loss_val_mse"] == pytest.approx(values["val_mse"], rel=1e-6)
    loaded = Net.load_from_checkpoint(tmp_path / "model.002.ckpt")
    assert loaded.steps == 26
    assert torch.equal(loaded.net[0].weight, weights["net.0.weight"])


def test_a_ckpt_of_lightnings_is_continued_with_its_optimizer(tmp_path: Path) -> None:
    def boring() -> Any:
        torch.manual_seed(2)
        module = demos.BoringModel()
        items = demos.RandomDataset(32, 12)
        module.train_dataloader = module.val_dataloader = lambda: DataLoader(items, batch_size=4)
        module.configure_optimizers = lambda: torch.optim.Adam(module.parameters(), 0.01)
        return module

    fit(boring(), 1).save_checkpoint(tmp_path / "theirs.ckpt")
    whole = boring()
    fit(whole, 2)
    keys = {"load": str(tmp_path / "theirs.ckpt"), "num_epochs": 2}
    weights = train({**keys, "lightning_module": boring()}, tmp_path / "model")
    assert difference(weights, state_of(whole), state_of(boring())) < 1e-6
    keys = {"import_model_train_epoch1": keys["load"], "num_epochs": 1}
    again = train({**keys, "lightning_module": boring()}, tmp_path / "other")
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    (tmp_path / "bad.ckpt").write_bytes(b"no file")
    with pytest.raises(hvdtrain.HvdtrainError, match=r"bad.ckpt: expected a .ckpt of Lightning's .*, got UnpicklingError"):
        train({"lightning_module": boring(), "load": str(tmp_path / "bad.ckpt")}, tmp_path / "third")


class EpochRates(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


@pytest.mark.parametrize(("kind", "after"), [(Net, 5), (Net, 13), (EpochRates, 13), (EpochRates, 18)])  # of 13 in an epoch
def test_a_ckpt_from_within_an_epoch_goes_on_after_its_batches(kind: type[Net], after: int, tmp_path: Path) -> None:
    class Saving(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == after:
                trainer.save_checkpoint(tmp_path / "within.ckpt")

    whole, ours, start = kind(), kind(), state_of(kind())
    fit(whole, callbacks=[Saving()])
    weights = train({"lightning_module": ours, "load": str(tmp_path / "within.ckpt"), "num_epochs": 2}, tmp_path / "model")
    assert difference(weights, state_of(whole), start) < 1e-6
    assert ours.rates == whole.rates[after:]
    if after != 13:
        keys = {"lightning_module": kind(), "load": str(tmp_path / "within.ckpt"), "accum_grad_multiple_step": 7}
        with pytest.raises(hvdtrain.HvdtrainError, match="expected one with whole updates of 7 batches, got one after batch 5"):
            train(keys, tmp_path / "other")


def test_metrics_with_the_states_of_all_ranks_do_not_gather_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Net()
    Logged(module, lambda *_: (True, True), {})
    module.mse.update(torch.zeros(2), torch.ones(2))
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    assert module.mse.compute() == 1.0


def test_a_rank_without_a_batch_in_the_last_step_is_known_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks have 13 batches in all."""
    for arguments in ({"limit_train_batches": 6}, {}):
        user = UserObjects({"lightning_module": Net()}, None)
        loaders = Loaders(user, Extent(arguments))
        loaders.of("train")
        with monkeypatch.context() as patched:
            patched.setattr(hvdtrain, "size", lambda: 2)
            assert loaders.are_even("train", 0) == bool(arguments)
            if not arguments:
                job = SimpleNamespace(stage="train", logged=SimpleNamespace(loader_index=0), loaders=loaders)
                with pytest.raises(ConfigError, match="all_gather: expected a batch on each rank in all steps of train"):
                    gather(job, torch.zeros(2))


def test_a_datamodule_that_cannot_be_imported_is_named() -> None:
    user = UserObjects({"lightning_module": Net, "datamodule": "no_such_package:Data"}, None)
    with pytest.raises(ConfigError, match="datamodule: expected a function that can be imported, got no_such_package:Data"):
        _ = user.is_validated


def test_hooks_come_in_lightnings_order(tmp_path: Path) -> None:
    calls: list[str] = []

    def recording(who: str, base: type, names: Any) -> Any:
        def record(name: str) -> Any:
            def method(self: Any, *args: Any, **more: Any) -> Any:
                calls.append(f"{who}.{name}")
                return getattr(base, name)(self, *args, **more)

            return method

        return type(f"Recording{who}", (base,), {name: record(name) for name in names if hasattr(base, name)})

    hooks = {
        name for hook_class in (ModelHooks, DataHooks, CheckpointHooks) for name in vars(hook_class) if not name.startswith("_")
    }
    left_out = {"transfer_batch_to_device", "configure_sharded_model", "on_save_checkpoint"}  # not here, or at other times
    steps = {"training_step", "validation_step", "configure_optimizers"}
    module = recording("module", demos.BoringModel, sorted((hooks | steps) - left_out))
    callback = recording("callback", lightning.Callback, [n for n in vars(lightning.Callback) if n[:3] in ("on_", "set", "tea")])
    fit(module(), callbacks=[callback()], limit_train_batches=3, limit_val_batches=2)
    loaders = ("module.train_dataloader", "module.val_dataloader", "callback.on_save_checkpoint")
    theirs = [call for call in calls if call not in loaders]
    calls.clear()

    class Short(module):
        def train_dataloader(self) -> Any:
            return DataLoader(demos.RandomDataset(32, 3))

        def val_dataloader(self) -> Any:
            return DataLoader(demos.RandomDataset(32, 2))

    train({"lightning_module": Short(), "lightning_callbacks": [callback()], "num_epochs": 2}, tmp_path / "model")
    assert [call for call in calls if call not in loaders] == theirs


class OfItsOwn(Net):
    """Sets its rates in hooks and by its scheduler, keeps a BatchNorm in evaluation mode, and trains a layer from epoch 2 on."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(32)

    def losses(self, batch: torch.Tensor) -> Any:
        return super().losses(self.norm(batch))

    def on_train_epoch_start(self) -> None:
        self.norm.eval()
        self.net[0].requires_grad_(self.current_epoch > 0)
        for group in self.optimizers().param_groups:
            group["lr"] *= 0.5

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            self.lr_schedulers().step()
        for group in self.optimizers().param_groups:
            group["lr"] *= 0.9

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def test_rates_and_modes_that_the_module_sets_itself_stay(tmp_path: Path) -> None:
    theirs, start = OfItsOwn(), state_of(OfItsOwn())
    fit(theirs)
    ours = OfItsOwn()
    weights = train({"lightning_module": ours, "num_epochs": 2}, tmp_path / "model")
    assert difference(weights, state_of(theirs), start) < 1e-6
    assert ours.rates == theirs.rates
    assert torch.equal(weights["norm.running_mean"], torch.zeros(32))
    for step in (5, 13):  # within an epoch, and at its end
        check_resume(lambda: {"lightning_module": OfItsOwn(), "num_epochs": 2}, tmp_path / str(step), step, weights)


class Warming(Net):
    """Warms up as Lightning's documentation does, saves only what is trained, and has two loaders to evaluate."""

    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False
        self.frozen = torch.nn.Linear(2, 2).requires_grad_(False)
        self.seen: list[list[str]] = []
        self.errors = torch.nn.ModuleList([MeanSquaredError(), MeanSquaredError()])

    def state_dict(self, *args: Any, **more: Any) -> Any:
        return {name: value for name, value in super().state_dict(*args, **more).items() if "frozen" not in name}

    def configure_callbacks(self) -> Any:
        return [lightning.callbacks.ModelCheckpoint(monitor="own_0"), lightning.callbacks.EarlyStopping("begun", patience=9)]

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 20:
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (self.trainer.global_step + 1) / 20

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)

    def val_dataloader(self) -> Any:
        return CombinedLoader([DataLoader(items, batch_size=4) for items in (self.others, self.items)], "sequential")

    def on_validation_epoch_start(self) -> None:
        self.log("begun", 1.0)

    def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss, outputs, wanted = self.losses(batch)
        self.errors[dataloader_idx].update(outputs, wanted)
        self.log_dict({"val_loss": loss, "error": self.errors[dataloader_idx]})
        self.log("most", outputs.max(), reduce_fx="max")
        self.log(f"own_{dataloader_idx}", loss, add_dataloader_idx=False)

    def on_validation_epoch_end(self) -> None:
        self.seen.append(sorted(name for name in self.trainer.callback_metrics if "train" not in name))


def test_a_step_of_the_modules_own_and_what_it_leaves_out_of_its_state(tmp_path: Path) -> None:
    theirs, ours, start = Warming(), Warming(), state_of(Warming())
    trainer = fit(theirs, enable_checkpointing=True, default_root_dir=tmp_path)
    keys = {"num_val_loaders": 2, "num_epochs": 2}
    weights = train({**keys, "lightning_module": ours}, tmp_path / "model")
    assert difference(weights, state_of(theirs), start) < 1e-6
    assert ours.rates == theirs.rates
    assert ours.seen == theirs.seen
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert {name: float(value) for name, value in ours.trainer.callback_metrics.items()} == pytest.approx(values, rel=1e-6)
    check_resume(lambda: {**keys, "lightning_module": Warming()}, tmp_path, 5, weights)


@pytest.mark.parametrize("shuffles", [(True, False), (False, True)])
def test_the_order_is_that_of_the_training_loader(shuffles: tuple[bool, bool], tmp_path: Path) -> None:
    seen: list[float] = []

    class Ordered(demos.BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.extend(batch[:, 0].tolist())
            return super().training_step(batch, batch_idx)

        def train_dataloader(self) -> Any:
            return DataLoader(torch.arange(20.0)[:, None].repeat(1, 32), batch_size=4, shuffle=shuffles[0])

        def val_dataloader(self) -> Any:
            return DataLoader(demos.RandomDataset(32, 8), batch_size=4, shuffle=shuffles[1])

    train({"lightning_module": Ordered, "num_epochs": 1}, tmp_path / "model")
    assert sorted(seen) == [*range(20)]
    assert (seen != [*range(20)]) == shuffles[0]


class Words(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        letters = torch.randint(0, 20, (7,), generator=torch.Generator().manual_seed(index))
        return letters[:-1], letters[1:]


class Transformer(LightningTransformer):
    """Lightning's demo with other data, which needs no network."""

    def __init__(self) -> None:
        super().__init__(vocab_size=20)

    def prepare_data(self) -> None: ...

    def train_dataloader(self) -> Any:
        return DataLoader(Words(), batch_size=2, shuffle=True)


class Demo(demos.DemoModel):
    def train_dataloader(self) -> Any:
        return DataLoader(demos.RandomDataset(32, 8), batch_size=2)

    def training_step(self, batch: Any, batch_nb: int) -> Any:
        return None if batch_nb == 1 else super().training_step(batch, batch_nb)


def test_lightnings_demos_and_callbacks_work(tmp_path: Path) -> None:
    boring = {"lightning_module": demos.BoringModel, "datamodule": demos.BoringDataModule, "num_epochs": 1}
    train(boring, tmp_path / "boring")
    outputs = hvdtrain.forward({**boring, "model": str(tmp_path / "boring"), "num_threads": 1})
    assert [value["output"].shape for _, value in outputs] == [(2,)] * 64
    stopping = [lightning.callbacks.EarlyStopping("most", patience=1, min_delta=99.0)]
    stopped = {"lightning_module": Net, "lightning_callbacks": stopping, "num_epochs": 9, "num_threads": 1}
    assert len(hvdtrain.train({**stopped, "model": str(tmp_path / "stopped")}).history) == 2
    for number, module in enumerate((Transformer, Demo)):
        train({"lightning_module": module, "num_epochs": 1}, tmp_path / str(number))


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Stepping(demos.BoringModel):
        def optimizer_step(self, *args: Any, **more: Any) -> None: ...

    class Asking(demos.BoringModel):
        def on_train_start(self) -> None:
            self.trainer.fit_loop.run()

    class Late(demos.BoringModel):
        def on_train_start(self) -> None:
            self.automatic_optimization = False

    class Setting(demos.BoringModel):
        def on_train_start(self) -> None:
            self.trainer.optimizers = []

    class Evaluating(demos.BoringModel):
        def on_validation_model_eval(self) -> None: ...

    class Odd(demos.BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"scores": batch}

    class Silent(demos.ManualOptimBoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)

    class Several(demos.BoringModel):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.layer.parameters(), 0.1)] * 2

    cases: dict[Any, str] = {
        Late: "automatic_optimization: expected it to be set in __init__",
        Stepping: "optimizer_step: expected one call of optimizer.step in each update, got none",
        Asking: "self.trainer: expected .* got 'fit_loop'",
        Setting: r"self.trainer: expected .* got 'optimizers = \[\]'",
        Evaluating: "on_validation_model_eval: expected the model in evaluation mode after it",
        Several: "expected one optimizer from configure_optimizers, got 2",
        Odd: "training_step: expected a loss, a dict with one as 'loss', or None, got {'scores'",
        torch.nn.Linear: "expected a LightningModule",
    }
    for number, (module, expected) in enumerate(cases.items()):
        value = (lambda: torch.nn.Linear(1, 1)) if module is torch.nn.Linear else module
        with pytest.raises(ConfigError, match=expected):
            train({"lightning_module": value, "num_epochs": 1}, tmp_path / str(number))
    boring = {"lightning_module": demos.BoringModel, "num_epochs": 1}
    for more, expected in (
        ({"learning_rate": 0.1}, "learning_rate: expected none with lightning_module"),
        ({"lightning_callbacks": [lightning.callbacks.StochasticWeightAveraging(0.1)]}, "got StochasticWeightAveraging"),
        (
            {"lightning_module": demos.ManualOptimBoringModel, "accum_grad_multiple_step": 2},
            "accum_grad_multiple_step: expected none with automatic_optimization = False",
        ),
        (
            {"lightning_module": demos.ManualOptimBoringModel, "torch_distributed": {"sharded": True}},
            "torch_distributed.sharded: expected none with automatic_optimization = False",
        ),
        ({"num_val_loaders": 2}, "expected 2 from val_dataloader, got 1"),
        (
            {"lightning_trainer": object(), "num_val_loaders": "2", "max_seqs": "x"},
            "^3 problems in the config:\n  max_seqs: .*\n  lightning_trainer: expected a dict.*\n  num_val_loaders: expected an",
        ),
        ({"accum_grad_multiple_step": lambda **_: 2}, "accum_grad_multiple_step: expected a number with lightning_module"),
        (
            {"keys_of_epoch": lambda **_: {"accum_grad_multiple_step": 2}},
            "keys_of_epoch: accum_grad_multiple_step: expected none",
        ),
        (
            {"keys_of_epoch": lambda **_: {"learning_rate": 0.1}},
            "learning_rate: expected none, as lightning_module does not take",
        ),
    ):
        with pytest.raises(ConfigError, match=expected):
            train({**boring, **more}, tmp_path / "more")
    train({"lightning_module": Silent, "num_epochs": 1}, tmp_path / "silent")
    assert "training_step: expected a loss, got None: each epoch has loss 0" in caplog.text
    with pytest.raises(ConfigError, match="got one with an IterableDataset"):
        train({**boring, "datamodule": demos.BoringDataModuleNoLen}, tmp_path / "endless")


CLI = """
seed_everything: 3
trainer:
  max_epochs: 2
  gradient_clip_val: 0.5
  accelerator: cpu
  callbacks:
    - class_path: lightning.pytorch.callbacks.EarlyStopping
      init_args: {monitor: x, strict: false}
model:
  class_path: lightning.pytorch.demos.boring_classes.BoringModel
"""


def test_the_arguments_of_the_trainer_and_of_its_cli(tmp_path: Path) -> None:
    theirs, start = Net(), state_of(Net())
    arguments = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "precision": "32-true"}
    theirs.configure_optimizers = lambda: torch.optim.SGD(theirs.parameters(), 0.5)  # type: ignore[method-assign]
    theirs.items = demos.RandomDataset(32, 48)  # Lightning weighs a smaller last batch otherwise
    ours = Net()
    ours.configure_optimizers = lambda: torch.optim.SGD(ours.parameters(), 0.5)  # type: ignore[method-assign]
    ours.items = theirs.items
    fit(theirs, 2, **{name: value for name, value in arguments.items() if name != "max_epochs"})
    weights = train({"lightning_module": ours, "lightning_trainer": arguments}, tmp_path / "model")
    assert difference(weights, state_of(theirs), start) < 1e-6
    file = tmp_path / "config.yaml"
    file.write_text(CLI)
    result = hvdtrain.train({"lightning_module": str(file), "model": str(tmp_path / "cli"), "num_threads": 1})
    assert len(result.history) == 2
    for name, value, expected in (
        ("limit_train_batches", 0, "expected some batches"),
        ("limit_val_batches", 0.01, "expected a share of at least one of 6 batches"),
        ("max_time", "1:00", "expected a time as DD:HH:MM:SS"),
        ("fast_dev_run", True, "expected the option --dry-run"),
        ("check_val_every_n_epoch", 2, "expected evaluations after every epoch"),
        ("strategy", "fsdp", "expected torch_distributed or use_horovod"),
        ("max_epoch", 2, "expected arguments of Lightning's Trainer"),
    ):
        with pytest.raises(ConfigError, match=rf"lightning_trainer.{name}: {expected}.* got"):
            train({"lightning_module": Net, "lightning_trainer": {name: value}}, tmp_path / "refused")
    file.write_text("model: {width: 3}")
    with pytest.raises(ConfigError, match="expected model.class_path, got arguments only"):
        train({"lightning_module": str(file)}, tmp_path / "refused")
    file.write_text("model: {class_path: a.b}\noptimizer: {class_path: torch.optim.SGD}")
    with pytest.raises(ConfigError, match="got 'optimizer' .build it in the module: configure_optimizers"):
        train({"lightning_module": str(file)}, tmp_path / "refused")


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_epochs": 2, "limit_train_batches": 0.5, "limit_val_batches": 2},
        {"max_epochs": 2, "val_check_interval": 4},
        {"max_epochs": 2, "val_check_interval": 10, "check_val_every_n_epoch": None, "min_epochs": 1},
        {"max_epochs": 4, "max_steps": 7, "accumulate_grad_batches": 2, "limit_train_batches": 8},
        {"max_epochs": -1, "max_steps": 20, "overfit_batches": 3, "max_time": "00:10:00:00"},
    ],
)
def test_how_much_is_trained_and_evaluated(arguments: dict[str, Any], tmp_path: Path) -> None:
    class Noting(Net):
        def on_validation_epoch_end(self) -> None:
            self.evaluated = [*getattr(self, "evaluated", []), self.steps]
            self.log("again", self.mse.compute())

    theirs, ours, start = Noting(), Noting(), state_of(Net())
    epochs = arguments["max_epochs"]
    trainer = fit(theirs, epochs, **{name: value for name, value in arguments.items() if name != "max_epochs"})
    keys = {"lightning_module": ours, "lightning_trainer": arguments, "model": str(tmp_path / "model"), "num_threads": 1}
    result = hvdtrain.train(keys)
    assert difference(state_of(result.model), state_of(theirs), start) < 1e-6
    assert (ours.steps, ours.rates) == (theirs.steps, theirs.rates)
    assert [step for step in ours.evaluated if step in theirs.evaluated] == theirs.evaluated
    assert len(set(ours.evaluated) - set(theirs.evaluated)) <= len(result.history)  # also after each epoch
    if ours.evaluated[-1] == theirs.evaluated[-1]:
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        assert {name: float(value) for name, value in ours.trainer.callback_metrics.items()} == pytest.approx(values, rel=1e-6)


def test_init_writes_a_config_that_trains(tmp_path: Path) -> None:
    config = tmp_path / "mine.py"
    assert run_inside(["init", config, "--lightning"]).status == 0
    finished = run_inside([config, "++model", tmp_path / "model", "++num_epochs", 2, "++num_threads", 1])
    assert finished.status == 0, finished.err
    assert "val_accuracy" in finished.out
