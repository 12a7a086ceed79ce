"""What every request passes before its handler: an id, a key, and a safe answer if all else fails.

Plain ASGI, because a wrapper that buffers would undo streaming.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import errors
from api.errors import ApiError
from api.metrics import Metrics
from api.settings import ServerSettings

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
REQUEST_ID = "x-request-id"
SANE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class Gate:
    """Checks keys, gives each response its `x-request-id`, counts responses by status.

    `/cache/*` wants the admin key; without one, an API key; without either, a client on loopback.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics
        self._api_keys = tuple(key.encode() for key in settings.api_keys)
        self._admin_keys = (settings.admin_key.encode(),) if settings.admin_key else ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get(REQUEST_ID, "")
        if not SANE_REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
                self._metrics.count_response(message["status"])
            await send(message)

        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await errors.error_response(refusal)(scope, receive, send_with_id)
            return
        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            self._metrics.count_response(errors.CLIENT_CLOSED_REQUEST)  # it left in its body
        except Exception:
            logger.exception("Request %s to %s failed", request_id, scope["path"])
            if started:
                raise  # the server cuts the connection, so that the answer does not look whole
            failure = errors.internal("The server failed to answer this request.")
            await errors.error_response(failure)(scope, receive, send_with_id)

    def _refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        path = scope["path"]
        if path in OPEN_PATHS:
            return None
        given = _bearer(headers)
        if path.startswith("/cache/"):
            keys = self._admin_keys or self._api_keys
            if not keys:
                return _loopback_only(scope, headers)
        else:
            keys = self._api_keys
        return None if not keys or _matches(given, keys) else errors.unauthorized()


def is_admin(settings: ServerSettings, headers: Headers) -> bool:
    """Whether the request carries the admin key. Where there is none, nobody is."""
    keys = (settings.admin_key.encode(),) if settings.admin_key else ()
    return _matches(_bearer(headers), keys)


def _bearer(headers: Headers) -> bytes:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    # Starlette decodes headers as latin-1; encoding so gives back the bytes that were sent.
    return key.strip().encode("latin-1") if scheme.lower() == "bearer" else b""


def _matches(given: bytes, keys: tuple[bytes, ...]) -> bool:
    """Compares with every key, each in constant time: the time tells neither which nor how far."""
    matches = [hmac.compare_digest(given, key) for key in keys]
    return any(matches)


def _loopback_only(scope: Scope, headers: Headers) -> ApiError | None:
    client = scope.get("client")
    try:
        address = ipaddress.ip_address(client[0]) if client else None
    except ValueError:
        address = None
    mapped = getattr(address, "ipv4_mapped", None)
    if address is None or not (mapped or address).is_loopback:
        return errors.forbidden(
            "Without --admin-key or --api-key the cache endpoints answer on loopback only."
        )
    if "origin" in headers:
        # Any web page may make the user's browser, a loopback client, post here.
        return errors.forbidden(
            "Without --admin-key or --api-key the cache endpoints do not answer web pages."
        )
    return None
