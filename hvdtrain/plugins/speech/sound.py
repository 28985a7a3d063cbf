"""Reading sound: whole files, parts of them, archives of Kaldi, and what commands print."""

from __future__ import annotations

import io
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from hvdtrain.config.missing import import_package
from hvdtrain.data.types import Array
from hvdtrain.errors import BrokenSequence, DataError
from hvdtrain.plugins.speech.wav import damage, damage_of_file, is_length_guessed


@dataclass(frozen=True)
class SoundInfo:
    """Attributes:
    samples: the number in each channel.
    rate: samples per second.
    """

    samples: int
    rate: int
    channels: int


class SoundReader:
    """Reads what the lines of a wav.scp name. A message names `where` the name came from.

    Args:
        root: the folder that relative paths start from.
        allow_commands: whether lines that end with | are run.
    """

    def __init__(self, root: Path, allow_commands: bool) -> None:
        self._root = root
        self._allow_commands = allow_commands
        self._soundfile = import_package("soundfile", "KaldiFolder")
        self._latest: tuple[str, Array, int] | None = None  # the segments of a recording often follow each other

    def info(self, name: str, where: str) -> SoundInfo:
        """What the header says. Raises: BrokenSequence."""
        if self._has_header(name, where):
            path = self._path(name)
            try:
                info = self._soundfile.info(path)
                problem = damage_of_file(path)
            except (OSError, RuntimeError) as error:
                raise BrokenSequence(f"{where}: expected a sound file, got {_reason(path, error)}") from None
            if problem:
                raise BrokenSequence(f"{where}: expected a whole sound file, got {path}: {problem}")
            return SoundInfo(info.frames, info.samplerate, info.channels)
        samples, rate = self._whole(name, where)
        return SoundInfo(len(samples), rate, samples.shape[1])

    def read(self, name: str, where: str, start: int = 0, stop: int | None = None) -> tuple[Array, int]:
        """Samples from `start` up to `stop` (exclusive; None: to the end), float32 of shape (samples, channels), and their rate.

        Raises:
            BrokenSequence: the sound cannot be read.
        """
        if not self._has_header(name, where):
            samples, rate = self._whole(name, where)
            return samples[start:stop], rate
        path = self._path(name)
        try:
            with self._soundfile.SoundFile(path) as file:
                if file.seekable():
                    file.seek(min(start, file.frames))
                    most = -1 if stop is None else max(0, stop - start)
                    return file.read(most, dtype="float32", always_2d=True), file.samplerate
        except (OSError, RuntimeError, ValueError) as error:
            raise BrokenSequence(f"{where}: expected sound, got {_reason(path, error)}") from None
        samples, rate = self._whole(name, where)  # of GSM, for example, the parts before are needed to decode it
        return samples[start:stop], rate

    def _has_header(self, name: str, where: str) -> bool:
        """Whether a line names a file with its length in the header; not a command, an archive, or an mp3 file without.
        Raises: DataError, if it names a command, and those are not allowed."""
        if name.endswith("|"):
            check_command(name, where, self._allow_commands)
            return False
        return not is_archive(name) and not (name.lower().endswith(".mp3") and _is_length_guessed(self._path(name)))

    def _whole(self, name: str, where: str) -> tuple[Array, int]:
        latest = self._latest
        if latest is None or latest[0] != name:
            latest = self._latest = name, *self._load(name, where)
        return latest[1:]

    def _path(self, name: str) -> Path:
        return self._root / name

    def _load(self, name: str, where: str) -> tuple[Array, int]:
        """All sound of a command, of a place in an archive, or of a file. Raises: BrokenSequence."""
        if name.endswith("|"):
            done = subprocess.run(name[:-1], shell=True, cwd=self._root, stdin=subprocess.DEVNULL, capture_output=True)
            if done.returncode:
                said = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
                raise BrokenSequence(
                    f"{where}: expected sound, got exit status {done.returncode} of the command {''.join(said)[:200]}"
                )
            try:
                return self._decoded(io.BytesIO(done.stdout))
            except (OSError, RuntimeError) as error:
                raise BrokenSequence(f"{where}: expected sound from the command, got: {error}") from None
        if not is_archive(name):
            try:
                return self._decoded(self._path(name))
            except (OSError, RuntimeError) as error:
                raise BrokenSequence(f"{where}: expected sound, got {_reason(self._path(name), error)}") from None
        if (encoded := self._archived_wav(name, where)) is not None:
            return self._decoded(io.BytesIO(encoded))
        loaded = load_archived(self._root, name, where)
        if not isinstance(loaded, tuple) or len(loaded) != 2:
            raise BrokenSequence(f"{where}: expected sound, got an array that is not sound")
        first, second = loaded
        rate, values = (int(first), second) if isinstance(first, (int, numpy.integer)) else (int(second), first)
        if values.dtype == numpy.uint8:  # the only unsigned PCM
            values = (values.astype(numpy.float32) - 128) / 128
        elif values.dtype.kind == "i":
            values = values.astype(numpy.float32) / numpy.float32(-float(numpy.iinfo(values.dtype).min))
        return values.astype(numpy.float32, copy=False).reshape(len(values), -1), rate

    def _decoded(self, file: Path | io.BytesIO) -> tuple[Array, int]:
        samples, rate = self._soundfile.read(file, dtype="float32", always_2d=True)
        return samples, rate

    def _archived_wav(self, name: str, where: str) -> bytes | None:
        """A .wav file in an archive, of which kaldiio neither scales 8 bits nor decodes mu-law; None: it is something else, which
        `load_archived` reads or refuses. Raises: BrokenSequence, if it is not whole."""
        path, offset = _place(str((self._root / name).absolute()))
        if "[" in name.rpartition(":")[2] or not path.is_file():
            return None
        with path.open("rb") as stream:
            stream.seek(offset)
            head = stream.read(8)
            if head[:4] != b"RIFF":
                return None
            encoded = head + stream.read(min(int.from_bytes(head[4:], "little"), path.stat().st_size))
        says = int.from_bytes(head[4:], "little") + 8
        problem = f"{len(encoded)} of its {says} bytes" if len(encoded) < says else damage(io.BytesIO(encoded), len(encoded))
        if problem:
            raise BrokenSequence(f"{where}: expected a whole sound file, got {problem}")
        return encoded


def _is_length_guessed(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            return is_length_guessed(stream)
    except (OSError, ValueError):  # opening it as sound gives the message
        return False


def is_archive(name: str) -> bool:
    """Whether a line of a table names a place in an archive of Kaldi, such as `wav.ark:1234` or `feats.ark:12[0:9]`.

    >>> is_archive("data/a.ark:17"), is_archive("data/a.wav"), is_archive("a.ark:17[3:5]")
    (True, False, True)
    """
    name = name.partition("[")[0]
    return name.rpartition(":")[2].isdigit() and ":" in name


def load_archived(root: Path, name: str, where: str, allow_commands: bool = False) -> Any:
    """An array in an archive of Kaldi, or a tuple of a rate and an array.

    Raises:
        BrokenSequence: it cannot be read.
        DataError: the package kaldiio is not installed, or the name is a command and those are not allowed.
    """
    if name.endswith("|"):
        check_command(name, where, allow_commands)
    kaldiio = import_package("kaldiio", where)
    # Absolute, so that kaldiio can take nothing for a command or for standard input.
    path = name if name.endswith("|") else str((root / name).absolute())
    file, offset = _place(path)
    try:
        if not name.endswith("|"):
            with file.open("rb") as stream:
                stream.seek(offset)
                if stream.read(3) == b"PKL":
                    raise DataError(
                        f"{where}: expected an array of Kaldi, got a pickle, which could run any code (not supported)"
                    )
        return kaldiio.load_mat(path)
    except DataError:
        raise
    except Exception as error:  # of a damaged archive, struct's, numpy's and its own
        raise BrokenSequence(f"{where}: expected an array of Kaldi, got {_reason(file, error)}") from None


def _place(path: str) -> tuple[Path, int]:
    """The file and the byte of a place in an archive.

    >>> _place("/a:b/c.ark:12[3:4]")
    (PosixPath('/a:b/c.ark'), 12)
    """
    if not is_archive(path):
        return Path(path), 0
    file, _, offset = path.partition("[")[0].rpartition(":")
    return Path(file), int(offset)


def check_command(name: str, where: str, allow_commands: bool) -> None:
    """Raises: DataError, if commands are not allowed."""
    if not allow_commands:
        raise DataError(
            f"{where}: expected a file, got the command {name[:80]!r} (allow_commands = True runs such commands: set it if you "
            "trust the folder)"
        )


def _reason(path: Path, error: Exception) -> str:
    if not path.exists():
        return f"no file {path}"
    return f"{path}: {type(error).__name__}: {error}"
