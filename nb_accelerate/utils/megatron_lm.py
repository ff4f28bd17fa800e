"""Names of ``accelerate.utils.megatron_lm``."""

from nb_accelerate.compat.refused import (
    AbstractTrainStep as AbstractTrainStep,
    BertTrainStep as BertTrainStep,
    GPTTrainStep as GPTTrainStep,
    MegatronLMDummyDataLoader as MegatronLMDummyDataLoader,
    MegatronLMDummyScheduler as MegatronLMDummyScheduler,
    T5TrainStep as T5TrainStep,
    avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
)
