"""Part 2 of the course: one layer of a model that you did not write.

Which file answers which question: `select.py` finds layers by name, `verbose.py` watches them run, `features.py` keeps
what they return, `activation_gradients.py` the gradient of it, `statistics.py` describes it in numbers (`streaming.py`
counts them), `patch.py` puts something else in its place.
"""
