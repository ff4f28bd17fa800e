"""Options and their words, under the names of ``accelerate.utils.dataclasses``."""

from nb_accelerate.base.config.accumulation import GradientAccumulationPlugin as GradientAccumulationPlugin
from nb_accelerate.base.config.deepspeed import DeepSpeedPlugin as DeepSpeedPlugin
from nb_accelerate.base.config.distributed import DistributedType as DistributedType, PrecisionType as PrecisionType
from nb_accelerate.base.config.dynamo import (
    DynamoBackend as DynamoBackend,
    TorchDynamoPlugin as TorchDynamoPlugin,
)
from nb_accelerate.base.config.fsdp import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from nb_accelerate.base.config.kwargs import (
    AutocastKwargs as AutocastKwargs,
    DDPCommunicationHookType as DDPCommunicationHookType,
    DistributedDataParallelKwargs as DistributedDataParallelKwargs,
    GradScalerKwargs as GradScalerKwargs,
    InitProcessGroupKwargs as InitProcessGroupKwargs,
    KwargsHandler as KwargsHandler,
    ProfileKwargs as ProfileKwargs,
)
from nb_accelerate.base.config.loader import DataLoaderConfiguration as DataLoaderConfiguration
from nb_accelerate.base.config.parallelism import (
    ParallelismConfig as ParallelismConfig,
    TorchTensorParallelConfig as TorchTensorParallelConfig,
    TorchTensorParallelPlugin as TorchTensorParallelPlugin,
)
from nb_accelerate.base.config.precision import AORecipeKwargs as AORecipeKwargs
from nb_accelerate.base.config.project import (
    ComputeEnvironment as ComputeEnvironment,
    LoggerType as LoggerType,
    ProjectConfiguration as ProjectConfiguration,
)
from nb_accelerate.compat.models import get_module_class_from_name as get_module_class_from_name
from nb_accelerate.compat.refused import (
    DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig,
    FP8RecipeKwargs as FP8RecipeKwargs,
    MegatronLMPlugin as MegatronLMPlugin,
    MSAMPRecipeKwargs as MSAMPRecipeKwargs,
    SageMakerDistributedType as SageMakerDistributedType,
    TERecipeKwargs as TERecipeKwargs,
    TorchContextParallelConfig as TorchContextParallelConfig,
    add_model_config_to_megatron_parser as add_model_config_to_megatron_parser,
)
from nb_accelerate.training.bigmodel.quantised import BnbQuantizationConfig as BnbQuantizationConfig
from nb_accelerate.training.bigmodel.sizes import CustomDtype as CustomDtype
from nb_accelerate.training.process.rng import RNGType as RNGType
from nb_accelerate.training.pytree.structures import TensorInformation as TensorInformation
