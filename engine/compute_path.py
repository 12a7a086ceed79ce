"""A loaded model made ready to compute with the kernels: its layers fused, its weights packed."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from engine.fused_layers import fuse_layers
from engine.kernels import Kernels
from engine.packed_model import linear_packer
from engine.quantised_weights import QuantisedWeight


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
    fuse_layers(model, kernels, None if packer is None else packer.join)
    if packer is not None:
        packer.pack_rest()
