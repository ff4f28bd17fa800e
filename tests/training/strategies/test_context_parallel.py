"""Why ``cp_size`` is refused: what torch's ring attention cannot do on CPUs. If it can, the refusal is out of date."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from nb_accelerate.training.accelerator import Accelerator


@pytest.mark.slow
@pytest.mark.limit(150)
def test_torch_has_no_causal_attention_over_cut_sequences_on_cpus(run_ranks):
    def attend() -> str:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel

        Accelerator(cpu=True)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
        tensors = [torch.randn(2, 4, 16, 8) for _ in range(3)]  # rows, heads, positions, numbers of a head
        with context_parallel(mesh, buffers=tensors, buffer_seq_dims=[2] * 3):
            query, key, value = (one.detach().clone().requires_grad_() for one in tensors)
            try:
                torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            except NotImplementedError as error:
                return str(error)
        return "done"

    for said in run_ranks(attend, deadline=120):
        assert "_for_cpu.default does not have" in said
