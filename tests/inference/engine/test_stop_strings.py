"""Stop strings end a completion where they end; the text is cut, the ids are not."""

import pytest

from inference.engine import Request
from inference.engine.stop import StopMatcher
from tests.inference.engine.engines import (
    char_tokenizer,
    greedy,
    make_engine,
    prompt,
    run,
    run_alone,
)


def push_all(text, stop):
    """(tokens pushed until the match, text of the matcher); None tokens without a match."""
    tokenizer = char_tokenizer()
    matcher = StopMatcher(tokenizer, stop)
    for count, token in enumerate(tokenizer.encode(text, add_special_tokens=False).ids, 1):
        if matcher.push(token):
            return count, matcher.text
    return None, matcher.text


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("abcdef", ("cd",), (4, "ab")),
        ("abcdef", ("zz", "ef", "cd"), (4, "ab")),
        ("aab", ("ab",), (3, "a")),
        ("ab", ("ab",), (2, "")),
        ("abc", ("cab",), (None, "abc")),
        ("x=é!", ("é",), (4, "x=")),  # 'é' is two byte tokens
        ("né", ("\n", "n"), (1, "")),
    ],
)
def test_a_stop_string_is_found_with_its_last_token(text, stop, expected):
    assert push_all(text, stop) == expected


def test_the_earliest_of_two_stop_strings_in_one_piece_cuts():
    class Pieces:
        """A stream of whole strings."""

        def step(self, tokenizer, piece):
            return piece

    matcher = StopMatcher(None, ("cd", "b"))
    matcher._stream = Pieces()
    assert not matcher.push("a")
    assert matcher.push("bcde")
    assert matcher.text == "a"


def test_half_a_character_is_no_text_yet():
    tokenizer = char_tokenizer()
    first, second = tokenizer.encode("é", add_special_tokens=False).ids
    matcher = StopMatcher(tokenizer, ("\ufffd",))
    assert not matcher.push(first)
    assert matcher.text == ""
    assert not matcher.push(second)
    assert matcher.text == "é"


def test_the_engine_stops_there_and_keeps_the_tokens():
    tokenizer = char_tokenizer()
    base = run_alone(prompt(9), greedy(20)).token_ids.tolist()
    text = tokenizer.decode(base)
    stop = text[6:8]
    end = text.index(stop) + 2
    requests = [
        Request("stops", prompt(9), greedy(20, stop=("never!", stop))),
        Request("runs", prompt(9), greedy(20, stop=("never!",))),
    ]
    stops, runs = run(make_engine(tokenizer=tokenizer), requests)
    assert (stops.finish_reason, runs.finish_reason) == ("stop", "length")
    assert stops.token_ids.tolist() == base[:end]
    assert stops.text == text[: end - 2]
    assert len(stops.logprobs) == end
    assert runs.text == text


def test_a_stop_string_survives_preemption():
    tokenizer = char_tokenizer()
    engine = make_engine(tokenizer=tokenizer, num_pages=12, enable_prefix_cache=False)
    bases = [run_alone(prompt(5, seed=i), greedy(22)).token_ids.tolist() for i in range(4)]
    texts = [tokenizer.decode(base) for base in bases]
    requests = [
        Request(f"r{i}", prompt(5, seed=i), greedy(22, stop=(texts[i][18:21],))) for i in range(4)
    ]
    outputs = run(engine, requests)
    assert engine.stats()["preemptions"] >= 1
    for text, base, output in zip(texts, bases, outputs, strict=True):
        start = text.index(text[18:21])
        assert output.text == text[:start]
        assert output.token_ids.tolist() == base[: start + 3]
