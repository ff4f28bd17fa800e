"""The public names of ``accelerate.utils``: the table that `nb_accelerate.base.lazy` and type checkers read."""

from nb_accelerate.utils import (
    ao as ao,
    bnb as bnb,
    constants as constants,
    dataclasses as dataclasses,
    deepspeed as deepspeed,
    environment as environment,
    fsdp_utils as fsdp_utils,
    imports as imports,
    launch as launch,
    megatron_lm as megatron_lm,
    memory as memory,
    modeling as modeling,
    offload as offload,
    operations as operations,
    other as other,
    random as random,
    torch_xla as torch_xla,
    transformer_engine as transformer_engine,
    versions as versions,
)
from nb_accelerate.utils.ao import *
from nb_accelerate.utils.bnb import *
from nb_accelerate.utils.constants import *
from nb_accelerate.utils.dataclasses import *
from nb_accelerate.utils.deepspeed import *
from nb_accelerate.utils.environment import *
from nb_accelerate.utils.fsdp_utils import *
from nb_accelerate.utils.imports import *
from nb_accelerate.utils.launch import *
from nb_accelerate.utils.megatron_lm import *
from nb_accelerate.utils.memory import *
from nb_accelerate.utils.modeling import *
from nb_accelerate.utils.offload import *
from nb_accelerate.utils.operations import *
from nb_accelerate.utils.other import *
from nb_accelerate.utils.random import *
from nb_accelerate.utils.torch_xla import *
from nb_accelerate.utils.transformer_engine import *
from nb_accelerate.utils.versions import *
