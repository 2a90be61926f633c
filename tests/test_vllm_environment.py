"""What `make setup-vllm` builds from."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from m3rl.rollout.vllm_version import TESTED_SERIES

ROOT = Path(__file__).parents[1]


def load_tool():
    spec = importlib.util.spec_from_file_location("mend", ROOT / "tools" / "mend_torchvision.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


TORCHVISION = """import torch


def _has_ops():
    return {has_ops}
"""


@pytest.mark.parametrize("has_ops", [False, True])
def test_operators_are_declared_once_and_only_where_they_did_not_load(tmp_path, has_ops):
    tool = load_tool()
    file = tmp_path / "extension.py"
    file.write_text(TORCHVISION.format(has_ops=has_ops))
    assert tool.mend(file)
    mended = file.read_text()
    assert not tool.mend(file)
    assert file.read_text() == mended
    declared = []

    class Library:
        @staticmethod
        def define(name, schema):
            declared.append(name)

    class Torch:
        library = Library
        ops = type("ops", (), {"torchvision": object()})

    exec(mended.replace("import torch", ""), {"torch": Torch})
    assert declared == ([] if has_ops else ["torchvision::nms", "torchvision::qnms"])


def test_another_file_is_not_touched(tmp_path):
    file = tmp_path / "extension.py"
    file.write_text("import torch\n")
    with pytest.raises(ValueError, match=r"not the extension\.py of torchvision 0\.28\.0"):
        load_tool().mend(file)
    assert file.read_text() == "import torch\n"


def test_every_requirement_is_pinned_and_the_versions_are_those_that_are_tested():
    lines = (ROOT / "requirements" / "vllm_cpu.txt").read_text().splitlines()
    packages = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+(\[\w+\])?==[\w.]+", package) for package in packages)
    makefile = (ROOT / "Makefile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (of_cpu,), (of_gpu,) = extras["cpu-vllm"], extras["vllm"]
    assert of_cpu in makefile
    assert of_cpu.partition("==")[2].startswith(f"{TESTED_SERIES}.")
    assert of_gpu.partition("==")[2] == of_cpu.partition("==")[2]
    assert f"torchvision=={load_tool().VERSION}" in makefile
