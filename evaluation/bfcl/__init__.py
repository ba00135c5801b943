"""The Berkeley Function Calling Leaderboard, version 3, single-turn Python categories, by the official checker."""

from __future__ import annotations

# Nothing is imported here: the checker's process imports this package too, and must not pull in torch.
