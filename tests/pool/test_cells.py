"""`%%distributed` in a real kernel, cell after cell, as a user would."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import IPython
import pytest
from fixtures.kernels import Cell, Kernel


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def texts(cell: Cell) -> list[str]:
    return [display["text/plain"] for display in cell.displays]


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel) -> Iterator[Kernel]:
    shared_kernel.wait_for_server()
    # Seconds. A rank that was off the CPU for a while says the same as the other nevertheless.
    shared_kernel.set_timeouts("nb_accelerate.notebook.pool.Pool", fold=30.0)
    shared_kernel.put("nb_accelerate.notebook.magics.names._ANSWER_WITHIN", 20.0)
    shared_kernel.run("%load_ext nb_accelerate").ok()
    first = shared_kernel.run("%%distributed\nrank").ok()
    assert first.stdout == "2 processes on CPU\n[rank 0] 0\n[rank 1] 1\n"
    yield shared_kernel
    before = len(shared_kernel.processes())
    assert before >= 3
    shared_kernel.run("%unload_ext nb_accelerate").ok()
    assert shared_kernel.processes() == []


@pytest.fixture(autouse=True)
def _ranks_are_in_step(notebook: Kernel) -> Iterator[None]:
    yield
    cell = notebook.run(
        "%%distributed --out in_step\n"
        "import torch, torch.distributed\n"
        "_sum = torch.ones(1)\ntorch.distributed.all_reduce(_sum)\n_sum.item()"
    ).ok()
    assert notebook.run("in_step").ok().value == "[2.0, 2.0]", cell


class TestOutput:
    @pytest.mark.contract("cells: output of ranks")
    def test_what_all_ranks_say_is_shown_once_and_the_rest_by_rank(self, notebook: Kernel):
        cell = notebook.run("%%distributed\nprint('same')\nprint('I am', rank)\nprint('and', rank)\nprint('end')").ok()
        assert cell.stdout == "same\n[rank 0] I am 0\n[rank 0] and 0\n[rank 1] I am 1\n[rank 1] and 1\nend\n"

    def test_the_last_expression_is_displayed_as_in_a_cell(self, notebook: Kernel):
        assert texts(notebook.run("%%distributed\n[1, 2] * 2").ok()) == ["[1, 2, 1, 2]"]
        assert texts(notebook.run("%%distributed\n3;").ok()) == []
        assert notebook.run("%%distributed\nrank + 1").ok().stdout.splitlines() == ["[rank 0] 1", "[rank 1] 2"]

    def test_stdout_stderr_and_displays_keep_their_order(self, notebook: Kernel):
        cell = notebook.start(
            "%%rank 1\nimport sys\nfrom IPython.display import display\nprint('a')\nprint('b', file=sys.stderr)\n"
            "display('c')\nprint('d')"
        )
        assert kinds(notebook, cell) == ["stdout a", "stderr b", "display 'c'", "stdout d"]

    @pytest.mark.contract("cells: figures")
    def test_figures_and_html_arrive(self, notebook: Kernel):
        notebook.run("%%distributed\nimport matplotlib.pyplot as plt\nfrom IPython.display import HTML, display").ok()
        cell = notebook.run("%%distributed\ndisplay(HTML('<b>both</b>'))\nplt.plot([1, 2]);").ok()
        assert [sorted(display) for display in cell.displays] == [
            ["text/html", "text/plain"],
            ["image/png", "text/plain"],
        ]

    def test_matplotlib_inline_is_as_in_a_notebook(self, notebook: Kernel):
        cell = notebook.run("%%rank 0\n%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.plot([1]);").ok()
        assert "image/png" in cell.displays[0]

    def test_a_display_that_all_ranks_update_is_one_display(self, notebook: Kernel):
        cell = notebook.start(
            "%%distributed\nfrom IPython.display import display\nshown = display('one', display_id=True)\n"
            "shown.update('two')"
        )
        messages = [content for kind, content in raw(notebook, cell) if "display" in kind]
        assert [one["data"]["text/plain"] for one in messages] == ["'one'", "'two'"]
        assert len({one["transient"]["display_id"] for one in messages}) == 1

    def test_clear_output_clears_once(self, notebook: Kernel):
        cell = notebook.start("%%distributed\nfrom IPython.display import clear_output\nprint(1)\nclear_output()")
        assert [kind for kind, _ in raw(notebook, cell)] == ["stream", "clear_output"]

    def test_a_progress_bar_of_ranks_is_a_line_of_the_panel(self, notebook: Kernel):
        cell = notebook.run("%%distributed\nfrom tqdm.auto import tqdm\nfor _ in tqdm(range(3)): pass").ok()
        assert (cell.stdout, cell.stderr) == ("", "")
        assert re.search(r"^3/3 \[00:00, .*it/s\]$", texts(cell)[-1], re.MULTILINE)

    def test_of_a_line_that_redraws_itself_the_last_drawing_is_shown(self, notebook: Kernel):
        cell = notebook.run("%%distributed\nfor i in range(3): print(f'\\rat {i}', end='')\nprint()").ok()
        assert cell.stdout == "at 2\n"

    def test_shell_commands_and_c_code_print_too(self, notebook: Kernel):
        assert "from a shell" in notebook.run("%%distributed\n!echo from a shell").ok().stdout
        cell = notebook.run("%%distributed\nimport os\nos.write(1, b'from C\\n');").ok()
        assert cell.stdout == "from C\n"

    def test_grouped_output_has_each_rank_in_one_place(self, notebook: Kernel):
        code = "%%distributed --group-outputs\nimport torch.distributed as dist\nfor i in range(3):\n"
        cell = notebook.run(code + "    print(rank, i)\n    dist.barrier()").ok()
        assert [line[:8] for line in cell.stdout.splitlines()] == ["[rank 0]"] * 3 + ["[rank 1]"] * 3

    def test_quiet_shows_nothing(self, notebook: Kernel):
        cell = notebook.run("%%distributed --quiet\nprint(1)\n2").ok()
        assert (cell.stdout, cell.displays) == ("", [])

    def test_uncaptured_output_has_its_rank_on_every_line(self, notebook: Kernel):
        cell = notebook.run("%%distributed --no-capture\nprint('same')").ok()
        assert sorted(cell.stdout.splitlines()) == ["[rank 0] same", "[rank 1] same"]

    def test_no_line_of_many_is_lost(self, notebook: Kernel):
        cell = notebook.run("%%distributed\nfor i in range(2000): print(i)").ok()
        assert cell.stdout.split() == [str(i) for i in range(2000)]

    @pytest.mark.may_leave("files")  # the folder of the file
    def test_lines_that_a_browser_cannot_draw_are_all_in_the_file_when_the_cell_ends(self, notebook: Kernel):
        cell = notebook.run("%%distributed\nfor i in range(9000): print(f'{rank}: line {i}')").ok()
        tail = texts(cell)[-1]
        log = Path(re.search(r"all 18,000 are in (\S+\.log)", tail)[1])
        lines = log.read_text().splitlines()
        log.unlink()
        assert tail.splitlines()[-1] == lines[-1]
        for rank in range(2):
            assert [one for one in lines if f" {rank}: " in one] == [
                f"[rank {rank}] {rank}: line {i}" for i in range(9000)
            ]


class TestPython:
    @pytest.mark.contract("cells: variables stay")
    def test_variables_stay(self, notebook: Kernel):
        notebook.run("%%distributed\nkept = rank").ok()
        assert notebook.run("%%distributed\nprint(kept == rank)").ok().stdout == "True\n"

    def test_a_rank_knows_its_place_and_has_an_accelerator_when_it_asks(self, notebook: Kernel):
        cell = notebook.run("%%distributed\nprint(world_size, local_rank == rank, device)\n").ok()
        assert cell.stdout == "2 True cpu\n"
        assert notebook.run("%%distributed\n'accelerator' + ''\nprint(accelerator.num_processes)").ok().stdout == "2\n"

    def test_await_works_and_so_do_magics(self, notebook: Kernel):
        assert texts(notebook.run("%%distributed\nimport asyncio\nawait asyncio.sleep(0, 'woken')").ok()) == ["'woken'"]
        assert "loop" in notebook.run("%%rank 0\n%timeit -n1 -r1 sum(range(3))").ok().stdout

    def test_an_underscore_is_the_last_value_and_keeps_no_other(self, notebook: Kernel):
        code = "import gc, weakref\nclass Shown(list): pass\nshown = Shown(); dies = weakref.ref(shown)"
        notebook.run(f"%%distributed\n{code}\n_ = 0; del _").ok()
        notebook.run("%%distributed\nshown").ok()
        assert texts(notebook.run("%%distributed\n_ is shown")) == ["True"]
        notebook.run("%%distributed\ndel shown").ok()
        assert texts(notebook.run("%%distributed\n(dies(), _)")) == ["(None, True)"]
        notebook.run("%%distributed\nfor _ in range(3): pass").ok()
        for _ in range(2):  # it is the user's now
            assert texts(notebook.run("%%distributed\n_ + 5")) == ["7"]
        notebook.run("%%distributed\ndel _").ok()

    def test_out_brings_the_value_of_each_rank(self, notebook: Kernel):
        notebook.run("%%distributed --quiet --out values\nrank * 10").ok()
        assert notebook.run("values").ok().value == "[0, 10]"

    def test_out_brings_a_value_that_a_semicolon_hides(self, notebook: Kernel):
        assert texts(notebook.run("%%distributed --out hidden\nrank + 5;").ok()) == []
        assert notebook.run("hidden").ok().value == "[5, 6]"

    def test_one_rank_alone(self, notebook: Kernel):
        assert texts(notebook.run("%%rank 1\nrank").ok()) == ["1"]
        assert texts(notebook.run("%%distributed --ranks 0\nrank").ok()) == ["0"]

    def test_a_question_mark_shows_help_from_a_rank(self, notebook: Kernel):
        cell = notebook.run("%%distributed\ndef helped():\n    'Says how.'\nhelped?").ok()
        assert "Says how." in texts(cell)[0]

    def test_input_says_why_not(self, notebook: Kernel):
        cell = notebook.run("%%distributed\ninput()")
        assert (cell.error, "input() does not work" in cell.message) == ("EOFError", True)

    @pytest.mark.may_leave("processes", "shared_memory")  # the rank keeps the queue, and Python a tracker of it
    def test_a_rank_spawns_processes_that_run_a_function_of_a_cell(self, notebook: Kernel):
        cell = notebook.run(
            "%%distributed\nimport multiprocessing\ndef double(x, to): to.put(2 * x)\n"
            "context = multiprocessing.get_context('spawn')\nqueue = context.Queue()\n"
            "child = context.Process(target=double, args=(4, queue))\nchild.start()\n"
            "print(queue.get(timeout=30))\nchild.join()"
        ).ok()
        assert cell.stdout == "8\n"

    def test_loader_workers_run_a_class_from_a_cell(self, notebook: Kernel):
        cell = notebook.run(
            "%%distributed\nimport torch\nclass Squares(torch.utils.data.Dataset):\n"
            "    def __len__(self): return 4\n    def __getitem__(self, i): return i * i\n"
            "loader = torch.utils.data.DataLoader(Squares(), num_workers=1)\nprint([int(x) for x in loader])"
        ).ok()
        assert cell.stdout == "[0, 1, 4, 9]\n"


class TestNames:
    @pytest.mark.contract("cells: names of the notebook")
    def test_functions_classes_and_data_travel_with_what_they_use(self, notebook: Kernel):
        notebook.run(
            "import math\nFACTOR = 2\ndef scaled(x): return math.floor(x) * FACTOR\n"
            "class Point:\n    def __init__(self, x): self.x = x\n    def scaled(self): return scaled(self.x) + rank\n"
            "point = Point(1.5)"
        ).ok()
        assert notebook.run("%%distributed\nprint(point.scaled() - rank)").ok().stdout == "2\n"
        notebook.run("FACTOR = 5").ok()
        assert notebook.run("%%distributed\nprint(scaled(1), isinstance(point, Point))").ok().stdout == "5 True\n"

    def test_a_notebooks_function_sees_what_the_ranks_define(self, notebook: Kernel):
        notebook.run("def who(): return f'rank {rank} of {world_size}'").ok()
        assert notebook.run("%%rank 1\nprint(who())").ok().stdout == "rank 1 of 2\n"

    def test_what_a_cell_deletes_or_binds_again_is_freed_while_it_runs(self, notebook: Kernel):
        code = "import weakref\nclass Large: pass\na = Large(); b = Large(); listed = [Large()]"
        notebook.run(f"%%distributed\n{code}\nrefs = [weakref.ref(one) for one in (a, b, listed[0])]").ok()
        cell = notebook.run("%%distributed\ndel a\nb = None\nlisted = []\n[ref() for ref in refs]")
        assert texts(cell) == ["[None, None, None]"]

    @pytest.mark.parametrize("magic", ["", "%%time\n"])
    def test_a_list_that_has_the_address_of_the_old_one_is_the_ranks_all_the_same(self, notebook: Kernel, magic: str):
        notebook.run("addressed = [1]").ok()
        code = (
            "here, tries = id(addressed), 0\nwhile tries < 1000:\n    addressed, tries = [], tries + 1\n"
            "    if id(addressed) == here: break\nprint(id(addressed) == here)"
        )
        assert "True" in notebook.run(f"%%distributed\n{magic}{code}").ok().stdout
        cell = notebook.run("%%distributed\naddressed").ok()
        assert texts(cell) == ["[]"]
        notebook.run("%distributed push addressed").ok()
        notebook.run("%%distributed\ndel addressed, here, tries").ok()

    def test_what_the_ranks_bound_later_is_theirs_and_that_is_said_once_if_the_notebooks_changes(
        self, notebook: Kernel
    ):
        notebook.run("theirs = ['notebook']").ok()
        notebook.run("%%distributed\ntheirs = ['ranks']").ok()
        notebook.run("theirs.append(1)").ok()
        cell = notebook.run("%%distributed\nprint(theirs)").ok()
        assert cell.stdout == "['ranks']\n"
        assert "their own theirs" in cell.stderr
        imports = "import torch, time; from torch.utils.data import Dataset; from functools import reduce"
        notebook.run(imports).ok()
        notebook.run(f"%%distributed\n{imports}").ok()
        assert notebook.run("%%distributed\ntorch.ones(1), time.monotonic(), Dataset, reduce").ok().stderr == ""
        assert notebook.run("%%distributed\nprint(theirs)").ok().stderr == ""
        notebook.run("%distributed push theirs").ok()
        assert notebook.run("%%distributed\nprint(theirs)").ok().stdout == "['notebook', 1]\n"

    def test_what_a_pushed_function_uses_travels_when_it_is_used(self, notebook: Kernel):
        notebook.run("OFFSET = 3\ndef inner(): return OFFSET\ndef pushed_function(): return inner()").ok()
        notebook.run("%distributed push pushed_function").ok()
        assert notebook.run("%%distributed\nprint(pushed_function())").ok().stdout == "3\n"

    def test_what_could_not_be_unpickled_is_sent_again(self, notebook: Kernel):
        notebook.run(
            "import os\nclass Picky:\n    def __reduce__(self): return checked, (os.getpid(),)\n"
            "def checked(pid):\n    import builtins\n    if not getattr(builtins, 'allowed', False):\n"
            "        raise RuntimeError('not yet')\n    return 'allowed'\npicky = Picky()"
        ).ok()
        assert notebook.run("%%distributed\nprint(picky)").message == "not yet"
        notebook.run("%%distributed\nimport builtins\nbuiltins.allowed = True").ok()
        assert notebook.run("%%distributed\nprint(picky)").ok().stdout == "allowed\n"

    def test_data_changed_in_place_is_sent_again(self, notebook: Kernel):
        notebook.run("options = {'lr': 1}").ok()
        notebook.run("%%distributed\nprint(options)").ok()
        notebook.run("options['lr'] = 2").ok()
        assert notebook.run("%%distributed\nprint(options)").ok().stdout == "{'lr': 2}\n"

    def test_what_a_rank_trained_in_place_is_not_sent_again(self, notebook: Kernel):
        notebook.run("import torch\nweights = torch.zeros(3)").ok()
        notebook.run("%%distributed\nweights.add_(1);").ok()
        assert notebook.run("%%distributed\nprint(weights.sum().item())").ok().stdout == "3.0\n"
        assert notebook.run("weights.sum().item()").ok().value == "0.0"

    def test_weights_that_each_rank_trains_by_hand_are_told_once(self, notebook: Kernel):
        notebook.run(
            "import torch, torch.distributed as dist\n"
            "w = torch.zeros(2, requires_grad=True)\n"
            "def step(averaged=False):\n"
            "    (w - 1).square().sum().backward()\n"
            "    if averaged: dist.all_reduce(w.grad)\n"
            "    with torch.no_grad():\n"
            "        w.data -= 0.1 * w.grad; w.grad.zero_()"
        ).ok()
        told = "each of the 2 processes trains a model of its own with all of its rows"
        averaged = notebook.run("%%distributed\nstep(averaged=True)").ok()
        assert told not in averaged.stderr
        assert "ranks: %distributed pull" in str(averaged.displays)
        assert told in notebook.run("%%distributed\nstep()").ok().stderr
        assert told not in notebook.run("%%distributed\nstep()").ok().stderr

    @pytest.mark.contract("cells: pull")
    def test_pull_brings_the_value_of_a_rank_or_a_list(self, notebook: Kernel):
        notebook.run(
            "%%distributed\nimport torch\nclass Same:\n    def __init__(self): self.x = torch.ones(2)\n"
            "mine, same = rank + 5, [Same(), {'a': 1.5}]"
        ).ok()
        cell = notebook.run("%distributed pull mine same\nmine").ok()
        assert cell.value == "5"
        assert cell.stdout == (
            "mine, same: from rank 0; the other ranks' are different: %distributed pull mine --all\n"
        )
        assert notebook.run("%distributed pull mine --all\nmine").ok().value == "[5, 6]"
        assert notebook.run("%distributed pull mine --ranks 1\nmine").ok().value == "6"
        cell = notebook.run("%distributed pull minee --all")
        assert plain(cell.traceback) == "NameError: no rank has a variable 'minee'. Did you mean: 'mine'?"
        cell = notebook.run("%%distributed\nprint(mine - rank)").ok()
        assert (cell.stdout, cell.stderr) == ("5\n", "")

    def test_a_pulled_model_stands_for_the_one_that_the_ranks_go_on_with(self, notebook: Kernel):
        notebook.run("import torch\npulled = torch.nn.Linear(1, 1, bias=False)").ok()
        notebook.run("%%distributed\nwith torch.no_grad(): pulled.weight.fill_(3)\nkept = pulled").ok()
        notebook.run("%distributed pull pulled").ok()
        assert notebook.run("pulled.eval().weight.item()").ok().value == "3.0"
        cell = notebook.run("%%distributed\nprint(pulled is kept, pulled.training)").ok()
        assert (cell.stdout, cell.stderr) == ("True True\n", "")
        notebook.run("pulled.weight.data.fill_(5)").ok()
        cell = notebook.run("%%distributed\nprint(pulled.weight.item())").ok()
        assert (cell.stdout, cell.stderr) == ("5.0\n", "")

    def test_what_the_notebook_calls_like_names_of_ranks(self, notebook: Kernel):
        notebook.run("import torch\ndevice, rank = torch.device('cpu'), 5").ok()
        cell = notebook.run("%%distributed\nprint(rank, device)").ok()
        assert cell.stdout.splitlines() == ["[rank 0] 0 cpu", "[rank 1] 1 cpu"]
        advice = cell.stderr.partition("Give it another name: ")[2].strip()
        notebook.run(advice).ok()
        assert notebook.run(f"%%distributed\nprint({advice.split()[0]})").ok().stdout == "5\n"
        assert "device" not in cell.stderr  # it is the same
        notebook.run("device = 'cuda'").ok()
        assert "ranks' own" in notebook.run("%%distributed\nprint(device)").ok().stderr
        notebook.run("%distributed push rank").ok()
        cell = notebook.run("%%distributed\nprint(rank)").ok()
        assert (cell.stdout, cell.stderr) == ("5\n", "")
        notebook.run("%%distributed\nrank = int(__import__('os').environ['RANK'])").ok()
        notebook.run("del device, rank").ok()

    def test_a_scheduler_that_is_sent_knows_the_step_of_its_optimizer(self, notebook: Kernel):
        notebook.run(
            "import torch\nsent_model = torch.nn.Linear(1, 1)\n"
            "sent_optimizer = torch.optim.SGD(sent_model.parameters(), lr=0.1)\n"
            "sent_scheduler = torch.optim.lr_scheduler.StepLR(sent_optimizer, 1)"
        ).ok()
        cell = notebook.run("%%distributed\nsent_optimizer.step()\nsent_scheduler.step()").ok()
        assert "has been overridden" not in cell.stderr

    def test_a_name_that_a_rank_lacks_is_told_in_one_line(self, notebook: Kernel):
        notebook.run("%%rank 0\nonly_here = 1").ok()
        cell = notebook.run("%distributed pull only_here --all")
        assert re.fullmatch(r"NameError: rank 1 .*'only_here'", plain(cell.traceback))

    def test_what_cannot_be_pickled_is_named_before_any_rank_runs(self, notebook: Kernel):
        notebook.run("holder = {'rows': (x for x in ())}").ok()
        cell = notebook.run("%%distributed\nprint('ran')\nholder")
        assert (cell.error, cell.stdout) == ("ShippingError", "")
        assert cell.message.startswith("holder['rows'] cannot be sent")
        assert cell.message.endswith(" in a %%distributed cell.")

    def test_a_pulled_value_that_cannot_be_pickled_is_named_as_the_variable(self, notebook: Kernel):
        notebook.run("%%distributed\nfine, held = 1, {'rows': (x for x in ())}").ok()
        cell = notebook.run("%distributed pull fine held")
        assert cell.error == "ShippingError"
        assert cell.message.startswith("held['rows'] cannot be sent")
        assert "Send back" in cell.message
        assert len(cell.traceback.splitlines()) == 1

    def test_more_than_a_gigabyte_is_asked_about(self, notebook: Kernel):
        notebook.run("import numpy\nhuge = numpy.zeros(1 << 28)").ok()  # never touched, so it takes no memory
        cell = notebook.run("%%distributed\nhuge.shape")
        assert cell.error == "TooLargeError"
        assert "%distributed push huge --large" in cell.message
        notebook.run("del huge").ok()

    def test_the_notebooks_names_are_not_touched(self, notebook: Kernel):
        notebook.run("%%distributed\nonly_there = 1").ok()
        assert notebook.run("'only_there' in globals()").ok().value == "False"


class TestMistakes:
    def test_a_syntax_error_is_shown_once_at_its_line_before_any_rank_runs(self, notebook: Kernel):
        cell = notebook.run("%%distributed\nprint('ran')\ndef :")
        assert (cell.error, cell.stdout) == ("CellSyntaxError", "")
        assert re.search(r"\], line 3\n    def :", plain(cell.traceback))

    @pytest.mark.parametrize(
        ("line", "error", "says"),
        [
            ("%%distributed --rnks 1\n1", "ConfigError", "Did you mean '--ranks'"),
            ("%%distributed --ranks 7\n1", "ConfigError", "ranks that run are 0, 1"),
            ("%%distributed -n 3\n1", "PoolError", "run were started with -n 2"),
            ("%distributed stpo", "ConfigError", "Did you mean 'stop'"),
            ("%distributed push nothing_here", "NameError", "defined in the notebook"),
            ("%distributed start", "PoolError", "already. To start others"),
            ("%%distributed --devices 0\n1", "PoolError", "were started without --devices"),
            ("%distributed push no_pickle", "ShippingError", "no_pickle[0] cannot be sent"),
            ("%%rank\n1", "ConfigError", "Write %%rank RANKS"),
            ("%distributed restart 7", "ConfigError", "there is no rank 7"),
        ],
    )
    def test_a_mistake_is_one_line_that_says_what_to_do(self, notebook: Kernel, line: str, error: str, says: str):
        notebook.run("no_pickle = [(x for x in ())]").ok()
        cell = notebook.run(line)
        assert (cell.error, says in cell.message) == (error, True), cell
        assert len(cell.traceback.splitlines()) == 1

    @pytest.mark.parametrize(
        "line", ["%distributed status", "%%distributed\n1", "from nb_accelerate.notebook import pool\npool.start()"]
    )
    def test_ranks_have_no_ranks_of_their_own(self, notebook: Kernel, line: str):
        cell = notebook.run(f"%%distributed\n{line}")
        assert (cell.error, "on a rank already" in cell.message) == ("PoolError", True)
        assert "interactiveshell" not in cell.traceback

    def test_a_value_that_cannot_travel_is_told_without_our_frames(self, notebook: Kernel):
        cell = notebook.run("%%distributed --out v\n(x for x in ())")
        assert (cell.error, "last expression" in cell.message) == ("ShippingError", True)
        assert "be pickled" in cell.message
        assert ".py" not in plain(cell.traceback)

    def test_help_shows_every_option(self, notebook: Kernel):
        assert "--group-outputs" in notebook.run("%%distributed --help\n").ok().stdout
        assert "restart [RANK]" in notebook.run("%distributed --help").ok().stdout
        assert "--large" in notebook.run("%distributed push --help").ok().stdout


class TestNotebook:
    @pytest.mark.contract("cells: status")
    def test_status_has_a_row_for_each_rank(self, notebook: Kernel):
        rows = notebook.run("%distributed status").ok().stdout.splitlines()
        assert [row.split()[0] for row in rows[1:]] == ["rank", "0", "1"]
        assert all("idle" in row for row in rows[2:])

    def test_training_in_the_background_is_stopped_after_an_epoch(self, notebook: Kernel):
        notebook.run(
            "handle = get_ipython().run_cell_magic('distributed', '--background', '''\n"
            "import torch\n"
            "from nb_accelerate.training.accelerator import Accelerator\n"
            "accelerator = Accelerator(cpu=True)\n"
            "model = torch.nn.Linear(1, 1)\n"
            "model, optimizer, loader = accelerator.prepare(\n"
            "    model, torch.optim.SGD(model.parameters(), 0.1), torch.utils.data.DataLoader(torch.ones(8, 1)))\n"
            "count = 0\n"
            "for epoch in accelerator.epochs(1_000_000):\n"
            "    for batch in loader:\n"
            "        accelerator.backward(model(batch).sum())\n"
            "        optimizer.step()\n"
            "        count += 1\n"
            "''')"
        ).ok()
        notebook.run("handle.stop_after_epoch()").ok()
        notebook.run("handle.result(60)").ok()
        found = notebook.run("%%distributed --out counts\ncount, epoch").ok() and notebook.run("counts").ok()
        (count, epoch), other = eval(found.value)
        assert (count, epoch) == other == (4 * (epoch + 1), epoch)

    @pytest.mark.contract("cells: in the background")
    def test_a_cell_in_the_background_lets_the_notebook_go_on(self, notebook: Kernel, tmp_path):
        flag = tmp_path / "flag"
        notebook.run(
            f"handle = None\nflag = {str(flag)!r}\nget_ipython().run_cell_magic('distributed', '--background', '''\n"
            "import os, time\nprint(\"begun\")\nwhile not os.path.exists(flag): time.sleep(0.01)\nrank''')"
        ).ok()
        assert "running" in notebook.run("_").ok().value
        notebook.run("handle = _\nopen(flag, 'w').close()").ok()
        assert notebook.run("handle.result(20)").ok().value == "[0, 1]"

    def test_completion_and_inspection_answer_from_rank_0(self, notebook: Kernel):
        notebook.run("%%distributed\nclass Model:\n    'Learns.'\n    def forward(self): pass\nnet = Model()").ok()
        reply = notebook.client.complete("%%distributed\nnet.for", reply=True, timeout=20)
        assert reply["content"]["matches"] == ["net.forward"]
        reply = notebook.client.inspect("%%distributed\nnet", reply=True, timeout=20)
        assert "Learns." in reply["content"]["data"]["text/plain"]

    @pytest.mark.contract("cells: auto")
    def test_auto_mode_runs_plain_cells_on_the_ranks(self, notebook: Kernel):
        notebook.run("%distributed auto on").ok()
        assert notebook.run("there = rank\nprint(there)").ok().stdout.splitlines() == ["[rank 0] 0", "[rank 1] 1"]
        notebook.run("class Net:\n    def forward(self): pass\nthere_too = Net()").ok()
        reply = notebook.client.complete("there_too.for", reply=True, timeout=20)
        assert reply["content"]["matches"] == ["there_too.forward"]
        cell = notebook.run("1\n1 / 0")
        assert re.search(r"Cell In\[\d+\], line 2", plain(cell.traceback))
        assert notebook.run("%%local\n'there' in globals()").ok().value == "False"
        notebook.run("%distributed auto off").ok()
        assert notebook.run("1 + 1").ok().value == "2"

    def test_a_cell_of_the_launcher_runs_beside_the_ranks(self, notebook: Kernel):
        cell = notebook.run("from nb_accelerate import notebook_launcher\nnotebook_launcher(lambda: 1, (), 2)").ok()
        assert texts(cell) == ["[1, 1]"]

    def test_programs_call_functions(self, notebook: Kernel):
        notebook.run("from nb_accelerate.notebook import pool").ok()
        assert notebook.run("pool.run('rank * 2', quiet=True)").ok().value == "[0, 2]"
        assert notebook.run("pool.push({'pushed': 4}); pool.pull('pushed')").ok().value == "[4, 4]"


def raw(notebook: Kernel, cell: str) -> list[tuple[str, dict]]:
    """Output messages of a cell, as they came."""
    found = []
    while True:
        message = notebook.next_message(cell, __import__("time").monotonic() + 30)
        kind, content = message["msg_type"], message["content"]
        if kind == "status" and content["execution_state"] == "idle":
            return found
        if kind not in ("status", "execute_input"):
            found.append((kind, content))


def kinds(notebook: Kernel, cell: str) -> list[str]:
    return [
        f"{content['name']} {content['text'].strip()}"
        if kind == "stream"
        else f"display {content['data']['text/plain']}"
        for kind, content in raw(notebook, cell)
    ]


def test_folders_that_the_notebook_adds_to_its_search_path_are_those_of_the_ranks_too(
    notebook: Kernel, tmp_path: Path
) -> None:
    (tmp_path / "beside_the_notebook.py").write_text("answer = 42\n")
    notebook.run(f"import sys; sys.path.insert(0, {str(tmp_path)!r})").ok()
    assert notebook.run("%%distributed\nimport beside_the_notebook as b\nprint(b.answer)").ok().stdout == "42\n"
    notebook.run("sys.path.pop(0)").ok()


@pytest.mark.skipif(
    IPython.version_info < (8,) and sys.version_info >= (3, 12), reason="%autoreload of IPython 7 imports `imp`"
)
def test_modules_that_the_notebook_reloads_are_reloaded_on_ranks_too(notebook: Kernel, tmp_path: Path) -> None:
    module = tmp_path / "edited_module.py"
    module.write_text("def answer():\n    return 41\n")
    notebook.run(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n%load_ext autoreload\n%autoreload 2").ok()
    cell = "%%distributed\nprint(answer())"
    notebook.run("%%distributed\nfrom edited_module import answer").ok()
    assert notebook.run(cell).ok().stdout == "41\n"
    module.write_text("def answer():\n    return 'edited'\n")  # of another length: times of files may be equal
    assert notebook.run(cell).ok().stdout == "edited\n"
    notebook.run("%autoreload 0").ok()
    notebook.run("%%distributed\n1").ok()
    module.write_text("def answer():\n    return 'edited once more'\n")
    assert notebook.run(cell).ok().stdout == "edited\n"
    notebook.run("sys.path.pop(0)").ok()


def test_a_module_that_is_pushed_is_loaded_anew(notebook: Kernel, tmp_path: Path) -> None:
    module = tmp_path / "pushed_module.py"
    module.write_text("answer = 41\n")
    notebook.run(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport pushed_module, json").ok()
    cell = "%%distributed\nprint(pushed_module.answer)"
    assert notebook.run(cell).ok().stdout == "41\n"
    module.write_text("answer = 'edited'\n")  # of another length: times of files may be equal
    notebook.run("%distributed push pushed_module json").ok()
    assert notebook.run(cell).ok().stdout == "edited\n"
    module.write_text("answer = \n")
    cell = notebook.run("%distributed push pushed_module")
    assert (cell.error, cell.message) == ("CellSyntaxError", "invalid syntax")
    notebook.run("sys.path.pop(0)").ok()


@pytest.mark.parametrize("above", ["# train it", "import os"])
def test_a_magic_that_is_not_the_first_line_says_where_it_belongs(notebook: Kernel, above: str) -> None:
    failed = notebook.run(f"{above}\n%%rank 1\n1 / 0")
    assert failed.error == "ConfigError"
    assert re.match(r"%%rank .*first line\b.* nothing", failed.message)
    assert failed.message.endswith("Move `%%rank 1` there.")
    assert "\n" not in plain(failed.traceback).strip()


def test_a_name_that_only_ranks_have_is_told_to_be_there(notebook: Kernel) -> None:
    notebook.run("%%distributed\nonly_there = 1").ok()
    cell = notebook.run("only_there + 1")
    assert cell.error == "NameError"
    assert re.fullmatch(r"only_there.*: %distributed pull only_there\n", cell.stderr)
    assert notebook.run("nowhere_at_all").stderr == ""


def test_a_module_that_only_ranks_have_imported_is_pulled(notebook: Kernel) -> None:
    notebook.run("%%distributed\nimport colorsys").ok()
    assert "%distributed pull colorsys\n" in notebook.run("colorsys.rgb_to_hsv").stderr
    notebook.run("%distributed pull colorsys\ncolorsys.rgb_to_hsv").ok()
