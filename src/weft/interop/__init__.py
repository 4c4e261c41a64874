"""Where weft meets other libraries: what they wrote, and how they work under weft's context and contract.

accelerate_checkpoint.py  `import_accelerate`
dcp_checkpoint.py         `import_dcp`, of torch.distributed.checkpoint
deepspeed_checkpoint.py   `import_deepspeed`, which trusts what it reads
deepspeed_partition.py    `zero_partition(engine="deepspeed")`: arguments checked, ranks agreed
imported.py               from what was read to a checkpoint of weft, streamed
saved_folder.py           weights, optimizers and schedulers as Accelerate and the Trainer save them
torch_files.py            files of torch.save and of DCP, of which nothing is executed
trainer_checkpoint.py     `import_trainer`, of transformers

Tested by: tests/engines/test_deepspeed.py, tests/engines/test_deepspeed_checkpoint.py, tests/interop
"""

from weft.interop.accelerate_checkpoint import import_accelerate
from weft.interop.dcp_checkpoint import import_dcp
from weft.interop.deepspeed_checkpoint import import_deepspeed
from weft.interop.imported import Imported
from weft.interop.trainer_checkpoint import import_trainer

__all__ = ["Imported", "import_accelerate", "import_dcp", "import_deepspeed", "import_trainer"]
