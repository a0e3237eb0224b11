"""The StarTrail paper's numbers (arXiv 2407.00611): exact byte counts, and its Figure 7 as predicted ratios."""
