"""Experts in BF16: all 128 on one GPU, or the 16 that one of eight ranks has; router; a layer."""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.harness import (
    Bench,
    Pool,
    Timing,
    floor_us,
    relative_error,
    time_eager,
    time_graph,
)
from inference.kernels.expert_gemm import expert_gemm, reference
from inference.kernels.router import router

HIDDEN, WIDTH, EXPERTS, TOPK = 6144, 3072, 128, 4
EXPERT_BYTES = 3 * WIDTH * HIDDEN * 2
FLOP_PER_PAIR = 6.0 * WIDTH * HIDDEN
ACT = {"alpha": 1.702, "limit": 7.0, "beta": 1.0}
VLLM = "vllm 0.26.0"
TOKENS = (1, 4, 8, 32, 128, 256, 512, 1024, 2048, 4096)
MOST_IN_GRAPH = 512
"""More tokens than that are prefill, which runs eagerly."""
CALLS_AT_ONCE = 4
"""Of those, so that Python runs ahead of the GPU as it does in a prefill."""
NUM_CHECKED = 96
TOLERANCE = {"relative error": 1e-2}
NUM_COMPILERS = 8


@dataclass(slots=True)
class Peer:
    """vLLM's experts: `call(x_TC, ids_TA, weights_TA, num_local)` within `context(num_tokens)`."""

    call: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    context: Callable[[int], AbstractContextManager[object]]


@dataclass(slots=True)
class Case:
    """Tokens routed over all experts; those not among the first `num_local` are another rank's."""

    x_TC: Tensor
    all_ids_TA: Tensor
    weights_TA: Tensor
    num_local: int

    @property
    def ids_TA(self) -> Tensor:
        return torch.where(self.all_ids_TA < self.num_local, self.all_ids_TA, -1)


def make_case(num_tokens: int, num_local: int, seed: int) -> Case:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x_TC = torch.randn(num_tokens, HIDDEN, device="cuda", generator=generator).bfloat16()
    order = torch.rand(num_tokens, EXPERTS, device="cuda", generator=generator)
    share_TA = torch.rand(num_tokens, TOPK, device="cuda", generator=generator)
    weights_TA = 2 * share_TA / share_TA.sum(-1, keepdim=True)
    return Case(x_TC, order.topk(TOPK).indices.int(), weights_TA, num_local)


def run(bench: Bench) -> None:
    peer: Peer | None = None
    if "vllm" in bench.peers:
        w13, w2, peer = _vllm_experts()
    else:
        pool = Pool(0)
        w13 = pool.normal(EXPERTS, 2 * WIDTH, HIDDEN).mul_(0.02)
        w2 = pool.normal(EXPERTS, HIDDEN, WIDTH).mul_(0.02)
    _compile(w13, w2)
    for num_local in (EXPERTS, EXPERTS // 8):
        for num_tokens in TOKENS:
            name = f"T{num_tokens}" + (f" {num_local} of {EXPERTS}" if num_local < EXPERTS else "")
            args = bench, name, w13, w2, num_tokens, num_local, peer
            bench.case(name, partial(_run_beside_peer, *args))
    for num_tokens in (1, 128, 8192):
        bench.case(f"router T{num_tokens}", lambda n=num_tokens: _run_router(bench, n))
    for num_tokens in (1, 8, 32):
        bench.case(f"layer T{num_tokens}", lambda n=num_tokens: _run_layer(bench, w13, w2, n))


def _compile(w13: Tensor, w2: Tensor) -> None:
    """Kernels of all cases at the same time; what fails to compile fails again in its case."""

    def call(num_tokens: int, num_local: int, shared: tuple[Tensor, Tensor] | None) -> None:
        case = make_case(num_tokens, num_local, 0)
        args = case.x_TC, w13[:num_local], w2[:num_local], case.ids_TA, case.weights_TA
        expert_gemm(*args, **ACT, shared=shared, num_routed=EXPERTS)

    with ThreadPoolExecutor(NUM_COMPILERS) as pool:
        for num_tokens in (1, 8, 32):
            pool.submit(call, num_tokens, EXPERTS, (w13[0], w2[0]))
        for num_tokens in TOKENS:
            for num_local in (EXPERTS, EXPERTS // 8):
                pool.submit(call, num_tokens, num_local, None)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def _run_beside_peer(
    bench: Bench,
    name: str,
    w13: Tensor,
    w2: Tensor,
    num_tokens: int,
    num_local: int,
    peer: Peer | None,
) -> None:
    with nullcontext() if peer is None else peer.context(num_tokens):
        _run(bench, name, w13, w2, num_tokens, num_local, peer)


def _run(
    bench: Bench,
    name: str,
    w13: Tensor,
    w2: Tensor,
    num_tokens: int,
    num_local: int,
    peer: Peer | None,
) -> None:
    w13, w2 = w13[:num_local], w2[:num_local]
    # One token of a rank often meets none of its experts: more draws, a steadier mean.
    count = 2 if num_tokens > 32 else 6 if num_local == EXPERTS else 32
    cases = [make_case(num_tokens, num_local, seed) for seed in range(count)]
    local_ids = [case.ids_TA for case in cases]

    def ours(i: int) -> Tensor:
        args = cases[i].x_TC, w13, w2, local_ids[i], cases[i].weights_TA
        return expert_gemm(*args, **ACT, num_routed=EXPERTS)

    def theirs(i: int) -> Tensor:
        assert peer is not None
        return peer.call(cases[i].x_TC, cases[i].all_ids_TA, cases[i].weights_TA, num_local)

    rows = torch.arange(num_tokens, device="cuda")[:: max(1, num_tokens // NUM_CHECKED)]
    errors, peer_errors = [], []
    for i in range(min(count, 2)):
        wanted = reference.expert_gemm(
            cases[i].x_TC[rows],
            w13,
            w2,
            local_ids[i][rows],
            cases[i].weights_TA[rows],
            *ACT.values(),
        )
        errors.append(relative_error(ours(i)[rows], wanted))
        if peer is not None:
            peer_errors.append(relative_error(theirs(i)[rows], wanted))
    hit = sum(int(ids[ids >= 0].unique().numel()) for ids in local_ids) / count
    pairs = sum(int((ids >= 0).sum()) for ids in local_ids) / count
    timing = time_calls(ours, num_tokens, count)
    value = {
        "weights_tb_s": hit * EXPERT_BYTES / timing.us / 1e6,
        "tflop_s": pairs * FLOP_PER_PAIR / timing.us / 1e6,
    }
    if peer_errors:
        value["peer_error"] = max(peer_errors)
    bench.record(
        "moe_bf16",
        name,
        timing,
        correct={"relative error": max(errors)},
        tolerance=TOLERANCE,
        floor=floor_us(hit * EXPERT_BYTES + num_tokens * HIDDEN * 4, pairs * FLOP_PER_PAIR),
        peer=None if peer is None else (VLLM, time_calls(theirs, num_tokens, count).us),
        value=value,
    )


def time_calls(call: Callable[[int], Tensor], num_tokens: int, count: int) -> Timing:
    if num_tokens <= MOST_IN_GRAPH:
        return time_graph([lambda i=i: call(i) for i in range(count)], reps=11)
    timing = time_eager(lambda: [call(i % count) for i in range(CALLS_AT_ONCE)], reps=9)
    return Timing(*(us / CALLS_AT_ONCE for us in (timing.us, timing.p10, timing.p90)))


def _run_router(bench: Bench, num_tokens: int) -> None:
    generator = torch.Generator(device="cuda").manual_seed(num_tokens)
    x_TC = torch.randn(num_tokens, HIDDEN, device="cuda", generator=generator).bfloat16()
    weight_EC = torch.randn(EXPERTS, HIDDEN, device="cuda", generator=generator) / HIDDEN**0.5
    bias_E = torch.randn(EXPERTS, device="cuda", generator=generator) * 0.1

    def ours() -> tuple[Tensor, Tensor]:
        return router(x_TC, weight_EC, bias_E, topk=TOPK, scale=2.0)

    weights_TA, ids_TA = ours()
    score_TE = (x_TC.double() @ weight_EC.double().T).sigmoid()
    ranked = (score_TE + bias_E.double()).sort(-1, descending=True)
    is_clear_T = (ranked.values[:, :TOPK] - ranked.values[:, 1 : TOPK + 1] > 2e-6).all(-1)
    is_other_T = (ids_TA != ranked.indices[:, :TOPK]).any(-1) & is_clear_T
    chosen_TA = score_TE.gather(-1, ids_TA.long())
    wanted_TA = 2 * chosen_TA / chosen_TA.sum(-1, keepdim=True)
    bench.record(
        "moe_bf16",
        f"router T{num_tokens}",
        time_graph([ours] * 4) if num_tokens <= MOST_IN_GRAPH else time_eager(ours),
        correct={
            "relative error": relative_error(weights_TA, wanted_TA),
            "rows that choose otherwise": float(is_other_T.sum()),
        },
        tolerance={"relative error": 2e-6, "rows that choose otherwise": 0.0},
        floor=floor_us(
            EXPERTS * HIDDEN * 4 + num_tokens * HIDDEN * 2, 6.0 * num_tokens * HIDDEN * EXPERTS
        ),
    )


def _run_layer(bench: Bench, w13: Tensor, w2: Tensor, num_tokens: int) -> None:
    """Router, routed experts and the shared one, as a decode step runs them."""
    generator = torch.Generator(device="cuda").manual_seed(num_tokens)
    x_TC = torch.randn(num_tokens, HIDDEN, device="cuda", generator=generator).bfloat16()
    bias_E = torch.zeros(EXPERTS, device="cuda")
    shared = w13[-1].clone(), w2[-1].clone()
    # Several layers' routers choose different experts.
    gates = [
        torch.randn(EXPERTS, HIDDEN, device="cuda", generator=generator) / HIDDEN**0.5
        for _ in range(6)
    ]

    def ours(i: int) -> tuple[Tensor, Tensor, Tensor]:
        weights_TA, ids_TA = router(x_TC, gates[i], bias_E, topk=TOPK, scale=2.0)
        out_TC = expert_gemm(x_TC, w13, w2, ids_TA, weights_TA, **ACT, shared=shared)
        return out_TC, ids_TA, weights_TA

    found = [ours(i) for i in range(len(gates))]
    out_TC, ids_TA, weights_TA = found[0]
    wanted = reference.expert_gemm(x_TC, w13, w2, ids_TA, weights_TA, *ACT.values(), shared)
    hit = sum(int(ids.unique().numel()) for _, ids, _ in found) / len(gates)
    bench.record(
        "moe_bf16",
        f"layer T{num_tokens}",
        time_graph([lambda i=i: ours(i) for i in range(len(gates))], reps=11),
        correct={"relative error": relative_error(out_TC, wanted)},
        tolerance=TOLERANCE,
        floor=floor_us((hit + 1) * EXPERT_BYTES + EXPERTS * HIDDEN * 4),
    )


def _vllm_experts() -> tuple[Tensor, Tensor, Peer]:
    """(w13, w2, call) of vLLM's M3 layer: its Triton experts over the same weights."""
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_DEEP_GEMM": "0"}
    os.environ.update(offline)
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.models.minimax_m3.nvidia.model import MiniMaxM3MoE
    from vllm.v1.worker.workspace import init_workspace_manager

    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(vllm_config()))
    config = EngineArgs(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        block_size=128,
        max_model_len=8192,
        max_num_batched_tokens=8192,
    ).create_engine_config()
    device = torch.device("cuda:0")
    with set_current_vllm_config(config):
        address = f"tcp://127.0.0.1:{random.randint(20000, 40000)}"
        init_distributed_environment(1, 0, address, 0, "nccl")
        ensure_model_parallel_initialized(1, 1)
        init_workspace_manager(device, 1)
        torch.set_default_dtype(torch.bfloat16)
        with device:
            layer = MiniMaxM3MoE(
                config=config.model_config.hf_text_config,
                layer_id=3,
                quant_config=None,
                prefix="model.layers.3.block_sparse_moe",
            )
        process_weights_after_loading(layer, config.model_config, device)
        torch.set_default_dtype(torch.float32)
    experts: Any = layer.experts.routed_experts
    w13, w2 = experts.w13_weight.data, experts.w2_weight.data
    for weight in (w13, w2):
        flat = weight.view(-1)
        for first in range(0, flat.numel(), 1 << 29):
            flat[first : first + (1 << 29)].normal_(0, 0.02)
    local_map = torch.full((EXPERTS,), -1, dtype=torch.int32, device=device)

    def call(x_TC: Tensor, ids_TA: Tensor, weights_TA: Tensor, num_local: int) -> Tensor:
        expert_map = None
        if num_local < EXPERTS:
            expert_map = local_map
        out: Tensor = experts.quant_method.moe_kernel.apply(
            hidden_states=x_TC,
            w1=w13[:num_local],
            w2=w2[:num_local],
            topk_weights=weights_TA,
            topk_ids=ids_TA,
            activation=experts.activation,
            global_num_experts=EXPERTS,
            expert_map=expert_map,
            apply_router_weight_on_input=False,
        )
        return out

    def context(num_tokens: int) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(set_current_vllm_config(config))
        stack.enter_context(set_forward_context(None, config, num_tokens=num_tokens))
        return stack

    local_map[: EXPERTS // 8] = torch.arange(EXPERTS // 8, dtype=torch.int32, device=device)
    return w13, w2, Peer(call, context)


def vllm_config() -> dict[str, Any]:
    """M3's published configuration, four layers of it."""
    is_sparse = [0, 0, 0, 1]
    text = {
        "model_type": "minimax_m3_text",
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "vocab_size": 200064,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "dense_intermediate_size": 12288,
        "shared_intermediate_size": WIDTH,
        "num_hidden_layers": len(is_sparse),
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 1048576,
        "rope_theta": 5000000,
        "rotary_dim": 64,
        "partial_rotary_factor": 0.5,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": TOPK,
        "num_mtp_modules": 0,
        "moe_layer_freq": is_sparse,
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_index_dim": 128,
            "sparse_num_index_heads": 4,
            "sparse_topk_blocks": 16,
            "sparse_block_size": 128,
            "sparse_disable_index_value": is_sparse,
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_attention_freq": is_sparse,
        },
    }
    return {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "model_type": "minimax_m3_vl",
        "torch_dtype": "bfloat16",
        "text_config": text,
    }
