"""From what `--speculative` names to a drafter."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

from engine.drafter import Drafter
from engine.errors import StartupError
from engine.ngram_drafter import NgramDrafter

_CLASS_SPEC = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_AVAILABLE = "it takes 'off', 'ngram', 'draft:MODEL' or 'package.module:Class'"
NGRAM = "ngram"
DRAFT_MODEL = "draft:"


def draft_model_of(spec: str) -> str | None:
    """MODEL of "draft:MODEL", None for any other drafter. Raises StartupError if it is empty."""
    if not spec.startswith(DRAFT_MODEL):
        return None
    model = spec.removeprefix(DRAFT_MODEL).strip()
    if not model:
        raise StartupError(f"--speculative {spec} names no model: {_AVAILABLE}")
    return model


def find_drafter_class(spec: str) -> type | None:
    """The class that `--speculative` names; needs no model, so it comes first.

    None for "off" and for a draft model, which `draft_model_of` names. Raises StartupError, naming
    cause and mend, for whatever keeps it from being one.
    """
    if spec == "off" or draft_model_of(spec) is not None:
        return None
    if spec == NGRAM:
        return NgramDrafter
    if not _CLASS_SPEC.fullmatch(spec):
        raise StartupError(f"--speculative {spec} names no drafter: {_AVAILABLE}")
    module_name, _, class_name = spec.partition(":")
    try:
        drafter_class = getattr(importlib.import_module(module_name), class_name, None)
    except ModuleNotFoundError as error:
        raise StartupError(
            f"--speculative {spec}: no module named {error.name!r} is found; install it, or put "
            "its directory on PYTHONPATH"
        ) from error
    except (Exception, SystemExit) as error:  # somebody else's module body runs here
        raise StartupError(
            f"--speculative {spec}: importing {module_name} failed with {_one_line(error)}; mend "
            "the module or choose 'off'"
        ) from error
    if not inspect.isclass(drafter_class):
        raise StartupError(
            f"--speculative {spec}: module {module_name} has no class {class_name}; check the name"
        )
    for method in ("propose", "finish"):
        function = getattr(drafter_class, method, None)
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise StartupError(
                f"--speculative {spec}: {class_name} needs a plain (not async) method {method}"
            )
    return drafter_class


def build_drafter(spec: str, drafter_class: type, *, vocab_size: int, max_tokens: int) -> Drafter:
    """An instance of what `find_drafter_class(spec)` found. Raises StartupError if that fails."""
    build: Any = drafter_class
    try:
        drafter: Drafter = build(vocab_size=vocab_size, max_tokens=max_tokens)
    except (Exception, SystemExit) as error:
        call = f"{drafter_class.__name__}(vocab_size={vocab_size}, max_tokens={max_tokens})"
        raise StartupError(
            f"--speculative {spec}: {call} failed with {_one_line(error)}; mend the class or "
            "choose 'off'"
        ) from error
    return drafter


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
