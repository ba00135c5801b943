"""MMLU-Pro (arXiv 2406.01574): ten-way multiple choice, five exemplars with a chain of thought."""
