"""Merging, names, name tracking and arguments: no process, no kernel."""

from __future__ import annotations

import gc
import itertools
import re
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nb_accelerate.base.topology.rank_lists import label
from nb_accelerate.errors import ConfigError
from nb_accelerate.notebook.magics import args
from nb_accelerate.notebook.magics.auto import route
from nb_accelerate.notebook.magics.commands import COMMANDS
from nb_accelerate.notebook.magics.names import words_for
from nb_accelerate.notebook.pool.group import breaks_group
from nb_accelerate.notebook.pool.plan import plan_cell
from nb_accelerate.notebook.pool.variables import NamespaceSync, NotebookValue, Sent
from nb_accelerate.notebook.protocol.content import ObjectIds, Snapshot
from nb_accelerate.notebook.ranks.failing.hang import verdict
from nb_accelerate.notebook.ranks.output.merge import Merge
from nb_accelerate.notebook.ranks.output.request_output import DisplayIds
from nb_accelerate.notebook.ranks.steps import StepKind

ROOT = Path(__file__).parents[2]


class Story:
    """What a merge of ranks 0 to `count` - 1 shows."""

    def __init__(self, count: int) -> None:
        self.lines: list[str] = []
        self.everybody = tuple(range(count))
        self.merge: Merge[str] = Merge(
            range(count), self.show, hold=0.3, last=lambda item: item.startswith("Out"), kind=self.kind
        )

    @staticmethod
    def kind(item: str) -> str | None:
        name, _, figure = item.partition(" ")
        return name if figure else None

    def show(self, ranks: tuple[int, ...], said: list[list[str]]) -> None:
        whose = "" if ranks == self.everybody else f"{label(ranks)}: "
        self.lines += [whose + item for item in said[0]]

    def say(self, rank: int, *items: str, when: float = 0.0) -> None:
        for item in items:
            self.merge.add(rank, [item], when)


class TestMerge:
    def test_a_value_is_shown_once_however_far_apart_ranks_return_it(self):
        story = Story(3)
        story.say(0, "a", "Out: 1")
        story.say(1, "a", "Out: 1", when=5.0)
        story.merge.flush(60.0)
        assert story.lines == ["ranks 0-1: a"]
        story.say(2, "a", "b", when=90.0)
        story.merge.flush(99.0)
        assert story.lines == ["ranks 0-1: a", "rank 2: a", "rank 2: b"]
        assert story.merge.due == float("inf")
        story.say(2, "Out: 1", when=120.0)
        assert story.lines[3:] == ["Out: 1"]

    def test_values_that_differ_are_shown_when_all_ranks_have_ended(self):
        story = Story(2)
        story.say(0, "Out: 1")
        story.merge.flush(60.0)
        story.say(1, "Out: 2", when=61.0)
        story.merge.flush(90.0)
        assert story.lines == []
        story.merge.finish()
        assert story.lines == ["rank 0: Out: 1", "rank 1: Out: 2"]

    def test_what_all_say_is_shown_once_and_at_once(self):
        story = Story(2)
        story.say(0, "a", "b")
        assert story.lines == []
        story.say(1, "a")
        assert story.lines == ["a"]

    def test_where_they_differ_each_has_a_block_until_they_agree_again(self):
        story = Story(2)
        story.say(0, "start", "x0", "y0", "end")
        story.say(1, "start", "x1", "y1", "end")
        story.merge.finish()
        assert story.lines == ["start", "rank 0: x0", "rank 0: y0", "rank 1: x1", "rank 1: y1", "end"]

    def test_equal_blocks_of_some_ranks_are_shown_once(self):
        story = Story(4)
        for rank in range(4):
            story.say(rank, "odd" if rank == 2 else "same")
        story.merge.finish()
        assert story.lines == ["ranks 0-1, 3: same", "rank 2: odd"]

    def test_what_waited_long_enough_is_shown_and_what_comes_late_follows(self):
        story = Story(2)
        story.say(0, "a", when=1.0)
        story.merge.flush(1.1)
        assert story.lines == []
        assert story.merge.due == pytest.approx(1.3)
        story.merge.flush(1.3)
        story.say(1, "a", when=2.0)
        story.merge.finish()
        assert story.lines == ["rank 0: a", "rank 1: a"]

    def test_what_one_rank_says_alone_does_not_part_what_all_say_after_it(self):
        story = Story(3)
        story.say(0, "main", "also main", "step", "x0", "end")
        story.say(1, "step", "x1", "y1", "end")
        story.say(2, "step", "end")
        story.merge.finish()
        alone = ["rank 0: x0", "rank 1: x1", "rank 1: y1"]
        assert story.lines == ["rank 0: main", "rank 0: also main", "step", *alone, "end"]

    def test_the_same_place_is_preferred_to_the_same_line_elsewhere(self):
        story = Story(2)
        story.say(0, "a", "a", "b")
        story.say(1, "c", "a", "b")
        story.merge.finish()
        assert story.lines == ["rank 0: a", "rank 1: c", "a", "b"]

    def test_once_they_agree_figures_are_counted_anew(self):
        story = Story(2)
        story.say(0, "loss 0.9", "loss 0.5", "end")
        story.say(1, "loss 0.8", "end")
        story.merge.finish()
        for rank in range(2):
            story.say(rank, "loss 0.3")
        assert story.lines[-2:] == ["end", "loss 0.3"]

    def test_equal_figures_of_different_epochs_are_not_shown_as_one(self):
        story = Story(2)
        story.say(0, "loss 0.9", "loss 0.5", "loss 0.4", "done")
        story.say(1, "loss 0.8", "loss 0.6", "loss 0.5", "done")
        story.merge.finish()
        said_alone = ["rank 0: loss 0.9", "rank 0: loss 0.5", "rank 0: loss 0.4"]
        said_alone += ["rank 1: loss 0.8", "rank 1: loss 0.6", "rank 1: loss 0.5"]
        assert story.lines == [*said_alone, "done"]

    def test_figures_are_compared_with_those_of_the_same_epoch_also_if_one_rank_is_late(self):
        story = Story(2)
        story.say(0, "loss 0.5")
        story.merge.flush(0.3)
        story.say(0, "loss 0.4", when=1.0)
        story.say(1, "loss 0.4", "loss 0.4", when=1.0)
        story.merge.finish()
        assert story.lines == ["rank 0: loss 0.5", "rank 1: loss 0.4", "loss 0.4"]

    def test_a_rank_that_says_less_loses_nothing(self):
        story = Story(2)
        story.say(0, "a", "b", "c")
        story.say(1, "d")
        story.merge.finish()
        assert story.lines == ["rank 0: a", "rank 0: b", "rank 0: c", "rank 1: d"]


class Thing:
    pass


def sent(sync: NamespaceSync, object_ids: ObjectIds, **values: object) -> None:
    looks = {name: None if isinstance(value, int) else Snapshot(value, object_ids) for name, value in values.items()}
    contents = {key: tokens for name, look in looks.items() if look for key, tokens in look.parts(name).items()}
    sync.note_sent(
        {name: Sent.of(name, values[name], look, frozenset()) for name, look in looks.items()}, contents, frozenset()
    )


class TestNamespaceSync:
    def test_a_value_is_sent_once(self):
        sync, thing = NamespaceSync(), Thing()
        assert not sync.has("x", thing)
        sent(sync, ObjectIds(), x=thing)
        assert sync.has("x", thing)

    def test_a_name_that_was_rebound_is_sent_again(self):
        sync = NamespaceSync()
        sent(sync, ObjectIds(), x=1)
        assert not sync.has("x", 2)

    def test_an_object_that_was_changed_in_place_is_known_by_its_number(self):
        sync, object_ids, thing, holder = NamespaceSync(), ObjectIds(), Thing(), Thing()
        holder.part = thing
        sent(sync, object_ids, holder=holder)
        assert sync.changed("holder", Snapshot(holder, object_ids), is_new=False) == set()
        thing.lr = 0.2
        object_id = object_ids.get(thing)
        assert sync.changed("holder", Snapshot(holder, object_ids), is_new=False) == {object_id}
        sync.note_gone([object_id])
        assert sync.changed("holder", Snapshot(holder, object_ids), is_new=False) == set()

    def test_plain_data_that_was_changed_in_place_is_known_by_its_name(self):
        sync, object_ids, settings = NamespaceSync(), ObjectIds(), {"lr": 0.1, "layers": [1, 2]}
        sent(sync, object_ids, settings=settings)
        settings["layers"].append(3)
        assert sync.changed("settings", Snapshot(settings, object_ids), is_new=False) == {"settings"}
        assert sync.containers({"settings": settings}) == {id(settings): "settings"}
        assert sync.containers({}) == {}

    def test_what_a_rank_bound_is_its_own_until_it_is_pushed(self):
        sync = NamespaceSync()
        sync.note_bound({"x": NotebookValue(lambda: 1)})
        assert sync.owns("x", 1)
        assert not sync.owns("x", 2)  # the notebook has bound it later
        sent(sync, ObjectIds(), x=1)
        assert sync.has("x", 1)
        assert not sync.owns("x", 1)

    def test_what_a_rank_deleted_later_is_not_there(self):
        sync = NamespaceSync()
        sent(sync, ObjectIds(), x=1)
        sync.note_unbound({"x": NotebookValue(lambda: 1)})
        assert (sync.owns("x", 1), sync.is_there("x")) == (True, False)

    def test_a_number_that_the_notebook_binds_again_is_the_later_one_by_its_source(self):
        sync = NamespaceSync()
        sync.note_bound({name: NotebookValue(lambda: 0) for name in ("x", "y", "z")})
        sync.note_notebook({"x": 0, "y": 0}, {"x"})
        assert [sync.owns("x", 0), sync.owns("y", 0), sync.deleted] == [False, True, {"z"}]

    def test_a_rank_knows_its_rank_better_than_the_notebook(self):
        assert NamespaceSync().owns("rank", 16)

    def test_the_user_is_told_once_for_each_value(self):
        sync = NamespaceSync()
        assert [sync.tell("x", value) for value in (1, 1, 2)] == [True, False, True]

    def test_a_large_thing_of_the_notebook_is_not_kept_alive(self):
        sync, object_ids, thing = NamespaceSync(), ObjectIds(), Thing()
        thing.part = Thing()
        ends = weakref.ref(thing.part)
        sent(sync, object_ids, x=thing)
        del thing
        gc.collect()
        assert ends() is None
        assert not sync.has("x", Thing())


class TestCellPlan:
    """Two ranks, and a notebook with these variables."""

    def plan(
        self, names: str, syncs: dict[int, NamespaceSync] | None = None, forced: str = "", **variables: Any
    ) -> Any:
        self.syncs = syncs or {0: NamespaceSync(), 1: NamespaceSync()}
        return plan_cell(names.split(), variables, self.syncs, ObjectIds(), forced.split())

    def test_what_ranks_lack_is_sent_to_them_once_for_those_that_lack_the_same(self):
        syncs, own = {rank: NamespaceSync() for rank in range(3)}, Thing()
        syncs[1].note_bound({"own": NotebookValue(lambda: own)})
        plan = self.plan("own x absent", syncs, own=own, x=2)
        assert plan.send == {0: {"own", "x"}, 1: {"x"}, 2: {"own", "x"}}
        assert [(one.ranks, one.names) for one in plan.deliveries()] == [([0, 2], {"own", "x"}), ([1], {"x"})]
        assert ["their own own;" in said for said in plan.remarks("cpu")] == [True]
        assert plan.remarks("cpu") == []

    def test_what_functions_read_and_lists_that_values_hold_are_sent_too(self):
        scope: dict[str, Any] = {"scale": 2, "items": [1]}
        names = vars(sys.modules["__main__"])
        exec("def f(it): return g(it)\ndef g(x): return x * scale", names)
        scope |= {"f": names.pop("f"), "g": names.pop("g")}
        scope["f"].__defaults__ = (scope["items"],)
        assert self.plan("f", **scope).send[0] == {"f", "g", "scale", "items"}

    def test_what_changed_in_both_places_is_left_to_the_ranks(self):
        object_ids, thing = ObjectIds(), Thing()
        thing.lr = 1
        syncs = {0: NamespaceSync(), 1: NamespaceSync()}
        for sync in syncs.values():
            sent(sync, object_ids, x=thing)
        object_id = object_ids.get(thing)
        assert plan_cell(["x"], {"x": thing}, syncs, object_ids).deliveries() == []
        thing.layers = [2]
        for touched, changed in ((set(), {object_id}), ({object_id}, set())):
            plan = plan_cell(["x"], {"x": thing}, syncs, object_ids)
            assert plan.in_doubt() == {0: {object_id}, 1: {object_id}}
            plan.settle(touched)
            assert plan.changed[0] == {"x": changed}
        assert plan.conflicts == {"x"}
        assert "changed both" in plan.remarks("cpu")[0]
        assert plan_cell(["x"], {"x": thing}, syncs, object_ids).in_doubt() == {}  # it was told

    def test_what_the_user_asks_for_is_sent_whatever_the_ranks_have(self):
        syncs = {0: NamespaceSync()}
        syncs[0].note_bound({"x": NotebookValue(lambda: 1)})
        plan = self.plan("", syncs, forced="x", x=1)
        assert (plan.send, plan.remarks("cpu")) == ({0: {"x"}}, [])
        with pytest.raises(NameError, match="'y' is not defined"):
            self.plan("", forced="y")


class TestLook:
    def test_a_new_object_at_the_address_of_one_that_has_ended_has_another_number(self):
        object_ids = ObjectIds()
        assert len({object_ids.assign(Thing()) for _ in range(100)}) == 100

    def test_what_holds_itself_is_read_once(self):
        thing, items = Thing(), []
        items.append(items)
        thing.itself, thing.items = thing, items
        assert len(Snapshot(thing, ObjectIds()).objects) == 1

    def test_modules_of_a_class_may_have_other_attributes(self):
        torch = pytest.importorskip("torch")
        modules, object_ids = [torch.nn.ReLU(), torch.nn.ReLU()], ObjectIds()
        seen = []
        for one, name in zip(modules, ("scale", "shift"), strict=True):
            for value in (1, 2):
                setattr(one, name, value)
                seen.append(Snapshot(one, object_ids).tokens)
            seen.append(Snapshot(one, object_ids).tokens)
        assert [one == other for one, other in itertools.pairwise(seen)] == [False, True, False, False, True]

    @pytest.mark.parametrize("value", [range(20_000), bytearray(1 << 21), (one for one in "abc")])
    def test_what_is_too_large_or_cannot_be_read_is_left_out(self, value: object):
        thing = Thing()
        thing.value = list(value) if isinstance(value, range) else value
        look = Snapshot(thing, ObjectIds())
        assert look.is_partial
        assert look.tokens == Snapshot(thing, look.ids).tokens


class TestDisplayIds:
    def test_an_update_by_all_who_show_it_stays_in_place(self):
        ids = DisplayIds()
        shown = ids.shown({0: "a", 1: "b"})
        place = ids.update({0: "a", 1: "b"})
        assert place == (shown, False)

    def test_an_update_by_some_of_them_is_a_display_of_its_own(self):
        ids = DisplayIds()
        shown = ids.shown({0: "a", 1: "b"})
        place = ids.update({1: "b"})
        assert place[1]
        assert place[0] != shown
        assert not ids.update({1: "b"})[1]


class TestArguments:
    def test_options_become_values(self):
        line = "-n 4 --ranks 0,2-3 --out losses --timeout 1.5 --background"
        assert args.DISTRIBUTED_CELL.parse(line) == {
            "num_processes": 4,
            "ranks": (0, 2, 3),
            "out": "losses",
            "timeout": 1.5,
            "background": True,
        }
        assert args.DISTRIBUTED_CELL.parse("--num-processes=2") == {"num_processes": 2}

    def test_rank_takes_its_ranks_first(self):
        assert args.RANK_CELL.parse("1 --out x") == {"ranks": (1,), "out": "x"}

    @pytest.mark.parametrize(
        ("line", "says"),
        [
            ("--rnks 1", "Did you mean '--ranks'"),
            ("-n", "-n/--num-processes: expected one argument"),
            ("-n two", "number from 1"),
            ("--ranks 1,x", "'x' is not a rank"),
            ("--ranks 3-1", "'3-1' is not a rank"),
            ("--out 1x", "'1x' is not a name"),
            ("--timeout soon", "not a number of seconds"),
            ("--quiet=yes", "--quiet: ignored explicit argument"),
            ("hello", "unknown: hello"),
            ("--out 'x", "Close the quotes"),
        ],
    )
    def test_a_mistake_says_what_to_write(self, line: str, says: str):
        with pytest.raises(ConfigError, match=says):
            args.DISTRIBUTED_CELL.parse(line)

    def test_a_command_may_do_without_its_rank(self):
        assert [COMMANDS["restart"].parse(line) for line in ("", "1")] == [{"rank": None}, {"rank": 1}]
        assert COMMANDS["pull"].parse("x y --all") == {"names": ["x", "y"], "all": True}

    def test_help_is_printed_and_names_every_option(self, capsys: pytest.CaptureFixture[str]):
        assert args.RANK_CELL.parse("--help") is None
        assert capsys.readouterr().out == args.RANK_CELL.format_help()
        shown = args.DISTRIBUTED_CELL.format_help()
        assert shown.startswith("usage: %%distributed [-n N]")
        assert all(flag in shown for flag in args.DISTRIBUTED_CELL.flags)
        assert "--inserted" not in shown

    def test_the_page_of_cells_has_every_option_and_command_and_no_others(self):
        page = (ROOT / "notebooks" / "reference" / "cells.md").read_text(encoding="utf-8").replace("&#124;", "|")
        options, commands = page.split("\n## ")[1:3]
        flags = {*args.DISTRIBUTED_CELL.flags, *args.RANK_CELL.flags}
        assert set(re.findall(r"`(-[\w-]+)", options)) == flags - {"-h", "--help"}
        written = re.findall(r"^\| (?:`|<code>)(.+?)(?:`|</code>)", commands, re.MULTILINE)
        assert written == [command.line for command in COMMANDS.values()]
        of_commands = {flag for command in COMMANDS.values() for flag in command.flags}
        assert {flag for flag in of_commands - {"-h"} if flag not in page} == set()


class TestAutoMode:
    @pytest.mark.parametrize(
        ("cell", "goes"),
        [
            ("x = 1\n", "%%distributed --inserted\nx = 1\n"),
            ("%%local\nx = 1\n", "#\nx = 1\n"),
            ("%distributed status\n", "%distributed status\n"),
            ("%%bash\nls\n", "%%bash\nls\n"),
            ("%%time\nf()\n", "%%distributed --inserted\n%%time\nf()\n"),
            ("%%rank 1\nx\n", "%%rank 1\nx\n"),
            ("%debug\n", "%distributed debug\n"),
            ("# first\n%pip install x\n!pip install y\n", "# first\n%pip install x\n!pip install y\n"),
            ("!pip list\nimport x\n", "%%distributed --inserted\n!pip list\nimport x\n"),
        ],
    )
    def test_every_cell_is_for_the_ranks_unless_it_says_otherwise(self, cell: str, goes: str):
        assert "".join(route(cell.splitlines(keepends=True), everything=True)) == goes

    def test_otherwise_only_local_is_looked_at(self):
        assert route(["x = 1\n"], everything=False) == ["x = 1\n"]
        assert route(["%%local\n", "x\n"], everything=False) == ["#\n", "x\n"]


WAITS = """Current thread 0x00007f0000000001 (most recent call first):
  File "/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 10 in all_reduce
  File "/home-of/train.py", line 3 in step
"""
WORKS = """Current thread 0x00007f0000000001 (most recent call first):
  File "/home-of/train.py", line 7 in load
"""


class TestHangs:
    def test_a_rank_that_waits_for_one_that_has_ended_the_cell(self):
        assert "0 waits in all_reduce" in verdict({0: WAITS}, [1])
        assert "rank 1 has finished" in verdict({0: WAITS}, [1])

    @pytest.mark.parametrize(
        ("file", "function"),
        [("torch/nn/parallel/distributed.py", "_pre_forward"), ("nb_accelerate/training/comm/gather.py", "gather")],
    )
    def test_a_parallel_forward_waits_and_so_does_whoever_wants_what_a_device_has_gathered(self, file, function):
        dump = WAITS.replace("torch/distributed/distributed_c10d.py", file).replace("all_reduce", function)
        assert f"rank 0 waits in {function}, called from step" in verdict({0: dump}, [1])

    def test_a_rank_that_waits_for_one_that_is_elsewhere(self):
        assert "1 is in load" in verdict({0: WAITS, 1: WORKS}, [])

    def test_ranks_that_wait_together_or_work_are_no_hang(self):
        assert verdict({0: WAITS, 1: WAITS}, []) == ""
        assert verdict({0: WORKS, 1: WORKS}, []) == ""
        assert verdict({0: WORKS}, [1]) == ""

    def test_a_rank_that_waits_for_one_that_was_asked_nothing(self):
        said = verdict({0: WAITS}, [], [1, 2])
        assert said == "rank 0 waits in all_reduce, called from step, /home-of/train.py:3; ranks 1-2 do not run this"
        assert verdict({0: WORKS}, [], [1]) == ""


class TestCellsThatBreakTheGroup:
    """Whether the process group has to be made anew before the next cell."""

    @staticmethod
    def members(*steps: int) -> Any:
        return {rank: SimpleNamespace(steps={"default": count}) for rank, count in enumerate(steps)}

    def breaks(
        self, members: Any, *, ran: int = 2, fails: bool = False, cut: bool = False, backend: str = "nccl"
    ) -> bool:
        steps_taken = {StepKind.CUT} if cut else set()
        request: Any = SimpleNamespace(ranks=[object()] * ran, incidents=["one"] * fails, steps_taken=steps_taken)
        return breaks_group(request, members, backend)

    def test_after_a_failure_ranks_that_are_in_step_go_on(self):
        assert not self.breaks(self.members(3, 3), fails=True)
        assert self.breaks(self.members(3, 2), fails=True, backend="gloo")
        assert self.breaks(self.members(3, 3), fails=True, cut=True)

    def test_nccl_lets_a_cell_end_well_in_which_a_rank_waits_for_ever(self):
        assert self.breaks(self.members(3, 2))
        assert not self.breaks(self.members(3, 3))
        assert not self.breaks(self.members(3, 2), ran=1)  # the other comes with the next cell
        assert not self.breaks(self.members(3, 2), backend="gloo")  # it counts what is sent from one to another too

    def test_one_rank_has_no_group_to_break(self):
        assert not self.breaks(self.members(3), ran=1, fails=True, cut=True)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("%distributed pu", ["pull", "push"]),
        ("%distributed sta", ["start", "status"]),
        ("%%distributed -n 2 --pro", ["--progress"]),
        ("%%rank 1 --back", ["--background"]),
        ("%%distributed --con", ["--convert"]),
        ("%distributed push x --", ["--help", "--large", "--ranks"]),
        ("%distributed push x", []),
        ("x = --y", []),
    ],
)
def test_magics_are_completed_with_their_commands_and_options(line, words):
    assert sorted(words_for(line)) == words
