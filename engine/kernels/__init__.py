"""Paged attention and products with weights in C++: built once per machine, optional.

`load_kernels(cache_dir)` gives the kernels, called through ctypes, or None where there is no
working compiler and nothing built before; then the plain reference and torch's own products serve.
`python -m engine.kernels --cache-dir DIR` builds ahead of time.
"""

from __future__ import annotations

from engine.kernels.build import VARIANTS, KernelBuildError, build_library, detect_variant
from engine.kernels.native import Kernels, load_kernels

__all__ = [
    "VARIANTS",
    "KernelBuildError",
    "Kernels",
    "build_library",
    "detect_variant",
    "load_kernels",
]
