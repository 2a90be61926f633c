"""What a model of transformers asks of attention and of its head, seen before it has any memory.

Packed samples go through an attention of our own, which does the plain causal kind, and
log-probabilities are made from hidden states and the head's weight. A model that wants more of
either would be trained wrongly, so it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from m3rl.architecture import ArchitectureError

PROBE = "m3rl_probe"
"""Name of `probe_attention` among transformers' attention implementations."""
HARMLESS = {
    "cache_position",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "use_cache",
}
"""Arguments of an attention that do not change what `dense_varlen` must compute."""
OWNERS = re.compile(r"Linear|.*(Embedding|Norm|Experts|Router|Gate|Activation|LayerNorm1P)")
"""Classes of modules whose parameters work on each token by itself."""


@dataclass(slots=True)
class Calls:
    """Attention calls of a forward pass."""

    modules: list[nn.Module] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def probe_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    packing: Calls,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Notes in `packing` what is asked for."""
    packing.modules.append(module)
    packing.problems += _unknown(module, attention_mask, options)
    shapes = [tuple(x.shape) for x in (query, key, value)]
    if len({(shape[0], *shape[2:]) for shape in shapes}) > 1 or shapes[1] != shapes[2]:
        packing.problems.append(f"queries, keys and values of shapes {shapes}")
    return torch.empty_like(query.transpose(1, 2)), None


ALL_ATTENTION_FUNCTIONS.register(PROBE, probe_attention)


def _unknown(module: Any, attention_mask: Any, options: dict[str, Any]) -> Iterator[str]:
    if attention_mask is not None:
        yield "an attention mask of its own"
    if not (getattr(module, "is_causal", True) and options.get("is_causal") in (True, None)):
        yield "attention to later tokens"
    longest = getattr(module.config, "max_position_embeddings", 0)
    window = options.pop("sliding_window", None)
    if window is not None and window < longest:
        yield f"sliding_window={window}"
    if options.pop("dropout", 0.0):
        yield "dropout"
    for name, value in options.items():
        if value is not None and name not in HARMLESS:
            yield f"{name}={value if isinstance(value, int | float | str) else '…'}"


def require_plain(config: Any) -> None:
    """
    Args:
        config: transformers', without dropout.

    Raises:
        ArchitectureError: its model needs what a policy does not do; says what.
    """
    _require_plain_positions(config)
    implementation = config._attn_implementation
    config._attn_implementation = PROBE
    try:
        model = without_memory(config)
        _require_plain_modules(model)
        calls, head = _run(model)
    finally:
        config._attn_implementation = implementation
    name = type(model).__name__
    layers = sum(isinstance(module, GradientCheckpointingLayer) for module in model.modules())
    distinct = len({id(module) for module in calls.modules})
    if calls.problems:
        raise _refused(name, f"its attention asks for {calls.problems[0]}")
    if not len(calls.modules) == distinct == layers == config.num_hidden_layers:
        raise _refused(
            name,
            f"of its {config.num_hidden_layers} layers {distinct} have attention through "
            f"transformers' interface, and {layers} can be recomputed",
        )
    if head:
        raise _refused(name, head)


def new_model(config: Any) -> Any:
    """The causal language model of transformers' `config`, made at random."""
    return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]


def without_memory(config: Any) -> Any:
    """The causal language model of `config` on the meta device.

    Raises:
        ArchitectureError: transformers cannot make it.
    """
    try:
        with torch.device("meta"):
            return new_model(config)
    except (TypeError, ValueError, AttributeError, KeyError, RuntimeError) as error:
        raise ArchitectureError(
            f"transformers cannot make a {config.model_type} model of its config.json: {error}"
        ) from error


def _refused(name: str, why: str) -> ArchitectureError:
    return ArchitectureError(
        f"{name}: {why}; packed samples are trained with plain causal attention over a sample's "
        "own tokens and logits that are hidden states times the head: use a model with these"
    )


def _require_plain_positions(config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    longest = getattr(config, "max_position_embeddings", None)
    if longest is None:
        raise _refused(config.model_type, "config.json has no max_position_embeddings")
    if kinds == {"sliding_attention"} and (config.sliding_window or 0) >= longest:
        kinds = set()
    if kinds:
        raise _refused(config.model_type, f"it has layers of type {', '.join(sorted(kinds))}")
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(v for v in ropes.values() if isinstance(v, dict))):
        if rope.get("rope_type") in ("dynamic", "longrope"):
            raise _refused(
                config.model_type,
                f"with rope_type {rope['rope_type']} a token's position means something else in a "
                "longer row",
            )


def _require_plain_modules(model: nn.Module) -> None:
    for path, module in model.named_modules():
        owned = [*module._parameters, *(n for n, _ in module.named_buffers(recurse=False))]
        is_rotary = not any(p is not None for p in module._parameters.values())
        if owned and not is_rotary and not OWNERS.fullmatch(type(module).__name__):
            raise _refused(
                type(model).__name__,
                f"{path} is a {type(module).__name__}, which may look at more than one token",
            )


def _run(model: Any) -> tuple[Calls, str | None]:
    """The attention calls of a forward pass without memory, and what is wrong with the head."""
    for module in model.modules():
        if any(p is not None and p.ndim > 2 for p in module._parameters.values()):
            # Which experts a token takes is data, and there is none.
            module.forward = lambda hidden, *_, **__: torch.empty_like(hidden)
    calls = Calls()
    seen: dict[str, Tensor] = {}
    head, base = model.get_output_embeddings(), getattr(model, model.base_model_prefix)
    if type(head) is not nn.Linear or head.bias is not None:
        return calls, "its head is no linear module without a bias"
    head.register_forward_hook(lambda _, args, out: seen.update(hidden=args[0], logits=out))
    base.register_forward_hook(lambda _, __, out: seen.update(last=out.last_hidden_state))
    ids = torch.zeros(1, 3, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad():
            logits = model(input_ids=ids, position_ids=ids, use_cache=False, packing=calls).logits
    except (TypeError, RuntimeError, ValueError, AttributeError, KeyError) as error:
        why = f"a forward pass over packed samples fails ({error})"
        raise _refused(type(model).__name__, why) from error
    if not _same(seen.get("hidden"), seen.get("last")):
        return calls, "its head reads something else than the last hidden state"
    if not _same(seen.get("logits"), logits):
        return calls, "it changes logits behind its head (scales or caps them)"
    return calls, None


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether one is the other, or a view of it."""
    if a is None or b is None or a.shape != b.shape:
        return False
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)
