"""The public names with their types, for whoever checks these; `__init__.py` imports each when it is first used."""

from parallel.mesh import Mesh as Mesh
from parallel.mesh import ReplicaError as ReplicaError
from parallel.strategies.data_parallel import CompressedDataParallel as CompressedDataParallel
from parallel.strategies.data_parallel import DistributedDataParallel as DistributedDataParallel
from parallel.strategies.data_parallel import ReproducibleDataParallel as ReproducibleDataParallel
from parallel.strategies.join import join as join
from parallel.strategies.master_worker import DataParallel as DataParallel
from parallel.strategies.master_worker import ReproducibleMasterWorker as ReproducibleMasterWorker
from parallel.strategies.parameter_server import CompressedParameterServer as CompressedParameterServer
from parallel.strategies.parameter_server import ParameterServer as ParameterServer
from parallel.strategies.parameter_server import ReproducibleParameterServer as ReproducibleParameterServer
from parallel.strategies.sandblaster import Sandblaster as Sandblaster
from parallel.strategies.serial import ReproducibleSerial as ReproducibleSerial
from parallel.strategies.zero import FullyShardedDataParallel as FullyShardedDataParallel
from parallel.strategies.zero import ReproducibleFullyShardedDataParallel as ReproducibleFullyShardedDataParallel
from parallel.strategies.zero import ReproducibleZeRO1 as ReproducibleZeRO1
from parallel.strategies.zero import ReproducibleZeRO2 as ReproducibleZeRO2
from parallel.strategies.zero import ZeRO1 as ZeRO1
from parallel.strategies.zero import ZeRO2 as ZeRO2
from parallel.trainer import CheckReplicas as CheckReplicas
from parallel.trainer import Trainer as Trainer
