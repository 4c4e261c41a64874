"""Where a process stands in its job, as a pure function of environment variables.

Nothing here reads `os.environ`: the caller hands over a mapping, so that recorded environments of
any cluster can be parsed in a test. Sources, best first: a pod of Kubeflow without a launcher; torchrun
and everything that speaks its names (Ray Train, submitit, Kubeflow); LSF's jsrun, Open MPI, MPICH /
Intel MPI / PMI, SLURM's srun, TPU pods.

variables.py   `topology`: which source speaks, and whether its facts fit together
frameworks.py  torchrun's names, Kubeflow, TPU pods
schedulers.py  SLURM, LSF, MPI
hosts.py       lists of hosts
facts.py       variables as numbers and texts
topology.py    the result
cores.py       the cores of this machine that may be used
joined.py      whether they are meant for this process, or for the rank that started it
parent.py      a process that ends with the one that started it

Tested by: tests/environments
"""

from weft.environments.cores import cores_here
from weft.environments.hosts import first_host
from weft.environments.parent import end_with_parent
from weft.environments.topology import Topology
from weft.environments.variables import topology

__all__ = ["Topology", "cores_here", "end_with_parent", "first_host", "topology"]
