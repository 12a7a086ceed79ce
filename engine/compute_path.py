"""A loaded model made ready to compute with the kernels: its layers fused, its weights packed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from torch import nn

from engine.fused_layers import Join, fuse_layers, join_plainly
from engine.kernels import Kernels
from engine.mapped_files import MappedFiles
from engine.packed_model import describe, linear_packer
from engine.quantised_weights import QuantisedWeight

_log = logging.getLogger(__name__)


def use_kernels(
    model: nn.Module,
    kernels: Kernels | None,
    quantised: Mapping[str, QuantisedWeight] | None = None,
) -> None:
    """Replace in `model` what the kernels do better, without a second copy of any weight.

    Off the CPU, or without kernels, nothing changes. `quantised` has weights by their names in
    `model`, each of the same values as the model's own. Doing it twice does it once.
    """
    if kernels is None or next(model.parameters()).device.type != "cpu":
        return
    packer = linear_packer(model, kernels, quantised)
    if packer is None:
        fuse_layers(model, kernels, _join_and_release(MappedFiles()))
    else:
        fuse_layers(model, kernels, packer.join)
        packer.pack_rest()
        _log.info("linear layers of %s: %s", type(model).__name__, describe(model))


def _join_and_release(files: MappedFiles) -> Join:
    """Plain linear layers; of weights that were copied no pages stay."""

    def join(linears: Sequence[nn.Linear]) -> nn.Module:
        joined = join_plainly(linears)
        if joined is not linears[0]:
            for linear in linears:
                files.release(linear.weight)
        return joined

    return join
