"""What modules, datamodules and callbacks do in their hooks: the same as with Lightning's own Trainer."""

import copy
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from lightning_modules import Net, fit
from other_trainers import check_resume, difference, state_of, train
from torch.utils.data import DataLoader
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection

import hvdtrain
from hvdtrain.errors import ConfigError
from hvdtrain.plugins.lightning.user_objects import UserObjects

lightning = pytest.importorskip("lightning.pytorch")
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Scaled(lightning.LightningDataModule):
    """Moves batches itself, and changes them."""

    def train_dataloader(self) -> Any:
        return DataLoader(Net().items, batch_size=4)

    def val_dataloader(self) -> Any:
        return DataLoader(Net().others, batch_size=4)

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return super().transfer_batch_to_device(batch, device, dataloader_idx) * (2 if self.trainer.training else 3)


class Rare(Net):
    """Defines methods that few modules define."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict({name: float(value) for name, value in lightning.utilities.grad_norm(self, 2).items()})

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any = None) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.5)


class Reads(lightning.Callback):
    """Notes what it reads, and what it is given."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.read = []
        self.copy = copy.deepcopy(pl_module).eval()
        pl_module.read.append(pl_module.training)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        names = ("is_last_batch", "gradient_clip_val", "num_val_batches", "precision", "val_check_interval", "local_rank")
        pl_module.read.append((float(loss), *(str(getattr(trainer, name)) for name in names)))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        pl_module.read.append((float(outputs["loss"]), trainer.is_last_batch))

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.read.append(pl_module.training)


class Plateau(Net):
    """A scheduler of steps that looks at a value of the evaluation after them."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=9.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss", "interval": "step"}}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not batch_idx:  # of which there is none before the first evaluation
            self.trainer.callback_metrics.setdefault("val_loss", torch.tensor(9.0))


class Average(lightning.Callback):
    """Evaluates a moving average of the weights, as many callbacks of this kind do."""

    average: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = self.average or state_of(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for name, tensor in pl_module.state_dict().items():
            self.average[name].mul_(0.9).add_(tensor, alpha=0.1)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.trained = state_of(pl_module)
        pl_module.load_state_dict(self.average)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.load_state_dict(self.trained)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average = state_dict["average"]


class WithNumpy(Net):
    """Keeps its scheduler for itself, which computes rates with numpy."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: numpy.cos(0.01 * step))
        return optimizer

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.schedule.step()


class Replaces(Net):
    def configure_callbacks(self) -> Any:
        return [EarlyStopping("val_loss", patience=9)]


class Collects(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scores = MetricCollection([MeanSquaredError(), MeanAbsoluteError()], prefix="val_")
        self.again = self.scores.clone("again_")

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        _, output, wanted = self.losses(batch)
        self.scores(output, wanted)
        self.log_dict(self.scores, on_step=True, on_epoch=True)
        self.again.update(output, wanted)
        self.log("val_loss", self.losses(batch)[0])

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.again.compute())
        self.again.reset()


class Logs(Net):
    """Logs in every way, and reads what is known then."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        for name, reduce in (("sum", torch.sum), ("least", "min")):
            self.log(name, result["loss"], on_step=True, on_epoch=True, reduce_fx=reduce)
        self.log("both", self.train_mse, on_step=True, on_epoch=True)
        return result

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", self.net[0].weight.grad.norm(), on_epoch=True, on_step=False)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("ended", outputs["loss"], on_epoch=True)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("train_loss", float(batch_idx), on_step=True, on_epoch=True)
        self.log("of_step", float(batch_idx), on_step=True, on_epoch=False)

    def note(self) -> None:
        self.read = [*getattr(self, "read", []), {name: float(value) for name, value in self.trainer.callback_metrics.items()}]

    on_validation_end = note

    def on_train_epoch_end(self) -> None:
        self.log("train_mse_again", self.train_mse.compute())
        self.log("train_mse_logged", self.train_mse)
        self.note()


class Items(torch.utils.data.Dataset[Any]):
    """Items that a hook makes larger."""

    factor = 1.0

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Any:
        return Net().items[index] * self.factor


class Warms(lightning.Callback):
    rate = 0.1

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        assert len(trainer.train_dataloader) == 13
        self.rate *= 1.1


class Changes(Net):
    """Keeps numbers in attributes, its own and others', as BYOL's decay is."""

    def __init__(self) -> None:
        super().__init__()
        self.target = torch.nn.Linear(2, 2)
        self.decay = 0.5
        self.running: Any = None
        self.read: list[float] = []
        self.validated = 0
        self.outputs: list[Any] = []
        self.by_kind: dict[str, list[float]] = defaultdict(list)

    def on_validation_epoch_end(self) -> None:
        self.validated += 1

    def on_train_epoch_end(self) -> None:
        self.decay += 1e-3 * float(torch.stack(self.outputs).mean() + sum(self.by_kind["odd"])) + 1e-2 * self.validated
        self.outputs.clear()
        self.by_kind.clear()

    def on_train_epoch_start(self) -> None:
        self.trainer.train_dataloader.dataset.factor = 1.0 + self.current_epoch

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        self.outputs.append(loss)
        self.by_kind["odd" if batch_idx % 2 else "even"].append(float(loss.detach()))
        self.running = loss.detach() if self.running is None else 0.9 * self.running + 0.1 * loss.detach()
        self.decay = 1 - (1 - self.decay) * 0.9
        return loss * self.running * self.decay * self.trainer.callbacks[0].rate

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        self.read.append(float(optimizer_closure()))
        optimizer.step()

    def train_dataloader(self) -> Any:
        return DataLoader(Items(), batch_size=4)


class Adversarial(Net):
    """Two optimizers that `training_step` steps, one of them after every second batch, by a closure, and with clipping."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.judge = torch.nn.Linear(2, 1)
        self.read: list[Any] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        first, second = self.optimizers()

        def closure() -> Any:
            first.zero_grad()
            loss = self.losses(batch)[0] + self.judge(self.net(batch)).mean()
            self.manual_backward(loss)
            return loss

        with first.toggle_model():
            loss = first.step(closure)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.manual_backward(self.judge(batch[:, :2]).square().mean() - self.judge(self.net(batch).detach()).mean())
        if batch_idx % 2:
            self.clip_gradients(second, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
            second.step()
            second.zero_grad()
        self.lr_schedulers()[0].step()
        self.read.append((self.global_step, first.param_groups[0]["lr"], self.judge.weight.grad is None))
        return {"loss": loss, "more": 3}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.read.append(float(optimizer.param_groups[0]["params"][0].grad.norm()))

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.read.append(sorted(outputs))

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.Adam(network.parameters(), 0.01) for network in (self.net, self.judge)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5) for optimizer in optimizers]


CASES: dict[str, tuple[type[Net], Callable[[], Any], dict[str, Any]]] = {
    "datamodule": (Net, lambda: {"datamodule": Scaled()}, {}),
    "clipping": (Rare, dict, {"gradient_clip_val": 0.2}),
    "reading": (Net, lambda: {"callbacks": [Reads()]}, {"accumulate_grad_batches": 2, "limit_train_batches": 12}),
    "plateau": (Plateau, dict, {"val_check_interval": 4}),
    "numpy": (WithNumpy, dict, {}),
    "average": (Net, lambda: {"callbacks": [Average()]}, {}),
    "replaced": (Replaces, lambda: {"callbacks": [EarlyStopping("most", patience=0, min_delta=99.0)]}, {}),
    "collection": (Collects, dict, {}),
    "logging": (Logs, dict, {}),
    "manual": (Adversarial, dict, {}),
    "attributes": (Changes, lambda: {"callbacks": [Warms()]}, {}),
}
"""By name, a module, what is made for it, and arguments of the Trainer."""


@pytest.mark.parametrize("name", CASES)
def test_what_hooks_do_is_the_same(name: str, tmp_path: Path) -> None:
    kind, more, arguments = CASES[name]
    theirs, start, trainer_arguments = kind(), state_of(kind()), more()
    trainer = fit(theirs, 3, **arguments, **trainer_arguments)

    def keys() -> dict[str, Any]:
        more_keys = more()
        callbacks = {"lightning_callbacks": more_keys.pop("callbacks")} if "callbacks" in more_keys else {}
        return {"lightning_module": kind(), "num_epochs": 3, "lightning_trainer": arguments, **callbacks, **more_keys}

    ours = keys()
    weights = train(ours, tmp_path / "model")
    module = ours["lightning_module"]
    assert difference(weights, state_of(theirs), start) < 1e-6
    assert module.rates == theirs.rates
    for read, wanted in zip(getattr(module, "read", []), getattr(theirs, "read", []), strict=True):
        assert read == (pytest.approx(wanted, rel=1e-6) if isinstance(wanted, (dict, float)) else wanted)
    values = {metric: float(value) for metric, value in trainer.callback_metrics.items()}
    assert {metric: float(value) for metric, value in module.trainer.callback_metrics.items()} == pytest.approx(values, rel=1e-6)
    for step in {"average": [13], "plateau": [13], "numpy": [13], "attributes": [13, 18], "manual": [13, 14]}.get(name, []):
        check_resume(keys, tmp_path / str(step), step, weights)


def test_what_would_be_lost_is_refused(tmp_path: Path) -> None:
    class Keeps(Net):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["path"] = Path()

    class Old(Net):
        def validation_epoch_end(self, outputs: Any) -> None: ...

    for module, expected in (
        (Keeps, r"expected tensors and plain values in what hooks add to a checkpoint, got pathlib\."),
        (Old, "expected a module without validation_epoch_end, got Old .Lightning 2 calls on_validation_epoch_end instead"),
    ):
        with pytest.raises(ConfigError, match=expected):
            train({"lightning_module": module, "num_epochs": 1}, tmp_path / module.__name__)


def test_a_model_checkpoint_chooses_the_best_epoch_and_a_logger_gets_what_the_module_logs(tmp_path: Path) -> None:
    class Logs(Net):
        def on_validation_epoch_end(self) -> None:
            self.log("rising", float(self.current_epoch % 2))
            self.logger.experiment.log_metrics({"seen": self.current_epoch}, self.current_epoch)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            self.log("trained", float(self.current_epoch % 2), on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

    logger = CSVLogger(tmp_path, name="logs", version="0")
    for monitor in ("trained_epoch", "rising"):
        arguments = {"max_epochs": 3, "callbacks": [ModelCheckpoint(monitor=monitor, mode="max")], "logger": logger}
        keys = {"lightning_module": Logs, "lightning_trainer": arguments, "model": str(tmp_path / monitor), "num_threads": 1}
        assert hvdtrain.train({**keys, "higher_is_better": ["val_mse"]}).best.epoch == 2
    for monitor in ("step", "train_loss_step"):
        assert not UserObjects({"lightning_callbacks": [ModelCheckpoint(monitor=monitor)]}, None).best(2)
    assert (tmp_path / "logs" / "0" / "metrics.csv").read_text().split() == ["seen,step", *["0,0", "1,1", "2,2"] * 2]
