"""Rollout workers: prompts in, trajectories out. Start at `factory.make_rollout_worker`."""
