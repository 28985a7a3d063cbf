"""The keys of datasets of speech."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from hvdtrain.config.keys import REQUIRED, key, positive
from hvdtrain.data.keys import DatasetKeys
from hvdtrain.errors import Problem, problem

Input = Literal["wav", "fbank", "feats"]
Units = Literal["characters", "words", "text"]

TABLES = ("wav.scp", "segments", "feats.scp", "text")
"""The files of a Kaldi folder that describe its utterances."""

LENGTHS = ("utt2num_samples", "utt2num_frames", "utt2dur", "reco2dur", "reco2num_samples")

FILE_KINDS = ("sound", "kaldi_ark", "npy", "characters", "words", "text", "text_int", "csv_int", "csv_float")
"""What a line of a file may describe; the names are ESPnet's where it has one."""


@dataclass(frozen=True, kw_only=True)
class TranscriptKeys(DatasetKeys):
    """How transcripts become class indices."""

    units: Units | None = key(
        "characters",
        "what the data key 'classes' holds: the classes of the characters or words of the transcript, or the transcript itself "
        "as one text (for map_seq and for scoring); None: no such data key",
    )
    vocabulary: Any = key(
        None,
        "the classes: a list, a file with an entry per line (or `entry number`; <unk> stands for everything else, <space> for a "
        "space), a SentencePiece model (.model), or a tokenizer of Hugging Face (.json); by data key as a dict",
    )
    vocabulary_from: Any = key(
        None,
        "instead of a vocabulary, a transcript (lines `utterance text`, such as data/train/text) whose different units in "
        "alphabetical order are the classes; by data key as a dict",
    )

    def text_problems(self, text_keys: list[str]) -> list[Problem]:
        """Problems with the vocabularies of the data keys that need one."""
        problems = []
        for name in ("vocabulary", "vocabulary_from"):
            value = getattr(self, name)
            if not isinstance(value, (dict, str, list, tuple, Path, type(None))):
                problems += problem("wrong-type", f"{name}: expected a file, a list or a dict of these, got {value!r}")
            if isinstance(value, dict):
                for unknown in [entry for entry in value if entry not in text_keys]:
                    problems += problem(
                        "unknown-value", f"{name}.{unknown}: expected one of {', '.join(text_keys) or 'none'}, got it"
                    )
        for data_key in text_keys:
            names = [name for name in ("vocabulary", "vocabulary_from") if self.of_key(name, data_key) is not None]
            if len(names) != 1:
                problems += problem(
                    "missing" if not names else "conflict",
                    f"vocabulary: expected either it or vocabulary_from for {data_key!r}, got {'both' if names else 'neither'} "
                    "(all parts of a corpus need the same one, such as vocabulary_from = 'data/train/text'; units = None: "
                    "without texts)",
                )
        return problems

    def of_key(self, name: str, data_key: str) -> Any:
        """The value of `vocabulary` or `vocabulary_from` for a data key."""
        value = getattr(self, name)
        return value.get(data_key) if isinstance(value, dict) else value


@dataclass(frozen=True, kw_only=True)
class KaldiFolderKeys(TranscriptKeys):
    """Keys of a dataset dict with `"class": "KaldiFolder"`: a data folder of Kaldi or a dump folder of ESPnet."""

    opener: ClassVar[str] = "hvdtrain.plugins.speech.kaldi:KaldiFolder"
    scans: ClassVar[bool] = True

    folder: str = key(REQUIRED, "the folder with wav.scp, segments, feats.scp, text and so on")
    features: Input | None = key(
        "wav",
        "what the data key 'data' holds: 'wav', sound as float32 from -1 to 1 of shape (samples, channels); 'fbank', log mel "
        "features computed from it; 'feats', the features of feats.scp; None: no such data key",
    )
    log_mel: dict[str, Any] = key({}, "arguments of LogMel for 'fbank', such as {'num_mels': 40}")
    data_keys: dict[str, Any] = key(
        {},
        "more data keys: by name (file in the folder, kind), where the kind is one of " + ", ".join(FILE_KINDS),
    )
    shapes: dict[str, str] = key({}, "by data key, a shape file of ESPnet (lines `utterance frames,...`) with its lengths")
    sample_rate: int | None = key(
        None, "samples per second; None: those of the first recording. Recordings with another rate count as broken", positive
    )
    root: str | None = key(None, "the folder that relative paths in the tables start from; None: the current one, as in Kaldi")
    allow_commands: bool = key(False, "run the commands that a wav.scp may have in place of files (lines that end with a pipe)")

    def problems(self) -> list[Problem]:
        problems = []
        if self.features is None and self.units is None and not self.data_keys:
            problems += problem("missing", "features: expected a data key, got None in features and units, and no data_keys")
        if self.log_mel and self.features != "fbank":
            problems += problem("conflict", f"log_mel: expected features = 'fbank' with it, got {self.features!r}")
        valid = {}
        for name, entry in self.data_keys.items():
            pair = isinstance(entry, (tuple, list)) and len(entry) == 2 and all(isinstance(text, str) for text in entry)
            if not pair or entry[1] not in FILE_KINDS:
                problems += problem(
                    "wrong-type", f"data_keys.{name}: expected (file, kind) with one of {', '.join(FILE_KINDS)}, got {entry!r}"
                )
            elif name in self.columns():
                problems += problem("duplicate", f"data_keys.{name}: expected another name, as features or units has {name!r}")
            else:
                valid[name] = tuple(entry)
        texts = [name for name, (_, kind) in {**self.columns(), **valid}.items() if kind in ("characters", "words")]
        problems += self.text_problems(texts)
        for name in self.shapes:
            if name not in (*self.columns(), *self.data_keys):
                problems += problem("unknown-value", f"shapes.{name}: expected a data key, got it")
        return problems

    def columns(self) -> dict[str, tuple[str, str]]:
        """By data key that `features` and `units` describe, the file and the kind."""
        files = {}
        if self.features is not None:
            files["data"] = ("feats.scp", "kaldi_ark") if self.features == "feats" else ("wav.scp", "sound")
        if self.units is not None:
            files["classes"] = ("text", self.units)
        return files

    def data_files(self) -> tuple[str, ...]:
        names = [
            *TABLES,
            *LENGTHS,
            *(entry[0] for entry in self.data_keys.values() if isinstance(entry, (tuple, list)) and entry),
        ]
        paths = [Path(self.folder) / str(name) for name in dict.fromkeys(names)]
        return tuple(str(path) for path in paths if path.is_file())

    def files_to_copy(self) -> tuple[str, ...]:
        return ()  # the tables are small, and what they point to stays where it is


@dataclass(frozen=True, kw_only=True)
class LhotseDatasetKeys(TranscriptKeys):
    """Keys of a dataset dict with `"class": "LhotseDataset"`: the cuts of a Lhotse CutSet, each a sequence."""

    opener: ClassVar[str] = "hvdtrain.plugins.speech.cuts:open_cuts"
    scans: ClassVar[bool] = True

    cuts: Any = key(REQUIRED, "a CutSet, a manifest of cuts (.jsonl or .jsonl.gz), or a folder in Shar format")
    features: Any = key(
        None,
        "what the data key 'data' holds: 'wav', sound of shape (samples, channels); 'feats', the stored features; 'fbank', log "
        "mel features; an extractor of Lhotse, such as Fbank(); None: the stored features if the first cut has them, else sound",
    )
    log_mel: dict[str, Any] = key({}, "arguments of LogMel for 'fbank', such as {'num_mels': 40}")
    units: Units | None = key(
        "text",
        "what the data key 'classes' holds: the texts of a cut's supervisions, joined by spaces, as one text, or the classes of "
        "their characters or words; None: no such data key",
    )

    def problems(self) -> list[Problem]:
        problems = []
        if isinstance(self.features, str) and self.features not in ("wav", "feats", "fbank"):
            problems += problem(
                "unknown-value", f"features: expected 'wav', 'feats', 'fbank' or an extractor, got {self.features!r}"
            )
        if self.log_mel and self.features != "fbank":
            problems += problem("conflict", f"log_mel: expected features = 'fbank' with it, got {self.features!r}")
        return problems + self.text_problems(["classes"] if self.units in ("characters", "words") else [])
