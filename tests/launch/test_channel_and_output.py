"""Frames over a socket pair, and the pipe that carries two streams in order."""

from __future__ import annotations

import os
import pickle
import socket
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from nb_accelerate import errors
from nb_accelerate.notebook.protocol.channel import Channel
from nb_accelerate.notebook.protocol.output import MARK_SIZE, Chunk, Decoder, frame, new_mark
from nb_accelerate.notebook.ranks.output.rank_output import RankOutput

MARK = bytes(range(200, 200 + MARK_SIZE))


def test_messages_arrive_whole_and_in_order_with_their_descriptors() -> None:
    here, there = Channel.pair()
    other = Channel(there)
    read, write = os.pipe()
    here.send("first")
    here.send(["second", b"x" * 100_000], [write])
    here.send("third")
    os.close(write)
    assert other.recv().message == "first"
    (_, body), fds = other.recv()
    assert len(body) == 100_000
    os.write(fds[0], b"through a copy")
    assert os.read(read, 100) == b"through a copy"
    assert not os.get_inheritable(fds[0])
    assert other.drain() == ([("third", ())], True)
    here.close()
    assert other.drain() == ([], False)
    with pytest.raises(EOFError):
        other.recv()
    other.close()
    for fd in (read, *fds):
        os.close(fd)


def test_descriptors_that_nobody_took_are_closed_with_the_channel() -> None:
    here, there = Channel.pair()
    other = Channel(there)
    here.send("with a descriptor", [0])
    other._read(0)
    other.close()
    here.close()  # the leak check watches


def test_a_large_message_to_a_process_that_does_not_read_holds_up_nobody() -> None:
    here, there = Channel.pair()
    there.setblocking(False)
    here._socket.settimeout(5)  # a send that waits for the other end fails
    here.send(b"x" * 10_000_000)
    assert len(Channel(there).drain()[0][0].message) == 10_000_000
    here.close()
    there.close()


def test_several_messages_to_a_process_that_does_not_read_fit_into_the_small_buffers_of_macos() -> None:
    ends = socket.socketpair()
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    ends[0].settimeout(5)  # a send that waits for the other end fails
    here, other = map(Channel, ends)
    sizes = (30_000, 5_000, 1_900)
    for size in sizes:
        here.send(b"x" * size)
    assert [len(received.message) for received in other.drain()[0]] == [*sizes]
    here.close()
    other.close()


def test_descriptors_that_arrive_are_not_inherited_where_the_system_cannot_say_so_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(socket, "MSG_CMSG_CLOEXEC")  # macOS has none
    here, there = Channel.pair()
    other = Channel(there)
    here.send("with a descriptor", [0])
    (fd,) = other.recv().fds
    assert not os.get_inheritable(fd)
    os.close(fd)
    here.close()
    other.close()


def test_half_a_message_does_not_hold_up_whoever_drains() -> None:
    here, there = Channel.pair()
    body = pickle.dumps("late")
    there.send(len(body).to_bytes(8, "big") + b"\0\0" + body[:3])
    assert here.drain() == ([], True)
    there.send(body[3:])
    assert here.drain() == ([("late", ())], True)
    here.close()
    there.close()


@given(
    st.lists(st.tuples(st.booleans(), st.binary(min_size=1, max_size=40)), max_size=10),
    st.lists(st.integers(0, 400), max_size=12),
)
def test_two_streams_in_one_pipe_come_apart_in_order_wherever_the_bytes_are_cut(
    writes: list[tuple[bool, bytes]], cuts: list[int]
) -> None:
    writes = [*writes, (True, b"the last")]  # a beginning of a mark, at the end, waits for what follows
    stream = b"".join(frame(MARK, data) if is_err else data for is_err, data in writes)
    decoder, chunks = Decoder(MARK), []
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    for start, end in pairwise(edges):
        chunks += decoder.feed(stream[start:end])
    expected = [("stderr" if is_err else "stdout", data) for is_err, data in writes]
    assert merged(chunks) == merged([Chunk(*pair) for pair in expected])


def merged(chunks: list[Chunk]) -> list[tuple[str, bytes]]:
    joined: list[tuple[str, bytes]] = []
    for chunk in chunks:
        if joined and joined[-1][0] == chunk.stream:
            joined[-1] = (chunk.stream, joined[-1][1] + chunk.data)
        else:
            joined.append((chunk.stream, chunk.data))
    return joined


def test_lines_of_several_ranks_are_passed_on_whole() -> None:
    seen: list[str] = []
    first, second = (RankOutput(MARK, lambda _, text: seen.append(text), alone=False) for _ in range(2))
    first.feed("grüße ".encode()[:4])
    second.feed(b"from two\n")
    first.feed("grüße ".encode()[4:] + b"from one\nand")
    first.finish()
    assert seen == ["from two\n", "grüße from one\n", "and\n"]
    assert first.tail == "grüße from one\nand\n"
    first.forget()
    assert first.tail == ""
    first.feed(b"in the next cell\nand ")
    assert first.tail == "in the next cell\nand "
    assert first.text == "grüße from one\nand\nin the next cell\nand "


def all_errors(cls: type[errors.NbAccelerateError] = errors.NbAccelerateError) -> list[type[errors.NbAccelerateError]]:
    below = (found for sub in cls.__subclasses__() for found in all_errors(sub))
    return [cls, *(found for found in below if found.__module__ == errors.__name__)]


@pytest.mark.parametrize("cls", sorted(set(all_errors()), key=lambda cls: cls.__name__))
def test_every_error_of_ours_survives_pickling_with_its_fields(cls: type[errors.NbAccelerateError]) -> None:
    error = cls.__new__(cls, "text")
    error.args = ("text",)
    error.__dict__.update(rank=1, output="last words", stacks={0: "there"})
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_errors_with_fields_are_made_as_their_signatures_say_and_survive() -> None:
    for error in (
        errors.MissingDependencyError("ray", needed_for="this"),
        errors.MissingDependencyError("ray", needed_for="this", installed="1.0", lowest="2.0"),
        errors.ShippingError("text", path="args[0]"),
        errors.RankDiedError("text", rank=1, exitcode=-9),
        errors.RemoteError("text", rank=1, type_name="Strange"),
        errors.DeadlineError("text", stacks={0: "there"}),
    ):
        assert vars(pickle.loads(pickle.dumps(error))) == vars(error)


def test_text_is_never_kept_back_as_what_could_be_the_beginning_of_a_mark():
    for _ in range(2000):
        decoder = Decoder(new_mark())
        assert list(decoder.feed(b"line\n")) == [Chunk("stdout", b"line\n")]
    assert all(bytes([new_mark()[0]]) not in chr(code).encode() for code in range(0xD800))
