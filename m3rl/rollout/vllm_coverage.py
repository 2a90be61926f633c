"""The proof that a load through vLLM brought every tensor to the model, and filled all of it.

vLLM skips names that it does not know, leaves layers as they were that received nothing, and fuses
tensors (q, k and v into one) without asking whether all came. So the first load of an engine is
followed, operation by operation:

    tensors by name ─▶ whatever vLLM computes of them ─▶ the model's parameters

Each memory that a tensor's values flow into is marked with its name, and each parameter is filled
with NaN before it is loaded; afterwards every name must have reached a parameter, and no parameter
may have kept a NaN. Later loads take the same way through the same code: they are held against the
number of elements that each layer took at first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from inference.engine.coverage import WeightLoadError
from m3rl.rollout.vllm_reload import (
    pack_experts_again,
    pack_tied_layers,
    process_begun_layers,
    put_back,
    replaced,
)

LISTED = 4
"""Names that an error shows of each kind."""


class Flow(TorchDispatchMode):
    """Knows of each memory the names of the tensors whose values flowed into it, while active."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        # The weak reference keeps the address from being given to another storage.
        self._marks: dict[int, tuple[StorageWeakRef, set[str]]] = {}
        for name, tensor in tensors.items():
            self.mark(name, tensor)

    def mark(self, name: str, tensor: Tensor) -> None:
        """The values of `tensor`, in memory of its own, are those of `name`."""
        self._mark(tensor, {name})

    def names_in(self, tensor: Tensor) -> set[str]:
        """Of the tensors whose values are in the memory of `tensor`."""
        mark = self._marks.get(tensor.untyped_storage()._cdata)
        return set() if mark is None else mark[1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        names: set[str] = set()
        for tensor in _tensors((args, kwargs)):
            names |= self.names_in(tensor)
        if names:
            for tensor in (*_written(func, args, kwargs), *_tensors(result)):
                self._mark(tensor, names)
        return result

    def _mark(self, tensor: Tensor, names: set[str]) -> None:
        if tensor.device.type == "meta":
            return  # holds no values
        storage = tensor.untyped_storage()
        mark = self._marks.get(storage._cdata)
        if mark is None:
            self._marks[storage._cdata] = StorageWeakRef(storage), set(names)
        else:
            mark[1].update(names)


_Counts = dict[str, tuple[int, int]]
"""Layer -> elements that it took, and that it has."""


@dataclass(slots=True)
class _Filled:
    """What was found in one parameter, after its load."""

    names: set[str]
    num_missing: int
    numel: int


@dataclass(slots=True)
class CoverageCheck:
    """Of the loads of one engine."""

    model: nn.Module
    exempt: Collection[str] = ()
    """Names that this model has no place for, and is known to compute the same without."""
    _counts: _Counts | None = None
    """Of the first load; None before it, and after one that failed."""
    progress: list[int] = field(default_factory=list)
    """Layers that the first load had loaded, each time that it was asked."""
    _filled: dict[tuple[str, str], _Filled] = field(default_factory=dict)
    _one_memory: list[tuple[str, ...]] = field(default_factory=list)
    """Names of tensors that vLLM loads into the same parameter, one over the other: a head that is
    tied to the embedding, and comes nevertheless."""

    @contextmanager
    def watched(self, tensors: Mapping[str, Tensor | None]) -> Iterator[Watch]:
        """Around a load of `tensors` by vLLM's layerwise reload.

        Args:
            tensors: None: it comes when vLLM asks for it, and is gone at the end; the block tells
                of it.

        Raises:
            WeightLoadError: at its end; names the tensors that did not arrive, and the parameters
                that nothing or too little came to.
        """
        from vllm.model_executor.model_loader.reload import layerwise

        counts: _Counts = {}
        layer_names = {module: name for name, module in self.model.named_modules()}
        process = layerwise._layerwise_process

        def counted(layer: nn.Module, info: Any) -> None:
            counts[layer_names[layer]] = info.load_numel, info.load_numel_total
            pack_experts_again(layer)
            process(layer, info)

        with put_back(self.model), ExitStack() as stack:
            stack.enter_context(replaced(layerwise, "_layerwise_process", counted))
            flow = None
            if self._counts is None:
                flow = self._follow(stack, tensors, layer_names)
            first, self._counts = self._counts, None  # after a failure it is followed anew
            watch = Watch(self, flow, counts)
            yield watch
            pack_tied_layers(self.model, counts)
        if flow is not None:
            self._check_first(flow, tensors)
            self.progress = watch.progress
            self._one_memory = self._names_of_one_memory()
            self._filled.clear()
        elif first is not None and counts != first:
            self._raise_changed(counts, first)
        self._check_equal(tensors)
        self._counts = counts

    def _follow(
        self,
        stack: ExitStack,
        tensors: Mapping[str, Tensor | None],
        layer_names: Mapping[Any, str],
    ) -> Flow:
        from vllm.model_executor.model_loader.reload import layerwise
        from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

        flow = Flow({name: each for name, each in tensors.items() if each is not None})
        self._filled.clear()
        for _, tensor in self._loaded_in_place():
            _fill_with_nan(tensor)
        materialize = layerwise.materialize_layer

        def materialized(layer: nn.Module, info: Any) -> None:
            materialize(layer, info)
            for name, tensor in _own_tensors(layer):
                if name not in SKIP_TENSORS:  # those were filled above, and may hold values now
                    _fill_with_nan(tensor)
            info.loaded_weights = _TellsItsEnd(
                info.loaded_weights, lambda: self._note(flow, layer_names[layer], layer)
            )

        stack.enter_context(replaced(layerwise, "materialize_layer", materialized))
        stack.enter_context(flow)
        return flow

    def _note(self, flow: Flow, layer_name: str, layer: nn.Module) -> None:
        """Look at the parameters of a layer, once they are loaded and before vLLM packs them."""
        for name, tensor in _own_tensors(layer):
            self._filled[layer_name, name] = _look_at(flow, tensor)

    def _check_first(self, flow: Flow, tensors: Collection[str]) -> None:
        filled = self._filled_in_all(flow)
        for layer_name, layer in self.model.named_modules():
            for name, tensor in _own_tensors(layer):
                if (layer_name, name) not in filled and flow.names_in(tensor):
                    # The same memory as a parameter of another layer: tied embeddings.
                    filled[layer_name, name] = _look_at(flow, tensor)
        arrived = set().union(*(each.names for each in filled.values()))
        lost = set(tensors) - arrived - set(self.exempt)
        faults = _listed("reached no parameter: ", sorted(lost))
        surplus = arrived & set(self.exempt)
        faults += _listed("were to have no place in this model, and have: ", sorted(surplus))
        empty = [key for key in self._parameters() if not _has_names(filled.get(key))]
        faults += _listed("received nothing: ", [".".join(key).lstrip(".") for key in empty])
        faults += _partial(filled)
        if faults:
            raise WeightLoadError(
                "vLLM did not take the weights as they were sent: " + "; ".join(faults) + ". Its "
                "model and the checkpoint are not one architecture, or it knows tensors by other "
                "names; nothing is served"
            )

    def expect_loaded(self, flow: Flow, names: Collection[str]) -> None:
        """While a load is followed, see `Watch`."""
        filled = self._filled_in_all(flow)
        arrived = set().union(*(each.names for each in filled.values()))
        lost = sorted(set(names) - arrived - set(self.exempt))
        faults = _listed("have no place, or are kept beyond their layer: ", lost)
        if faults := faults + _partial(filled):
            raise WeightLoadError(
                "vLLM does not load this model layer by layer: " + "; ".join(faults) + "; set "
                "rollout.backend.engine.staging: whole"
            )

    def _filled_in_all(self, flow: Flow) -> dict[tuple[str, str], _Filled]:
        in_place = {key: _look_at(flow, tensor) for key, tensor in self._loaded_in_place()}
        return self._filled | in_place

    def _names_of_one_memory(self) -> list[tuple[str, ...]]:
        found: dict[int, set[str]] = {}
        for layer_name, layer in self.model.named_modules():
            for name, tensor in _own_tensors(layer):
                filled = self._filled.get((layer_name, name))
                if filled is not None and len(filled.names) == 1 and tensor.numel():
                    found.setdefault(tensor.data_ptr(), set()).update(filled.names)
        return [tuple(sorted(names)) for names in found.values() if len(names) > 1]

    def _check_equal(self, tensors: Mapping[str, Tensor | None]) -> None:
        for first, *others in self._one_memory:
            for other in others:
                here, there = tensors[first], tensors[other]
                if here is None or there is None:
                    raise WeightLoadError(
                        f"{first} and {other} are one parameter in vLLM, and whether they are "
                        "equal is not known where a sync comes layer by layer; set "
                        "rollout.backend.engine.staging: whole, or untie them in config.json"
                    )
                if not torch.equal(here, there):
                    raise WeightLoadError(
                        f"{first} and {other} are one parameter in vLLM, as the config's "
                        "tie_word_embeddings says, and came with different values; untie them in "
                        "config.json, or train them tied"
                    )

    def _parameters(self) -> Iterator[tuple[str, str]]:
        for layer_name, layer in self.model.named_modules():
            for name, _ in _own_tensors(layer):
                yield layer_name, name

    def _loaded_in_place(self) -> Iterator[tuple[tuple[str, str], Tensor]]:
        """What the layerwise reload leaves in its place, instead of making it anew."""
        from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

        for layer_name, layer in self.model.named_modules():
            for name, tensor in _own_tensors(layer):
                if name in SKIP_TENSORS:
                    yield (layer_name, name), tensor

    def _raise_changed(self, counts: _Counts, first: _Counts) -> None:
        changed = [
            f"{name} ({counts.get(name, (0, 0))[0]} elements, {first.get(name, (0, 0))[0]} in the "
            "first load)"
            for name in sorted(counts.keys() | first.keys())
            if counts.get(name) != first.get(name)
        ]
        raise WeightLoadError(
            "; ".join(_listed("vLLM took other elements than in the first load: ", changed))
        )


@dataclass(slots=True)
class Watch:
    """How the block of a watched load tells of tensors that come one after the other."""

    check: CoverageCheck
    flow: Flow | None
    """None: this load is not followed; it must come as far as the first each time."""
    counts: _Counts
    """Grows with each layer."""
    progress: list[int] = field(default_factory=list)

    def gives(self, name: str, tensor: Tensor) -> None:
        """Before vLLM has `tensor`, which has memory of its own."""
        if self.flow is not None:
            self.flow.mark(name, tensor)

    def expect_loaded(self, names: Collection[str]) -> None:
        """After vLLM has asked for more than `names`, and before their memory is written again.

        Raises:
            WeightLoadError: a layer will read one of them later, or is not filled by them.
        """
        waiting = process_begun_layers(self.check.model)
        self.progress.append(len(self.counts))
        if self.flow is not None:
            self.check.expect_loaded(self.flow, names)
        elif self.progress != self.check.progress[: len(self.progress)]:
            waiting = list(names)
        if waiting:
            raise WeightLoadError(
                f"vLLM reads {', '.join(waiting[:LISTED])} later than layer by layer; set "
                "rollout.backend.engine.staging: whole"
            )


class _TellsItsEnd(list[Any]):
    """A list that calls `then` when it was walked through for the first time."""

    def __init__(self, items: list[Any], then: Callable[[], None]) -> None:
        super().__init__(items)
        self._then: Callable[[], None] | None = then

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        then, self._then = self._then, None
        if then is not None:
            then()


def _partial(filled: Mapping[tuple[str, str], _Filled]) -> list[str]:
    partial = [
        f"{'.'.join(key).lstrip('.')} ({each.num_missing} of {each.numel} elements)"
        for key, each in filled.items()
        if each.names and each.num_missing
    ]
    return _listed("were not filled, or with NaN: ", partial)


def _own_tensors(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters of a layer and the buffers of its checkpoint, but those that vLLM fills itself."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

    own = SKIP_LOAD_TENSORS - {"e_score_correction_bias"}
    for name, parameter in layer._parameters.items():
        if parameter is not None and name not in own:
            yield name, parameter
    if is_deferred_attention_layer(layer):
        return  # its buffers are scales of quantised keys, 1 without quantisation
    for name, buffer in layer._buffers.items():
        if buffer is None or name in own or name in layer._non_persistent_buffers_set:
            continue
        yield name, buffer


def _look_at(flow: Flow, tensor: Tensor) -> _Filled:
    from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

    if not tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1:
        return _Filled(set(flow.names_in(tensor)), 0, tensor.numel())
    is_missing = torch.isnan(tensor.detach())
    num_missing = int(is_missing.sum())
    if 0 < num_missing <= tensor.numel() - get_tensor_load_numel(tensor):
        tensor.detach().masked_fill_(is_missing, 0.0)  # what the layer says is padding
        num_missing = 0
    return _Filled(set(flow.names_in(tensor)), num_missing, tensor.numel())


def _has_names(filled: _Filled | None) -> bool:
    return filled is not None and bool(filled.names)


def _fill_with_nan(tensor: Tensor) -> None:
    if tensor.dtype.is_floating_point:
        tensor.detach().fill_(torch.nan)


def _tensors(values: Any) -> Iterator[Tensor]:
    return (value for value in tree_iter(values) if isinstance(value, Tensor))


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Arguments that `func` changes."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from _tensors(value)


def _listed(what: str, names: list[str]) -> list[str]:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return [f"{len(names)} {what}{', '.join(names[:LISTED])}{more}"] if names else []
