"""The keys of the steps that the `map_seq` of a MapDataset may have: features, augmentation and tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hvdtrain.config.keys import REQUIRED, Rule, key, not_negative, positive, share
from hvdtrain.data.kinds import StepKeys
from hvdtrain.errors import Problem, problem
from hvdtrain.plugins.speech.keys import TranscriptKeys

RANGE = Rule("two numbers, the lower one first", lambda value: len(value) == 2 and value[0] <= value[1])


@dataclass(frozen=True, kw_only=True)
class LogMelKeys(StepKeys):
    """Keys of a step of map_seq with `"class": "LogMel"`: log mel features of sound, as Kaldi computes them."""

    opener: ClassVar[str] = "hvdtrain.plugins.speech.steps:LogMelStep"

    sample_rate: int = key(REQUIRED, "samples per second", positive)
    num_mels: int = key(80, "the number of features", positive)
    window: float = key(0.025, "seconds of a frame", positive)
    hop: float = key(0.01, "seconds between the beginnings of two frames", positive)
    low: float = key(20.0, "the frequency in Hz at which the lowest filter begins", not_negative)
    high: float = key(0.0, "that at which the highest filter ends; 0 or less: so much below half of the sample rate")
    key: str = key("data", "the data key of the sound, which the features replace")


@dataclass(frozen=True, kw_only=True)
class SpecAugmentKeys(StepKeys):
    """Keys of a step of map_seq with `"class": "SpecAugment"`: random parts of features are set to their mean."""

    opener: ClassVar[str] = "hvdtrain.plugins.speech.steps:SpecAugment"

    time_masks: int = key(2, "the number of spans of frames", not_negative)
    time_frames: int = key(40, "frames of the longest span", not_negative)
    time_share: float = key(0.2, "the largest share of a sequence that one span may take", share)
    feature_masks: int = key(2, "the number of spans of features", not_negative)
    feature_width: int = key(27, "features of the widest span", not_negative)
    key: str = key("data", "the data key of the features")


@dataclass(frozen=True, kw_only=True)
class SpeedPerturbationKeys(StepKeys):
    """Keys of a step of map_seq with `"class": "SpeedPerturbation"`: sound that is faster or slower, and so higher or lower."""

    opener: ClassVar[str] = "hvdtrain.plugins.speech.steps:SpeedPerturbation"

    factors: list[float] = key([0.9, 1.0, 1.1], "one of these is drawn for each sequence and epoch; 1.1 is faster")
    key: str = key("data", "the data key of the sound")

    def problems(self) -> list[Problem]:
        if self.factors and all(0.1 <= factor <= 10 for factor in self.factors):
            return []
        return problem("out-of-range", f"factors: expected numbers from 0.1 to 10, got {self.factors}")


@dataclass(frozen=True, kw_only=True)
class AddNoiseKeys(StepKeys):
    """Keys of a step of map_seq with `"class": "AddNoise"`: noise of another dataset is added to sound."""

    opener: ClassVar[str] = "hvdtrain.plugins.speech.steps:AddNoise"

    noise: str = key("noise", "the name of a dataset in `datasets` of the MapDataset, with noise in its data key 'data'")
    snr: list[float] = key([5.0, 20.0], "the signal-to-noise ratio in dB is drawn from this range", RANGE)
    share: float = key(0.5, "the share of the sequences that get noise, drawn for each sequence and epoch", share)
    key: str = key("data", "the data key of the sound")

    @property
    def reads(self) -> list[str]:
        return [self.noise]


@dataclass(frozen=True, kw_only=True)
class TokensKeys(TranscriptKeys, StepKeys):
    """Keys of a step of map_seq with `"class": "Tokens"`: texts become class indices; the new lengths are found once and kept."""

    opener: ClassVar[str] = "hvdtrain.plugins.speech.steps:TokensStep"

    key: str = key("classes", "the data key of the texts, which the classes replace")

    def problems(self) -> list[Problem]:
        if self.units not in ("characters", "words"):
            return problem("unknown-value", f"units: expected 'characters' or 'words', got {self.units!r}")
        return self.text_problems([self.key])
