"""A model whose layers the ranks of cells compute together writes what it writes in the notebook."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from fixtures.kernels import Kernel

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")

MAKE = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from nb_accelerate import init_empty_weights, load_checkpoint_and_dispatch

config = LlamaConfig(vocab_size=33, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
prompt = torch.arange(1, 7)[None]
"""

LOAD = """
with init_empty_weights():
    model = AutoModelForCausalLM.from_config(config)
model = load_checkpoint_and_dispatch(model, folder, device_map={how}).eval()
words = model.generate(prompt, max_new_tokens=8, do_sample=False).tolist()[0]
"""


@pytest.mark.slow
@pytest.mark.limit(300)
def test_two_ranks_write_the_words_of_the_notebook(shared_kernel: Kernel, tmp_path: Path) -> None:
    shared_kernel.run("%load_ext nb_accelerate").ok()
    try:
        shared_kernel.run(f"{MAKE}\nfolder = {str(tmp_path)!r}\ntorch.manual_seed(0)", timeout=120).ok()
        shared_kernel.run("AutoModelForCausalLM.from_config(config).save_pretrained(folder);", timeout=120).ok()
        shared_kernel.run(LOAD.format(how='{"": "cpu"}'), timeout=120).ok()
        load = LOAD.format(how='"ranks"')
        shared_kernel.run(f"%%distributed -n 2 --out written\n{load}\nwords", timeout=120).ok()
        assert shared_kernel.run("written == [words] * 2").ok().value == "True"
        shards = "%%distributed\nprint([type(p).__name__ for n, p in model.named_parameters() if 'q_proj' in n])"
        assert "['DTensor', 'DTensor']" in shared_kernel.run(shards).ok().stdout
    finally:
        shared_kernel.run("%unload_ext nb_accelerate").ok()
