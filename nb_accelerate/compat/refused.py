"""Names of accelerate that can be imported, so that a script starts, and that refuse when they are called.

They are classes, for scripts that ask ``isinstance``: nothing is an instance of one.
"""

from __future__ import annotations

from typing import Any, NoReturn

from nb_accelerate.errors import ConfigError

_COMMAND_LINE = (
    "builds a command for torchrun or another launcher, and ranks are started here by this package itself. Write "
    "nb-accelerate launch FLAGS script.py, or nb_accelerate.notebook_launcher(function)."
)
_DEEPSPEED = (
    "is what accelerate makes of DeepSpeed's objects, and preparing makes the usual ones of them here. Write model, "
    "optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)."
)
_MEGATRON = (
    "is for Megatron-LM, which replaces the training loop and is not supported. Write "
    "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin()) to shard a model, or parallelism_config="
    "ParallelismConfig(tp_size=2) to split its layers."
)
_ONE_BY_ONE = (
    "replaces parameters one by one. Here preparing a model and its optimizer together does that. Write model, "
    "optimizer = accelerator.prepare(model, optimizer)."
)
_OTHER_8_BITS = (
    "is for TransformerEngine or MS-AMP, which are not used: torchao computes linear layers in 8 bits. Write "
    "Accelerator(mixed_precision='fp8', kwargs_handlers=[AORecipeKwargs()])."
)
_PIPELINES = (
    "is a shell around torch.distributed.pipelining, which has to trace the forward of a model as one graph, and which "
    "torch has without it. Write model = dispatch_model(model, infer_auto_device_map(model)) to spread a model over "
    "GPUs; parallelism_config=ParallelismConfig(tp_size=2) to have them compute at once; or, on each rank, "
    "torch.distributed.pipelining.pipeline(model, mb_args=(batch,), split_spec={'layers.8': SplitPoint.BEGINNING})."
)
_SAGEMAKER = "is for SageMaker's launcher, which is not supported. Write nb-accelerate launch FLAGS script.py."
_SEQUENCES = (
    "splits sequences over ranks, which is not supported. Write parallelism_config=ParallelismConfig(tp_size=2) to "
    "split layers, or fsdp_plugin=FullyShardedDataParallelPlugin(activation_checkpointing=True) for long sequences."
)


class Refused:
    """The base of names that refuse.

    Raises:
        ConfigError: always, when it is called.
    """

    reason: str

    def __new__(cls, *_: Any, **__: Any) -> NoReturn:
        """Refuse."""
        raise ConfigError(f"{cls.__name__} {cls.reason}")


def _refused(name: str, reason: str) -> type[Refused]:
    doc = f"Refuse when called: it {reason}"
    return type(name, (Refused,), {"reason": reason, "__doc__": doc, "__module__": __name__})


AbstractTrainStep = _refused("AbstractTrainStep", _MEGATRON)
BertTrainStep = _refused("BertTrainStep", _MEGATRON)
DeepSpeedEngineWrapper = _refused("DeepSpeedEngineWrapper", _DEEPSPEED)
DeepSpeedOptimizerWrapper = _refused("DeepSpeedOptimizerWrapper", _DEEPSPEED)
DeepSpeedSchedulerWrapper = _refused("DeepSpeedSchedulerWrapper", _DEEPSPEED)
DeepSpeedSequenceParallelConfig = _refused("DeepSpeedSequenceParallelConfig", _SEQUENCES)
FP8RecipeKwargs = _refused("FP8RecipeKwargs", _OTHER_8_BITS)
GPTTrainStep = _refused("GPTTrainStep", _MEGATRON)
MSAMPRecipeKwargs = _refused("MSAMPRecipeKwargs", _OTHER_8_BITS)
MegatronLMDummyDataLoader = _refused("MegatronLMDummyDataLoader", _MEGATRON)
MegatronLMDummyScheduler = _refused("MegatronLMDummyScheduler", _MEGATRON)
MegatronLMPlugin = _refused("MegatronLMPlugin", _MEGATRON)
SageMakerDistributedType = _refused("SageMakerDistributedType", _SAGEMAKER)
T5TrainStep = _refused("T5TrainStep", _MEGATRON)
TERecipeKwargs = _refused("TERecipeKwargs", _OTHER_8_BITS)
TorchContextParallelConfig = _refused("TorchContextParallelConfig", _SEQUENCES)
add_model_config_to_megatron_parser = _refused("add_model_config_to_megatron_parser", _MEGATRON)
apply_fp8_autowrap = _refused("apply_fp8_autowrap", _OTHER_8_BITS)
avg_losses_across_data_parallel_group = _refused("avg_losses_across_data_parallel_group", _MEGATRON)
contextual_fp8_autocast = _refused("contextual_fp8_autocast", _OTHER_8_BITS)
convert_model = _refused("convert_model", _OTHER_8_BITS)
filter_first_and_last_linear_layers = _refused(
    "filter_first_and_last_linear_layers",
    "is given one layer, and cannot tell from it which layer of the model is the first and which the last. Leave "
    "module_filter_func out: both stay in 16 bits then.",
)
fsdp2_switch_optimizer_parameters = _refused("fsdp2_switch_optimizer_parameters", _ONE_BY_ONE)
prepare_deepspeed_cmd_env = _refused("prepare_deepspeed_cmd_env", _COMMAND_LINE)
prepare_multi_gpu_env = _refused("prepare_multi_gpu_env", _COMMAND_LINE)
prepare_pippy = _refused("prepare_pippy", _PIPELINES)
prepare_sagemager_args_inputs = _refused("prepare_sagemager_args_inputs", _SAGEMAKER)
prepare_simple_launcher_cmd_env = _refused("prepare_simple_launcher_cmd_env", _COMMAND_LINE)
prepare_tpu = _refused("prepare_tpu", _COMMAND_LINE)
