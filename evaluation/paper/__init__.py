"""The AWPO paper's figures (arXiv 2512.19126, v3), and tables in which they stand beside ours."""
