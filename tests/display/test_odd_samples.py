"""No page and no numbers, however odd, break a panel."""

from __future__ import annotations

from fixtures.panels import Run
from hypothesis import Phase as HypothesisPhase, given, settings, strategies as st

from nb_accelerate.base.progress_page import Bar, Phase, Sample, layout
from nb_accelerate.base.progress_page.sample import read
from nb_accelerate.notebook.display.drawing import html, text


@given(
    pages=st.lists(st.binary(min_size=0, max_size=layout.SIZE), min_size=1, max_size=14),
    states=st.lists(st.sampled_from(["starting", "running", "returned", "failed", "ended"]), min_size=14),
    ended=st.sampled_from(["running", "done", "failed", "interrupted"]),
)
@settings(deadline=None, max_examples=60)
def test_no_page_however_damaged_breaks_a_panel(pages: list[bytes], states: list[str], ended: str):
    run = Run(len(pages))
    for rank, page in enumerate(pages):
        sample = read((b"\1" + page).ljust(layout.SIZE, b"\0")[: layout.SIZE])
        run.put([rank], state=states[rank], **vars(sample))
    run.wait(6.0)
    run.put(step=7)
    run.wait(0.3)
    if ended != "running":
        run.state.end(run.now, ended)  # type: ignore[arg-type]
    assert html.render(run.view)
    assert text.table(run.view, bars=True)
    assert text.line(run.view)


COUNTS = st.floats(0, 1e18) | st.integers(0, 20).map(float)


BARS = st.builds(
    Bar,
    label=st.text(max_size=5),
    count=COUNTS,
    total=st.none() | COUNTS,
    seconds=COUNTS,
    ended=st.booleans(),
    level=st.integers(0, 3),
)


WORDS = st.integers(0, 2**63 - 1) | st.integers(0, 20)


SAMPLES = st.builds(
    Sample,
    request=st.just(1),
    phase=st.sampled_from(Phase),
    trains=st.booleans(),
    step=WORDS,
    total=st.none() | st.integers(0, 2**63 - 1),
    loop=st.integers(0, 2),
    evaluates=st.booleans(),
    in_loop=st.booleans(),
    epoch=WORDS,
    steps_before=WORDS,
    rows=WORDS,
    memory=WORDS,
    peak=WORDS,
    utilisation=st.none() | st.integers(0, 100),
    loss=st.none() | st.floats(),
    bars=st.lists(BARS, max_size=3).map(tuple),
)


@given(samples=st.lists(st.lists(SAMPLES, min_size=2, max_size=2), min_size=1, max_size=5))
@settings(deadline=None, max_examples=80, phases=[HypothesisPhase.generate])
def test_no_numbers_however_odd_break_a_panel(samples: list[list[Sample]]):
    run = Run(2)
    for pair in samples:
        for rank, sample in enumerate(pair):
            run.put([rank], **vars(sample))
        run.wait(1.0)
        assert html.render(run.view)
        assert text.table(run.view, bars=True)
        assert text.line(run.view)
    assert html.render(run.end())
