"""Test cases of code prompts: read, taken apart into what the candidate may see and what it may not, and compared."""
