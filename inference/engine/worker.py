"""One rank of the engine: the model's weights, the paged memory, and a forward pass over both."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inference.config import SPARSE, ConfigError, EngineConfig, ModelConfig
from inference.engine.batch import StepBatch, build_batch, padding_batch
from inference.engine.graphs import DecodeGraphs
from inference.engine.rows import PENDING, RunningRows
from inference.engine.sampler import PendingSample, pack, sample
from inference.engine.scheduler import Schedule, empty_schedule
from inference.engine.sharing import DecodePlanner, Workers
from inference.engine.staging import Staging
from inference.engine.weights import WeightMemory
from inference.kernels.hardware import num_multiprocessors
from inference.kernels.paging import LayerPages
from inference.models.minimax_m3 import Capture, MiniMaxM3
from inference.parallel.config import ParallelConfig, local_config
from inference.parallel.groups import ParallelGroups


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks know of the next step, with several dp groups."""

    max_tokens: int
    """Of any group; 0: nobody launches a step."""
    graph_rows: int | None
    """Rows of the largest group, if all replay the graph of its size; None: nobody replays one."""
    shares: bool
    """Whether any group has requests that share pages."""


class Worker:
    """Holds everything that lives on the device. `config` is resolved for `model_config`."""

    def __init__(
        self,
        model_config: ModelConfig,
        config: EngineConfig,
        groups: ParallelGroups | None = None,
    ) -> None:
        assert config.page_size is not None, "EngineConfig.resolve fills in the page size"
        assert config.max_model_len is not None, "EngineConfig.resolve fills in the length"
        self.device = torch.device(config.device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                f"device={config.device!r}: torch {torch.__version__} sees no CUDA device; use "
                "device='cpu', or install a CUDA build of torch on a machine with a GPU"
            )
        parallel = ParallelConfig() if groups is None else groups.config
        parallel.check(model_config, config.quantization)
        self._groups = groups
        self.is_dp = parallel.dp > 1
        self._agreed: Agreement | None = None
        self.wait_for: Callable[[torch.cuda.Event], None] | None = None
        """Waits for the device; with several ranks it ends when one of them does."""
        if groups is not None:
            if groups.is_nccl and self.device.type == "cpu":
                raise ConfigError(
                    "device='cpu', but the ranks talk over NCCL; use device='cuda', or "
                    "ParallelGroups.create(..., backend='gloo')"
                )
            self.wait_for = functools.partial(groups.wait_for_device, what="a step")
            alike = dataclasses.replace(config, device=self.device.type)
            groups.expect_alike((model_config, alike), "the model's and the engine's configuration")
        local = local_config(model_config, parallel)
        self.dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
        self.model = MiniMaxM3(
            model_config, self.dtype, self.device, config.max_model_len, config.quantization, groups
        )
        self.pages = [
            _allocate_pages(local, config, kind == SPARSE, self.dtype, self.device)
            for kind in model_config.layer_types
        ]
        self.capture: Capture | None = None
        if config.capture_routing or config.capture_blocks:
            self.capture = Capture.allocate(
                local,
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
            self.planner = _make_planner(local, config, self.device)
            if config.cuda_graph_sizes != ():
                self.graphs = DecodeGraphs(
                    self.model,
                    self.pages,
                    self.capture,
                    self.planner,
                    self._newest_M,
                    config,
                    self.wait_for,
                )
        self.weights = WeightMemory(
            self.model, model_config, config, parallel, 0 if groups is None else groups.rank
        )

    def has_anybody(self, has_here: bool) -> bool:
        """Whether any dp group has what `has_here` says of this one; waits for the others."""
        if not self.is_dp:
            return has_here
        assert self._groups is not None, "dp needs ranks"
        return bool(self._groups.agree([int(has_here)], "agreement")[0])

    def agree(self, rows: RunningRows, schedule: Schedule | None, *, has_requests: bool) -> bool:
        """Learn what all dp groups do in the next step, which each must then launch.

        Returns:
            Whether any of them has requests.
        """
        assert self._groups is not None, "dp needs ranks"
        num_tokens = num_rows = shares = 0
        fits = self.graphs is not None
        if schedule is not None:
            num_tokens, num_rows = int(schedule.num_new_R.sum()), len(schedule.rows_R)
            fits = self.graphs is not None and self.graphs.fits(schedule)
            if fits and self.planner is not None:
                shares = int(self.planner.groups(rows, schedule.rows_R) is not None)
        numbers = [int(has_requests), num_tokens, num_rows, int(not fits), shares]
        most = self._groups.agree(numbers, "agreement on a step")
        self._agreed = Agreement(most[1], None if most[3] else most[2], bool(most[4]))
        return bool(most[0])

    @torch.inference_mode()
    def launch(self, rows: RunningRows, schedule: Schedule) -> PendingSample:
        """Begin a step: its keys into the pages, a token for each row that samples.

        The rows must not be told of the step before this returns.
        """
        agreed = self._agreed
        uses_graph = self.graphs is not None and self.graphs.fits(schedule)
        if agreed is not None:
            uses_graph = agreed.graph_rows is not None
        if uses_graph:
            return self._replay(rows, schedule)
        batch = build_batch(rows, schedule, self._staging, self.planner)
        if agreed is not None:
            batch.max_tokens = agreed.max_tokens
        if batch.has_pending:
            newest_T = self._newest_M[batch.rows_T]
            batch.input_ids_T = torch.where(
                batch.input_ids_T == PENDING, newest_T, batch.input_ids_T
            )
        tokens = sample(self.forward(batch), batch.sampling)
        self._newest_M[batch.sampling.rows_S] = tokens.ids_R
        return PendingSample(pack(tokens), len(tokens.ids_R), self.wait_for)

    @torch.inference_mode()
    def launch_empty(self, rows: RunningRows) -> None:
        """Take part in the step that `agree` was about, if anybody launches one, on padding."""
        agreed = self._agreed
        assert agreed is not None, "the groups have agreed"
        if not agreed.max_tokens:
            return
        if agreed.graph_rows is not None:
            self._replay(rows, empty_schedule())
            return
        ids_T, paged = padding_batch(self._staging, self.page_size, self.planner)
        self.model(ids_T, paged, self.pages, self.capture, max_tokens=agreed.max_tokens)

    def _replay(self, rows: RunningRows, schedule: Schedule) -> PendingSample:
        assert self.graphs is not None, "the caller has checked"
        if self._agreed is None:
            return self.graphs.launch(rows, schedule)
        assert self._agreed.graph_rows is not None, "the groups agreed on a graph"
        return self.graphs.launch(
            rows, schedule, min_rows=self._agreed.graph_rows, shares=self._agreed.shares
        )

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Tensor:
        """Compute the step, its keys into the pages; returns the logits to sample from, [S, V]."""
        hidden_TC = self.model(
            batch.input_ids_T, batch.paged, self.pages, self.capture, max_tokens=batch.max_tokens
        )
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
