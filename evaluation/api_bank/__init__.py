"""API-Bank (arXiv 2304.08244) by two protocols: ToolRL's, and call accuracy on the original dialogues."""
