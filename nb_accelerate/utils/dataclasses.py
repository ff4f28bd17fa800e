"""Options and their words, under the names of ``accelerate.utils.dataclasses``."""

from nb_accelerate.bigmodel.sizes import CustomDtype
from nb_accelerate.config.accumulation import GradientAccumulationPlugin
from nb_accelerate.config.distributed import DistributedType
from nb_accelerate.config.dynamo import DynamoBackend, TorchDynamoPlugin
from nb_accelerate.config.kwargs import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
)
from nb_accelerate.config.loader import DataLoaderConfiguration
from nb_accelerate.config.precision import PrecisionType
from nb_accelerate.config.profiling import ProfileKwargs
from nb_accelerate.config.project import ComputeEnvironment, LoggerType, ProjectConfiguration
from nb_accelerate.nested.structures import TensorInformation
from nb_accelerate.process.rng import RNGType

__all__ = [
    "AutocastKwargs",
    "ComputeEnvironment",
    "CustomDtype",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "TensorInformation",
    "TorchDynamoPlugin",
]
