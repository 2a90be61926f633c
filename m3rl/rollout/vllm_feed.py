"""One reload of a model by vLLM that lasts as long as a sync: tensors come bucket by bucket.

    put(bucket) ──▶ thread: watched(reload(tensors ...)) ──▶ put returns: the bucket is loaded,
                                                             and nothing reads its memory any more

vLLM asks for tensors one at a time, and loads a module when it is complete; on a thread of its own
it waits for the next bucket inside one and the same call.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from inference.engine.coverage import WeightLoadError
from m3rl.rollout.vllm_coverage import CoverageCheck, Watch

_Bucket = list[tuple[str, Tensor]]


class _GivenUpError(Exception):
    """Ends a reload that is not wanted any more."""


class LayerFeed:
    """A reload under way. After an error, and after `finish` or `abort`, it is over."""

    def __init__(
        self,
        names: Sequence[str],
        device: torch.device,
        reload: Callable[[Iterable[tuple[str, Tensor]]], None],
        check: CoverageCheck,
    ) -> None:
        """
        Args:
            names: all that will be put.
            reload: has vLLM load tensors by name into the model.
        """
        self._names, self._device, self._reload, self._check = names, device, reload, check
        self._requests: queue.SimpleQueue[_Bucket | None] = queue.SimpleQueue()
        """Buckets; None ends them."""
        self._answers: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._is_given_up = self._is_complete = False
        self._thread = threading.Thread(target=self._run, name="m3rl-reload", daemon=True)
        self._thread.start()

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Load a bucket; afterwards its memory may be written again.

        Raises:
            WeightLoadError: vLLM keeps a tensor for later, as part of a module that is incomplete.
            Exception: what vLLM raises.
        """
        # Each of a storage of its own, over the same memory: by that their values are followed.
        self._ask([(name, from_dlpack(tensor)) for name, tensor in tensors.items()])

    def finish(self) -> None:
        """After the last bucket: have vLLM end the reload, and check what became of it.

        Raises:
            WeightLoadError: the model did not take all, or is not filled.
        """
        self._ask(None)
        self._thread.join()

    def abort(self) -> None:
        """Give the reload up; the model gets its memory back, whatever that holds."""
        self._is_given_up = True
        self._requests.put(None)
        self._thread.join()

    def _ask(self, request: _Bucket | None) -> None:
        self._requests.put(request)
        error = self._answers.get()
        if error is not None:
            raise error

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # it is a thread's own
            tensors: dict[str, Tensor | None] = dict.fromkeys(self._names)
            with torch.no_grad(), self._check.watched(tensors) as watch:
                self._reload(self._tensors(watch))
                if not self._is_complete:
                    raise WeightLoadError("vLLM ended the load before all tensors had come")
            self._synchronize()
        except BaseException as error:  # outermost of this thread: hand the fault on
            self._answers.put(error)
        else:
            self._answers.put(None)

    def _tensors(self, watch: Watch) -> Iterator[tuple[str, Tensor]]:
        while (bucket := self._requests.get()) is not None:
            for name, tensor in bucket:
                watch.gives(name, tensor)
                yield name, tensor
            watch.expect_loaded([name for name, _ in bucket])
            self._synchronize()
            self._answers.put(None)
        if self._is_given_up:
            raise _GivenUpError
        self._is_complete = True

    def _synchronize(self) -> None:
        """Wait for what this thread told the device; not for transfers, which wait for others."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
