"""Has Debian's espeak-ng speak sentences of digits and short words, and writes them as Kaldi folders.

    python demos/speech/speak.py data/speech                       4,000 sentences to train on, 300 for dev, 300 for test
    python demos/speech/speak.py data/speech --sentences 40 --held-out 10

Voices, speeds and pitches differ between sentences; dev and test have voices that train does not have. The sentences are the
same in every run.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy
import soundfile

DIGITS = "zero one two three four five six seven eight nine".split()
SHORT = "yes no go stop up down left right on off red blue green open close light door play next back".split()
VOICES = {
    "train": [f"{accent}+{variant}" for accent in ("en-us", "en-gb", "en-029") for variant in "m1 m2 m3 m4 f1 f2 f3".split()],
    "dev": ["en-us+m5", "en-gb+f4", "en-gb-scotland+m5", "en-gb-scotland+f4"],
    "test": ["en-us+m7", "en-gb+f5", "en-gb-scotland+m7", "en-gb-scotland+f5"],
}
SEEDS = {"train": 1, "dev": 2, "test": 3}
FEWEST, MOST = 3, 7
"""Words of a sentence."""


@dataclass(frozen=True)
class Sentence:
    """Attributes:
    name: the voice, the speed and a number: Kaldi's utterances begin with their speaker.
    speed: words per minute.
    pitch: from 0 to 99.
    """

    name: str
    words: Sequence[str]
    voice: str
    speed: int
    pitch: int


def sentences(part: str, count: int) -> list[Sentence]:
    """The sentences of a part, sorted by name."""
    generator = numpy.random.RandomState(SEEDS[part])
    found = []
    for number in range(count):
        voice = VOICES[part][generator.randint(len(VOICES[part]))]
        words = [str(word) for word in generator.choice([*DIGITS, *SHORT], generator.randint(FEWEST, MOST + 1))]
        name = f"{voice.replace('+', '_')}-{number:05}"
        found.append(Sentence(name, words, voice, int(generator.randint(120, 200)), int(generator.randint(25, 75))))
    return sorted(found, key=lambda sentence: sentence.name)


def speak(sentence: Sentence, path: Path) -> int:
    """Write a sentence as sound; returns its number of samples."""
    options = ["-v", sentence.voice, "-s", str(sentence.speed), "-p", str(sentence.pitch), "-w", str(path)]
    subprocess.run(["espeak-ng", *options, " ".join(sentence.words)], check=True, stdin=subprocess.DEVNULL)
    return int(soundfile.info(path).frames)


def write_part(folder: Path, part: str, count: int) -> None:
    """Write a part as a Kaldi folder; its text comes last, so that what make finds is complete."""
    audio = folder / part / "audio"
    audio.mkdir(parents=True, exist_ok=True)
    spoken = sentences(part, count)
    paths = [audio / f"{sentence.name}.wav" for sentence in spoken]
    with ThreadPoolExecutor() as pool:
        samples = list(pool.map(speak, spoken, paths))
    rows = {
        "wav.scp": [str(path.absolute()) for path in paths],
        "utt2spk": [sentence.voice.replace("+", "_") for sentence in spoken],
        "utt2num_samples": samples,
        "text": [" ".join(sentence.words) for sentence in spoken],
    }
    for name, values in rows.items():
        lines = [f"{sentence.name} {value}\n" for sentence, value in zip(spoken, values, strict=True)]
        (folder / part / name).write_text("".join(lines))
    print(f"{folder / part}: {count} sentences, {sum(samples) / 22050 / 60:.0f} minutes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sentences", type=int, default=4000, help="to train on")
    parser.add_argument("--held-out", type=int, default=300, help="each of dev and test")
    options = parser.parse_args()
    if shutil.which("espeak-ng") is None:
        sys.exit("espeak-ng: expected the program, got none (apt-get install espeak-ng)")
    for part in VOICES:
        write_part(options.folder, part, options.sentences if part == "train" else options.held_out)


if __name__ == "__main__":
    main()
