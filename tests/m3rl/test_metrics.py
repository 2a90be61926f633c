import json
import logging
import sys
import time
import types

import numpy as np
import pytest

from m3rl import metrics
from m3rl.config import ConfigError, WandbConfig
from m3rl.metrics import STEP_AXIS, MetricsWriter, Progress, duration, read_metrics, wandb_mode
from m3rl.report import Sample

CONFIG = {"run": {"name": "test"}}
SILENT = WandbConfig(mode="disabled")


def writer(folder, **options):
    return MetricsWriter(folder, CONFIG, SILENT, **options)


def steps(folder):
    return [record["step"] for record in read_metrics(folder / "metrics.jsonl")]


def test_one_line_a_step_counts_from_one_and_holds_plain_numbers(tmp_path):
    log = writer(tmp_path)
    log.log(1, {"a": np.float32(0.5), "n": np.int64(3), "h": "ff00", "i": 7})
    log.log(2, {"a": float("nan"), "b": float("inf")})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {"step": 1, "a": 0.5, "n": 3, "h": "ff00", "i": 7}
    assert json.loads(lines[1]) == {"step": 2, "a": None, "b": None}


def test_a_step_cannot_be_skipped_or_written_twice(tmp_path):
    log = writer(tmp_path)
    log.log(1, {})
    for wrong in (1, 3):
        with pytest.raises(AssertionError, match=f"step {wrong} was logged after step 1"):
            log.log(wrong, {})


def test_resuming_cuts_what_is_newer_than_the_checkpoint_and_the_half_line(tmp_path):
    first = writer(tmp_path)
    for step in range(1, 6):
        first.log(step, {"v": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "v"')
    second = writer(tmp_path, resume_step=3)
    second.log(4, {"v": 40})
    assert [(r["step"], r["v"]) for r in read_metrics(second.path)] == [
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 40),
    ]


def test_a_line_lost_by_the_kill_is_written_again_from_the_checkpoint(tmp_path):
    first = writer(tmp_path)
    first.log(1, {"v": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2')  # the kill came in the middle of this line
    writer(tmp_path, resume_step=2, resume_line={"v": 2}).log(3, {"v": 3})
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [(r["step"], r["v"]) for r in records] == [(1, 1), (2, 2), (3, 3)]


def test_a_line_that_survived_is_not_written_twice(tmp_path):
    writer(tmp_path).log(1, {"v": 1})
    writer(tmp_path, resume_step=1, resume_line={"v": 1})
    assert steps(tmp_path) == [1]


def test_a_run_that_begins_anew_in_its_directory_leaves_no_old_line(tmp_path):
    writer(tmp_path).log(1, {})
    writer(tmp_path).log(1, {})
    assert steps(tmp_path) == [1]


class FakeServer:
    """Keeps what a wandb server would: nothing that comes with a step it has seen."""

    def __init__(self):
        self.errors = types.SimpleNamespace(CommError=ConnectionError)
        self.points = []
        self.dropped = []
        self.inits = []
        self.axes = []
        self.finished = []
        self.is_reachable = True
        self._highest = {}

    def init(self, **arguments):
        self.inits.append(arguments)
        if arguments["mode"] == "online" and not self.is_reachable:
            raise ConnectionError("no route to host")
        self._id = arguments["id"]
        return self

    def define_metric(self, name, step_metric=None):
        self.axes.append((name, step_metric))

    def log(self, values, step):
        if step <= self._highest.get(self._id, -1):
            self.dropped.append(values)
        else:
            self._highest[self._id] = step
            self.points.append(values)

    def finish(self, exit_code):
        self.finished.append(exit_code)

    Settings = staticmethod(dict)

    @staticmethod
    def Table(columns, data):
        return {"columns": columns, "data": data}


@pytest.fixture
def server(monkeypatch):
    fake = FakeServer()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


# BR-052
def test_no_point_is_lost_over_three_resumptions_from_older_checkpoints(tmp_path, server):
    offline = WandbConfig(mode="offline")
    sent = []
    for checkpoint, last in ((0, 7), (4, 9), (6, 8), (8, 10)):
        log = MetricsWriter(tmp_path, CONFIG, offline, resume_step=checkpoint)
        for step in range(checkpoint + 1, last + 1):
            log.log(step, {"v": len(sent)})
            sent.append((step, len(sent)))
        log.finish()
        log.finish()
    assert server.dropped == []
    assert [(p[STEP_AXIS], p["v"]) for p in server.points] == sent
    assert len({init["id"] for init in server.inits}) == 1
    assert {init["resume"] for init in server.inits} == {"allow"}
    assert ("*", STEP_AXIS) in server.axes
    assert server.finished == [0] * 4
    assert steps(tmp_path) == list(range(1, 11))


# BR-052
def test_a_line_lost_by_the_kill_reaches_wandb_too(tmp_path, server):
    offline = WandbConfig(mode="offline")
    MetricsWriter(tmp_path, CONFIG, offline).log(1, {"v": 1})
    MetricsWriter(tmp_path, CONFIG, offline, resume_step=2, resume_line={"v": 2})
    MetricsWriter(tmp_path, CONFIG, offline, resume_step=2, resume_line={"v": 2})
    assert [(p[STEP_AXIS], p["v"]) for p in server.points] == [(1, 1), (2, 2)]
    assert steps(tmp_path) == [1, 2]


def test_samples_and_evaluations_reach_wandb_between_the_steps(tmp_path, server):
    log = MetricsWriter(tmp_path, CONFIG, WandbConfig(mode="offline"))
    log.log_apart(0, {"eval/x/accuracy": 0.25})
    log.log(1, {"v": 1})
    log.log_samples(1, [Sample("p", "c", "a", 1.0, "stop", 3)])
    assert server.dropped == []
    assert server.points[0] == {STEP_AXIS: 0, "eval/x/accuracy": 0.25}
    assert server.points[2]["samples"]["data"] == [[1, "p", "c", "a", 1.0, "stop", 3]]
    assert steps(tmp_path) == [1]


def without_keys(monkeypatch, home):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(home / "netrc"))


def test_auto_is_online_exactly_where_a_key_is_set(tmp_path, monkeypatch):
    without_keys(monkeypatch, tmp_path)
    assert wandb_mode("auto") == "offline"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    assert wandb_mode("auto") == "online"
    (tmp_path / "netrc").write_text("machine elsewhere.org login user password x\n")
    assert wandb_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert wandb_mode("auto") == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode("auto") == "disabled"
    assert wandb_mode("online") == "online"


def test_online_without_a_key_is_refused_instead_of_asked_for(tmp_path, monkeypatch):
    without_keys(monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match=r"'online' needs a key.*wandb login"):
        wandb_mode("online")


def test_auto_stays_offline_when_the_server_cannot_be_reached_and_says_so(
    tmp_path, monkeypatch, server, caplog
):
    monkeypatch.setenv("WANDB_API_KEY", "x")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    server.is_reachable = False
    MetricsWriter(tmp_path, CONFIG, WandbConfig(mode="auto")).log(1, {"v": 1})
    assert [init["mode"] for init in server.inits] == ["online", "offline"]
    assert "kept offline" in caplog.text
    with pytest.raises(ConnectionError):
        MetricsWriter(tmp_path / "other", CONFIG, WandbConfig(mode="online"))


def test_the_real_wandb_keeps_every_step_offline_under_one_id(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    for checkpoint in (0, 1):
        log = MetricsWriter(tmp_path, CONFIG, WandbConfig(mode="offline"), resume_step=checkpoint)
        log.log(checkpoint + 1, {"v": 1.0})
        log.log_samples(checkpoint + 1, [Sample("p", "c", "a", 1.0, "stop", 3)])
        log.finish()
    state = json.loads((tmp_path / "wandb" / "run.json").read_text())
    runs = sorted(p.name for p in (tmp_path / "wandb").glob("offline-run-*"))
    assert len(runs) == 2
    # offline-run-TIME-ID; wandb puts -1 behind it where two begin in the same second.
    assert [name.split("-")[3] for name in runs] == [state["id"]] * 2
    assert state["step"] == 4
    for run in runs:
        [log_file] = (tmp_path / "wandb" / run).glob("*.wandb")
        deadline = time.monotonic() + 20  # wandb's own process writes a moment after finish()
        while STEP_AXIS.encode() not in log_file.read_bytes():
            assert time.monotonic() < deadline, f"{log_file} holds no step"
            time.sleep(0.05)


def test_progress_tells_what_is_left(caplog, monkeypatch):
    clock = iter([100.0, 110.0])
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(clock))
    caplog.set_level(logging.INFO)
    Progress(total=10, done=4).update({"reward": 0.51234})
    assert caplog.messages == ["step 5/10  reward 0.5123  0:50 left"]


def test_durations_read_like_a_clock():
    assert [duration(s) for s in (0, 9.6, 75, 3700)] == ["0:00", "0:10", "1:15", "1:01:40"]
