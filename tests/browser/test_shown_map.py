"""A device map is drawn in a notebook: a table, and a bar for each place, in both themes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from browser.conftest import OpenNotebook
    from browser.server import Theme, Where

pytestmark = [pytest.mark.browser, pytest.mark.limit(240)]

CELL = """
from transformers import LlamaConfig, LlamaForCausalLM
from nb_accelerate import init_empty_weights, show_map

with init_empty_weights():
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=24))
show_map(model, dtype="float16", max_memory={0: "3GiB", 1: "3GiB", "cpu": "2GiB"})
"""

_WIDTHS = """() => [...document.querySelectorAll('.jp-OutputArea-output tr')]
    .filter(row => row.querySelector('div'))
    .map(row => [row.innerText.trim(), ...[...row.querySelectorAll('div > div')].map(bar => bar.offsetWidth)])"""


@pytest.mark.parametrize(("where", "theme"), [("lab", "light"), ("nb7", "dark")])
def test_a_map_is_a_table_with_a_bar_for_each_place(open_notebook: OpenNotebook, where: Where, theme: Theme) -> None:
    notebook = open_notebook([CELL], where, theme)
    notebook.run(0)
    notebook.wait_for_output(0, "lm_head", timeout=90)
    notebook.screenshot(f"map-{where}-{theme}", cell=0)
    bars = notebook.evaluate(_WIDTHS)
    assert [words.split("\t")[0] for words, *_ in bars] == ["GPU 0", "GPU 1", "cpu memory", "disk"]
    assert all(used <= limit <= 240 for _, limit, used in bars)
    (_, _, first), (_, _, second), (_, host, _), (_, _, disk) = bars
    assert abs(first - second) < 40
    assert host == pytest.approx(160, abs=2)  # 2 of 3 GiB
    assert 0 < disk < 240
