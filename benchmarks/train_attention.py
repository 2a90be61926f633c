"""python -m benchmarks.train_attention [--only PART ...] [--cpu] [--seconds N]

What training M3 consists of, at real sizes on one GPU, forward and backward: the attention layer
beside transformers' with SDPA, its sparse core beside dense FlashAttention, the experts beside a
plain matrix product, the log-probabilities of a whole vocabulary, and the index branch's loss.
`--cpu` runs small shapes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import train_index, train_layer
from benchmarks.kernels.harness import Bench, floor_us, relative_error
from benchmarks.record import RESULTS
from benchmarks.train_layer import BENCH
from benchmarks.train_measure import (
    Random,
    as_trained,
    case_name,
    cost_of,
    free_memory,
    make_deterministic_products,
)
from benchmarks.train_shapes import Shapes
from inference.kernels.experts_mlp import experts_mlp
from inference.kernels.experts_mlp import reference as experts_reference
from inference.kernels.index_select_varlen import index_select_varlen
from inference.kernels.index_select_varlen import reference as select_reference
from inference.kernels.msa_varlen import msa_varlen
from inference.kernels.msa_varlen import reference as msa_reference
from inference.kernels.packing import Packing
from m3rl.grpo.logprob import token_logprobs

FLASH = {"cuda": (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)}
"""Dense backends of torch; the CPU has one only."""


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().requires_grad_() for tensor in tensors]


class Core:
    """Selection and sparse attention of one sample, and dense attention of the same heads."""

    def __init__(self, shapes: Shapes, num_tokens: int, seed: int = 0) -> None:
        config, random = shapes.config, Random(shapes.device, shapes.dtype, seed)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.packing = Packing.of([num_tokens], shapes.device)
        self.rule = {
            "block_size": config.index_block_size,
            "topk_blocks": config.index_topk_blocks,
            "local_blocks": config.index_local_blocks,
        }
        self.scale = config.head_dim**-0.5
        self.q, self.grad = (random.normal(num_tokens, heads, config.head_dim) for _ in range(2))
        self.k, self.v = (random.normal(num_tokens, kv_heads, config.head_dim) for _ in range(2))
        self.index_q = random.normal(num_tokens, kv_heads, config.index_head_dim)
        self.index_k = random.normal(num_tokens, config.index_head_dim)

    def select(self) -> Tensor:
        return index_select_varlen(self.index_q, self.index_k, self.packing, **self.rule)

    def attend(self, blocks_TKB: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        size = self.rule["block_size"]
        return msa_varlen(q, k, v, blocks_TKB, self.packing, scale=self.scale, block_size=size)

    def train(self) -> list[Tensor]:
        """Selection, then (out, dq, dk, dv)."""
        inputs = leaves(self.q, self.k, self.v)
        out = self.attend(self.select(), *inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, self.grad)]

    def exact(self, blocks_TKB: Tensor) -> list[Tensor]:
        inputs = leaves(*(x.float() for x in (self.q, self.k, self.v)))
        args = (blocks_TKB, self.packing, self.scale, self.rule["block_size"])
        with sdpa_kernel(SDPBackend.MATH):
            out = msa_reference.msa_varlen(*inputs, *args)
            return [out.detach(), *torch.autograd.grad(out, inputs, self.grad.float())]

    def train_dense(self, backend: SDPBackend) -> list[Tensor]:
        inputs = leaves(*(x.transpose(0, 1)[None] for x in (self.q, self.k, self.v)))
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(
                *inputs, is_causal=True, scale=self.scale, enable_gqa=True
            )
        return list(torch.autograd.grad(out, inputs, self.grad.transpose(0, 1)[None]))


def check_core(shapes: Shapes) -> dict[str, float]:
    """Shares of rows chosen otherwise, and errors against FP32, at a size that fits."""
    core = Core(shapes, shapes.checked_tokens, seed=1)
    blocks_TKB = core.select()
    wanted_TKB = select_reference.index_select_varlen(
        core.index_q, core.index_k, core.packing, *core.rule.values()
    )
    out, *grads = map(relative_error, core.train(), core.exact(blocks_TKB))
    return {
        "rows with other blocks": float((blocks_TKB != wanted_TKB).any(-1).float().mean()),
        "output": out,
        "gradients": max(grads),
    }


CORE_TOLERANCE = {"rows with other blocks": 1e-3, "output": 1e-2, "gradients": 2e-2}


def run_core(bench: Bench, shapes: Shapes) -> None:
    errors: dict[str, float] = {}
    fastest: list[SDPBackend] = list(FLASH.get(shapes.device.type, (SDPBackend.MATH,)))
    bench.case("core, against FP32", lambda: errors.update(check_core(shapes)))
    for num_tokens in shapes.core_tokens if errors else ():
        name = case_name("core", num_tokens)
        bench.case(name, partial(_core_case, bench, shapes, name, num_tokens, errors, fastest))


def _core_case(
    bench: Bench,
    shapes: Shapes,
    name: str,
    num_tokens: int,
    errors: dict[str, float],
    fastest: list[SDPBackend],
) -> None:
    """`fastest`: dense backends; the one found fastest here comes to the front."""
    core, config = Core(shapes, num_tokens), shapes.config
    cost = cost_of(as_trained(core.train), shapes.device)
    select = cost_of(as_trained(core.select), shapes.device)
    blocks_TKB = core.select()
    with torch.no_grad():
        forward = cost_of(
            as_trained(lambda: core.attend(blocks_TKB, core.q, core.k, core.v)), shapes.device
        )
    free_memory()
    tried, reps = (fastest, 5) if num_tokens <= shapes.peer_tokens else (fastest[:1], 2)
    dense = {
        backend: cost_of(partial(core.train_dense, backend), shapes.device, reps)
        for backend in tried
    }
    best = min(dense, key=lambda backend: dense[backend].timing.us)
    fastest.remove(best)
    fastest.insert(0, best)

    keys = config.index_topk_blocks * config.index_block_size
    flop = 4.0 * config.num_attention_heads * config.head_dim * keys * num_tokens
    pairs = num_tokens**2 / 2
    index_flop = 2.0 * config.num_key_value_heads * config.index_head_dim * pairs
    bench.record(
        BENCH,
        name,
        cost.timing,
        correct=errors,
        tolerance=CORE_TOLERANCE,
        # Backward has five products where forward has two.
        floor=shapes.floor_us(3.5 * flop + index_flop),
        peer=("flash-dense", dense[best].timing.us),
        value={
            "select_us": select.timing.us,
            "forward_us": forward.timing.us,
            "forward_tflop_s": flop / forward.timing.us / 1e6,
            "forward_x_flop_floor": forward.timing.us / floor_us(0, flop),
            "peak_gb": cost.peak_gb,
            **{f"{b.name.lower()}_us": found.timing.us for b, found in dense.items()},
        },
    )


class Experts:
    """All experts of a layer and the tokens that go to them."""

    def __init__(self, shapes: Shapes, num_experts: int, num_tokens: int) -> None:
        config, random = shapes.config, Random(shapes.device, shapes.dtype)
        C, I = config.hidden_size, config.intermediate_size
        self.x, self.grad = random.normal(num_tokens, C), random.normal(num_tokens, C)
        self.ids, self.weights = random.choices(num_tokens, num_experts, config.num_experts_per_tok)
        self.gate_up = random.normal(num_experts, 2 * I, C, std=C**-0.5)
        self.down = random.normal(num_experts, C, I, std=I**-0.5)
        self.act = {"alpha": config.swiglu_alpha, "limit": config.swiglu_limit}
        self.flop = 3 * 2.0 * self.ids.numel() * 3 * I * C

    def train(self) -> list[Tensor]:
        """(out, dx, dweights, dgate_up, ddown)."""
        return self._train(experts_mlp, self.x, self.weights, self.gate_up, self.down)

    def exact(self) -> list[Tensor]:
        wide = (x.float() for x in (self.x, self.weights, self.gate_up, self.down))
        return self._train(experts_reference.experts_mlp, *wide)

    def _train(self, op: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
        x, *others = inputs = leaves(*tensors)
        out = op(x, self.ids, *others, **self.act)
        return [out.detach(), *torch.autograd.grad(out, inputs, self.grad.to(out.dtype))]


def run_experts(bench: Bench, shapes: Shapes) -> None:
    bench.case(case_name("experts", shapes.expert_tokens), lambda: _experts_case(bench, shapes))


def _experts_case(bench: Bench, shapes: Shapes) -> None:
    small = Experts(shapes, shapes.checked_experts, shapes.checked_tokens)
    out, *grads = map(relative_error, small.train(), small.exact())
    del small
    free_memory()
    random = Random(shapes.device, shapes.dtype)
    a, b = (random.normal(shapes.matrix, shapes.matrix) for _ in range(2))
    product = cost_of(lambda: a @ b, shapes.device, reps=9)
    rate = 2.0 * shapes.matrix**3 / product.timing.us / 1e6
    experts = Experts(shapes, shapes.config.num_local_experts, shapes.expert_tokens)
    cost = cost_of(as_trained(experts.train), shapes.device)
    found = experts.flop / cost.timing.us / 1e6
    bench.record(
        BENCH,
        case_name("experts", shapes.expert_tokens),
        cost.timing,
        correct={"output": out, "gradients": max(grads)},
        tolerance={"output": 1e-2, "gradients": 1e-2},
        floor=shapes.floor_us(experts.flop),
        value={
            "tflop_s": found,
            "matrix_tflop_s": rate,
            "share_of_matrix_rate": found / rate,
            "peak_gb": cost.peak_gb,
        },
    )


class Logprobs:
    """Hidden states, the head and the tokens that came next."""

    def __init__(self, shapes: Shapes, num_tokens: int) -> None:
        config, random = shapes.config, Random(shapes.device, shapes.dtype)
        C, V = config.hidden_size, config.vocab_size
        self.hidden, self.head = random.normal(num_tokens, C), random.normal(V, C, std=0.02)
        self.targets = torch.arange(num_tokens, device=shapes.device) * 7919 % V
        self.grads = [torch.sin(self.targets.float()), torch.cos(self.targets.float())]
        self.flop = 8.0 * num_tokens * C * V

    def train(self) -> list[Tensor]:
        """(logprobs, entropy, dhidden, dhead); the entropy has a gradient."""
        inputs = leaves(self.hidden, self.head)
        outs = token_logprobs(*inputs, self.targets, temperature=0.9, entropy_grad=True)
        return [*(x.detach() for x in outs), *torch.autograd.grad(outs, inputs, self.grads)]

    def exact(self) -> list[Tensor]:
        inputs = leaves(self.hidden.float(), self.head.float())
        log_p = torch.log_softmax(inputs[0] @ inputs[1].T / 0.9, -1)
        outs = log_p.gather(1, self.targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
        return [*(x.detach() for x in outs), *torch.autograd.grad(outs, inputs, self.grads)]


def run_logprobs(bench: Bench, shapes: Shapes) -> None:
    name = f"{case_name('logprobs', shapes.logprob_tokens)}, {shapes.config.vocab_size} ids"
    bench.case(name, lambda: _logprobs_case(bench, shapes, name))


def _logprobs_case(bench: Bench, shapes: Shapes, name: str) -> None:
    small = Logprobs(shapes, shapes.checked_tokens)
    logprobs, entropy, *grads = map(relative_error, small.train(), small.exact())
    del small
    free_memory()
    case = Logprobs(shapes, shapes.logprob_tokens)
    cost = cost_of(as_trained(case.train), shapes.device, reps=3)
    head_bytes = case.head.numel() * case.head.element_size()
    bench.record(
        BENCH,
        name,
        cost.timing,
        correct={"logprobs": logprobs, "entropy": entropy, "gradients": max(grads)},
        tolerance={"logprobs": 1e-4, "entropy": 1e-4, "gradients": 1e-2},
        floor=shapes.floor_us(case.flop),
        value={
            "peak_gb": cost.peak_gb,
            "beyond_head_gradient_gib": (cost.peak_bytes - head_bytes) / 2**30,
            "tflop_s": case.flop / cost.timing.us / 1e6,
        },
    )


PARTS: dict[str, Callable[[Bench, Shapes], None]] = {
    "layer": train_layer.run,
    "core": run_core,
    "experts": run_experts,
    "logprobs": run_logprobs,
    "index": train_index.run,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train_attention", description=__doc__
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--cpu", action="store_true", help="small shapes, for tests")
    parser.add_argument("--seconds", type=float, default=180.0, help="most of all cases")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    if not args.cpu and not torch.cuda.is_available():
        parser.error("training is timed on a CUDA device, and there is none")
    make_deterministic_products()
    bench = Bench(args.seconds, args.results)
    shapes = Shapes.tiny() if args.cpu else Shapes.m3()
    for part in args.only:
        PARTS[part](bench, shapes)
        free_memory()
    print(bench.summary(), flush=True)
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
