"""The public names: the table that `nb_accelerate.base.lazy` and type checkers read. Each name stands here only."""

from nb_accelerate import (
    accelerator as accelerator,
    big_modeling as big_modeling,
    commands as commands,
    data_loader as data_loader,
    hooks as hooks,
    inference as inference,
    launchers as launchers,
    local_sgd as local_sgd,
    logging as logging,
    optimizer as optimizer,
    parallelism_config as parallelism_config,
    pool as pool,
    scheduler as scheduler,
    state as state,
    tracking as tracking,
    utils as utils,
)
from nb_accelerate.base.config.accumulation import GradientAccumulationPlugin as GradientAccumulationPlugin
from nb_accelerate.base.config.deepspeed import DeepSpeedPlugin as DeepSpeedPlugin
from nb_accelerate.base.config.distributed import DistributedType as DistributedType
from nb_accelerate.base.config.fsdp import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from nb_accelerate.base.config.kwargs import (
    AutocastKwargs as AutocastKwargs,
    DDPCommunicationHookType as DDPCommunicationHookType,
    DistributedDataParallelKwargs as DistributedDataParallelKwargs,
    GradScalerKwargs as GradScalerKwargs,
    InitProcessGroupKwargs as InitProcessGroupKwargs,
    ProfileKwargs as ProfileKwargs,
)
from nb_accelerate.base.config.loader import DataLoaderConfiguration as DataLoaderConfiguration
from nb_accelerate.base.config.parallelism import ParallelismConfig as ParallelismConfig
from nb_accelerate.base.config.project import ProjectConfiguration as ProjectConfiguration
from nb_accelerate.base.records.kept import runs as runs
from nb_accelerate.base.version import __version__ as __version__
from nb_accelerate.compat.exchange import synchronize_rng_states as synchronize_rng_states
from nb_accelerate.compat.packages import is_rich_available as is_rich_available
from nb_accelerate.compat.refused import prepare_pippy as prepare_pippy
from nb_accelerate.errors import (
    CollectiveMismatchError as CollectiveMismatchError,
    ConfigError as ConfigError,
    DeadlineError as DeadlineError,
    DeadlockError as DeadlockError,
    LaunchError as LaunchError,
    MissingDependencyError as MissingDependencyError,
    NbAccelerateError as NbAccelerateError,
    NotPreparedError as NotPreparedError,
    RankDiedError as RankDiedError,
    RankError as RankError,
    RemoteError as RemoteError,
    ShippingError as ShippingError,
    StartError as StartError,
)
from nb_accelerate.launchers import debug_launcher as debug_launcher
from nb_accelerate.notebook.launch import notebook_launcher as notebook_launcher
from nb_accelerate.notebook.launch.sweep import sweep as sweep
from nb_accelerate.notebook.magics import (
    load_ipython_extension as load_ipython_extension,
    unload_ipython_extension as unload_ipython_extension,
)
from nb_accelerate.notebook.ranks.request_panel import attach as attach
from nb_accelerate.rehearsing import rehearse as rehearse
from nb_accelerate.training.accelerator import Accelerator as Accelerator
from nb_accelerate.training.bigmodel.device_map import (
    infer_auto_device_map as infer_auto_device_map,
    show_map as show_map,
)
from nb_accelerate.training.bigmodel.dispatch import (
    cpu_offload as cpu_offload,
    disk_offload as disk_offload,
    dispatch_model as dispatch_model,
)
from nb_accelerate.training.bigmodel.module_hooks import cpu_offload_with_hook as cpu_offload_with_hook
from nb_accelerate.training.bigmodel.tensors import (
    init_empty_weights as init_empty_weights,
    init_on_device as init_on_device,
)
from nb_accelerate.training.checkpoint.listing import checkpoints as checkpoints
from nb_accelerate.training.checkpoint.model import (
    load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
    load_checkpoint_in_model as load_checkpoint_in_model,
)
from nb_accelerate.training.data import skip_first_batches as skip_first_batches
from nb_accelerate.training.process.memory import find_executable_batch_size as find_executable_batch_size
from nb_accelerate.training.process.progress import progress as progress
from nb_accelerate.training.process.rng import set_seed as set_seed
from nb_accelerate.training.state import PartialState as PartialState
