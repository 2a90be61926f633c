import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m3rl.config import ConfigError
from m3rl.data import Item, PromptSet, PromptStream, load_data
from m3rl.rollout.chat import ChatFormat
from tests.m3rl.run_files import config
from tests.m3rl.tiny_tokenizer import PROMPT_OVERHEAD, write_tokenizer


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return ChatFormat.load(write_tokenizer(tmp_path_factory.mktemp("model")))


def prompts(n, salt=""):
    items = [Item(f"q{i}", {"answer": f"a{i}{salt}"}, f"test[{i}]") for i in range(n)]
    return PromptSet("test", items, [np.array([i], np.int32) for i in range(n)])


def stream(n=10, seed=3, shuffle=True):
    return PromptStream(prompts(n), seed=seed, shuffle=shuffle)


def taken(prompt_stream, n):
    return [prompt.text for prompt in prompt_stream.take(n)]


# BR-044
@pytest.mark.parametrize("stop", range(0, 13))
def test_a_resumed_stream_equals_the_straight_one_also_over_epoch_borders(stop):
    straight = stream()
    expected = [taken(straight, 2) for _ in range(12)]
    first = stream()
    before = [taken(first, 2) for _ in range(stop)]
    state = json.loads(json.dumps(first.state()))
    second = stream()
    second.restore(state)
    assert before + [taken(second, 2) for _ in range(12 - stop)] == expected


def test_each_epoch_has_every_prompt_once_in_an_order_of_its_own():
    several = stream()
    epochs = [taken(several, 10) for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [sorted(epochs[0])] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert taken(stream(seed=4), 10) != epochs[0]
    assert taken(stream(), 10) == epochs[0]


# BR-045
def test_resuming_at_the_very_end_of_an_epoch_goes_on_with_the_next_one():
    straight = stream(6)
    expected = taken(straight, 12)
    first = stream(6)
    taken(first, 6)
    second = stream(6)
    second.restore(first.state())
    assert second.take(1)[0].ordinal == 6
    assert taken(second, 5) == expected[7:]


def test_how_many_are_taken_at_a_time_changes_nothing():
    pieces = stream()
    assert taken(pieces, 1) + taken(pieces, 5) + taken(pieces, 17) == taken(stream(), 23)


def test_ordinals_count_up_from_zero_and_are_never_reused():
    numbered = stream(4)
    assert [p.ordinal for p in numbered.take(11)] == list(range(11))
    assert numbered.epoch == 11 / 4


# BR-047
def test_prompts_generated_ahead_and_not_trained_come_again_and_each_is_trained_once():
    ahead = stream(8)
    generated = ahead.take(4)
    trained = generated[:2]
    saved = {**ahead.state(), "next_ordinal": trained[-1].ordinal + 1}  # what was trained counts
    resumed = stream(8)
    resumed.restore(saved)
    trained += resumed.take(6)
    assert sorted(p.text for p in trained) == [f"q{i}" for i in range(8)]


def test_without_shuffling_the_datasets_own_order_repeats():
    assert taken(stream(3, shuffle=False), 7) == ["q0", "q1", "q2"] * 2 + ["q0"]


@pytest.mark.parametrize("changed", [prompts(11), prompts(10, "!")])
def test_a_dataset_that_changed_since_the_checkpoint_is_refused(changed):
    with pytest.raises(ConfigError, match="changed since the checkpoint"):
        PromptStream(changed, seed=3, shuffle=True).restore(stream().state())


def file_config(tmp_path, rows, held_out=None, **data):
    sections = {"train": {"kind": "file", "path": str(tmp_path / "train.jsonl")}}
    write_jsonl(tmp_path / "train.jsonl", rows)
    off = {"at_start": False, "at_end": False}
    if held_out is not None:
        write_jsonl(tmp_path / "eval.jsonl", held_out)
        sections["eval"] = {"kind": "file", "path": str(tmp_path / "eval.jsonl")}
    return config(tmp_path, data=sections | data, reward={"kind": "exact"}, eval=off)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows(*questions):
    return [{"question": q, "answer": q[::-1], "level": i} for i, q in enumerate(questions)]


# BR-092
def test_a_prompt_carries_the_very_ids_that_were_checked_and_the_whole_row(tmp_path, chat):
    data = load_data(file_config(tmp_path, rows("abc", "de")), chat)
    [first, second] = PromptStream(data.train, seed=0, shuffle=False).take(2)
    assert first.ids.tolist() == chat.encode_prompt("abc").tolist()
    assert first.ids is data.train.prompt(0, 5).ids
    assert second.payload == {"question": "de", "answer": "ed", "level": 1}
    assert second.environment == "train"


def test_parquet_and_jsonl_hold_the_same_prompts(tmp_path, chat):
    lines = load_data(file_config(tmp_path, rows("abc", "de")), chat)
    pq.write_table(pa.Table.from_pylist(rows("abc", "de")), tmp_path / "train.parquet")
    table = load_data(
        config(
            tmp_path,
            data={"train": {"kind": "file", "path": str(tmp_path / "train.parquet")}},
            reward={"kind": "exact"},
            eval={"at_start": False, "at_end": False},
        ),
        chat,
    )
    assert table.train.fingerprint == lines.train.fingerprint
    assert table.train.prompt(1, 0).payload == lines.train.prompt(1, 0).payload


def test_prompts_that_are_held_out_are_removed_from_train_and_counted(tmp_path, chat):
    data = load_data(file_config(tmp_path, rows("a", "b", "a", "c"), rows("a", "x")), chat)
    assert [p.text for p in data.train.first(9)] == ["b", "c"]
    assert [p.text for p in data.eval.first(9)] == ["a", "x"]
    assert data.counts["data/removed_held_out"] == 2


def test_train_that_is_all_held_out_is_refused(tmp_path, chat):
    with pytest.raises(ConfigError, match=r"all 2 prompts also occur in data\.eval"):
        load_data(file_config(tmp_path, rows("a", "b"), rows("b", "a")), chat)


# BR-092
def test_prompts_of_7_8_and_9_tokens_with_a_limit_of_8(tmp_path, chat):
    limit = PROMPT_OVERHEAD + 8
    wide = rows("a" * 7, "a" * 8, "a" * 9)
    with pytest.raises(ConfigError, match=rf"1 of 3 .*train.jsonl:3, has {limit + 1} tokens"):
        load_data(file_config(tmp_path, wide, max_prompt_tokens=limit), chat)
    data = load_data(file_config(tmp_path, wide, max_prompt_tokens=limit, overlong="drop"), chat)
    assert [len(p.ids) - PROMPT_OVERHEAD for p in data.train.first(9)] == [7, 8]
    assert data.counts["data/dropped_overlong"] == 1


def test_dropping_every_prompt_is_refused(tmp_path, chat):
    with pytest.raises(ConfigError, match="the shortest has 15 tokens"):
        load_data(file_config(tmp_path, rows("a"), max_prompt_tokens=5, overlong="drop"), chat)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "data.train: the dataset is empty"),
        ('{"question": "a", "answer": 1}\n{"question": " ", "answer": 1}\n', ":2 has an empty"),
        ('{"question": null, "answer": 1}\n', "has an empty prompt"),
        ('{"text": "a"}\n', "prompt_key: .*:1 has no 'question'; it has text"),
        ('{"question": "a"}\n', "answer_key: .*:1 has no 'answer'"),
        ('{"question": "a", "answer": 1}\n{"quest', ":2 is not JSON"),
        ("[1]\n", ":1 is no JSON object"),
        ('{"question": "a [e~[ b", "answer": 1}\n', "contains .*a marker of the dialogue"),
    ],
)
def test_a_malformed_file_is_refused_with_its_line(tmp_path, chat, content, said):
    broken = file_config(tmp_path, [])
    (tmp_path / "train.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=said):
        load_data(broken, chat)


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        ({"kind": "file", "path": "no.jsonl"}, "data.train.path: no file no.jsonl"),
        ({"kind": "file", "path": "x.csv"}, "neither .jsonl nor .parquet"),
        ({"kind": "reasoning_gym", "name": "spell_bckward", "size": 1}, "did you mean .*'spell_ba"),
        (
            {"kind": "reasoning_gym", "name": "spell_backward", "size": 1, "params": {"foo": 1}},
            "data.train.params: .* is refused by the generator spell_backward: .*foo",
        ),
    ],
)
def test_a_dataset_that_does_not_exist_is_refused(tmp_path, chat, dataset, said):
    kind = "exact" if dataset["kind"] == "file" else "dataset"
    off = {"at_start": False, "at_end": False}
    wrong = config(tmp_path, data={"train": dataset}, reward={"kind": kind}, eval=off)
    with pytest.raises(ConfigError, match=said):
        load_data(wrong, chat)


def test_generated_prompts_carry_what_their_scorer_needs_and_the_question_alone(tmp_path, chat):
    from reasoning_gym import create_dataset

    data = load_data(config(tmp_path), chat)
    prompt = data.train.prompt(0, 0)
    index = prompt.payload["metadata"]["source_index"]
    source = create_dataset("spell_backward", size=20, seed=1)[index]
    assert prompt.text == source["question"]
    assert {**source, "dataset": "spell_backward {}"} == prompt.payload
    assert len(data.eval.first(3)) == 3


def test_generators_whose_seeds_are_near_share_items_and_train_loses_them(tmp_path, chat):
    near = config(
        tmp_path,
        data={
            "train": {"kind": "reasoning_gym", "name": "spell_backward", "size": 20, "seed": 1},
            "eval": {"kind": "reasoning_gym", "name": "spell_backward", "size": 5, "seed": 2},
            "max_prompt_tokens": 100,
        },
    )
    data = load_data(near, chat)
    assert data.counts["data/removed_held_out"] >= 5
    assert not {p.text for p in data.train.first(20)} & {p.text for p in data.eval.first(5)}
