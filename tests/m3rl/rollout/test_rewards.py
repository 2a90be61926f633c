import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from multiprocessing.connection import Pipe
from pathlib import Path

import pytest

from m3rl.config import DataConfig, RewardConfig
from m3rl.rollout.placement import ray_cluster
from m3rl.rollout.reward_worker import NAN, dataset_key, outcome
from m3rl.rollout.rewards import RewardError, RewardPool

DATA = DataConfig.model_validate({"train": {"kind": "file", "path": "x.jsonl"}})

SCORERS = """
import os, subprocess, sys, time

def score(payload, text):
    if text == "hang":
        time.sleep(3600)
    if text == "raise":
        raise ValueError("no verdict on this")
    if text == "base":
        class Stop(BaseException): pass
        raise Stop("not an Exception")
    if text == "die":
        os._exit(7)
    if text == "nan":
        return float("nan")
    if text == "parts":
        return {"format": 0.25, "answer": 0.5}
    if text == "none":
        return None
    if text == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        open(payload["file"], "w").write(str(child.pid))
        time.sleep(3600)
    if text == "print":
        print("a word of the scorer", flush=True)
        os.write(1, b"another one")
    if text == "fork":
        os.fork()
        return 1.0
    if text == "huge":
        return 10**400
    if text == "unspeakable":
        class Mute:
            def __repr__(self): raise RuntimeError("I cannot be shown")
        return Mute()
    if text == "pid":
        return os.getpid()
    return float(text == payload["answer"])
"""


@pytest.fixture
def pool(tmp_path, monkeypatch):
    """Makes pools on the module above and closes them."""
    (tmp_path / "my_scorers.py").write_text(textwrap.dedent(SCORERS))
    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def make(data=DATA, **settings):
        settings = {"kind": "function", "target": "my_scorers:score", "workers": 1} | settings
        made.append(RewardPool(RewardConfig.model_validate(settings), data))
        return made[-1]

    yield make
    for each in made:
        each.close()


def items(*texts):
    return [({"answer": "yes"}, text) for text in texts]


def test_scores_come_back_in_the_order_asked_whoever_computed_them(pool):
    texts = ["yes" if i % 3 else "no" for i in range(100)]
    scores = pool(workers=2).score(items(*texts))
    assert [s.value for s in scores] == [float(t == "yes") for t in texts]
    assert {s.status for s in scores} == {"ok"}


# BR-079
def test_every_fault_of_a_scorer_is_a_status_and_never_a_zero(pool):
    texts = ["yes", "raise", "base", "nan", "none", "die", "no", "parts"]
    scores = pool(max_error_frac=0.8).score(items(*texts))
    statuses = ["ok", "error", "error", "nonfinite", "error", "error", "ok", "ok"]
    assert [s.status for s in scores] == statuses
    assert all(math.isnan(s.value) for s in scores if s.status != "ok")
    assert scores[1].message == "ValueError: no verdict on this"
    assert "exit code 7" in scores[5].message
    assert (scores[7].value, scores[7].parts) == (0.75, {"format": 0.25, "answer": 0.5})


# BR-078
def test_a_scorer_that_hangs_on_one_item_costs_that_item_only(pool):
    scoring = pool(timeout_s=1.0, workers=2)
    texts = ["yes", "no", "hang", "yes", "yes", "no", "yes", "yes"]
    scores = scoring.score(items(*texts))
    assert [s.status for s in scores] == ["ok"] * 2 + ["timeout"] + ["ok"] * 5
    assert math.isnan(scores[2].value)
    again = scoring.score(items(*["yes"] * 8))
    assert [s.value for s in again] == [1.0] * 8


# BR-077
def test_a_killed_worker_takes_the_processes_of_its_scorer_along(pool, tmp_path):
    file = tmp_path / "child"
    scoring = pool(timeout_s=3.0, max_error_frac=1.0)
    [score] = scoring.score([({"file": str(file)}, "child")])
    assert score.status == "timeout"
    wait_until_gone(int(file.read_text()))


# BR-079
def test_more_failures_than_allowed_end_the_call_with_the_first_cause(pool):
    scoring = pool(max_error_frac=0.5)
    scoring.score(items("raise", "yes"))
    with pytest.raises(RewardError, match=r"2 of 3 rewards failed \(2 error\).*no verdict on this"):
        scoring.score(items("raise", "raise", "yes"))
    assert [s.value for s in scoring.score(items("yes"))] == [1.0]


def test_an_abandoned_call_never_answers_a_later_one(pool):
    scoring = pool(max_error_frac=0.1)
    with pytest.raises(RewardError):
        scoring.score(items("raise", *["no"] * 8))
    assert [s.value for s in scoring.score(items("yes", "yes"))] == [1.0, 1.0]


def test_a_scorer_that_cannot_be_imported_says_why(pool):
    with pytest.raises(RewardError, match=r"cannot be started: ModuleNotFoundError.*nowhere"):
        pool(target="nowhere:score").score(items("x"))
    with pytest.raises(RewardError, match="cannot be started: AttributeError"):
        pool(target="my_scorers:missing").score(items("x"))


# BR-079
def test_scoring_works_from_threads_at_the_same_time(pool):
    scoring = pool(workers=2)
    results = {}

    def run(name, text):
        results[name] = [s.value for s in scoring.score(items(*[text] * 20))]

    threads = [threading.Thread(target=run, args=(i, "yes" if i else "no")) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: [0.0] * 20, 1: [1.0] * 20}


def test_a_worker_that_died_while_idle_is_replaced_without_blame(pool):
    scoring = pool()
    [score] = scoring.score(items("pid"))
    os.kill(int(score.value), signal.SIGKILL)
    time.sleep(0.2)
    again = scoring.score(items("yes", "no"))
    assert [(s.status, s.value) for s in again] == [("ok", 1.0), ("ok", 0.0)]


# BR-077
def test_closing_ends_every_process(pool):
    scoring = pool(workers=2)
    pids = {int(s.value) for s in scoring.score(items(*["pid"] * 40))}
    scoring.close()
    scoring.close()
    assert not any(is_running(pid) for pid in pids)


# BR-077
def test_workers_end_with_their_parent_even_while_a_scorer_hangs(tmp_path):
    (tmp_path / "my_scorers.py").write_text(textwrap.dedent(SCORERS))
    program = f"""
        import os, sys, threading, time
        sys.path.insert(0, {str(tmp_path)!r})
        from tests.m3rl.rollout.test_rewards import DATA, RewardConfig, RewardPool, items
        settings = dict(kind="function", target="my_scorers:score", workers=1, timeout_s=1000)
        pool = RewardPool(RewardConfig(**settings), DATA)
        print(int(pool.score(items("pid"))[0].value), flush=True)
        threading.Thread(target=pool.score, args=(items("hang"),), daemon=True).start()
        time.sleep(0.3)
        os._exit(1)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    wait_until_gone(int(ended.stdout))


def test_what_a_scorer_prints_does_not_mix_with_the_results_on_stdout(tmp_path):
    (tmp_path / "my_scorers.py").write_text(textwrap.dedent(SCORERS))
    program = f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from tests.m3rl.rollout.test_rewards import DATA, RewardConfig, RewardPool, items
        with RewardPool(
            RewardConfig(kind="function", target="my_scorers:score", workers=1), DATA
        ) as pool:
            pool.score(items("print"))
        print("the result")
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == "the result\n"
    assert "a word of the scorer" in ended.stderr
    assert "another one" in ended.stderr


@pytest.mark.parametrize("moment", ["before the scorer", "unread answer", "waiting for items"])
def test_a_worker_whose_pool_is_gone_ends_without_a_word(moment):
    ours, theirs = Pipe()
    with theirs:
        worker = subprocess.Popen(
            [
                *(sys.executable, "-m", "m3rl.rollout.reward_worker"),
                *(str(theirs.fileno()), str(os.getpid())),
            ],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
    if moment != "before the scorer":
        ours.send(("exact", None))
        assert ours.poll(30)  # its 'ready' has come; closing with it unread resets the connection
    if moment == "waiting for items":
        assert ours.recv() == ("ready", "")
    ours.close()
    _, errors = worker.communicate(timeout=30)
    assert (errors, worker.returncode) == ("", 0)


# BR-079
@pytest.mark.timeout(120)
def test_scoring_works_from_a_ray_actor(tmp_path):
    import ray

    (tmp_path / "my_scorers.py").write_text(textwrap.dedent(SCORERS))

    class Actor:
        def score(self, texts):
            sys.path.insert(0, str(tmp_path))
            reward = RewardConfig(kind="function", target="my_scorers:score", workers=1)
            with RewardPool(reward, DATA) as scoring:
                scores = scoring.score([({"answer": "yes"}, text) for text in texts])
            return [(s.status, s.value) for s in scores]

    with ray_cluster(1):
        actor = ray.remote(Actor).remote()
        scores = ray.get(actor.score.remote(["yes", "no", "raise"]), timeout=60)
        assert scores[:2] == [("ok", 1.0), ("ok", 0.0)]
        assert scores[2][0] == "error"
        assert math.isnan(scores[2][1])
        with pytest.raises(RewardError, match="2 of 3 rewards failed"):
            ray.get(actor.score.remote(["yes", "raise", "raise"]), timeout=60)


def test_the_dataset_scorer_is_the_generators_own_with_partial_credit(pool):
    data = DataConfig.model_validate(
        {"train": {"kind": "reasoning_gym", "name": "spell_backward", "size": 3, "seed": 1}}
    )
    entry = {"answer": "cba", "metadata": {}, "dataset": dataset_key("spell_backward", {})}
    scoring = pool(data, kind="dataset", target=None)
    scores = scoring.score([(entry, "cba"), (entry, "cbx"), (entry, "")])
    assert [s.value for s in scores] == [1.0, pytest.approx(2 / 3), 0.0]


def test_exact_compares_stripped_text_with_the_answer(pool):
    scoring = pool(kind="exact", target=None)
    scores = scoring.score([({"answer": 42}, " 42\n"), ({"answer": "42"}, "42.0")])
    assert [s.value for s in scores] == [1.0, 0.0]


def test_a_scorer_that_forks_and_returns_twice_answers_once(pool):
    scores = pool().score(items("fork", "a", "fork", "b"))
    assert [(s.status, s.value) for s in scores] == [
        ("ok", 1.0),
        ("ok", 0.0),
        ("ok", 1.0),
        ("ok", 0.0),
    ]


def test_a_result_that_cannot_be_judged_is_an_error_and_costs_no_process(pool):
    before, huge, mute, after = pool(max_error_frac=1.0).score(
        items("pid", "huge", "unspeakable", "pid")
    )
    assert huge.status == mute.status == "error"
    assert "OverflowError" in huge.message
    assert before.value == after.value  # the same process answered


def test_a_scorer_that_is_not_there_is_told_before_anything_is_scored(pool):
    pool().wait_started()
    with pytest.raises(RewardError, match="no_such_function"):
        pool(target="my_scorers:no_such_function").wait_started()


def test_no_items_need_no_scores(pool):
    assert pool().score([]) == []


@pytest.mark.parametrize(
    ("returned", "status"),
    [(1, "ok"), (True, "ok"), ("1.0", "error"), ({}, "error"), ({"a": float("inf")}, "nonfinite")],
)
def test_what_counts_as_a_number(returned, status):
    got, value, _, _ = outcome(lambda payload, text: returned, {}, "")
    assert got == status
    assert (value == 1.0) if status == "ok" else value is NAN


def is_running(pid: int) -> bool:
    """False also for a process that is over and merely not reaped yet."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} outlived its parent"
        time.sleep(0.05)
