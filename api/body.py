"""From the bytes of a request to a validated model: 400 for everything that is not right.

`null` means absent. Fields nobody knows are ignored, counted and logged once per name. Fields that
are known but not supported are refused by name, and only when their value asks for something.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from api import errors
from api.errors import ApiError
from api.metrics import Metrics

logger = logging.getLogger(__name__)

AsksNothing = Callable[[Any], bool]


class Body(BaseModel):
    """A request body. Types are strict: the string "1" is not a number."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    known_and_ignored: ClassVar[frozenset[str]] = frozenset()  # hints that change no answer
    unsupported: ClassVar[Mapping[str, AsksNothing]] = {}
    refuses_unknown: ClassVar[bool] = False  # other bodies ignore what they do not know
    refuses_null: ClassVar[frozenset[str]] = frozenset()  # fields whose absence means more


B = TypeVar("B", bound=Body)


async def read_json(request: Request, limit: int) -> dict[str, Any]:
    """The body as a JSON object, whatever its content type. Raises `ApiError` 400 or 413."""
    return _object(await _read(request, limit))


async def read_optional_json(request: Request, limit: int) -> dict[str, Any]:
    """Like `read_json`, but an empty body is an empty object."""
    raw = await _read(request, limit)
    return _object(raw) if raw.strip() else {}


def _object(raw: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise errors.invalid_request(
            f"The request body is not valid JSON: {error}.", code="invalid_json"
        ) from None
    if not isinstance(body, dict):
        raise errors.invalid_request("The request body must be a JSON object.", code="invalid_json")
    return body


async def _read(request: Request, limit: int) -> bytes:
    """Whatever of the body is left unread, the server reads and drops after the answer, so that a
    client that is still writing gets to see it."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise errors.body_too_large(limit)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise errors.body_too_large(limit)
        parts.append(part)
    return b"".join(parts)


def parse(model: type[B], raw: Mapping[str, Any], metrics: Metrics) -> B:
    """Validates `raw` against `model`. Raises `ApiError` 400 naming the field."""
    given = {name: value for name, value in raw.items() if value is not None}
    for name in model.refuses_null & raw.keys() - given.keys():
        raise errors.invalid_request(
            f"'{name}' is null; name one, or leave the field out for all of them.",
            name,
            "invalid_value",
        )
    for name in given.keys() - model.model_fields.keys():
        if name in model.known_and_ignored:
            continue
        asks_nothing = model.unsupported.get(name)
        if asks_nothing is None and model.refuses_unknown:
            fields = ", ".join(f"'{field}'" for field in model.model_fields)
            raise errors.invalid_request(
                f"There is no field '{name[:64]}' here; it takes {fields}.", name, "unknown_field"
            )
        if asks_nothing is None:
            if metrics.count_ignored_field(name):
                logger.warning("Ignoring the unknown body field %r (logged once)", name[:64])
        elif not asks_nothing(given[name]):
            raise errors.unsupported(name, f"'{name}' is not supported; leave it out.")
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise _told(error.errors(include_url=False)[0]) from None


def _told(detail: ErrorDetails) -> ApiError:
    path = ""
    for part in detail["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    if detail["type"] == "missing":
        return errors.invalid_request(f"'{path}' is required.", path, "missing_field")
    text = detail["msg"].removeprefix("Value error, ")
    return errors.invalid_request(
        f"Invalid value for '{path}': {text[:1].lower()}{text[1:]}.", path, "invalid_value"
    )


def schema_of(model: type[Body], required: bool = True) -> dict[str, Any]:
    """The OpenAPI entry for a body that the handler reads itself."""
    schema = model.model_json_schema(mode="serialization")
    parts = schema.pop("$defs", {})
    for field in schema["properties"].values():
        # A reference would point outside of this fragment, so what it names goes in its place.
        for kind in field.get("anyOf", []):
            if "$ref" in kind:
                kind.update(parts[kind.pop("$ref").rpartition("/")[2]])
    return {
        "requestBody": {
            "required": required,
            "content": {"application/json": {"schema": schema}},
        }
    }
