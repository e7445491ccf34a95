"""Fixtures of the plugin tests on a GPU: the host of the plugins, and the native library that judges them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native.conftest import installed_library as installed_library
from tests.native.conftest import library as library
from tests.tensorrt import plugin_host


@pytest.fixture(scope="session")
def gpu_host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugin host, built against the first header folder of the environment."""
    return plugin_host.build(tmp_path_factory.mktemp("gpu_host"), plugin_host.headers()[0])
