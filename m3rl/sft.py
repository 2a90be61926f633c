"""`m3rl sft`: the supervised warm start. The same ranks, checkpoints and metrics; the loss is
cross-entropy on answers."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from m3rl import checkpoint
from m3rl.assemble import rank_settings
from m3rl.config import Config, ConfigError
from m3rl.data import Data, PromptStream, load_data
from m3rl.errors import M3rlError
from m3rl.jobs import measure
from m3rl.launch import TrainerRanks
from m3rl.metrics import MetricsWriter, Progress
from m3rl.model_layout import is_m3, max_positions
from m3rl.rollout.chat import ChatFormat
from m3rl.rollout.placement import ray_cluster
from m3rl.run_dir import RunDirectory, check_same_model
from m3rl.stopwatch import Stopwatch
from m3rl.types import Prompt

logger = logging.getLogger(__name__)


def sft(config: Config) -> int:
    """Train on the datasets' own answers for sft.steps, write a model directory, measure it on
    held-out prompts.

    Started again with the same configuration it goes on from its newest checkpoint; after its last
    step it writes the model and measures it again.
    """
    with RunDirectory(config, "sft") as run:
        output = str(config.sft.output or run.path / "model")
        if foreign := checkpoint.find_foreign(Path(output)):
            raise ConfigError(
                f"sft.output: {output} holds {foreign}, which is no part of a model; choose a "
                "directory of its own"
            )
        with ExitStack() as stack:
            accuracy = _train(config, run, output, stack)
        if config.data.eval is not None and _can_generate(config):
            accuracy = next(v for k, v in measure(config, output).items() if k.endswith("accuracy"))
        if accuracy is not None:
            print(f"held-out accuracy {100 * accuracy:.1f} %; model: {output}")
        else:
            print(f"model: {output}")
    return 0


def _can_generate(config: Config) -> bool:
    """Whether the configured replicas know the model; the bundled runtime knows M3 alone."""
    return config.rollout.backend.kind != "m3" or is_m3(config.find(config.model.path))


def _train(config: Config, run: RunDirectory, output: str, stack: ExitStack) -> float | None:
    """The trained model's share of held-out answers that greedy decoding gives, as the trainer sees
    it; None: no one asked."""
    chat = ChatFormat.load(config.find(config.model.path))
    data = load_data(config, chat)
    _check_lengths(config, chat, data)
    stream = PromptStream(data.train, seed=config.sft.seed, shuffle=config.data.shuffle)
    held_out = None
    if config.sft.target_accuracy is not None and data.eval is None:
        raise ConfigError("sft.target_accuracy needs held-out prompts; add data.eval")
    measures = config.sft.target_accuracy is not None
    if data.eval is not None and (measures or not _can_generate(config)):
        prompts = data.eval.first(config.eval.num_prompts)
        held_out = pad([answered(chat, prompt) for prompt in prompts])
    stack.enter_context(ray_cluster(config.train.num_ranks))
    ranks = TrainerRanks(
        _settings(config), config.train.num_ranks, num_threads=config.train.num_threads
    )
    stack.callback(ranks.close)
    step, line = _restore(config, run, ranks, stream)
    skipped = 0.0 if line is None else line["optim/skipped_updates"]
    writer = MetricsWriter(
        run.path, config.to_dict(), config.logging.wandb, resume_step=step, resume_line=line
    )
    progress = Progress(config.sft.steps, step)
    exit_code = 1
    try:
        _check_skipped(config, skipped)  # a run that was stopped stays so
        is_done = line is not None and _reached_target(config, line)
        if is_done or step >= config.sft.steps:
            logger.info("nothing is left to train; the model is written and measured again")
        while step < config.sft.steps and not is_done:
            step += 1
            watch = Stopwatch()
            with watch("time/data"):
                rows = [answered(chat, prompt) for prompt in stream.take(config.sft.batch_size)]
                batch = pad(rows)
            with watch("time/train"):
                record: dict[str, Any] = ranks.all("sft_step", *batch)[0]
                record["weights_hash"] = ranks.all("master_hash")[0]
            skipped += record["optim/update_skipped"]
            record["optim/skipped_updates"] = skipped
            if measures and step % config.sft.eval_every == 0:
                with watch("time/validate"):
                    record["sft/greedy_accuracy"] = _greedy_accuracy(ranks, held_out)
                is_done = _reached_target(config, record)
            every = config.checkpoint.every
            if (every and step % every == 0) or step == config.sft.steps or is_done:
                state = {"step": step, "stream": stream.state(), "metrics": record}
                with watch("time/checkpoint"):
                    checkpoint.save(
                        run.path,
                        step,
                        ranks.save,
                        state,
                        keep=config.checkpoint.keep,
                    )
            writer.log(step, record | watch.record())
            shown = ("sft/loss", "sft/greedy_accuracy")
            progress.update({key: record[key] for key in shown if key in record})
            _check_skipped(config, skipped)
        ranks.all("save_model", output, "float32")
        exit_code = 0
        return None if held_out is None else _greedy_accuracy(ranks, held_out)
    finally:
        progress.close()
        writer.finish(exit_code)


def _greedy_accuracy(ranks: TrainerRanks, held_out: Any) -> float:
    accuracy: float = ranks.all("greedy_accuracy", *held_out)[0]
    return accuracy


def _check_skipped(config: Config, skipped: float) -> None:
    if skipped > config.train.max_skipped_updates:
        raise M3rlError(
            f"{skipped:.0f} steps were skipped for a loss or gradient that is not finite; "
            f"train.max_skipped_updates={config.train.max_skipped_updates}. A lower sft.lr is the "
            "usual cure"
        )


def _reached_target(config: Config, record: dict[str, Any]) -> bool:
    target = config.sft.target_accuracy
    return target is not None and record.get("sft/greedy_accuracy", 0.0) >= target


def _settings(config: Config) -> Any:
    """Rank settings with the warm start's own learning rate, warm-up and seed."""
    settings = rank_settings(config)
    optimizer = replace(settings.optimizer, lr=config.sft.lr, warmup_steps=config.sft.warmup_steps)
    return replace(settings, optimizer=optimizer, seed=config.sft.seed)


def _restore(
    config: Config, run: RunDirectory, ranks: TrainerRanks, stream: PromptStream
) -> tuple[int, dict[str, Any] | None]:
    path = str(config.find(config.model.path))
    found = checkpoint.find_latest(run.path)
    options = config.sft
    if options.init == "random":
        deviations = (options.init_std, options.init_embedding_std, options.init_bias_std)
        ranks.all("init_random", path, *deviations)
    else:
        ranks.all("load_initial", path)
    if found is None:
        return 0, None
    check_same_model(found.path, path)
    ranks.all("load", str(found.path))
    stream.restore(found.state["stream"])
    logger.info("resumed from step %d (%s)", found.step, found.path)
    return found.step, found.state["metrics"]


def _check_lengths(config: Config, chat: ChatFormat, data: Data) -> None:
    """Every row must be one that a rank can compute, before a rank starts."""
    micro = config.policy.micro_batch_tokens
    model = max_positions(config.find(config.model.path))
    sets = {"data.train": (data.train, len(data.train))}
    if data.eval is not None and config.sft.target_accuracy is not None:
        sets["data.eval"] = data.eval, min(config.eval.num_prompts, len(data.eval))
    for key, (prompts, count) in sets.items():
        tokens = [sum(map(len, answered(chat, prompts.prompt(i, i)))) for i in range(count)]
        num_long = sum(length > min(micro, model) for length in tokens)
        if num_long:
            longest = int(np.argmax(tokens))
            raise ConfigError(
                f"{key}: {num_long} of {count} items are longer with their answer than a rank can "
                f"compute (policy.micro_batch_tokens={micro}, max_position_embeddings={model} of "
                f"the model); the longest, {prompts.source(longest)}, has {tokens[longest]} "
                "tokens: raise policy.micro_batch_tokens, or leave them out"
            )


def answered(chat: ChatFormat, prompt: Prompt) -> tuple[np.ndarray, np.ndarray]:
    """Ids of the prompt and of its answer, end marker included.

    Raises:
        ConfigError: the dataset has no answer to train on.
    """
    answer = prompt.payload.get("answer")
    if not isinstance(answer, str) or not answer:
        raise ConfigError(
            f"data.train: the prompt {prompt.text!r:.80} has the answer {answer!r}; "
            "supervised training needs a text (data.train.answer_key)"
        )
    return prompt.ids, chat.encode_answer(answer)


def pad(rows: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Right-padded (ids_BS int64, length_B int64, loss_mask_BS bool); the loss is on answers
    alone."""
    length_B = np.array([len(prompt) + len(answer) for prompt, answer in rows], np.int64)
    ids_BS = np.zeros((len(rows), int(length_B.max())), np.int64)
    mask_BS = np.zeros(ids_BS.shape, bool)
    for b, (prompt, answer) in enumerate(rows):
        ids_BS[b, : length_B[b]] = np.concatenate([prompt, answer])
        mask_BS[b, len(prompt) : length_B[b]] = True
    return ids_BS, length_B, mask_BS
