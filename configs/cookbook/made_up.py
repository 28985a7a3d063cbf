"""Small corpora of sound, in place of yours: telephone numbers as a telephone dials them, and single tones."""

import wave
from pathlib import Path

import numpy

RATE = 8000
LOW, HIGH = (697, 770, 852, 941), (1209, 1336, 1477)  # Hz: a key of a telephone sounds as two tones
KEYS = "123456789*0#"
TELEPHONES = ("black", "green", "red", "white")
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def telephone_calls(folder):
    """Write Kaldi folders, unless they exist: `train`, `dev`, `street` (dev with noise), and `noise` (without transcripts)."""
    folder = Path(folder)
    if (folder / "street" / "text").exists():
        return
    rng = numpy.random.default_rng(1)
    for part, count in (("train", 240), ("dev", 40)):
        calls = {f"{part}-{number:03}": dialled(rng) for number in range(count)}
        write_kaldi(folder / part, calls)
    noise = {f"noise-{number:02}": (street(rng, 2 * RATE), None, None) for number in range(20)}
    write_kaldi(folder / "noise", noise)
    loud = {name: (sound + 1.5 * street(rng, len(sound)), number, phone) for name, (sound, number, phone) in calls.items()}
    write_kaldi(folder / "street", loud)


def dialled(rng):
    """A call: its sound, its number, and the telephone, which one can hear."""
    phone = int(rng.integers(len(TELEPHONES)))
    number = "".join(rng.choice(list("0123456789"), rng.integers(3, 8)))
    parts = [silence(rng)]
    for digit in number:
        parts += [tone(digit, rng.uniform(0.08, 0.14), overtones=0.5 * phone), silence(rng)]
    sound = rng.uniform(0.5, 1.0) * numpy.concatenate(parts)
    return sound + 0.01 * rng.normal(size=len(sound)), number, TELEPHONES[phone]


def tone(key, seconds, overtones=0.0):
    place = KEYS.index(key)
    time = numpy.arange(int(seconds * RATE)) / RATE
    return sum(
        0.2 * numpy.sin(2 * numpy.pi * pitch * time) + 0.2 * overtones * numpy.sin(4 * numpy.pi * pitch * time)
        for pitch in (LOW[place // 3], HIGH[place % 3])
    )


def silence(rng):
    return numpy.zeros(int(rng.uniform(0.04, 0.1) * RATE))


def street(rng, samples):
    """Noise with more low frequencies than high ones."""
    return 0.03 * numpy.convolve(rng.normal(size=samples + 7), numpy.ones(8), "valid")


def write_kaldi(folder, calls):
    (folder / "audio").mkdir(parents=True, exist_ok=True)
    tables = {"wav.scp": {}, "utt2num_samples": {}, "utt2spk": {}, "text": {}}
    for name, (sound, number, phone) in calls.items():
        tables["wav.scp"][name] = write_sound(folder / "audio" / f"{name}.wav", sound)
        tables["utt2num_samples"][name] = len(sound)
        if number is not None:
            tables["utt2spk"][name], tables["text"][name] = phone, number
    for table, lines in tables.items():
        if lines:
            (folder / table).write_text("".join(f"{name} {value}\n" for name, value in lines.items()))


def single_tones(folder):
    """Write the manifests of Lhotse `train.jsonl.gz` and `dev.jsonl.gz`, unless they exist: recordings of one key in noise."""
    from lhotse import CutSet, MonoCut, Recording, SupervisionSegment

    folder = Path(folder)
    if (folder / "dev.jsonl.gz").exists():
        return
    (folder / "audio").mkdir(parents=True, exist_ok=True)
    rng = numpy.random.default_rng(2)
    for part, count in (("train", 300), ("dev", 80)):
        cuts = []
        for number in range(count):
            digit, name = int(rng.integers(10)), f"{part}-{number:03}"
            sound = street(rng, int(rng.uniform(0.3, 0.6) * RATE))
            key = tone(str(digit), rng.uniform(0.08, 0.14))
            begin = int(rng.integers(len(sound) - len(key)))
            sound[begin : begin + len(key)] += key
            recording = Recording.from_file(write_sound(folder / "audio" / f"{name}.wav", sound))
            said = SupervisionSegment(name, recording.id, 0.0, recording.duration, text=DIGITS[digit])
            cuts.append(MonoCut(name, 0.0, recording.duration, channel=0, recording=recording, supervisions=[said]))
        CutSet.from_cuts(cuts).to_file(folder / f"{part}.jsonl.gz")


def write_sound(path, sound):
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((sound.clip(-1.0, 1.0) * 32767).astype("<i2").tobytes())
    return path.resolve()
