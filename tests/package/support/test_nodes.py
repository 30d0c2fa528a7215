"""Walks through autograd graphs."""

import torch

from hooklab._support.nodes import behind, node_name


def test_the_nodes_behind_another_are_given_once_however_many_ways_lead_there():
    y = x = torch.ones(2, requires_grad=True)
    for _ in range(60):  # 2 ** 60 ways
        y = y + y
    nodes = list(behind(y.grad_fn))
    assert nodes[0] is y.grad_fn
    assert len(nodes) == len(set(nodes)) == 61
    assert nodes[-1].variable is x


def test_operations_on_lists_have_their_names():
    (y,) = torch._foreach_exp([torch.ones(2, requires_grad=True)])
    assert node_name(y.grad_fn) == "ForeachExpBackward0"
