"""Reading speech: hours of sound per CPU second from a Kaldi folder and from Lhotse, against Lhotse itself, ESPnet's dataset and
soundfile alone; and the seconds until a training on a manifest of many cuts has its first batch.

    python benchmarks/speech.py
    python benchmarks/speech.py --cuts 1000000 --rounds 0

Rates are those of one process, with all files in the page cache. The cuts of the second part have no sound; their batch is
planned, not read. ESPnet is left out where it is not installed: `pip install --no-deps espnet` and `pip install humanfriendly
typeguard`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import kaldiio
import lhotse
import numpy
import soundfile
from measuring import machine, table, take_turns

from hvdtrain.data.dataset import Dataset, Scanning
from hvdtrain.data.opening import OpeningContext, open_dataset
from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.data.plan.inputs import PlanInputs
from hvdtrain.data.plan.order_keys import OrderKeys
from hvdtrain.data.sources import check_dataset

RATE = 16000


def write_sound(folder: Path, count: int, seconds: float) -> None:
    """Kaldi folders with the same noise as wav, as flac and in an archive, and a manifest and a folder in Shar format."""
    generator = numpy.random.RandomState(0)
    sounds = {f"utt{n:05}": (generator.randn(int(seconds * RATE)) * 3000).astype(numpy.int16) for n in range(count)}
    for suffix in ("wav", "flac"):
        target = folder / suffix
        target.mkdir()
        for name, samples in sounds.items():
            soundfile.write(target / f"{name}.{suffix}", samples, RATE)
        (target / "wav.scp").write_text("".join(f"{name} {target}/{name}.{suffix}\n" for name in sounds))
        (target / "utt2num_samples").write_text("".join(f"{name} {len(samples)}\n" for name, samples in sounds.items()))
    (folder / "ark").mkdir()
    kaldiio.save_ark(
        str(folder / "ark" / "a.ark"), {n: (RATE, s) for n, s in sounds.items()}, scp=str(folder / "ark" / "wav.scp")
    )
    recordings = lhotse.RecordingSet.from_recordings(
        lhotse.Recording.from_file(folder / "flac" / f"{name}.flac") for name in sounds
    )
    cuts = lhotse.CutSet.from_manifests(recordings)
    cuts.to_file(folder / "cuts.jsonl")
    (folder / "shar").mkdir()
    cuts.to_shar(folder / "shar", fields={"recording": "flac"}, verbose=False)


def opened(options: dict[str, object], folder: Path | None = None) -> Dataset:
    spec, problems = check_dataset("train", options, {})
    if spec is None:
        raise SystemExit(str(problems))
    return open_dataset(spec, OpeningContext(scanning=Scanning(folder)))


def reader(options: dict[str, object], hours: float) -> Callable[[], float]:
    dataset = opened(options)

    def read() -> float:
        for index in range(dataset.num_sequences):
            dataset.sequence(index)
        return hours

    return read


def espnet_readers(folder: Path, hours: float) -> dict[str, Callable[[], float]]:
    """The map-style dataset of ESPnet, on the folders in which KaldiFolder reads wav and flac; nothing if it is not installed."""
    try:
        from espnet2.train.dataset import ESPnetDataset  # type: ignore[import-not-found]
    except ImportError as error:
        print(f"Without ESPnet ({error}): pip install --no-deps espnet; pip install humanfriendly typeguard")
        return {}

    def reader_of(suffix: str) -> Callable[[], float]:
        dataset = ESPnetDataset([(str(folder / suffix / "wav.scp"), "speech", "sound")])
        names = [line.split()[0] for line in (folder / suffix / "wav.scp").read_text().splitlines()]

        def read() -> float:
            for name in names:
                dataset[name]
            return hours

        return read

    return {f"ESPnet, {suffix}": reader_of(suffix) for suffix in ("flac", "wav")}


def rates(count: int, seconds: float, rounds: int) -> None:
    """Print the rates of reading."""
    hours = count * seconds / 3600
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_sound(folder, count, seconds)
        eager = list(lhotse.CutSet.from_file(folder / "cuts.jsonl"))
        recordings = lhotse.RecordingSet.from_recordings(map(lhotse.Recording.from_file, sorted((folder / "wav").glob("*.wav"))))
        eager_wav = list(lhotse.CutSet.from_manifests(recordings))
        files = sorted((folder / "flac").glob("*.flac"))

        def by_lhotse(cuts: Sequence[object]) -> float:
            for cut in cuts:
                cut.load_audio()  # type: ignore[attr-defined]
            return hours

        def by_soundfile() -> float:
            for file in files:
                soundfile.read(file, dtype="float32")
            return hours

        kaldi = {"class": "KaldiFolder", "units": None}
        cut_set = {"class": "LhotseDataset", "units": None, "features": "wav"}
        contestants = {
            "KaldiFolder, flac": reader({**kaldi, "folder": str(folder / "flac")}, hours),
            "KaldiFolder, wav": reader({**kaldi, "folder": str(folder / "wav")}, hours),
            "KaldiFolder, archive": reader({**kaldi, "folder": str(folder / "ark")}, hours),
            "KaldiFolder, flac, fbank": reader({**kaldi, "folder": str(folder / "flac"), "features": "fbank"}, hours),
            "LhotseDataset, flac": reader({**cut_set, "cuts": str(folder / "cuts.jsonl")}, hours),
            "LhotseDataset, Shar of flac": reader({**cut_set, "cuts": str(folder / "shar")}, hours),
            "Lhotse, flac": lambda: by_lhotse(eager),
            "Lhotse, wav": lambda: by_lhotse(eager_wav),
            **espnet_readers(folder, hours),
            "Lhotse, Shar of flac": lambda: by_lhotse(lhotse.CutSet.from_shar(in_dir=folder / "shar")),
            "soundfile, flac": by_soundfile,
        }
        table(take_turns(contestants, rounds), "hours per CPU second", 1.0, "KaldiFolder, flac")


def start(count: int) -> None:
    """Print the seconds until a manifest of many cuts is planned, for the first time and later."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "cuts.jsonl").open("w") as file:
            for number in range(count):
                samples = RATE + 160 * (number * 7919 % 1000)
                source = {"type": "file", "channels": [0], "source": f"audio/{number}.flac"}
                recording = {"id": f"r{number}", "sources": [source], "sampling_rate": RATE}
                recording |= {"num_samples": samples, "duration": samples / RATE}
                cut = {"id": f"cut-{number}", "start": 0, "duration": samples / RATE, "channel": 0, "type": "MonoCut"}
                words = {"id": f"s{number}", "recording_id": f"r{number}", "start": 0, "duration": 1.0, "text": "a few words"}
                file.write(json.dumps({**cut, "supervisions": [words], "recording": recording}) + "\n")
        for what in ("first", "later"):
            began = time.perf_counter()
            dataset = opened({"class": "LhotseDataset", "cuts": str(folder / "cuts.jsonl")}, folder / "lengths")
            read = time.perf_counter() - began
            keys = OrderKeys(seq_ordering="random"), BatchKeys(batch_size=100 * RATE)
            plan = PlanInputs(dataset.lengths, *keys, 1, None, dataset.file_bounds(), None, None).plan()
            total = time.perf_counter() - began
            middle = plan.rank_batches(1, 3, plan.num_batches // 2)[0]  # of rank 1 of 3, in the middle of an epoch
            tags = dataset.tags(middle.tolist())
            print(f"| {count:,} cuts, {what} start | {read:.1f} s to open | {total:.1f} s with the plan | {len(tags)} cuts |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each recording")
    parser.add_argument("--rounds", type=int, default=5, help="0: only the second part")
    parser.add_argument("--cuts", type=int, default=100_000, help="of the manifest; 0: only the first part")
    options = parser.parse_args()
    print(machine())
    if options.rounds:
        rates(options.recordings, options.seconds, options.rounds)
    if options.cuts:
        start(options.cuts)


if __name__ == "__main__":
    main()
