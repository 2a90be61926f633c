import json
import re
import struct

import pytest

from inference.config import ModelConfig
from m3rl.checkpoint_files import weight_problems
from m3rl.config import ConfigError
from m3rl.plan import make_plan
from m3rl.plan_text import describe
from tests.m3rl.run_files import TEXT_CONFIG, config, write_model
from tests.m3rl.tiny_tokenizer import MARKERS, character_tokenizer, write_tokenizer


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model")


def refusal(folder, **sections):
    with pytest.raises(ConfigError) as caught:
        make_plan(config(folder, **sections))
    return str(caught.value)


def rollout(**changes):
    return {"group_size": 2, "prompts_per_step": 4, "max_tokens": 12} | changes


def engine(**options):
    return rollout(backend={"kind": "m3", "engine": options})


def test_bytes_and_pages_by_hand(tmp_path, model):
    plan = make_plan(config(tmp_path, rollout=engine(num_pages=100), policy={"dtype": "bfloat16"}))
    total = sum(plan.parameters.values())
    trained = total - plan.parameters["index branch"] - 4  # nor the bias of the router
    router = 4 * (16 + 1)  # one MoE layer of 4 experts: a row of 16 and a bias each, in FP32
    assert plan.memory.uses == {
        "FP32 masters": 4 * total,
        "AdamW moments": 8 * trained,
        "weights before an update": 2 * (total - router) + 4 * router,
        "gradients": 4 * trained,
    }
    assert sum(plan.replica.weights.values()) == 2 * (total - router) + 4 * router
    assert plan.replica.cache == {
        "KV pages": 100 * 4 * 2 * (2 * 1 * 8) * 2,  # pages, slots, layers, K and V, BF16
        "index pages": 100 * 4 * 1 * 8 * 2,
    }
    assert plan.replica.buffers == {"rope table": 256 * 4 * 4}  # positions, dims, FP32
    assert plan.demand.tokens == 4 * 2 * (100 + 12)
    # 100 prompt tokens fill 25 pages shared by a group; 12 more tokens are 3 pages of each
    assert plan.demand_pages == 4 * 25 + 8 * 3


def test_with_deltas_ranks_remember_their_share_of_what_was_sent(tmp_path, model):
    options = {"policy": {"dtype": "bfloat16"}, "train": {"num_ranks": 2}}
    uses = make_plan(config(tmp_path, weight_sync={"delta": True}, **options)).memory.uses
    assert uses["what was sent"] == uses["weights before an update"]
    assert "what was sent" not in make_plan(config(tmp_path, **options)).memory.uses


def test_a_kl_term_keeps_a_second_copy_and_offloaded_moments_are_the_hosts(tmp_path, model):
    plain = make_plan(config(tmp_path)).memory
    found = make_plan(
        config(tmp_path, grpo={"kl": {"coef": 0.1}}, optimizer={"offload": True})
    ).memory
    assert found.uses["reference policy"] == found.uses["FP32 masters"]
    assert "AdamW moments" not in found.uses
    assert (found.host_bytes, plain.host_bytes) == (plain.uses["AdamW moments"], 0)


def test_demand_counts_only_what_runs_together(tmp_path, model):
    plan = make_plan(config(tmp_path, rollout=engine(max_running_requests=2)))
    assert plan.demand_pages == 2 * 25 + 2 * 3


def test_captures_take_room_beside_the_pages(tmp_path, model):
    plan = make_plan(config(tmp_path, rollout=rollout(capture_routing=True, capture_blocks=True)))
    slots = 512 * 4 + 1
    assert plan.replica.cache["captured routing"] == slots * 1 * 2
    assert plan.replica.cache["captured blocks"] == slots * 1 * 1 * 2 * 2


def test_a_request_of_full_length_must_fit_into_pages_and_positions(tmp_path, model):
    text = refusal(tmp_path, rollout=engine(num_pages=27))
    assert "= 112 is more than a replica can hold: 108" in text
    assert "num_pages to 28 or more" in text
    make_plan(config(tmp_path, rollout=engine(num_pages=28)))
    long = refusal(tmp_path, rollout=rollout(max_tokens=157))
    assert "= 257 is more than a replica can hold: 256" in long


def test_every_fault_is_told_at_once(tmp_path, model):
    (model / "tokenizer.json").unlink()
    (model / "model.safetensors").unlink()
    text = refusal(tmp_path, rollout=engine(num_pages=2))
    assert len(text.splitlines()) == 3


# BR-057
def test_a_config_that_would_be_dense_in_silence_is_refused(tmp_path, model):
    raw = {k: v for k, v in TEXT_CONFIG.items() if k != "sparse_attention_config"}
    (model / "config.json").write_text(json.dumps(raw))
    assert "model.path: " in refusal(tmp_path)


def test_a_model_folder_that_is_missing_is_named(tmp_path):
    assert "config.json" in refusal(tmp_path)


def test_a_tokenizer_without_the_markers_is_named_with_them(tmp_path, model):
    write_tokenizer(model, character_tokenizer(MARKERS[:2]))
    assert "lacks the markers [e~[ ]<]minimax[>[ <mm:think> </mm:think>" in refusal(tmp_path)


def test_a_tokenizer_of_another_model_is_noticed_by_its_ids(tmp_path):
    write_model(tmp_path / "model", vocab_size=105)
    assert "belong to different models" in refusal(tmp_path)


def test_an_end_marker_that_does_not_end_the_model_is_refused(tmp_path):
    write_model(tmp_path / "model", eos_token_id=7)
    assert "[e~[ is token 103, and the model ends at eos_token_id [7]" in refusal(tmp_path)


def test_a_missing_chat_template_is_refused(tmp_path, model):
    (model / "chat_template.jinja").unlink()
    assert "chat_template.jinja: missing" in refusal(tmp_path)


def test_a_template_inside_tokenizer_config_is_one(tmp_path, model):
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").unlink()
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    make_plan(config(tmp_path))


@pytest.mark.parametrize("keep", [0, 4, 20, -1])
def test_a_truncated_weight_file_is_noticed_without_reading_it(tmp_path, model, keep):
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert str(file) in refusal(tmp_path)


def test_a_file_that_is_no_safetensors_is_refused(tmp_path, model):
    (model / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"xx")
    assert "not a safetensors file" in refusal(tmp_path)


def test_shards_are_checked_through_their_index(tmp_path, model):
    (model / "model.safetensors").rename(model / "model-1.safetensors")
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.all": "model-1.safetensors"}}))
    make_plan(config(tmp_path))
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "x.safetensors"}}))
    assert "x.safetensors: missing; the index names it" in refusal(tmp_path)


def test_weights_of_another_size_are_refused(tmp_path, model):
    write_model(tmp_path / "other", hidden_size=32)
    (tmp_path / "other" / "model.safetensors").rename(model / "model.safetensors")
    assert "belong to different models, or files are missing" in refusal(tmp_path)


def test_quantised_weights_are_refused_for_training(tmp_path, model):
    header = {"model.x": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}
    raw = json.dumps(header).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + b"xx")
    assert "use the BF16 checkpoint" in refusal(tmp_path)


def test_weights_in_mxfp8_are_counted_without_their_scales_where_nothing_is_trained(tmp_path):
    header = {
        "model.x": {"dtype": "F8_E4M3", "shape": [2, 32], "data_offsets": [0, 64]},
        "model.x_scale_inv": {"dtype": "U8", "shape": [2, 1], "data_offsets": [64, 66]},
    }
    raw = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(66))
    assert weight_problems(tmp_path, 64, allow_mxfp8=True) == []
    assert "F8_E4M3; the trainer reads" in weight_problems(tmp_path, 64)[0]
    header["model.x"]["dtype"] = "F8_E5M2"
    raw = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(66))
    assert "is F8_E5M2" in weight_problems(tmp_path, 64, allow_mxfp8=True)[0]


def test_weights_that_are_about_to_be_made_are_only_noticed(tmp_path, model):
    (model / "model.safetensors").unlink()
    plan = make_plan(config(tmp_path), required=["tokenizer"])
    assert "neither model.safetensors nor" in plan.notices[0]
    assert "note: " in describe(plan)


def test_a_dataset_that_cannot_be_read_is_refused(tmp_path, model):
    data = {"train": {"kind": "reasoning_gym", "name": "spell_backwards", "size": 3}}
    off = {"at_start": False, "at_end": False}
    assert "has no generator 'spell_backwards'" in refusal(tmp_path, data=data, eval=off)


def test_truncated_sampling_is_noticed(tmp_path, model):
    plan = make_plan(config(tmp_path, rollout=rollout(top_p=0.9)))
    assert any("rollout.top_p: 0.9 truncates" in notice for notice in plan.notices)


def test_the_description_has_all_sums(tmp_path, model):
    text = describe(make_plan(config(tmp_path)))
    rows = [line.split() for line in text.splitlines()]
    assert "test: 1 trainer rank(s), 1 replica(s)" in text
    count = ModelConfig.from_pretrained(model).num_parameters
    assert ["all", f"{count:,}"] in rows
    assert "all of a step fits at once" in text
    assert re.search(r"weight sync: (.* KiB) from .*rank, \1 from a mean one .*, \1 to each", text)
    assert "projected" not in text  # no GPU


def test_a_run_directory_below_a_file_is_refused(tmp_path, model):
    (tmp_path / "file").write_text("")
    text = refusal(tmp_path, run={"name": "x", "dir": str(tmp_path / "file" / "run")})
    assert f"run.dir: {tmp_path / 'file'} is not a directory" in text
