"""The directions of the house: import-linter's contracts, and the doors that it has no word for."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

DOORS = {
    "m3rl/rollout/m3_replica.py": ("inference",),
    "m3rl/policy": ("inference.kernels", "inference.models.weights", "inference.config"),
    "m3rl/grpo/": (
        "inference.config",
        "inference.kernels.packing",
        "inference.kernels.dispatch",
    ),
    "m3rl/index_alignment.py": ("inference.kernels.index_alignment",),
    "m3rl/parallel/": ("inference.kernels", "inference.models.weights", "inference.config"),
    "m3rl/lora/": ("inference.kernels", "inference.models.weights", "inference.config"),
    "m3rl/weight_sync/": (
        "inference.config.MXFP8_BLOCK_SIZE",
        "inference.kernels.changed_values",
        "inference.kernels.copy_table",
        "inference.kernels.mxfp8",
        "inference.kernels.tensor_hash",
    ),
    "m3rl/rollout/m3_ranks.py": ("inference.parallel",),
    "m3rl/rollout/vllm_": (
        "inference.config",
        "inference.engine.coverage",
        "inference.kernels.tensor_hash",
        "inference.models.name_map",
    ),
    "m3rl/sft.py": ("inference.config",),
    "m3rl/model_layout.py": ("inference.config", "inference.models.name_map"),
    "m3rl/plan": ("inference.config", "inference.memory", "inference.parallel.config"),
    "m3rl/sync_plan.py": (
        "inference.config",
        "inference.memory",
        "inference.models.name_map",
        "inference.parallel",
    ),
}
"""Where m3rl may enter the runtime, and what it may take there."""
RAY = tuple(
    f"m3rl/rollout/{name}.py" for name in ("pool", "m3_backend", "vllm_backend", "placement")
)
LAUNCH = ("m3rl/launch.py",)


def imports(file):
    """Dotted names that a file imports anywhere, `from a import b` as 'a.b'."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def importers(package):
    """(file relative to the root, imported name) for each import of `package` in m3rl."""
    return [
        (file.relative_to(ROOT).as_posix(), name)
        for file in sorted((ROOT / "m3rl").rglob("*.py"))
        for name in imports(file)
        if f"{name}.".startswith(f"{package}.")
    ]


def test_every_import_contract_holds():
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_m3rl_enters_the_runtime_by_its_doors_only():
    strangers = [
        (file, name)
        for file, name in importers("inference")
        if not any(
            file.startswith(door) and any(f"{name}.".startswith(f"{room}.") for room in rooms)
            for door, rooms in DOORS.items()
        )
    ]
    assert strangers == []


def test_ray_is_imported_where_processes_are_placed_only():
    assert {file for file, _ in importers("ray")} <= {*RAY, *LAUNCH}


def test_wandb_is_imported_in_metrics_only():
    assert importers("wandb") == []  # metrics.py imports it by name, when a run needs it
    mentions = [
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "m3rl").rglob("*.py")
        if 'import_module("wandb")' in file.read_text()
    ]
    assert mentions == ["m3rl/metrics.py"]


@pytest.mark.parametrize("folder", ["m3rl", "inference", "benchmarks"])
def test_no_file_is_longer_than_400_lines(folder):
    long = [
        (file.relative_to(ROOT).as_posix(), lines)
        for file in (ROOT / folder).rglob("*.py")
        if (lines := len(file.read_text().splitlines())) > 400
    ]
    assert long == []


@pytest.mark.parametrize("package", ["m3rl.grpo", "m3rl.weight_sync"])
def test_grpo_and_weight_sync_need_nothing_that_a_bare_gpu_host_lacks(package):
    code = f"""
import sys, pkgutil, importlib
package = importlib.import_module({package!r})
for module in pkgutil.iter_modules(package.__path__):
    importlib.import_module({package!r} + "." + module.name)
absent = {{"transformers", "ray", "wandb", "vllm", "pydantic", "accelerate"}}
assert not absent & set(sys.modules), absent & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
