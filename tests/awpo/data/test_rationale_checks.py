"""What may stand as a rationale, case by case, with the reason where it may not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from awpo.data.offline_rationales import offline_rationale
from awpo.data.rationale_checks import check_rationale
from awpo.types import Instance, Message, Tool, ToolCall

TOOLS = (
    Tool("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}}),
    Tool("send_mail", "Sends a mail.", {"type": "object", "properties": {"to": {"type": "string"}}}),
    Tool("now", "The time.", {"type": "object", "properties": {}}),
)
GOOD = "The user wants a sum, and add fits: its a is the 41 that was given."


def instance(target: Message, said: str = "Add 41, please") -> Instance:
    return Instance("s", "d", 0, 1, "train", TOOLS, (Message("user", said),), target)


def calls(*made: ToolCall) -> Instance:
    return instance(Message("assistant", None, made))


def reply(content: str = "Hello") -> Instance:
    return instance(Message("assistant", content))


SUM = calls(ToolCall("add", {"a": 41}))


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        (f"  {GOOD}\n", GOOD),
        (f"```\n{GOOD}\n```", GOOD),
        (f"```text\n{GOOD}\n```", GOOD),
        (f"<think>\nI must write about add.\n</think>\n\n{GOOD}", GOOD),
        (f"<think>\n{GOOD}\n</think>", GOOD),
    ],
)
def test_answers_are_taken_out_of_their_wrapping(answer: str, kept: str) -> None:
    assert check_rationale(SUM, answer).rationale == kept


REFUSED = [
    (" \n", "empty"),
    ("<think> </think>", "empty"),
    ("add 41", "too short"),
    (GOOD + "x" * 2000, "too long"),
    (f"{GOOD} <tool_call>", "holds a tag"),
    (f"<think>{GOOD}", "holds a tag"),
    ("The user wants a sum of 41.", "does not name the tool it leads to"),
    ("The user wants additional padding with 41.", "does not name the tool it leads to"),
    ("The user wants a sum, and add fits.", "does not mention the values of the arguments"),
    ("The user wants a sum, and add fits, with 410.", "does not mention the values of the arguments"),
    (f"{GOOD} This leads to the reference action.", "speaks of the action it was given"),
    (f"{GOOD} That is the expected answer.", "speaks of the action it was given"),
    (f"{GOOD} As shown in the action, it is right.", "speaks of the action it was given"),
    (f"{GOOD} The reference agrees.", "speaks of the action it was given"),
    (GOOD + ' {"name": "add", "arguments": {"a": 41}}', "holds the answer itself"),
    (GOOD + ' So {"a": 41}.', "holds the answer itself"),
    (f"{GOOD} I will run add(a=41).", "holds the answer itself"),
    ("用户想要求和，所以应该调用 add，参数 a 是 41，这个工具最合适。", "in another language"),
    ("L'utilisateur veut une somme, donc add convient : le paramètre a vaut 41 comme demandé.", "in another language"),
    ("Der Nutzer möchte eine Summe, daher passt add am besten; der Wert von a ist 41.", "in another language"),
    ("El usuario quiere una suma, por eso add es la herramienta correcta; el valor de a es 41.", "in another language"),
]


@pytest.mark.parametrize(("answer", "reason"), REFUSED)
def test_answers_that_do_not_pass_are_refused_with_the_reason(answer: str, reason: str) -> None:
    checked = check_rationale(SUM, answer)
    assert (checked.rationale, checked.reason) == (None, reason)


KEPT = [
    (SUM, "The set {1, 2} does not matter here: add takes a as 41, which is what the user gave."),
    (SUM, "The user gives 41 as the reference number, so add takes it as a."),
    (calls(ToolCall("add", {"a": "41.0"})), GOOD),
    (SUM, "The user expects an answer soon, so I use add with 41."),
    (SUM, "I use add (the only tool that sums) with 41."),
    (calls(ToolCall("now", {})), "The user asks for the time, which now gives."),
    # Values: half of a longer one's words, numbers however they are written, booleans and nulls not at all.
    (calls(ToolCall("send_mail", {"to": "Ann Lee of Accounting"})), "I use send_mail, and it goes to Ann Lee."),
    (calls(ToolCall("add", {"a": 41.0, "exact": True, "unit": None, "note": ""})), GOOD),
    (calls(ToolCall("add", {"a": [41, 42, 43, 44]})), "I use add with 41, 42 and 43, as the user says."),
    (calls(ToolCall("add", {"a": {"b": {"c": 41}}})), GOOD),
    (calls(ToolCall("add", {"a": 10000})), "I use add with 10,000 as the user says."),
]


@pytest.mark.parametrize(("item", "answer"), KEPT)
def test_answers_that_pass(item: Instance, answer: str) -> None:
    assert check_rationale(item, answer).rationale == answer


def test_three_quarters_of_the_values_are_enough() -> None:
    four = calls(ToolCall("add", {"a": 41, "b": 42, "c": 43, "d": 44}))
    assert check_rationale(four, "I use add with 41, 42 and 43 now.").rationale is not None
    checked = check_rationale(four, "I use add with 41 and 42 now.")
    assert (checked.reason, checked.detail) == ("does not mention the values of the arguments", "c = 43; d = 44")


def test_every_tool_of_several_calls_must_be_named() -> None:
    both = calls(ToolCall("add", {}), ToolCall("now", {}))
    assert check_rationale(both, "I call add, and then now.").rationale is not None
    assert check_rationale(both, "I call add, and that twice.").detail == "now"


def test_a_cut_off_answer_is_refused() -> None:
    assert check_rationale(SUM, GOOD, finish="length").reason == "cut off"
    assert check_rationale(SUM, GOOD, finish="stop").rationale == GOOD


def test_a_reply_needs_its_reason_and_must_not_be_spelled_out() -> None:
    for thought in (
        "The user greets me, so no tool is needed.",
        "The user gave no address for send_mail, so I ask for it.",
        "The result is here, so I answer.",
        "None of the functions can do that.",
    ):
        assert check_rationale(reply(), thought).rationale == thought
    assert check_rationale(reply(), "The user is in a good mood today.").reason == "does not say why no tool is called"
    long = "The total of the three numbers that you gave me comes to forty-one euros."
    assert check_rationale(reply(long), f"I answer directly: {long}").reason == "holds the answer itself"
    assert check_rationale(reply("Hello there"), "I just answer: Hello there").rationale is not None


def test_the_language_of_the_dialogue() -> None:
    chinese = instance(Message("assistant", None, (ToolCall("add", {"a": 41}),)), "请把 41 加起来")
    thought = "用户想要求和，所以应该调用 add，参数 a 是 41，这个工具最合适。"
    assert check_rationale(chinese, thought, language="dialogue").rationale == thought
    assert check_rationale(chinese, GOOD, language="dialogue").reason == "in another language"
    assert check_rationale(SUM, GOOD, language="dialogue").rationale == GOOD
    # Values and names are data, whatever their language.
    mail = calls(ToolCall("send_mail", {"to": "用户想要求和所以应该调用参数这个工具最合适"}))
    mentions = "I use send_mail for the user; it goes to 用户想要求和所以应该调用参数这个工具最合适."
    assert check_rationale(mail, mentions).rationale == mentions


@pytest.mark.parametrize(
    "item",
    [
        SUM,
        calls(ToolCall("send_mail", {"to": "a.b@c.org", "text": "Hello"})),
        calls(ToolCall("now", {}), ToolCall("add", {"a": 3})),
        reply("What is the address?"),
        reply("I cannot do that."),
    ],
)
def test_offline_rationales_pass(item: Instance) -> None:
    assert check_rationale(item, offline_rationale(item)).rationale is not None


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=200), item=st.sampled_from([SUM, reply(), calls()]))
def test_no_text_makes_it_raise(text: str, item: Instance) -> None:
    checked: Any = check_rationale(item, text)
    assert (checked.rationale is None) == bool(checked.reason)
