"""RETURNN's native operations, which it compiles when a network first needs them: for which device, and a line in the log."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import tensorflow as tf
from returnn.tf.native_op import OpMaker
from returnn.tf.util.basic import CudaEnv
from returnn.util.native_code_compiler import NativeCodeCompiler

from hvdtrain.runtime import log


def choose_device() -> None:
    """Let RETURNN compile for GPUs only where this rank has one, and CUDA's headers are there.

    RETURNN compiles for CUDA wherever it finds a folder of CUDA, and fails if that has no headers.
    """
    if OpMaker.with_cuda is not None:  # the config has chosen
        return
    folder = _headerless_cuda() if tf.config.get_visible_devices("GPU") else None
    if folder is not None:
        log.warning(
            f"native operations of RETURNN: expected cuda_runtime.h in {folder}/include to compile them for the GPU, got none; "
            "they run on the CPU (install CUDA's headers, such as the package cuda-cudart-dev)"
        )
    OpMaker.with_cuda = bool(tf.config.get_visible_devices("GPU")) and folder is None and tf.test.is_built_with_cuda()


def _headerless_cuda() -> Path | None:
    """The folder of CUDA that RETURNN would use, if it has no headers; None: it has, or there is none."""
    environment = CudaEnv.get_instance()
    if not environment.is_available() or environment.cuda_path is None:
        return None
    folder = Path(environment.cuda_path)
    return None if any(folder.glob("**/include/cuda_runtime.h")) else folder


def announce_compiling() -> None:
    """Log a line before RETURNN compiles, which takes minutes. Ranks of a host share the result: RETURNN locks its folder."""
    original: Any = NativeCodeCompiler._maybe_compile_inner
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def compile_and_tell(compiler: Any) -> Any:
        log.info(f"Compiling the native operation {compiler.base_name} of RETURNN, once on this host: this takes minutes.")
        return original(compiler)

    NativeCodeCompiler._maybe_compile_inner = compile_and_tell
