"""Everything the engine raises on purpose.

OverwinterError
|-- StartupError          the process cannot start; the message is the last line the user sees
|-- InvalidRequestError   the request can never be served as asked; names the field
|-- QueueFullError        try again later
|-- EngineClosedError     draining or closed
'-- EngineDeadError       the engine loop failed; every request, now and later, gets this
"""

from __future__ import annotations


class OverwinterError(Exception):
    """Base of all errors raised on purpose."""


class StartupError(OverwinterError):
    """The server cannot start; the message names the cause and the mend."""


class InvalidRequestError(OverwinterError):
    """The request is at fault. `param` is the name of the offending field, if there is one."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class QueueFullError(OverwinterError):
    """The bounded queue is full; `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineClosedError(OverwinterError):
    """The engine is draining or closed and takes no new work."""


class EngineDeadError(OverwinterError):
    """The engine loop failed; the first failure is the `__cause__`."""
