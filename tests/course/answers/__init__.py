"""Answers to the exercises: wrong ones by the name of their refusal, and right ones. One file a notebook."""

import importlib
import pkgutil

FILES = [
    importlib.import_module(f"answers.{file.name}") for file in pkgutil.iter_modules(__path__) if file.name[0] == "n"
]
# By exercise and by the name of the refusal: what people really answer.
WRONG = {exercise: answers for file in FILES for exercise, answers in file.WRONG.items()}
# (exercise, refusal, answer): right only where it is easy.
ALSO_WRONG = [row for file in FILES for row in file.ALSO_WRONG]
# (exercise, answer): right in another way than the solution.
RIGHT = [row for file in FILES for row in file.RIGHT]
