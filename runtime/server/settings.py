"""What the server is told at start, beside the model's own settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.runtime.server.limits import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """model_name: what clients call the model. api_key: asked of every request for text; None: nobody is asked."""

    model_name: str
    host: str = "localhost"
    port: int = 8000
    api_key: str | None = None
    log_level: str = "info"
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise ConfigError("serve", "port", expected="0..65535", got=self.port)
        if not self.model_name:
            raise ConfigError("serve", "served_model_name", expected="a name", got=repr(self.model_name))
        if self.api_key is not None and not (self.api_key and self.api_key.isascii()):
            raise ConfigError("serve", "api_key", expected="ASCII characters", got="none, or others")
