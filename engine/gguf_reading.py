"""Makes transformers read a GGUF in seconds, and say how far it is.

Left alone it parses the file twice, piece by piece through numpy, the vocabulary included, and
builds the table of tensor names once per submodule: nine tenths of a small model's conversion.
The vocabulary is not needed there (`gguf_tokenizer` reads it); the rest is needed once.
"""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Callable, Iterator
from typing import Any

from engine.progress_bars import Bar, percentages

_ARRAY, _STRING = 9, 8
_LONG = 1024  # entries; longer arrays are parts of a vocabulary
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


@contextlib.contextmanager
def quick_reading(report: Callable[[float], None]) -> Iterator[None]:
    """Inside, loading a GGUF is quick and calls `report` with percentages."""
    import gguf
    import transformers.modeling_gguf_pytorch_utils as reading

    def bar(iterable: Any, **options: Any) -> Bar:
        return Bar(report, iterable, **options)

    patches: list[tuple[Any, str, Any]] = [
        (gguf, "GGUFReader", functools.cache(_reader_without_vocabulary())),
        (gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
        (reading, "tqdm", bar),
    ]
    with contextlib.ExitStack() as restore, percentages(lambda _: None):
        for module, name, replacement in patches:
            restore.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, replacement)
        yield


def _reader_without_vocabulary() -> Any:
    import gguf

    base: Any = gguf.GGUFReader

    class Reader(base):  # type: ignore[misc]
        def _get_field_parts(self, offset: int, kind: int) -> Any:
            if int(kind) == _ARRAY:
                item, count = struct.unpack_from("<IQ", self.data, offset)
                if count > _LONG:
                    size = 12 + _array_bytes(self.data, offset + 12, item, count)
                    return size, [], [], [gguf.GGUFValueType.ARRAY]
            return super()._get_field_parts(offset, kind)

    return Reader


def _array_bytes(data: Any, offset: int, item: int, count: int) -> int:
    if item != _STRING:
        return _WIDTHS[item] * count
    position = offset
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", data, position)
        position += 8 + length
    return position - offset
