"""The noise is Philox, keyed by seed and position alone, and uniform."""

import math

import pytest

from engine.noise import philox4x32, uniform


# The known answers published with Random123 (tests/kat_vectors, "philox4x32 10").
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        (
            (0, 0, 0, 0),
            (0, 0),
            (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ),
        (
            (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
            (0xFFFFFFFF, 0xFFFFFFFF),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    assert philox4x32(counter, key) == expected


def test_uniform_is_the_top_53_bits_of_the_first_two_words():
    assert uniform(0, 0) == (0x6627E8D5E169C58D >> 11) / 2**53


def test_seed_is_the_key_and_position_the_counter_both_64_bits_wide():
    seed, position = 0x0123456789ABCDEF, 0xFEDCBA9876543210
    high, low, _, _ = philox4x32((0x76543210, 0xFEDCBA98, 0, 0), (0x89ABCDEF, 0x01234567))
    assert uniform(seed, position) == (high * 2**32 + low >> 11) / 2**53


def test_negative_seeds_are_taken_modulo_two_to_the_64():
    assert uniform(-1, 5) == uniform(2**64 - 1, 5)
    assert uniform(-(2**63), 5) == uniform(2**63, 5)


def test_neighbouring_seeds_and_positions_are_uniform_and_independent():
    """Chi-square over pairs of neighbours on a 10 x 10 grid; the seeds are fixed, so is the result.

    99 degrees of freedom: 148.2 is exceeded by chance once in a thousand.
    """
    draws = [[uniform(seed, position) for position in range(101)] for seed in range(101)]
    for down, right in ((0, 1), (1, 0), (1, 1)):
        counts = [0] * 100
        for seed in range(100):
            for position in range(100):
                here, there = draws[seed][position], draws[seed + down][position + right]
                assert 0.0 <= here < 1.0
                counts[math.floor(here * 10) * 10 + math.floor(there * 10)] += 1
        assert sum((count - 100) ** 2 / 100 for count in counts) < 148.2
