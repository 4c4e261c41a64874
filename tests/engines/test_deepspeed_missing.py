"""Without the extra, zero_partition says what to install; with it, nothing of it is imported unasked."""

import subprocess
import sys

MISSING = """
import sys
import importlib.abc

class Nothing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "deepspeed":
            raise ModuleNotFoundError("No module named 'deepspeed'")

sys.meta_path.insert(0, Nothing())
import torch, weft
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
weft.zero_partition(model, optimizer, weft.local(), stage=2)
assert not any(name.startswith(("deepspeed", "weft.engines.deepspeed")) for name in sys.modules)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
try:
    weft.zero_partition(model, optimizer, weft.local(), stage=2, engine="deepspeed")
except weft.errors.MissingExtra as error:
    print(error)
"""


def test_without_deepspeed_the_line_to_type_is_told():
    done = subprocess.run([sys.executable, "-c", MISSING], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "found:    ModuleNotFoundError: No module named 'deepspeed'" in done.stdout
    assert "fix:      DS_BUILD_OPS=0 pip install 'weft[deepspeed]'" in done.stdout
