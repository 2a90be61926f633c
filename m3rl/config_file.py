"""From YAML files and `key=value` words to one checked mapping, with errors that help.

Knows pydantic sections but no particular one; the settings themselves are in `m3rl/config.py`.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
)
from pydantic.types import Strict

Raw = dict[str, Any]
Origins = dict[str, str]
"""Dotted key -> where its value was written ('configs/tiny_cpu.yaml:12', 'command line')."""

COMMAND_LINE = "command line"

# What other frameworks call our keys, for suggestions only.
FOREIGN_NAMES = {
    "adv_estimator": "grpo.advantage",
    "batch_size": "rollout.prompts_per_step",
    "beta": "grpo.kl.coef",
    "dynamic_sampling": "grpo.refill_rounds",
    "epochs": "train.steps",
    "filter_groups": "grpo.refill_rounds",
    "importance_sampling_level": "grpo.ratio",
    "kl_coef": "grpo.kl.coef",
    "learning_rate": "optimizer.lr",
    "loss_agg_mode": "grpo.aggregation",
    "loss_type": "grpo.objective",
    "overlong_buffer": "grpo.overlong.buffer",
    "max_completion_length": "rollout.max_tokens",
    "max_new_tokens": "rollout.max_tokens",
    "max_steps": "train.steps",
    "model_name_or_path": "model.path",
    "num_epochs": "train.steps",
    "num_generations": "rollout.group_size",
    "num_steps": "train.steps",
    "num_train_epochs": "train.steps",
    "output_dir": "run.dir",
    "train_batch_size": "rollout.prompts_per_step",
}

SHARED_BY_KINDS = {
    "rollout.backend": {"device", "gpu_memory_gib", "num_replicas", "num_threads", "max_restarts"},
}
"""Keys that mean the same for every `kind` of a section, and stay when another kind replaces it."""

DEFAULT_KINDS = {"rollout.backend": "m3"}
"""The `kind` of a section that says none."""

WORDS = {
    "model_type": "should be a mapping of keys",
    "dict_type": "should be a mapping of keys",
    "tuple_type": "should be a list",
}


class ConfigError(ValueError):
    """A setting, or a file it names, cannot work: what, where it came from, how to mend it."""


def _not_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("should be a number, not true or false")
    return value


def at_most(limit: float, why: str) -> AfterValidator:
    """An upper bound whose refusal gives its reason."""

    def check(value: float) -> float:
        if value > limit:
            raise ValueError(f"should be at most {limit:,g}: {why}")
        return value

    return AfterValidator(check)


Bool = StrictBool
Int = Annotated[int, Strict()]
Float = Annotated[float, BeforeValidator(_not_bool), Field(allow_inf_nan=False)]
Fraction = Annotated[Float, Field(ge=0, le=1)]
Seed = Annotated[Int, Field(ge=0, lt=2**63)]
Text = Annotated[str, Field(min_length=1)]
Seconds = Annotated[
    Float, Field(gt=0), at_most(7 * 86400, "what hangs would not be noticed for a week")
]
Threads = Annotated[Int, Field(ge=1), at_most(1024, "that is more than a machine has cores")]
Processes = Annotated[
    Int, Field(ge=1), at_most(4096, "each is a process, with a GPU or a model of its own")
]


class Section(BaseModel):
    """Unknown keys are errors; a loaded section never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    absent: ClassVar[dict[str, str]] = {}
    """Keys that one may look for here and that do not exist, with what to do instead."""


def read_config_file(path: Path) -> tuple[Raw, Origins]:
    """Read a YAML file and those its `defaults:` names, relative to it; later ones win."""
    return _read_inherited(path, ())


def _read_inherited(path: Path, readers: tuple[Path, ...]) -> tuple[Raw, Origins]:
    if path.resolve() in readers:
        chain = " -> ".join(str(p) for p in (*readers, path.resolve()))
        raise ConfigError(f"{path}: `defaults:` lead back to the file itself ({chain}); remove one")
    own, own_origins = _read_yaml(path)
    parents = own.pop("defaults", [])
    origin = own_origins.pop("defaults", str(path))
    if isinstance(parents, str):
        parents = [parents]
    if not isinstance(parents, list) or not all(isinstance(p, str) for p in parents):
        raise ConfigError(
            f"defaults: {parents!r} ({origin}) is not a file name or a list of them; "
            "write `defaults: base.yaml`"
        )
    merged: Raw = {}
    origins: Origins = {}
    for parent in parents:
        raw, parent_origins = _read_inherited(path.parent / parent, (*readers, path.resolve()))
        merge(merged, raw, origins, parent_origins)
    merge(merged, own, origins, own_origins)
    return merged, origins


def _read_yaml(path: Path) -> tuple[Raw, Origins]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(
            path.name, [p.name for p in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
        )
        hint = f"; did you mean '{path.parent / near[0]}'?" if near else ""
        raise ConfigError(f"{path}: no such configuration file{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    loader = yaml.SafeLoader(text)
    origins: Origins = {}
    try:
        node = loader.get_single_node()
        if node is None:
            return {}, {}
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path}: a configuration is a mapping of sections, `run: {{...}}`")
        return _construct_mapping(loader, node, path, "", origins), origins
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    finally:
        loader.dispose()


def _construct_mapping(
    loader: yaml.SafeLoader, node: yaml.MappingNode, path: Path, prefix: str, origins: Origins
) -> Raw:
    """PyYAML lets the second of two equal keys win without a word; here it is an error."""
    out: Raw = {}
    for key_node, value_node in node.value:
        key = str(key_node.value)
        dotted = prefix + key
        where = f"{path}:{key_node.start_mark.line + 1}"
        if key in out:
            raise ConfigError(f"{dotted}: written twice ({origins[dotted]} and {where}); keep one")
        origins[dotted] = where
        if isinstance(value_node, yaml.MappingNode):
            out[key] = _construct_mapping(loader, value_node, path, f"{dotted}.", origins)
        else:
            out[key] = loader.construct_object(value_node, deep=True)
    return out


def read_overrides(words: Sequence[str]) -> Raw:
    """`["rollout.group_size=4"]` -> nested mapping; values are YAML, the last one wins."""
    out: Raw = {}
    for word in words:
        key, equals, text = word.partition("=")
        parts = key.split(".")
        if not equals or not all(parts):
            raise ConfigError(
                f"{word!r} ({COMMAND_LINE}) is not of the form key=value; "
                "write for example rollout.group_size=8"
            )
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"{key}: {text!r} ({COMMAND_LINE}) is not a YAML value: {error}"
            ) from error
        target = out
        for part in parts[:-1]:
            inner = target.setdefault(part, {})
            if not isinstance(inner, dict):
                inner = target[part] = {}
            target = inner
        target[parts[-1]] = value
    return out


def merge(base: Raw, top: Raw, origins: Origins, top_origins: Origins, prefix: str = "") -> None:
    """Lay `top` over `base` in place, key by key; a mapping of another `kind` replaces the old, but
    for what is SHARED_BY_KINDS."""
    for key, value in top.items():
        if not isinstance(key, str):
            raise ConfigError(f"{prefix}{key!r}: a key must be text; put it in quotation marks")
        dotted = prefix + key
        old = base.get(key)
        origins[dotted] = top_origins.get(dotted, COMMAND_LINE)
        if isinstance(old, dict) and _same_kind(dotted, old, value):
            merge(old, value, origins, top_origins, f"{dotted}.")
            continue
        stays = SHARED_BY_KINDS.get(dotted, set()) if isinstance(value, dict) else set()
        base[key] = {k: v for k, v in old.items() if k in stays} if isinstance(old, dict) else {}
        for stale in [k for k in origins if k.startswith(f"{dotted}.")]:
            if stale.removeprefix(f"{dotted}.") not in stays:
                del origins[stale]
        if isinstance(value, dict):
            merge(base[key], value, origins, top_origins, f"{dotted}.")
        else:
            base[key] = value


def _same_kind(dotted: str, old: Raw, new: Any) -> bool:
    kind = old.get("kind", DEFAULT_KINDS.get(dotted))
    return isinstance(new, dict) and new.get("kind", kind) == kind


def flatten(values: Raw, prefix: str = "") -> Raw:
    """Nested mapping -> dotted keys; an empty mapping is a value."""
    out: Raw = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            out |= flatten(value, f"{prefix}{key}.")
        else:
            out[prefix + key] = value
    return out


def section_of(annotation: Any, raw: Any = None) -> type[BaseModel] | None:
    """The section class a field holds; of a union the member whose `kind` is that of `raw`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) not in (Union, types.UnionType):
        return None
    members = [m for a in get_args(annotation) if (m := section_of(a)) is not None]
    if len(members) == 1:
        return members[0]
    kind = raw.get("kind") if isinstance(raw, dict) else None
    for member in members:
        if kind in get_args(member.model_fields["kind"].annotation):
            return member
    return None


def fill_kinds(section: type[BaseModel], raw: Raw, prefix: str = "") -> Raw:
    """`raw` where each section that says no `kind` and has a default says that, as first key."""
    filled = dict(raw)
    for key, value in raw.items():
        field = section.model_fields.get(key)
        if field is None or not isinstance(value, dict):
            continue
        dotted = prefix + key
        if dotted in DEFAULT_KINDS:
            value = {"kind": DEFAULT_KINDS[dotted]} | value
        inner = section_of(field.annotation, value)
        filled[key] = value if inner is None else fill_kinds(inner, value, f"{dotted}.")
    return filled


def unknown_keys(root: type[BaseModel], raw: Raw, origins: Origins) -> list[str]:
    """One message for each key that no section knows, with the nearest key that exists."""
    return [
        f"{path}: unknown key ({origins.get(path, COMMAND_LINE)}){_suggest(root, section, path)}"
        for section, path in _walk_unknown(root, raw, "")
    ]


def _walk_unknown(
    section: type[BaseModel], raw: Raw, prefix: str
) -> Iterator[tuple[type[BaseModel], str]]:
    for key, value in raw.items():
        field = section.model_fields.get(key)
        if field is None:
            yield section, prefix + key
        elif isinstance(value, dict) and (inner := section_of(field.annotation, value)) is not None:
            yield from _walk_unknown(inner, value, f"{prefix}{key}.")


def _suggest(root: type[BaseModel], section: type[BaseModel], path: str) -> str:
    key = path.rpartition(".")[2].replace("-", "_").lower()
    siblings = list(section.model_fields)
    if issubclass(section, Section) and key in section.absent:
        return f"; {section.absent[key]}"
    if near := difflib.get_close_matches(key, siblings, n=1):
        return f"; did you mean '{near[0]}'?"
    everywhere: dict[str, str] = dict(FOREIGN_NAMES)
    for dotted in all_keys(root):
        everywhere.setdefault(dotted.rpartition(".")[2], dotted)
    if near := difflib.get_close_matches(key, list(everywhere), n=1, cutoff=0.75):
        return f"; did you mean '{everywhere[near[0]]}'?"
    return f"; known here: {', '.join(siblings)}"


def all_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key of the schema, all members of unions included."""
    for name, field in section.model_fields.items():
        yield prefix + name
        members = [section_of(a) for a in get_args(field.annotation)]
        for inner in {section_of(field.annotation), *members}:
            if inner is not None:
                yield from all_keys(inner, f"{prefix}{name}.")


def explain(error: ValidationError, root: type[BaseModel], raw: Raw, origins: Origins) -> list[str]:
    """pydantic's findings in the form `key: value is refused: why (where). What the key means.`"""
    return [_explain_one(item, root, raw, origins) for item in error.errors()]


def _explain_one(item: Any, root: type[BaseModel], raw: Raw, origins: Origins) -> str:
    path, description = _locate(item["loc"], root, raw)
    reason = str(item["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    reason = WORDS.get(item["type"], reason)
    where = _origin(path, origins)
    meaning = f" {description}" if description else ""
    if item["type"] == "missing":
        return f"{path}: missing ({where}).{meaning}"
    if item["type"] == "value_error" and isinstance(item["input"], dict | BaseModel):
        return f"{reason} ({where})" if not path else f"{path}: {reason} ({where})"
    if item["type"].startswith("union_tag"):
        kind = item["input"].get("kind") if isinstance(item["input"], dict) else item["input"]
        known = item["ctx"].get("expected_tags", "one of the known kinds")
        return f"{path}.kind: {kind!r} is refused: should be one of {known} ({where})"
    return f"{path}: {item['input']!r} is refused: {reason} ({where}).{meaning}"


def _locate(loc: tuple[Any, ...], root: type[BaseModel], raw: Raw) -> tuple[str, str]:
    """Dotted key and description; pydantic's path also names the union member, which is no key."""
    parts: list[str] = []
    section: type[BaseModel] | None = root
    value: Any = raw
    description = ""
    for step in loc:
        fields = section.model_fields if section is not None else {}
        if isinstance(value, dict) and step == value.get("kind") and step not in fields:
            continue
        parts.append(str(step))
        value = value.get(step) if isinstance(value, dict) else None
        if step in fields:
            description = " ".join((fields[step].description or "").split())
            section = section_of(fields[step].annotation, value)
        else:
            section = None
    return ".".join(parts), description


def _origin(path: str, origins: Origins) -> str:
    """Where the key was written, or else the nearest section around it."""
    while path:
        if path in origins:
            return origins[path]
        path = path.rpartition(".")[0]
    return "not written anywhere"


def dump_yaml(values: Raw, origins: Origins, prefix: str = "", indent: str = "") -> str:
    """YAML of a resolved configuration; a comment tells where each value was written."""
    lines = []
    for key, value in values.items():
        dotted = prefix + key
        section = isinstance(value, dict) and value
        if section:
            lines.append(
                f"{indent}{key}:\n{dump_yaml(value, origins, f'{dotted}.', indent + '  ')}"
            )
            continue
        text = yaml.safe_dump(value, default_flow_style=True, width=1 << 20, sort_keys=False)
        origin = f"  # {origins[dotted]}" if dotted in origins else ""
        lines.append(f"{indent}{key}: {text.strip().removesuffix('...').strip()}{origin}\n")
    return "".join(lines)
