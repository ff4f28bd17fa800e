"""Names of ``accelerate.utils.deepspeed``."""

from nb_accelerate.base.config.deepspeed_json import HfDeepSpeedConfig as HfDeepSpeedConfig
from nb_accelerate.compat.deepspeed import (
    GatheredParameters as GatheredParameters,
    deepspeed_required as deepspeed_required,
    get_active_deepspeed_plugin as get_active_deepspeed_plugin,
)
from nb_accelerate.compat.refused import (
    DeepSpeedEngineWrapper as DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper,
)
from nb_accelerate.training.optim.placeholders import (
    DummyOptim as DummyOptim,
    DummyScheduler as DummyScheduler,
)
