"""Where the modules live. `local`: all five in this process."""
