"""Folders of Kaldi and ESPnet, read as they are."""

import io
import re
from pathlib import Path
from typing import Any

import kaldiio
import numpy
import opened_data
import pytest
import soundfile
from speech_files import RATE, WORDS, sound, write_folder, write_table

from hvdtrain.data.broken import BrokenSequences
from hvdtrain.data.dataset import Dataset, Scanning
from hvdtrain.data.sources import check_dataset
from hvdtrain.errors import BrokenSequence, DataError
from hvdtrain.plugins.speech import sound as reading
from hvdtrain.plugins.speech.log_mel import LogMel


def opened(
    options: dict[str, Any],
    limit: int = 0,
    folder: Path | None = None,
    processes: int = 1,
    broken: BrokenSequences | None = None,
) -> Dataset:
    broken = broken or BrokenSequences("train", limit)
    scanning = Scanning(folder, broken=broken, processes=processes, processes_alone=processes)
    return opened_data.opened({"class": "KaldiFolder", **options}, scanning=scanning)


def problems_of(**options: Any) -> list[str]:
    _, problems = check_dataset("train", {"class": "KaldiFolder", **options}, {})
    return [problem.key for problem in problems]


def everything(dataset: Dataset) -> dict[str, dict[str, numpy.ndarray]]:
    indices = range(dataset.num_sequences)
    arrays = dict(zip(dataset.tags(indices), map(dataset.sequence, indices), strict=True))
    for index, sequence in enumerate(arrays.values()):
        assert {key: len(values) for key, values in sequence.items()} == {key: c[index] for key, c in dataset.lengths.items()}
    return arrays


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "train")
    return tmp_path / "train"


def test_sound_and_characters(folder: Path) -> None:
    dataset = opened({"folder": str(folder), "vocabulary_from": str(folder / "text")})
    letters = sorted({letter for word in WORDS for letter in word})
    assert dataset.streams["classes"].labels == tuple(letters)
    for number, (name, arrays) in enumerate(everything(dataset).items()):
        assert name == f"utt{number:02}"
        numpy.testing.assert_array_equal(arrays["data"][:, 0], sound(number, len(arrays["data"])))
        assert "".join(letters[letter] for letter in arrays["classes"]) == WORDS[number]
    assert dataset.streams["data"].shape == (1,)


@pytest.mark.parametrize("has_lengths", ["nothing", "utt2num_samples", "utt2dur", "shapes"])
def test_lengths_come_from_the_folder(folder: Path, has_lengths: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"folder": str(folder), "units": "text", "sample_rate": RATE}
    lengths = {f"utt{number:02}": 800 + 80 * (number * 7 % 5) for number in range(6)}
    if has_lengths == "utt2num_samples":
        write_table(folder / has_lengths, lengths)
    if has_lengths == "utt2dur":
        write_table(folder / has_lengths, {name: f"{samples / RATE:.6g}" for name, samples in lengths.items()})
    if has_lengths == "shapes":
        write_table(folder / "speech_shape", {name: f"{samples},1" for name, samples in lengths.items()})
        options["shapes"] = {"data": str(folder / "speech_shape")}
    infos: list[str] = []
    original = reading.SoundReader.info
    monkeypatch.setattr(reading.SoundReader, "info", lambda *args: (infos.append(args[1]), original(*args))[1])
    dataset = opened(options)
    assert dataset.lengths["data"].tolist() == list(lengths.values())
    assert len(infos) == (7 if has_lengths == "nothing" else 1)  # the first one tells the rate and the channels
    assert [str(arrays["classes"][0]) for arrays in everything(dataset).values()] == WORDS


def test_rounded_seconds_are_cut_or_filled(folder: Path) -> None:
    samples = sound(0, 801)
    soundfile.write(folder / "audio" / "utt00.wav", samples, RATE, subtype="PCM_16")
    write_table(folder / "utt2dur", {f"utt{number:02}": f"{(800 + 80 * (number * 7 % 5)) / RATE:.3f}" for number in range(6)})
    dataset = opened({"folder": str(folder), "units": None})
    numpy.testing.assert_array_equal(dataset.sequence(0)["data"][:, 0], samples[:800])
    soundfile.write(folder / "audio" / "utt00.wav", sound(0, 600), RATE, subtype="PCM_16")
    with pytest.raises(BrokenSequence, match=r"wav.scp, line 1, 'utt00': expected 800 samples.*got 600"):
        dataset.sequence(0)


def test_segments(folder: Path) -> None:
    whole = sound(0, 800)
    write_table(
        folder / "segments",
        {"b": "utt00 0.01 0.05", "a": "utt00 0.02 -1", "c": "utt01 0.1 0.3", "d": "utt00 0.0500625 0.06"},
    )
    write_table(folder / "text", {"a": "two", "b": "one", "c": "ten", "d": ""})
    dataset = opened({"folder": str(folder), "units": "words", "vocabulary": ["one", "two", "ten"]})
    arrays = everything(dataset)
    assert list(arrays) == ["b", "a", "c", "d"]
    numpy.testing.assert_array_equal(arrays["b"]["data"][:, 0], whole[80:400])
    numpy.testing.assert_array_equal(arrays["a"]["data"][:, 0], whole[160:])
    numpy.testing.assert_array_equal(arrays["d"]["data"][:, 0], whole[400:480])  # rounded to a sample
    assert len(arrays["c"]["data"]) == 960 - 800  # it ends with the recording
    assert [list(sequence["classes"]) for sequence in arrays.values()] == [[0], [1], [2], []]
    write_table(folder / "segments", {"b": "utt00 0.01 9.0", "a": "utt00 0.02 -1"})
    write_table(folder / "text", {"a": "two", "b": "one"})
    with pytest.raises(
        BrokenSequence, match=r"segments, line 1, 'b': expected a segment of the recording, which has 0.1 seconds"
    ):
        opened({"folder": str(folder), "units": "text"})
    write_table(folder / "segments", {"b": "utt77 0.01 9.0"})
    with pytest.raises(DataError, match=r"segments, line 1, 'b': expected a recording of .*wav.scp, got 'utt77'"):
        opened({"folder": str(folder), "units": None})


def test_archives_of_sound_and_features(folder: Path) -> None:
    features = {
        f"utt{number:02}": numpy.random.RandomState(number).rand(5 + number, 4).astype(numpy.float32) for number in range(6)
    }
    kaldiio.save_ark(str(folder / "feats.ark"), features, scp=str(folder / "feats.scp"))
    kaldiio.save_ark(
        str(folder / "speech.ark"),
        {f"utt{n:02}": (RATE, (sound(n, 80) * 32768).astype("int16")) for n in range(6)},
        scp=str(folder / "wav.scp"),
    )  # noqa: E501
    kaldiio.save_ark(
        str(folder / "ali.ark"), {f"utt{n:02}": numpy.arange(5 + n, dtype="int32") for n in range(6)}, scp=str(folder / "ali.scp")
    )  # noqa: E501
    for number in range(6):
        numpy.save(folder / f"utt{number:02}.npy", numpy.full((2, 3), number, numpy.float32))
    write_table(folder / "xvector.scp", {f"utt{number:02}": folder / f"utt{number:02}.npy" for number in range(6)})
    write_table(folder / "token_int", {f"utt{number:02}": f"{number} 7" for number in range(6)})
    dataset = opened(
        {
            "folder": str(folder),
            "features": "feats",
            "units": None,
            "data_keys": {
                "speech": ("wav.scp", "sound"),
                "alignment": ("ali.scp", "kaldi_ark"),
                "speaker": ("utt2spk", "words"),
                "xvector": ("xvector.scp", "npy"),
                "text": ("token_int", "text_int"),
            },
            "vocabulary_from": {"speaker": str(folder / "utt2spk")},
        }
    )
    for number, (name, arrays) in enumerate(everything(dataset).items()):
        numpy.testing.assert_array_equal(arrays["data"], features[name])
        numpy.testing.assert_array_equal(arrays["speech"][:, 0], sound(number, 80))
        numpy.testing.assert_array_equal(arrays["alignment"], numpy.arange(5 + number))
        assert arrays["speaker"].tolist() == [number % 2]
        assert (arrays["xvector"] == number).all()
        assert arrays["text"].tolist() == [number, 7]
    assert dataset.streams["alignment"].sparse
    assert dataset.streams["text"].dim == 8
    write_table(folder / "utt2num_frames", {name: len(values) for name, values in features.items()})
    assert opened({"folder": str(folder), "features": "feats", "units": None}).lengths["data"].tolist() == [5, 6, 7, 8, 9, 10]


def test_classes_that_are_too_large(folder: Path) -> None:
    for number in range(6):
        numpy.save(folder / f"utt{number:02}.npy", numpy.array([1, 2**31 if number == 2 else 2]))
    write_table(folder / "ids.scp", {f"utt{number:02}": folder / f"utt{number:02}.npy" for number in range(6)})
    with pytest.raises(DataError, match="line 3, 'utt02': expected integers that int32 holds, got int64 from 1 to 2147483648"):
        opened({"folder": str(folder), "units": None, "data_keys": {"ids": ("ids.scp", "npy")}})


def test_a_pickle_in_an_archive_is_refused(folder: Path) -> None:
    (folder / "bad.ark").write_bytes(b"utt00 PKL\x80\x04N.")
    write_table(folder / "feats.scp", {"utt00": f"{folder}/bad.ark:6"})
    with pytest.raises(DataError, match="a pickle"):
        opened({"folder": str(folder), "features": "feats", "units": None})


def test_fbank(folder: Path) -> None:
    dataset = opened({"folder": str(folder), "features": "fbank", "log_mel": {"num_mels": 20}, "units": None})
    mel = LogMel(sample_rate=RATE, num_mels=20)
    for number, arrays in enumerate(everything(dataset).values()):
        numpy.testing.assert_array_equal(arrays["data"], mel.features(sound(number, 800 + 80 * (number * 7 % 5))))
    assert dataset.streams["data"].shape == (20,)


def test_a_command_runs_once_for_all_segments_of_its_recording(folder: Path) -> None:
    write_table(folder / "wav.scp", {"call": f"echo >>{folder}/runs; cat {folder}/audio/utt00.wav |"})
    write_table(folder / "segments", {f"utt{number:02}": f"call 0.0{number} 0.0{number + 1}" for number in range(6)})
    dataset = opened({"folder": str(folder), "units": "text", "allow_commands": True})
    for number in range(6):
        numpy.testing.assert_array_equal(dataset.sequence(number)["data"][:, 0], sound(0, 800)[80 * number : 80 * number + 80])
    assert (folder / "runs").read_text() == "\n"


def test_segments_of_sound_that_cannot_seek(folder: Path) -> None:
    soundfile.write(folder / "gsm.wav", sound(0, 4000), RATE, subtype="GSM610")
    write_table(folder / "wav.scp", {"call": folder / "gsm.wav"})
    write_table(
        folder / "segments",
        {f"utt{number:02}": f"call 0.{number} 0.{number + 1}" for number in range(5)} | {"utt05": "call 0 -1"},
    )
    whole = soundfile.read(folder / "gsm.wav", dtype="float32", always_2d=True)[0]
    for number, arrays in enumerate(everything(opened({"folder": str(folder), "units": "text"})).values()):
        numpy.testing.assert_array_equal(arrays["data"], whole[800 * number : 800 * number + 800] if number < 5 else whole)


def test_mp3_without_a_header_of_its_length(folder: Path) -> None:
    """Libsndfile guesses the length by the bit rate of the first frame, and seeks by it."""
    silence = numpy.zeros(40000, numpy.float32)
    samples = numpy.concatenate([silence, sound(0, 40000)])
    encoded = io.BytesIO()
    options = {"format": "MP3", "subtype": "MPEG_LAYER_III", "bitrate_mode": "VARIABLE", "compression_level": 0.3}
    soundfile.write(encoded, samples, RATE, **options)
    content = encoded.getvalue()
    second = content.index(content[:2], 4)  # behind the frame with the header
    assert b"Xing" in content[:second]
    (folder / "call.mp3").write_bytes(content[second:])
    whole, _ = soundfile.read(folder / "call.mp3", dtype="float32", always_2d=True)
    assert soundfile.info(folder / "call.mp3").frames != len(whole)
    write_table(folder / "wav.scp", {"utt00": folder / "call.mp3"})
    write_table(folder / "text", {"utt00": "one"})
    numpy.testing.assert_array_equal(opened({"folder": str(folder), "units": "text"}).sequence(0)["data"], whole)
    write_table(folder / "segments", {"utt00": "utt00 7 8"})
    segment = opened({"folder": str(folder), "units": "text"}).sequence(0)["data"]
    numpy.testing.assert_array_equal(segment, whole[7 * RATE : 8 * RATE])


def test_commands_only_if_allowed(folder: Path) -> None:
    write_table(folder / "wav.scp", {"utt00": f"cat {folder}/audio/utt00.wav |", "utt01": "exit 3 |"})
    write_table(folder / "text", {"utt00": "one", "utt01": "two"})
    options = {"folder": str(folder), "units": "text"}
    with pytest.raises(DataError, match=r"wav.scp, line 1, 'utt00': expected a file, got the command.*allow_commands"):
        opened(options)
    broken = BrokenSequences("train", 1)
    dataset = opened({**options, "allow_commands": True}, broken=broken)
    assert dataset.tags(range(dataset.num_sequences)) == ["utt00"]
    numpy.testing.assert_array_equal(dataset.sequence(0)["data"][:, 0], sound(0, 800))
    assert "utt01" in broken.warnings()[0]
    assert "exit status 3" in broken.warnings()[0]


def test_lengths_are_found_once_in_processes_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "train", count=70, shortest=100)
    options = {"folder": str(tmp_path / "train"), "units": "text"}
    first = opened(options, folder=tmp_path / "lengths", processes=2)

    def fail(*args: object) -> None:
        raise AssertionError("the lengths are kept")

    monkeypatch.setattr("hvdtrain.plugins.lengths.find._in_processes", fail)
    second = opened(options, folder=tmp_path / "lengths", processes=2)
    numpy.testing.assert_array_equal(first.lengths["data"], second.lengths["data"])
    write_table(
        tmp_path / "train" / "wav.scp", {f"utt{n:02}": tmp_path / f"train/audio/utt{n:02}.wav" for n in range(69, -1, -1)}
    )
    with pytest.raises(AssertionError, match="kept"):  # another order: other data
        opened(options, folder=tmp_path / "lengths", processes=2)


def spoil(folder: Path, fault: str) -> str:
    """Break an utterance; returns what the message has to name."""
    audio = folder / "audio" / "utt02.flac"
    if fault == "missing file":
        audio.unlink()
        return r"wav.scp, line 3, 'utt02': expected .*no file"
    if fault == "truncated":
        audio.write_bytes(audio.read_bytes()[:500])
        return r"wav.scp, line 3, 'utt02': expected"
    if fault == "not sound":
        audio.write_text("words")
        return r"wav.scp, line 3, 'utt02': expected"
    if fault == "empty":
        audio.write_bytes(b"")
        return r"wav.scp, line 3, 'utt02': expected"
    if fault == "another rate":
        soundfile.write(audio, sound(2, 800), 16000)
        return r"wav.scp, line 3, 'utt02': expected 8000 samples per second"
    if fault == "stereo":
        soundfile.write(audio, numpy.zeros((800, 2)), RATE)
        return r"wav.scp, line 3, 'utt02': expected 1 channels"
    if fault == "no audio":
        write_table(folder / "wav.scp", {f"utt{n:02}": folder / f"audio/utt{n:02}.flac" for n in range(6) if n != 2})
        return r"text, line 3, 'utt02': expected a line in .*wav.scp, got none"
    if fault == "no text":
        write_table(folder / "text", {f"utt{n:02}": "one" for n in range(6) if n != 2})
        return r"wav.scp, line 3, 'utt02': expected a line in .*text, got none"
    assert fault == "unknown letter"
    write_table(folder / "text", {f"utt{n:02}": "one" if n != 2 else "öne" for n in range(6)})
    return r"text, line 3, 'utt02': expected text of the entries in vocabulary, got 'ö'"


@pytest.mark.parametrize("known", [True, False], ids=["lengths known", "lengths found"])
@pytest.mark.parametrize(
    "fault",
    ["missing file", "truncated", "not sound", "empty", "another rate", "stereo", "no audio", "no text", "unknown letter"],
)
def test_bad_input_is_named_or_left_out(tmp_path: Path, fault: str, known: bool) -> None:
    folder = tmp_path / "train"
    sounds = write_folder(folder, suffix="flac")
    if known:
        write_table(folder / "utt2num_samples", {name: len(samples) for name, samples in sounds.items()})
    named = spoil(folder, fault)
    options = {"folder": str(folder), "vocabulary": list("abcdefghijklmnopqrstuvwxyz ")}
    with pytest.raises(BrokenSequence, match=named):
        everything(opened(options))
    broken = BrokenSequences("train", 1)
    dataset = opened(options, broken=broken)
    good, messages = [], broken.warnings()
    for index in range(dataset.num_sequences):
        try:
            dataset.sequence(index)
            good.append(dataset.tags([index])[0])
        except BrokenSequence as error:
            messages.append(str(error))
    assert good == [f"utt{n:02}" for n in range(6) if n != 2]
    assert len(messages) == 1
    assert re.search(named, messages[0])


def test_features_that_are_not_finite(folder: Path) -> None:
    features = {f"utt{number:02}": numpy.ones((5, 4), numpy.float32) for number in range(6)}
    features["utt03"][2, 1] = numpy.nan
    kaldiio.save_ark(str(folder / "feats.ark"), features, scp=str(folder / "feats.scp"))
    options = {"folder": str(folder), "features": "feats", "units": None}
    with pytest.raises(BrokenSequence, match=r"feats.scp, line 4, 'utt03': expected finite numbers, got nan in frame 2"):
        opened(options)
    assert opened(options, limit=1).num_sequences == 5
    write_table(folder / "utt2num_frames", dict.fromkeys(features, 5))
    with pytest.raises(BrokenSequence, match=r"feats.scp, line 4, 'utt03': expected finite numbers, got nan in frame 2"):
        opened(options).sequence(3)


@pytest.mark.parametrize(
    ("table", "content", "message"),
    [
        ("text", "utt00 one\n\nutt01 two\n", r"text, line 2: expected `id value`, got ''"),
        ("text", "utt00 one\nutt00 two\n", r"text, line 2: expected every id once, got 'utt00' as in line 1"),
        ("wav.scp", "utt00\n", r"wav.scp, line 1: expected `id value`, got 'utt00'"),
        (
            "segments",
            "".join(f"utt{n:02} utt00 4 3\n" for n in range(6)),
            r"segments, line 1, 'utt00': expected `recording begin end` in seconds",
        ),
        ("utt2num_samples", "".join(f"utt{n:02} x\n" for n in range(6)), r"utt2num_samples, line 1, 'utt00': expected a whole"),
    ],
)
def test_bad_tables_are_named(folder: Path, table: str, content: str, message: str) -> None:
    (folder / table).write_text(content)
    with pytest.raises(DataError, match=message):
        opened({"folder": str(folder), "units": "text"})


def test_problems_with_keys(folder: Path) -> None:
    assert problems_of(folder="x") == ["train.vocabulary"]
    assert problems_of(folder="x", vocabulary="v", vocabulary_from="t") == ["train.vocabulary"]
    assert problems_of(folder="x", units=None, features=None) == ["train.features"]
    assert problems_of(folder="x", units=None, data_keys={"data": ("wav.scp", "sound"), "b": ("x", "y")}) == [
        "train.data_keys.data",
        "train.data_keys.b",
    ]
    assert problems_of(folder="x", units=None, log_mel={"num_mels": 3}) == ["train.log_mel"]
    assert problems_of(folder="x", units=None, shapes={"other": "y"}) == ["train.shapes.other"]
    assert problems_of(folder="x", units="letters")[0] == "train.units"
    with pytest.raises(DataError, match=r"train.folder: expected a folder with Kaldi's tables, got nothing"):
        opened({"folder": "nowhere", "units": "text"})


def test_token_lists(folder: Path) -> None:
    (folder / "tokens.txt").write_text("<blank> 0\n<unk> 1\n<space> 2\n" + "".join(f"{c} {n}\n" for n, c in enumerate("abe", 3)))
    dataset = opened({"folder": str(folder), "vocabulary": str(folder / "tokens.txt")})
    assert dataset.sequence(4)["classes"].tolist() == [3, 2, 4]
    assert dataset.sequence(5)["classes"].tolist() == [4, 5, 5]
    assert dataset.sequence(0)["classes"].tolist() == [1, 1, 5]
    assert dataset.streams["classes"].labels[2] == "<space>"


def test_a_segment_of_one_channel(tmp_path: Path) -> None:
    both = numpy.stack([sound(1, RATE), sound(2, RATE)], axis=1)
    soundfile.write(tmp_path / "call.wav", both, RATE, subtype="PCM_16")
    write_table(tmp_path / "wav.scp", {"call": tmp_path / "call.wav"})
    write_table(tmp_path / "segments", {"a": "call 0 0.5 0", "b": "call 0.25 -1 1"})
    write_table(tmp_path / "text", {"a": "x", "b": "x"})
    options = {"folder": str(tmp_path), "vocabulary": ["x"]}
    made = everything(opened(options))
    numpy.testing.assert_array_equal(made["a"]["data"], both[: RATE // 2, :1])
    numpy.testing.assert_array_equal(made["b"]["data"], both[RATE // 4 :, 1:])
    for line, message in {
        "call 0 0.5 2": "expected a channel below 2, got 2",
        "call 0 0.5": "expected 1 channels, as other segments have, got 2",
        "call 0 0.5 0 1": "expected `recording begin end` in seconds, and perhaps a channel",
    }.items():
        write_table(tmp_path / "segments", {"a": line, "b": "call 0.25 -1 1"})
        with pytest.raises(DataError, match=message):
            everything(opened(options))


@pytest.mark.parametrize("subtype", ["PCM_U8", "ULAW", "PCM_16", "PCM_24", "FLOAT"])
def test_every_wav_in_an_archive_is_decoded(tmp_path: Path, subtype: str) -> None:
    soundfile.write(tmp_path / "a.wav", sound(3, 400), RATE, subtype=subtype)
    content = (tmp_path / "a.wav").read_bytes()
    (tmp_path / "all.ark").write_bytes(b"a " + content + b"b " + content[:-99])
    write_table(tmp_path / "wav.scp", {"a": f"{tmp_path}/all.ark:2", "b": f"{tmp_path}/all.ark:{len(content) + 4}"})
    write_table(tmp_path / "text", {"a": "x", "b": "x"})
    dataset = opened({"folder": str(tmp_path), "vocabulary": ["x"]}, limit=1)
    expected, _ = soundfile.read(tmp_path / "a.wav", dtype="float32", always_2d=True)
    assert dataset.num_sequences == 1, "what is cut off is broken"
    numpy.testing.assert_array_equal(dataset.sequence(0)["data"], expected)


def test_tables_written_on_windows(folder: Path) -> None:
    for name in ("wav.scp", "text"):
        text = (folder / name).read_text().replace("\n", " \r\n")
        (folder / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    (folder / "letters").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(sorted({*"".join(WORDS)})).encode() + b"\r\n")
    made = everything(opened({"folder": str(folder), "vocabulary": str(folder / "letters")}))
    (folder / "plain").write_text("\n".join(sorted({*"".join(WORDS)})))
    assert list(made) == [f"utt{number:02}" for number in range(6)]
    letters = sorted({*"".join(WORDS)})
    assert ["".join(letters[letter] for letter in one["classes"]) for one in made.values()] == WORDS


def test_a_vocabulary_that_does_not_fit(folder: Path) -> None:
    dataset = opened({"folder": str(folder), "vocabulary": ["<unk>", "T", "O"]})
    [line] = dataset.warnings()
    assert re.match(r"'classes': \d+ of the \d+ units of its first texts are not in vocabulary and become <unk>", line)
    assert opened({"folder": str(folder), "vocabulary": ["<unk>", *"aebtnowh"]}).warnings() == []


@pytest.mark.parametrize("cut", [1000, 20])
def test_a_wav_that_is_not_whole_is_broken(folder: Path, cut: int) -> None:
    path = folder / "audio" / "utt01.wav"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError, match=r"expected a (whole )?sound file, got .*utt01"):
        opened({"folder": str(folder), "vocabulary_from": str(folder / "text")})
    header = bytearray((folder / "audio" / "utt02.wav").read_bytes())
    header[4:8], header[40:44] = (36).to_bytes(4, "little"), bytes(4)  # as of a writer that was not closed
    path.write_bytes(header)
    with pytest.raises(DataError, match=r"was its writer closed"):
        opened({"folder": str(folder), "vocabulary_from": str(folder / "text")})
