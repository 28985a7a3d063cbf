#!/usr/bin/env python3
"""Make the zip file of an OggZipDataset from a Bliss corpus, with the arguments of RETURNN's tools/bliss-to-ogg-zip.py.

Audio is read and written as Ogg Vorbis by the package soundfile, instead of the program ffmpeg. The zip file NAME.zip has
NAME.txt, a Python list with text, speaker, file, name and duration in seconds of every segment, and the audio under NAME/.
"""

import argparse
import glob
import gzip
import io
import os
import sys
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import IO, Any

import numpy
import soundfile

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent.parent))

from hvdtrain.errors import DataError  # noqa: E402  # found through the line above
from hvdtrain.plugins.hdf_tools.counted import counted


@dataclass(frozen=True)
class Segment:
    """A segment of a corpus; times in seconds, as the corpus spells them."""

    name: str
    audio: str
    start: Decimal
    end: Decimal
    text: str
    speaker: str | None


def main(arguments: list[str] | None = None) -> int:
    """Write the file; return the exit status. A file that was begun is removed."""
    options = parser().parse_args(arguments)
    out = Path(options.output)
    unfinished = out.with_name(f"{out.name}.unfinished")
    try:
        if out.suffix != ".zip":
            raise DataError(f"--output: expected a name that ends in .zip, got {out}")
        segments = selected(list(read_corpus(options.bliss_filename)), options.subset_segment_file)
        trim = Trimming(options) if options.sprint_cache else None
        with zipfile.ZipFile(unfinished, "w", compression=zipfile.ZIP_DEFLATED) as archive:
            write(archive, out.stem, segments, options, trim)
        os.replace(unfinished, out)
    except (DataError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        unfinished.unlink(missing_ok=True)
    seconds = sum(segment.end - segment.start for segment in segments)
    print(f"{out}: {len(segments)} segments, {seconds / 3600:.2f} hours")
    return 0


def parser() -> argparse.ArgumentParser:
    """The parser of the options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("bliss_filename", help="the corpus: XML, or gzipped XML")
    add("--output", required=True, help="the zip file to write")
    add("--subset_segment_file", help="names of segments, one in a line: only these")
    add("--no_ogg", action="store_true", help="write no audio, only the list")
    add("--no_conversion", action="store_true", help="copy .ogg files that have one segment each")
    add("--sprint_cache", help="a feature cache of Sprint: the audio without the parts that have no features")
    add("--raw_sample_rate", type=int, default=8000, help="with --sprint_cache: samples of the audio in a second (default: 8000)")
    add("--feat_sample_rate", type=int, default=100, help="with --sprint_cache: features in a second (default: 100)")
    add("--ffmpeg_acodec", help="accepted: soundfile finds out how a file is coded")
    add("--ffmpeg_loglevel", help="accepted; without effect")
    return made


def read_corpus(name: str) -> Iterator[Segment]:
    """The segments of a corpus, in its order. Raises: DataError."""
    try:
        with gzip.open(name) if name.endswith(".gz") else open(name, "rb") as file:
            yield from _segments(name, file)
    except (ElementTree.ParseError, EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"{name}: expected a Bliss corpus in XML, got: {error}") from None


def _segments(name: str, file: IO[bytes]) -> Iterator[Segment]:
    places: list[str] = []  # the names of the elements around, which make a segment's name; numbers where there are none
    numbers = [0]
    audio, root = "", None
    for event, element in ElementTree.iterparse(file, events=("start", "end")):
        if event == "start":
            root = element if root is None else root
            numbers[-1] += 1
            places.append(element.get("name", str(numbers[-1])))
            numbers.append(0)
            audio = element.get("audio", "") if element.tag == "recording" else audio
            continue
        if element.tag == "segment":
            segment = "/".join(places)
            times = element.get("start"), element.get("end")
            if None in times:
                raise DataError(f"{name}: {segment}: expected a segment with start and end, got {times}")
            start, end = (Decimal(time) for time in times if time is not None)
            if not start < end:
                raise DataError(f"{name}: {segment}: expected a start before the end, got {start} and {end}")
            speaker = element.find("speaker")
            text = " ".join((element.findtext("orth") or "").split())
            yield Segment(segment, audio, start, end, text, None if speaker is None else speaker.get("name"))
            if root is not None:
                root.clear()  # a corpus may have millions of segments
        places.pop()
        numbers.pop()


def selected(segments: list[Segment], file: str | None) -> list[Segment]:
    """The segments that a file lists, or all. Raises: DataError, OSError."""
    if file is not None:
        names = set(Path(file).read_text(encoding="utf-8").split())
        segments = [segment for segment in segments if segment.name in names]
        missing = sorted(names - {segment.name for segment in segments})
        if missing:
            raise DataError(f"{file}: expected segments of the corpus, got {', '.join(missing[:5])}")
    if not segments:
        raise DataError("expected segments in the corpus, got none")
    return segments


class Trimming:
    """Leaves out audio for which a feature cache has no features: each feature stands for the samples around its time."""

    def __init__(self, options: argparse.Namespace) -> None:
        from returnn.sprint import cache

        self._rate = options.raw_sample_rate
        self._shift = options.raw_sample_rate // options.feat_sample_rate
        if self._shift * options.feat_sample_rate != self._rate or self._shift % 2:
            raise DataError(
                "--feat_sample_rate: expected a rate at which a feature stands for an even number of samples, got "
                f"{options.feat_sample_rate} of {self._rate}"
            )
        if "*" in options.sprint_cache:
            self._cache = cache.FileArchiveBundle()
            for name in sorted(glob.glob(options.sprint_cache)):
                self._cache.add_bundle_or_archive(name)
        else:
            self._cache = cache.open_file_archive(options.sprint_cache, must_exists=True)

    def apply(self, samples: numpy.ndarray, rate: int, segment: Segment) -> numpy.ndarray:
        """The samples of shape (frames, channels) that have features. Raises: DataError."""
        if rate != self._rate:
            raise DataError(f"{segment.audio}: expected {self._rate} samples in a second (--raw_sample_rate), got {rate}")
        times, features = self._cache.read(segment.name, "feat")
        parts, end = [], None
        for begin, stop in times:
            start = int(((begin + stop) / 2 - float(segment.start)) * rate) - self._shift // 2
            if end is not None and abs(start - end) <= self._shift // 2:
                start = end  # times are rounded
            if start < (end or 0) or start + self._shift > len(samples) + self._shift // 2:
                raise DataError(
                    f"{segment.name}: expected features within the audio, got one from sample {start} of {len(samples)}"
                )
            part = samples[start : start + self._shift]
            parts.append(numpy.pad(part, ((0, self._shift - len(part)), (0, 0))))
            end = start + self._shift
        if len(parts) != len(features):
            raise DataError(f"{segment.name}: expected a time for each of {len(features)} features, got {len(parts)}")
        return numpy.concatenate(parts)


def write(
    archive: zipfile.ZipFile, name: str, segments: list[Segment], options: argparse.Namespace, trim: Trimming | None
) -> None:
    """Write the audio and the list. Raises: DataError, OSError."""
    folder = os.path.commonpath([os.path.dirname(segment.audio) for segment in segments])
    lines = []
    with counted(segments, len(segments), "segment") as drawn:
        for segment in drawn:
            recording = os.path.splitext(os.path.relpath(segment.audio, folder) if folder else segment.audio)[0]
            file = f"{recording}/{segment.start}_{segment.end}.ogg"
            if not options.no_ogg:
                archive.writestr(f"{name}/{file}", encoded(segment, options.no_conversion, trim))
            entry: dict[str, Any] = {
                "text": segment.text,
                "speaker_name": segment.speaker,
                "file": file,
                "seq_name": segment.name,
            }
            lines.append(f"{repr(entry)[:-1]}, 'duration': {segment.end - segment.start}}},\n")
    archive.writestr(f"{name}.txt", "".join(["[\n", *lines, "]\n"]))


def encoded(segment: Segment, as_it_is: bool, trim: Trimming | None) -> bytes:
    """A segment's audio as an Ogg file. Raises: DataError, OSError."""
    if as_it_is:
        if not segment.audio.endswith(".ogg") or segment.start:
            raise DataError(
                f"{segment.name}: expected a whole .ogg file for --no_conversion, got {segment.audio} from {segment.start} s"
            )
        return Path(segment.audio).read_bytes()
    try:
        with soundfile.SoundFile(segment.audio) as file:
            rate = file.samplerate
            first, count = round(segment.start * rate), round((segment.end - segment.start) * rate)
            file.seek(min(first, file.frames))
            samples = file.read(count, dtype="float32", always_2d=True)
    except soundfile.SoundFileError as error:
        raise DataError(f"{segment.audio}: expected audio that soundfile can read, got: {error}") from None
    if not len(samples):
        raise DataError(f"{segment.name}: expected audio in {segment.audio} from {segment.start} s, got its end before")
    samples = samples if trim is None else trim.apply(samples, rate, segment)
    written = io.BytesIO()
    soundfile.write(written, samples, rate, format="OGG", subtype="VORBIS")
    return written.getvalue()


if __name__ == "__main__":
    sys.exit(main())
