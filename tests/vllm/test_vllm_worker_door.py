"""Calls into a vLLM worker: a receiver of each, deadlines, and workers that are gone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("vllm")

from m3rl.rollout.vllm_worker import WorkerDoor
from m3rl.rollout.vllm_worker_handle import WorkerCallError, WorkerHandle

KEY = b"key"


class FakeWeights:
    version = 7

    def weight_layout(self) -> list[str]:
        return ["a slot"]


class FakeReceiver:
    """Bound to the weights, it tells of them."""

    def bind(self, target) -> None:
        self.target = target

    def version(self) -> int:
        return self.target.version

    def fail(self) -> None:
        raise ValueError("what was wrong")

    def fail_with_a_lock(self) -> None:
        error = RuntimeError("holds a lock")
        error.lock = threading.Lock()
        raise error

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@pytest.fixture(scope="module")
def door() -> WorkerDoor:
    return WorkerDoor(FakeWeights(), torch.device("cpu"), KEY)


@pytest.fixture
def handle(door) -> WorkerHandle:
    handle = WorkerHandle(1, door.address, KEY, timeout_s=5.0)
    handle.call("attach", FakeReceiver())
    return handle


def test_a_receiver_is_carried_there_and_called_by_name(handle):
    assert handle.call("receiver_call", "version") == 7
    assert handle.call("weight_layout") == ["a slot"]
    assert handle.call("gpu") is None


def test_an_error_comes_back_as_it_was_raised(handle):
    with pytest.raises(ValueError, match=r"^what was wrong$"):
        handle.call("receiver_call", "fail")
    with pytest.raises(RuntimeError, match=r"holds a lock.*cannot travel"):
        handle.call("receiver_call", "fail_with_a_lock")


def test_calls_are_answered_beside_one_another(handle):
    with ThreadPoolExecutor(1) as other:
        long = other.submit(handle.call, "receiver_call", "sleep", 0.5)
        begin = time.monotonic()
        assert handle.call("weight_layout") == ["a slot"]
        assert time.monotonic() - begin < 0.4
        long.result()


def test_a_silent_worker_is_given_up_at_the_deadline(door, handle):
    hasty = WorkerHandle(1, door.address, KEY, timeout_s=0.1)
    with pytest.raises(WorkerCallError, match=r"sleep: vLLM worker 1 did not answer within 0\.1 s"):
        hasty.call("receiver_call", "sleep", 0.5)


def test_who_has_not_the_key_is_not_let_in(door, handle):
    stranger = WorkerHandle(1, door.address, b"other", timeout_s=1.0)
    with pytest.raises(multiprocessing.AuthenticationError):
        stranger.call("gpu")
    assert handle.call("gpu") is None


def _serve(pipe) -> None:
    door = WorkerDoor(FakeWeights(), torch.device("cpu"), KEY)
    pipe.send(door.address)
    time.sleep(60)


def test_a_worker_that_dies_amid_a_call_is_told_at_once():
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,))
    process.start()
    handle = WorkerHandle(3, ours.recv(), KEY, timeout_s=30.0)
    handle.call("attach", FakeReceiver())
    with ThreadPoolExecutor(1) as other:
        call = other.submit(handle.call, "receiver_call", "sleep", 30)
        time.sleep(0.2)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(WorkerCallError, match="sleep: the process of vLLM worker 3 is gone"):
            call.result(5)
    process.join()
    with pytest.raises(WorkerCallError, match="gpu: the process of vLLM worker 3 is gone"):
        handle.call("gpu")
