"""The StarTrail paper's numbers (arXiv 2407.00611): byte counts exactly, and its Figure 7 as predicted ratios."""
