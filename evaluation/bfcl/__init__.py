"""The Berkeley Function Calling Leaderboard, version 3, all 17 categories, by the official code."""

from __future__ import annotations

# Nothing is imported here: the checker's process imports this package too, and must not pull in torch.
