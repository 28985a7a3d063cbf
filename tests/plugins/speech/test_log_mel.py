"""Log mel features."""

import numpy
import pytest
from speech_files import sound

from hvdtrain.errors import ConfigError
from hvdtrain.plugins.speech.log_mel import AT_ONCE, LogMel


@pytest.mark.parametrize(("rate", "num_mels", "high"), [(16000, 80, 0.0), (8000, 23, -400.0), (16000, 40, 7600.0)])
def test_features_are_those_of_kaldi(rate: int, num_mels: int, high: float) -> None:
    """Lhotse's layers are a port of Kaldi's code, which is compared with Kaldi's program there."""
    layers = pytest.importorskip("lhotse.features.kaldi.layers")
    torch = pytest.importorskip("torch")
    kaldi = layers.Wav2LogFilterBank(
        sampling_rate=rate, num_filters=num_mels, low_freq=20.0, high_freq=high, snip_edges=True, dither=0.0, energy_floor=1e-10
    )
    for samples in (rate, 2 * rate + 37):
        values = sound(samples, samples)
        expected = kaldi(torch.from_numpy(values * 32768)[None])[0].numpy()
        mel = LogMel(sample_rate=rate, num_mels=num_mels, high=high)
        found = mel.features(values)
        numpy.testing.assert_allclose(found, expected, atol=2e-3)
        assert len(found) == mel.num_frames(numpy.array(samples))


def test_lengths_and_parts() -> None:
    mel = LogMel(sample_rate=8000, num_mels=20)
    for samples in (0, 1, 199, 200, 279, 280, 80 * AT_ONCE + 205):
        assert len(mel.features(sound(1, samples))) == mel.num_frames(numpy.array(samples))
    whole = mel.features(sound(1, 80 * AT_ONCE + 400))
    numpy.testing.assert_allclose(
        whole[AT_ONCE - 5 :], mel.features(sound(1, 80 * AT_ONCE + 400)[80 * (AT_ONCE - 5) :]), atol=1e-3
    )
    stereo = numpy.stack([sound(1, 800), sound(2, 800)], axis=1)
    numpy.testing.assert_allclose(mel.features(stereo), mel.features(stereo.mean(axis=1)), atol=1e-5)
    made = mel({"data": sound(1, 800), "classes": numpy.array([1])})
    assert {name: len(values) for name, values in made.items()} == {
        name: int(column[0]) for name, column in mel.lengths({"data": numpy.array([800]), "classes": numpy.array([1])}).items()
    }
    with pytest.raises(ConfigError, match="log_mel: expected"):
        LogMel(sample_rate=8000, high=5000)
