"""The official executor evaluates a model's text: what such a text can reach from the checkers' process."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from evaluation.bfcl.data import BfclItem, read_category
from evaluation.bfcl.decode import executable
from evaluation.bfcl.package import INSTALL
from evaluation.bfcl.process import CheckerProcess, NoAnswer
from tests.evaluation.bfcl.escape import escaped

pytestmark = pytest.mark.skipif(importlib.util.find_spec("bfcl_eval") is None, reason=f"needs: {INSTALL}")


ENDLESS = escaped("[0 for _ in iter(int, 1)]")


@pytest.fixture(scope="module")
def item() -> BfclItem:
    return next(item for item in read_category("multi_turn_base") if "GorillaFileSystem" in item.involved_classes)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "precious.txt"
    path.write_text("precious")
    yield path
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    "text",
    [
        "open('{target}', 'w')",
        "open(file='{target}',mode='a')",
        "open('{target}').read()",
        "__import__('os').remove('{target}')",
        "__import__('os').rename('{target}', '{target}2')",
        "__import__('os').truncate('{target}', 0)",
        "__import__('os').open('{target}', 1)",
        "__import__('os').listdir('/')",
        "__import__('os').system('echo pwned > {target}')",
        "__import__('os').popen('cat {target}').read()",
        "__import__('os').fork()",
        "__import__('os').kill({pid}, 9)",
        "__import__('os').execv('/bin/sh', ['sh', '-c', 'echo pwned > {target}'])",
        "__import__('subprocess').check_output(['cat', '{target}'])",
        "__import__('shutil').rmtree('{folder}')",
        "__import__('pathlib').Path('{target}').write_text('pwned')",
        "__import__('ctypes').CDLL(None).system(b'echo pwned > {target}')",
        "__import__('socket').create_connection(('127.0.0.1', 9))",
        "__import__('socket').socket()",
        "__import__('urllib.request').request.urlopen('http://127.0.0.1:9')",
        "__import__('resource').setrlimit(1, (1, 1))",
    ],
)
def test_what_gets_past_the_deny_list_is_refused(
    checker: CheckerProcess, item: BfclItem, target: Path, text: str
) -> None:
    text = text.format(target=target, folder=target.parent, pid=os.getpid())
    (result,) = checker.execute(item, [escaped(text)])
    assert "Error during execution" in result
    assert "refused while model output is executed" in result or "not allowed" in result
    assert "precious" not in result


def test_a_call_cannot_write_its_own_verdict(checker: CheckerProcess, item: BfclItem) -> None:
    """A model's call whose name is code that finds the pipe of answers: it is not run, and the next answer is ours."""
    forge = "[__import__('os').write(n, b'{\"results\": [\"forged\"]}\\n') for n in (3, 4, 5) if n] or f"
    forged, listed = checker.execute(item, executable([{forge: {}}, {"pwd": {}}]))
    assert "'str' object is not callable" in forged
    assert "current_working_directory" in listed


@pytest.mark.parametrize("text", ["json.dumps(1)", "inspect.os.getpid()", "CLASS_FILE_PATH_MAPPING.clear()", "print()"])
def test_nothing_of_the_executors_module_is_at_hand(checker: CheckerProcess, item: BfclItem, text: str) -> None:
    """Not even if a name with a dot got there."""
    (result,) = checker.execute(item, [text])
    assert result == f"Error during execution: name {re.split('[.(]', text)[0]!r} is not defined"


@pytest.mark.parametrize("name", ["inspect.os.getpid", "CLASS_FILE_PATH_MAPPING.clear", "a.b", "exit", "globals"])
def test_a_model_calls_tools_alone(checker: CheckerProcess, item: BfclItem, name: str) -> None:
    called, listed = checker.execute(item, executable([{name: {}}, {"pwd": {}}]))
    assert called.startswith("Error during execution: ")
    assert "current_working_directory" in listed


def test_it_says_what_it_gave_up(checker: CheckerProcess, item: BfclItem) -> None:
    checker.execute(item, ["pwd()"])
    assert "files and processes refused, 1024 MiB" in checker.isolation
    if "namespace of its own" in checker.isolation:
        assert checker._process is not None
        mine, its = (os.readlink(f"/proc/{pid}/ns/net") for pid in ("self", checker._process.pid))
        assert mine != its
    else:
        assert "sockets refused" in checker.isolation


def test_memory_is_limited_and_the_process_lives_on(checker: CheckerProcess, item: BfclItem) -> None:
    (result,) = checker.execute(item, ["'a' * 10**10"])
    assert result.startswith("Error during execution")
    assert checker.execute(item, ["1 + 1"]) == ["2"]


def test_print_and_input_reach_nobody(checker: CheckerProcess, item: BfclItem) -> None:
    """Standard input and output carry jobs and answers: a model's text must not speak there."""
    assert checker.execute(item, [escaped('print(\'{"results": ["mine"]}\')'), escaped("input()")])[0] == "None"
    assert checker.execute(item, ["1 + 1"]) == ["2"]


@pytest.mark.parametrize("written", ["5", "[" * 100_000, "[1]", "no"])
def test_what_a_call_writes_for_the_answers_costs_it_its_answer(item: BfclItem, written: str) -> None:
    """A call may find where the answers go; what comes there and is no answer ends the process, and nothing else."""
    told = []
    with CheckerProcess() as checker:
        for number in range(3, 10):
            try:
                checker.execute(item, [escaped(f"__import__('os').write({number}, {written!r}.encode() + b'\\n')")])
            except NoAnswer as error:
                told.append(str(error))
        assert told == ["checker:no_json"]
        assert checker.execute(item, ["1 + 1"]) == ["2"]


def test_a_call_that_never_ends_is_ended_and_costs_no_other_conversation(item: BfclItem) -> None:
    other = next(one for one in read_category("multi_turn_base") if "TicketAPI" in one.involved_classes)
    with CheckerProcess(item_seconds=3.0) as checker:
        done = ["ticket_login(username='user123',password='12345')"]
        (logged_in,) = checker.execute(other, done)
        with pytest.raises(NoAnswer, match="checker:time_limit"):
            checker.execute(item, [ENDLESS])
        assert checker.failures == 1
        status = ["ticket_get_login_status()"]
        (after,) = checker.execute(other, status, earlier=[done])
        assert "true" in logged_in
        assert "true" in after  # its earlier steps were executed again
        with CheckerProcess() as fresh:
            assert "false" in fresh.execute(other, status)[0]


def test_an_item_that_never_ends_costs_no_other_item_its_verdict(item: BfclItem) -> None:
    """Items are sent ahead of the answers: the one at fault is told, those behind it are asked again."""
    assert item.answer is not None
    right = [[list(calls)] if calls else [] for calls in item.answer]
    endless = [[[ENDLESS]], *right[1:]]
    leaving = [[[escaped("__import__('sys').exit()")]], *right[1:]]
    asked = [right, endless, right, leaving, leaving, right, []]
    with CheckerProcess(item_seconds=3.0) as checker:
        found = checker.check([(item, turns) for turns in asked])
        assert [verdict.error_type for verdict in found] == [
            "",
            "checker:time_limit",
            "",
            "checker:ended",
            "checker:ended",
            "",
            "multi_turn:force_terminated",
        ]
        assert [verdict.valid for verdict in found] == [verdict.error_type == "" for verdict in found]
        assert checker.failures == 3
        assert checker.check([]) == []


@pytest.mark.parametrize("text", ["__import__('sys').exit()", "(_ for _ in ()).throw(KeyboardInterrupt)"])
def test_an_exit_ends_the_process_and_is_told(item: BfclItem, text: str) -> None:
    with CheckerProcess() as checker:
        with pytest.raises(NoAnswer, match="checker:ended"):
            checker.execute(item, [escaped(text)])
        assert checker.execute(item, ["1 + 1"]) == ["2"]


def test_conversations_of_two_runs_do_not_meet(item: BfclItem) -> None:
    """The package keeps objects under the model's name: the same item runs twice in a row from its first state."""
    made = ["mkdir(dir_name='new_folder')"]
    with CheckerProcess() as first, CheckerProcess() as second:
        assert first._run != second._run
        assert first.execute(item, made) == second.execute(item, made)
        assert first.execute(item, made) != second.execute(item, ["pwd()"])
        first.check([(item, [])])  # ends the conversation
        assert first.execute(item, made) == ["None"]
