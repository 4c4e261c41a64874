"""Arguments of all calls: `weft.checks`."""

from torch import nn

import weft
from tests.fix_lines.told import told


def test_a_module_is_missing():
    with weft.start(device="cpu") as ctx:
        model = nn.Linear(2, 2)
        with told("checks.py", "model, ctx = weft.{what}(model, ctx)") as it:
            weft.replicate(None, ctx)
        it.run(model=model, ctx=ctx)
