"""KV groups: layers of equal attention span whose blocks live and die together.

Every group has the same number of layers, so that one pool of equal blocks serves all of them (the
idea of vLLM's hybrid KV cache manager). A model with one kind of layer has one group; one that
alternates five windows with one full layer has six groups per repetition folded into as few as the
smaller kind allows:

    layers   w w w w w f w w w w w f        windows   full
    groups   0 = w w   1 = w w   2 = w w   3 = w w   4 = w w   5 = f f
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Layers that a group lacks are wasted bytes in each of its blocks; small groups are many keys.
MAX_PADDING = 1 / 8


@dataclass(frozen=True, slots=True)
class KVGroup:
    """`window` is the attention span in tokens, its own included; None for full attention."""

    index: int
    window: int | None = None
    layers: tuple[int, ...] = ()  # of the model, in the order in which a block holds them


def required_blocks(group: KVGroup, num_tokens: int, block_size: int) -> range:
    """Indices of the blocks that computing from position `num_tokens` on reads.

        full group    [0, n)
        window group  [max(0, n - window + 1), n)

    The one source for what a hit at `num_tokens` needs, what is worth storing and what may be
    freed. `num_tokens` must be a multiple of `block_size`.
    """
    if num_tokens % block_size:
        raise ValueError("a hit ends on a block boundary")
    first_token = 0 if group.window is None else max(0, num_tokens - group.window + 1)
    return range(first_token // block_size, num_tokens // block_size)


def group_layers(windows: Sequence[int | None], max_model_len: int) -> list[KVGroup]:
    """The groups of a model whose layers look back `windows` tokens (None: all of them).

    A window that no request can outgrow is full attention. Groups get as many layers as the kind
    with the fewest layers has, or fewer where padding would cost more than `MAX_PADDING`.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        span = None if window is None or window >= max_model_len else window
        kinds.setdefault(span, []).append(layer)
    size = _group_size([len(layers) for layers in kinds.values()])
    groups: list[KVGroup] = []
    for window, layers in kinds.items():
        for start in range(0, len(layers), size):
            groups.append(KVGroup(len(groups), window, tuple(layers[start : start + size])))
    return groups


def _group_size(counts: Sequence[int]) -> int:
    for size in range(min(counts), 1, -1):
        held = sum(-(-count // size) * size for count in counts)
        if held - sum(counts) <= MAX_PADDING * sum(counts):
            return size
    return 1


def describe_groups(groups: Sequence[KVGroup]) -> str:
    """Which layers' KV a block of each group holds; a part of what identifies stored blocks."""
    return ";".join(
        f"{group.window or 'full'}:{','.join(map(str, group.layers))}" for group in groups
    )


def max_blocks_held(group: KVGroup, num_positions: int, block_size: int) -> int:
    """Blocks of the group that a request of that many positions holds at its longest.

    A window group holds what the last committed boundary requires, and the block being written;
    one more, because a pass may straddle a boundary.
    """
    num_blocks = -(-num_positions // block_size)
    if group.window is None:
        return num_blocks
    return min(num_blocks, -(-(group.window - 1) // block_size) + 2)
