from pathlib import Path

from m3rl.report import accuracy_table, choose_samples, sample_table, table
from tests.m3rl.completions import completion, group


def test_the_best_and_the_worst_of_each_group_are_shown():
    groups = [
        group(*[completion(reward=r, text=f"{g}:{r}") for r in (0.2, 1.0, 0.0)], answer="x")
        for g in range(3)
    ]
    shown = choose_samples(groups, 3)
    assert [s.completion for s in shown] == ["0:1.0", "0:0.0", "1:1.0"]
    assert shown[0].answer == "x"
    assert shown[0].num_tokens == 3


def test_a_completion_whose_score_failed_counts_as_the_worst():
    failed = completion(reward=float("nan"), reward_status="error", text="failed")
    shown = choose_samples([group(failed, completion(reward=0.0), completion(reward=1.0))], 2)
    assert [s.completion for s in shown] == ["text", "failed"]


def test_a_table_row_stays_one_line_whatever_the_model_wrote():
    wild = group(completion(text="a\nb\tc\x1b[31m\\" + "z" * 500, reward=0.5))
    lines = sample_table(choose_samples([wild], 1)).splitlines()
    assert len(lines) == 3
    assert r"a\nb\tc·[31m\\zz" in lines[2]
    assert "…" in lines[2]
    assert max(len(line) for line in lines) <= 120


def test_numbers_stand_to_the_right_and_text_to_the_left():
    assert table(["name", "n"], [["a", "5"], ["long name", "10"]], right=(1,)) == (
        "name        n\n─────────  ──\na           5\nlong name  10"
    )


def test_the_last_table_has_both_accuracies_their_change_and_the_directory():
    text = accuracy_table(
        0.25, 0.805, num_prompts=200, steps=100, seconds=431.4, run_dir=Path("runs/x")
    )
    rows = [line.split() for line in text.splitlines()]
    assert ["before", "25.0", "%"] in rows
    assert ["after", "80.5", "%"] in rows
    assert ["change", "+55.5", "points"] in rows
    assert "100 training steps in 431 s" in text
    assert "run directory: runs/x" in text
