"""The command `m3rl`: train, rollout, eval, sft, check, merge, doctor.

Exit codes: 0 done, 1 failed (without a traceback where the message says it all), 2 the
configuration cannot work, 130 interrupted (Ctrl-C), 143 terminated (SIGTERM).
"""

from __future__ import annotations

import argparse
import errno
import gc
import importlib
import logging
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from m3rl.config import Config, ConfigError
from m3rl.errors import M3rlError

logger = logging.getLogger(__name__)

TERMINATED = 128 + signal.SIGTERM
_is_terminated = threading.Event()
"""No exception can say it: out of ray.wait every SystemExit comes as one of code 1."""

EXIT_CODES = (
    "exit codes: 0 done; 1 failed; 2 the configuration cannot work; 130 interrupted (Ctrl-C); "
    "143 terminated (SIGTERM)"
)
CHECK_EXIT_CODES = (
    "exit codes: 0 every configuration can work; files that this machine lacks are listed as "
    "'needed at launch' (`m3rl doctor CONFIG` fails for them); 2 one cannot work, or none of the "
    "sizes of --gpus does"
)

RUNS = {
    "train": ("m3rl.trainer:train", "post-train a model with GRPO, or resume a run"),
    "rollout": ("m3rl.jobs:rollout", "collect and score completions only"),
    "eval": ("m3rl.jobs:evaluate", "measure the accuracy on held-out prompts"),
    "sft": ("m3rl.sft:sft", "train on the datasets' own answers"),
}
"""Command -> the function that runs it, called with the configuration, and what it does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; `argv` without the program's name."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(
        level=logging.DEBUG if arguments.verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
    )
    for library in ("ray", "urllib3", "filelock"):  # theirs is not ours to tell
        logging.getLogger(library).setLevel(logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_is_for_console)
    try:
        code: int = arguments.run(arguments)
    except ConfigError as error:
        _print_problems(error)
        return 2
    except (M3rlError, OSError) as error:
        # From a Ray worker comes a twin whose text is a traceback; `cause` is what was raised there
        cause = getattr(error, "cause", None) or error
        if isinstance(cause, OSError) and cause.errno != errno.ENOSPC:
            raise
        logger.debug("what led to the error", exc_info=True)
        _print_end(f"error: {cause}", error)
        return 1
    except KeyboardInterrupt as error:  # clean-up has happened on the way up
        is_terminated = _is_terminated.is_set()
        _print_end("terminated" if is_terminated else "interrupted", error)
        return TERMINATED if is_terminated else 130
    return code


def _print_end(what: str, error: BaseException) -> None:
    """What has ended the command, and what its notes say, such as how to go on."""
    print("\n".join([what, *getattr(error, "__notes__", ())]), file=sys.stderr)


def _is_for_console(record: logging.LogRecord) -> bool:
    """Not the traceback that a run directory logs: it is for run.log, here comes the error."""
    return record.name != "m3rl.run_dir" or record.exc_info is None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="m3rl", description="GRPO post-training of MiniMax-M3.", epilog=EXIT_CODES
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log more")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (_, help_text) in RUNS.items():
        command = commands.add_parser(name, help=help_text, epilog=EXIT_CODES)
        command.add_argument("config", metavar="CONFIG", help="a YAML file")
        _add_overrides(command)
        command.set_defaults(run=_run, command=name)
    check = commands.add_parser(
        "check",
        help="check configurations and work out what they need",
        description="Print what each configuration needs: memory, a weight sync, GPUs. The model's "
        "config.json is enough for it; nothing is started.",
        epilog=CHECK_EXIT_CODES,
    )
    check.add_argument("words", nargs="+", metavar="CONFIG", help="YAML files, then key=value")
    check.add_argument(
        "--gpus", type=_sizes, metavar="LIST", help="plan for these numbers of GPUs: 2,4,8"
    )
    check.set_defaults(run=_check)
    merge = commands.add_parser(
        "merge",
        help="turn a checkpoint into a model directory, adapters merged into their base",
        description="Write a checkpoint of `m3rl train` or `m3rl sft` as a model that model.path, "
        "`m3rl eval` and the runtime read. Adapters of policy.lora are merged into the model that "
        "they were trained on.",
        epilog=EXIT_CODES,
    )
    merge.add_argument(
        "source", metavar="CHECKPOINT", type=Path, help="RUN/checkpoints/step_NNNNNN, or RUN"
    )
    merge.add_argument("target", metavar="OUT", type=Path, help="a directory that is not there yet")
    merge.add_argument("--base", type=Path, help="where the model of adapters is now, if it moved")
    merge.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights"
    )
    merge.set_defaults(run=_merge)
    doctor = commands.add_parser("doctor", help="look for what is missing on this machine")
    doctor.add_argument("config", nargs="?", metavar="CONFIG", help="also check this YAML file")
    _add_overrides(doctor)
    doctor.set_defaults(run=_doctor)
    return parser


def _add_overrides(command: argparse.ArgumentParser) -> None:
    command.add_argument("overrides", nargs="*", metavar="key=value", help="replace a setting")


def _sizes(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of numbers of GPUs; write for example 8,16,32"
        )
    return [int(word) for word in words]


def _run(arguments: argparse.Namespace) -> int:
    from m3rl.plan import make_plan

    config = Config.load(arguments.config, arguments.overrides)
    starts_random = arguments.command == "sft" and config.sft.init == "random"
    plan = make_plan(
        config,
        required=["tokenizer"] if starts_random else ["tokenizer", "weights"],
        allow_mxfp8=arguments.command in ("rollout", "eval"),
        # `m3rl sft` measures a model that the bundled runtime does not know by itself.
        generates=arguments.command != "sft" or config.rollout.backend.kind != "m3",
    )
    for notice in plan.notices:
        logger.warning("%s", notice)
    # a scheduler's SIGTERM cleans up like Ctrl-C does
    _is_terminated.clear()
    signal.signal(signal.SIGTERM, _terminate)
    module, _, function = RUNS[arguments.command][0].partition(":")
    with _interrupts_held():
        command: Any = importlib.import_module(module)  # brings ray and torch
    code: int = getattr(command, function)(config)
    return code


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C waits until the block is done: some libraries abort when it comes while they load."""
    held: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if held:
        raise KeyboardInterrupt


def _terminate(*_: object) -> None:
    _is_terminated.set()
    raise KeyboardInterrupt


@contextmanager
def _rare_collections() -> Iterator[None]:
    """A plan is a million small objects and no cycle; to look for some is a quarter of the time."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@_rare_collections()
def _check(arguments: argparse.Namespace) -> int:
    """Every configuration is checked, also after one that cannot work."""
    from m3rl.plan import make_plan
    from m3rl.plan_text import describe, gpu_table, launch_needs

    paths = [word for word in arguments.words if "=" not in word or Path(word).is_file()]
    overrides = [word for word in arguments.words if word not in paths]
    if not paths:
        raise ConfigError("m3rl check needs at least one configuration file")
    code = 0
    for path in paths:
        try:
            config = Config.load(path, overrides)
            plan = make_plan(config, is_launch=False)
            print(describe(plan))
            if arguments.gpus is not None:
                text, works = gpu_table(plan, arguments.gpus)
                print(f"\n{text}")
                if not works:
                    code = 2
                    continue
        except ConfigError as error:
            code = 2
            _print_problems(error, f"{path}: ")
        else:
            needs = len(launch_needs(plan))
            print(f"{path}: checked{f'; a launch needs {needs} more things' if needs else ''}\n")
    return code


def _print_problems(error: ConfigError, where: str = "") -> None:
    """Each line is a problem; one that is indented goes on with the one before."""
    for line in str(error).splitlines():
        print(line if line.startswith(" ") else f"error: {where}{line}", file=sys.stderr)


def _merge(arguments: argparse.Namespace) -> int:
    from m3rl.lora.merge import merge_checkpoint

    source, target = arguments.source, arguments.target
    merge_checkpoint(source, target, base=arguments.base, dtype=arguments.dtype)
    print(target)
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from m3rl.doctor import examine

    config = None
    if arguments.config is not None:
        config = Config.load(arguments.config, arguments.overrides)
    text, is_healthy = examine(config)
    print(text)
    return 0 if is_healthy else 1


if __name__ == "__main__":
    sys.exit(main())
