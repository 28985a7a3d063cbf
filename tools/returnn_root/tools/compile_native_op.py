#!/usr/bin/env python3
"""Compile one of RETURNN's native operations, with the arguments of RETURNN's tools/compile_native_op.py.

The installed package `returnn` compiles it; --output_file gets the paths of the libraries, a line each.
"""

import argparse
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Compile it; return the exit status."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--native_op", required=True, help="the operation's class in returnn.native_op, such as NativeLstm2")
    made.add_argument("--output_file", type=Path, help="the file that lists the libraries")
    made.add_argument("--blas_lib", help="the BLAS library: a path, or a file name to search for")
    made.add_argument("--no_search_for_numpy_blas", action="store_true", help="do not look for BLAS in numpy's folder")
    made.add_argument("--search_for_numpy_blas", action="store_true", help="the default")
    options = made.parse_args(arguments)

    from returnn import native_op
    from returnn.tf.native_op import make_op
    from returnn.tf.util.basic import OpCodeCompiler

    described = getattr(native_op, options.native_op, None)
    if not (isinstance(described, type) and issubclass(described, native_op.NativeOpGenBase)):
        print(f"--native_op: expected a class of returnn.native_op, got {options.native_op!r}", file=sys.stderr)
        return 2
    OpCodeCompiler.CollectedCompilers = []
    make_op(
        described,
        compiler_opts={"verbose": True},
        search_for_numpy_blas=not options.no_search_for_numpy_blas,
        blas_lib=options.blas_lib,
    )
    libraries = [compiler._so_filename for compiler in OpCodeCompiler.CollectedCompilers]
    print("\n".join(libraries))
    if options.output_file:
        options.output_file.write_text("".join(f"{library}\n" for library in libraries), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
