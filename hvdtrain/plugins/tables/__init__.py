"""Datasets of other libraries: tar archives, parquet and Arrow files, Hugging Face's, folders of sounds and texts.

Each reads rows of `shards.py`; `conversions.py` makes arrays of what they hold.
"""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    datasets={name: f"{__name__}.keys:{name}Keys" for name in ("TarDataset", "ParquetDataset", "ArrowDataset")},
    sources={
        "FolderDataset": f"{__name__}.folder:FolderDataset",
        "HuggingFaceDataset": f"{__name__}.hugging_face:HuggingFaceDataset",
    },
    needs={"speech": "sounds and files of labels", "lengths": "what is known of the rows of archives"},
)
