"""M3's attention layer as the policy trains it, beside transformers' own with SDPA."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as m3

from benchmarks.kernels.harness import Bench, relative_error
from benchmarks.train_measure import Random, as_trained, case_name, cost_if_it_fits, cost_of
from benchmarks.train_shapes import Shapes
from inference.kernels.packing import Packing
from m3rl.grpo.replay import Record
from m3rl.policy_layers import ForwardPass, cos_sin, install

BENCH = "train_attention"
PEER = "transformers-sdpa"
TOLERANCE = {
    "output": 1e-2,
    "gradient of the input": 2e-2,
    "gradients of weights": 3e-2,
    "beginning alone": 1e-2,
}
"""Relative errors against FP32, for values rounded to BF16 between ops."""


class Layer:
    """The same weights twice: with the forward of `policy_layers`, and as transformers has it."""

    def __init__(self, shapes: Shapes) -> None:
        config = shapes.config
        self.config, self.shapes = config, shapes
        text = MiniMaxM3VLTextConfig(**config.to_transformers() | {"pad_token_id": None})
        text._attn_implementation = "sdpa"
        with torch.device(shapes.device):
            self.theirs = m3.MiniMaxM3VLAttention(text, layer_idx=0).to(shapes.dtype)
            self.rotary = m3.MiniMaxM3VLRotaryEmbedding(text)
        _fill(self.theirs, Random(shapes.device, shapes.dtype))
        self.ours = copy.deepcopy(self.theirs)
        install(self.ours)
        self._shared: dict[int, tuple[Packing, Tensor]] = {}

    def run_ours(self, x_TC: Tensor, blocks: dict[int, Tensor] | None = None) -> Tensor:
        """`blocks`: of the layer, [T, K, B]; chosen and put there if there are none."""
        packing, cos_sin_TX = self._of_micro_batch(len(x_TC))
        run = ForwardPass(
            config=self.config,
            packing=packing,
            cos_sin_TX=cos_sin_TX,
            record=Record(),
            replays_experts=False,
            replays_blocks=False,
            stats=None,
            blocks={} if blocks is None else blocks,
        )
        out_TC: Tensor = self.ours(x_TC, 0, run)
        return out_TC

    def _of_micro_batch(self, num_tokens: int) -> tuple[Packing, Tensor]:
        """What all layers of a micro-batch share; made once."""
        if num_tokens not in self._shared:
            packing = Packing.of([num_tokens], self.shapes.device)
            self._shared[num_tokens] = packing, cos_sin(self.rotary, packing.positions_T)
        return self._shared[num_tokens]

    def run_theirs(self, x_TC: Tensor, layer: nn.Module | None = None) -> Tensor:
        layer = self.theirs if layer is None else layer
        positions = torch.arange(len(x_TC), device=x_TC.device)[None]
        angles = self.rotary(x_TC[None], position_ids=positions)
        out_1TC, _ = layer(x_TC[None], angles, None, position_ids=positions)
        return out_1TC[0]

    def exact(self, x_TC: Tensor, grad_TC: Tensor, blocks_TKB: Tensor) -> list[Tensor]:
        """`with_gradients` of transformers' layer in FP32 over the same weights and blocks."""
        layer = copy.deepcopy(self.theirs).float()
        chosen = blocks_TKB.transpose(0, 1)[None].long()
        layer.indexer.forward = lambda *_: chosen
        with sdpa_kernel(SDPBackend.MATH):
            return with_gradients(
                lambda x: self.run_theirs(x, layer), layer, x_TC.float(), grad_TC.float()
            )


def _fill(layer: nn.Module, random: Random) -> None:
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            std = 0.05 if "norm" in name else weight.shape[-1] ** -0.5
            weight.copy_(random.normal(*weight.shape, std=std))


def with_gradients(
    run: Callable[[Tensor], Tensor], layer: nn.Module, x_TC: Tensor, grad_TC: Tensor
) -> list[Tensor]:
    """Output, then the gradients of the input and of the trained weights (not the indexer's)."""
    x_TC = x_TC.detach().requires_grad_()
    trained = [p for name, p in layer.named_parameters() if "indexer" not in name]
    out_TC = run(x_TC)
    return [out_TC.detach(), *torch.autograd.grad(out_TC, [x_TC, *trained], grad_TC)]


def run(bench: Bench, shapes: Shapes) -> None:
    layer = Layer(shapes)
    errors: dict[str, float] = {}
    bench.case("layer, against FP32", lambda: errors.update(check(layer)))
    for num_tokens in shapes.layer_tokens if errors else ():
        bench.case(case_name("layer", num_tokens), partial(_case, bench, layer, num_tokens, errors))


def check(layer: Layer) -> dict[str, float]:
    """Errors of output and gradients against FP32 at a size that fits."""
    random = Random(layer.shapes.device, layer.shapes.dtype, seed=1)
    x_TC, grad_TC = (
        random.normal(layer.shapes.checked_tokens, layer.config.hidden_size) for _ in range(2)
    )
    blocks: dict[int, Tensor] = {}
    found = with_gradients(lambda x: layer.run_ours(x, blocks), layer.ours, x_TC, grad_TC)
    wanted = layer.exact(x_TC, grad_TC, blocks[0])
    out, grad_x, *grads = map(relative_error, found, wanted)
    return {
        "output": out,
        "gradient of the input": grad_x,
        "gradients of weights": max(grads),
    }


def _beginning(layer: Layer, x_TC: Tensor) -> tuple[float, float]:
    """How the first tokens differ where they are all there is: (error of the output with the same
    blocks, share of them that choose otherwise)."""
    size = layer.shapes.checked_tokens
    blocks: dict[int, Tensor] = {}
    own: dict[int, Tensor] = {}
    with torch.no_grad():
        together_TC = layer.run_ours(x_TC, blocks)[:size]
        same = {0: blocks[0][:size]}
        error = relative_error(together_TC, layer.run_ours(x_TC[:size], same))
        layer.run_ours(x_TC[:size], own)
    return error, float((own[0] != same[0]).any(-1).float().mean())


def _case(bench: Bench, layer: Layer, num_tokens: int, errors: dict[str, float]) -> None:
    device, hidden = layer.shapes.device, layer.config.hidden_size
    random = Random(device, layer.shapes.dtype, seed=2)
    x_TC, grad_TC = random.normal(num_tokens, hidden), random.normal(num_tokens, hidden)
    error, others = _beginning(layer, x_TC)

    ours = as_trained(partial(with_gradients, layer.run_ours, layer.ours, x_TC, grad_TC))
    theirs = partial(with_gradients, layer.run_theirs, layer.theirs, x_TC, grad_TC)
    cost = cost_of(ours, device)
    peer = cost_if_it_fits(theirs, device, reps=3)
    value = {
        "peak_gb": cost.peak_gb,
        "gb_per_1k_tokens": 1024 * cost.peak_gb / num_tokens,
        "beginning_chooses_otherwise": others,
    }
    if peer is None:
        value["peer_out_of_memory"] = 1.0
    else:
        value["peer_peak_gb"] = peer.peak_gb
    bench.record(
        BENCH,
        case_name("layer", num_tokens),
        cost.timing,
        correct=errors | {"beginning alone": error},
        tolerance=TOLERANCE,
        peer=None if peer is None else (PEER, peer.timing.us),
        value=value,
    )
