"""Part 2 of the course: one layer of a model that you did not write.

Which file answers which question: `select.py` finds layers by name, `verbose.py` watches them run, `features.py` keeps
what they return, `activation_gradients.py` the gradient of it, `statistics.py` describes it in numbers (`streaming.py`
counts them), `finite.py` stops at the first inf or NaN (`finite_flags.py` tells of it).
counts them), `compare.py` finds where two models differ (`calls.py` notes the calls, `pairing.py` pairs them,
`comparison.py` shows them).
counts them). `summary.py` runs a model once (`one_run.py`) for a table of its layers (`summary_table.py`).
"""
