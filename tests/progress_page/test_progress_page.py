"""What a rank writes on its page is what the notebook reads, whatever else happens to the rank."""

from __future__ import annotations

import gc
import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given, settings, strategies as st

from nb_accelerate.base import progress_page as pages
from nb_accelerate.base.progress_page import Activity, Collective, PageReader, Phase, ProgressPage, Sample, layout
from nb_accelerate.base.progress_page.sample import read
from nb_accelerate.notebook.protocol.anonymous_file import anonymous_file


@pytest.fixture
def memory() -> bytearray:
    return bytearray(layout.SIZE)


@pytest.fixture
def page(memory: bytearray) -> ProgressPage:
    one = ProgressPage(memory)
    one.begin_request()
    return one


@pytest.fixture
def reader() -> Iterator[PageReader]:
    one = PageReader(anonymous_file())
    yield one
    one.close()


def train(page: ProgressPage, *, total: int | None = 10, epoch: int = 1, rows: int | None = 8, step: int = 0) -> object:
    loop = page.begin_loop(total=total, rows=rows, epoch=epoch, evaluates=False, step=step)
    page.trains()
    return loop


def evaluate(page: ProgressPage, total: int = 4) -> object:
    return page.begin_loop(total=total, rows=8, epoch=1, evaluates=True)


# Loops.


def test_a_page_nobody_wrote_on_says_nothing(reader: PageReader) -> None:
    assert reader.read() == Sample()


def test_a_loop_says_where_it_is(page: ProgressPage, memory: bytearray) -> None:
    train(page, total=10, epoch=3, rows=32)
    page.enter(Phase.DATA)
    page.step(4)
    page.enter(Phase.FORWARD)
    sample = read(memory)
    assert (sample.step, sample.total, sample.epoch, sample.rows) == (4, 10, 3, 32)
    assert (sample.phase, sample.in_loop, sample.evaluates, sample.steps) == (Phase.FORWARD, True, False, 4)


def test_a_line_of_users_code_is_read_whole_or_not_at_all(page: ProgressPage, memory: bytearray) -> None:
    assert read(memory).line is None
    for number, filename in enumerate(("/tmp/ipykernel_1/2.py", "/" + 300 * "a" + "/train.py"), start=1):
        moment = (7, Activity(Phase.WAITING, Collective.barrier, in_loop=True, evaluates=True))
        page.note_line(moment, filename=filename, lineno=6, called="gather", inside="importing x")
        line = read(memory).line
        assert line is not None
        assert (line.number, (line.entered, line.activity), line.lineno, line.called) == (number, moment, 6, "gather")
        assert line.inside == "importing x"
        assert filename.endswith(line.filename)
        assert line.filename.endswith(filename[-100:])
    memory[layout.LINE_AT] = 9  # the next one is being written
    assert read(memory).line is None
    page.begin_request()
    assert read(memory).line is None


def test_a_loader_that_does_not_know_its_length_or_its_batch_has_neither(page: ProgressPage, memory: bytearray) -> None:
    train(page, total=None, rows=None)
    page.step(3)
    assert (read(memory).total, read(memory).rows, read(memory).step) == (None, 0, 3)


def test_a_loop_that_has_ended_stays_on_show_and_its_steps_count(page: ProgressPage, memory: bytearray) -> None:
    for epoch in (1, 2):
        loop = train(page, total=5, epoch=epoch)
        for step in range(1, 6):
            page.step(step)
        page.end_loop(loop)
        sample = read(memory)
        assert (sample.step, sample.total, sample.epoch) == (5, 5, epoch)
        assert not sample.in_loop
        assert sample.steps == 5 * epoch
        assert sample.loop == epoch


def test_after_an_evaluation_the_training_loop_around_it_goes_on(page: ProgressPage, memory: bytearray) -> None:
    training = train(page, total=10, epoch=2)
    page.step(6)
    number = read(memory).loop
    testing = evaluate(page, total=4)
    page.step(3)
    sample = read(memory)
    assert (sample.step, sample.total, sample.evaluates, sample.epoch, sample.steps) == (3, 4, True, 2, 6)
    page.end_loop(testing)
    sample = read(memory)
    assert (sample.step, sample.total, sample.evaluates, sample.epoch, sample.steps) == (6, 10, False, 2, 6)
    assert sample.in_loop
    assert sample.loop != number, "a rate over both loops would mean nothing"
    page.step(7)
    page.end_loop(training)
    assert read(memory).steps == 7


def test_steps_of_a_training_loop_inside_another_are_counted_with_those_around_it(
    page: ProgressPage, memory: bytearray
) -> None:
    outer = train(page, total=10)
    page.step(2)
    inner = train(page, total=3)
    page.step(3)
    assert read(memory).steps == 5
    page.end_loop(inner)
    assert (read(memory).step, read(memory).steps) == (2, 5)
    page.end_loop(outer)
    assert read(memory).steps == 5


def test_zipped_loops_end_in_the_wrong_order_and_none_stays_on(page: ProgressPage, memory: bytearray) -> None:
    first, second = train(page, total=3), train(page, total=5)
    for step in range(1, 4):
        page.step(step)
    page.end_loop(first)
    assert read(memory).in_loop, "the second has not ended"
    page.end_loop(second)
    assert not read(memory).in_loop


def test_a_loop_left_open_by_one_cell_and_dropped_in_the_next_does_not_end_that_ones(
    page: ProgressPage, memory: bytearray
) -> None:
    old = train(page)
    page.step(9)
    page.begin_request()
    train(page, total=20)
    page.step(2)
    page.end_loop(old)
    sample = read(memory)
    assert (sample.in_loop, sample.step, sample.total, sample.steps) == (True, 2, 20, 2)


def test_a_loop_that_goes_on_without_a_backward_does_not_train(page: ProgressPage, memory: bytearray) -> None:
    loop = page.begin_loop(total=10, rows=8, epoch=1, evaluates=False)
    page.step(1)
    assert not read(memory).evaluates, "its backward may come"
    page.step(3)
    assert read(memory).evaluates
    page.end_loop(loop)
    assert (read(memory).steps, read(memory).epoch) == (0, 0)


LOOPS = st.recursive(
    st.tuples(st.booleans(), st.integers(0, 9), st.just(())),
    lambda inner: st.tuples(st.booleans(), st.integers(0, 9), st.lists(inner, max_size=3)),
    max_leaves=8,
)


@given(loops=st.lists(LOOPS, max_size=4))
@settings(deadline=None)
def test_whatever_stands_in_whatever_all_training_steps_are_counted_once(loops: list) -> None:
    memory = bytearray(layout.SIZE)
    page = ProgressPage(memory)
    page.begin_request()
    counted = 0

    def run(trains: bool, steps: int, inner: list) -> None:
        nonlocal counted
        loop = page.begin_loop(total=steps, rows=1, epoch=1, evaluates=not trains)
        for step in range(1, steps + 1):
            page.step(step)
            if trains:
                page.trains()
                counted += 1
            assert read(memory).steps == counted
        for one in inner:
            run(*one)
            assert (read(memory).step, read(memory).total, read(memory).trains) == (steps, steps, trains and steps > 0)
        page.end_loop(loop)
        assert read(memory).steps == counted

    for one in loops:
        run(*one)
    assert not read(memory).in_loop


# Prepared loaders.


@pytest.fixture
def own_page(reader: PageReader) -> Iterator[ProgressPage]:
    """This process writes on a page, as a rank does."""
    before = pages.page._page
    one = pages.install(os.dup(reader.fd))
    one.begin_request()
    yield one
    pages.page._page = before
    memory = one.buffer.obj
    for view in (one.words, one._reals, one.buffer):
        view.release()
    del one
    gc.collect()
    memory.close()


def test_a_prepared_loader_reports_and_a_break_ends_its_loop(own_page: ProgressPage, reader: PageReader) -> None:
    import torch
    from torch.utils.data import DataLoader

    from nb_accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    training, testing = accelerator.prepare(
        DataLoader(torch.arange(12.0), batch_size=2), DataLoader(torch.arange(6.0), batch_size=2)
    )
    weight = torch.tensor(2.0, requires_grad=True)
    seen = []
    for epoch in range(2):
        for number, _ in enumerate(training):
            sample = reader.read()
            assert (sample.phase, sample.step, sample.total) == (Phase.RUNNING, number + 1, 6)
            accelerator.backward(weight.square())
            assert (reader.read().epoch, reader.read().loss) == (epoch + 1, 4.0)
            if number == 2:
                with torch.no_grad():
                    for _ in testing:
                        assert reader.read().phase is Phase.EVALUATING
                        break
                seen.append(reader.read())
                break
        assert not reader.read().in_loop
    assert [(sample.step, sample.total, sample.in_loop) for sample in seen] == [(3, 6, True)] * 2
    assert reader.read().steps == 6
    for _ in zip(training, testing, strict=False):
        assert reader.read().in_loop
    assert not reader.read().in_loop


def test_a_worker_of_a_loader_does_not_write_on_the_page_of_its_rank(
    own_page: ProgressPage, reader: PageReader
) -> None:
    own_page.loss(1.0)
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        try:
            mine = pages.here()
            mine.begin_request()
            mine.loss(2.0)
            mine.log({"other": 3.0})
            os.write(write_end, b"wrote" if mine is not own_page and not mine.wants_rows else b"wrong")
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as answer:
        assert answer.read() == b"wrote"
    os.waitpid(child, 0)
    sample = reader.read()
    assert (sample.request, sample.loss, dict(sample.scalars)) == (1, 1.0, {})


# Turns, waiting, memory.


def test_a_new_request_wipes_what_was_said_about_the_one_before(reader: PageReader) -> None:
    with_fd = os.dup(reader.fd)
    page = ProgressPage(mapped(with_fd))
    reader.want_rows(True)
    page.begin_request()
    train(page)
    page.step(3)
    page.loss(0.5)
    page.memory(100)
    page.log({"loss": 1.0})
    page.bar(0, label="a", text="1/2", count=1, total=2, began=0.0, level=0, ended=False)
    page.wait_in(Collective.barrier)
    page.begin_request()
    assert reader.read() == Sample(request=2, phase=Phase.RUNNING)
    assert page.wants_rows, "whether rows are wanted is the notebook's to say"
    reader.want_rows(False)
    assert not page.wants_rows
    page.end_request()
    assert reader.read().phase is Phase.ENDED


def mapped(fd: int) -> object:
    import mmap

    try:
        return mmap.mmap(fd, layout.SIZE)
    finally:
        os.close(fd)


def test_that_a_loop_over_epochs_was_ended_is_known_until_the_next_call(page: ProgressPage, memory: bytearray) -> None:
    assert read(memory).ended_after is None
    page.note_end(1, 25)
    assert read(memory).ended_after == (1, 25)
    page.begin_request()
    assert read(memory).ended_after is None


@pytest.mark.parametrize("collective", Collective)
def test_a_collective_is_named_while_it_lasts(page: ProgressPage, memory: bytearray, collective: Collective) -> None:
    page.enter(Phase.EVALUATING)
    before = page.wait_in(collective)
    assert (read(memory).phase, read(memory).waits_in) == (Phase.WAITING, collective)
    page.enter(before)
    assert (read(memory).phase, read(memory).waits_in) == (Phase.EVALUATING, None)
    assert read(memory).collectives == 1


def test_memory_keeps_its_peak(page: ProgressPage, memory: bytearray) -> None:
    for used in (5, 9, 2):
        page.memory(used)
    assert (read(memory).memory, read(memory).peak) == (2, 9)


@pytest.mark.parametrize(("written", "said"), [(0, 0), (97, 97), (100, 100), (101, None), (-7, None)])
def test_a_device_may_say_how_busy_it_is(page: ProgressPage, memory: bytearray, written: int, said: int | None) -> None:
    assert read(memory).utilisation is None
    page.utilisation(written)
    assert read(memory).utilisation == said
    page.begin_request()
    assert read(memory).utilisation is None


@pytest.mark.parametrize("loss", [0.0, -1.5, 1e300, float("inf"), float("-inf")])
def test_a_loss_is_read_as_it_was_written(page: ProgressPage, memory: bytearray, loss: float) -> None:
    assert read(memory).loss is None
    page.loss(loss)
    assert read(memory).loss == loss


def test_a_loss_that_is_no_number_is_one(page: ProgressPage, memory: bytearray) -> None:
    page.loss(float("nan"))
    loss = read(memory).loss
    assert loss is not None
    assert math.isnan(loss)


# Scalars.


def test_sixteen_names_are_kept_and_the_newest_value_of_each(page: ProgressPage, memory: bytearray) -> None:
    page.log({f"name {number}": number for number in range(17)})
    page.log({"name 3": 33.5, "one more": 1.0})
    kept = {f"name {number}": float(number) for number in range(16)} | {"name 3": 33.5}
    assert dict(read(memory).scalars) == kept


def test_what_is_no_number_is_not_shown(page: ProgressPage, memory: bytearray) -> None:
    page.log({"text": "x", "yes": True, "list": [1], "none": None, "": 2.0, "number": 1, 7: 0.5})  # type: ignore[dict-item]
    assert dict(read(memory).scalars) == {"number": 1.0, "7": 0.5}


@given(name=st.text(st.characters(exclude_characters="\0"), min_size=1), value=st.floats(allow_nan=False))
@settings(deadline=None)
def test_a_name_is_read_as_far_as_it_fits_and_never_with_half_a_letter(name: str, value: float) -> None:
    memory = bytearray(layout.SIZE)
    page = ProgressPage(memory)
    page.begin_request()
    page.log({name: value})
    ((read_name, read_value),) = read(memory).scalars.items()
    whole = name.encode(errors="replace").decode()
    assert whole.startswith(read_name)
    assert read_value == value
    assert read_name == whole or len(whole[: len(read_name) + 1].encode()) > 23


# Bars.


def show(
    page: ProgressPage, index: int, label: str = "", *, ended: bool = False, level: int = 0, count: float = 1
) -> None:
    page.bar(index, label=label, text="", count=count, total=None, began=0.0, level=level, ended=ended)


def test_a_ninth_bar_has_no_place_until_one_ends_or_is_dropped(page: ProgressPage, memory: bytearray) -> None:
    letters = "abcdefgh"
    for index in range(8):
        assert page.new_bar(letters[index], None) == index
        show(page, index, letters[index])
    assert page.new_bar("i", None) is None
    show(page, 5, "f", ended=True)
    assert page.new_bar("i", None) == 5, "one that has ended gives way"
    page.drop_bar(2)
    assert page.new_bar("j", None) == 2, "a free place comes first: then nothing disappears"
    assert [bar.label for bar in read(memory).bars] == ["a", "b", "d", "e", "f", "g", "h"]


def test_the_bar_of_an_epoch_takes_the_place_of_that_of_the_epoch_before(page: ProgressPage) -> None:
    assert page.new_bar("epoch 1", 50) == 0
    show(page, 0, "epoch 1, loss 0.5")  # its description changed meanwhile
    assert page.new_bar("epoch 2", 50) == 1, "the first one moves: it is another one"
    show(page, 1, "epoch 2")
    show(page, 0, "epoch 1, loss 0.5", ended=True)
    assert page.new_bar("test", 50) == 2
    assert page.new_bar("epoch 3", 20) == 2, "another total is another bar"
    assert page.new_bar("epoch 3", 50) == 0


def test_bars_come_outermost_first_with_what_is_known_of_them(page: ProgressPage, memory: bytearray) -> None:
    page.bar(0, label="inner", text="2.5it", count=2.5, total=None, began=0.0, level=1, ended=False)
    page.bar(1, label="outer", text="3/7", count=3, total=7, began=0.0, level=0, ended=True)
    outer, inner = read(memory).bars
    assert (outer.label, outer.text, outer.count, outer.total, outer.ended) == ("outer", "3/7", 3.0, 7.0, True)
    assert (inner.label, inner.count, inner.total, inner.ended) == ("inner", 2.5, None, False)
    assert read(memory).bars[0].seconds == outer.seconds, "the time of one that has ended stands still"
    assert read(memory).bars[1].seconds > inner.seconds


def test_a_long_label_is_cut(page: ProgressPage, memory: bytearray) -> None:
    show(page, 0, "é" * 40)
    assert read(memory).bars[0].label == "é" * 27


# Damage.


@given(garbage=st.binary(max_size=64), at=st.integers(0, layout.SIZE - 64), seed=st.integers(0, 2**32))
@settings(deadline=None)
def test_garbage_is_read_without_failing(garbage: bytes, at: int, seed: int) -> None:
    memory = bytearray(random.Random(seed).randbytes(layout.SIZE))
    assert isinstance(read(memory), Sample)
    memory[at : at + len(garbage)] = garbage
    assert isinstance(read(memory), Sample)
    zeros = bytearray(layout.SIZE)
    zeros[at : at + len(garbage)] = garbage
    assert isinstance(read(zeros), Sample)


WRITER = """
import sys, time
from nb_accelerate.base.progress_page import Phase, install
page = install(int(sys.argv[1]))
page.begin_request()
page.begin_loop(total=1000, rows=4, epoch=2, evaluates=False)
page.trains()
page.log({"loss": 0.25})
page.step(17)
page.enter(Phase.BACKWARD)
print("ready", flush=True)
step = 17
while True:
    page.step(step)
"""


def test_the_page_of_a_rank_that_was_killed_says_where_it_was(reader: PageReader) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(reader.fd)], pass_fds=(reader.fd,), stdout=subprocess.PIPE, text=True
    )
    with writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        os.kill(writer.pid, signal.SIGKILL)
    sample = reader.read()
    assert (sample.step, sample.total, sample.epoch, sample.phase) == (17, 1000, 2, Phase.BACKWARD)
    assert dict(sample.scalars) == {"loss": 0.25}


FLIPPER = """
import sys
from nb_accelerate.base.progress_page import install
page = install(int(sys.argv[1]))
page.begin_request()
print("ready", flush=True)
while True:
    page.step(0)
    page.step((1 << 56) - 1)
"""


def test_a_reader_never_sees_half_a_word(reader: PageReader) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", FLIPPER, str(reader.fd)], pass_fds=(reader.fd,), stdout=subprocess.PIPE, text=True
    )
    with writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        seen: set[int] = set()
        reads = 0
        while len(seen) < 2 or reads < 30_000:  # both of its words, and a long look at it while it goes on
            seen.add(reader.read().step)
            reads += 1
        writer.kill()
    assert seen == {0, (1 << 56) - 1}
