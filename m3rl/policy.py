"""MiniMax-M3 for training: transformers' modules over FP32 masters, run with the wire's values.

Every weight is kept in FP32 and enters the forward pass rounded to `policy.dtype`, exactly as the
rollout workers receive it; router weight, correction bias and the head's arithmetic stay FP32. The
router is the runtime's own, so trainer and runtime break ties alike, and it can replay recorded
experts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import MiniMaxM3VLForCausalLM, MiniMaxM3VLTextConfig

from inference.config import ModelConfig
from inference.kernels.router import router
from inference.kernels.tensor_hash import combine, tensor_hash, unit_of
from inference.models.weights import CheckpointError as RuntimeCheckpointError
from inference.models.weights import (
    published_tensors,
    read_checkpoint,
    transformers_placement,
    write_checkpoint,
)
from m3rl.checkpoint import CheckpointError
from m3rl.grpo.logprob import greedy_hits, token_logprobs
from m3rl.grpo.replay import RecordedRouting, RoutingStats
from m3rl.types import TensorSlot

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ATTENTIONS = ("sdpa", "eager")
MAX_SHARD_BYTES = 5 << 30
Bounds = tuple[tuple[int, int], ...]


@dataclass(slots=True)
class _Pass:
    """What the routers of one forward pass need to know."""

    is_real_T: Tensor
    record: RecordedRouting | None
    stats: RoutingStats | None


class Policy(nn.Module):
    """A MiniMax-M3 language model, trained in place, exported and hashed by published name.

    The index branch is frozen: it only chooses blocks and gets no gradient. All weights are NaN
    until `load` or `init_random`.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: str, attention: str, replay_routing: bool
    ) -> None:
        super().__init__()
        if dtype not in DTYPES:
            raise ValueError(f"policy.dtype={dtype!r} is unknown; use one of {list(DTYPES)}")
        if attention not in ATTENTIONS:
            raise ValueError(
                f"policy.attention={attention!r} is unknown; use one of {list(ATTENTIONS)}"
            )
        if config.swiglu_beta != 1.0:
            raise ValueError(
                f"swiglu_beta={config.swiglu_beta} cannot be trained: transformers knows only 1.0"
            )
        self.config = config
        self.dtype_name = dtype
        self.dtype = DTYPES[dtype]
        self.attention = attention
        self.replay_routing = replay_routing
        with torch.random.fork_rng():
            self.model: Any = _transformers_model(config, attention)
        self._specs = {spec.name: spec for spec in published_tensors(config)}
        self._placement = transformers_placement(config)
        self._fp32 = {self._placement[s.name].param for s in self._specs.values() if s.is_fp32}
        self._freeze_index_branch()
        self._install_routers()
        self._pass: _Pass | None = None
        with torch.no_grad():
            for tensor in self._masters().values():
                tensor.fill_(torch.nan)

    @classmethod
    def for_model(cls, path: str | Path, **options: Any) -> Policy:
        """A policy of the shape that the config.json in `path` gives."""
        return cls(ModelConfig.from_pretrained(path), **options)

    def has_shape_of(self, path: str | Path) -> bool:
        """Whether the model in `path` has the same configuration."""
        return ModelConfig.from_pretrained(path) == self.config

    def _freeze_index_branch(self) -> None:
        frozen = {
            self._placement[name].param for name, s in self._specs.items() if s.role == "index"
        }
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name not in frozen)

    def _install_routers(self) -> None:
        """Replace the forward of this policy's own router modules, not of transformers' class."""
        for ordinal, layer in enumerate(self.config.moe_layers):
            gate = self.model.model.layers[layer].mlp.gate
            gate.forward = partial(self._route, gate, ordinal)

    def _route(self, gate: Any, layer: int, hidden: Tensor) -> tuple[None, Tensor, Tensor]:
        """Experts of each token; weights sum to 1 here, transformers scales the experts' sum."""
        assert self._pass is not None, "routers run inside Policy.hidden_states only"
        x_TC = hidden.reshape(-1, hidden.shape[-1])
        topk = self.config.num_experts_per_tok
        choose = partial(
            router, x_TC, gate.weight, gate.e_score_correction_bias, topk=topk, scale=1.0
        )
        weights_TA, own_ids_TA = choose()
        ids_TA = own_ids_TA
        record, stats = self._pass.record, self._pass.stats
        if self.replay_routing and record is not None:
            is_recorded_T1 = record.is_recorded_T[:, None]
            ids_TA = torch.where(is_recorded_T1, record.ids_LTA[layer], own_ids_TA)
            weights_TA, ids_TA = choose(replay_ids_TA=ids_TA)
        if stats is not None:
            stats.add(
                layer,
                own_ids_TA=own_ids_TA,
                used_ids_TA=ids_TA,
                is_real_T=self._pass.is_real_T,
                record=record,
            )
        return None, weights_TA, ids_TA.long()

    def hidden_states(
        self,
        ids_BS: Tensor,
        length_B: Tensor,
        *,
        record: RecordedRouting | None = None,
        stats: RoutingStats | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, [B, S, C] in the policy's dtype.

        Rows are padded on the right with 0. Causal attention keeps padding out of real positions,
        and blocks are counted from each row's first token, so a row computes as if it stood alone.

        Args:
            ids_BS: [B, S] int64.
            length_B: [B] int64, 1..S.
            record: recorded experts of these rows; used if `replay_routing`, else only compared.
            stats: counts the experts used.

        Raises:
            ValueError: a length out of range, a token behind a row's end (left padding), S beyond
                `max_position_embeddings`.
        """
        num_positions = ids_BS.shape[1]
        positions_S = torch.arange(num_positions, device=ids_BS.device)
        is_real_BS = positions_S < length_B[:, None]
        self._check_rows(ids_BS, length_B, is_real_BS)
        kwargs = {
            "input_ids": ids_BS,
            "attention_mask": None,
            "position_ids": positions_S[None],
            "use_cache": False,
        }
        self._pass = _Pass(is_real_BS.reshape(-1), record, stats)
        try:
            text_model = self.model.model
            weights = self._wire_parameters(text_model)
            output: Any = functional_call(text_model, weights, (), kwargs)
        finally:
            self._pass = None
        hidden_BSC: Tensor = output.last_hidden_state
        return hidden_BSC

    def _check_rows(self, ids_BS: Tensor, length_B: Tensor, is_real_BS: Tensor) -> None:
        num_positions = ids_BS.shape[1]
        if num_positions > self.config.max_position_embeddings:
            raise ValueError(
                f"rows of {num_positions} tokens exceed max_position_embeddings="
                f"{self.config.max_position_embeddings}"
            )
        if ((length_B < 1) | (length_B > num_positions)).any():
            raise ValueError(f"row lengths {length_B.tolist()} must lie in 1..{num_positions}")
        if ids_BS.masked_select(~is_real_BS).any():
            raise ValueError(
                "a token stands behind the end of its row: rows must be padded on the right with 0 "
                "(left padding moves the borders of attention blocks)"
            )

    def _wire_parameters(self, text_model: nn.Module) -> dict[str, Tensor]:
        """Masters rounded to the wire's dtype, differentiably; none where they already have it."""
        if self.dtype == torch.float32:
            return {}
        return {
            name: parameter.to(self.dtype)
            for name, parameter in text_model.named_parameters()
            if f"model.{name}" not in self._fp32
        }

    def forward(
        self,
        ids_BS: Tensor,
        length_B: Tensor,
        mask_BS: Tensor,
        *,
        temperature: float,
        record: RecordedRouting | None = None,
        stats: RoutingStats | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of every masked token given the tokens before it, and the entropy there.

        Args:
            mask_BS: [B, S] bool; False at position 0, which nothing predicts.

        Returns:
            (logprobs_T, entropy_T) FP32, masked tokens in row-major order; no gradient through the
            entropy.
        """
        hidden_BSC = self.hidden_states(ids_BS, length_B, record=record, stats=stats)
        predicting_TC = _predicting(hidden_BSC, mask_BS)
        return token_logprobs(
            predicting_TC, self._wire_head(), ids_BS[mask_BS], temperature=temperature
        )

    @torch.no_grad()
    def greedy_hits(self, ids_BS: Tensor, length_B: Tensor, mask_BS: Tensor) -> Tensor:
        """[T] bool: whether greedy decoding would choose each masked token."""
        predicting_TC = _predicting(self.hidden_states(ids_BS, length_B), mask_BS)
        return greedy_hits(predicting_TC, self._wire_head(), ids_BS[mask_BS])

    def _wire_head(self) -> Tensor:
        """The head's wire values; they are multiplied in FP32."""
        head: Tensor = self.model.lm_head.weight.to(self.dtype)
        return head

    @torch.no_grad()
    def load(self, path: str | Path) -> None:
        """Read all weights from a published checkpoint into the FP32 masters.

        Raises:
            CheckpointError: see `inference.models.weights.read_checkpoint`; or a weight is not
                finite.
        """
        try:
            for name, tensor in read_checkpoint(path, self.config):
                if not torch.isfinite(tensor).all():
                    raise CheckpointError(f"{path}: {name} holds values that are not finite")
                self._master(name).copy_(tensor)
        except RuntimeCheckpointError as error:
            raise CheckpointError(str(error)) from error

    def save(self, path: str | Path, dtype: str) -> None:
        """Write all weights into a directory without any, under published names (see `export`).

        Raises:
            CheckpointError: there are weights already, or a file cannot be written.
        """
        try:
            write_checkpoint(path, self.export(dtype), max_shard_bytes=MAX_SHARD_BYTES)
        except RuntimeCheckpointError as error:
            raise CheckpointError(str(error)) from error

    @torch.no_grad()
    def init_random(self, seed: int, *, std: float, embedding_std: float, bias_std: float) -> None:
        """Fresh weights, a function of `seed`: normal, norms 0 (they act as 1 + w).

        Args:
            std: of all matrices but the embedding.
            bias_std: of the router's correction bias.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in self._masters().items():
            if "norm" in name:
                tensor.zero_()
                continue
            scale = std
            if "embed_tokens" in name:
                scale = embedding_std
            elif "e_score_correction_bias" in name:
                scale = bias_std
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)

    @torch.no_grad()
    def frozen_copy(self) -> Policy:
        """The same policy with weights of its own that are never trained."""
        return copy.deepcopy(self).requires_grad_(False)

    def _master(self, name: str) -> Tensor:
        """The FP32 memory of a published tensor."""
        place = self._placement[name]
        whole: Tensor = attrgetter(place.param)(self.model).detach()
        return whole[place.index]

    def _masters(self) -> dict[str, Tensor]:
        """All weights, buffers included, by transformers' names, sharing the model's memory."""
        masters: dict[str, Tensor] = self.model.state_dict()
        return masters

    def layout(self) -> list[TensorSlot]:
        """Every published tensor, held whole, with the dtype it has on the wire."""
        return [
            TensorSlot(
                name=spec.name,
                dtype="float32" if spec.is_fp32 else self.dtype_name,
                shape=spec.shape,
                bounds=tuple((0, size) for size in spec.shape),
                bucket=spec.bucket,
            )
            for spec in self._specs.values()
        ]

    @property
    def wire_stays(self) -> bool:
        """Whether each `wire_view` is the masters' own memory; updates and loads do not move it."""
        return self.dtype == torch.float32

    @torch.no_grad()
    def wire_view(self, name: str, bounds: Bounds | None = None) -> Tensor:
        """A published tensor, or a rectangle of it, in its wire dtype: the masters' own memory
        where they have that dtype, else rounded."""
        if name not in self._specs:
            raise KeyError(f"{name} is no published tensor of this model")
        view = self._master(name)
        if bounds is not None:
            view = view[tuple(slice(start, stop) for start, stop in bounds)]
        return view.to(torch.float32 if self._specs[name].is_fp32 else self.dtype)

    @torch.no_grad()
    def export(self, dtype: str | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every published tensor once, in the order of the forward pass.

        Args:
            dtype: 'float32' gives the masters themselves; None gives wire dtypes.
        """
        rounded = self.dtype if dtype is None else DTYPES[dtype]
        for name, spec in self._specs.items():
            view = self._master(name)
            yield name, view if spec.is_fp32 else view.to(rounded)

    @torch.no_grad()
    def wire_state(self) -> dict[str, Tensor]:
        """Copies of all weights in wire dtype by transformers' names."""
        return {
            name: tensor.to(torch.float32 if name in self._fp32 else self.dtype, copy=True)
            for name, tensor in self._masters().items()
        }

    @torch.no_grad()
    def changed_frac(self, before: dict[str, Tensor]) -> float:
        """Share of all weights whose wire value differs from that in `before`, a `wire_state`."""
        changed = total = 0
        for name, tensor in self._masters().items():
            changed += int((tensor.to(before[name].dtype) != before[name]).sum())
            total += tensor.numel()
        return changed / total

    def correction_bias_abs_max(self) -> float:
        """Largest absolute value in any layer's router correction bias."""
        gates = (self.model.model.layers[layer].mlp.gate for layer in self.config.moe_layers)
        return max((g.e_score_correction_bias.abs().max().item() for g in gates), default=0.0)

    def master_hash(self) -> str:
        """64 bits over the bits of all FP32 masters, correction bias included, as 16 hex digits.

        That of a weight sync which carries FP32 and cuts no tensor's columns.
        """
        hashes = (
            tensor_hash(tensor, name=name, unit=unit_of(tensor.dtype, tensor.shape[-1:]))
            for name, tensor in self.export("float32")
        )
        return f"{combine(hashes):016x}"


def _transformers_model(config: ModelConfig, attention: str) -> Any:
    # transformers never trains the embedding of its pad token, which is often the end token; and
    # padding here is known by length, so there is none.
    kwargs = config.to_transformers() | {"pad_token_id": None}
    text_config = MiniMaxM3VLTextConfig(**kwargs)
    text_config._attn_implementation = attention
    text_config._experts_implementation = "grouped_mm"
    model: Any = MiniMaxM3VLForCausalLM(text_config)
    return model.float()


def _predicting(hidden_BSC: Tensor, mask_BS: Tensor) -> Tensor:
    """[T, C] hidden states from which the masked tokens are predicted: one position before each."""
    if mask_BS[:, 0].any():
        raise ValueError("the first token of a row has no log-probability; mask it out")
    return hidden_BSC[:, :-1][mask_BS[:, 1:]]
