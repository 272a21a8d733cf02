"""The checks of the exercises: a module for a notebook.

A check compares with a computation of another form than the one that is asked for: differences in place of derivatives,
loops in place of products, the library's own.
"""
