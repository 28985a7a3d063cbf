"""Small folders of speech for tests."""

from pathlib import Path

import numpy
import soundfile

RATE = 8000
WORDS = ["one", "two", "three", "ten", "a b", "bee"]


def sound(number: int, samples: int) -> numpy.ndarray:
    """16-bit sound, as float32, that differs between numbers."""
    integers = numpy.random.RandomState(number).randint(-20000, 20000, samples)
    return (integers / 32768).astype(numpy.float32)


def write_folder(folder: Path, count: int = 6, suffix: str = "wav", shortest: int = 800) -> dict[str, numpy.ndarray]:
    """Write a Kaldi folder with wav.scp, text and utt2spk; returns the sound by utterance."""
    (folder / "audio").mkdir(parents=True)
    sounds = {f"utt{number:02}": sound(number, shortest + 80 * (number * 7 % 5)) for number in range(count)}
    for name, samples in sounds.items():
        soundfile.write(folder / "audio" / f"{name}.{suffix}", samples, RATE, subtype="PCM_16")
    write_table(folder / "wav.scp", {name: folder / "audio" / f"{name}.{suffix}" for name in sounds})
    write_table(folder / "text", {name: WORDS[number % len(WORDS)] for number, name in enumerate(sounds)})
    write_table(folder / "utt2spk", {name: f"spk{number % 2}" for number, name in enumerate(sounds)})
    return sounds


def write_table(path: Path, values: dict[str, object]) -> None:
    """Write a table of Kaldi."""
    path.write_text("".join(f"{name} {value}".rstrip() + "\n" for name, value in values.items()))
