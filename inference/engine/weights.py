"""Where a rank's parts of the published tensors lie, and how values get there.

They lie in the parameters that the model computes with, at addresses that never change. With a
shadow they lie once more in a second copy of all parameters: loads fill that one while the engine
serves, and `publish` brings it over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from inference.config import EngineConfig, ModelConfig
from inference.engine.coverage import Bounds, WeightLoadError, WeightSlot
from inference.kernels.mxfp8 import BLOCK_SIZE, MAX_SCALE, MXFP8Tensor, hash_tensor, quantize_into
from inference.kernels.tensor_hash import tensor_hash
from inference.models.minimax_m3 import MiniMaxM3
from inference.models.weights import TensorSpec, published_tensors
from inference.parallel.config import ParallelConfig
from inference.parallel.shards import Shard, runtime_shards

Views = dict[str, Tensor | MXFP8Tensor]
"""Published name -> what is held of it, inside the parameters."""


class WeightMemory:
    """The parameters of one rank as published tensors."""

    def __init__(
        self,
        model: MiniMaxM3,
        model_config: ModelConfig,
        config: EngineConfig,
        parallel: ParallelConfig,
        rank: int,
    ) -> None:
        """`config.shadow_weights` allocates the second copy."""
        shards = runtime_shards(model_config, parallel, rank)
        specs = [spec for spec in published_tensors(model_config) if spec.name in shards]
        self.layout = [_slot(spec, shards[spec.name], config) for spec in specs]
        self.elsewhere = {spec.name for spec in published_tensors(model_config)} - shards.keys()
        """Published tensors of which other ranks hold everything."""
        self.device = torch.device(config.device)
        self.has_shadow = config.shadow_weights
        self._model = model
        self._live = model.state_dict()
        self._filled = self._live
        """What loads write into."""
        self.views = self._filled_views = _views(self._live, specs, shards, config.quantization)
        if self.has_shadow:
            self._filled = {name: torch.empty_like(each) for name, each in self._live.items()}
            self._filled_views = _views(self._filled, specs, shards, config.quantization)

    def place(self, slot: WeightSlot, bounds: Bounds) -> Tensor | MXFP8Tensor:
        """The memory that a load fills for a rectangle of a published tensor inside `slot`; it cuts
        no block of MXFP8."""
        # The view begins where the slot does.
        inside = tuple(
            (start - low, stop - low)
            for (start, stop), (low, _) in zip(bounds, slot.bounds, strict=True)
        )
        view = self._filled_views[slot.name]
        if isinstance(view, MXFP8Tensor):
            return quantized_rectangle(view, inside)
        return view[slices(inside)]

    @torch.no_grad()
    def write(self, slot: WeightSlot, bounds: Bounds, tensor: Tensor | MXFP8Tensor) -> None:
        """Copy a rectangle of a published tensor to its place, or quantise it there.

        Raises:
            WeightLoadError: values given in MXFP8 hold NaN. What is quantised here is looked at by
                `unusable`, so that the host need not wait for each write.
        """
        place = self.place(slot, bounds)
        if not isinstance(place, MXFP8Tensor):
            assert isinstance(tensor, Tensor), "checked by check_rectangle"
            place.copy_(tensor)
            return
        if not isinstance(tensor, MXFP8Tensor):
            quantize_into(tensor.to(self.device), place)
            return
        place.values.copy_(tensor.values)
        place.scale.copy_(tensor.scale)
        if bool(((place.values.view(torch.uint8) & 0x7F) == 0x7F).any()):
            raise WeightLoadError(f"{slot.name}: the MXFP8 values at {bounds} hold NaN")

    def unusable(self) -> list[str]:
        """Names of weights in MXFP8, as a load left them, with a block that was not finite, or is
        too large to serve."""
        scales = [each.amax() for name, each in self._filled.items() if name.endswith("_scale")]
        if not scales or int(torch.stack(scales).amax()) <= MAX_SCALE:
            return []
        return [
            name
            for name, view in self._filled_views.items()
            if isinstance(view, MXFP8Tensor) and int(view.scale.amax()) > MAX_SCALE
        ]

    @torch.no_grad()
    def publish(self) -> None:
        """Bring the shadow, if there is one, to where the model reads; returns when it is there.

        Nothing may be computing. One copy a parameter, and none waits for the host.
        """
        if not self.has_shadow:
            return
        self._synchronize()  # whoever filled the shadow did so on a stream of its own
        for name, tensor in self._live.items():
            tensor.copy_(self._filled[name])
        self._synchronize()  # before another load may fill it again

    def hashes(self, *, shadow: bool = False) -> dict[str, int]:
        """Hash of every published tensor, or the rectangle held here, as it lies in the parameters
        or in their shadow.

        That of a tensor in MXFP8 is over its stored bytes, see `mxfp8.hash_tensor`.
        """
        views = self._filled_views if shadow else self.views
        hashes = {}
        for slot in self.layout:
            view, offsets = views[slot.name], tuple(start for start, _ in slot.bounds)
            if isinstance(view, MXFP8Tensor):
                found = hash_tensor(view, name=slot.name, offsets=offsets, shape=slot.shape)
            else:
                found = tensor_hash(view, name=slot.name, offsets=offsets, shape=slot.shape)
            hashes[slot.name] = found
        return hashes

    def moved(self) -> list[str]:
        """Parameters that no longer lie where they did when the views were made: none, ever."""
        return [
            name
            for name, tensor in self._model.state_dict().items()
            if tensor.data_ptr() != self._live[name].data_ptr()
        ]

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def slices(bounds: Bounds) -> tuple[slice, ...]:
    """`bounds` as an index."""
    return tuple(slice(start, stop) for start, stop in bounds)


def quantized_rectangle(weight: MXFP8Tensor, bounds: Bounds) -> MXFP8Tensor:
    """A rectangle that cuts no block, in the same memory."""
    *outer, (start, stop) = bounds
    scale_bounds = (*outer, (start // BLOCK_SIZE, stop // BLOCK_SIZE))
    return MXFP8Tensor(weight.values[slices(bounds)], weight.scale[slices(scale_bounds)])


def _slot(spec: TensorSpec, shard: Shard, config: EngineConfig) -> WeightSlot:
    is_quantized = spec.is_quantized(config.quantization)
    dtype = "bfloat16" if is_quantized else config.dtype
    return WeightSlot(
        name=spec.name,
        dtype="float32" if spec.is_fp32 else dtype,
        shape=spec.shape,
        bounds=shard.bounds,
        bucket=spec.bucket,
        storage="mxfp8" if is_quantized else "plain",
    )


def _views(
    state: Mapping[str, Tensor],
    specs: Sequence[TensorSpec],
    shards: Mapping[str, Shard],
    quantization: str,
) -> Views:
    """Views into the parameters; together they are all of the parameters."""
    views: Views = {}
    num_unplaced = {param: tensor.numel() for param, tensor in state.items()}
    for spec in specs:
        place, bounds = shards[spec.name].placement, shards[spec.name].bounds
        shape = tuple(stop - start for start, stop in bounds)
        assert place.view(state).shape == shape, f"{spec.name} does not lie in {shape}"
        if spec.is_quantized(quantization):
            view = place.quantized_view(state)
            views[spec.name] = view
            num_unplaced[f"{place.param}_scale"] -= view.scale.numel()
        else:
            views[spec.name] = place.view(state)
        num_unplaced[place.param] -= math.prod(shape)
    for param, count in num_unplaced.items():
        assert count == 0, f"published tensors leave {count} places of {param} or fill them twice"
    return views
