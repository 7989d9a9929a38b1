"""The `quintet` command: one file per subcommand, nothing heavy imported before a command runs."""
