"""What vLLM's layerwise reload (0.32) leaves undone: layers that it does not pack anew, and layers
that it does not put back when it fails."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """When a reload inside the block fails, its layers get the memory back that serves (whatever it
    holds), and forget what they took: else the next reload would count that as its own."""
    from vllm.model_executor.model_loader.reload import layerwise

    is_done = False
    try:
        yield
        is_done = True
    finally:
        for layer in () if is_done else model.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load() and info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()
            for tensor in (*layer._parameters.values(), *layer._buffers.values()):
                if tensor is not None and hasattr(tensor, "weight_loader"):
                    tensor.weight_loader = layerwise._get_original_loader(tensor)


def pack_experts_again(layer: nn.Module) -> None:
    """Before `layer` is processed: have experts on the CPU packed as when they were first loaded.
    At a later load vLLM leaves that out, and its kernel takes plain weights for packed ones."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )
    from vllm.platforms import current_platform

    method = getattr(layer, "quant_method", None)
    if current_platform.is_cpu() and isinstance(method, UnquantizedFusedMoEMethod):
        method.moe_kernel = None  # it is made together with the packing


def pack_tied_layers(model: nn.Module, loaded: Collection[str]) -> None:
    """Have layers that share the parameter of one in `loaded`, and were not loaded themselves, pack
    it anew: a head that is tied to the embedding keeps a packed copy of it on the CPU, which vLLM's
    reload leaves as it was."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    layers = dict(model.named_modules())
    memory = {
        parameter.untyped_storage().data_ptr()
        for name in loaded
        for parameter in layers[name].parameters(recurse=False)
        if parameter.numel()
    }
    for name, layer in layers.items():
        method = getattr(layer, "quant_method", None)
        if name in loaded or not isinstance(method, QuantizeMethodBase):
            continue
        own = {each.untyped_storage().data_ptr() for each in layer.parameters(recurse=False)}
        if own & memory:
            method.process_weights_after_loading(layer)


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Have `module` call `value` by `name` inside the block."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def process_begun_layers(model: nn.Module) -> list[str]:
    """Process the layers that took something and wait for more: what comes later is lost, as it is
    for padding that never comes. Returns those that are only processed at the end."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.reload import layerwise

    waiting = []
    for name, layer in list(model.named_modules()):
        info = layerwise.get_layerwise_info(layer)
        if not info.can_load() or not info.loaded_weights:
            continue
        if is_deferred_attention_layer(layer):
            waiting.append(name)
        else:
            layerwise._layerwise_process(layer, info)
    return waiting
