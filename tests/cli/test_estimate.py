"""`weft estimate` of a class, of files of weights, and of a configuration."""

import json

import pytest
import torch
from torch import nn

import weft
from weft.cli import main


def test_a_class_with_arguments_is_built_without_memory(capsys):
    assert main(["estimate", "torch.nn:Linear(2000000, 1000000, bias=False)", "--ranks", "8"]) == 0
    text = capsys.readouterr().out
    assert "2,000,000,000,000 parameters" in text
    assert "zero3" in text


def test_json_holds_the_numbers_in_bytes(capsys):
    assert (
        main(["estimate", "torch.nn:Linear(64, 64, bias=False)", "--json", "--ranks", "4", "--optimizer", "sgd"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["training_bytes"]["fp32"] == {"sgd": 32768, "momentum": 49152, "adamw": 65536, "adamw-8bit": 41088}
    assert found["per_rank_bytes"] == {"4": {"replicate": 32768, "zero1": 32768, "zero2": 20480, "zero3": 8192}}


@pytest.mark.parametrize("place", ["out", "out/model.safetensors", "ckpt"])
def test_of_files_the_heads_are_read(tmp_path, capsys, place):
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[2].weight = model[1].weight
    ctx = weft.local()
    state, ctx = weft.checkpointable({"model": model}, ctx)
    weft.save(state, tmp_path / "ckpt", 1, ctx)
    weft.export(tmp_path / "ckpt", tmp_path / "out")
    assert main(["estimate", str(tmp_path / place), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 8 * 4 + 4 + 16


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("nothing_here", "no such file"),
        ("torch.nn:Lin", "has no attribute 'Lin'"),
        ("torch.nn:Linear(2)", "missing 1 required positional argument"),
        ("torch.nn:Linear(open('x'), 2)", "malformed node"),
        ("no_such_module_at_all:X", "No module named"),
    ],
)
def test_what_is_no_model_is_refused(capsys, model, found):
    assert main(["estimate", model]) == 2
    text = capsys.readouterr().err
    assert found in text
    assert "fix:      weft estimate" in text


def test_a_folder_without_weights_is_refused(tmp_path, capsys):
    torch.save({}, tmp_path / "model.bin")
    assert main(["estimate", str(tmp_path)]) in (1, 2)
    assert "found:" in capsys.readouterr().err
