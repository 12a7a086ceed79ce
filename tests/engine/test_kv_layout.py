from __future__ import annotations

import subprocess
import sys

import pytest

from engine.kv_layout import KVLayout


def test_block_bytes_count_layers_keys_values_heads_tokens_and_dims() -> None:
    layout = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="float32")
    assert layout.plane_elements == 3 * 16 * 64
    assert layout.block_bytes == 30 * 2 * 3 * 16 * 64 * 4
    assert layout.token_bytes == 46_080


@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_bytes_follow_the_dtype(dtype: str, item: int) -> None:
    assert KVLayout(1, 1, 5, 3, dtype).block_bytes == 2 * 5 * 3 * item


def test_an_unknown_dtype_and_a_size_below_one_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="int8"):
        KVLayout(1, 1, 1, 1, "int8")
    for position, name in enumerate(["num_layers", "num_kv_heads", "head_dim", "block_size"]):
        sizes = [1, 1, 1, 1]
        sizes[position] = 0
        with pytest.raises(ValueError, match=name):
            KVLayout(*sizes, "float32")


def test_the_layout_is_computed_without_torch() -> None:
    code = "import sys, engine.kv_layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
