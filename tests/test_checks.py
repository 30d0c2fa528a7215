"""Every check passes its own solution and refuses every wrong answer for the reason it names."""

import inspect
import re
import warnings

import pytest
import torch

from hooklab.exercises import check
from hooklab.exercises.check import Exercise, Prediction, _all_checks

EXERCISES = [item for item in _all_checks() if isinstance(item, Exercise)]
PREDICTIONS = [item for item in _all_checks() if isinstance(item, Prediction)]
WRONG = [(item, reason) for item in EXERCISES for reason in item.wrong]


def by_id(item):
    return getattr(item, "id", item)


@pytest.mark.parametrize("item", EXERCISES, ids=by_id)
def test_the_solution_passes(item):
    message = check.exercise(item.id, item.solution)
    assert message.kind == "right", message


@pytest.mark.parametrize(("item", "reason"), WRONG, ids=by_id)
def test_a_wrong_answer_is_refused_for_its_own_reason(item, reason):
    message = check.exercise(item.id, item.wrong[reason])
    assert (message.kind, message.reason) == ("wrong", reason), message


@pytest.mark.parametrize("item", EXERCISES, ids=by_id)
def test_each_wrong_answer_gets_a_message_of_its_own(item):
    assert len(item.wrong) >= 3
    messages = [check.exercise(item, answer) for answer in item.wrong.values()]
    assert len({message.zh for message in messages}) == len({message.en for message in messages}) == len(messages)
