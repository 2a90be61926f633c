"""The algorithm's switches: presets, and what excludes or idles what."""

import pytest
import yaml

from m3rl.assemble import rank_settings
from m3rl.config import Config, ConfigError
from m3rl.config_checks import idle_keys
from m3rl.config_file import flatten
from m3rl.config_grpo import PRESETS, GRPOConfig
from tests.m3rl.run_files import settings


def load(folder, *overrides, **grpo):
    path = folder / "c.yaml"
    path.write_text(yaml.safe_dump(settings(folder, **({"grpo": grpo} if grpo else {}))))
    return Config.load(path, overrides)


DEFAULTS = {
    "preset": None,
    "advantage": "grpo",
    "objective": "ppo_clip",
    "ratio": "token",
    "clip_low": 0.2,
    "clip_high": 0.28,
    "dual_clip": None,
    "aggregation": "token_mean",
    "constant_length": None,
    "kl.coef": 0.0,
    "kl.estimator": "k3",
    "kl.place": "loss",
    "kl.unbiased": False,
    "kl.target": None,
    "kl.gain": 0.1,
    "entropy_coef": 0.0,
    "old_logprobs": "behaviour",
    "updates_per_batch": 1,
    "skip_zero_variance": True,
    "refill_rounds": 0,
    "truncated": "keep",
    "overlong.buffer": 0,
    "overlong.penalty": 1.0,
    "importance.kind": "tis",
    "importance.cap": 2.0,
}
CHANGES = {
    "grpo": {"aggregation": "sequence_mean", "clip_high": 0.2, "kl.coef": 0.04},
    "dr_grpo": {"advantage": "dr_grpo", "aggregation": "constant", "clip_high": 0.2},
    "dapo": {"refill_rounds": 10},
    "gspo": {
        "ratio": "sequence",
        "aggregation": "sequence_mean",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "old_logprobs": "recompute",
    },
    "cispo": {"objective": "cispo"},
    "rloo": {
        "advantage": "rloo",
        "objective": "pg",
        "aggregation": "constant",
        "kl.coef": 0.05,
        "kl.estimator": "k1",
        "kl.place": "reward",
        "old_logprobs": "recompute",
    },
}


def test_without_a_preset_the_values_are_the_defaults(tmp_path):
    assert flatten(load(tmp_path).grpo.model_dump()) == DEFAULTS


def test_the_small_configuration_trains_with_the_defaults():
    assert Config.load("configs/tiny_cpu.yaml").grpo == GRPOConfig()


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_gives_its_papers_values_and_works(tmp_path, preset):
    loaded = load(tmp_path, f"grpo.preset={preset}")
    assert flatten(loaded.grpo.model_dump()) == DEFAULTS | {"preset": preset} | CHANGES[preset]
    assert list(idle_keys(loaded)) == []
    assert rank_settings(loaded).loss.objective == loaded.grpo.objective


def test_written_keys_win_over_a_preset_at_any_depth_and_from_any_place(tmp_path):
    loaded = load(tmp_path, "grpo.preset=grpo", "grpo.kl.coef=0.001", kl={"unbiased": True})
    assert loaded.grpo.kl.coef == 0.001
    assert loaded.grpo.kl.unbiased
    assert loaded.grpo.aggregation == "sequence_mean"
    # A key in the inherited file is written too.
    inherited = load(tmp_path, "grpo.preset=grpo", clip_high=0.3)
    assert inherited.grpo.clip_high == 0.3


def test_the_resolved_configuration_tells_what_came_from_the_preset_and_loads_equal(tmp_path):
    loaded = load(tmp_path, "grpo.preset=gspo", "grpo.clip_high=0.001")
    text = loaded.resolved_yaml()
    assert "  ratio: sequence  # grpo.preset: gspo\n" in text
    assert "  clip_high: 0.001  # command line\n" in text
    assert "  entropy_coef: 0.0\n" in text
    (tmp_path / "again.yaml").write_text(text)
    assert Config.load(tmp_path / "again.yaml") == loaded


@pytest.mark.parametrize("value", ["ppo", "[grpo]", "{a: 1}", "3"])
def test_a_preset_that_does_not_exist_is_refused_with_those_that_do(tmp_path, value):
    with pytest.raises(ConfigError, match=r"grpo\.preset.*(unknown key|'dr_grpo')"):
        load(tmp_path, f"grpo.preset={value}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["grpo.objective=dppo_tv", "grpo.ratio=sequence"], "bounds the probability of single"),
        (["grpo.kl={coef: 0.1, estimator: k2, unbiased: true}"], "set grpo.kl.estimator: k3 or k1"),
        (["grpo.kl.target=0.1"], "set the coefficient to begin with"),
        (["grpo.refill_rounds=2", "grpo.skip_zero_variance=false"], "or refill_rounds: 0"),
        (["grpo.overlong.buffer=13"], "longer than rollout.max_tokens: 12"),
        (["grpo.advantage=maxrl", "grpo.overlong.buffer=4"], "set truncated: mask"),
        (
            ["grpo.advantage=maxrl", "grpo.kl={coef: 0.1, place: reward}"],
            "set place: loss, or another advantage",
        ),
        (
            ["grpo.preset=gspo", "grpo.old_logprobs=behaviour"],
            r"clip_low: 0\.0003 is below 0\.01.* set old_logprobs: recompute, or wider bounds",
        ),
        (
            ["grpo={objective: cispo, ratio: sequence, clip_high: 0.001}"],
            r"clip_high: 0\.001 is below 0\.01.* set old_logprobs: recompute",
        ),
        (["grpo.preset=rloo", "grpo.old_logprobs=behaviour"], "pg has no ratio that would carry"),
        (["grpo.objective=pg"], "set old_logprobs: recompute, or importance.kind: none"),
        (["grpo.preset=rloo", "grpo.updates_per_batch=2"], "set updates_per_batch: 1"),
    ],
)
def test_switches_that_exclude_one_another_are_refused_with_the_cure(tmp_path, words, said):
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, *words)


PG = ["grpo.objective=pg", "grpo.old_logprobs=recompute"]


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ([*PG, "grpo.ratio=sequence"], "grpo.ratio"),
        ([*PG, "grpo.clip_high=0.3"], "grpo.clip_high"),
        (["grpo.objective=cispo", "grpo.clip_low=0.3"], "grpo.clip_low"),
        (["grpo.objective=cispo", "grpo.dual_clip=3"], "grpo.dual_clip"),
        (["grpo.constant_length=100"], "grpo.constant_length"),
        (["grpo.overlong.penalty=2"], "grpo.overlong.penalty"),
        (["grpo.kl.place=reward"], "grpo.kl.place"),
        (["grpo.kl.unbiased=true"], "grpo.kl.unbiased"),
        (["grpo.kl={coef: 1, place: reward, unbiased: true}"], "grpo.kl.unbiased"),
        (["grpo.kl={coef: 1, estimator: k1}"], "grpo.kl.coef"),
        (["grpo.kl={coef: 1, gain: 0.2}"], "grpo.kl.gain"),
    ],
    ids=str,
)
def test_switches_that_do_nothing_beside_others_are_told(tmp_path, words, key):
    [said] = idle_keys(load(tmp_path, *words))
    assert said.startswith(f"{key} does nothing: ")


def test_the_plain_policy_gradient_may_be_left_uncorrected_and_says_that_a_cap_does_nothing(
    tmp_path,
):
    given = {"objective": "pg", "importance": {"kind": "none", "cap": 3.0}}
    said = list(idle_keys(load(tmp_path, **given)))
    assert said
    assert all("it is always 1; set old_logprobs: recompute" in message for message in said)


def test_what_a_preset_set_is_not_told_as_idle(tmp_path):
    assert list(idle_keys(load(tmp_path, "grpo.preset=gspo", "grpo.objective=pg"))) == []
    assert list(idle_keys(load(tmp_path, "grpo.preset=rloo", "grpo.kl.coef=0"))) == []


def test_combinations_that_work_are_not_told(tmp_path):
    for words in (
        ["grpo.kl={coef: 1, estimator: k1, place: reward, target: 0.1, gain: 0.2}"],
        ["grpo.kl={coef: 1, estimator: k1, unbiased: true}"],
        ["grpo.objective=cispo", "grpo.ratio=sequence", "grpo.clip_high=2"],
        ["grpo.ratio=sequence"],
        ["grpo.ratio=sequence", "grpo.clip_low=3e-4", "grpo.old_logprobs=recompute"],
        [*PG, "grpo.importance.cap=3"],
        ["grpo.objective=dppo_tv", "grpo.clip_low=0.1", "grpo.clip_high=0.1"],
        ["grpo.aggregation=constant", "grpo.constant_length=100", "grpo.entropy_coef=0.01"],
        ["grpo.overlong={buffer: 4, penalty: 0.5}", "grpo.refill_rounds=3"],
    ):
        assert list(idle_keys(load(tmp_path, *words))) == []


@pytest.mark.parametrize(
    "word",
    [
        "grpo.entropy_coef=2",
        "grpo.entropy_coef=-0.1",
        "grpo.refill_rounds=-1",
        "grpo.refill_rounds=5000",
        "grpo.constant_length=0",
        "grpo.overlong.penalty=0",
        "grpo.kl.target=0",
        "grpo.aggregation=mean",
    ],
)
def test_values_out_of_range_are_refused_by_name(tmp_path, word):
    with pytest.raises(ConfigError, match=word.partition("=")[0]):
        load(tmp_path, word)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("loss_agg_mode=x", "aggregation"),
        ("grpo.dynamic_sampling=true", "refill_rounds"),
        ("grpo.filter_groups=true", "refill_rounds"),
        ("grpo.importance_sampling_level=x", "ratio"),
        ("grpo.entropy_coeff=0.1", "entropy_coef"),
    ],
)
def test_the_names_of_other_frameworks_lead_to_ours(tmp_path, word, meant):
    with pytest.raises(ConfigError, match=rf"did you mean '(grpo\.)?{meant}'"):
        load(tmp_path, word)
