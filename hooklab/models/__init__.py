"""Questions about a whole model, which the calls of `layers` help to answer.

Which file answers which question: `summary.py` runs a model once (`one_run.py`) for a table of its layers
(`summary_table.py`), `compare.py` finds where two models differ (`calls.py` notes the calls, `pairing.py` pairs them,
`comparison.py` shows them), `finite.py` stops at the first inf or NaN (`finite_flags.py` tells of it), `updates.py` says
how far each step moves the parameters (`moves.py` adds it up).
"""
