"""The reward service: rule rewards, user functions, and what happens when one of them fails."""

from quintet.reward.errors import RewardError
from quintet.reward.loading import load_function

__all__ = ["RewardError", "load_function"]
