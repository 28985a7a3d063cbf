"""In which type of numbers a model computes, whatever the framework."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hvdtrain.config.check import did_you_mean
from hvdtrain.config.keys import ALONE, Section, Sections, key
from hvdtrain.errors import ConfigError
from hvdtrain.learner.loss_scale import LossScale, ScaleOptions, parse_scale_options

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Precision:
    """What a model computes in. Its parameters are float32 in any case.

    Attributes:
        scaling: how the loss is scaled; "auto": where the model computes in float16; None: not.
    """

    dtype: Dtype = "float32"
    scaling: ScaleOptions | Literal["auto"] | None = "auto"

    def loss_scale(self, dtype: str) -> LossScale | None:
        """The scale for a model that computes in a type; None: the loss is left as it is."""
        options = self.scaling
        if options == "auto":
            options = ScaleOptions() if dtype == "float16" else None
        return None if options is None else LossScale(options)


FLOAT32 = Precision()


@dataclass(frozen=True, kw_only=True)
class PrecisionKeys(Section):
    """Computing in half precision, with parameters in single precision."""

    mixed_precision: str | dict[str, Any] | None = key(
        None,
        "compute in half precision, with parameters in float32: 'bfloat16', 'float16', or a dict of dtype and grad_scaler "
        "(with PyTorch torch.autocast, with TensorFlow the policy of Keras layers; RETURNN's torch_amp)",
    )
    grad_scaler: str | dict[str, Any] | None = key(
        "auto",
        "how the loss is scaled: a dict of init_scale (65536), growth_factor (2), backoff_factor (0.5), growth_interval (2000); "
        "'auto': so with float16, and not otherwise; None: not at all",
    )

    def problems(self, others: Sections = ALONE) -> list[str]:
        try:
            self.precision()
        except ConfigError as error:
            return error.problems
        return []

    def precision(self) -> Precision:
        """What the keys say. Raises: ConfigError, with all problems."""
        wanted, where, scaler = self.mixed_precision, "mixed_precision", self.grad_scaler
        scaler_where, problems = "grad_scaler", []
        if isinstance(wanted, dict):
            for name in wanted.keys() - {"dtype", "grad_scaler"}:
                hint = did_you_mean(str(name), ["dtype", "grad_scaler"])
                problems.append(f"mixed_precision.{name}: expected dtype or grad_scaler, got {name!r}{hint}")
            if "grad_scaler" in wanted:
                scaler, scaler_where = wanted["grad_scaler"], "mixed_precision.grad_scaler"
            wanted, where = wanted.get("dtype"), "mixed_precision.dtype"
        dtype = "float32" if wanted is None else str(wanted).removeprefix("torch.")  # torch.float16 itself will do, too
        if dtype not in ("bfloat16", "float16") and (wanted is not None or where != "mixed_precision"):
            problems.append(f"{where}: expected 'bfloat16' or 'float16', got {'nothing' if wanted is None else repr(wanted)}")
        scaling: ScaleOptions | Literal["auto"] | None = "auto"
        if scaler is None:
            scaling = None
        elif isinstance(scaler, dict):
            try:
                scaling = parse_scale_options(scaler, scaler_where)
            except ConfigError as error:
                problems += error.problems
        elif scaler != "auto":
            problems.append(f"{scaler_where}: expected a dict, 'auto' or None, got {scaler!r}")
        if problems:
            raise ConfigError(problems)
        return Precision(dtype, scaling)  # type: ignore[arg-type]
