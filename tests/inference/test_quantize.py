"""The offline tool: names, bytes and config.json of the release, and what it refuses."""

import errno
import json
import logging
import os
import shutil
import signal
import stat

import pytest
import torch
from safetensors.torch import load_file

from inference.kernels import mxfp8
from inference.models import checkpoint
from inference.models.checkpoint import CheckpointError, list_tensors, write_checkpoint
from inference.models.weights import check_checkpoint, published_tensors, read_checkpoint
from inference.quantize import main, quantization_config, quantize_checkpoint
from tests.released_model import released_config
from tests.tiny_models import model_config, random_checkpoint, tiny_config

RAW = tiny_config(
    intermediate_size=64,
    dense_intermediate_size=96,
    shared_intermediate_size=32,
    num_hidden_layers=2,
    num_local_experts=2,
)
CONFIG = model_config(RAW)
EXPERT = "model.layers.1.block_sparse_moe.experts.1.w2.weight"
PREFIX = "language_model."
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"


def header(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


def index(file: str) -> bytes:
    return json.dumps({"weight_map": {"w": file}}).encode()


@pytest.fixture
def source(tmp_path):
    """(directory of a BF16 checkpoint with a tokenizer beside it, its tensors)."""
    folder = tmp_path / "bf16"
    tensors = random_checkpoint(folder, RAW, seed=1, dtype=torch.bfloat16)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    return folder, tensors


def stored(folder) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def replace(folder, name: str, tensor: torch.Tensor) -> None:
    tensors = stored(folder) | {PREFIX + name: tensor}
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    write_checkpoint(folder, tensors.items(), max_shard_bytes=1 << 30)


@pytest.mark.parametrize("scope", ["experts", "released"])
def test_every_tensor_has_the_bytes_of_the_quantiser_under_the_released_names(
    source, tmp_path, scope
):
    folder, tensors = source
    quantize_checkpoint(folder, tmp_path / "out", scope=scope)
    found = stored(tmp_path / "out")
    expected = {}
    for spec in published_tensors(CONFIG):
        name, tensor = PREFIX + spec.name, tensors[spec.name]
        if spec.is_quantized("mxfp8" if scope == "experts" else "mxfp8_released"):
            expected[name], expected[f"{name}_scale_inv"] = mxfp8.quantize(tensor)
        else:
            expected[name] = tensor
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_experts_are_the_scope_unless_another_is_named(source, tmp_path):
    folder, _ = source
    assert main([str(folder), str(tmp_path / "a")]) == 0
    quantize_checkpoint(folder, tmp_path / "b", scope="experts")
    assert (tmp_path / "a/config.json").read_text() == (tmp_path / "b/config.json").read_text()
    assert stored(tmp_path / "a").keys() == stored(tmp_path / "b").keys()


def test_config_json_gets_the_released_quantization_config_and_nothing_else(source, tmp_path):
    folder, _ = source
    quantize_checkpoint(folder, tmp_path / "out", scope="released")
    before = json.loads((folder / "config.json").read_text())
    after = json.loads((tmp_path / "out/config.json").read_text())
    assert after.pop("quantization_config") == {
        "quant_method": "mxfp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [1, 32],
        "ignored_layers": [
            "lm_head",
            "model.embed_tokens",
            "vision_tower",
            "multi_modal_projector",
            "patch_merge_mlp",
            "language_model.model.layers.1.block_sparse_moe.gate",
        ],
    }
    assert after == before


def test_experts_alone_leave_every_other_projection_on_the_list(source, tmp_path):
    folder, _ = source
    quantize_checkpoint(folder, tmp_path / "out")
    listed = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    layer = [f"{PREFIX}model.layers.{i}" for i in range(2)]
    expected = [f"{layer[i]}.self_attn.{name}" for i in range(2) for name in PROJECTIONS]
    expected += [f"{layer[1]}.self_attn.index_{name}" for name in ("q_proj", "k_proj")]
    expected += [f"{layer[0]}.mlp.{name}" for name in MLP]
    expected += [f"{layer[1]}.block_sparse_moe.shared_experts.{name}" for name in MLP]
    expected += [f"{layer[1]}.block_sparse_moe.gate"]
    assert sorted(listed["ignored_layers"][5:]) == sorted(expected)


def test_the_released_model_would_have_the_released_tensors_and_list(monkeypatch):
    """45,838 tensors and 413.27 GiB, vision included, as the public inventory says."""
    config = model_config(released_config())
    stored_bytes = {"F32": 4, "BF16": 2}
    found = {}
    for spec in published_tensors(config):
        dtype = "F32" if spec.is_fp32 else "BF16"
        name = PREFIX + spec.name
        found[name] = checkpoint.StoredTensor("file", name, dtype, spec.shape)
    monkeypatch.setattr("inference.models.weights.list_tensors", lambda folder: found)
    published = check_checkpoint("nowhere", config, allow_mxfp8=False)
    is_quantized = [one.spec.is_quantized("mxfp8_released") for one in published]
    assert len(published) + sum(is_quantized) == 45_838 - 523
    size = 0
    for one, is_it in zip(published, is_quantized, strict=True):
        count = torch.Size(one.spec.shape).numel()
        size += count + count // 32 if is_it else count * stored_bytes[one.stored.dtype]
    vision = 631_185_920 + 234_381_312
    patches = 1280 * 3 * 2 * 14 * 14  # FP32 in the release
    assert (size + 2 * vision + 2 * patches) / 2**30 == pytest.approx(413.27, abs=0.005)
    specs = {one.stored.name: one.spec for one in published}
    listed = quantization_config(specs, "mxfp8_released")["ignored_layers"]
    gates = [f"{PREFIX}model.layers.{i}.block_sparse_moe.gate" for i in range(3, 60)]
    assert listed[5:] == gates


def test_tokenizer_and_vision_travel_along(source, tmp_path):
    folder, _ = source
    shutil.copy(folder / "tokenizer.json", folder / "tokenizer_config.json")
    vision = {"vision_tower.vision_model.pre_layrnorm.weight": torch.randn(3)}
    tensors = stored(folder) | vision
    (folder / "model.safetensors").unlink()
    write_checkpoint(folder, tensors.items(), max_shard_bytes=20_000)
    quantize_checkpoint(folder, tmp_path / "out")
    names = {file.name for file in folder.iterdir() if "safetensors" not in file.name}
    out = {file.name for file in (tmp_path / "out").iterdir() if "safetensors" not in file.name}
    assert out == names == {f.name for f in folder.glob("*.json")} - {checkpoint.INDEX_FILE}
    found = stored(tmp_path / "out")
    assert all(torch.equal(found[name], tensor) for name, tensor in vision.items())
    assert len(list_tensors(tmp_path / "out")) == len(found)


def test_wider_weights_are_rounded_to_bf16_first(tmp_path):
    tensors = random_checkpoint(tmp_path / "fp32", RAW, seed=2, prefix="")
    quantize_checkpoint(tmp_path / "fp32", tmp_path / "out")
    read = dict(read_checkpoint(tmp_path / "out", CONFIG, allow_mxfp8=True))
    values, scale = mxfp8.quantize(tensors[EXPERT].bfloat16())
    assert torch.equal(read[EXPERT].values.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(read[EXPERT].scale, scale)
    assert torch.equal(read["lm_head.weight"], tensors["lm_head.weight"])
    assert read["lm_head.weight"].dtype == torch.float32
    listed = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert "model.layers.1.block_sparse_moe.gate" in listed["ignored_layers"]


def test_no_more_than_a_layer_is_in_memory(source, tmp_path, monkeypatch):
    """Shards are written as they fill, and every tensor is read when its turn comes."""
    folder, _ = source
    events = []
    for name in ("save_file", "safe_open"):
        original = getattr(checkpoint, name)

        def recorded(*args, original=original, name=name, **kwargs):
            events.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(checkpoint, name, recorded)
    quantize_checkpoint(folder, tmp_path / "out", scope="released")
    assert events.count("safe_open") == len(published_tensors(CONFIG))
    assert events.index("save_file") < len(events) - 1 - events[::-1].index("safe_open")
    largest = max(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    layers = [
        sum(torch.Size(s.shape).numel() * 2 for s in published_tensors(CONFIG) if s.bucket == b)
        for b in ("layer.0", "layer.1")
    ]
    assert largest < max(layers) + 10_000  # and a header


def leftovers(folder) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if file.name != "bf16")


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", [EXPERT, "model.norm.weight"])
def test_nan_and_inf_are_refused_by_name_and_leave_nothing(source, tmp_path, name, bad):
    folder, tensors = source
    broken = tensors[name].clone()
    broken.view(-1)[7] = bad
    replace(folder, name, broken)
    with pytest.raises(CheckpointError, match=rf"model.safetensors: {PREFIX}{name}.* NaN or inf"):
        quantize_checkpoint(folder, tmp_path / "out")
    assert leftovers(tmp_path) == []


def test_what_the_engine_would_not_serve_is_refused_by_name(source, tmp_path):
    folder, tensors = source
    weight = tensors[EXPERT].clone()
    for value in (57_600, -57_600):  # the BF16 numbers next to 448 * 2^7
        weight.view(-1)[7] = value
        replace(folder, EXPERT, weight)
        with pytest.raises(
            CheckpointError, match=rf"{PREFIX}{EXPERT} holds magnitudes above 57344"
        ):
            quantize_checkpoint(folder, tmp_path / "out")
        assert leftovers(tmp_path) == []
    weight.view(-1)[7] = 57_344
    replace(folder, EXPERT, weight)
    quantize_checkpoint(folder, tmp_path / "out")
    assert stored(tmp_path / "out")[f"{PREFIX}{EXPERT}_scale_inv"].max() == mxfp8.MAX_SCALE


def test_a_k_of_no_whole_blocks_is_refused_by_name(tmp_path):
    raw = RAW | {"dense_intermediate_size": 40}
    random_checkpoint(tmp_path / "bf16", raw, seed=1, dtype=torch.bfloat16)
    message = r"layers.0.mlp.down_proj.weight has K=40, which is no multiple of 32"
    with pytest.raises(CheckpointError, match=message):
        quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", scope="released")
    assert leftovers(tmp_path) == []
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "out", scope="experts")


def test_a_target_that_exists_stays_as_it_is(source, tmp_path):
    folder, _ = source
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="out exists; give a path that does not"):
        quantize_checkpoint(folder, tmp_path / "out")
    assert leftovers(tmp_path) == ["out"]
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("sub", ["sub", "a/b", "../link/sub"])
def test_a_target_inside_the_source_is_refused(source, tmp_path, sub):
    folder, _ = source
    (tmp_path / "link").symlink_to(folder)
    before = leftovers(folder)
    with pytest.raises(CheckpointError, match=r"/(sub|b) lies in .*bf16; give a path outside"):
        quantize_checkpoint(folder, folder / sub)
    assert leftovers(folder) == before
    quantize_checkpoint(folder, tmp_path / "bf16-out")


def test_an_empty_path_is_named_as_such(source, tmp_path, capsys):
    assert main([str(source[0]), ""]) == main(["", str(tmp_path / "out")]) == 1
    expected = "error: OUT is empty; give the path of a directory\n"
    assert capsys.readouterr().err == expected + expected.replace("OUT", "IN")


def test_a_partial_folder_of_the_same_target_is_named_and_kept(source, tmp_path):
    folder, _ = source
    for name in (".out.1.7.partial", ".out.x.partial", ".other.7.partial"):
        (tmp_path / name).mkdir()
    quantize_checkpoint(folder, tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    (tmp_path / ".out.7.partial").mkdir()
    message = r"\.out\.7\.partial is there: process 7 is making .*out, or was killed .* remove the"
    with pytest.raises(CheckpointError, match=message):
        quantize_checkpoint(folder, tmp_path / "out")
    assert (tmp_path / ".out.7.partial").is_dir()
    assert not (tmp_path / "out").exists()


def test_what_is_quantised_already_is_refused(source, tmp_path, capsys):
    folder, tensors = source
    quantize_checkpoint(folder, tmp_path / "out")
    assert main([str(tmp_path / "out"), str(tmp_path / "again")]) == 1
    assert "out is quantised already (quant_method 'mxfp8')" in capsys.readouterr().err
    replace(folder, EXPERT, mxfp8.quantize(tensors[EXPERT]).values)
    with pytest.raises(CheckpointError, match=rf"{EXPERT} is stored as F8_E4M3"):
        quantize_checkpoint(folder, tmp_path / "again")
    assert leftovers(tmp_path) == ["out"]


def test_a_device_that_is_not_there_is_refused(source, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CheckpointError, match="torch sees no CUDA device; use 'cpu'"):
        quantize_checkpoint(source[0], tmp_path / "out", device="cuda")
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model.safetensors", header('["w"]'), "has no header of a safetensors file"),
        ("model.safetensors", header('{"w": {"dtype": "BF16"}}'), "has no header of a safetensors"),
        ("model.safetensors", header("w"), "is not a safetensors file"),
        ("model.safetensors", LFS_POINTER, "is a Git LFS pointer; fetch the file itself"),
        ("model.safetensors.index.json", LFS_POINTER, "is a Git LFS pointer; fetch the file"),
        ("model.safetensors", header("{}")[:-1], "is truncated within its header (9 bytes)"),
        ("model.safetensors.index.json", index("../../etc/passwd"), "puts w into ../../etc/passwd"),
        ("model.safetensors.index.json", index("/etc/passwd"), "puts w into /etc/passwd, outside"),
        ("model.safetensors.index.json", b'{"weight_map": ["w"]}', "is not an index with a weight"),
        ("model.safetensors.index.json", b'{"weight_map": {"w": 1}}', "is not an index with a"),
    ],
)
def test_a_foreign_file_is_named(source, tmp_path, capsys, file, content, message):
    folder, _ = source
    (folder / file).write_bytes(content)
    assert main([str(folder), str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert str(folder / file) in error
    assert message in error


def test_a_full_disk_leaves_nothing(source, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder, _ = source
    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError, match="No space left"):
        quantize_checkpoint(folder, tmp_path / "out")
    assert leftovers(tmp_path) == []


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("stop", "name", "status"),
    [
        (interrupt, "SIGINT", 130),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "SIGTERM", 143),
    ],
)
def test_a_signal_leaves_nothing_but_one_line(
    source, tmp_path, monkeypatch, capsys, stop, name, status
):
    save_file = checkpoint.save_file

    def stopped(*args, **kwargs):
        save_file(*args, **kwargs)
        stop()

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(checkpoint, "save_file", stopped)
    assert main([str(source[0]), str(tmp_path / "out")]) == status
    assert capsys.readouterr().err.splitlines()[-1] == f"error: stopped by {name}"
    assert leftovers(tmp_path) == []
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o007])
def test_every_file_has_the_mode_of_the_umask(source, tmp_path, umask):
    previous = os.umask(umask)
    try:
        quantize_checkpoint(source[0], tmp_path / "out")
    finally:
        os.umask(previous)
    files = [*(tmp_path / "out").iterdir()]
    assert len(files) > 4
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o666 & ~umask}


def test_the_command_says_what_is_wrong_in_one_line(tmp_path, capsys):
    (tmp_path / "bf16").mkdir()
    assert main([str(tmp_path / "bf16"), str(tmp_path / "out")]) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert "config.json does not exist" in message
    assert message.count("\n") == 1


def test_progress_is_told_layer_by_layer(source, tmp_path, caplog):
    folder, _ = source
    with caplog.at_level(logging.INFO, logger="inference.quantize"):
        quantize_checkpoint(folder, tmp_path / "out")
    told = [r.getMessage() for r in caplog.records if r.name == "inference.quantize"]
    assert told[:-1] == ["pre", "layer.0", "layer.1", "post"]
    assert told[-1] == f"{tmp_path / 'out'}: 6 of {len(published_tensors(CONFIG))} tensors in MXFP8"
