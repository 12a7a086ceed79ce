from __future__ import annotations

from pathlib import Path

import pytest

from engine.kernels import VARIANTS, Kernels, build_library
from engine.kernels.build import cpu_flags


@pytest.fixture(
    scope="session",
    params=[name for name, variant in VARIANTS.items() if variant.needs <= cpu_flags()],
)
def kernels(request: pytest.FixtureRequest, kernel_cache: Path) -> Kernels:
    """The kernels of every variant that this processor can run, each in turn."""
    return Kernels(build_library(kernel_cache, request.param), request.param)
