"""What tensorrt_rtx has compiled on this GPU: shared by a session's engines, kept in a file between processes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.whole_file import whole_file

_LOG = logging.getLogger(__name__)


class KernelCache:
    """One cache of the library, made with the first runtime configuration that it is given to.

    path: the file to start from and to leave what was compiled in; None: only in memory. bundle: the folder whose
    engines use it, which holds nothing but what was built.
    """

    def __init__(self, path: Path | None = None, bundle: Path | None = None) -> None:
        """Raises ConfigError for a path where no file can be, or inside of the bundle."""
        if path is not None and bundle is not None and path.resolve().is_relative_to(bundle.resolve()):
            raise ConfigError(
                "load bundle", "kernel_cache", expected="a file outside of the bundle", got=path,
                hint="A bundle with files that were not built is refused; name a file beside it",
            )  # fmt: skip
        if path is not None and ((path.exists() and not path.is_file()) or not path.parent.is_dir()):
            raise ConfigError(
                "load bundle", "kernel_cache", expected="a file, which need not exist, in a folder that does", got=path
            )
        self._path = path
        self._cache: Any = None

    def give_to(self, config: Any) -> None:
        """Let a runtime configuration of any engine use it. A file of another GPU, driver or version is passed over."""
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            if self._path is not None and self._path.is_file() and not self._cache.deserialize(self._path.read_bytes()):
                _LOG.warning("%s is of another GPU, driver or version: kernels are compiled again", self._path)
        config.set_runtime_cache(self._cache)

    def save(self) -> None:
        """Write the file, as a whole or not at all. A disk that does not take it is no reason not to run."""
        if self._path is None or self._cache is None:
            return
        try:
            with whole_file(self._path) as file:
                file.write(bytes(self._cache.serialize()))
        except OSError as error:
            _LOG.warning("compiled kernels cannot be kept in %s: %s", self._path, error.strerror)
