"""Runs files of golden vectors (see tests/data/golden) against quintet: `python -m tests.golden FOLDER`."""
