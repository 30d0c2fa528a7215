"""Colours that read on white and on black, for pictures without a ground of their own.

Each has a contrast of 4.5 on #ffffff and 4.1 on #111111, the ground of JupyterLab's dark theme. No colour reaches 4.5 on both.
"""

__all__ = ["BLUE", "FIGURES", "GREEN", "GREY", "ORANGE", "RED"]

BLUE, ORANGE, GREEN, RED, GREY = "#4177c1", "#c0580a", "#338736", "#dc382f", "#767676"
# In matplotlib's order: C0 is blue and C7 is grey.
CYCLE = [BLUE, ORANGE, GREEN, RED, "#9062bb", "#a66659", "#d32ca0", GREY, "#7a7a16", "#10838f"]
# Settings of matplotlib.
FIGURES = dict.fromkeys(["figure.facecolor", "axes.facecolor", "savefig.facecolor"], "none")
FIGURES |= dict.fromkeys(["text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"], GREY)
FIGURES |= {"legend.edgecolor": GREY, "axes.prop_cycle": f"cycler(color={CYCLE})"}
