"""What every handler of one app shares."""

from __future__ import annotations

from dataclasses import dataclass

from api import errors
from api.holder import EngineHolder
from api.metrics import Metrics
from api.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class Context:
    settings: ServerSettings
    holder: EngineHolder
    metrics: Metrics

    def model_name(self, asked: str | None) -> str:
        """The name to answer with; an absent one means the first served. Raises `ApiError` 404."""
        names = self.settings.served_model_names
        if asked is None:
            return names[0]
        if asked not in names:
            raise errors.not_found(
                f"The model {asked[:200]!r} does not exist; this server has {', '.join(names)}.",
                "model",
                "model_not_found",
            )
        return asked
