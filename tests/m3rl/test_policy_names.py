"""Which rectangle of which parameter of transformers a checkpoint's tensor is."""

import pytest
import torch
from torch import nn

from m3rl import policy_names
from m3rl.architecture import ArchitectureError
from m3rl.policy_names import places_in
from tests.m3rl.any_models import QWEN3_MOE, model_of


def test_experts_are_rectangles_of_their_stacks_by_hand():
    model = model_of(QWEN3_MOE)
    places, shapes = places_in(model.to("meta"))
    layer = "model.layers.1.mlp.experts"
    for expert in range(4):
        assert places[f"{layer}.{expert}.gate_proj.weight"].index == (expert, slice(0, 24))
        assert places[f"{layer}.{expert}.up_proj.weight"].index == (expert, slice(24, 48))
        assert places[f"{layer}.{expert}.down_proj.weight"].index == (expert,)
        assert places[f"{layer}.{expert}.up_proj.weight"].param == f"{layer}.gate_up_proj"
        assert shapes[f"{layer}.{expert}.up_proj.weight"] == (24, 32)
    whole = places["model.norm.weight"]
    assert (whole.param, whole.index) == ("model.norm.weight", ())


def test_filling_every_place_gives_what_transformers_loads(tmp_path):
    from safetensors.torch import load_file

    model = model_of(QWEN3_MOE)
    model.save_pretrained(tmp_path)
    stored, (places, _) = load_file(tmp_path / "model.safetensors"), places_in(model)
    assert stored.keys() == places.keys()
    state = {name: torch.full_like(t, torch.nan) for name, t in model.state_dict().items()}
    for name, tensor in stored.items():
        state[places[name].param][places[name].index] = tensor
    for name, tensor in model.state_dict().items():
        assert torch.equal(state[name], tensor), name


class Fused(nn.Module):
    def __init__(self, rows=6):
        super().__init__()
        self.qkv = nn.Linear(4, rows, bias=False)


def places_where(monkeypatch, apart, rows=6):
    """Of a model whose checkpoint stores what `apart` makes of its one weight."""
    monkeypatch.setattr(policy_names, "_apart", lambda _, tensors: apart(tensors["qkv.weight"]))
    return places_in(Fused(rows))


def test_concatenated_rows_are_told_apart(monkeypatch):
    def thirds(weight):
        return dict(zip("qkv", weight.chunk(3), strict=True))

    places, shapes = places_where(monkeypatch, thirds)
    expected = [(slice(0, 2),), (slice(2, 4),), (slice(4, 6),)]
    assert [places[name].index for name in "qkv"] == expected
    assert set(shapes.values()) == {(2, 4)}


@pytest.mark.parametrize(
    "apart",
    [
        lambda weight: {"w": weight.T.contiguous()},
        lambda weight: {"w": weight.flip(0)},
        lambda weight: {"even": weight[::2], "odd": weight[1::2]},
        lambda weight: {"first": weight[: len(weight) // 5], "rest": weight[len(weight) // 5 :]},
        lambda weight: {"w": weight.flatten()},
        lambda weight: {"w": weight.new_zeros(weight.shape)},
    ],
    ids=["transposed", "reversed", "interleaved", "fifths", "flat", "other values"],
)
def test_what_is_no_rectangle_in_order_is_refused(monkeypatch, apart):
    with pytest.raises(ArchitectureError, match=r"transformers makes qkv\.weight of"):
        places_where(monkeypatch, apart, rows=10)


@pytest.mark.parametrize(
    ("apart", "times"),
    [
        (lambda weight: {"half": weight[: len(weight) // 2]}, 0),
        (lambda weight: {"a": weight, "b": weight[: len(weight) // 2]}, 2),
    ],
)
def test_each_element_must_be_in_one_tensor(monkeypatch, apart, times):
    with pytest.raises(ArchitectureError, match=rf"parts of qkv\.weight {times} times"):
        places_where(monkeypatch, apart)


def test_parts_whose_number_depends_on_the_size_are_refused(monkeypatch):
    def rows(weight):
        return {f"row{i}": row for i, row in enumerate(weight)}

    with pytest.raises(ArchitectureError, match="depends on their sizes"):
        places_where(monkeypatch, rows)
