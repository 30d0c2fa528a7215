"""Wrong answers that are a solution with something wrong around it."""

import torch


def gradients_off(solution):
    def answer(*given):
        torch.set_grad_enabled(False)
        return solution(*given)

    return answer


def clearing(solution):
    """Takes off all hooks, its own or not."""

    def answer(model, *given):
        try:
            return solution(model, *given)
        finally:
            for module in model.modules():
                module._forward_hooks.clear()

    return answer


def swallowing(solution, instead):
    def answer(*given):
        try:
            return solution(*given)
        except RuntimeError:
            return instead

    return answer


def modes_of(model):
    """A function that puts every module back into the mode that it is in now."""
    modes = [(module, module.training) for module in model.modules()]

    def restore(model):
        for module, training in modes:
            module.training = training

    return restore
