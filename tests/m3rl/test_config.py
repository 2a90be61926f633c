import pickle
from pathlib import Path

import pytest
import yaml

from m3rl.config import Config, ConfigError
from m3rl.config_checks import idle_keys
from m3rl.config_file import all_keys, read_config_file
from tests.m3rl.run_files import config, settings


def load(folder: Path, *overrides: str) -> Config:
    path = folder / "c.yaml"
    path.write_text(yaml.safe_dump(settings(folder)))
    return Config.load(path, overrides)


def refusal(folder: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, *overrides)
    return str(caught.value)


# BR-054
@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("rollout.group_sise=4", "rollout.group_sise: unknown key .* did you mean 'group_size'"),
        ("lerning_rate=1", "lerning_rate: unknown key .* did you mean 'optimizer.lr'"),
        ("num-epochs=2", "num-epochs: unknown key .* did you mean 'train.steps'"),
        ("lr=1e-4", "lr: unknown key .* did you mean 'optimizer.lr'"),
        ("rollout.backend.engine.num_page=3", "engine.num_page: unknown .* 'num_pages'"),
        ("data.train.nmae=x", "data.train.nmae: unknown key .* did you mean 'name'"),
        ("logging.wandb.xyzzy=1", "known here: mode, project, entity"),
    ],
)
def test_an_unknown_key_is_refused_at_any_depth_with_the_nearest_known_one(tmp_path, word, said):
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, word)


# BR-054
@pytest.mark.parametrize(
    "word",
    [
        "optimizer.lr=abc",
        "optimizer.lr=true",
        "optimizer.lr=.nan",
        "optimizer.lr=0",
        "train.steps=true",
        "train.steps=2.5",
        "rollout.group_size=1",
        "rollout.temperature=0",
        "rollout.top_p=1.5",
        "rollout.backend.kind=sglang",
        "rollout.stop=x",
        "policy.dtype=fp32",
        "checkpoint.keep=0",
        "run.name=a/b",
        "optimizer.betas=[0.9]",
        "run=3",
        "run.dir=null",
    ],
)
def test_a_value_of_the_wrong_type_or_out_of_range_is_named_with_its_place(tmp_path, word):
    text = refusal(tmp_path, word)
    assert text.startswith(word.partition("=")[0])
    assert "command line" in text


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("weight_sync.chunk_mib=100000", "should be at most 8,192: it is staged twice"),
        ("weight_sync.timeout_s=1e9", "should be at most 604,800: what hangs would not be noticed"),
        ("weight_sync.probe.prompts=5000", "should be at most 1,024: a replica serves nobody"),
        ("weight_sync.probe.max_error=20", "should be at most 10: models that differ so much"),
        ("rollout.timeout_s=1e9", "at most 604,800"),
        ("reward.timeout_s=1e9", "at most 604,800"),
        ("optimizer.lr=2", "should be at most 1: AdamW moves a weight by up to lr"),
        ("train.num_ranks=5000", "should be at most 4,096: each is a process"),
        ("rollout.backend.num_replicas=5000", "should be at most 4,096"),
        ("rollout.backend.parallel.ep=5000", "should be at most 1,024: a replica has"),
        ("train.num_threads=5000", "should be at most 1,024: that is more than a machine has"),
    ],
)
def test_a_value_beyond_all_sense_is_refused_with_the_reason(tmp_path, word, reason):
    assert reason in refusal(tmp_path, word)


def test_a_transport_that_does_not_exist_is_refused_with_those_that_do(tmp_path):
    text = refusal(tmp_path, "weight_sync.transport=rdma")
    assert "weight_sync.transport: 'rdma' is refused: should be 'auto'" in text
    assert "'gloo'" in text


def test_group_size_one_says_what_a_group_is_for(tmp_path):
    assert "1 is refused: should be greater than or equal to 2" in refusal(
        tmp_path, "rollout.group_size=1"
    )
    assert "Completions per prompt" in refusal(tmp_path, "rollout.group_size=1")


# BR-054
def test_numbers_that_yaml_reads_as_strings_are_numbers(tmp_path):
    assert yaml.safe_load("1e-6") == "1e-6"
    assert load(tmp_path, "optimizer.lr=1e-6").optimizer.lr == 1e-6


def test_all_mistakes_are_told_at_once(tmp_path):
    assert len(refusal(tmp_path, "optimizer.lr=-1", "train.steps=0").splitlines()) == 2


def test_the_last_override_wins_and_values_are_yaml(tmp_path):
    loaded = load(tmp_path, "train.steps=3", "rollout.stop=[a, 'b c']", "train.steps=7")
    assert loaded.train.steps == 7
    assert loaded.rollout.stop == ("a", "b c")


def test_a_word_that_is_no_assignment_is_refused(tmp_path):
    assert "is not of the form key=value" in refusal(tmp_path, "rollout.group_size")


def test_the_place_of_a_mistake_is_its_file_and_line(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(settings(tmp_path)) + "train:\n  steps: -1\n")
    line = path.read_text().splitlines().index("  steps: -1") + 1
    with pytest.raises(ConfigError, match=rf"train.steps: -1 is refused.*c.yaml:{line}\)"):
        Config.load(path)


def test_a_key_written_twice_is_refused(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("train:\n  steps: 1\n  steps: 2\n")
    with pytest.raises(ConfigError, match=r"train.steps: written twice .*:2 and .*:3"):
        Config.load(path)


def test_a_missing_file_is_told_with_its_neighbour(tmp_path):
    (tmp_path / "tiny.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"no such configuration file; did you mean .*tiny.yaml"):
        Config.load(tmp_path / "tny.yaml")


# BR-056
def test_defaults_merge_deeply_and_the_nearer_file_wins(tmp_path):
    (tmp_path / "far.yaml").write_text("a: {x: 1, y: 1, z: 1}\nl: [1, 2]\n")
    (tmp_path / "near.yaml").write_text("defaults: far.yaml\na: {y: 2, z: 2}\nl: [3]\n")
    (tmp_path / "other.yaml").write_text("a: {w: 5, x: 5}\n")
    (tmp_path / "own.yaml").write_text("defaults: [near.yaml, other.yaml]\na: {z: 3}\n")
    raw, origins = read_config_file(tmp_path / "own.yaml")
    assert raw == {"a": {"x": 5, "y": 2, "z": 3, "w": 5}, "l": [3]}
    assert origins["a.x"] == f"{tmp_path / 'other.yaml'}:1"
    assert origins["a.y"] == f"{tmp_path / 'near.yaml'}:2"


def test_a_mapping_of_another_kind_replaces_the_inherited_one(tmp_path):
    (tmp_path / "base.yaml").write_text("d: {kind: one, a: 1}\ne: {kind: one, a: 1}\n")
    (tmp_path / "own.yaml").write_text("defaults: base.yaml\nd: {kind: two, b: 2}\ne: {b: 2}\n")
    raw, _ = read_config_file(tmp_path / "own.yaml")
    assert raw["d"] == {"kind": "two", "b": 2}
    assert raw["e"] == {"kind": "one", "a": 1, "b": 2}


def test_defaults_that_go_round_in_a_circle_are_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("defaults: b.yaml\n")
    (tmp_path / "b.yaml").write_text("defaults: a.yaml\n")
    with pytest.raises(ConfigError, match="lead back to the file itself"):
        read_config_file(tmp_path / "a.yaml")


# BR-056
def test_the_resolved_configuration_loads_to_an_equal_one_and_tells_origins(tmp_path):
    first = load(tmp_path, "rollout.stop=['#', 'a: b', \"\\n\"]", "optimizer.lr=3e-7")
    text = first.resolved_yaml()
    (tmp_path / "again.yaml").write_text(text)
    assert Config.load(tmp_path / "again.yaml") == first
    assert "  lr: 3.0e-07  # command line\n" in text
    assert "  warmup_steps: 0\n" in text


def test_a_configuration_never_changes_and_travels_to_other_processes(tmp_path):
    loaded = load(tmp_path)
    with pytest.raises(ValueError, match="frozen"):
        loaded.train.steps = 3
    assert pickle.loads(pickle.dumps(loaded)) == loaded


def test_only_length_place_and_saving_of_a_run_may_differ_on_resumption(tmp_path):
    first = load(tmp_path)
    free = load(tmp_path, "train.steps=9", "run.dir=x", "run.name=y", "checkpoint.every=1")
    assert first.differences(free) == []
    changed = load(tmp_path, "optimizer.lr=0.5", "data.train.size=3", "run.seed=4")
    assert first.differences(changed) == [
        "data.train.size: 20 here, 3 there",
        "optimizer.lr: 1e-06 here, 0.5 there",
        "run.seed: 0 here, 4 there",
    ]


def test_how_weights_travel_and_patience_may_differ_on_resumption_and_are_told(tmp_path):
    first = load(tmp_path)
    free = [
        "weight_sync.transport=gloo",
        "weight_sync.chunk_mib=64",
        "weight_sync.timeout_s=9",
        "weight_sync.delta=true",
        "weight_sync.delta_full_every=3",
        "weight_sync.probe.every=2",
        "rollout.timeout_s=7",
    ]
    changed = load(tmp_path, *free)
    assert changed.differences(first) == []
    told = changed.free_differences(first)
    assert len(told) == len(free)
    assert "weight_sync.transport: 'auto' before, 'gloo' now" in told
    paused = load(tmp_path, "weight_sync.pause=recompute", *free)
    assert paused.differences(first) == ["weight_sync.pause: 'recompute' here, 'keep' there"]
    assert first.free_differences(load(tmp_path, "train.steps=9")) == []


IDLE = [
    (["weight_sync.wire=mxfp8"], "weight_sync.wire", "set quantization: mxfp8"),
    (["weight_sync.delta=true"], "weight_sync.delta", "set policy.dtype: bfloat16"),
    (["weight_sync.delta_full_every=3"], "weight_sync.delta_full_every", "set delta: true"),
    (["weight_sync.probe.prompts=3"], "weight_sync.probe.prompts", "set every: 1"),
    (["weight_sync.probe.max_error=1"], "weight_sync.probe.max_error", "set every: 1"),
    (["grpo.kl.estimator=k1"], "grpo.kl.estimator", "set a coefficient"),
    (["grpo.importance.cap=3"], "grpo.importance.cap", "set old_logprobs: recompute"),
    (["train.steps=3", "optimizer.warmup_steps=9"], "optimizer.warmup_steps", "lower it"),
]


@pytest.mark.parametrize(("words", "key", "cure"), IDLE, ids=lambda value: str(value)[:40])
def test_a_key_that_does_nothing_is_told_with_its_place_and_the_cure(tmp_path, words, key, cure):
    [said] = idle_keys(load(tmp_path, "policy.dtype=float32", *words))
    assert said.startswith(f"{key} does nothing: ")
    assert said.endswith("(command line)")
    assert cure in said


def test_keys_that_work_or_were_never_written_are_not_told(tmp_path):
    assert list(idle_keys(load(tmp_path))) == []
    working = [
        "policy.dtype=bfloat16",
        "rollout.backend.engine.quantization=mxfp8",
        "weight_sync.wire=mxfp8",
        "weight_sync.delta=true",
        "weight_sync.delta_full_every=3",
        "weight_sync.probe={every: 1, prompts: 3, max_error: 1}",
        "grpo.old_logprobs=recompute",
        "grpo.importance.cap=3",
        "grpo.kl={coef: 0.1, estimator: k2}",
    ]
    assert list(idle_keys(load(tmp_path, *working))) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["weight_sync.min_replicas=2"], "is more than rollout.backend.num_replicas: 1"),
        (["weight_sync.transport=nccl"], "train.device: cpu keeps those of the trainer ranks in t"),
        (["weight_sync.transport=ipc"], "rollout.backend.device: cpu keeps those of the replicas"),
        (["policy.replay_blocks=true"], "policy.replay_blocks: true needs what rollout.capture_b"),
        (
            ["weight_sync.transport=nccl"],
            "keeps those of the replicas in the host's memory; set rollout.backend.device: cuda",
        ),
        (
            ["weight_sync.delta=true", "weight_sync.verify=false"],
            "is known by its hash alone; set weight_sync.verify: true, or delta: false",
        ),
        (["policy.micro_batch_tokens=111"], "one row of .* = 112 tokens; raise it to at least 112"),
        (["rollout.backend.engine.max_model_len=111"], "is less than data.max_prompt_tokens"),
        (["policy.replay_routing=true"], "set rollout.capture_routing: true"),
        (["data.train.kind=file", "data.train.path=x.jsonl"], "reward.kind: 'dataset' needs"),
        (["data.eval.kind=file", "data.eval.path=x.jsonl"], "data.eval.kind: 'file' has none"),
        (
            ["data.train={kind: file, path: x, answer_key: null}", "reward.kind=exact"],
            "'exact' compares with the answer, and data.train.answer_key is null",
        ),
        (
            ["policy.dtype=float32", "rollout.backend.engine.quantization=mxfp8"],
            "mxfp8 is made from BF16 weights alone.* set policy.dtype: bfloat16",
        ),
        (
            ["policy.dtype=float32", "train.device=cuda"],
            "float32 is for train.device: cpu; .* set policy.dtype: bfloat16",
        ),
        (
            ["train.num_ranks=4", "train.parallel.ep=3"],
            r"ep: 3 does not divide train.num_ranks: 4; use one of \[1, 2, 4\]",
        ),
        (
            ["train.num_ranks=6", "train.parallel.cp=4"],
            r"cp: 4 does not divide train.num_ranks: 6; use one of \[1, 2, 3, 6\]",
        ),
        (
            ["rollout.backend.gpu_memory_gib=80"],
            "80.0 is of a GPU, and rollout.backend.device: cpu uses none; set device: cuda",
        ),
        (["data.eval=null"], "eval.at_start: True needs held-out prompts"),
        (["data.eval.seed=1", "data.eval.size=20"], "holds the same items as data.train"),
        (["reward.kind=function"], "target is None; give `kind: function` and"),
        (["reward.target=a.b:c"], "kind is 'dataset' and target is 'a.b:c'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_with_the_cure(tmp_path, words, said):
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, *words)


def test_an_input_file_is_found_from_the_repository_of_its_configuration(tmp_path, monkeypatch):
    repository, elsewhere = tmp_path / "repository", tmp_path / "elsewhere"
    (repository / "configs").mkdir(parents=True)
    elsewhere.mkdir()
    (repository / "pyproject.toml").touch()
    (repository / "data.jsonl").touch()
    path = repository / "configs" / "c.yaml"
    path.write_text(yaml.safe_dump(settings(tmp_path)))
    loaded = Config.load(path)
    monkeypatch.chdir(elsewhere)
    assert loaded.find("data.jsonl") == repository / "data.jsonl"
    (elsewhere / "data.jsonl").touch()
    assert loaded.find("data.jsonl") == Path("data.jsonl")
    assert loaded.find("nothing.jsonl") == Path("nothing.jsonl")


def test_every_number_and_switch_of_the_schema_has_a_meaning_written_beside_it():
    wordless = {"eval.at_start", "eval.at_end", "logging.wandb.project", "logging.wandb.entity"}
    obvious = {"logging.sample_table_rows", "sft.steps", "sft.lr", "sft.warmup_steps"}
    keys = set(all_keys(Config))
    assert wordless | obvious <= keys
    undescribed = {key for key in keys if not _description(key)} - wordless - obvious
    sections = {key for key in keys if any(other.startswith(f"{key}.") for other in keys)}
    kinds = {key for key in keys if key.endswith(".kind")}
    assert undescribed - sections - kinds == set()


def _description(key: str) -> str | None:
    """The docstring of a dotted key, in any member of a union on the way."""
    sections = [Config]
    *way, name = key.split(".")
    for part in way:
        annotations = [s.model_fields[part].annotation for s in sections if part in s.model_fields]
        sections = [m for a in annotations for m in [a, *getattr(a, "__args__", ())]]
        sections = [m for m in sections if hasattr(m, "model_fields")]
    fields = [s.model_fields[name] for s in sections if name in s.model_fields]
    return next((f.description for f in fields if f.description), None)


def test_a_configuration_from_a_mapping_equals_one_from_a_file(tmp_path):
    assert config(tmp_path) == load(tmp_path)


def test_no_phase_of_a_sync_is_given_less_than_a_second(tmp_path):
    said = refusal(tmp_path, "weight_sync.timeout_s=0.5")
    assert "weight_sync.timeout_s: 0.5 is refused" in said
    assert load(tmp_path, "weight_sync.timeout_s=1").weight_sync.timeout_s == 1
