"""Sampling noise that depends on (seed, position) and on nothing else.

Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11)
maps a key and a counter to 128 random bits and keeps no state. The seed is the key, the position
the counter: whoever draws the token at a position, in whatever batch, step or thread, before or
after a preemption or a restart, draws with the same number.
"""

from __future__ import annotations

_MASK32 = 0xFFFF_FFFF
_MASK64 = 0xFFFF_FFFF_FFFF_FFFF
_MULTIPLIER_0 = 0xD251_1F53
_MULTIPLIER_1 = 0xCD9E_8D57
_KEY_STEP_0 = 0x9E37_79B9  # golden ratio
_KEY_STEP_1 = 0xBB67_AE85  # sqrt(3) - 1
_ROUNDS = 10

Words4 = tuple[int, int, int, int]


def philox4x32(counter: Words4, key: tuple[int, int]) -> Words4:
    """The ten-round Philox bijection of four 32-bit counter words under two 32-bit key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ k0,
            product_1 & _MASK32,
            (product_0 >> 32) ^ c3 ^ k1,
            product_0 & _MASK32,
        )
        k0 = (k0 + _KEY_STEP_0) & _MASK32
        k1 = (k1 + _KEY_STEP_1) & _MASK32
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits for the token at absolute index `position`.

    `seed` is taken modulo 2**64, `position` lies in [0, 2**64).
    """
    seed &= _MASK64
    high, low, _, _ = philox4x32(
        (position & _MASK32, position >> 32, 0, 0), (seed & _MASK32, seed >> 32)
    )
    return ((high << 32 | low) >> 11) * 2.0**-53
