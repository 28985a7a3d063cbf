"""Speech as it lies on a disk: Kaldi and ESPnet folders, Lhotse manifests, and features and noise computed while training."""
