"""Without the extra, zero_partition says what to install; with it, nothing of it is imported unasked."""

import importlib.abc
import shlex
import sys
import tomllib

import pytest
import torch

import weft
from tests.fix_lines.sites import ROOT
from tests.fix_lines.told import told
from weft.testing import run_ranks


class _Nothing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "deepspeed":
            raise ModuleNotFoundError("No module named 'deepspeed'")


def _model_and_optimizer():
    model = torch.nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def _partitioned(ctx):
    """In a process in which DeepSpeed cannot be imported: which modules of it are, and what is told."""
    ours = ("deepspeed", "weft.engines.deepspeed")
    imported = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(ours)}
    finder = _Nothing()
    sys.meta_path.insert(0, finder)
    try:
        weft.zero_partition(*_model_and_optimizer(), ctx, stage=2)
        found = [name for name in sys.modules if name.startswith(ours)]
        with told("engines/deepspeed/library.py", "MissingExtra(f'zero_partition: engine=") as it:
            weft.zero_partition(*_model_and_optimizer(), ctx, stage=2, engine="deepspeed")
    finally:
        sys.meta_path.remove(finder)
        sys.modules.update(imported)
    return found, str(it.error), it.fix


@pytest.mark.slow
def test_without_deepspeed_the_line_to_type_is_told():
    ((found, text, fix),) = run_ranks(_partitioned, 1)
    assert found == []
    assert "found:    ModuleNotFoundError: No module named 'deepspeed'" in text
    assert shlex.split(fix) == ["DS_BUILD_OPS=0", "pip", "install", "torchweft[deepspeed]"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(one.startswith("deepspeed>=0.19") for one in extras["deepspeed"])
