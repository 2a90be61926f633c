"""python -m benchmarks.moe [--peers vllm] [--seconds N]

Experts in MXFP8 at M3's shapes on one GPU: all 128, or the 16 that one of eight ranks has; and a
whole MoE block beside its matrix products. The peer is vLLM's Marlin on the same weights.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.harness import Bench, floor_us, relative_error, time_graph
from benchmarks.kernels.moe import (
    ACT,
    EXPERTS,
    FLOP_PER_PAIR,
    HIDDEN,
    NUM_COMPILERS,
    TOPK,
    VLLM,
    WIDTH,
    Case,
    Peer,
    make_case,
    time_calls,
    vllm_config,
)
from benchmarks.record import RESULTS
from inference.kernels.expert_gemm import expert_gemm, reference
from inference.kernels.mxfp8 import MXFP8Tensor, quantize
from inference.kernels.router import router

BENCH = "moe_mxfp8"
EXPERT_BYTES = 3 * WIDTH * HIDDEN * 33 / 32
SHARED_BYTES = 3 * WIDTH * HIDDEN * 2
TOKENS = (1, 4, 8, 32, 128, 256, 512, 1024, 2048, 4096, 8192)
BLOCK_TOKENS = 128
NUM_CHECKED = 24
TOLERANCE = {"relative error": 1e-2}
SEEDS_OF_BLOCK = 4


def make_weight(*shape: int, seed: int) -> MXFP8Tensor:
    """Quantised normal values with a deviation of 0.02, [E, N, K]."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    values = torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda")
    scale = torch.empty(*shape[:-1], shape[-1] // 32, dtype=torch.uint8, device="cuda")
    for i in range(shape[0]):
        wide = torch.randn(shape[1:], device="cuda", generator=generator).mul_(0.02).bfloat16()
        values[i], scale[i] = quantize(wide)
    return MXFP8Tensor(values, scale)


def first(weight: MXFP8Tensor, num_experts: int) -> MXFP8Tensor:
    return MXFP8Tensor(*(part[:num_experts] for part in weight))


def run(bench: Bench) -> None:
    w13 = make_weight(EXPERTS, 2 * WIDTH, HIDDEN, seed=0)
    w2 = make_weight(EXPERTS, HIDDEN, WIDTH, seed=1)
    peer: Peer | None = None
    with _compiling(w13, w2), bench.peer_part("vllm"):
        if "vllm" in bench.peers:
            peer = _marlin(w13, w2)
    for num_local in (EXPERTS, EXPERTS // 8):
        for num_tokens in TOKENS:
            name = f"T{num_tokens}" + (f" {num_local} of {EXPERTS}" if num_local < EXPERTS else "")
            weights = first(w13, num_local), first(w2, num_local)
            bench.case(name, partial(_run, bench, name, *weights, num_tokens, peer))
    bench.case(f"block T{BLOCK_TOKENS}", lambda: _run_block(bench, w13, w2))


def _ours(case: Case, w13: MXFP8Tensor, w2: MXFP8Tensor) -> Tensor:
    return expert_gemm(case.x_TC, w13, w2, case.ids_TA, case.weights_TA, **ACT, num_routed=EXPERTS)


@contextmanager
def _compiling(w13: MXFP8Tensor, w2: MXFP8Tensor) -> Iterator[None]:
    """Kernels of all cases at the same time; what fails to compile fails again in its case."""
    sizes = [(num_tokens, local) for local in (EXPERTS, EXPERTS // 8) for num_tokens in TOKENS]
    # Made here: what the peer does to torch's default dtype meanwhile must not reach them.
    cases = [make_case(*size, seed=0) for size in sizes]
    with ThreadPoolExecutor(NUM_COMPILERS) as pool:
        for case in cases:
            pool.submit(_ours, case, first(w13, case.num_local), first(w2, case.num_local))
        yield
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def _run(
    bench: Bench,
    name: str,
    w13: MXFP8Tensor,
    w2: MXFP8Tensor,
    num_tokens: int,
    peer: Peer | None,
) -> None:
    num_local = w13.shape[0]
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
    errors, value = [], {}
    peer_timing: tuple[str, float] | None = None
    for i in range(2):
        wanted = _wanted(cases[i], w13, w2, local_ids[i], rows)
        errors.append(relative_error(ours(i)[rows], wanted))
    timing = time_calls(ours, num_tokens, count)
    if peer is not None:
        with bench.peer_part(name), peer.context(num_tokens):
            # Of the last case's tokens.
            value["peer_error"] = relative_error(theirs(1)[rows], wanted)
            peer_timing = VLLM + " Marlin", time_calls(theirs, num_tokens, count).us
    hit = sum(int(ids[ids >= 0].unique().numel()) for ids in local_ids) / count
    pairs = sum(int((ids >= 0).sum()) for ids in local_ids) / count
    bench.record(
        BENCH,
        name,
        timing,
        correct={"relative error": max(errors)},
        tolerance=TOLERANCE,
        floor=floor_us(hit * EXPERT_BYTES + num_tokens * HIDDEN * 4, pairs * FLOP_PER_PAIR),
        peer=peer_timing,
        value=value
        | {
            "weights_tb_s": hit * EXPERT_BYTES / timing.us / 1e6,
            "tflop_s": pairs * FLOP_PER_PAIR / timing.us / 1e6,
        },
    )


def _wanted(case: Case, w13: MXFP8Tensor, w2: MXFP8Tensor, ids_TA: Tensor, rows: Tensor) -> Tensor:
    args = case.x_TC[rows], w13, w2, ids_TA[rows], case.weights_TA[rows]
    return reference.expert_gemm(*args, *ACT.values())


def _run_block(bench: Bench, w13: MXFP8Tensor, w2: MXFP8Tensor) -> None:
    """Router, routed experts and a shared one in BF16, beside the products alone."""
    from inference.kernels.expert_gemm.align_kernel import align
    from inference.kernels.expert_gemm.kernel import shared_mlp
    from inference.kernels.expert_gemm.mxfp8_decode_hopper_kernel import config_for, products

    generator = torch.Generator(device="cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    x_TC = normal(BLOCK_TOKENS, HIDDEN).bfloat16()
    shared = (
        normal(2 * WIDTH, HIDDEN).mul_(0.02).bfloat16(),
        normal(HIDDEN, WIDTH).mul_(0.02).bfloat16(),
    )
    bias_E = torch.zeros(EXPERTS, device="cuda")
    # Several layers' routers choose different experts.
    gates = [normal(EXPERTS, HIDDEN) / HIDDEN**0.5 for _ in range(SEEDS_OF_BLOCK)]
    config = config_for(BLOCK_TOKENS, TOPK, EXPERTS)

    def block(i: int) -> tuple[Tensor, Tensor, Tensor]:
        weights_TA, ids_TA = router(x_TC, gates[i], bias_E, topk=TOPK, scale=2.0)
        out_TC = expert_gemm(x_TC, w13, w2, ids_TA, weights_TA, **ACT, shared=shared)
        return out_TC, ids_TA, weights_TA

    found = [block(i) for i in range(SEEDS_OF_BLOCK)]
    plans = [align(ids_TA, EXPERTS, config.tokens, use_pdl=False) for _, ids_TA, _ in found]

    def gemms(i: int) -> tuple[Tensor, Tensor | None]:
        _, ids_TA, weights_TA = found[i]
        add_TC = shared_mlp(x_TC, shared, **ACT)
        args = x_TC, w13, w2, ids_TA, weights_TA, plans[i]
        return products(*args, *ACT.values(), None, config), add_TC

    out_TC, ids_TA, weights_TA = found[0]
    rows = torch.arange(0, BLOCK_TOKENS, BLOCK_TOKENS // NUM_CHECKED, device="cuda")
    args = x_TC[rows], w13, w2, ids_TA[rows], weights_TA[rows]
    wanted = reference.expert_gemm(*args, *ACT.values(), shared)
    hit = sum(int(ids.unique().numel()) for _, ids, _ in found) / len(found)
    alone = time_graph([partial(gemms, i) for i in range(SEEDS_OF_BLOCK)], reps=11)
    timing = time_graph([partial(block, i) for i in range(SEEDS_OF_BLOCK)], reps=11)
    bench.record(
        BENCH,
        f"block T{BLOCK_TOKENS}",
        timing,
        correct={"relative error": relative_error(out_TC[rows], wanted)},
        tolerance=TOLERANCE,
        floor=floor_us(hit * EXPERT_BYTES + SHARED_BYTES + EXPERTS * HIDDEN * 4),
        value={"products_us": alone.us, "x_products": timing.us / alone.us},
    )


def _marlin(w13: MXFP8Tensor, w2: MXFP8Tensor) -> Peer:
    """vLLM's M3 experts with these weights, as it packs them on Hopper."""
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
    quantization = {
        "quant_method": "mxfp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [1, 32],
        "ignored_layers": ["lm_head", "embed_tokens"],
    }
    (folder / "config.json").write_text(
        json.dumps(vllm_config() | {"quantization_config": quantization})
    )
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
                quant_config=config.quant_config,
                prefix="model.layers.3.block_sparse_moe",
            )
        experts: Any = layer.experts.routed_experts
        for name, weight in (("w13_weight", w13), ("w2_weight", w2)):
            getattr(experts, name).data.copy_(weight.values)
            getattr(experts, f"{name}_scale").data.copy_(weight.scale)
        process_weights_after_loading(layer, config.model_config, device)
        torch.set_default_dtype(torch.float32)
    local_map = torch.full((EXPERTS,), -1, dtype=torch.int32, device=device)
    local_map[: EXPERTS // 8] = torch.arange(EXPERTS // 8, dtype=torch.int32, device=device)

    def call(x_TC: Tensor, ids_TA: Tensor, weights_TA: Tensor, num_local: int) -> Tensor:
        out: Tensor = experts.quant_method.moe_kernel.apply(
            hidden_states=x_TC,
            w1=experts.w13_weight[:num_local],
            w2=experts.w2_weight[:num_local],
            topk_weights=weights_TA,
            topk_ids=ids_TA,
            activation=experts.activation,
            global_num_experts=EXPERTS,
            expert_map=local_map if num_local < EXPERTS else None,
            apply_router_weight_on_input=False,
        )
        return out

    def context(num_tokens: int) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(set_current_vllm_config(config))
        stack.enter_context(set_forward_context(None, config, num_tokens=num_tokens))
        return stack

    return Peer(call, context)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.moe", description=__doc__)
    parser.add_argument("--peers", nargs="*", choices=("vllm",), default=())
    parser.add_argument("--seconds", type=float, default=180.0, help="most of all cases")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("experts are timed on a CUDA device, and there is none")
    bench = Bench(args.seconds, args.results, args.peers)
    run(bench)
    print(bench.summary(), flush=True)
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
