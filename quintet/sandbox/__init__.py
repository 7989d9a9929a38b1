"""Running untrusted code, for rewards and tool environments: one protocol, several back ends."""
