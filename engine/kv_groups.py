"""KV groups: layers of equal attention span whose blocks live and die together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVGroup:
    """`window` is the attention span in tokens, None for full attention."""

    index: int
    window: int | None = None


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
