"""Why ``cp_size`` is refused: what torch's ring attention cannot do on CPUs. If it can, the refusal is out of date."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from nb_accelerate.training.accelerator import Accelerator


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
def test_torch_has_no_causal_attention_and_no_backward_over_cut_sequences_on_cpus(run_ranks, causal):
    def attend() -> str:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel

        Accelerator(cpu=True)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
        tensors = [torch.randn(2, 4, 16, 8) for _ in range(3)]  # rows, heads, positions, numbers of a head
        with context_parallel(mesh, buffers=tensors, buffer_seq_dims=[2] * 3):
            query, key, value = (one.detach().clone().requires_grad_() for one in tensors)
            try:
                outputs = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
                outputs.square().sum().backward()
            except NotImplementedError as error:
                return str(error)
        return "done"

    operation = "_for_cpu.default" if causal else "_for_cpu_backward.default"
    for said in run_ranks(attend):
        assert f"{operation} does not have a sharding strategy" in said
