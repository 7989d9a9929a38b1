"""Algorithms as rows of a table: pure tensor functions, and the presets that compose them.

`presets` and `cells` are torch-free, so that a recipe is checked before anything heavy loads.
"""
