from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engine.mapped_files import MappedFiles

MIB = 1 << 20


def resident(path: Path) -> int:
    """Bytes of `path` that this process has mapped and read."""
    text = Path("/proc/self/smaps").read_text()
    sizes = re.findall(rf"{re.escape(str(path))}\n(?:\w+:.*\n)*?Rss: *(\d+) kB", text)
    return sum(map(int, sizes)) * 1024


def test_pages_of_a_weight_are_given_back_and_its_neighbours_stay(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    written = {name: torch.randn(MIB // 2) for name in "abc"}  # 2 MiB each
    save_file(written, path)
    with safe_open(path, framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in "abc"}
    assert all(torch.equal(weights[name], written[name]) for name in "abc")
    before = resident(path)
    assert before >= 6 * MIB
    MappedFiles().release(weights["b"])
    assert before - 2 * MIB <= resident(path) <= before - 2 * MIB + 2 * 4096
    assert all(torch.equal(weights[name], written[name]) for name in "abc")


def test_memory_that_is_no_weight_file_is_left_alone(tmp_path: Path) -> None:
    own = torch.ones(MIB)
    MappedFiles().release(own)
    MappedFiles(tmp_path / "none").release(own)
    assert bool((own == 1).all())


def test_a_weight_that_reaches_beyond_what_was_mapped_is_left_alone(tmp_path: Path) -> None:
    own = torch.ones(MIB)
    begin = own.data_ptr() & ~4095
    maps = tmp_path / "maps"
    line = f"{begin:x}-{begin + MIB:x} r--p 00000000 00:00 1 /m.safetensors\n"
    maps.write_text(line)
    MappedFiles(maps).release(own)  # told to, it would be wiped: this memory has no file behind it
    assert bool((own == 1).all())
    MappedFiles(maps).release(own[: MIB // 8])
    assert not bool((own == 1).all())
