import math

import numpy as np
import pytest

from m3rl.config import DataConfig, RewardConfig
from m3rl.rollout.chat import ChatFormat
from m3rl.rollout.environments import SingleTurn
from m3rl.rollout.rewards import RewardPool, Score
from m3rl.types import Completion, Prompt
from tests.m3rl.tiny_tokenizer import write_tokenizer


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    chat = ChatFormat.load(write_tokenizer(tmp_path_factory.mktemp("model")))
    data = DataConfig.model_validate({"train": {"kind": "file", "path": "x.jsonl"}})
    reward = RewardConfig(kind="exact", workers=1, max_error_frac=0.5)
    with RewardPool(reward, data) as rewards:
        yield SingleTurn(chat, rewards, partial_credit=True)


def pair(ordinal, index, text, reason="stop", answer="cba"):
    prompt = Prompt(ordinal, np.zeros(1, np.int32), "q", "env", {"answer": answer})
    completion = Completion(
        prompt_ordinal=ordinal,
        sample_index=index,
        group_id=str(ordinal),
        prompt_ids=prompt.ids,
        completion_ids=np.ones(3, np.int32),
        text=text,
        logprobs=np.zeros(3, np.float32),
        loss_mask=np.ones(3, np.bool_),
        finish_reason=reason,
        version_spans=np.array([[0, 0]]),
        seed=0,
    )
    return prompt, completion


# BR-036
def test_each_completion_gets_its_own_reward_whatever_the_order_of_arrival(environment):
    pairs = [pair(o, i, f"{o}{i}", answer=f"{o}{i}") for o in range(4) for i in range(3)]
    wrong = pair(9, 0, "x")
    shuffled = [pairs[i] for i in np.random.default_rng(0).permutation(12)]
    environment.score([*shuffled[:5], wrong, *shuffled[5:]])
    assert [c.reward for _, c in pairs] == [1.0] * 12
    assert wrong[1].reward == 0.0
    assert wrong[1].reward_status == "ok"


def test_the_scorer_sees_the_answer_and_not_the_thinking(environment):
    thought = pair(0, 0, "<mm:think>abc</mm:think>cba")
    unclosed = pair(0, 1, "<mm:think>cba")
    environment.score([thought, unclosed])
    assert thought[1].reward == 1.0
    assert unclosed[1].reward == 0.0


# BR-017
@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_completion_that_did_not_come_to_its_end_stays_unscored(environment, reason):
    whole, broken = pair(0, 0, "cba"), pair(0, 1, "cba", reason)
    environment.score([whole, broken])
    assert whole[1].reward == 1.0
    assert broken[1].reward_status == "unscored"
    assert math.isnan(broken[1].reward)


def test_a_completion_cut_by_the_limit_is_scored_for_what_it_says(environment):
    cut = pair(0, 0, "cba", "length")
    environment.score([cut])
    assert (cut[1].reward, cut[1].reward_status) == (1.0, "ok")


# BR-079
def test_a_reward_that_failed_is_not_a_number(environment):
    good, bad = pair(0, 0, "cba"), pair(0, 1, "cba")
    bad[0].payload.clear()  # the scorer misses the answer and raises
    environment.score([good, bad])
    assert bad[1].reward_status == "error"
    assert math.isnan(bad[1].reward)


def test_without_partial_credit_only_a_solution_counts_and_the_score_is_kept():
    class Scores:
        def score(self, items):
            return [Score("ok", 0.67), Score("ok", 1.0, {"a": 1.0}), Score("timeout")]

    class Plain:
        def answer(self, text):
            return text

    pairs = [pair(0, i, "cba") for i in range(3)]
    SingleTurn(Plain(), Scores(), partial_credit=False).score(pairs)
    assert [c.reward for _, c in pairs[:2]] == [0.0, 1.0]
    assert pairs[0][1].reward_parts == {"score": 0.67}
    assert pairs[1][1].reward_parts == {"score": 1.0, "a": 1.0}
    assert np.isnan(pairs[2][1].reward)
    assert pairs[2][1].reward_status == "timeout"
