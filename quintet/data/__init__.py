"""Where prompts come from: files, data sets, procedural tasks, and the order in which they are drawn."""
