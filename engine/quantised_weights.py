"""Quantised weights: the levels and scales that some weights of a model are exactly made of.

A GGUF's 4- and 8-bit weights are dequantised once, into the float32 weights that define the model.
Beside these their quantised form is kept, for kernels that are bound by reading weights: only
where its values are the float32 ones, bit for bit, so that which of the two is read changes no sum.

    <model directory>/quantised-<digest of its content>.safetensors
        <weight>.levels, <weight>.scale, <weight>.minimum (q4_1 alone)
        metadata: {<weight>: kind}, and the digests of the float32 weights' files

Both digests are checked before anything is believed: the model's fingerprint covers the float32
weights alone, so neither a damaged file nor one that was left beside other weights, trained on from
these, may stand for them.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import StartupError
from engine.model_info import ProgressFn
from engine.weight_files import DigestMemo, check_length, weight_files

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
    """Write the file beside the float32 weights in `directory`, which is nobody else's yet; returns
    its path."""
    tensors, kinds = {}, {}
    for name, weight in weights.items():
        kinds[name] = weight.kind
        for part in ("levels", "scale", "minimum"):
            tensor = getattr(weight, part)
            if tensor is not None:
                tensors[f"{name}.{part}"] = tensor.contiguous()
    path = directory / f"{_PREFIX}new{_SUFFIX}"
    form_of = [_digest(file) for file in weight_files(directory)]
    # One entry: the order of several is not the same in every process.
    told = json.dumps({"kinds": kinds, "weights": form_of}, sort_keys=True)
    save_file(tensors, path, metadata={"overwinter": told})
    return path.rename(directory / f"{_PREFIX}{_digest(path)[:_DIGITS]}{_SUFFIX}")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
        told = json.loads((self._file.metadata() or {})["overwinter"])
        self._kinds: dict[str, str] = told["kinds"]
        self.form_of: list[str] = told["weights"]  # digests of files, in the order of their names
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
    directory: Path, digests: Sequence[str], memo: DigestMemo, progress: ProgressFn
) -> Mapping[str, QuantisedWeight]:
    """The quantised forms of weights in a model directory, by the names of the weights.

    `digests` are those of the weights' own files, in the order of `weight_files`. Empty where there
    are none. A file that is not what was written, or not for these weights, serves as none, with a
    warning: the float32 weights are the model. Hashing, once, goes to phase "hashing".
    """
    path = quantised_file(directory)
    if path is None:
        return {}
    try:
        cause: object = "its content is not what was written"
        if memo.digest(path, progress)[:_DIGITS] == path.name[len(_PREFIX) : -len(_SUFFIX)]:
            weights = MappedWeights(path)
            if weights.form_of == list(digests):
                return weights
            cause = "the weights beside it are others"
    except (StartupError, SafetensorError, OSError, ValueError, KeyError) as error:
        cause = error
    _log.warning("%s is left aside, one stream will be slower: %s; delete it", path, cause)
    return {}
