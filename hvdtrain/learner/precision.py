"""Number types, independent of the framework: those of data, half precision with its loss scale, and skipped updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hvdtrain.config.check import build, did_you_mean, unknown_options
from hvdtrain.config.keys import ALONE, Rule, Section, Sections, key
from hvdtrain.errors import ConfigError, Problem, TrainingError, problem
from hvdtrain.runtime import log

if TYPE_CHECKING:
    from hvdtrain.data.types import Array

Dtype = Literal["float32", "bfloat16", "float16"]

LARGEST = 2.0**126
"""The largest loss scale: it has to fit into a float32."""

INITIAL_SCALE_OF_MESSAGES = 2.0**10
"""The initial loss scale if gradients are sent in float16, but computed in float32. They are often sums over a batch, and so
closer to the upper end of the range, 65504, than those of a mean: starting from 65536 would skip more updates at first."""

MAX_SKIPPED = 20
"""The number of consecutive updates that may be skipped with a loss scale below 1, unless the config sets one."""

WIDER = {"uint16": "int32", "uint32": "int64"}
"""Types that frameworks barely support, with their replacements."""


def widen(values: Array) -> Array:
    """The same values in a type that frameworks support."""
    wider = WIDER.get(values.dtype.name) if values.dtype.kind == "u" else None  # asking for the name takes microseconds
    return values if wider is None else values.astype(wider)


@dataclass(frozen=True, kw_only=True)
class PrecisionKeys(Section):
    """Computing in half precision, with parameters in single precision."""

    mixed_precision: str | dict[str, Any] | None = key(
        None,
        "compute in half precision, with parameters in float32: 'bfloat16', 'float16', or a dict of dtype and grad_scaler "
        "(with PyTorch torch.autocast, with TensorFlow the policy of Keras layers)",
        needs=("torch", "tensorflow"),
    )
    grad_scaler: str | dict[str, Any] | None = key(
        "auto",
        "how the loss is scaled: a dict of init_scale (65536), growth_factor (2), backoff_factor (0.5), growth_interval (2000); "
        "'auto': with these defaults for float16, from 1024 on if only gradients travel in it (horovod_compression), not at all "
        "otherwise; None: not at all",
    )

    def problems(self, sections: Sections = ALONE) -> list[Problem]:
        try:
            self.precision()
        except ConfigError as error:
            return error.problems
        return []

    def precision(self) -> Precision:
        """The precision that the keys describe. Raises: ConfigError, with all problems."""
        wanted = self.mixed_precision
        where = "mixed_precision"
        scaler = self.grad_scaler
        scaler_where = "grad_scaler"
        problems = []
        if isinstance(wanted, dict):
            for name in wanted.keys() - {"dtype", "grad_scaler"}:
                hint = did_you_mean(str(name), ["dtype", "grad_scaler"])
                problems += problem("unknown-key", f"mixed_precision.{name}: expected dtype or grad_scaler, got {name!r}{hint}")
            if "grad_scaler" in wanted:
                scaler = wanted["grad_scaler"]
                scaler_where = "mixed_precision.grad_scaler"
            wanted = wanted.get("dtype")
            where = "mixed_precision.dtype"
        dtype = "float32" if wanted is None else str(wanted).removeprefix("torch.")  # torch.float16 itself is accepted, too
        if dtype not in ("bfloat16", "float16") and (wanted is not None or where != "mixed_precision"):
            problems += problem(
                "wrong-type", f"{where}: expected 'bfloat16' or 'float16', got {'nothing' if wanted is None else repr(wanted)}"
            )
        scaling: ScaleOptions | Literal["auto"] | None = "auto"
        if scaler is None:
            scaling = None
        elif isinstance(scaler, dict):
            try:
                scaling = parse_scale_options(scaler, scaler_where)
            except ConfigError as error:
                problems += error.problems
        elif scaler != "auto":
            problems += problem("wrong-type", f"{scaler_where}: expected a dict, 'auto' or None, got {scaler!r}")
        if problems:
            raise ConfigError(problems)
        return Precision(dtype, scaling)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Precision:
    """The type that a model computes in. Its parameters are always float32.

    Attributes:
        scaling: how the loss is scaled; "auto": with default options if the model computes in float16 or sends gradients in it;
            None: not at all.
        narrow_gradients: whether gradients are sent in float16.
    """

    dtype: Dtype = "float32"
    scaling: ScaleOptions | Literal["auto"] | None = "auto"
    narrow_gradients: bool = False

    def loss_scale(self, dtype: str) -> LossScale | None:
        """The loss scale of a model that computes in a type; None: the loss is not scaled."""
        options = self.scaling
        if options == "auto":
            options = ScaleOptions() if dtype == "float16" else None
            if options is None and self.narrow_gradients:
                options = ScaleOptions(init_scale=INITIAL_SCALE_OF_MESSAGES)
        return None if options is None else LossScale(options)


FLOAT32 = Precision()

CPU_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""The flags of CPUs with bfloat16 instructions, on x86 and ARM."""


def cpu_emulates_bfloat16(about: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this host's CPU has no bfloat16 instructions, so that bfloat16 is slower than float32. False if unknown."""
    try:
        lines = about.read_text().splitlines()
        flags = [line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))]
    except OSError:
        return False
    return bool(flags) and not CPU_FLAGS & set(flags[0])


@dataclass(frozen=True, kw_only=True)
class ScaleOptions:
    """How the loss scale changes. The names are those of torch.amp.GradScaler."""

    init_scale: float = key(2.0**16, "the first scale", Rule("a positive number", lambda value: 0 < value < inf))
    growth_factor: float = key(
        2.0,
        "the factor on the scale after growth_interval consecutive updates with finite gradients",
        Rule("a number above 1", lambda value: 1 < value < inf),
    )
    backoff_factor: float = key(
        0.5, "the factor when a gradient is not finite", Rule("a number between 0 and 1", lambda value: 0 < value < 1)
    )
    growth_interval: int = key(2000, "a number of updates", Rule("a positive whole number", lambda value: value > 0))
    enabled: bool = key(True, "whether the loss is scaled at all")


def parse_scale_options(options: dict[str, Any], where: str) -> ScaleOptions | None:
    """Parse GradScaler's options; None if they disable it. Raises: ConfigError, with all problems."""
    scale_options, problems = build(ScaleOptions, options, f"{where}.", {})
    problems += unknown_options(f"{where}.", options, ScaleOptions, "a loss scale")
    if scale_options is None or problems:
        raise ConfigError(problems)
    return scale_options if scale_options.enabled else None


class LossScale:
    """A factor on losses before backward; gradients are divided by it before they are used.

    Reduced gradients are checked after the reduction, so all ranks skip the same updates and keep the same scale.
    """

    def __init__(self, options: ScaleOptions) -> None:
        self.scale = float(options.init_scale)
        self.options = options
        self._good = 0  # consecutive updates with finite gradients since the scale last changed

    @property
    def explains_overflow(self) -> bool:
        """Whether the scale can be the reason for a non-finite gradient."""
        return self.scale >= 1.0

    def update(self, finite: bool) -> bool:
        """Adapt the scale after an update. Returns whether the scale has changed."""
        before = self.scale
        self._good = self._good + 1 if finite else 0
        if not finite:
            self.scale *= self.options.backoff_factor
        elif self._good >= self.options.growth_interval:
            self._good = 0
            self.scale = min(LARGEST, self.scale * self.options.growth_factor)
        return self.scale != before

    def state(self) -> dict[str, float]:
        """The scale's state, for a checkpoint."""
        return {"scale": self.scale, "good": self._good}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from what `state` returned."""
        self.scale = float(state["scale"])
        self._good = int(state["good"])


class Updates(NamedTuple):
    """Numbers of updates."""

    applied: int = 0
    skipped: int = 0


SKIPPED_IN_A_ROW = "skipped_in_a_row"
"""The entry of a checkpoint."""


class GradientCheck:
    """Decides whether to apply or skip an update, and counts skipped updates.

    Args:
        max_skipped: how many consecutive updates may be skipped; None: only those that the loss scale explains.
        same_on_all_ranks: returns whether gradients were reduced, so that all ranks see the same and decide alike.

    Attributes:
        scale: the loss scale; None: the loss is not scaled.
    """

    def __init__(self, max_skipped: int | None, scale: LossScale | None, same_on_all_ranks: Callable[[], bool]) -> None:
        self._max_skipped = max_skipped
        self.scale = scale
        self._same_on_all_ranks = same_on_all_ranks
        self._num_skipped = 0  # consecutive, without those that the scale explains
        self._updates = Updates()

    @property
    def factor(self) -> float:
        """The factor on all losses before backward."""
        return 1.0 if self.scale is None else self.scale.scale

    @property
    def has_limit(self) -> bool:
        """Whether the config lets updates be skipped, up to a number of them in a row."""
        return self._max_skipped is not None

    @property
    def is_needed(self) -> bool:
        """Whether gradients have to be checked, as updates may be skipped."""
        return self._max_skipped is not None or self.scale is not None

    def decide(self, finite: bool, step: int, invalid: Callable[[], Sequence[str]]) -> bool:
        """Decide whether to apply an update. Called once for each.

        Args:
            finite: whether all gradients are finite.
            step: the number of training steps done before the last step of this update.
            invalid: returns the names of the parameters whose gradients are not finite.

        Raises:
            TrainingError: too many consecutive updates were skipped.
        """
        self.count(finite)
        explained = self.scale is not None and self.scale.explains_overflow
        if self.scale is not None and self.scale.update(finite):
            why = "" if finite else ": a gradient is not finite, the update is skipped"
            log.debug(f"loss scale {self.scale.scale:g} from step {step + 1} of the training on{why}")
        if finite:
            self._num_skipped = 0
        elif not explained:
            self._num_skipped += 1
            if self._num_skipped > self._limit:
                raise self._error(step, invalid())
        return finite

    def state(self) -> dict[str, Any]:
        """The entries of a checkpoint: the scale, and the number of updates that were just skipped in a row."""
        scale = {} if self.scale is None else {"loss_scale": self.scale.state()}
        return scale | ({SKIPPED_IN_A_ROW: self._num_skipped} if self._num_skipped else {})

    def restore(self, entries: Mapping[str, Any]) -> None:
        """Continue from what `state` returned, among other entries."""
        if self.scale is not None and "loss_scale" in entries:
            self.scale.restore(entries["loss_scale"])
        self._num_skipped = int(entries.get(SKIPPED_IN_A_ROW, 0))

    def count(self, applied: bool) -> None:
        """Count an update, also one that an optimizer skipped by itself."""
        self._updates = Updates(self._updates.applied + applied, self._updates.skipped + (not applied))

    def take_updates(self) -> Updates:
        """As in `Meter`."""
        updates, self._updates = self._updates, Updates()
        return updates

    @property
    def _limit(self) -> int:
        return MAX_SKIPPED if self._max_skipped is None else self._max_skipped

    def _error(self, step: int, names: Sequence[str]) -> TrainingError:
        scale = "" if self.scale is None else f" and the loss scale had come down to {self.scale.scale:g}"
        error = TrainingError(
            f"num_allowed_consec_invalid_gradient_steps: expected finite gradients after {self._limit} updates were "
            f"skipped{scale}, got others in step {step} of the training, for {', '.join(names)}"
        )
        return error.on_all_ranks() if self._same_on_all_ranks() else error
