"""The plugin library under TensorRT's real interfaces on a machine without a GPU: see tests/tensorrt/host.

What the host checks for every plugin in every form: fields (each missing, repeated, mistyped, out of range or unknown
one is refused by name), outputs and aliases, formats, configure, clone, serialise and recreate, attach, and enqueue of
an empty batch and of a tensor that is not bound in place.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.tensorrt import plugin_host

REASON = plugin_host.unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
VERSIONS = [pytest.param(version, id=f"headers-{version.major}") for version in plugin_host.headers()]


@pytest.fixture(scope="module", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> plugin_host.Headers:
    found: plugin_host.Headers = request.param
    return found


@pytest.fixture(scope="module")
def host(version: plugin_host.Headers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plugin_host.build(tmp_path_factory.mktemp("host"), version)


def test_every_plugin_lives_through_a_build_and_refuses_wrong_fields(host: Path) -> None:
    assert "0 failures" in plugin_host.run(host)


def test_the_real_registry_loads_the_library_and_creates_every_plugin(host: Path, version: plugin_host.Headers) -> None:
    libraries = plugin_host.lean_libraries(version.major)
    if not libraries:
        pytest.skip(f"REPLAYSSM_TENSORRT_LEAN_LIBRARIES names no libnvinfer_lean.so.{version.major}")
    for library in libraries:
        assert "0 failures" in plugin_host.run(host, str(library))


def test_the_library_needs_no_tensorrt_library() -> None:
    """One binary for every version: no undefined symbol of TensorRT, so nothing of it is linked."""
    names = plugin_host.LIBRARY.read_bytes()
    assert b"libnvinfer" not in names
    assert b"getLogger" not in names


def test_the_decode_example_compiles_and_tells_what_it_lacks(version: plugin_host.Headers, tmp_path: Path) -> None:
    binary = plugin_host.build_example(tmp_path, version)

    def told() -> str:
        done = subprocess.run([binary, str(tmp_path), "plugins", "libno_such.so"], capture_output=True, text=True)
        assert done.returncode == 1
        return done.stderr

    assert f"cannot open {tmp_path}/rank0.engine" in told()
    (tmp_path / "rank0.engine").write_bytes(b"no engine")
    assert "libno_such.so" in told()
