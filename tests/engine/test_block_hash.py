"""Block identity: equal inputs agree for ever, any difference separates."""

import hashlib
import itertools
import struct
import subprocess
import sys

from engine.block_hash import block_hash, kv_fingerprint, root_hash

FINGERPRINT = bytes(range(32))


def test_known_answer() -> None:
    """Pinned: a change here orphans every stored block and needs a new format version."""
    root = root_hash(FINGERPRINT)
    by_hand = hashlib.sha256(b"\x04root" + struct.pack("<Q", 32) + FINGERPRINT).digest()
    assert root == by_hand
    block = hashlib.sha256(
        b"\x05block"
        + struct.pack("<Q", 32)
        + root
        + b"\x06tokens"
        + struct.pack("<Q", 12)
        + struct.pack("<3I", 1, 2, 70000)
    ).digest()
    assert block_hash(root, [1, 2, 70000]) == block


def test_the_same_in_another_process() -> None:
    code = (
        "from engine.block_hash import block_hash, root_hash;"
        "print(block_hash(root_hash(bytes(range(32)), 'salt'), [5, 6]).hex())"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert runs == {block_hash(root_hash(FINGERPRINT, "salt"), [5, 6]).hex()}


def test_each_kind_of_root_is_its_own() -> None:
    roots = [
        root_hash(FINGERPRINT),
        root_hash(FINGERPRINT, ""),
        root_hash(FINGERPRINT, "a"),
        root_hash(FINGERPRINT, None, b"a"),
        root_hash(FINGERPRINT, "a", b"a"),
        root_hash(FINGERPRINT, "aa"),
        root_hash(FINGERPRINT[::-1]),
    ]
    for one, other in itertools.combinations(roots, 2):
        assert one != other


def test_a_salt_cannot_imitate_an_adapter() -> None:
    """With parts joined by a separator alone, this salt would spell an adapter's encoding."""
    forged = "a" + "\x07adapter" + "\x01" + "\x00" * 7 + "b"
    assert root_hash(FINGERPRINT, forged) != root_hash(FINGERPRINT, "a", b"b")


def test_parent_tokens_and_order_count() -> None:
    root = root_hash(FINGERPRINT)
    hashes = [
        block_hash(root, [1, 2]),
        block_hash(root, [2, 1]),
        block_hash(root, [1, 2, 0]),
        block_hash(block_hash(root, [1, 2]), [1, 2]),
        block_hash(root, [1 + 256, 2]),
    ]
    assert len(set(hashes)) == len(hashes)


def test_every_part_of_the_kv_fingerprint_counts() -> None:
    base = {"kv_dtype": "float32", "layout": "x", "block_size": 16, "format_version": 1}
    changed = [
        {**base, "kv_dtype": "bfloat16"},
        {**base, "layout": "y"},
        {**base, "block_size": 32},
        {**base, "format_version": 2},
    ]
    prints = [kv_fingerprint(FINGERPRINT, **fields) for fields in (base, *changed)]
    prints.append(kv_fingerprint(FINGERPRINT[::-1], **base))
    assert len(set(prints)) == len(prints)
    assert all(len(value) == 32 for value in prints)
