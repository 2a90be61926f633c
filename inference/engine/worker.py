"""One rank of the engine: the model's weights, the paged memory, and a forward pass over both."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from inference.config import SPARSE, ConfigError, EngineConfig, ModelConfig
from inference.engine.batch import StepBatch, build_batch
from inference.engine.coverage import Bounds, WeightLoadError, WeightSlot
from inference.engine.graphs import DecodeGraphs
from inference.engine.rows import PENDING, RunningRows
from inference.engine.sampler import PendingSample, pack, sample
from inference.engine.scheduler import Schedule
from inference.engine.sharing import DecodePlanner, Workers
from inference.engine.staging import Staging
from inference.kernels.hardware import num_multiprocessors
from inference.kernels.mxfp8 import BLOCK_SIZE, MAX_SCALE, MXFP8Tensor, hash_tensor, quantize_into
from inference.kernels.paging import LayerPages
from inference.kernels.tensor_hash import tensor_hash
from inference.models.minimax_m3 import Capture, MiniMaxM3
from inference.models.weights import TensorSpec, published_tensors, runtime_placement


class Worker:
    """Holds everything that lives on the device. `config` is resolved for `model_config`."""

    def __init__(self, model_config: ModelConfig, config: EngineConfig) -> None:
        assert config.page_size is not None, "EngineConfig.resolve fills in the page size"
        assert config.max_model_len is not None, "EngineConfig.resolve fills in the length"
        self.device = torch.device(config.device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                f"device={config.device!r}: torch {torch.__version__} sees no CUDA device; use "
                "device='cpu', or install a CUDA build of torch on a machine with a GPU"
            )
        self.dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
        self.model = MiniMaxM3(
            model_config, self.dtype, self.device, config.max_model_len, config.quantization
        )
        self.pages = [
            _allocate_pages(model_config, config, kind == SPARSE, self.dtype, self.device)
            for kind in model_config.layer_types
        ]
        self.capture: Capture | None = None
        if config.capture_routing or config.capture_blocks:
            self.capture = Capture.allocate(
                model_config,
                config.num_pages * config.page_size,
                self.device,
                routing=config.capture_routing,
                blocks=config.capture_blocks,
            )
        self.page_size = config.page_size
        self._staging = Staging(self.device)
        self._newest_M = torch.zeros(
            config.max_running_requests + 1, dtype=torch.int64, device=self.device
        )
        """Newest sampled token of each row; the last place takes what padding samples."""
        self.planner: DecodePlanner | None = None
        self.graphs: DecodeGraphs | None = None
        if self.device.type == "cuda":
            self.planner = _make_planner(model_config, config, self.device)
            if config.cuda_graph_sizes != ():
                self.graphs = DecodeGraphs(
                    self.model, self.pages, self.capture, self.planner, self._newest_M, config
                )
        self._views = _weight_views(self.model, model_config, config.quantization)
        self.weight_layout = [
            _weight_slot(spec, config.dtype, is_quantized=spec.is_quantized(config.quantization))
            for spec in published_tensors(model_config)
        ]

    @torch.inference_mode()
    def launch(self, rows: RunningRows, schedule: Schedule) -> PendingSample:
        """Begin a step: its keys into the pages, a token for each row that samples.

        The rows must not be told of the step before this returns.
        """
        if self.graphs is not None and self.graphs.fits(schedule):
            return self.graphs.launch(rows, schedule)
        batch = build_batch(rows, schedule, self._staging, self.planner)
        if batch.has_pending:
            newest_T = self._newest_M[batch.rows_T]
            batch.input_ids_T = torch.where(
                batch.input_ids_T == PENDING, newest_T, batch.input_ids_T
            )
        tokens = sample(self.forward(batch), batch.sampling)
        self._newest_M[batch.sampling.rows_S] = tokens.ids_R
        return PendingSample(pack(tokens), len(tokens.ids_R))

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Tensor:
        """Compute the step, its keys into the pages; returns the logits to sample from, [S, V]."""
        hidden_TC = self.model(batch.input_ids_T, batch.paged, self.pages, self.capture)
        return self.model.logits(hidden_TC[batch.last_token_S])

    def captured(self, pages: list[int], count: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        """(routing, blocks) of the first `count` tokens in `pages`; None where not captured."""
        if self.capture is None:
            return None, None
        offsets = torch.arange(count, device=self.device)
        page_N = torch.tensor(pages, dtype=torch.int64, device=self.device)
        slots = page_N[offsets // self.page_size] * self.page_size + offsets % self.page_size
        routing, blocks = self.capture.routing, self.capture.blocks
        return (
            None if routing is None else routing[slots].cpu().numpy(),
            None if blocks is None else blocks[slots].to(torch.int32).cpu().numpy(),
        )

    @torch.no_grad()
    def write_weight(self, slot: WeightSlot, bounds: Bounds, tensor: Tensor | MXFP8Tensor) -> None:
        """Copy a rectangle of a published tensor to where the runtime keeps it, or quantise it
        there.

        Raises:
            WeightLoadError: values given in MXFP8 hold NaN. What is quantised here is looked at by
                `unusable_weights`, so that the host need not wait for each write.
        """
        view = self._views[slot.name]
        if not isinstance(view, MXFP8Tensor):
            assert isinstance(tensor, Tensor), "checked by check_rectangle"
            view[_slices(bounds)].copy_(tensor)
            return
        part = _rectangle(view, bounds)
        if not isinstance(tensor, MXFP8Tensor):
            quantize_into(tensor.to(self.device), part)
            return
        part.values.copy_(tensor.values)
        part.scale.copy_(tensor.scale)
        if bool(((part.values.view(torch.uint8) & 0x7F) == 0x7F).any()):
            raise WeightLoadError(f"{slot.name}: the MXFP8 values at {bounds} hold NaN")

    def unusable_weights(self) -> list[str]:
        """Names of weights in MXFP8 with a block that was not finite, or is too large to serve."""
        state = self.model.state_dict()
        scales = [tensor.amax() for name, tensor in state.items() if name.endswith("_scale")]
        if not scales or int(torch.stack(scales).amax()) <= MAX_SCALE:
            return []
        return [
            name
            for name, view in self._views.items()
            if isinstance(view, MXFP8Tensor) and int(view.scale.amax()) > MAX_SCALE
        ]

    def hash_weights(self) -> dict[str, int]:
        """Hash of every published tensor as it lies in the runtime's parameters.

        That of a tensor in MXFP8 is over its stored bytes, see `mxfp8.hash_tensor`.
        """
        return {
            name: hash_tensor(view, name=name)
            if isinstance(view, MXFP8Tensor)
            else tensor_hash(view, name=name)
            for name, view in self._views.items()
        }


def _slices(bounds: Bounds) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in bounds)


def _rectangle(weight: MXFP8Tensor, bounds: Bounds) -> MXFP8Tensor:
    """A rectangle that cuts no block, in the same memory."""
    *outer, (start, stop) = bounds
    scale_bounds = (*outer, (start // BLOCK_SIZE, stop // BLOCK_SIZE))
    return MXFP8Tensor(weight.values[_slices(bounds)], weight.scale[_slices(scale_bounds)])


def _weight_slot(spec: TensorSpec, dtype: str, *, is_quantized: bool) -> WeightSlot:
    if is_quantized:
        dtype = "bfloat16"
    return WeightSlot(
        name=spec.name,
        dtype="float32" if spec.is_fp32 else dtype,
        shape=spec.shape,
        bounds=tuple((0, size) for size in spec.shape),
        bucket=spec.bucket,
        storage="mxfp8" if is_quantized else "plain",
    )


def _weight_views(
    model: MiniMaxM3, config: ModelConfig, quantization: str
) -> dict[str, Tensor | MXFP8Tensor]:
    """Published name -> view into the parameters; together they are all of the parameters."""
    state = model.state_dict()
    placement = runtime_placement(config)
    views: dict[str, Tensor | MXFP8Tensor] = {}
    num_unplaced = {param: tensor.numel() for param, tensor in state.items()}
    for spec in published_tensors(config):
        place = placement[spec.name]
        shape = tuple(place.view(state).shape)
        assert shape == spec.shape, f"{spec.name} lies in {shape}"
        if spec.is_quantized(quantization):
            view = place.quantized_view(state)
            views[spec.name] = view
            num_unplaced[f"{place.param}_scale"] -= view.scale.numel()
        else:
            views[spec.name] = place.view(state)
        num_unplaced[place.param] -= math.prod(spec.shape)
    for param, count in num_unplaced.items():
        assert count == 0, f"published tensors leave {count} places of {param} or fill them twice"
    return views


def _make_planner(model: ModelConfig, config: EngineConfig, device: torch.device) -> DecodePlanner:
    from inference.kernels.index_select import decode_kernel as index_kernel
    from inference.kernels.paged_attention import decode_kernel as dense_kernel

    num_sms = num_multiprocessors(device)
    num_kv_heads = model.num_key_value_heads
    assert config.page_size is not None, "EngineConfig.resolve fills in the page size"
    return DecodePlanner(
        config.page_size,
        Workers(
            index_kernel.num_workers(num_sms),
            index_kernel.num_shared_workers(num_sms),
        ),
        Workers(
            dense_kernel.num_workers(num_sms, num_kv_heads),
            dense_kernel.num_shared_workers(
                num_sms, num_kv_heads, model.num_attention_heads // num_kv_heads
            ),
        ),
    )


def _allocate_pages(
    model_config: ModelConfig,
    config: EngineConfig,
    is_sparse: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> LayerPages:
    assert config.page_size is not None, "EngineConfig.resolve fills in the page size"
    count, size = config.num_pages, config.page_size
    kv_shape = (count, model_config.num_key_value_heads, size, model_config.head_dim)
    index_shape = (count, size, model_config.index_head_dim)
    kv_dtype = torch.float8_e4m3fn if config.kv_dtype == "float8_e4m3fn" else dtype
    index_dtype = torch.float8_e4m3fn if config.index_dtype == "float8_e4m3fn" else dtype
    return LayerPages(
        k_pages=torch.empty(kv_shape, dtype=kv_dtype, device=device),
        v_pages=torch.empty(kv_shape, dtype=kv_dtype, device=device),
        index_pages=(
            torch.empty(index_shape, dtype=index_dtype, device=device) if is_sparse else None
        ),
    )
