"""One rank of the engine: the model's weights, the paged memory, and a forward pass over both."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from inference.config import SPARSE, ConfigError, EngineConfig, ModelConfig
from inference.engine.batch import StepBatch, build_batch
from inference.engine.coverage import Bounds, WeightSlot
from inference.engine.graphs import DecodeGraphs
from inference.engine.rows import PENDING, RunningRows
from inference.engine.sampler import PendingSample, pack, sample
from inference.engine.scheduler import Schedule
from inference.engine.sharing import DecodePlanner, Workers
from inference.engine.staging import Staging
from inference.kernels.hardware import num_multiprocessors
from inference.kernels.paging import LayerPages
from inference.kernels.tensor_hash import tensor_hash
from inference.models.minimax_m3 import Capture, MiniMaxM3
from inference.models.weights import published_tensors, runtime_placement


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
        self.model = MiniMaxM3(model_config, self.dtype, self.device, config.max_model_len)
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
        self._views = _weight_views(self.model, model_config)
        self.weight_layout = [
            WeightSlot(
                name=spec.name,
                dtype="float32" if spec.is_fp32 else config.dtype,
                shape=spec.shape,
                bounds=tuple((0, size) for size in spec.shape),
                bucket=spec.bucket,
            )
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
    def write_weight(self, slot: WeightSlot, bounds: Bounds, tensor: Tensor) -> None:
        """Copy a rectangle of a published tensor to where the runtime keeps it."""
        self._views[slot.name][_slices(bounds)].copy_(tensor)

    def hash_weights(self) -> dict[str, int]:
        """Hash of every published tensor as it lies in the runtime's parameters."""
        return {name: tensor_hash(view, name=name) for name, view in self._views.items()}


def _slices(bounds: Bounds) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in bounds)


def _weight_views(model: MiniMaxM3, config: ModelConfig) -> dict[str, Tensor]:
    """Published name -> view into the parameters; together they are all of the parameters."""
    state = model.state_dict()
    placement = runtime_placement(config)
    views = {spec.name: placement[spec.name].view(state) for spec in published_tensors(config)}
    placed = dict.fromkeys(state, 0)
    for spec in published_tensors(config):
        view = views[spec.name]
        assert tuple(view.shape) == spec.shape, f"{spec.name} lies in {tuple(view.shape)}"
        placed[placement[spec.name].param] += view.numel()
    for param, count in placed.items():
        assert count == state[param].numel(), f"published tensors fill {count} places of {param}"
    return views


def _make_planner(model: ModelConfig, config: EngineConfig, device: torch.device) -> DecodePlanner:
    from inference.kernels.index_select import decode_kernel as index_kernel
    from inference.kernels.paged_attention import decode_kernel as dense_kernel

    num_sms = num_multiprocessors(device)
    num_kv_heads = model.num_key_value_heads
    is_fp8 = config.index_dtype == "float8_e4m3fn"
    assert config.page_size is not None, "EngineConfig.resolve fills in the page size"
    return DecodePlanner(
        config.page_size,
        Workers(
            index_kernel.num_workers(num_sms, is_fp8=is_fp8),
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
