"""What a prompt asks and how its completion is judged.

A turn of a dialogue is: ids in, a completion, its answer scored. Here a dialogue is one turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from m3rl.rollout.chat import ChatFormat
from m3rl.rollout.rewards import RewardPool
from m3rl.types import SOLVED, Completion, Prompt


class SingleTurn:
    """One user message, one completion, one reward."""

    def __init__(self, chat: ChatFormat, rewards: RewardPool, *, partial_credit: bool) -> None:
        """`partial_credit` False: a score below 1.0 is a reward of 0."""
        self._chat = chat
        self._rewards = rewards
        self._partial_credit = partial_credit

    def score(self, pairs: Sequence[tuple[Prompt, Completion]]) -> None:
        """Fill reward, reward_parts and reward_status of each completion.

        The scorer sees the prompt's payload and the answer (what follows the thinking). Completions
        that were aborted or failed stay unscored. Items are sent in the order of their sample ids.

        Raises:
            RewardError: too many of them could not be scored.
        """
        complete = [pair for pair in pairs if pair[1].finish_reason in ("stop", "length")]
        complete.sort(key=lambda pair: pair[1].sample_id)
        for prompt, completion in complete:
            assert prompt.ordinal == completion.prompt_ordinal, "a completion left its prompt"
        scores = self._rewards.score(
            [
                (prompt.payload, self._chat.answer(completion.text))
                for prompt, completion in complete
            ]
        )
        for (_, completion), score in zip(complete, scores, strict=True):
            completion.reward = score.value
            completion.reward_parts = score.parts
            completion.reward_status = score.status
            if score.status == "ok" and not self._partial_credit:
                completion.reward_parts = {"score": score.value, **score.parts}
                completion.reward = float(score.value == SOLVED)
