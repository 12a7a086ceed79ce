"""The blocks of a GGUF's weights as quantised weights of the model that it converts into.

    q4_0    { f16 scale, u8 levels[16] }                 value = scale * (level - 8)
    q4_1    { f16 scale, f16 minimum, u8 levels[16] }    value = scale * level + minimum
    q8_0    { f16 scale, i8 levels[32] }                 value = scale * level

A block is 32 inputs of one output. Of two levels in a byte the upper one is 16 inputs further on.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.gguf_file import GGUFHeader, GGUFTensor
from engine.quantised_weights import GROUP, QuantisedWeight


@dataclass(frozen=True, slots=True)
class _Block:
    """What a block of one type is made of."""

    kind: str
    heads: int  # float16 values before the levels: scale, minimum
    bits: int  # of a level

    @property
    def size(self) -> int:
        return 2 * self.heads + GROUP * self.bits // 8


_BLOCKS = {2: _Block("q4_0", 1, 4), 3: _Block("q4_1", 2, 4), 8: _Block("q8_0", 1, 8)}
_HEADS_INTERLEAVED = re.compile(r"\.attn_[qk]\.weight$")


def quantised_forms(header: GGUFHeader, model: nn.Module) -> Iterator[tuple[str, QuantisedWeight]]:
    """The names of `model`'s weights whose float32 values are exactly a quantised tensor of the
    file's, each with its form. Whatever does not fit for any reason is left out."""
    names = _names(header, model)
    weights = dict(model.named_parameters())
    with header.path.open("rb") as file:
        blob = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    for tensor in header.tensors:
        name = names.get(tensor.name)
        if name is None or tensor.ggml_type not in _BLOCKS:
            continue
        if len(tensor.shape) != 2 or tensor.shape[1] % GROUP:
            continue
        form = _split(blob, header, tensor)
        if form.is_exactly(weights[name].detach()):
            yield name, form


def _names(header: GGUFHeader, model: nn.Module) -> dict[str, str]:
    """Names of the file's tensors -> names of the model's parameters."""
    import gguf

    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    layers = int(header.metadata.get(f"{header.architecture}.block_count", 0))
    table = gguf.get_tensor_name_map(kinds[header.architecture], layers)
    found = {}
    for name, _ in model.named_parameters():
        theirs = table.get_name(name, try_suffixes=(".weight",))
        if theirs is not None:
            found[theirs] = name
    return found


def _split(blob: mmap.mmap, header: GGUFHeader, tensor: GGUFTensor) -> QuantisedWeight:
    """A tensor's blocks taken apart: scales with scales, levels with levels."""
    block, (outputs, inputs) = _BLOCKS[tensor.ggml_type], tensor.shape
    blocks = torch.frombuffer(
        blob,
        dtype=torch.uint8,
        count=outputs * (inputs // GROUP) * block.size,
        offset=header.data_start + tensor.offset,
    ).view(outputs, inputs // GROUP, block.size)
    blocks = _in_order(blocks, header, tensor)
    heads = blocks[..., : 2 * block.heads].contiguous().view(torch.float16)
    levels = blocks[..., 2 * block.heads :]
    if block.bits == 4:
        apart = torch.cat((levels & 15, levels >> 4), dim=-1)
        levels = apart[..., 0::2] | apart[..., 1::2] << 4
    else:
        levels = levels.contiguous().view(torch.int8)
    return QuantisedWeight(
        block.kind,
        levels.reshape(outputs, -1),
        heads[..., 0].contiguous(),
        heads[..., 1].contiguous() if block.heads == 2 else None,
    )


def _in_order(blocks: Tensor, header: GGUFHeader, tensor: GGUFTensor) -> Tensor:
    """Rows in the model's order. Llama's GGUF has the two halves of a query or key head, which
    RoPE rotates into one another, row by row in turn."""
    if header.architecture != "llama" or not _HEADS_INTERLEAVED.search(tensor.name):
        return blocks
    heads = header.metadata.get(f"{header.architecture}.attention.head_count")
    if ".attn_k." in tensor.name:
        heads = header.metadata.get(f"{header.architecture}.attention.head_count_kv", heads)
    if not isinstance(heads, int) or heads < 1 or blocks.shape[0] % (2 * heads):
        return blocks
    turns = blocks.view(heads, -1, 2, *blocks.shape[1:])
    return turns.transpose(1, 2).reshape(blocks.shape)
