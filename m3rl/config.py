"""Every setting of m3rl: one strict, frozen tree, loaded once from YAML and never changed.

Unknown keys are errors with a suggestion, values out of range are errors with the meaning of the
key, and numbers written as `1e-6` (a string to YAML) are numbers. Files inherit with
`defaults: base.yaml`; `key=value` words win.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, ValidationError

from m3rl.config_backend import M3BackendConfig
from m3rl.config_checks import conflicts, is_free, is_of_the_run
from m3rl.config_data import (
    DataConfig,
    DatasetConfig,
    FileDatasetConfig,
    ReasoningGymConfig,
    RewardConfig,
)
from m3rl.config_file import (
    Bool,
    ConfigError,
    Float,
    Fraction,
    Int,
    Origins,
    Processes,
    Raw,
    Seconds,
    Section,
    Seed,
    Text,
    Threads,
    at_most,
    dump_yaml,
    explain,
    fill_kinds,
    flatten,
    merge,
    read_config_file,
    read_overrides,
    unknown_keys,
)
from m3rl.config_grpo import GRPOConfig, preset_origins
from m3rl.config_policy import PolicyConfig
from m3rl.config_sync import WeightSyncConfig
from m3rl.config_vllm import VllmBackendConfig

__all__ = [
    "Config",
    "ConfigError",
    "DataConfig",
    "DatasetConfig",
    "FileDatasetConfig",
    "ReasoningGymConfig",
    "RewardConfig",
]


Beta = Annotated[Float, Field(ge=0, lt=1)]
Rate = Annotated[
    Float,
    Field(gt=0),
    at_most(1, "AdamW moves a weight by up to lr a step, and most are near 0.02"),
]
Backend = Annotated[M3BackendConfig | VllmBackendConfig, Field(discriminator="kind")]


class RunConfig(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the run in logs and in wandb: letters, digits, dot, dash, underscore."""
    dir: Text
    """Run directory; everything a run writes is below it."""
    seed: Seed = 0
    """Every random choice of the run derives from this."""


class ModelPathConfig(Section):
    path: Text
    """Checkpoint directory: config.json, weights as safetensors, tokenizer, chat template."""


class OptimizerConfig(Section):
    lr: Rate = 1e-6
    """AdamW's learning rate after the warm-up."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's decay of the two moments."""
    eps: Float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: Float = Field(default=0.0, ge=0)
    """Decoupled weight decay, on matrices only."""
    grad_clip: Float = Field(default=1.0, gt=0)
    """Largest global gradient norm; longer gradients are scaled down to it."""
    warmup_steps: Int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly."""
    offload: Bool = False
    """Keep AdamW's moments, two thirds of what training adds to the masters and gradients, in the
    host's pinned memory; each step carries them to the GPU and back."""


class RolloutConfig(Section):
    group_size: Int = Field(default=8, ge=2)
    """Completions per prompt, G in GRPO (arXiv:2402.03300); one alone has nothing to beat."""
    prompts_per_step: Int = Field(default=16, ge=1)
    """Prompts of one training step."""
    num_prompts: Annotated[Int, Field(ge=1)] | None = None
    """For `m3rl rollout`: prompts in total."""
    temperature: Float = Field(default=1.0, gt=0)
    """Sampling temperature. At 0 all completions of a group would be equal."""
    top_p: Float = Field(default=1.0, gt=0, le=1)
    """Keep the likeliest tokens up to this probability; 1 keeps all."""
    top_k: Int = Field(default=0, ge=0)
    """Keep this many likeliest tokens; 0 keeps all."""
    min_p: Float = Field(default=0.0, ge=0, lt=1)
    """Keep tokens at least this likely relative to the likeliest; 0 keeps all."""
    max_tokens: Int = Field(default=1024, ge=1)
    """Longest completion."""
    stop: tuple[Text, ...] = ()
    """Strings that end a completion."""
    capture_routing: Bool = False
    """Record the experts of every token."""
    capture_blocks: Bool = False
    """Record the selected key blocks of every token."""
    timeout_s: Seconds = 300.0
    """A replica that finishes nothing for this long is taken for dead."""
    backend: Backend = M3BackendConfig()
    """What generates; kind m3 (the default) is the bundled runtime, kind vllm is vLLM."""


class TrainerParallelConfig(Section):
    """How `train.num_ranks` share one policy: FSDP over all of them, and inside it:"""

    ep: Int = Field(default=1, ge=1)
    """Ranks that split the experts; tokens go to them. Divides train.num_ranks."""
    cp: Int = Field(default=1, ge=1)
    """Ranks that split the tokens of each packed row, for long samples. Divides train.num_ranks."""


class TrainConfig(Section):
    steps: Int = Field(default=100, ge=1)
    """Training steps of the whole run, resumed ones included."""
    num_ranks: Processes = 1
    """Trainer processes; they share one policy, and each takes its share of every batch."""
    parallel: TrainerParallelConfig = TrainerParallelConfig()
    device: Literal["cpu", "cuda"] = "cpu"
    """cuda: each trainer process takes one GPU of the cluster."""
    num_threads: Threads = 1
    """CPU threads of each trainer process."""
    timeout_s: Seconds = 1800.0
    """Longest wait for anything that trainer ranks are called for: an update, loading, saving. Then
    the run ends, and names those that did not answer. Above whatever a healthy rank can take."""
    max_skipped_updates: Int = Field(default=10, ge=0)
    """Updates skipped for a gradient that is not finite before the run stops."""
    max_mismatch: Annotated[Float, Field(gt=0)] | None = 0.15
    """Largest mean |difference| of the trainer's and the runtime's log-probabilities of the same
    tokens at the same weights; above it the two compute different functions and the run stops."""


class EvalConfig(Section):
    every: Int = Field(default=0, ge=0)
    """Evaluate every so many steps; 0 for never in between."""
    num_prompts: Int = Field(default=200, ge=1)
    """Held-out prompts of an evaluation, one completion each."""
    temperature: Float = Field(default=0.0, ge=0)
    """0 is greedy."""
    at_start: Bool = True
    at_end: Bool = True


class CheckpointConfig(Section):
    every: Int = Field(default=25, ge=0)
    """Save every so many steps and at the end; 0 saves only at the end."""
    keep: Int = Field(default=2, ge=1)
    """Newest checkpoints to keep."""
    resume: Literal["auto", "never"] = "auto"
    """`auto` goes on from the newest complete checkpoint; `never` refuses a used run directory."""


class WandbConfig(Section):
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """`auto` is online when a key is set, else offline; no mode ever asks for a key."""
    project: Text = "m3rl"
    entity: Text | None = None


class LoggingConfig(Section):
    wandb: WandbConfig = WandbConfig()
    sample_table_every: Int = Field(default=10, ge=0)
    """Show sample completions every so many steps; 0 for never."""
    sample_table_rows: Int = Field(default=4, ge=1)


class SFTConfig(Section):
    steps: Int = Field(default=500, ge=1)
    batch_size: Int = Field(default=32, ge=1)
    """Prompt and answer pairs of one step."""
    lr: Rate = 3e-3
    warmup_steps: Int = Field(default=10, ge=0)
    seed: Seed = 0
    """Seed of the initial weights and of the order of examples."""
    init: Literal["random", "path"] = "path"
    """Start from random weights of the shape in model.path, or from the weights there."""
    output: Text | None = None
    """Directory for the trained checkpoint; null: `model` in the run directory."""
    target_accuracy: Annotated[Fraction, Field(gt=0)] | None = None
    """Stop once greedy decoding gets this share of the held-out answers right."""
    eval_every: Int = Field(default=10, ge=1)
    """Steps between two looks at the held-out accuracy, when there is a target."""
    init_std: Float = Field(default=0.02, gt=0)
    """For init random: deviation of all matrices but the embedding; norms begin at 0."""
    init_embedding_std: Float = Field(default=0.02, gt=0)
    """For init random: deviation of the embedding."""
    init_bias_std: Float = Field(default=0.0, ge=0)
    """For init random: deviation of the router's correction bias, which is never trained."""


class Config(Section):
    """The whole configuration of a run."""

    run: RunConfig
    model: ModelPathConfig
    policy: PolicyConfig = PolicyConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    grpo: GRPOConfig = GRPOConfig()
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    sft: SFTConfig = SFTConfig()

    _origins: Origins = PrivateAttr(default_factory=dict)
    _source: Path | None = PrivateAttr(default=None)

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Config:
        """Read `path`, what it inherits and the `key=value` overrides.

        Raises:
            ConfigError: one line for every mistake found, each with key, value, place and cure.
        """
        raw, origins = read_config_file(Path(path))
        merge(raw, read_overrides(overrides), origins, {})
        config = cls.from_dict(raw, origins)
        config._source = Path(path).resolve()
        return config

    @classmethod
    def from_dict(cls, raw: Raw, origins: Origins | None = None) -> Config:
        """Check a nested mapping; `origins` tells where each dotted key was written."""
        origins = {} if origins is None else origins
        raw = fill_kinds(cls, raw)
        if problems := unknown_keys(cls, raw, origins):
            raise ConfigError("\n".join(problems))
        try:
            config = cls.model_validate(raw)
        except ValidationError as error:
            raise ConfigError("\n".join(explain(error, cls, raw, origins))) from None
        config._origins = preset_origins(raw) | origins
        if problems := conflicts(config):
            raise ConfigError("\n".join(problems))
        return config

    def __eq__(self, other: object) -> bool:
        """Equal settings are equal, wherever they were written."""
        return isinstance(other, Config) and self.to_dict() == other.to_dict()

    def to_dict(self) -> Raw:
        """Plain nested values, as they would be written in YAML."""
        return self.model_dump(mode="json")

    def resolved_yaml(self) -> str:
        """YAML that loads to an equal configuration; comments tell where values were written."""
        return dump_yaml(self.to_dict(), self._origins)

    def differences(self, other: Config) -> list[str]:
        """`key: mine here, theirs there` for all that a run and its resumption must agree on: not
        for `is_of_the_run` and `is_free`. (Another run.seed would draw other prompts from here on.)
        """
        return [
            f"{key}: {mine!r} here, {theirs!r} there"
            for key, mine, theirs in self._differing(other)
            if not is_of_the_run(key) and not is_free(key)
        ]

    def free_differences(self, other: Config) -> list[str]:
        """`key: theirs before, mine now` for what may change on the way, see `is_free`."""
        return [
            f"{key}: {theirs!r} before, {mine!r} now"
            for key, mine, theirs in self._differing(other)
            if is_free(key)
        ]

    def _differing(self, other: Config) -> Iterator[tuple[str, Any, Any]]:
        mine, theirs = flatten(self.to_dict()), flatten(other.to_dict())
        for key in sorted(mine.keys() | theirs.keys()):
            if mine.get(key) != theirs.get(key):
                yield key, mine.get(key), theirs.get(key)

    def origin(self, key: str) -> str:
        """Where a dotted key was written: 'file.yaml:12', 'command line' or 'default'."""
        return self._origins.get(key, "default")

    def find(self, path: str) -> Path:
        """Place of an input file named in the configuration.

        A relative path is meant from the current directory or, when nothing is there, from the
        repository of the configuration file (the nearest folder above it with pyproject.toml).
        """
        here = Path(path)
        if here.is_absolute() or here.exists() or self._source is None:
            return here
        for folder in self._source.parents:
            if (folder / "pyproject.toml").is_file():
                there = folder / path
                return there if there.exists() else here
        return here
