"""The free functions and options of accelerate's ``accelerate.utils``: a table of what is where, and nothing else.

Each name is imported when it is first used. The modules beside this one pass on the same names under the paths
that accelerate has for them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nb_accelerate.utils.constants import *  # noqa: F403 - the names are those of the table
    from nb_accelerate.utils.dataclasses import *  # noqa: F403 - the names are those of the table
    from nb_accelerate.utils.environment import *  # noqa: F403 - the names are those of the table
    from nb_accelerate.utils.imports import *  # noqa: F403 - the names are those of the table
    from nb_accelerate.utils.launch import *  # noqa: F403 - the names are those of the table
    from nb_accelerate.utils.memory import *  # noqa: F403 - the names are those of the table
    from nb_accelerate.utils.modeling import *  # noqa: F403 - the names are those of the table
    from nb_accelerate.utils.offload import *  # noqa: F403 - the names are those of the table
    from nb_accelerate.utils.operations import *  # noqa: F403 - the names are those of the table
    from nb_accelerate.utils.other import *  # noqa: F403 - the names are those of the table
    from nb_accelerate.utils.random import *  # noqa: F403 - the names are those of the table
    from nb_accelerate.utils.torch_xla import *  # noqa: F403 - the names are those of the table
    from nb_accelerate.utils.versions import *  # noqa: F403 - the names are those of the table

_HOME = {
    "AutocastKwargs": "config.kwargs",
    "CannotPadNestedTensorWarning": "errors",
    "ComputeEnvironment": "config.project",
    "CustomDtype": "bigmodel.sizes",
    "DDPCommunicationHookType": "config.kwargs",
    "DataLoaderConfiguration": "config.loader",
    "DistributedDataParallelKwargs": "config.kwargs",
    "DistributedOperationException": "errors",
    "DistributedType": "config.distributed",
    "DynamoBackend": "config.dynamo",
    "GradScalerKwargs": "config.kwargs",
    "GradientAccumulationPlugin": "config.accumulation",
    "InitProcessGroupKwargs": "config.kwargs",
    "KwargsHandler": "config.kwargs",
    "LoggerType": "config.project",
    "MODEL_NAME": "checkpoint.names",
    "OPTIMIZER_NAME": "checkpoint.names",
    "PrecisionType": "config.precision",
    "PrepareForLaunch": "compat.launching",
    "ProfileKwargs": "config.profiling",
    "ProjectConfiguration": "config.project",
    "RNGType": "process.rng",
    "RNG_STATE_NAME": "checkpoint.names",
    "SAFE_MODEL_NAME": "checkpoint.names",
    "SAFE_WEIGHTS_INDEX_NAME": "checkpoint.names",
    "SAFE_WEIGHTS_NAME": "checkpoint.names",
    "SAFE_WEIGHTS_PATTERN_NAME": "checkpoint.names",
    "SAMPLER_NAME": "checkpoint.names",
    "SCALER_NAME": "checkpoint.names",
    "SCHEDULER_NAME": "checkpoint.names",
    "TensorInformation": "nested.structures",
    "TorchDynamoPlugin": "config.dynamo",
    "WEIGHTS_INDEX_NAME": "checkpoint.names",
    "WEIGHTS_NAME": "checkpoint.names",
    "WEIGHTS_PATTERN_NAME": "checkpoint.names",
    "are_libraries_initialized": "compat.packages",
    "broadcast": "compat.exchange",
    "broadcast_object_list": "compat.exchange",
    "calculate_maximum_sizes": "bigmodel.sizes",
    "check_cuda_fp8_capability": "compat.capabilities",
    "check_cuda_p2p_ib_support": "compat.capabilities",
    "check_os_kernel": "compat.capabilities",
    "check_tied_parameters_in_config": "bigmodel.ties",
    "check_tied_parameters_on_same_device": "bigmodel.ties",
    "clean_state_dict_for_safetensors": "checkpoint.files",
    "clear_device_cache": "process.memory",
    "clear_environment": "compat.environ",
    "compare_versions": "compat.versions",
    "compile_regions": "accelerator.compiling",
    "compute_module_sizes": "bigmodel.sizes",
    "concatenate": "nested.structures",
    "convert_bytes": "compat.sizes",
    "convert_dict_to_env_variables": "compat.environ",
    "convert_file_size_to_int": "checkpoint.files",
    "convert_outputs_to_fp32": "compat.models",
    "convert_to_fp32": "compat.models",
    "copy_tensor_to_devices": "compat.exchange",
    "dtype_byte_size": "bigmodel.sizes",
    "extract_model_from_parallel": "compat.models",
    "extract_submodules_state_dict": "bigmodel.ties",
    "find_batch_size": "nested.structures",
    "find_device": "nested.structures",
    "find_executable_batch_size": "process.memory",
    "find_tied_parameters": "bigmodel.ties",
    "gather": "compat.exchange",
    "gather_object": "compat.exchange",
    "get_cpu_distributed_information": "compat.capabilities",
    "get_current_device_type": "compat.capabilities",
    "get_data_structure": "nested.structures",
    "get_gpu_info": "compat.capabilities",
    "get_grad_scaler": "compat.numbers",
    "get_int_from_env": "compat.environ",
    "get_max_layer_size": "bigmodel.sizes",
    "get_mixed_precision_context_manager": "compat.numbers",
    "get_pretty_name": "compat.models",
    "has_compiled_regions": "compat.models",
    "honor_type": "nested.structures",
    "id_tensor_storage": "checkpoint.files",
    "ignorant_find_batch_size": "nested.structures",
    "initialize_tensors": "nested.structures",
    "install_xla": "compat.xla",
    "is_4bit_bnb_available": "compat.packages",
    "is_8bit_bnb_available": "compat.packages",
    "is_aim_available": "compat.packages",
    "is_amdsmi_available": "compat.packages",
    "is_bf16_available": "compat.capabilities",
    "is_bitsandbytes_multi_backend_available": "compat.packages",
    "is_bnb_available": "compat.packages",
    "is_boto3_available": "compat.packages",
    "is_clearml_available": "compat.packages",
    "is_comet_ml_available": "compat.packages",
    "is_compiled_module": "compat.models",
    "is_cuda_available": "compat.capabilities",
    "is_datasets_available": "compat.packages",
    "is_deepspeed_available": "compat.packages",
    "is_dvclive_available": "compat.packages",
    "is_fp16_available": "compat.capabilities",
    "is_fp8_available": "compat.capabilities",
    "is_habana_gaudi1": "compat.packages",
    "is_hpu_available": "compat.packages",
    "is_import_timer_available": "compat.packages",
    "is_lomo_available": "compat.packages",
    "is_matplotlib_available": "compat.packages",
    "is_megatron_lm_available": "compat.packages",
    "is_mlflow_available": "compat.packages",
    "is_mlu_available": "compat.packages",
    "is_mps_available": "compat.capabilities",
    "is_msamp_available": "compat.packages",
    "is_musa_available": "compat.packages",
    "is_namedtuple": "nested.structures",
    "is_neuron_available": "compat.packages",
    "is_npu_available": "compat.packages",
    "is_pandas_available": "compat.packages",
    "is_peft_available": "compat.packages",
    "is_peft_model": "compat.models",
    "is_pippy_available": "compat.packages",
    "is_port_in_use": "compat.environ",
    "is_pynvml_available": "compat.packages",
    "is_pytest_available": "compat.packages",
    "is_rich_available": "compat.packages",
    "is_rocm_available": "compat.capabilities",
    "is_sagemaker_available": "compat.packages",
    "is_schedulefree_available": "compat.packages",
    "is_sdaa_available": "compat.packages",
    "is_swanlab_available": "compat.packages",
    "is_tensor_information": "nested.structures",
    "is_tensorboard_available": "compat.packages",
    "is_timm_available": "compat.packages",
    "is_torch_tensor": "nested.structures",
    "is_torch_version": "compat.versions",
    "is_torch_xla_available": "compat.packages",
    "is_torchao_available": "compat.packages",
    "is_torchdata_available": "compat.packages",
    "is_torchdata_stateful_dataloader_available": "compat.packages",
    "is_torchvision_available": "compat.packages",
    "is_trackio_available": "compat.packages",
    "is_transformer_engine_available": "compat.packages",
    "is_transformer_engine_mxfp8_available": "compat.packages",
    "is_transformers_available": "compat.packages",
    "is_triton_available": "compat.packages",
    "is_wandb_available": "compat.packages",
    "is_weights_only_available": "compat.versions",
    "is_xccl_available": "compat.capabilities",
    "is_xpu_available": "compat.capabilities",
    "listify": "nested.structures",
    "load": "checkpoint.files",
    "load_checkpoint_in_model": "checkpoint.model",
    "load_state_dict": "checkpoint.files",
    "merge_dicts": "compat.environ",
    "model_has_dtensor": "compat.models",
    "named_module_tensors": "compat.models",
    "pad_across_processes": "compat.exchange",
    "parse_choice_from_env": "compat.environ",
    "parse_flag_from_env": "compat.environ",
    "patch_environment": "compat.environ",
    "purge_accelerate_environment": "compat.environ",
    "recursive_getattr": "compat.models",
    "recursively_apply": "nested.structures",
    "reduce": "compat.exchange",
    "release_memory": "process.memory",
    "retie_parameters": "bigmodel.ties",
    "save": "accelerator.saving",
    "send_to_device": "nested.structures",
    "set_numa_affinity": "process.affinity",
    "set_seed": "process.rng",
    "should_reduce_batch_size": "process.memory",
    "slice_tensors": "nested.structures",
    "str_to_bool": "compat.environ",
    "synchronize_rng_state": "compat.exchange",
    "synchronize_rng_states": "compat.exchange",
    "tqdm": "compat.progress",
    "wait_for_everyone": "compat.exchange",
}


_MODULES = frozenset(
    {
        "constants",
        "dataclasses",
        "environment",
        "imports",
        "launch",
        "memory",
        "modeling",
        "offload",
        "operations",
        "other",
        "random",
        "torch_xla",
        "versions",
    }
)


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_HOME)
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; nb_accelerate/compat/parity.md lists what is left out"
        )
    value = getattr(importlib.import_module(f"nb_accelerate.{_HOME[name]}"), name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
