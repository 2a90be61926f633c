"""What each GPU of a trainer must hold, worked out before anything is allocated.

Masters, gradients, moments and what else outlives a pass are counted to the byte. What a pass needs
is the largest of its moments: the head's, each layer's, the embedding's, the optimizer's. Layers
keep what their ops' docstrings say. Standard library only, with a model's name map.

`T` tokens of a packed row that this rank computes · `C` hidden · `H` query heads · `K` KV heads ·
`D` head dim · `A` experts per token · `I` width of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from inference.config import MOE, SPARSE, ModelConfig
from inference.memory import DTYPE_BYTES, NCCL_BYTES, RESERVED_BYTES
from m3rl.lora.settings import LoraSettings
from m3rl.plan_index import IndexLossMemory
from m3rl.sync_plan import trainer_parameters
from m3rl.weight_sync.layout import volume
from m3rl.weight_sync.trainer_layout import TrainerShards, held_region

FP32 = 4
STAGED_BYTES = 256 << 20
"""Gradients whose moments come from the host at a time (`optimizer.CHUNK_BYTES`)."""
TILE_LOGITS, MIN_TILE_IDS = 1 << 27, 2048
"""Logits that exist at a time (`grpo.logprob`)."""
PASS_BYTES = 1 << 30
"""Rows of dQ of a pass of sparse attention's backward (`msa_varlen.backward`)."""
PASS_EXTRA = 1.25
"""Beside them: padding of their lists, dK and dV of their units."""
MULTIPROCESSORS = 132
"""Of an H200. Dense attention adds dQ in a fixed order in as many copies as fill them."""
IMBALANCE = 1.5
"""Estimate: rows that the busiest expert-parallel rank receives, over the mean."""


@dataclass(frozen=True, slots=True)
class TrainerSetting:
    """What decides about the memory of a trainer rank."""

    model: ModelConfig
    dtype: str
    """'float32' | 'bfloat16': of the wire."""
    device: str = "cpu"
    """On 'cpu' only what is counted exactly is planned."""
    ranks: int = 1
    ep: int = 1
    cp: int = 1
    micro_batch_tokens: int = 8192
    num_micro_batches: int = 1
    """Of a rank and an optimizer step, at most."""
    checkpointing: bool = True
    offload: bool = False
    has_reference: bool = False
    compares: bool = True
    """Whether an update keeps the weights before it, to tell how many changed; only GRPO does."""
    remembers_sent: bool = False
    """See `WeightSyncConfig.delta`."""
    trains_index: bool = False
    """Whether the index branch is trained too."""
    lora: LoraSettings | None = None
    """What is adapted; None: all weights are trained."""

    @property
    def width(self) -> int:
        """Bytes of a value on the wire, and of an activation."""
        return DTYPE_BYTES[self.dtype]

    @property
    def shards(self) -> TrainerShards:
        return TrainerShards(self.ranks, ep=self.ep)


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Bytes of a trainer rank by use, at its fullest moment."""

    uses: dict[str, int]
    peak: str
    """What happens in that moment."""
    moments: dict[str, int]
    """All bytes in the fullest moments of each kind."""
    host_bytes: int
    """Of pinned memory, for moments that do not lie on the GPU."""

    @property
    def total_bytes(self) -> int:
        return sum(self.uses.values())


@dataclass(frozen=True, slots=True)
class _Parameters:
    """Of one unit of FSDP: elements that are gathered to use it, and this rank's part of them."""

    whole: int = 0
    """Of an expert-parallel rank's experts."""
    own: int = 0
    trained: int = 0
    """Of those gathered."""
    own_trained: int = 0
    largest: int = 0
    """Elements of the largest trained parameter of this rank."""
    is_fp32: bool = False


@cache
def _units(
    model: ModelConfig, shards: TrainerShards, trains_index: bool
) -> tuple[dict[str, dict[str, _Parameters]], dict[str, int]]:
    """(bucket of the published tensors -> unit -> its parameters, bucket -> how many there are).

    Units: 'dense', 'experts', 'router' and 'bias', which every rank holds whole.
    """
    found: dict[str, dict[str, _Parameters]] = {}
    times: dict[str, int] = {}
    for each in trainer_parameters(model):
        region = held_region(each.shape, each.is_experts, shards, 0)
        whole = math.prod(each.shape) // (shards.ep if each.is_experts else 1)
        own = 0 if region is None else volume(region)
        unit = "experts" if each.is_experts else "router" if ".gate." in each.name else "dense"
        if each.name.endswith("e_score_correction_bias"):
            unit, own = "bias", whole
        is_trained = unit != "bias" and (trains_index or ".indexer." not in each.name)
        units = found.setdefault(each.bucket, {})
        old = units.get(unit, _Parameters())
        units[unit] = _Parameters(
            whole=old.whole + whole,
            own=old.own + own,
            trained=old.trained + is_trained * whole,
            own_trained=old.own_trained + is_trained * own,
            largest=max(old.largest, is_trained * own),
            is_fp32=each.is_fp32,
        )
        times[each.bucket] = each.times
    return found, times


class Rank:
    """The busiest rank of a setting that trains all weights.

    Raises:
        LayoutError: `ep` does not divide ranks or experts.
    """

    def __init__(self, setting: TrainerSetting) -> None:
        self.setting, self.model = setting, setting.model
        self.units, self.times = _units(setting.model, setting.shards, setting.trains_index)
        self.tokens = -(-setting.micro_batch_tokens // setting.cp)
        self.is_sharded = setting.ranks > 1
        self.is_first = setting.num_micro_batches == 1
        """Whether gradients appear one after the other instead of being added to."""

    def plan(self) -> TrainerMemory:
        lasting, host = self.lasting()
        if self.setting.device == "cpu":
            uses = {**lasting, "gradients": self.gradients()}
            return TrainerMemory(nonzero(uses), "optimizer step", {}, host)
        lasting["CUDA, reserved"] = RESERVED_BYTES + (NCCL_BYTES if self.is_sharded else 0)
        always = sum(lasting.values())
        moments = dict(self.moments())
        sizes = {name: always + sum(uses.values()) for name, uses in moments.items()}
        peak = max(sizes, key=lambda name: sizes[name])
        of_layers = [name for name in sizes if "layer" in name]
        fullest = max(of_layers, key=lambda name: sizes[name])
        shown = {n: size for n, size in sizes.items() if n == fullest or n not in of_layers}
        return TrainerMemory(nonzero({**lasting, **moments[peak]}), peak, shown, host)

    def lasting(self) -> tuple[dict[str, int], int]:
        """(what is there all the time, bytes on the host)."""
        setting, own = self.setting, self.total("own")
        adam = 2 * FP32 * self.total("own_trained")
        on_wire = self.on_wire("own")
        uses = {
            "FP32 masters": FP32 * own,
            "AdamW moments": 0 if setting.offload else adam,
            "weights before an update": on_wire if setting.compares else 0,
            "reference policy": FP32 * own if setting.has_reference else 0,
            "what was sent": on_wire if setting.remembers_sent else 0,
        }
        return uses, adam if setting.offload else 0

    def moments(self) -> Iterator[tuple[str, dict[str, int]]]:
        """What a step needs besides in each of its moments."""
        yield "head", self.head()
        buckets = self.layers()
        for layer, bucket in enumerate(buckets):
            yield f"backward pass of layer {layer}", self.layer(layer, bucket, buckets)
        yield "backward pass of the embedding", self.embedding()
        yield "optimizer step", {"gradients": self.gradients(), "staged moments": self.staged()}

    def layers(self) -> list[str]:
        """The bucket of each layer's kind."""
        kinds = list(zip(self.model.layer_types, self.model.mlp_layer_types, strict=True))
        bucket_of = {kind: f"layer.{i}" for i, kind in enumerate(dict.fromkeys(kinds))}
        return [bucket_of[kind] for kind in kinds]

    def total(self, field: str) -> int:
        """Elements of the model."""
        return sum(
            self.times[bucket] * getattr(unit, field)
            for bucket, units in self.units.items()
            for unit in units.values()
        )

    def on_wire(self, field: str, bucket: str | None = None) -> int:
        """Bytes of the model, or of one bucket, as they are sent."""
        return sum(
            (self.times[name] if bucket is None else 1) * self.unit_bytes(unit, field)
            for name, units in self.units.items()
            if bucket in (None, name)
            for unit in units.values()
        )

    def unit_bytes(self, unit: _Parameters, field: str) -> int:
        count: int = getattr(unit, field)
        return count * (FP32 if unit.is_fp32 else self.setting.width)

    def gradients(self, *buckets: str) -> int:
        """FP32 gradients of the model, or of some buckets: this rank's part."""
        if not buckets:
            return FP32 * self.total("own_trained")
        return FP32 * sum(u.own_trained for b in buckets for u in self.units[b].values())

    def staged(self) -> int:
        if not self.setting.offload:
            return 0
        largest = max(u.largest for units in self.units.values() for u in units.values())
        run = min(max(STAGED_BYTES, FP32 * largest), FP32 * self.total("own_trained"))
        return 2 * run

    def head(self) -> dict[str, int]:
        """Log-probabilities' backward pass, tile by tile; inputs of all layers are kept, and all
        of the last one, which is not computed again."""
        C, width, tokens = self.model.hidden_size, self.setting.width, self.tokens
        last = self.model.num_hidden_layers - 1
        tile = min(self.model.vocab_size, max(MIN_TILE_IDS, TILE_LOGITS // tokens))
        rows = tokens * (C * (3 * width + FP32) + tile * (FP32 + width))
        return {
            "gradients": 0 if self.is_first else self.gradients(),
            **self.head_weights(),
            "kept by layers": self.kept(last) + self.tokens * sum(self.kept_parts(last)),
            "logits": rows,
        }

    def head_weights(self) -> dict[str, int]:
        head, width = self.model.vocab_size * self.model.hidden_size, self.setting.width
        if self.is_sharded:
            summed = (width + FP32) * head
            return {"gathered weights": width * head, "gradients to be summed": summed}
        last_bucket = self.layers()[-1]
        rounded = self.rounded(None if not self.setting.checkpointing else last_bucket)
        return {"rounded weights": rounded, "fresh gradients": FP32 * head}

    def rounded(self, bucket: str | None) -> int:
        """What the wire's values of masters take besides them, where nothing is gathered."""
        return 0 if self.setting.width == FP32 else self.on_wire("whole", bucket)

    def embedding(self) -> dict[str, int]:
        setting, C = self.setting, self.model.hidden_size
        table = self.model.vocab_size * C
        rows = self.tokens * C * (FP32 + 2 * setting.width)
        uses = {"gradients": self.gradients(), "rows of the embedding": rows}
        if self.is_sharded:
            uses["gradients to be summed"] = (setting.width + FP32) * table
        elif not self.is_first:
            uses["fresh gradients"] = FP32 * table
        return uses

    def layer(self, layer: int, bucket: str, buckets: list[str]) -> dict[str, int]:
        present = self.gradients()
        if self.is_first:
            present = self.gradients("post", *buckets[layer + 1 :])
        return {
            "gradients": present,
            **self.weights_of(buckets[: layer + 1]),
            "kept by layers": self.kept(layer),
            **self.activations(layer),
        }

    def weights_of(self, buckets: list[str]) -> dict[str, int]:
        """Weights of the last of these layers in the wire's dtype, and their gradients on the way;
        without checkpointing the weights of those before it wait for their turn, too."""
        bucket, width = buckets[-1], self.setting.width
        units = self.units[bucket]
        trained = sorted((unit.trained for unit in units.values()), reverse=True)
        if not self.is_sharded:
            waiting = [bucket] if self.setting.checkpointing else buckets
            rounded = sum(map(self.rounded, waiting))
            fresh = 0 if self.is_first else FP32 * max(u.largest for u in units.values())
            return {"rounded weights": rounded, "fresh gradients": width * trained[0] + fresh}
        ahead = max(
            self.unit_bytes(unit, "whole")
            for name, found in self.units.items()
            if name.startswith("layer.")
            for unit in found.values()
        )
        # The sum of a unit's gradients is under way while the next one's are made.
        summed = (width + FP32) * trained[0] + FP32 * sum(trained[1:2])
        return {
            "gathered weights": self.on_wire("whole", bucket) + ahead,
            "gradients to be summed": summed,
        }

    def kept(self, layer: int) -> int:
        """Layers' inputs up to this one, and all choices; or activations without checkpointing."""
        model, setting = self.model, self.setting
        choices = len(model.moe_layers) * model.num_experts_per_tok
        choices += len(model.sparse_layers) * model.num_key_value_heads * model.index_topk_blocks
        per_token = 4 * choices
        if setting.checkpointing:
            per_token += (layer + 1) * setting.width * model.hidden_size
        else:
            per_token += sum(sum(self.kept_parts(earlier)) for earlier in range(layer))
        return self.tokens * per_token

    def kept_parts(self, layer: int) -> tuple[int, int, int]:
        """Bytes a token that a layer keeps for its backward pass: (attention, MLP or experts,
        shared expert)."""
        model, setting = self.model, self.setting
        width, C = setting.width, model.hidden_size
        q = model.num_attention_heads * model.head_dim
        kv = model.num_key_value_heads * model.head_dim
        # Normed input, queries before and after their norm, keys likewise, values, output, stream.
        attention = width * (2 * C + 3 * q + 3 * kv) + FP32 * model.num_attention_heads
        if (index_loss := self.index_loss(layer)) is not None:
            attention += -(-index_loss.kept // self.tokens)
        if setting.cp > 1:
            attention += width * 2 * kv * setting.cp
        if model.mlp_layer_types[layer] != MOE:
            return attention, width * (C + 3 * model.dense_intermediate_size), 0
        # The router reads FP32.
        moe = (width + FP32) * C + 2 * FP32 * model.num_local_experts
        moe += round(self.rows() * width * (2 * model.intermediate_size + (setting.ep > 1) * C))
        return attention, moe, width * 3 * model.shared_intermediate_size

    def index_loss(self, layer: int) -> IndexLossMemory | None:
        """What the index branch's loss takes in a layer that has it."""
        setting, model = self.setting, self.model
        if not setting.trains_index or model.layer_types[layer] != SPARSE:
            return None
        return IndexLossMemory(model, setting.width, self.tokens, setting.micro_batch_tokens)

    def rows(self) -> float:
        """Rows of experts for each of this rank's tokens."""
        return self.model.num_experts_per_tok * (1.0 if self.setting.ep == 1 else IMBALANCE)

    def activations(self, layer: int) -> dict[str, int]:
        """What a layer keeps, and the most that its backward pass adds: in its MLP, or in its
        attention or the index branch's loss, when what the MLP kept is gone."""
        model, width, C = self.model, self.setting.width, self.model.hidden_size
        attention, mlp, shared = self.kept_parts(layer)
        stream = 2 * width * C
        if model.mlp_layer_types[layer] == MOE:
            # The shared expert's backward pass is over when the experts' begins.
            of_row = width * (C + 3 * model.intermediate_size)
            added = round(self.rows() * of_row)
            if self.setting.ep > 1:
                added += 3 * width * model.num_experts_per_tok * C
            added = max(added, shared + 3 * width * model.shared_intermediate_size)
        else:
            added = 3 * width * model.dense_intermediate_size
        kept = self.tokens * (attention + stream)
        added_in = {
            "its MLP or experts": self.tokens * (mlp + added),
            "attention's backward pass": self.attention_backward(layer),
        }
        if (index_loss := self.index_loss(layer)) is not None:
            added_in["loss of the index branch"] = index_loss.added
            # What it kept is gone then.
            added_in["attention's backward pass"] -= index_loss.kept
        most = max(added_in, key=lambda use: added_in[use])
        return {"a layer's stream and attention": kept, most: added_in[most]}

    def attention_backward(self, layer: int) -> int:
        model, width, tokens = self.model, self.setting.width, self.tokens
        H, K, D = model.num_attention_heads, model.num_key_value_heads, model.head_dim
        grads = tokens * width * 2 * H * D + tokens * self.setting.cp * (width + FP32) * 2 * K * D
        if model.layer_types[layer] == SPARSE:
            rows = tokens * H * D * width * model.index_topk_blocks
            return grads + round(PASS_EXTRA * min(PASS_BYTES, rows))
        copies = -(-MULTIPROCESSORS // H)
        return grads + tokens * H * D * (copies * FP32 + 2 * width)


def nonzero(sizes: dict[str, int]) -> dict[str, int]:
    """Without what takes no memory."""
    return {name: size for name, size in sizes.items() if size}
