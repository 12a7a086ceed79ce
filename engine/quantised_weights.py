"""Quantised weights: the levels and scales that some weights of a model are exactly made of.

A GGUF's 4- and 8-bit weights are dequantised once, into the float32 weights that define the model.
Beside these their quantised form is kept, for kernels that are bound by reading weights: only
where its values are the float32 ones, bit for bit, so that which of the two is read changes no sum.

    <model directory>/quantised-<digest of its content>.safetensors
        <weight>.levels, <weight>.scale, <weight>.minimum (q4_1 alone), metadata {<weight>: kind}

The digest in the name is checked before anything is believed: the model's fingerprint covers the
float32 weights alone, so a damaged file must not stand for them.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import StartupError
from engine.model_info import ProgressFn
from engine.weight_files import DigestMemo, check_length

GROUP = 32  # inputs that share a scale
KINDS = ("q4_0", "q4_1", "q8_0")
_AT_ONCE = 1 << 17  # values compared at a time, so that they stay in a cache
_PREFIX, _SUFFIX, _DIGITS = "quantised-", ".safetensors", 32
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedWeight:
    """A weight [N, K] in groups of 32 along K.

        q4_1    scale * level + minimum     levels uint8 [N, K/2], the even input in the low bits
        q4_0    scale * (level - 8)         likewise
        q8_0    scale * level               levels int8 [N, K]

    `scale` and `minimum` are float16 [N, K/32].
    """

    kind: str
    levels: Tensor
    scale: Tensor
    minimum: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.scale.shape[0], self.scale.shape[1] * GROUP

    def dequantise(self) -> Tensor:
        """The weight, float32 [N, K]. A product of scale and level is exact: nothing but the sum
        with the minimum is rounded, once, in whatever order or fusion it is computed."""
        outputs, inputs = self.shape
        levels = self.levels
        if self.kind != "q8_0":
            levels = torch.stack((levels & 15, levels >> 4), dim=-1)
        values = levels.float().view(outputs, inputs // GROUP, GROUP)
        if self.kind == "q4_0":
            values = values - 8
        values = values * self.scale.float()[..., None]
        if self.minimum is not None:
            values = values + self.minimum.float()[..., None]
        return values.view(outputs, inputs)

    def is_exactly(self, weight: Tensor) -> bool:
        """Whether `weight` is float32 and has these values, bit for bit."""
        if weight.dtype != torch.float32 or weight.shape != self.shape:
            return False
        step = max(1, _AT_ONCE // max(1, self.shape[1]))
        return all(
            torch.equal(
                self._rows(first, first + step).dequantise().view(torch.int32),
                weight[first : first + step].view(torch.int32),
            )
            for first in range(0, self.shape[0], step)
        )

    def _rows(self, first: int, end: int) -> QuantisedWeight:
        minimum = None if self.minimum is None else self.minimum[first:end]
        return QuantisedWeight(self.kind, self.levels[first:end], self.scale[first:end], minimum)


def write_quantised(directory: Path, weights: Mapping[str, QuantisedWeight]) -> Path:
    """Write the file into `directory`, which is nobody else's yet, and return its path."""
    tensors, kinds = {}, {}
    for name, weight in weights.items():
        kinds[name] = weight.kind
        for part in ("levels", "scale", "minimum"):
            tensor = getattr(weight, part)
            if tensor is not None:
                tensors[f"{name}.{part}"] = tensor.contiguous()
    path = directory / f"{_PREFIX}new{_SUFFIX}"
    # One entry: the order of several is not the same in every process.
    save_file(tensors, path, metadata={"kinds": json.dumps(kinds, sort_keys=True)})
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return path.rename(directory / f"{_PREFIX}{digest[:_DIGITS]}{_SUFFIX}")


def quantised_file(directory: Path) -> Path | None:
    """The file in `directory`, if there is one of the length that its header says."""
    for path in sorted(directory.glob(f"{_PREFIX}*{_SUFFIX}")):
        try:
            check_length(path)
        except StartupError:
            continue
        return path
    return None


class MappedWeights(Mapping[str, QuantisedWeight]):
    """The weights of one file by name; each is mapped when it is asked for, and not held."""

    def __init__(self, path: Path) -> None:
        open_file: Any = safe_open
        self._file = open_file(path, framework="pt")
        self._parts = set(self._file.keys())
        self._kinds: dict[str, str] = json.loads((self._file.metadata() or {})["kinds"])
        if not set(self._kinds.values()) <= set(KINDS):
            raise ValueError(f"{path} holds kinds unknown here")

    def __getitem__(self, name: str) -> QuantisedWeight:
        kind = self._kinds[name]
        minimum = f"{name}.minimum"
        return QuantisedWeight(
            kind,
            self._file.get_tensor(f"{name}.levels"),
            self._file.get_tensor(f"{name}.scale"),
            self._file.get_tensor(minimum) if minimum in self._parts else None,
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)


def read_quantised(
    directory: Path, memo: DigestMemo, progress: ProgressFn
) -> Mapping[str, QuantisedWeight]:
    """The quantised forms of weights in a model directory, by the names of the weights.

    Empty where there are none. A file that is not what was written serves as none, with a warning:
    the float32 weights are the model. Hashing, once per file, goes to phase "hashing".
    """
    path = quantised_file(directory)
    if path is None:
        return {}
    try:
        if memo.digest(path, progress)[:_DIGITS] == path.name[len(_PREFIX) : -len(_SUFFIX)]:
            return MappedWeights(path)
        cause: object = "its content is not what was written"
    except (StartupError, SafetensorError, OSError, ValueError, KeyError) as error:
        cause = error
    _log.warning("%s is left aside, one stream will be slower: %s; delete it", path, cause)
    return {}
