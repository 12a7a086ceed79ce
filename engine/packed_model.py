"""A model whose linear layers multiply with packed weights.

`LinearPacker` puts a `PackedLinear` in the place of each `nn.Linear`, one by one or several with
the same inputs as one, and nothing of the weights that they were made from is kept. A weight whose
quantised form is at hand is packed in that, which has the same values and is read faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from engine.kernels import Kernels
from engine.kernels.packed_weight import Format, PackedWeight
from engine.kernels.panel_memory import PanelMemory
from engine.mapped_files import MappedFiles
from engine.model_loader import has_native_bfloat16
from engine.quantised_weights import QuantisedWeight

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class PackedLinear(nn.Module):
    """`nn.Linear` on the CPU, without gradients; or several with the same inputs, side by side."""

    def __init__(self, packed: PackedWeight, kernels: Kernels) -> None:
        super().__init__()
        self.packed = packed
        self.in_features, self.out_features = packed.num_inputs, packed.num_outputs
        self._kernels = kernels

    @property
    def weight(self) -> Tensor:
        """[out, in], unpacked anew at each call: for looking at, not for computing with."""
        return self.packed.dense()

    @property
    def bias(self) -> Tensor | None:
        """[out] of the weight's dtype."""
        bias = self.packed.bias
        return None if bias is None else bias.to(self.packed.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., in] of any float dtype; [..., out] of the same."""
        if x.dim() == 2:
            return self._kernels.linear(x, self.packed)
        rows = x.reshape(-1, self.in_features)
        return self._kernels.linear(rows, self.packed).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.packed.format.name.lower()}"


class LinearPacker:
    """Packs the linear layers of one model. To be made while the model is as it was loaded."""

    def __init__(
        self,
        model: nn.Module,
        kernels: Kernels,
        quantised: Mapping[str, QuantisedWeight] | None = None,
    ) -> None:
        """`quantised` has weights by their names in `model`, tied ones by the first of these; each
        equals the model's own."""
        self._model = model
        self._kernels = kernels
        self._quantised = quantised or {}
        self._files = MappedFiles()
        self._memory = PanelMemory()
        # A layer that was replaced must not live on here.
        self._names = WeakKeyDictionary((each, name) for name, each in model.named_modules())
        first = {id(weight): name for name, weight in model.named_parameters()}
        tied = model.named_parameters(remove_duplicate=False)
        self._first_names = {name: first[id(weight)] for name, weight in tied}

    def join(self, linears: Sequence[nn.Linear]) -> PackedLinear:
        """One layer with the outputs of all, side by side; they have the same inputs.

        Raises ValueError where they cannot be one.
        """
        biases = [linear.bias for linear in linears]
        width = self._kernels.panel_width
        quantised = self._quantised_forms(linears)
        if quantised:
            packed = PackedWeight.pack_quantised(quantised, biases, width=width, place=self._memory)
        else:
            weights = [linear.weight for linear in linears]
            packed = PackedWeight.pack(weights, biases, width=width, place=self._memory)
        for linear in linears:
            self._files.release(linear.weight)
        return PackedLinear(packed, self._kernels)

    def _quantised_forms(self, linears: Sequence[nn.Linear]) -> list[QuantisedWeight]:
        """Of all, or of none; they are read together."""
        weights = [f"{self._names.get(linear)}.weight" for linear in linears]
        names = [self._first_names.get(weight, weight) for weight in weights]
        if not all(name in self._quantised for name in names):
            return []
        forms = [self._quantised[name] for name in names]
        return forms if PackedWeight.can_pack_quantised(forms) else []

    def pack_rest(self) -> int:
        """Replace every `nn.Linear` that is still in the model; returns how many there were.

        One with hooks, or of a dtype that the kernels do not know, stays.
        """
        places = [
            (parent, name)
            for parent in self._model.modules()
            for name, child in parent.named_children()
            if _is_plain(child)
        ]
        made: WeakKeyDictionary[nn.Module, PackedLinear] = WeakKeyDictionary()
        for parent, name in places:
            child = getattr(parent, name)
            if child not in made:
                made[child] = self.join([child])
            setattr(parent, name, made[child])
        return len(places)


def _is_plain(module: nn.Module) -> bool:
    hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return type(module) is nn.Linear and module.weight.dtype in _DTYPES and not hooked


def linear_packer(
    model: nn.Module,
    kernels: Kernels | None,
    quantised: Mapping[str, QuantisedWeight] | None = None,
) -> LinearPacker | None:
    """The packer for a model as it was loaded, or None where its layers are best left alone.

    That is without kernels, off the CPU, and in bfloat16 where the processor multiplies that.
    """
    parameter = next(model.parameters())
    if kernels is None or parameter.device.type != "cpu":
        return None
    if parameter.dtype == torch.bfloat16 and has_native_bfloat16():
        return None
    return LinearPacker(model, kernels, quantised)


def describe(model: nn.Module) -> str:
    """How many weights are packed in which format, for the log; empty where none is."""
    formats = [m.packed.format for m in model.modules() if isinstance(m, PackedLinear)]
    counts = {form: formats.count(form) for form in Format}
    return ", ".join(f"{count} {form.name.lower()}" for form, count in counts.items() if count)
