"""The checks of the exercises and predictions: one file for each notebook."""
