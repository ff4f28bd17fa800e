"""The pieces between kernel and host that need no rank: frames, segments, copies of pages, who sends."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import assume, given, strategies as st

from nb_accelerate.base.progress_page import PageReader, ProgressPage, layout
from nb_accelerate.notebook.protocol.anonymous_file import anonymous_file
from nb_accelerate.notebook.remote.connection_back import KeyedSeal
from nb_accelerate.notebook.remote.frames import (
    MACHINE,
    MAGIC,
    MAX_BODY,
    Frame,
    FrameParser,
    FrameWriter,
    Kind,
    LinkError,
)
from nb_accelerate.notebook.remote.mirror import PageMirror, PageWatch, pack_pieces, unpack_pieces
from nb_accelerate.notebook.remote.sender import FrameSender, ReceivedSegments, SentSegments

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FRAMES = st.lists(
    st.builds(
        Frame,
        st.integers(0, 255),
        st.integers(-1, 1000),
        st.binary(max_size=300) | st.integers(1 << 16, 1 << 17).map(lambda size: bytes(range(251)) * (size // 251)),
    ),
    max_size=8,
)


@pytest.mark.slow
@given(FRAMES, st.binary(max_size=200), st.integers(1, 60) | st.integers(60, 1 << 18))
def test_frames_come_out_as_they_went_in_however_they_are_cut(frames: list[Frame], before: bytes, size: int) -> None:
    assume(MAGIC not in before + MAGIC[:-1])
    writer, parser = FrameWriter(), FrameParser(has_preamble=True)
    data = before + MAGIC + b"".join(b"".join(writer.frame(*frame[:2], frame.body)) for frame in frames)
    found = []
    for at in range(0, len(data), size):
        parser.feed(data[at : at + size])
        found += [*parser]
    assert found == frames
    assert parser.preamble == before


def test_what_is_no_frame_is_refused() -> None:
    parser = FrameParser()
    parser.feed(struct.pack("!BiQ", 1, 0, MAX_BODY + 1))
    with pytest.raises(LinkError, match="what a host writes"):
        next(iter(parser))


def both_ends(over: str) -> tuple[int, int]:
    if over == "pipe":
        return os.pipe()
    first, second = socket.socketpair()
    return first.detach(), second.detach()


class Sent:
    """The end of a pipe or socket that a `FrameSender` writes to."""

    def __init__(self, over: str) -> None:
        self.reads, self.writes = both_ends(over)
        self.beats = threading.Event()
        self.failures: list[BaseException] = []
        self.sender = FrameSender(
            self.writes,
            None,
            on_beat=lambda: not self.beats.set(),
            on_failure=lambda _, error: self.failures.append(error),
        )
        self.parser = FrameParser()

    def frames(self, number: int) -> list[Frame]:
        """Read so many frames that are no beats."""
        found: list[Frame] = []
        while len(found) < number:
            self.parser.feed(os.read(self.reads, 1 << 16))
            found += [frame for frame in self.parser if frame.kind != Kind.BEAT]
        return found

    def close(self) -> None:
        self.sender.close(drop=True)
        os.close(self.reads)
        os.close(self.writes)


@pytest.fixture(params=["pipe", "socket"])
def sent(request: pytest.FixtureRequest) -> Iterator[Sent]:
    sent = Sent(request.param)
    yield sent
    sent.close()


def test_beats_are_not_counted_among_the_bytes_that_wait(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nb_accelerate.notebook.remote.sender.BEAT_INTERVAL", 0.01)
    sent.sender.send(Kind.STDOUT, 1, b"waits")
    assert sent.sender.unsent() == (5, 0)
    sent.sender.start()
    sent.frames(1)
    for _ in range(3):
        sent.beats.clear()
        assert sent.beats.wait(10)
    assert sent.sender.unsent() == (0, 0)


def test_what_is_urgent_does_not_wait_for_a_large_segment(sent: Sent) -> None:
    fd, content = anonymous_file(), os.urandom(8 << 20)
    os.pwrite(fd, content, 0)
    segments, received = SentSegments(sent.sender), ReceivedSegments()
    segments.number_of(fd)
    sent.sender.send(Kind.MESSAGE, 3, b"after the segment")
    sent.sender.start()
    frames = sent.frames(1)  # more of them than the pipe takes are still to come
    sent.sender.send(Kind.SIGNAL, 3, b"now", urgent=True)
    frames += sent.frames(9)
    for frame in frames:
        if frame.kind == Kind.SEGMENT:
            received.take(frame.body)
    kinds = [frame.kind for frame in frames]
    assert kinds.index(Kind.SIGNAL) < 4
    assert kinds[-1] == Kind.MESSAGE
    assert os.pread(received.get(0), 9 << 20, 0) == content
    received.close()
    segments.close()
    os.close(fd)


@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize("over", ["pipe", "socket"])
def test_what_is_long_comes_whole_among_what_is_short(over: str, is_sealed: bool) -> None:
    reads, writes = both_ends(over)
    key = secrets.token_bytes(32)
    seals = [KeyedSeal(key, is_host=is_host) if is_sealed else None for is_host in (True, False)]
    received = ReceivedSegments()
    parser = FrameParser(seals[1])
    failures: list[BaseException] = []
    sender = FrameSender(writes, seals[0], on_beat=lambda: True, on_failure=lambda _, error: failures.append(error))
    segments, fd, contents = SentSegments(sender), anonymous_file(), os.urandom(5 << 20)
    os.write(fd, contents)
    sender.send(Kind.STDOUT, 1, contents[: 3 << 19])
    sender.send(Kind.STDOUT, 2, b"short")
    segments.number_of(fd)
    sender.send(Kind.MESSAGE, 3, b"with the segment")
    sender.start()
    frames: list[Frame] = []
    while not frames or frames[-1].kind != Kind.MESSAGE:
        assert parser.receive(reads)
        for frame in parser:
            if frame.kind == Kind.SEGMENT:
                received.take(frame.body)
            elif frame.kind != Kind.BEAT:
                frames.append(frame)
    assert frames == [
        Frame(Kind.STDOUT, 1, contents[: 3 << 19]),
        Frame(Kind.STDOUT, 2, b"short"),
        Frame(Kind.MESSAGE, 3, b"with the segment"),
    ]
    assert os.pread(received.get(0), 6 << 20, 0) == contents
    sender.close()
    assert failures == []
    received.close()
    segments.close()
    for one in (fd, reads, writes):
        os.close(one)


def test_a_segment_is_sent_once_and_dropped_when_no_message_comes_with_it(sent: Sent) -> None:
    fd, other = anonymous_file(), anonymous_file()
    copy = os.dup(fd)
    for one in (fd, other):
        os.write(one, b"content")
    segments = SentSegments(sent.sender)
    assert [segments.number_of(one) for one in (fd, copy, other, fd)] == [0, 0, 1, 0]
    segments.drop_unused()
    assert segments.number_of(fd) == 0
    segments.drop_unused()  # the other one
    sent.sender.start()
    frames = sent.frames(3)
    assert [(frame.kind, frame.body[-1]) for frame in frames] == [
        (Kind.SEGMENT, ord("t")),
        (Kind.SEGMENT, ord("t")),
        (Kind.DROP, 1),
    ]
    segments.close()
    for one in (fd, other, copy):
        os.close(one)


def test_a_beat_goes_out_each_second_and_is_counted_also_while_nothing_can_be_written(sent: Sent) -> None:
    sent.sender.send(Kind.STDOUT, 0, bytes(1 << 20))  # more than the pipe takes
    sent.sender.start()
    assert sent.beats.wait(5)
    began = time.monotonic()
    for _ in range(2):  # on a busy machine a beat is late, and the next one is not
        sent.beats.clear()
        assert sent.beats.wait(5)
    assert 0.5 < time.monotonic() - began < 8
    assert len(sent.frames(1)[0].body) == 1 << 20
    while not [frame for frame in sent.parser if frame.kind == Kind.BEAT]:
        sent.parser.feed(os.read(sent.reads, 100))


def test_the_error_of_a_stream_that_has_ended_is_told(sent: Sent) -> None:
    os.close(sent.reads)
    sent.sender.send(Kind.QUIT, MACHINE)
    sent.sender.start()
    sent.sender.close()
    assert [type(error) for error in sent.failures] == [BrokenPipeError]
    sent.reads = os.open(os.devnull, os.O_RDONLY)


def test_both_copies_of_a_page_say_what_rank_and_notebook_have_written() -> None:
    there = PageReader()
    page, watch = ProgressPage(there.buffer), PageWatch(there)
    mirror = PageMirror(lambda pieces: watch.write(unpack_pieces(pack_pieces(pieces))))

    def pass_on() -> int:
        pieces = watch.changed()
        mirror.take(unpack_pieces(pack_pieces(pieces)), ahead=0.0)
        return len(pieces)

    mirror.want_rows(True)
    page.begin_request()
    page.begin_loop(total=7, rows=None, epoch=1, evaluates=False)
    page.step(3)
    assert pass_on()
    assert pass_on() == 0
    assert (mirror.read().step, mirror.read().total, mirror.read().request) == (3, 7, 1)
    page.note_obeying(2)
    pass_on()
    mirror.save(41)
    assert page.asks_to_save
    page.step(4)
    assert pass_on() == 1  # what the notebook has written is not sent back
    page.answer("runs/here", failed=False)
    pass_on()
    assert mirror.read().answer == (41, False, "runs/here")


def test_times_of_another_clock_are_those_of_this_one() -> None:
    there = PageReader()
    page, watch = ProgressPage(there.buffer), PageWatch(there)
    mirror = PageMirror(lambda pieces: None)
    page.begin_request()
    began: Sequence[int] = layout.WORD.unpack_from(there.copy(), 8 * layout.SINCE)
    for ahead in (-1000.0, 1000.0):
        mirror.take(watch.changed(), ahead=ahead)
        assert layout.WORD.unpack_from(mirror.copy(), 8 * layout.SINCE)[0] == began[0] + int(ahead * 1e9)
