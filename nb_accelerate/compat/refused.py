"""Names of accelerate that can be imported, so that a script starts, and that refuse when they are called.

They are classes, for scripts that ask ``isinstance``: nothing is an instance of one.
"""

from __future__ import annotations

from typing import Any, NoReturn

from nb_accelerate.errors import ConfigError

_REASONS = {
    "prepare_deepspeed_cmd_env prepare_multi_gpu_env prepare_simple_launcher_cmd_env prepare_tpu": (
        "builds a command for torchrun or another launcher, and ranks are started here by this package itself. Write "
        "nb-accelerate launch FLAGS script.py, or nb_accelerate.notebook_launcher(function)."
    ),
    "DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper": (
        "is what accelerate makes of DeepSpeed's objects, and preparing makes the usual ones of them here. Write "
        "model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)."
    ),
    "AbstractTrainStep BertTrainStep GPTTrainStep MegatronLMDummyDataLoader MegatronLMDummyScheduler MegatronLMPlugin "
    "T5TrainStep add_model_config_to_megatron_parser avg_losses_across_data_parallel_group": (
        "is for Megatron-LM, which replaces the training loop and is not supported. Write "
        "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin()) to shard a model, or parallelism_config="
        "ParallelismConfig(tp_size=2) to split its layers."
    ),
    "fsdp2_switch_optimizer_parameters": (
        "replaces parameters one by one. Here preparing a model and its optimizer together does that. Write model, "
        "optimizer = accelerator.prepare(model, optimizer)."
    ),
    "FP8RecipeKwargs MSAMPRecipeKwargs TERecipeKwargs apply_fp8_autowrap contextual_fp8_autocast convert_model": (
        "is for TransformerEngine or MS-AMP, which are not used: torchao computes linear layers in 8 bits. Write "
        "Accelerator(mixed_precision='fp8', kwargs_handlers=[AORecipeKwargs()])."
    ),
    "prepare_pippy": (
        "is a shell around torch.distributed.pipelining, which has to trace the forward of a model as one graph, and "
        "which torch has without it. Write model = dispatch_model(model, infer_auto_device_map(model)) to spread a "
        "model over GPUs; parallelism_config=ParallelismConfig(tp_size=2) to have them compute at once; or, on each "
        "rank, torch.distributed.pipelining.pipeline(model, mb_args=(batch,), "
        "split_spec={'layers.8': SplitPoint.BEGINNING})."
    ),
    "SageMakerDistributedType prepare_sagemager_args_inputs": (
        "is for SageMaker's launcher, which is not supported. Write nb-accelerate launch FLAGS script.py."
    ),
    "DeepSpeedSequenceParallelConfig TorchContextParallelConfig": (
        "splits sequences over ranks, which is not supported. Write parallelism_config=ParallelismConfig(tp_size=2) to "
        "split layers, or fsdp_plugin=FullyShardedDataParallelPlugin(activation_checkpointing=True) for long sequences."
    ),
    "filter_first_and_last_linear_layers": (
        "is given one layer, and cannot tell from it which layer of the model is the first and which the last. Leave "
        "module_filter_func out: both stay in 16 bits then."
    ),
}
REASON_OF = {name: reason for names, reason in _REASONS.items() for name in names.split()}


class Refused:
    """The base of names that refuse.

    Raises:
        ConfigError: always, when it is called.
    """

    reason: str

    def __new__(cls, *_: Any, **__: Any) -> NoReturn:
        """Refuse."""
        raise ConfigError(f"{cls.__name__} {cls.reason}")


def __getattr__(name: str) -> type[Refused]:
    if name not in REASON_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    reason = REASON_OF[name]
    doc = f"Refuse when called: it {reason}"
    globals()[name] = made = type(name, (Refused,), {"reason": reason, "__doc__": doc, "__module__": __name__})
    return made


def __dir__() -> list[str]:
    return sorted({*globals(), *REASON_OF})
